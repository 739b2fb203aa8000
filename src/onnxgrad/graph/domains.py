"""The domains that operators live in."""

STANDARD = ""  # ONNX's own; "ai.onnx" is the same
MICROSOFT = "com.microsoft"  # onnxruntime's, with the operators of onnxruntime-training


def domain_of(name: str) -> str:
    """The domain under the one of its names that we use."""
    return STANDARD if name == "ai.onnx" else name
