"""kernels_of(): the kernels that the nodes of a session will launch for a batch, before any of them runs."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import onnx_ir as ir
from onnx_ir.convenience import get_const_tensor

from onnxgrad.cpu.core.ahead import launched
from onnxgrad.cpu.core.compilers import Wanted
from onnxgrad.graph.dimension import evaluated
from onnxgrad.runtime import kernels
from onnxgrad.tensor_types import Array


def kernels_of(graph: ir.Graph, batch: Mapping[str, Any]) -> list[Wanted]:
    """As far as the graph knows shapes, in the order of its nodes; a node that is left out is compiled for in time."""
    from onnxgrad.runtime.plan import record_calls

    sizes, nodes = _sizes(graph, batch), kernels.nodes()
    found: list[Wanted] = []
    for node in graph:
        known = nodes.get(node.name or "")
        if known is None or known.op.name != node.op_type or known.op.on_host_only:
            continue
        given = [*node.inputs, *[None] * (len(known.op.inputs) - len(node.inputs))]
        on_host = [declared.constraint.on_host for declared in known.op.inputs]
        shapes = [None if value is None else _shape(value, sizes) for value in given]
        contents = [_content(value) if host else None for value, host in zip(given, on_host, strict=True)]
        told = [content if host else shape for content, shape, host in zip(contents, shapes, on_host, strict=True)]
        if any(value is not None and of_it is None for value, of_it in zip(given, told, strict=True)):
            continue
        with suppress(Exception):  # a guess must not end a run: whatever is wrong, the node raises when it runs
            found += launched(record_calls(known, shapes, contents)[0])
    return found


def _sizes(graph: ir.Graph, batch: Mapping[str, Any]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for value in graph.inputs:
        array = batch.get(str(value.name))
        if array is not None and value.shape is not None:
            given = array.shape() if hasattr(array, "_ortvalue") else array.shape  # of onnxruntime's OrtValue
            named = zip(value.shape, given, strict=True)
            sizes |= {str(dim.value): size for dim, size in named if isinstance(dim, ir.SymbolicDim)}
    return sizes


def _shape(value: ir.Value, sizes: Mapping[str, int]) -> tuple[int, ...] | None:
    """The shape of a value in this run, if the graph says it."""
    dims = [
        dim if isinstance(dim, int) else None if dim.value is None else evaluated(dim.value, sizes)
        for dim in value.shape or ()
    ]
    return None if value.shape is None or None in dims else tuple(dim for dim in dims if dim is not None)


def _content(value: ir.Value | None) -> Array | None:
    tensor = None if value is None else get_const_tensor(value)
    return None if tensor is None else tensor.numpy()
