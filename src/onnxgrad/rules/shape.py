"""Operators that move numbers without changing them: shapes, types, copies, orders."""

import numpy as np

from onnxgrad.graph.node import NodeView
from onnxgrad.graph.tensor import Tensor
from onnxgrad.rules import no_gradient, nondiff, op, vjp

vjp("Identity", input=lambda g, n: g)
vjp("Cast", input=lambda g, n: op.CastLike(g, n.input))
vjp("CastLike", input=lambda g, n: op.CastLike(g, n.input), target_type=nondiff)


def reshaped_like(g: Tensor, x: Tensor) -> Tensor:
    """The same elements in the shape of another tensor, also where there are none."""
    known = x.static_shape
    return op.Reshape(g, op.Shape(x), allowzero=None if known is not None and 0 not in known else 1)


vjp("Reshape", data=lambda g, n: reshaped_like(g, n.data), shape=nondiff)
vjp("Squeeze", data=lambda g, n: reshaped_like(g, n.data), axes=nondiff)
vjp("Unsqueeze", data=lambda g, n: reshaped_like(g, n.data), axes=nondiff)
vjp("Flatten", input=lambda g, n: reshaped_like(g, n.input))
vjp("Expand", broadcast=True, input=lambda g, n: g, shape=nondiff)

no_gradient("Shape", "Size", "ConstantOfShape", "NonZero", "EyeLike")
vjp(
    "Range",
    start=lambda g, n: op.ReduceSum(g, keepdims=0),
    limit=nondiff,
    delta=lambda g, n: op.ReduceSum(g * op.CastLike(op.Range(0, op.Size(g), 1), g), keepdims=0),
)


def filled_like(x: Tensor, number: float) -> Tensor:
    """A tensor of the type and shape of another, the number everywhere."""
    return op.Expand(x.builder.constant(number, x.dtype), op.Shape(x))


def size_along(x: Tensor, axis: int) -> Tensor:
    """The size of one dimension, as a vector of one element."""
    return op.Shape(x, start=axis, end=None if axis == -1 else axis + 1)


def _transpose(g: Tensor, n: NodeView) -> Tensor:
    perm = None if n.perm is None else np.argsort(n.perm).tolist()
    return op.Transpose(g, perm=perm)


vjp("Transpose", data=_transpose)


def _concat(g: Tensor, n: NodeView, k: int) -> Tensor:
    if len(n.inputs) == 1:
        return g
    sizes = op.Concat(*(size_along(x, n.axis) for x in n.inputs), axis=0)
    return op.Split(g, sizes, axis=n.axis, outputs=len(n.inputs))[k]


vjp("Concat", inputs=_concat)


def _split(g: Tensor | None, n: NodeView) -> Tensor:
    results = [n.result(k) for k in range(len(n.node.outputs))]
    grads = [n.grad(k) for k in range(len(results))]
    parts = [filled_like(y, 0) if g is None else g for y, g in zip(results, grads, strict=True)]
    return parts[0] if len(parts) == 1 else op.Concat(*parts, axis=n.axis)


vjp("Split", outputs=("outputs",), input=_split, split=nondiff)


def _tile(g: Tensor, n: NodeView) -> Tensor:
    """Each axis that was repeated is split in two, (repeats, size), and the first summed over."""
    repeats = n.repeats.constant
    dims: list[Tensor] = []
    copies = []
    for axis in range(n.input.rank):
        if repeats is None or repeats[axis] != 1:
            copies.append(len(dims))
            dims.append(op.Gather(n.repeats, [axis]))
        dims.append(size_along(n.input, axis))
    if not copies:
        return g
    return op.ReduceSum(op.Reshape(g, op.Concat(*dims, axis=0), allowzero=1), copies, keepdims=0)


vjp("Tile", input=_tile, repeats=nondiff)


def _pad(g: Tensor, n: NodeView) -> Tensor:
    if n.mode == "constant":
        return op.Pad(g, -n.pads, None, n.axes)
    # Along each axis Pad reads the elements that it reads of 0, 1, 2, …
    rank, pads = n.data.rank, _pads_of_all_axes(n)
    known = pads.constant
    for axis in range(rank):
        if known is not None and known[axis] == known[axis + rank] == 0:
            continue
        size = size_along(n.data, axis)
        read = op.Pad(op.Range(0, op.Squeeze(size), 1), op.Gather(pads, [axis, axis + rank]), mode=n.mode)
        shape = op.Concat(op.Shape(g, end=axis), size, op.Shape(g, start=axis + 1), axis=0)
        g = op.GatherGrad(shape, read, g, axis=axis)
    return g


def _pads_of_all_axes(n: NodeView) -> Tensor:
    """First those before the elements of each axis, then those after."""
    if n.axes is None:
        return n.pads
    rank = n.data.rank
    axes = op.Mod(op.Cast(n.axes, to=n.pads.dtype), rank)
    where = op.Concat(axes, axes + rank, axis=0)
    return op.ScatterElements(n.builder.constant([0] * (2 * rank), n.pads.dtype), where, n.pads)


def _pad_value(g: Tensor, n: NodeView) -> Tensor:
    if n.mode != "constant":
        return filled_like(n.constant_value, 0)
    added = op.Pad(filled_like(n.data, 0), n.pads, 1, n.axes)
    return reshaped_like(op.ReduceSum(g * added, keepdims=0), n.constant_value)


vjp("Pad", data=_pad, pads=nondiff, constant_value=_pad_value, axes=nondiff)
vjp(
    "CenterCropPad",
    input_data=lambda g, n: op.CenterCropPad(
        g, op.Shape(n.input_data) if n.axes is None else op.Gather(op.Shape(n.input_data), n.axes), axes=n.axes
    ),
    shape=nondiff,
)


def _depth_to_space(g: Tensor, n: NodeView) -> Tensor:
    if n.mode == "DCR":
        return op.SpaceToDepth(g, blocksize=n.blocksize)
    # SpaceToDepth has no such mode before opset 28, and onnxruntime none yet.
    x, block = n.input, [n.blocksize]
    blocks = op.Concat(op.Shape(g, end=2), size_along(x, 2), block, size_along(x, 3), block, axis=0)
    depth_first = op.Transpose(op.Reshape(g, blocks, allowzero=1), perm=[0, 1, 3, 5, 2, 4])
    return reshaped_like(depth_first, x)


def _space_to_depth(g: Tensor, n: NodeView) -> Tensor:
    mode = n.node.attributes.get_string("mode", "DCR")  # an attribute since opset 28
    return op.DepthToSpace(g, blocksize=n.blocksize, mode=mode)


vjp("DepthToSpace", input=_depth_to_space)
vjp("SpaceToDepth", input=_space_to_depth)
vjp("Trilu", input=lambda g, n: op.Trilu(g, n.k, upper=n.upper), k=nondiff)
vjp(
    "ReverseSequence",
    input=lambda g, n: op.ReverseSequence(g, n.sequence_lens, batch_axis=n.batch_axis, time_axis=n.time_axis),
    sequence_lens=nondiff,
)
