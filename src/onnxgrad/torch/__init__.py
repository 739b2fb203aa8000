"""ONNX inside PyTorch: models as modules, modules run by onnxruntime, and some of ONNX's operators as functions."""

try:
    from onnxgrad.torch.functions import gather, gather_elements, gru, slice
    from onnxgrad.torch.module import Module
    from onnxgrad.torch.wrap import wrap
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ImportError(f"onnxgrad.torch needs torch: pip install 'onnxgrad[torch]' ({error})") from None

__all__ = ["Module", "gather", "gather_elements", "gru", "slice", "wrap"]
