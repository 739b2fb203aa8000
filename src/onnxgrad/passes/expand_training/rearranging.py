"""What takes tensors apart, puts them together or picks from them."""

import onnx_ir as ir

from onnxgrad.graph.builder import builder_at_work, op
from onnxgrad.graph.tensor import Tensor
from onnxgrad.passes.expand_training.registry import expands, gradients


@expands("ConcatTraining")
def _concat(*inputs: Tensor, axis: int) -> list[Tensor]:
    lengths = [op.Gather(op.Shape(x), [axis]) for x in inputs]
    return [op.Concat(*inputs, axis=axis), op.Concat(*lengths, axis=0)]


@expands("SplitTraining")
def _split(input: Tensor, split: Tensor, *, axis: int = 0, node: ir.Node) -> list[Tensor]:
    count = len(node.outputs)
    sizes = split.constant
    if sizes is not None and sizes.size not in (0, count):
        raise ValueError(f"split has {sizes.size} sizes, expected {count}, one for each output")
    how = {"num_outputs": count} if sizes is not None and not sizes.size else {}
    parts = op.Split(input, None if how else split, axis=axis, outputs=count, **how)
    return [parts] if count == 1 else list(parts)


@expands("ReduceSumTraining")
def _reduce_sum(data: Tensor, axes: Tensor, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Tensor:
    return op.ReduceSum(data, axes, keepdims=keepdims, noop_with_empty_axes=noop_with_empty_axes)  # type: ignore[no-any-return]


def _product(dims: Tensor) -> Tensor:
    return op.ReduceProd(op.Concat([1], dims, axis=0), keepdims=1)  # type: ignore[no-any-return]


@expands("View")
def _view(input: Tensor, *shapes: Tensor) -> list[Tensor]:
    flat = op.Reshape(input, [-1])
    if len(shapes) == 1:
        return [op.Reshape(flat, shapes[0], allowzero=1)]
    sizes = op.Concat(*(_product(shape) for shape in shapes), axis=0)
    parts = op.Split(flat, sizes, axis=0, outputs=len(shapes))
    return [op.Reshape(part, shape, allowzero=1) for part, shape in zip(parts, shapes, strict=True)]


@expands("ShrunkenGather")
def _gather(data: Tensor, indices: Tensor, *, axis: int = 0) -> Tensor:
    return op.Gather(data, indices, axis=axis)  # type: ignore[no-any-return]


def _whole(dims: Tensor) -> Tensor:
    return op.Cast(dims, to=ir.DataType.INT64.value)  # type: ignore[no-any-return]


@expands("PadAndUnflatten")
def _pad_and_unflatten(input: Tensor, indices: Tensor, unflatten_dims: Tensor) -> Tensor:
    dims, rest = _whole(unflatten_dims), op.Shape(input, start=1)
    rows = op.GatherGrad(op.Concat(_product(dims), rest, axis=0), indices, input)
    return op.Reshape(rows, op.Concat(dims, rest, axis=0), allowzero=1)  # type: ignore[no-any-return]


@expands("FlattenAndUnpad")
def _flatten_and_unpad(input: Tensor, indices: Tensor) -> list[Tensor]:
    dims = op.Shape(input, end=2)
    rows = op.Reshape(input, op.Concat(_product(dims), op.Shape(input, start=2), axis=0), allowzero=1)
    return [op.Gather(rows, indices), op.Cast(dims, to=indices.dtype.value)]


@expands("GatherNDGrad")
def _gather_nd_grad(shape: Tensor, indices: Tensor, update: Tensor, *, batch_dims: int = 0) -> Tensor:
    data = _shaped(shape, update.dtype)
    return gradients(op.GatherND(data, indices, batch_dims=batch_dims), update, "data")[0]


def _shaped(shape: Tensor, dtype: ir.DataType) -> Tensor:
    """A tensor of a shape that is an input: the one whose shape it is, if that is known, or zeros."""
    node = shape.value.producer()
    if node is not None and node.op_type == "Shape" and not node.attributes and node.inputs[0] is not None:
        return shape.builder.tensor(node.inputs[0])
    return op.Expand(builder_at_work().constant(0, dtype), shape)  # type: ignore[no-any-return]
