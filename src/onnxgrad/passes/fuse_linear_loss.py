"""Fuses a linear layer with many classes and its cross entropy into one operator, which never stores all logits.

For the last layer of a language model: GPT-2's logits of 8 · 512 tokens are 50,257 for each, 824 MB in float32, and as
much again for their logarithms and for their gradients.
"""

from collections.abc import Collection
from typing import NamedTuple

import onnx_ir as ir

from onnxgrad.graph.builder import Builder
from onnxgrad.graph.node import is_transpose, needed_for, permutation
from onnxgrad.graph.replace import replace_node
from onnxgrad.graph.tensor import dims_of
from onnxgrad.ops.softmax_cross_entropy_loss import NEVER_COUNTED
from onnxgrad.passes.draft import Draft
from onnxgrad.schema import OWN, is_standard

FEWEST = 8192  # classes that are worth it


class _Linear(NamedTuple):
    """X · W + bias, with W transposed maybe, and the Slices that follow it."""

    x: ir.Value
    w: ir.Value
    is_transposed: bool
    bias: ir.Value | None
    slices: list[ir.Node]


def fuse_linear_loss(
    draft: Draft, results: Collection[str], scale: ir.Value | None = None, precision: str = "float32"
) -> int:
    """Puts LinearCrossEntropy in place of each SoftmaxCrossEntropyLoss of a linear layer; how many.

    `results` are the outputs that count: logits that only others need are not computed. Gradients are multiplied with
    `scale` before they are rounded, and what is multiplied is rounded to `precision`.
    """
    graph = draft.graph
    builder = Builder(graph)
    needed = needed_for(graph, {v for v in graph.outputs if v.name in results})
    losses = [n for n in graph if n in needed and n.op_type == "SoftmaxCrossEntropyLoss" and is_standard(n.domain)]
    count = 0
    for node in losses:
        found = _Search(builder, needed, results).linear(node)
        if found is not None:
            _replace(builder, node, found, scale, precision)
            count += 1
    return count


class _Search:
    """Looks for the linear layer before a loss."""

    def __init__(self, builder: Builder, needed: set[ir.Node], results: Collection[str]) -> None:
        self._builder, self._needed, self._results = builder, needed, results

    def _maker(self, value: ir.Value) -> ir.Node | None:
        """The node that a value comes from, if one node alone reads it."""
        readers = [user for user, _ in value.uses() if user in self._needed or user.graph is not self._builder.graph]
        return value.producer() if len(readers) == 1 and value.name not in self._results else None

    def linear(self, loss: ir.Node) -> _Linear | None:
        scores = loss.inputs[0]
        if scores is None or loss.attributes.get_string("reduction", "mean") not in ("mean", "sum"):
            return None
        if len(loss.outputs) > 1 and (loss.outputs[1].uses() or loss.outputs[1].is_graph_output()):
            return None
        dims = dims_of(scores)
        if dims is None or len(dims) < 2 or not isinstance(dims[1], int) or dims[1] < FEWEST:
            return None
        value: ir.Value | None = scores
        if len(dims) > 2:  # a Transpose has brought the classes to the front
            node = self._maker(scores)
            last = len(dims) - 1
            if node is None or not is_transpose(node) or permutation(node) != [0, last, *range(1, last)]:
                return None
            value = node.inputs[0]
        return None if value is None else self._before(value, dims[1], scores.dtype)

    def _before(self, value: ir.Value, classes: int, dtype: ir.DataType | None) -> _Linear | None:
        """The linear layer that a value comes from, whose rows keep their order."""
        slices: list[ir.Node] = []
        bias: ir.Value | None = None
        while True:
            node = self._maker(value)
            first, *rest = (None,) if node is None else node.inputs
            dims = None if first is None else dims_of(first)
            if node is None or not is_standard(node.domain) or dims is None:
                return None
            if node.op_type in ("MatMul", "Gemm"):
                return self._product(node, bias, slices, classes, dtype)
            if node.op_type == "Slice" and self._keeps_last(node, len(dims)):
                slices.insert(0, node)
            elif node.op_type == "Add" and bias is None:
                other = rest[0]
                if dims == (classes,):
                    first, other = other, first
                if other is None or dims_of(other) != (classes,):
                    return None
                bias = other
            elif node.op_type == "Reshape":
                if slices or dims[-1] != classes or (dims_of(node.outputs[0]) or (None,))[-1] != classes:
                    return None
            elif node.op_type not in ("Cast", "Identity"):
                return None
            assert first is not None
            value = first

    def _keeps_last(self, node: ir.Node, rank: int) -> bool:
        """Whether a Slice takes all numbers along the last axis."""
        axes = node.inputs[3] if len(node.inputs) > 3 else None
        known = None if axes is None else self._builder.constant_of(axes)
        return known is not None and all(int(axis) % rank != rank - 1 for axis in known)

    def _product(
        self, node: ir.Node, bias: ir.Value | None, slices: list[ir.Node], classes: int, dtype: ir.DataType | None
    ) -> _Linear | None:
        x, w, *rest = node.inputs
        added = rest[0] if rest else None
        given = {name: attribute.value for name, attribute in node.attributes.items()}
        if x is None or w is None or given.get("transA", 0) or given.get("alpha", 1) != 1:
            return None
        if added is not None:
            if bias is not None or given.get("beta", 1) != 1 or dims_of(added) != (classes,):
                return None
            bias = added
        if len(dims_of(x) or ()) < 2 or len(dims_of(w) or ()) != 2:
            return None
        w, flips = _stored(w, dtype)
        bias = None if bias is None else _stored(bias, dtype)[0]
        if w.dtype != dtype or (bias is not None and bias.dtype != dtype):
            return None
        return _Linear(x, w, flips != bool(given.get("transB", 0)), bias, slices)


def _stored(value: ir.Value, dtype: ir.DataType | None) -> tuple[ir.Value, bool]:
    """A matrix before Transposes and before Casts from a type, and whether it is transposed."""
    is_transposed = False
    while (node := value.producer()) is not None and node.inputs[0] is not None:
        if is_transpose(node) and permutation(node) == [1, 0]:
            is_transposed = not is_transposed
        elif node.op_type != "Cast" or not is_standard(node.domain) or value.dtype == dtype:
            break
        value = node.inputs[0]
    return value, is_transposed


def _replace(builder: Builder, loss: ir.Node, found: _Linear, scale: ir.Value | None, precision: str) -> None:
    graph, x = builder.graph, found.x
    for node in found.slices:
        again = ir.Node("", "Slice", [x, *node.inputs[1:]], num_outputs=1, name=f"{node.name}_of_rows")
        graph.insert_before(loss, again)
        again.outputs[0].name = builder.fresh_value_name(f"{again.name}_output_0")
        again.outputs[0].type = x.type
        builder.infer_again(again)
        x = again.outputs[0]
    attributes = [
        ir.AttrInt64("transW", int(found.is_transposed)),
        ir.AttrString("reduction", loss.attributes.get_string("reduction", "mean")),
        ir.AttrInt64("ignore_index", loss.attributes.get_int("ignore_index", NEVER_COUNTED)),
        ir.AttrString("precision", precision),
    ]
    _, labels, *weights = loss.inputs
    factor = None if scale is None or scale.dtype != found.w.dtype else scale
    inputs = [x, found.w, labels, found.bias, weights[0] if weights else None, factor]
    fused = ir.Node(OWN, "LinearCrossEntropy", inputs, attributes, num_outputs=1, name=f"{loss.name}_linear")
    replace_node(loss, fused)
