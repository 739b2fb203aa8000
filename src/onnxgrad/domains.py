"""The domains that operators live in."""

MICROSOFT = "com.microsoft"  # onnxruntime's, and so that of onnxruntime-training's operators
ML = "ai.onnx.ml"  # operators of classical models, as skl2onnx writes them
PREVIEW, PREVIEW_TRAINING = "ai.onnx.preview", "ai.onnx.preview.training"  # what ONNX tries out
OWN = "onnxgrad"  # operators that onnxruntime-training does not have, or has with another contract
OF_ONNXRUNTIME = "onnxgrad.onnxruntime"  # where its additions to ONNX's own are while onnx looks at the others

# Operators of onnxruntime-training that it has put into ONNX's domain.
STRAYS = {"AveragePoolGrad", "MaxPoolGrad", "SparseSoftmaxCrossEntropy", "SparseSoftmaxCrossEntropyGrad"}


def is_standard(domain: str) -> bool:
    """Whether it is ONNX's own domain, under either of its names."""
    return domain in ("", "ai.onnx")
