"""Validity: what onnx has against a model, in one line."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx

UNDECLARED = "is required but missing"
DEPRECATED = "is deprecated in domain_version"
# What onnx says, and what it means; where in its own source that was said is left out.
MEANINGS: list[tuple[str, str | Callable[[re.Match[str]], str]]] = [
    (r"\S+\.(?:h|cc|cpp):\d+: \S+: (?:Assertion `.*?` failed: )?", ""),
    (r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", ""),
    (r" ?==> Context: Bad node spec for node\. Name: (.*?) ?OpType: ?(\w*).*", lambda m: _node(m[1], m[2])),
    (r"No Op registered for \w+ with domain_version of (\d+)", r"opset \1 has no such operator"),
    (r"Unrecognized attribute: (\w+) for operator \w+", r"it has no attribute '\1'"),
    (
        r"Graph must be in single static assignment \(SSA\) form, however (.*) has been used as .* multiple times\.",
        r"the name \1 is given more than once",
    ),
    (
        r"Could not find an implementation for (\w+)\(\d+\) node with name '(.*?)'",
        lambda m: f"it has no kernel for the types{_node(m[2], m[1])}: export the model in float32",
    ),
    (
        r"Nodes in a graph must be topologically sorted, however input (.*) of node: name: ?(.*?) ?OpType: (\w+) is .*",
        lambda m: f"there is no {m[1]}, which is an input{_node(m[2], m[3])}",
    ),
]  # fmt: skip


def objection(model: onnx.ModelProto | Path) -> str | None:
    """What onnx.checker has against a model; the types and shapes of outputs need not be declared."""
    try:
        onnx.checker.check_model(model if isinstance(model, onnx.ModelProto) else str(model))
    except Exception as error:  # of the checker, or of protobuf
        if DEPRECATED in str(error):
            return None  # files that are in use have such operators, GroupNormalization of opset 18 for one
        if UNDECLARED not in str(error):
            return one_line(error)
        copy = onnx.ModelProto()
        copy.CopyFrom(onnx.load(model, load_external_data=False) if isinstance(model, Path) else model)
        return objection(copy) if _declare(copy.graph) else one_line(error)
    return None


def _declare(graph: onnx.GraphProto) -> bool:
    """Gives values that lack a type or a shape one, which the checker does not compare; whether there were any."""
    changed = False
    for info in (*graph.input, *graph.output):
        kind = info.type.tensor_type
        if info.type.WhichOneof("value") in (None, "tensor_type") and not (kind.elem_type and kind.HasField("shape")):
            kind.elem_type = kind.elem_type or onnx.TensorProto.FLOAT
            kind.shape.SetInParent()
            changed = True
    return changed


def one_line(error: Exception) -> str:
    """An error of onnx, or of what reads its files, in one line."""
    text = " ".join(str(_cause(error)).split())
    for pattern, meaning in MEANINGS:
        text = re.sub(pattern, meaning, text)
    return text.strip() or type(error).__name__


def _node(name: str, operator: str) -> str:
    return f" ({operator}, node {name!r})" if name else f" ({operator})"


def _cause(error: Any) -> Any:
    """What an error was raised from: onnx_ir wraps one for every level of a file."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error
