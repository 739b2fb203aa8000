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
    from onnxgrad import sources
    from onnxgrad.autodiff.check import check_gradient
    from onnxgrad.autodiff.differentiate import gradient, hvp
    from onnxgrad.edit.adapter_files import load_adapter, save_adapter
    from onnxgrad.edit.cut import cut
    from onnxgrad.edit.join import join
    from onnxgrad.edit.lora import lora
    from onnxgrad.edit.merge_lora import merge_lora
    from onnxgrad.edit.quantize import quantize
    from onnxgrad.edit.replace_head import replace_head
    from onnxgrad.passes.session import session
    from onnxgrad.rules import vjp
    from onnxgrad.train import callbacks, losses, metrics, optim, schedules
    from onnxgrad.train.batches import Batches
    from onnxgrad.train.step_file import export_step
    from onnxgrad.train.trainer import Trainer

_load_operators()
globals().update({_op.function_name: _op for _op in _OPERATORS.values()})  # those without an import above, too
__version__ = "0.1.0"
__all__ = [
    "Batches",
    "Trainer",
    "add_functions",
    "broadcast_gradient_args",
    "callbacks",
    "check_gradient",
    "cut",
    "export_step",
    "gather_elements_grad",
    "gather_grad",
    "get_num_threads",
    "gradient",
    "gru_grad",
    "gru_training",
    "hvp",
    "join",
    "load_adapter",
    "lora",
    "losses",
    "lstm_grad",
    "lstm_training",
    "merge_lora",
    "metrics",
    "optim",
    "quantize",
    "reference_ops",
    "register",
    "replace_head",
    "rnn_grad",
    "save_adapter",
    "schedules",
    "session",
    "set_num_threads",
    "slice_grad",
    "sources",
    "vjp",
]

_LATER = {
    "Batches": "onnxgrad.train.batches",
    "Trainer": "onnxgrad.train.trainer",
    "callbacks": "onnxgrad.train",
    "check_gradient": "onnxgrad.autodiff.check",
    "cut": "onnxgrad.edit.cut",
    "export_step": "onnxgrad.train.step_file",
    "gradient": "onnxgrad.autodiff.differentiate",
    "hvp": "onnxgrad.autodiff.differentiate",
    "join": "onnxgrad.edit.join",
    "load_adapter": "onnxgrad.edit.adapter_files",
    "lora": "onnxgrad.edit.lora",
    "losses": "onnxgrad.train",
    "merge_lora": "onnxgrad.edit.merge_lora",
    "metrics": "onnxgrad.train",
    "optim": "onnxgrad.train",
    "quantize": "onnxgrad.edit.quantize",
    "replace_head": "onnxgrad.edit.replace_head",
    "save_adapter": "onnxgrad.edit.adapter_files",
    "schedules": "onnxgrad.train",
    "session": "onnxgrad.passes.session",
    "sources": "onnxgrad",
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
