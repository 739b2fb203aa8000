"""The products of a training step as PermutedMatMul, which is fast on x86-64 and GPUs, and can round to bfloat16.

MatMul, Gemm and onnxruntime's FusedMatMul become PermutedMatMul, which takes in the Transposes before and after it,
factors that are constant numbers, and the Add of a bias.
"""

import math
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from onnxgrad.graph.builder import Builder
from onnxgrad.graph.replace import take_place
from onnxgrad.passes.draft import Draft
from onnxgrad.passes.finish import drop_dead
from onnxgrad.passes.fuse_gelu import only_user
from onnxgrad.passes.sink_transposes import is_transpose, permutation
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
        perm = list(range(_rank(value)))
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
        scaled = _scaled(builder, node)
        return None if scaled is None else _Operand(scaled[0], self.perm, self.factor * scaled[1])

    @property
    def columns(self) -> Any:
        return _dims(self.value)[self.perm[-1]]


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
        products = [n for n in products if _rank(n.inputs[1]) == 2]
    for node in products:
        _change(builder, node, precision)
    if products:
        drop_dead(draft)
        graph.opset_imports.setdefault(OWN, 1)
    return len(products)


def _is_product(node: ir.Node) -> bool:
    if node.domain == MICROSOFT and node.op_type == "FusedMatMul":
        return not any(_attribute(node, name, 0) for name in ("transBatchA", "transBatchB"))
    return is_standard(node.domain) and node.op_type in ("MatMul", "Gemm")


def _can_be_changed(node: ir.Node) -> bool:
    A, B, *rest = node.inputs
    if A is None or B is None or min(_rank(A), _rank(B)) < 2:
        return False
    left, right = _dims(A), _dims(B)
    *_, rows, depth = [*left[:-2], left[-1], left[-2]] if _attribute(node, "transA", 0) else left
    columns = right[-2 if _attribute(node, "transB", 0) else -1]
    if len(right) == 2 and len(left) > 2:  # all rows of A are those of one matrix
        rows = math.prod(left[:-1]) if all(isinstance(d, int) for d in left[:-1]) else None
    if any(isinstance(size, int) and size < FEWEST for size in (rows, depth, columns)):
        return False
    C = rest[0] if rest else None
    return C is None or bool(_attribute(node, "beta", 1.0) == 1 and _is_bias(C, columns))


def _change(builder: Builder, node: ir.Node, precision: str) -> None:
    A, B, *rest = node.inputs
    assert A is not None and B is not None
    left, right = (
        _Operand.of(builder, value, bool(_attribute(node, name, 0))) for value, name in ((A, "transA"), (B, "transB"))
    )
    bias = rest[0] if rest else None
    alpha = float(_attribute(node, "alpha", 1.0)) * left.factor * right.factor
    last, perm = node, list(range(max(len(left.perm), len(right.perm))))
    while bias is None and (after := only_user(last)) is not None and (scaled := _scaled(builder, after)) is not None:
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
    builder.graph.insert_before(last, product)
    take_place(product.outputs[0], last.outputs[0])


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
    return _rank(value) == 1 and _dims(value)[0] == columns and columns is not None


def _scaled(builder: Builder, node: ir.Node) -> tuple[ir.Value, float] | None:
    """A value and a number, if the node multiplies the one with the other or divides it, and changes no shape."""
    if node.op_type not in ("Mul", "Div") or not is_standard(node.domain):
        return None
    first, second = node.inputs[0], node.inputs[1]
    if first is None or second is None:
        return None
    if (number := _number(builder, second)) is not None and _rank(second) <= _rank(first):
        return first, number if node.op_type == "Mul" else 1 / number if number else math.inf
    if node.op_type == "Mul" and (number := _number(builder, first)) is not None and _rank(first) <= _rank(second):
        return second, number
    return None


def _number(builder: Builder, value: ir.Value) -> float | None:
    """The one number that a value always is; exporters write the scale of attention as a power."""
    constant = builder.constant_of(value)
    if constant is not None:
        return float(constant.item()) if constant.size == 1 else None
    node = value.producer()
    if node is None or node.op_type != "Pow" or not is_standard(node.domain):
        return None
    base, exponent = (None if v is None else _number(builder, v) for v in node.inputs)
    return None if base is None or exponent is None or base <= 0 else float(base**exponent)


def _lies_well(perm: list[int]) -> bool:
    """Whether the numbers that stand side by side in memory are a row or a column of a matrix."""
    return len(perm) - 1 in perm[-2:]


def _rank(value: ir.Value | None) -> int:
    """0 if it is not known, too."""
    return 0 if value is None or value.shape is None else len(value.shape)


def _dims(value: ir.Value) -> list[Any]:
    """Numbers and names; None where neither is known."""
    return [d if isinstance(d, int) else d.value for d in value.shape or ()]


def _attribute(node: ir.Node, name: str, default: float) -> Any:
    given = node.attributes.get(name)
    return default if given is None else given.value
