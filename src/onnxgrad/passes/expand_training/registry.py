"""expands(): the function that writes an operator with others; NOT_THERE: operators without one, and why."""

from collections.abc import Callable, Mapping
from typing import Any

import onnx_ir as ir

from onnxgrad.graph.broadcast import sum_to_shape
from onnxgrad.graph.builder import builder_at_work, op, schema_of
from onnxgrad.graph.node import NodeView
from onnxgrad.graph.tensor import Tensor
from onnxgrad.passes.expand_nodes import Writer
from onnxgrad.rules.registry import RULES

WRITERS: dict[str, Writer] = {}
IN_PLACE: dict[str, Mapping[int, int]] = {}  # outputs that onnxruntime-training writes where an input is

_OTHER_PROCESSES = "communicates with other processes; use `onnxgrad.Trainer` with MPI"
_PYTORCH = "calls PyTorch in the middle of a graph, for ORTModule"
_PIPELINES = "waits for other parts of a model that is trained in a pipeline"
_TENSORBOARD = "writes TensorBoard's format; `onnxgrad train --tensorboard` does"
_GIST = "packs activations in a format of its own, which no API of 1.19.2 writes"
NOT_THERE = {
    **dict.fromkeys(("NcclAllGather", "NcclAllReduce", "NcclReduceScatter", "AdasumAllReduce"), _OTHER_PROCESSES),
    **dict.fromkeys(("HorovodAllReduce", "HorovodBarrier", "MegatronF", "MegatronG"), _OTHER_PROCESSES),
    **dict.fromkeys(("PythonOp", "PythonOpGrad", "YieldOp", "TritonOp"), _PYTORCH),
    **dict.fromkeys(("Recv", "RecordEvent", "Send", "WaitEvent"), _PIPELINES),
    **dict.fromkeys(("SummaryHistogram", "SummaryMerge", "SummaryScalar", "SummaryText"), _TENSORBOARD),
    **dict.fromkeys(("GistPack8Encoder", "GistPack8Decoder", "GistPackMsfp15Encoder", "GistPackMsfp15Decoder"), _GIST),
}


def expands(*names: str, in_place: Mapping[int, int] | None = None) -> Callable[[Writer], Writer]:
    """Registers a function as the writer of operators; `in_place` names outputs, and inputs that they take over.

    What a function gets and gives, expand_nodes.py says.
    """

    def register(function: Writer) -> Writer:
        WRITERS.update(dict.fromkeys(names, function))
        IN_PLACE.update(dict.fromkeys(names, in_place) if in_place else {})
        return function

    return register


def gradients(forward: Tensor, g: Tensor, *wanted: str) -> list[Tensor]:
    """The gradients of inputs of the node that makes `forward`, by their names, as its rule has them."""
    builder, node = builder_at_work(), forward.value.producer()
    assert node is not None
    rule = RULES["", node.op_type]
    view = NodeView(builder, node, schema_of(node.op_type, "", builder.opsets), rule.names, [g], _none)
    found = []
    for name in wanted:
        part = rule.by_input[name](g, view)  # type: ignore[operator]
        found.append(sum_to_shape(part, getattr(view, name)) if rule.broadcast else part)
    return found


def _none(*_: Any) -> dict[ir.Value, Tensor]:
    raise NotImplementedError("a rule that is used here writes its gradient itself")


def scalar(x: Tensor) -> Tensor:
    """A single number without dimensions, so that it broadcasts to whatever it meets."""
    return x if x.shape == () else op.Reshape(x, [])


def where(condition: Tensor | None, new: Tensor, old: Tensor) -> Tensor:
    """The new one where a single truth value says so, or is left out."""
    return new if condition is None else op.Where(scalar(condition), new, old)
