"""value_and_factor(): what a node multiplies, where it multiplies by a single number; products take such factors in."""

from collections.abc import Callable

import onnx_ir as ir

from onnxgrad.graph.tensor import rank_of
from onnxgrad.schema import is_standard


def value_and_factor(node: ir.Node, number: Callable[[ir.Value | None], float | None]) -> tuple[ir.Value, float] | None:
    """A value and a number, if the node multiplies the one with the other or divides it, and changes no shape.

    `number` says which number, other than 0, a value always is.
    """
    if not is_standard(node.domain) or node.op_type not in ("Mul", "Div", "Identity"):
        return None
    first, *others = node.inputs
    if first is None or not others:
        return None if first is None else (first, 1.0)
    (second,) = others
    if (factor := number(second)) and rank_of(second) <= rank_of(first):
        return first, factor if node.op_type == "Mul" else 1 / factor
    if node.op_type == "Mul" and second is not None and (factor := number(first)) and rank_of(first) <= rank_of(second):
        return second, factor
    return None
