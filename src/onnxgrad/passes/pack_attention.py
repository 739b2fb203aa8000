"""Attention whose queries, keys and values are parts of one tensor becomes PackedAttention, which reads them in place.

One product often makes all three. Models cut its result into parts, which are copied, as is every gradient on its way
back. Where the parts lie is found by taking the same views of an array: its strides tell.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.builder import Builder, op
from onnxgrad.graph.dimension import evaluated, names_in
from onnxgrad.graph.node import is_transpose, permutation, reshapes
from onnxgrad.graph.replace import take_place
from onnxgrad.graph.tensor import Dim, dims_of
from onnxgrad.ops.packed_attention import result_axes
from onnxgrad.passes.draft import Draft
from onnxgrad.schema import OWN, is_standard
from onnxgrad.tensor_types import Array

TRIALS = (2, 3, 5, 7, 11, 13), (3, 5, 7, 11, 13, 17)  # sizes for dimensions that have names


class _Packing(NamedTuple):
    """Where queries, keys and values lie: in a value, whose axes are these."""

    source: ir.Value
    layout: str


def pack_attention(draft: Draft) -> int:
    """Changes each FlashAttention whose inputs are parts of one tensor; how many."""
    builder = Builder(draft.graph)
    count = 0
    for node in [n for n in draft.graph if n.op_type == "FlashAttention" and n.domain == OWN]:
        found = _packing(builder, node)
        count += found is not None and _replace(builder, node, found)
    if count:
        draft.graph.sort()
    return count


def _packing(builder: Builder, attention: ir.Node) -> _Packing | None:
    q, k, v = (list(values_before(builder, value)) for value in attention.inputs[:3] if value is not None)
    shared = [value for value in q if value in k and value in v]
    if not shared:
        return None
    names = [n for value in (*q, *k, *v) for d in dims_of(value) or () if isinstance(d, str) for n in names_in(d)]
    known = list(dict.fromkeys(names))
    if len(known) > len(TRIALS[0]):
        return None
    trials = (_Views(builder, shared[-1], dict(zip(known, sizes, strict=False))) for sizes in TRIALS)
    layouts = {trial.layout(attention.inputs[:3]) for trial in trials}
    (layout, *others) = layouts
    return None if others or layout is None else _Packing(shared[-1], layout)


def values_before(builder: Builder, value: ir.Value | None) -> Iterator[ir.Value]:
    """A value, and those that it is a view of."""
    while value is not None:
        yield value
        node = value.producer()
        value = node.inputs[0] if node is not None and _is_view(builder, node) else None


def _is_view(builder: Builder, node: ir.Node) -> bool:
    """Whether its results are elements of its first input, at places that are known."""
    if not is_standard(node.domain) or any(v.shape is None for v in (*node.inputs[:1], *node.outputs) if v is not None):
        return False
    if node.op_type == "Gather":
        index = node.inputs[1]
        return index is not None and dims_of(index) == () and builder.constant_of(index) is not None
    if node.op_type == "Slice":
        return all(v is None or builder.constant_of(v) is not None for v in node.inputs[1:])
    return reshapes(node) or node.op_type in ("Transpose", "Split")


class _Views:
    """Views of an array in place of a value, where dimensions that have names have some sizes."""

    def __init__(self, builder: Builder, source: ir.Value, sizes: Mapping[str, int]) -> None:
        self._builder, self._source, self._sizes = builder, source, sizes
        dims = self._dims(source)
        self._whole = None if dims is None else np.empty(dims, np.int8)  # a byte each: strides count elements

    def layout(self, values: Sequence[ir.Value | None]) -> str | None:
        """The order of the axes, if the three values are all of the source."""
        views = [self._view(value) for value in values]
        if self._whole is None or any(view is None or not np.shares_memory(view, self._whole) for view in views):
            return None
        q, k, v = (view for view in views if view is not None)
        start, *places = (view.__array_interface__["data"][0] for view in (self._whole, q, k, v))
        apart = places[1] - places[0]
        if places[0] != start or places[2] - places[1] != apart or len({(x.shape, x.strides) for x in (q, k, v)}) > 1:
            return None
        axes = [*zip("NSHD", q.shape, q.strides, strict=True), ("3", 3, apart)]
        axes.sort(key=lambda axis: -axis[2])
        after = [size * step for _, size, step in axes[1:]]
        is_whole = [step for _, _, step in axes[:-1]] == after and axes[0][1] * axes[0][2] == self._whole.size
        layout = "".join(letter for letter, _, _ in axes)
        return layout if is_whole and axes[-1][2] == 1 and layout[-1] == "D" else None

    def _dims(self, value: ir.Value) -> list[int] | None:
        sizes = [d if isinstance(d, int) else evaluated(d or "", self._sizes) for d in dims_of(value) or ()]
        return None if None in sizes else [size for size in sizes if size is not None]

    def _view(self, value: ir.Value | None) -> Array | None:
        dims = None if value is None else self._dims(value)
        # Of Reshapes one after the other the last alone counts: what is between them need not be a view.
        while value is not None and value is not self._source and reshapes(value.producer()):
            value = _read_by(value.producer())
        if value is None or dims is None or self._whole is None:
            return None
        if value is self._source:
            return self._whole.reshape(dims)
        node = value.producer()
        x = self._view(_read_by(node))
        return None if x is None or node is None else self._part(node, x, value.index() or 0).reshape(dims)

    def _part(self, node: ir.Node, x: Array, index: int) -> Array:
        """What a node takes of its input for one of its results."""
        if node.op_type == "Transpose":
            return x.transpose(permutation(node))
        given = (None if v is None else self._builder.constant_of(v) for v in node.inputs[1:])
        numbers = [None if array is None else [int(n) for n in array.reshape(-1)] for array in given]
        taken: list[Any] = [slice(None)] * x.ndim
        if node.op_type == "Slice":
            starts, ends, axes, steps = (*numbers, None, None)[:4]
            assert starts is not None and ends is not None
            for axis, *cut in zip(axes or range(x.ndim), starts, ends, steps or [1] * len(starts), strict=False):
                taken[axis] = slice(*cut)
        elif node.op_type == "Gather":
            assert numbers[0] is not None
            taken[node.attributes.get_int("axis", 0)] = numbers[0][0]
        else:  # Split
            axis = node.attributes.get_int("axis", 0)
            sizes = [(self._dims(v) or [0] * x.ndim)[axis] for v in node.outputs]
            taken[axis] = slice(sum(sizes[:index]), sum(sizes[: index + 1]))
        part: Array = x[tuple(taken)]
        return part


def _read_by(node: ir.Node | None) -> ir.Value | None:
    return None if node is None else node.inputs[0]


def _replace(builder: Builder, attention: ir.Node, packing: _Packing) -> bool:
    source, layout = packing
    (y, *_), queries = attention.outputs, attention.inputs[0]
    assert queries is not None
    shape = _shape(dims_of(source) or (), dict(zip("NSHD", dims_of(queries) or (), strict=True)) | {"3": 3}, layout)
    if shape is None:
        return False
    attributes: dict[str, Any] = {name: a.value for name, a in attention.attributes.items()} | {"layout": layout}
    with builder.in_place_of(attention):
        mask = attention.inputs[3] if len(attention.inputs) > 3 else None
        inputs = [op.Reshape(builder.tensor(source), shape), None if mask is None else builder.tensor(mask)]
        packed = builder.node("PackedAttention", inputs, attributes, domain=OWN)[0]
        made = packed.value.producer()
        _as_before(packed, result_axes(layout), y)
    assert made is not None
    made.name, attention.name = attention.name, f"{attention.name}_replaced"
    return True


def _shape(source: Sequence[Dim], sizes: Mapping[str, Dim], layout: str) -> list[int] | None:
    """For a Reshape: of dimensions that are not known one may follow from the others, and any be as before."""
    shape: list[int] = []
    for k, letter in enumerate(layout):
        size = sizes[letter]
        kept = k < len(source) and source[k] == size and size is not None
        shape.append(size if isinstance(size, int) else 0 if kept else -1)
    return shape if shape.count(-1) < 2 else None


def _as_before(packed: Any, axes: list[int], y: ir.Value) -> None:
    """Puts a result in the place of another, whose axes it has in this order; Transposes are joined."""
    back = [axes.index(k) for k in range(4)]
    for user in [user for user, _ in y.uses() if is_transpose(user)]:
        perm = [back[k] for k in permutation(user)]
        result = packed if perm == sorted(perm) else op.Transpose(packed, perm=perm)
        take_place(result.value, user.outputs[0])
        user.replace_input_with(0, None)
    if y.uses() or y.is_graph_output():
        take_place((packed if back == sorted(back) else op.Transpose(packed, perm=back)).value, y)
