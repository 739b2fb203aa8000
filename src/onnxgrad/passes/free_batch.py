"""free_batch(): changes a model that was exported for one batch size to accept any.

It rewrites what the exporter computed from that size: shapes for Reshape and Expand, and whatever is as long as a
batch. Whether examples then give the same results in any batch is for the caller to try out.
"""

import math
from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir as ir

from onnxgrad.graph.builder import Builder, op
from onnxgrad.graph.tensor import Dim, Tensor, dims_of
from onnxgrad.passes.draft import Draft
from onnxgrad.passes.infer import infer
from onnxgrad.schema import is_standard

BROADCAST = {
    "Add", "And", "BitwiseAnd", "BitwiseOr", "Div", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual",
    "MatMul", "Max", "Mean", "Min", "Mod", "Mul", "Or", "PRelu", "Pow", "Sub", "Sum", "Where", "Xor",
}  # fmt: skip
# Inputs that are as long as a batch, and along which axis.
RECURRENT = {"GRU": {4: 0, 5: 1}, "LSTM": {4: 0, 5: 1, 6: 1}, "RNN": {4: 0, 5: 1}}
SHAPED = {"Reshape", "Expand", "Resize"}  # by an input
SIZES = 3  # an input of Resize
MATRIX = 2  # axes that MatMul does not broadcast


class _FixedError(Exception):
    """The model cannot be freed."""


def fixed_batch(graph: ir.Graph) -> int | None:
    """How many examples inputs and outputs have; None if that is free, or they do not have as many.

    An output whose dimension is not known, behind a loop say, may have as many as all inputs do.
    """
    inputs, outputs = ([dims[0] for dims in map(dims_of, values) if dims] for values in (graph.inputs, graph.outputs))
    sizes = [d for d in inputs if isinstance(d, int)]
    if len(sizes) < len(inputs):
        return None
    if len(set(sizes)) == 1 and any(not isinstance(d, int) for d in outputs):
        return sizes[0]
    return next((d for d in outputs if isinstance(d, int) and d in sizes), None)


def free_batch(draft: Draft, size: int) -> bool:
    """Whether the model, prepared, now has a free first dimension in place of one of this size."""
    try:
        _Freeing(draft, size).run()
        infer(draft)
    except (_FixedError, ValueError, onnx.defs.SchemaError):  # or what shape inference raises
        return False
    return True


