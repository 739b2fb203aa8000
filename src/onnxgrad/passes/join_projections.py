"""Queries, keys and values from one product: merges three linear layers that read the same value.

A GPU computes one large product in less time than three, and attention then reads all three from one tensor. The
weights stay apart: they are put together in every step.
"""

from collections.abc import Container
from typing import NamedTuple

import onnx_ir as ir

from onnxgrad.graph.builder import Builder, op
from onnxgrad.graph.node import is_transpose, permutation
from onnxgrad.graph.replace import take_place
from onnxgrad.graph.tensor import dims_of
from onnxgrad.passes.draft import Draft
from onnxgrad.passes.pack_attention import values_before
from onnxgrad.schema import OWN, is_standard


class _Projection(NamedTuple):
    """A linear layer: what it gives and reads, its weight as it is stored, whether that is transposed, and its bias."""

    result: ir.Value
    x: ir.Value
    weight: ir.Value
    is_transposed: bool
    bias: ir.Value | None
    product: ir.Node


def join_projections(draft: Draft, trained: Container[str | None]) -> int:
    """Joins the projections before each FlashAttention if they are alike; how often. `trained` are names of weights."""
    builder = Builder(draft.graph)
    count = 0
    for node in [n for n in draft.graph if n.op_type == "FlashAttention" and n.domain == OWN]:
        found = [_projection(builder, value) for value in node.inputs[:3]]
        alike = [p for p in found if p is not None]
        if len(alike) == 3 and _are_alike(alike, trained):
            _join(builder, alike)
            count += 1
    if count:
        draft.graph.sort()
    return count


def _projection(builder: Builder, value: ir.Value | None) -> _Projection | None:
    """The one whose result a value is a view of."""
    *_, result = values_before(builder, value)
    node, bias = result.producer(), None
    if node is not None and is_standard(node.domain) and node.op_type == "Add":
        vectors = [v for v in node.inputs if v is not None and v.is_initializer() and len(dims_of(v) or ()) == 1]
        others = [v for v in node.inputs if v not in vectors]
        if len(vectors) != 1 or len(others) != 1 or others[0] is None or len(others[0].uses()) != 1:
            return None
        bias, node = vectors[0], others[0].producer()
    if node is None or not is_standard(node.domain) or node.op_type not in ("MatMul", "Gemm"):
        return None
    (x, weight), *rest = node.inputs[:2], *node.inputs[2:]
    if node.op_type == "Gemm":
        plain = {"transA": 0, "alpha": 1.0, "beta": 1.0}
        if any(a.value != plain[name] for name, a in node.attributes.items() if name in plain) or bias is not None:
            return None
        bias = rest[0] if rest else None
    is_transposed = bool(node.attributes.get_int("transB", 0)) if node.op_type == "Gemm" else False
    if weight is not None and is_transpose(maker := weight.producer()) and maker is not None:
        if permutation(maker) != [1, 0]:
            return None
        weight, is_transposed = maker.inputs[0], not is_transposed
    dims = () if weight is None else dims_of(weight) or ()
    if x is None or weight is None or not weight.is_initializer() or len(dims) != 2:
        return None
    if bias is not None and dims_of(bias) != (dims[0 if is_transposed else 1],):  # it is broadcast
        return None
    if result.is_graph_output() or node.outputs[0].is_graph_output():
        return None
    return _Projection(result, x, weight, is_transposed, bias, node)


def _are_alike(found: list[_Projection], trained: Container[str | None]) -> bool:
    if len({p.result for p in found}) < 3 or len({p.weight for p in found}) < 3:
        return False
    kinds = {
        (
            p.x, p.is_transposed, dims_of(p.weight), p.weight.dtype, p.weight.name in trained,
            None if p.bias is None else (dims_of(p.bias), p.bias.dtype, p.bias.name in trained),
        )
        for p in found
    }  # fmt: skip
    return len(kinds) == 1


def _join(builder: Builder, found: list[_Projection]) -> None:
    first = found[0]
    with builder.in_place_of(first.product):
        weights = [builder.tensor(p.weight) for p in found]
        w = op.Concat(*weights, axis=0 if first.is_transposed else 1)
        y = builder.tensor(first.x) @ (op.Transpose(w, perm=[1, 0]) if first.is_transposed else w)
        biases = [builder.tensor(p.bias) for p in found if p.bias is not None]
        if biases:
            y = y + op.Concat(*biases, axis=0)
        parts = builder.node("Split", [y], {"axis": len(dims_of(first.result) or ()) - 1, "num_outputs": 3}, outputs=3)
    for part, projection in zip(parts, found, strict=True):
        take_place(part.value, projection.result)
