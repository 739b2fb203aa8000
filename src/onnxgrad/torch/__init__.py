"""ONNX inside PyTorch: models as modules, modules run by onnxruntime, and some of ONNX's operators as functions."""

from onnxgrad.torch.functions import gather, gather_elements, gru, slice
from onnxgrad.torch.module import Module
from onnxgrad.torch.wrap import wrap

__all__ = ["Module", "gather", "gather_elements", "gru", "slice", "wrap"]
