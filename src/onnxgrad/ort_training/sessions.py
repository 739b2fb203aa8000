"""open_old_graphs(): onnxruntime.InferenceSession for graphs with operators of onnxruntime-training."""

import functools
import os
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from onnxgrad.op import operator_of
from onnxgrad.passes.session import expanded, foreign_operators, nodes_of
from onnxgrad.runtime.register import register
from onnxgrad.runtime.session import IMPORT


def open_old_graphs(kind: Any) -> None:
    """Has a class of sessions open them; other models, and those that cannot be read, are left to it as they are."""
    original = kind.__init__
    if hasattr(original, "__wrapped__"):  # it does already
        return

    @functools.wraps(original)
    def opened(self: Any, path_or_bytes: Any, sess_options: Any = None, *args: Any, **kwargs: Any) -> None:
        model = _old_graph(path_or_bytes)
        if model is not None:
            path_or_bytes, sess_options = model.SerializeToString() + IMPORT, register(sess_options)
        original(self, path_or_bytes, sess_options, *args, **kwargs)

    kind.__init__ = opened


def _old_graph(given: Any) -> onnx.ModelProto | None:
    """The model written out for stock onnxruntime, with its weights, if it has such operators."""
    try:
        if isinstance(given, (str, os.PathLike)):
            model = onnx.load(Path(given), load_external_data=False)
        else:
            model = onnx.load_from_string(given)
    except Exception:  # of protobuf, or no model at all: onnxruntime says what is wrong
        return None
    ours = any(operator_of(node.domain, node.op_type) is not None for node in nodes_of(model))
    foreign = foreign_operators(model)
    if not ours and not foreign:
        return None
    if isinstance(given, (str, os.PathLike)):
        onnx.load_external_data_for_model(model, str(Path(given).absolute().parent))
    found = expanded(model, foreign) if foreign else model
    return ir.to_proto(found) if isinstance(found, ir.Model) else found if ours else None
