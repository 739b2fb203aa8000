"""Products of matrices in the graph of a training step, as the one operator that tile units multiply fast.

MatMul and Gemm become PermutedMatMul, which takes in the Transposes before and after it and the Add of a bias.
"""

from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from onnxgrad.graph.builder import MICROSOFT
from onnxgrad.prepared import drop_dead

STANDARD = ("", "ai.onnx")


@dataclass
class _Operand:
    """A matrix, or many, by the value it is a permutation of."""

    value: ir.Value
    perm: list[int]

    @classmethod
    def of(cls, value: ir.Value, is_turned: bool = False) -> "_Operand":
        perm = list(range(_rank(value)))
        if is_turned:
            perm[-2:] = perm[:-3:-1]
        operand = cls(value, perm)
        while (before := _transpose_before(operand.value)) is not None:
            source, axes = before
            perm = [axes[k] for k in operand.perm]
            if not _lies_well(perm):
                break
            operand = cls(source, perm)
        return operand

    @property
    def columns(self) -> Any:
        return _dims(self.value)[self.perm[-1]]


def use_permuted_products(graph: ir.Graph) -> int:
    """Changes all products of float32 numbers whose ranks are known; how many there were."""
    products = [n for n in graph if n.domain in STANDARD and n.op_type in ("MatMul", "Gemm") and _can_be_changed(n)]
    for node in products:
        _change(graph, node)
    if products:
        drop_dead(graph)
        graph.opset_imports.setdefault(MICROSOFT, 1)
    return len(products)


def _can_be_changed(node: ir.Node) -> bool:
    A, B, *rest = node.inputs
    if A is None or B is None or node.outputs[0].dtype != ir.DataType.FLOAT or min(_rank(A), _rank(B)) < 2:
        return False
    C = rest[0] if rest else None
    if C is None:
        return True
    columns = _dims(B)[0 if _attribute(node, "transB", 0) else 1]
    return bool(_attribute(node, "beta", 1.0) == 1 and _is_bias(C, columns))


def _change(graph: ir.Graph, node: ir.Node) -> None:
    A, B, *rest = node.inputs
    assert A is not None and B is not None
    left, right = (
        _Operand.of(value, bool(_attribute(node, name, 0))) for value, name in ((A, "transA"), (B, "transB"))
    )
    bias = rest[0] if rest else None
    last, perm = node, list(range(max(len(left.perm), len(right.perm))))
    if bias is None and (added := _bias_after(last, right.columns)) is not None:
        last, bias = added
    after = _only_user(last)
    if after is not None and after.op_type == "Transpose" and after.domain in STANDARD:
        axes = _permutation(after)
        if _lies_well([axes.index(k) for k in perm]):
            last, perm = after, axes
    attributes = [
        ir.AttrInt64s(name, perm)
        for name, perm in (("permA", left.perm), ("permB", right.perm), ("permY", perm))
        if perm != list(range(len(perm)))
    ]
    if (alpha := _attribute(node, "alpha", 1.0)) != 1:
        attributes.append(ir.AttrFloat32("alpha", alpha))
    inputs = [left.value, right.value, *([] if bias is None else [bias])]
    product = ir.Node(MICROSOFT, "PermutedMatMul", inputs, attributes, num_outputs=1, name=f"{node.name}_permuted")
    _take_place(graph, product, last)


def _take_place(graph: ir.Graph, new: ir.Node, old: ir.Node) -> None:
    """The new node gives the old one's output, under its name."""
    result, value = old.outputs[0], new.outputs[0]
    value.type, value.shape = result.type, result.shape
    value.name, result.name = result.name, f"{result.name}_before"
    graph.insert_before(old, new)
    result.replace_all_uses_with(value, replace_graph_outputs=True)


def _bias_after(node: ir.Node, columns: Any) -> tuple[ir.Node, ir.Value] | None:
    """The Add of one number for each column that follows, and the numbers."""
    after = _only_user(node)
    if after is None or after.op_type != "Add" or after.domain not in STANDARD:
        return None
    bias = after.inputs[1] if after.inputs[0] is node.outputs[0] else after.inputs[0]
    if bias is None or bias is node.outputs[0] or not _is_bias(bias, columns):
        return None
    return after, bias


def _is_bias(value: ir.Value, columns: Any) -> bool:
    """Whether it is one number for each column; an unknown number of columns is no column known."""
    return _rank(value) == 1 and _dims(value)[0] == columns and columns is not None


def _transpose_before(value: ir.Value) -> tuple[ir.Value, list[int]] | None:
    node = value.producer()
    if node is None or node.op_type != "Transpose" or node.domain not in STANDARD or node.inputs[0] is None:
        return None
    return node.inputs[0], _permutation(node)


def _permutation(transpose: ir.Node) -> list[int]:
    given = transpose.attributes.get("perm")
    return list(range(_rank(transpose.outputs[0])))[::-1] if given is None else list(given.as_ints())


def _lies_well(perm: list[int]) -> bool:
    """Whether the numbers that stand side by side in memory are a row or a column of a matrix."""
    return len(perm) - 1 in perm[-2:]


def _only_user(node: ir.Node) -> ir.Node | None:
    value = node.outputs[0]
    users = [user for user, _ in value.uses()]
    return users[0] if len(users) == 1 and not value.is_graph_output() else None


def _rank(value: ir.Value) -> int:
    """0 if it is not known, too."""
    return 0 if value.shape is None else len(value.shape)


def _dims(value: ir.Value) -> list[Any]:
    """Numbers and names; None where neither is known."""
    return [d if isinstance(d, int) else d.value for d in value.shape or ()]


def _attribute(node: ir.Node, name: str, default: float) -> Any:
    given = node.attributes.get(name)
    return default if given is None else given.value
