"""expand_training: operators of onnxruntime-training that we have no kernels for become standard ones, and ours.

So they run in stock onnxruntime, on the CPU and on CUDA, and it can fuse what they consist of. The files of this folder
have a function for each operator, whose signature is the operator's schema: what has no default is a required input,
`*` begins the attributes. A function returns the outputs.
"""

import importlib
import pkgutil
from collections.abc import Collection, Iterator

import onnx_ir as ir
from onnx import defs

from onnxgrad.domains import MICROSOFT, STRAYS, is_standard
from onnxgrad.graph.builder import Builder
from onnxgrad.graph.replace import take_place
from onnxgrad.op import operator_of
from onnxgrad.passes.draft import Draft
from onnxgrad.passes.expand_training.registry import IN_PLACE, WRITERS, results_of
from onnxgrad.passes.infer import infer
from onnxgrad.rules.registry import RULES

__all__ = ["WRITERS", "adopt_strays", "expand_before_gradient", "expand_training", "show_updates"]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")


def adopt_strays(draft: Draft) -> None:
    """Moves operators that onnxruntime-training has put among ONNX's own, which onnx refuses, to its other ones."""
    for node in draft.model.graph.all_nodes():
        if node.op_type in STRAYS and is_standard(node.domain):
            node.domain = MICROSOFT
            draft.graph.opset_imports.setdefault(MICROSOFT, 1)


def show_updates(draft: Draft) -> None:
    """Makes an output `<input>.updated` of what an operator would write into an input of the graph.

    Sessions do not write to what they are fed.
    """
    for node in draft.graph:
        updates = node.domain == MICROSOFT and node.attributes.get_int("training_mode", 1) != 0
        for k, source in IN_PLACE.get(node.op_type, {}).items() if updates else ():
            value = node.inputs[source] if source < len(node.inputs) else None
            if value is None or not value.is_graph_input():
                continue
            node.resize_outputs(max(len(node.outputs), k + 1))
            result = node.outputs[k]
            if not result.is_graph_output():
                result.name, result.type, result.shape = f"{value.name}.updated", value.type, value.shape
                draft.graph.outputs.append(result)


def expand_training(draft: Draft) -> None:
    """Writes other operators in place of those that have a writer here."""
    _expand_all(draft, WRITERS)


def expand_before_gradient(draft: Draft) -> None:
    """Those of them that have no rule, which would say more than the rules of what they consist of."""
    _expand_all(draft, {name for name in WRITERS if (MICROSOFT, name) not in RULES or operator_of(MICROSOFT, name)})


def _expand_all(draft: Draft, names: Collection[str]) -> None:
    def is_old(node: ir.Node) -> bool:
        if node.domain != MICROSOFT or node.op_type not in names:
            return False
        # Ours have no results of another type.
        return operator_of(MICROSOFT, node.op_type) is None or "output_type" in node.attributes

    if not any(is_old(node) for node in draft.graph.all_nodes()):
        return
    infer(draft)
    builder = Builder(draft.graph)
    for node in list(draft.graph):
        for inner in filter(is_old, _within(node)):
            raise ValueError(
                f"{draft.caller}: {inner.op_type} (node {inner.name!r}) is in a subgraph of {node.op_type} (node "
                f"{node.name!r}), expected such operators in the main graph alone"
            )
        if is_old(node):
            _expand(builder, node, draft.caller)
        elif any(v.type is None for v in node.outputs) and _is_plain(node):
            builder.infer_again(node)  # what it reads was not known before
    draft.graph.sort()  # what was written came last


def _within(node: ir.Node) -> Iterator[ir.Node]:
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            yield from attribute.value.all_nodes()


def _is_plain(node: ir.Node) -> bool:
    """Whether types are all that its results depend on."""
    has_graph = any(a.type == ir.AttributeType.GRAPH for a in node.attributes.values())
    known = all(v is None or isinstance(v.type, ir.TensorType) for v in node.inputs)
    return known and not has_graph and defs.has(node.op_type, "" if is_standard(node.domain) else node.domain)


def _expand(builder: Builder, node: ir.Node, caller: str) -> None:
    with builder.at_work(str(node.name)):
        try:
            results = results_of(builder, node)
        except ValueError as error:
            raise ValueError(f"{caller}: {node.op_type} (node {node.name!r}): {error}") from None
    if results is None:
        return  # it stays
    for old, new in zip(node.outputs, results, strict=False):
        if not old.name or new is None:
            continue
        value = new.value
        if value.producer() is None or value.is_graph_output() or value.name in builder.graph.initializers:
            value = builder.copy(new).value
        take_place(value, old)
    builder.graph.remove(node, safe=True)
