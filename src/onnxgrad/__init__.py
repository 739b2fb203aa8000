"""Gradients for ONNX: the training operators of onnxruntime, for stock onnxruntime and NumPy."""

from onnxgrad.functions import add_functions
from onnxgrad.op import discover as _discover
from onnxgrad.ops.broadcast import broadcast_gradient_args
from onnxgrad.ops.gather import gather_grad
from onnxgrad.ops.gather_elements import gather_elements_grad
from onnxgrad.ops.gru import gru_grad, gru_training
from onnxgrad.ops.slice import slice_grad
from onnxgrad.runtime.register import register
from onnxgrad.schema import reference_ops
from onnxgrad.threads import get_num_threads, set_num_threads

_discover()
__version__ = "0.1.0"
__all__ = [
    "add_functions",
    "broadcast_gradient_args",
    "gather_elements_grad",
    "gather_grad",
    "get_num_threads",
    "gru_grad",
    "gru_training",
    "reference_ops",
    "register",
    "set_num_threads",
    "slice_grad",
]
