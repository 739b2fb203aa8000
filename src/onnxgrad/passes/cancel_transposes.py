"""Removes transposes that cancel, also with linear layers and attention between them.

Models with attention of batches whose length comes first, as torch's MultiheadAttention computes it, swap batch and
length before it and after it. What lies between treats all rows alike, so it can compute on rows in another order.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import onnx_ir as ir

from onnxgrad.graph.builder import Builder
from onnxgrad.graph.node import is_transpose, only_user, permutation
from onnxgrad.graph.tensor import Dim, dims_of
from onnxgrad.passes.draft import Draft
from onnxgrad.schema import OWN, is_standard


class _Order(NamedTuple):
    """Rows on their way: their axes as they are and as they would be without the Transpose, and whether in one."""

    dims: tuple[Dim, ...]
    perm: list[int]  # from the axes as they would be to those that they are
    is_flat: bool = False

    @property
    def before(self) -> list[Dim]:
        """The dimensions without the Transpose."""
        return [self.dims[self.perm.index(k)] for k in range(len(self.perm))]


Change = Callable[[], None]


def cancel_transposes(draft: Draft) -> int:
    """Leaves out each Transpose of rows, and the one that undoes it; how many of such pairs."""
    builder = Builder(draft.graph)
    count = 0
    for node in [n for n in draft.graph if is_transpose(n)]:
        changes = _path(builder, node)
        for change in changes or ():
            change()
        count += changes is not None
    if count:
        draft.graph.sort()
    return count


def _path(builder: Builder, first: ir.Node) -> list[Change] | None:
    """What to change from a Transpose on to the one that undoes it; None if there is no such."""
    perm, dims, source = permutation(first), dims_of(first.outputs[0]), first.inputs[0]
    moved = next((k for k in range(len(perm), 0, -1) if perm[k - 1] != k - 1), 0)
    if source is None or dims is None or None in dims[:moved] or not 0 < moved < len(perm):
        return None
    order, node, changes = _Order(dims[:moved], perm[:moved]), first, []
    changes.append(lambda: first.outputs[0].replace_all_uses_with(source))
    while (user := only_user(node)) is not None:
        if is_transpose(user):
            return [*changes, _undo(user)] if _is_undone(user, order) else None
        step = _step(builder, node.outputs[0], user, order)
        if step is None:
            return None
        order, change = step
        changes += [change, _with_rows(user.outputs[0], order)]
        node = user
    return None


def _is_undone(transpose: ir.Node, order: _Order) -> bool:
    perm, moved = permutation(transpose), len(order.perm)
    return (
        not order.is_flat
        and perm[moved:] == list(range(moved, len(perm)))
        and [order.perm[k] for k in perm[:moved]] == list(range(moved))
        and not transpose.outputs[0].is_graph_output()
    )


def _undo(transpose: ir.Node) -> Change:
    def change() -> None:
        source = transpose.inputs[0]  # by now: before the first change it may be what the first Transpose gives
        assert source is not None
        transpose.outputs[0].replace_all_uses_with(source)

    return change


def _with_rows(value: ir.Value, order: _Order) -> Change:
    """Gives a value the shape that it has without the Transpose."""

    def change() -> None:
        if not order.is_flat and value.shape is not None:
            value.shape = ir.Shape([*order.before, *list(value.shape)[len(order.perm) :]])

    return change


def _step(builder: Builder, value: ir.Value, user: ir.Node, order: _Order) -> tuple[_Order, Change] | None:
    """The order behind a node that reads the value, and what to change about that node."""
    if (user.domain, user.op_type) == (OWN, "PackedAttention") and not order.is_flat:
        return _through_attention(user, order)
    if not is_standard(user.domain):
        return None
    if user.op_type == "Reshape" and user.inputs[0] is value:
        return _through_reshape(builder, user, order)
    others = [v for v in user.inputs if v is not None and v is not value]
    ranks = [len(dims_of(v) or range(9)) for v in others]
    is_linear = user.inputs[0] is value and ranks[:1] == [2] and (
        user.op_type == "MatMul" or (user.op_type == "Gemm" and not user.attributes.get_int("transA", 0))
    )  # fmt: skip
    adds_bias = user.op_type == "Add" and ranks == [1]
    return (order, _nothing) if (is_linear and ranks[1:] in ([], [1])) or adds_bias else None


def _are_one(dims: Sequence[Dim], whole: Dim) -> bool:
    """Whether a dimension is all of these together."""
    known = [d for d in dims if isinstance(d, int)]
    return whole is not None and (list(dims) == [whole] or (len(known) == len(dims) and math.prod(known) == whole))


def _nothing() -> None:
    """Rows in another order are all that differs."""


def _through_attention(attention: ir.Node, order: _Order) -> tuple[_Order, Change] | None:
    layout = attention.attributes["layout"].as_string()
    if order.perm != [1, 0] or set(layout[:2]) != {"N", "S"}:
        return None
    swapped = layout[1] + layout[0] + layout[2:]
    return order, lambda: attention.attributes.update({"layout": ir.AttrString("layout", swapped)})


def _through_reshape(builder: Builder, reshape: ir.Node, order: _Order) -> tuple[_Order, Change] | None:
    (source, *_), dims, count = reshape.inputs, dims_of(reshape.outputs[0]), len(order.perm)
    given = None if source is None else dims_of(source)
    if dims is None or given is None:
        return None
    rest: Sequence[Dim]
    if dims[:count] == order.dims:
        after, rest = order._replace(is_flat=False), dims[count:]
        kept: list[Dim] = list(order.before) if order.is_flat else [0] * count
    elif not order.is_flat and len(dims) == 2 and _are_one(given[count:], dims[1]):  # else rows are joined, too
        after, kept, rest = order._replace(is_flat=True), [], ["rows", dims[1]]
    else:
        return None
    shape = [d if isinstance(d, int) else -1 for d in (*kept, *rest)]
    if shape.count(-1) > 1 or (0 in shape and order.is_flat):
        return None

    def change() -> None:
        with builder.at_work(reshape.name or ""):
            wanted = builder.constant(shape, ir.DataType.INT64).value
        reshape.replace_input_with(1, wanted)
        reshape.attributes.pop("allowzero", None)

    return after, change
