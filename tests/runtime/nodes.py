"""One-node models of an operator, and the arrays to run them with."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from onnxgrad.tensor_types import DTYPES

ONNX_NAMES = {dtype: name for name, dtype in DTYPES.items()}
ELEMENT_TYPES = {  # ONNX's names of types, as TensorProto spells them
    name: getattr(TensorProto, name.upper()) for name in DTYPES if hasattr(TensorProto, name.upper())
}


def element_type(dtype: np.dtype[Any]) -> int:
    """TensorProto's number of a type."""
    return int(ELEMENT_TYPES[ONNX_NAMES[np.dtype(dtype)]])


def model_of(
    op: Any, inputs: Sequence[Any], attributes: dict[str, Any], outputs: Sequence[str] | None = None, name: str = "node"
) -> onnx.ModelProto:
    """A model of one node; None among the inputs is one left out, `outputs` names those it has."""
    given = list(inputs) + [None] * (len(op.inputs) - len(inputs))
    names = [entry.name if array is not None else "" for entry, array in zip(op.inputs, given, strict=True)]
    results = [o.name if outputs is None or o.name in outputs else "" for o in op.outputs]
    while names and not names[-1]:
        names.pop()
    while results and not results[-1]:
        results.pop()
    node = helper.make_node(
        op.name, names, results, name=name, domain=op.domain, **{k: v for k, v in attributes.items() if v is not None}
    )
    kinds = {e.name: element_type(a.dtype) for e, a in zip(op.inputs, given, strict=True) if a is not None}
    dtypes = op.output_dtypes([None if a is None else a.dtype for a in given])
    result_kinds = [TensorProto.INT64 if dtype is None else element_type(dtype) for dtype in dtypes]
    graph = helper.make_graph(
        [node],
        "one node",
        [helper.make_tensor_value_info(n, kinds[n], None) for n in names if n],
        [
            helper.make_tensor_value_info(o.name, kind, None)
            for o, kind in zip(op.outputs, result_kinds, strict=True)
            if o.name in results
        ],
    )
    imports = [helper.make_opsetid("", 21), helper.make_opsetid(op.domain, 1)]
    newest = TensorProto.FLOAT4E2M1 in kinds.values()  # a type that came with version 11
    return helper.make_model(graph, opset_imports=imports, ir_version=11 if newest else 10)


def feeds_of(op: Any, inputs: Sequence[Any]) -> dict[str, Any]:
    """What to run such a model with."""
    return {e.name: a for e, a in zip(op.inputs, inputs, strict=False) if a is not None}
