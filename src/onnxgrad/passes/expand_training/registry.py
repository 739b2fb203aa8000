"""expands(): the function that writes an operator with others; NOT_THERE: operators without one, and why."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.broadcast import sum_to_shape
from onnxgrad.graph.builder import Builder, builder_at_work, op, schema_of
from onnxgrad.graph.node import NodeView
from onnxgrad.graph.tensor import Tensor
from onnxgrad.rules.registry import RULES

Writer = Callable[..., Any]
WRITERS: dict[str, Writer] = {}
IN_PLACE: dict[str, Mapping[int, int]] = {}  # outputs that onnxruntime-training writes where an input is

_OTHER_PROCESSES = "speaks to other processes; `onnxgrad.Trainer` does so by MPI"
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

    A parameter `node` gets the node itself. A function that returns None leaves the node as it is.
    """

    def register(function: Writer) -> Writer:
        WRITERS.update(dict.fromkeys(names, function))
        IN_PLACE.update(dict.fromkeys(names, in_place) if in_place else {})
        return function

    return register


def results_of(builder: Builder, node: ir.Node) -> list[Tensor | None] | None:
    """What a node's writer gives for its outputs."""
    function = WRITERS[node.op_type]
    parameters = list(inspect.signature(function).parameters.values())
    inputs = [None if v is None else builder.tensor(v) for v in node.inputs]
    _expect_inputs(parameters, inputs)
    made = function(*inputs, **_settings(parameters, node))
    return None if made is None else [made] if isinstance(made, Tensor) else list(made)


def _expect_inputs(parameters: list[inspect.Parameter], inputs: list[Tensor | None]) -> None:
    named = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    for k, parameter in enumerate(named):
        if parameter.default is parameter.empty and (k >= len(inputs) or inputs[k] is None):
            raise ValueError(f"the input {parameter.name} is missing")
    if len(inputs) > len(named) and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        raise ValueError(f"it has {len(inputs)} inputs, expected at most {len(named)}")


def _settings(parameters: list[inspect.Parameter], node: ir.Node) -> dict[str, Any]:
    """The attributes that a writer takes: those after `*`, or all of them."""
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    keywords = {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY}
    found: dict[str, Any] = {  # attributes hold float32, and defaults do not
        n: float(np.float32(p.default)) for n, p in keywords.items() if isinstance(p.default, float)
    }
    found |= {
        name: list(a.value) if isinstance(a.value, tuple) else a.value
        for name, a in node.attributes.items()
        if takes_all or name in keywords
    }
    if "node" in keywords:
        found["node"] = node
    missing = next((n for n, p in keywords.items() if n not in found and p.default is p.empty), None)
    if missing is not None:
        raise ValueError(f"the attribute {missing} is missing")
    return found


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
