"""The products of a training step as PermutedMatMul, which is fast on x86-64 and GPUs, and can round to bfloat16.

MatMul, Gemm and onnxruntime's FusedMatMul become PermutedMatMul, which takes in the Transposes before and after it,
factors that are constant numbers, and the Add of a bias.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from onnxgrad.graph.builder import Builder
from onnxgrad.graph.node import is_transpose, only_user, permutation
from onnxgrad.graph.replace import replace_node
from onnxgrad.graph.tensor import known_dims, rank_of
from onnxgrad.passes.draft import Draft
from onnxgrad.passes.finish import drop_dead
from onnxgrad.passes.scale_factor import value_and_factor
from onnxgrad.schema import MICROSOFT, OWN, is_standard

HALF_TYPES = ir.DataType.FLOAT16, ir.DataType.BFLOAT16
FEWEST = 32  # rows, columns or terms of sums that fill a tile: products of fewer are left to onnxruntime


@dataclass
class _Operand:
    """A matrix, or many, by the value it is a permutation of, and what that is multiplied with."""

    value: ir.Value
    perm: list[int]
    factor: float = 1.0

    @classmethod
    def of(cls, builder: Builder, value: ir.Value, is_transposed: bool = False) -> "_Operand":
        perm = list(range(rank_of(value)))
        if is_transposed:
            perm[-2:] = perm[:-3:-1]
        operand = cls(value, perm)
        while (before := operand._before(builder)) is not None:
            operand = before
        return operand

    def _before(self, builder: Builder) -> "_Operand | None":
        """The same without a Transpose or a factor, if it ends with one that a product can take in."""
        node = self.value.producer()
        if node is None or node.inputs[0] is None:
            return None
        if is_transpose(node):
            axes = permutation(node)
            perm = [axes[k] for k in self.perm]
            return _Operand(node.inputs[0], perm, self.factor) if _lies_well(perm) else None
        scaled = value_and_factor(node, functools.partial(_number, builder))
        return None if scaled is None else _Operand(scaled[0], self.perm, self.factor * scaled[1])

    @property
    def columns(self) -> Any:
        return known_dims(self.value)[self.perm[-1]]


def use_permuted_matmul(draft: Draft, precision: str = "float32", on_gpu: bool = False) -> int:
    """Changes products of float32 numbers whose ranks are known, unless they are known to be small; how many.

    With the `precision` bfloat16, and on a GPU, only those with a single matrix on the right are changed: nearly all of
    the work, in large products, while attention's are many small ones. On a GPU products of half types are, too.
    """
    graph = draft.graph
    builder = Builder(graph)
    dtypes = (ir.DataType.FLOAT, *(HALF_TYPES if on_gpu else ()))
    products = [n for n in graph if _is_product(n) and n.outputs[0].dtype in dtypes and _can_be_changed(n)]
    if precision != "float32" or on_gpu:
        products = [n for n in products if rank_of(n.inputs[1]) == 2]
    for node in products:
        _change(builder, node, precision)
    if products:
        drop_dead(draft)
    return len(products)


def _is_product(node: ir.Node) -> bool:
    if node.domain == MICROSOFT and node.op_type == "FusedMatMul":
        return not any(node.attributes.get_int(name, 0) for name in ("transBatchA", "transBatchB"))
    return is_standard(node.domain) and node.op_type in ("MatMul", "Gemm")


def _can_be_changed(node: ir.Node) -> bool:
    A, B, *rest = node.inputs
    if A is None or B is None or min(rank_of(A), rank_of(B)) < 2:
        return False
    left, right = known_dims(A), known_dims(B)
    *_, rows, depth = [*left[:-2], left[-1], left[-2]] if node.attributes.get_int("transA", 0) else left
    columns = right[-2 if node.attributes.get_int("transB", 0) else -1]
    if len(right) == 2 and len(left) > 2:  # all rows of A are those of one matrix
        rows = math.prod(left[:-1]) if all(isinstance(d, int) for d in left[:-1]) else None
    if any(isinstance(size, int) and size < FEWEST for size in (rows, depth, columns)):
        return False
    C = rest[0] if rest else None
    return C is None or (node.attributes.get_float("beta", 1.0) == 1 and _is_bias(C, columns))


def _change(builder: Builder, node: ir.Node, precision: str) -> None:
    A, B, *rest = node.inputs
    assert A is not None and B is not None
    left, right = (
        _Operand.of(builder, value, bool(node.attributes.get_int(name, 0)))
        for value, name in ((A, "transA"), (B, "transB"))
    )
    bias = rest[0] if rest else None
    alpha = node.attributes.get_float("alpha", 1.0) * left.factor * right.factor
    last, perm = node, list(range(max(len(left.perm), len(right.perm))))
    number = functools.partial(_number, builder)
    while bias is None and (after := only_user(last)) is not None and (scaled := value_and_factor(after, number)):
        last, alpha = after, alpha * scaled[1]
    if bias is None and (added := _bias_after(last, right.columns)) is not None:
        last, bias = added
    while (after := only_user(last)) is not None and is_transpose(after):
        axes = [perm[k] for k in permutation(after)]
        if axes[-1] < len(axes) - 2:  # what stands side by side would be neither a row nor a column
            break
        last, perm = after, axes
    attributes = [
        ir.AttrInt64s(name, perm)
        for name, perm in (("permA", left.perm), ("permB", right.perm), ("permY", perm))
        if perm != list(range(len(perm)))
    ]
    if alpha != 1:
        attributes.append(ir.AttrFloat32("alpha", alpha))
    if precision != "float32":
        attributes.append(ir.AttrString("precision", precision))
    inputs = [left.value, right.value, *([] if bias is None else [bias])]
    name = f"{node.name}_permuted" if node.name else None
    product = ir.Node(OWN, "PermutedMatMul", inputs, attributes, num_outputs=1, name=name)
    replace_node(last, product)


def _bias_after(node: ir.Node, columns: Any) -> tuple[ir.Node, ir.Value] | None:
    """The Add of one number for each column that follows, and the numbers."""
    after = only_user(node)
    if after is None or after.op_type != "Add" or not is_standard(after.domain):
        return None
    bias = after.inputs[1] if after.inputs[0] is node.outputs[0] else after.inputs[0]
    if bias is None or bias is node.outputs[0] or not _is_bias(bias, columns):
        return None
    return after, bias


def _is_bias(value: ir.Value, columns: Any) -> bool:
    """Whether it is one number for each column; an unknown number of columns is no column known."""
    return rank_of(value) == 1 and known_dims(value)[0] == columns and columns is not None


def _number(builder: Builder, value: ir.Value | None) -> float | None:
    """The one number that a value always is; exporters write the scale of attention as a power."""
    if value is None:
        return None
    constant, node = builder.constant_of(value), value.producer()
    if constant is not None:
        return float(constant.item()) if constant.size == 1 else None
    if node is None or node.op_type != "Pow" or not is_standard(node.domain):
        return None
    base, exponent = (_number(builder, v) for v in node.inputs)
    return None if base is None or exponent is None or base <= 0 else float(base**exponent)


def _lies_well(perm: list[int]) -> bool:
    """Whether the numbers that stand side by side in memory are a row or a column of a matrix."""
    return len(perm) - 1 in perm[-2:]
