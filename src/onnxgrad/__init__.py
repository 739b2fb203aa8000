"""Training and gradients of ONNX models in stock onnxruntime; the operators of onnxruntime-training for arrays."""

from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from onnxgrad.cpu.core.threads import get_num_threads, set_num_threads
from onnxgrad.functions.add_functions import add_functions
from onnxgrad.op import OPERATORS as _OPERATORS
from onnxgrad.op import reference_ops
from onnxgrad.ops import load_operators as _load_operators
from onnxgrad.ops.broadcast import broadcast_gradient_args
from onnxgrad.ops.gather import gather_grad
from onnxgrad.ops.gather_elements import gather_elements_grad
from onnxgrad.ops.gru import gru_grad, gru_training
from onnxgrad.ops.lstm import lstm_grad, lstm_training
from onnxgrad.ops.rnn import rnn_grad
from onnxgrad.ops.slice import slice_grad
from onnxgrad.runtime.register import register

if _TYPE_CHECKING:
    from onnxgrad.autodiff.check import check_gradient
    from onnxgrad.autodiff.differentiate import gradient, hvp
    from onnxgrad.edit.quantize import quantize
    from onnxgrad.passes.session import session
    from onnxgrad.rules import vjp
    from onnxgrad.train import losses, metrics, optim, schedules
    from onnxgrad.train.batches import Batches
    from onnxgrad.train.trainer import Trainer

_load_operators()
globals().update({_op.function_name: _op for _op in _OPERATORS.values()})  # those without an import above, too
__version__ = "0.1.0"
__all__ = [
    "Batches",
    "Trainer",
    "add_functions",
    "broadcast_gradient_args",
    "check_gradient",
    "gather_elements_grad",
    "gather_grad",
    "get_num_threads",
    "gradient",
    "gru_grad",
    "gru_training",
    "hvp",
    "losses",
    "lstm_grad",
    "lstm_training",
    "metrics",
    "optim",
    "quantize",
    "reference_ops",
    "register",
    "rnn_grad",
    "schedules",
    "session",
    "set_num_threads",
    "slice_grad",
    "vjp",
]

_LATER = {
    "Batches": "onnxgrad.train.batches",
    "Trainer": "onnxgrad.train.trainer",
    "check_gradient": "onnxgrad.autodiff.check",
    "gradient": "onnxgrad.autodiff.differentiate",
    "hvp": "onnxgrad.autodiff.differentiate",
    "losses": "onnxgrad.train",
    "metrics": "onnxgrad.train",
    "optim": "onnxgrad.train",
    "quantize": "onnxgrad.edit.quantize",
    "schedules": "onnxgrad.train",
    "session": "onnxgrad.passes.session",
    "vjp": "onnxgrad.rules",
}  # what needs onnx_ir, which takes its time


def __getattr__(name: str) -> _Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    module = importlib.import_module(_LATER[name])
    value = getattr(module, name, None) or importlib.import_module(f"{_LATER[name]}.{name}")
    globals()[name] = value
    return value
