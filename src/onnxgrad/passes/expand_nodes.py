"""expand_nodes(): replaces operators that have a writer by other operators.

A writer is a function whose signature is the operator's schema: what can be None is an optional input, `*` begins the
attributes. It returns the outputs, None for one that nobody needs; a function that returns None leaves the node as it
is. A parameter `node` gets the node itself.
"""

import inspect
import itertools
from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any, get_args

import numpy as np
import onnx_ir as ir
from onnx import defs

from onnxgrad.graph.builder import Builder
from onnxgrad.graph.node import subgraphs
from onnxgrad.graph.replace import take_place
from onnxgrad.graph.tensor import Tensor
from onnxgrad.passes.draft import Draft
from onnxgrad.passes.infer import infer
from onnxgrad.schema import is_standard

Writer = Callable[..., Any]


def expand_nodes(draft: Draft, writers: Mapping[str, Writer], is_old: Callable[[ir.Node], bool]) -> None:
    """Lets the writers of nodes that `is_old` is true of write what takes their place, in subgraphs too."""
    if not any(is_old(node) for node in draft.graph.all_nodes()):
        return
    infer(draft)
    _expand_all(Builder(draft.graph), draft, writers, is_old)
    draft.graph.sort()  # what was written came last


def _expand_all(
    builder: Builder, draft: Draft, writers: Mapping[str, Writer], is_old: Callable[[ir.Node], bool]
) -> None:
    for node in list(builder.graph):
        for graph in subgraphs(node):
            _expand_all(Builder(graph, builder), draft, writers, is_old)
        if is_old(node):
            _expand(builder, node, writers[node.op_type], draft.caller)
        elif any(v.type is None for v in node.outputs) and _is_plain(node):
            builder.infer_again(node)  # what it reads was not known before


def _is_plain(node: ir.Node) -> bool:
    """Whether types are all that its results depend on."""
    known = all(v is None or isinstance(v.type, ir.TensorType) for v in node.inputs)
    return known and not subgraphs(node) and defs.has(node.op_type, "" if is_standard(node.domain) else node.domain)


def _expand(builder: Builder, node: ir.Node, writer: Writer, caller: str) -> None:
    with builder.at_work(str(node.name)):
        try:
            results = _results_of(builder, node, writer)
        except ValueError as error:
            raise ValueError(f"{caller}: {node.op_type} (node {node.name!r}): {error}") from None
    if results is None:
        return  # it stays
    for old, new in itertools.zip_longest(node.outputs, results[: len(node.outputs)]):
        if new is None and (old.uses() or old.is_graph_output()):
            raise ValueError(
                f"{caller}: {node.op_type} (node {node.name!r}): onnxgrad cannot expand its output {old.name!r}"
            )
        if not old.name or new is None:
            continue
        take_place(builder.apart(new).value, old)
    builder.graph.remove(node, safe=True)


def _results_of(builder: Builder, node: ir.Node, function: Writer) -> list[Tensor | None] | None:
    """What a node's writer gives for its outputs."""
    parameters = list(inspect.signature(function).parameters.values())
    inputs = [None if v is None else builder.tensor(v) for v in node.inputs]
    _expect_inputs(parameters, inputs)
    made = function(*inputs, **_settings(parameters, node))
    return None if made is None else [made] if isinstance(made, Tensor) else list(made)


def _expect_inputs(parameters: list[inspect.Parameter], inputs: list[Tensor | None]) -> None:
    named = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    for k, parameter in enumerate(named):
        required = parameter.default is parameter.empty and NoneType not in get_args(parameter.annotation)
        if required and (k >= len(inputs) or inputs[k] is None):
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