class _Freeing:
    """Goes through the nodes in order, and follows the axis along which examples lie."""

    def __init__(self, draft: Draft, size: int) -> None:
        graph = draft.graph
        self._graph, self._size, self._builder = graph, size, Builder(graph)
        taken = {d for v in graph.inputs for d in dims_of(v) or () if isinstance(d, str)}
        self._name = next(name for name in ("batch", "batch_size", "free_batch") if name not in taken)
        inputs = [v for v in graph.inputs if (dims_of(v) or (None,))[0] == size]
        for value in inputs:
            value.shape = ir.Shape([self._name, *(dims_of(value) or ())[1:]])
            if (unnamed := draft.unnamed.get(str(value.name))) is not None:
                draft.unnamed[str(value.name)] = ir.Shape([self._name, *unnamed[1:]])
        self._source = self._builder.tensor(inputs[0])

    def run(self) -> None:
        for node in list(self._graph):
            if any(self._axis(v) is not None for v in node.inputs):
                with self._builder.at_work(f"{node.name}_any_batch"):
                    self._free(node)
        for value in self._graph.outputs:
            if self._axis(value) != 0:
                raise _FixedError
        self._graph.sort()  # what was written came last

    def _axis(self, value: ir.Value | None) -> int | None:
        """The axis of a value that grows with the batch."""
        dims = dims_of(value) if value is not None else None
        return next((k for k, d in enumerate(dims or ()) if isinstance(d, str) and self._is_batch(d)), None)

    def _from_end(self, value: ir.Value | None) -> int:
        """That axis, counted from the end: 1 is the last; 0 if there is none."""
        axis = self._axis(value)
        return 0 if value is None or axis is None else len(dims_of(value) or ()) - axis

    def _is_batch(self, dim: str) -> bool:
        return self._name in dim.split("*")

    def _dim(self, before: int, after: int) -> str:
        """The name of a dimension that examples share with others: `7*batch*12`."""
        return "*".join(filter(None, (str(before) if before > 1 else "", self._name, str(after) if after > 1 else "")))

    def _factors(self, dim: str) -> tuple[int, int]:
        """How many elements of such a dimension come before a step to the next example, and how many are in a step."""
        before, _, after = f"*{dim}*".partition(f"*{self._name}*")
        return int(before.strip("*") or 1), int(after.strip("*") or 1)

    def _free(self, node: ir.Node) -> None:
        if any(a.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for a in node.attributes.values()):
            raise _FixedError
        before = [dims_of(v) for v in node.outputs]
        if is_standard(node.domain):
            if node.op_type == "Gather":
                self._read_as_reshape(node)
            self._free_inputs(node, before[0])
            if node.op_type in SHAPED:
                return
        self._builder.infer_again(node)
        for value, was in zip(node.outputs, before, strict=True):
            if value.name:
                self._name_dimensions(value, was)

    def _read_as_reshape(self, node: ir.Node) -> None:
        """Makes a Reshape of a Gather that reads all of a vector in order, which is what torch's as_strided becomes."""
        data, indices = node.inputs
        order = None if indices is None else self._builder.constant_of(indices)
        if data is None or order is None or len(dims_of(data) or ()) != 1 or not order.ndim:
            return
        if self._factors(str((dims_of(data) or ("",))[0])) != (1, order.size // self._size):
            return
        if np.array_equal(order.ravel(), np.arange(order.size)):
            node.op_type = "Reshape"
            node.attributes.clear()
            node.replace_input_with(1, self._builder.constant(order.shape, ir.DataType.INT64).value)

    def _name_dimensions(self, value: ir.Value, before: tuple[Dim, ...] | None) -> None:
        """Dimensions that are not known any more are those that grow with the batch."""
        now = dims_of(value)
        if now is None or before is None or len(now) != len(before):
            raise _FixedError
        dims = [self._grown_dim(old) if new is None and isinstance(old, int) else new
                for old, new in zip(before, now, strict=True)]  # fmt: skip
        if sum(isinstance(d, str) and self._is_batch(d) for d in dims) > 1:
            raise _FixedError
        value.shape = ir.Shape(dims)

    def _grown_dim(self, was: int) -> str:
        if was % self._size:
            raise _FixedError
        return self._dim(1, was // self._size)

    def _free_inputs(self, node: ir.Node, result: tuple[Dim, ...] | None) -> None:
        """What a node reads that depends on the size of a batch."""
        if node.op_type in SHAPED:
            if result is None or not all(isinstance(d, int) for d in result):
                raise _FixedError
            self._free_shape(node, [d for d in result if isinstance(d, int)])
        elif node.op_type == "Concat":
            self._grow(node, {k: self._common_axis(node) for k in range(len(node.inputs))})
        elif node.op_type in RECURRENT:
            if node.attributes.get_int("layout", 0):
                raise _FixedError
            self._grow(node, RECURRENT[node.op_type])
        elif node.op_type in BROADCAST:
            from_end = max(self._from_end(v) for v in node.inputs)
            if node.op_type == "MatMul" and from_end <= MATRIX:
                return
            for k, value in enumerate(node.inputs):
                dims = dims_of(value) if value is not None else None
                if value is not None and dims is not None and len(dims) >= from_end and self._axis(value) is None:
                    node.replace_input_with(k, self._one_row(value, len(dims) - from_end).value)

    def _free_shape(self, node: ir.Node, result: list[int]) -> None:
        source, axis = node.inputs[0], self._axis(node.inputs[0])
        if source is None or axis is None:
            raise _FixedError
        dims = dims_of(source) or ()
        new = str(dims[axis])
        if node.op_type == "Reshape":
            axis, new = self._after_reshape(dims, axis, result)
            shape = self._builder.constant([*result[:axis], -1, *result[axis + 1 :]], ir.DataType.INT64)
            node.replace_input_with(1, shape.value)
        elif node.op_type == "Expand":
            axis += len(result) - len(dims)
            shape = self._builder.constant([*result[:axis], 1, *result[axis + 1 :]], ir.DataType.INT64)  # as it is
            node.replace_input_with(1, shape.value)
        elif len(node.inputs) > SIZES and node.inputs[SIZES] is not None and "axes" not in node.attributes:
            node.replace_input_with(SIZES, self._shape(result, axis).value)
        node.outputs[0].shape = ir.Shape([*result[:axis], new, *result[axis + 1 :]])

    def _after_reshape(self, dims: Sequence[Dim], axis: int, result: Sequence[int]) -> tuple[int, str]:
        """Where the examples are in a new shape: as many elements come before them as came before."""
        if not all(isinstance(d, int) for d in dims[:axis]):
            raise _FixedError
        first, step = self._factors(str(dims[axis]))
        before = math.prod(d for d in dims[:axis] if isinstance(d, int)) * first
        starts = [math.prod(result[:k]) for k in range(len(result) + 1)]
        places = [
            k for k, length in enumerate(result)
            if starts[k] <= before <= starts[k + 1] and before % starts[k] == 0
            and length % (before // starts[k] * self._size) == 0
        ]  # fmt: skip
        if not places:
            raise _FixedError
        # Where batches are of one example several places may do: the same axis; among fewer axes one of the same
        # length; among more axes one that the examples have for themselves.
        own = [k for k in places if starts[k] == before]
        if len(result) == len(dims) and axis in places:
            found = axis
        elif len(result) < len(dims):
            found = next((k for k in own if result[k] == self._size * step), places[0])
        else:
            found = (own or places)[0]
        inside = before // starts[found]
        return found, self._dim(inside, result[found] // (inside * self._size))

    def _common_axis(self, node: ir.Node) -> int:
        axes = {axis for v in node.inputs if (axis := self._axis(v)) is not None}
        rank = len(dims_of(node.outputs[0]) or ())
        if len(axes) != 1 or node.attributes["axis"].as_int() % max(rank, 1) in axes:
            raise _FixedError
        return axes.pop()

    def _grow(self, node: ir.Node, axes: dict[int, int]) -> None:
        """Repeats inputs that are the same for every example."""
        for k, axis in axes.items():
            value = node.inputs[k] if k < len(node.inputs) else None
            if value is None or self._axis(value) is not None:
                continue
            row = self._one_row(value, axis)
            grown: Tensor = op.Expand(row, self._shape([1] * row.rank, axis))
            grown.value.shape = ir.Shape([self._name if a == axis else d for a, d in enumerate(row.shape or ())])
            node.replace_input_with(k, grown.value)

    def _one_row(self, value: ir.Value, axis: int) -> Tensor:
        """One example's part of a value that no input reaches."""
        tensor, length = self._builder.tensor(value), (dims_of(value) or ())[axis]
        if length == 1:
            return tensor
        if length != self._size:
            raise _FixedError
        row: Tensor = op.Slice(tensor, [0], [1], [axis])
        return row

    def _shape(self, dims: Sequence[int], axis: int) -> Tensor:
        """A shape with the size of the batch at this axis."""
        parts = [list(dims[:axis]), op.Shape(self._source, start=0, end=1), list(dims[axis + 1 :])]
        shape: Tensor = op.Concat(*(p for p in parts if isinstance(p, Tensor) or p), axis=0)
        return shape
