"""Fuses chains of operators: into Gelu, which exporters write with Erf before opset 20.

One node instead of five in each direction: its gradient is one pass.
"""

import math

import onnx_ir as ir

from onnxgrad.graph.builder import Builder
from onnxgrad.graph.node import only_user
from onnxgrad.graph.replace import replace_node
from onnxgrad.passes.draft import Draft
from onnxgrad.schema import MICROSOFT, is_standard

OPSET_WITH_GELU = 20
NEAR = 1e-3  # how near a constant must be: that of a half model has three digits


def fuse_gelu(draft: Draft) -> int:
    """Replaces x · ½ · (1 + erf(x / √2)), in whatever order it is multiplied; how many were found."""
    builder = Builder(draft.graph)
    found = 0
    for node in [n for n in builder.graph if n.op_type == "Erf" and is_standard(n.domain)]:
        match = _match(builder, node)
        if match is not None:
            _replace(builder.graph, *match)
            found += 1
    return found


def _match(builder: Builder, erf: ir.Node) -> tuple[ir.Value, ir.Node] | None:
    """(x, the last node), if the Erf is part of a Gelu in float32 of which nobody else uses a part."""
    scaled = erf.inputs[0]
    x = None if scaled is None else _without_factor(builder, scaled, 1 / math.sqrt(2))
    plus = only_user(erf)
    if x is None or x.dtype != ir.DataType.FLOAT or plus is None or plus.op_type != "Add":
        return None
    if not _is_number(builder, _other(plus, erf.outputs[0]), 1.0):
        return None
    last = plus
    factors: list[str] = []
    while len(factors) < 2:
        product = only_user(last)
        if product is None or product.op_type != "Mul":
            return None
        factor = _other(product, last.outputs[0])
        last = product
        if factor is None:
            return None
        if factor is not x and _without_factor(builder, factor, 0.5) is x:
            factors += ["x", "half"]
        else:
            factors.append("x" if factor is x else "half" if _is_number(builder, factor, 0.5) else "?")
    return (x, last) if sorted(factors) == ["half", "x"] else None


def _replace(graph: ir.Graph, x: ir.Value, last: ir.Node) -> None:
    domain = "" if graph.opset_imports.get("", 0) >= OPSET_WITH_GELU else MICROSOFT
    gelu = ir.Node(domain, "Gelu", [x], num_outputs=1, name=f"{last.name}_gelu")
    replace_node(last, gelu)


def _without_factor(builder: Builder, value: ir.Value, factor: float) -> ir.Value | None:
    """v, if the value is v · factor or v / (1 / factor)."""
    node = value.producer()
    if node is None or node.op_type not in ("Mul", "Div"):
        return None
    first, second = node.inputs[0], node.inputs[1]
    if node.op_type == "Div":
        return first if _is_number(builder, second, 1 / factor) else None
    return first if _is_number(builder, second, factor) else second if _is_number(builder, first, factor) else None


def _is_number(builder: Builder, value: ir.Value | None, number: float) -> bool:
    constant = None if value is None else builder.constant_of(value)
    if constant is None or constant.size != 1 or constant.ndim > 1:
        return False
    return bool(abs(float(constant.item()) - number) < NEAR)


def _other(node: ir.Node, one: ir.Value) -> ir.Value | None:
    first, second = node.inputs[0], node.inputs[1]
    return second if first is one else first
