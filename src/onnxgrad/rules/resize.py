"""Resize: linear in X, and along each axis a product with a matrix, which Resize itself computes from the identity."""

import math
from fractions import Fraction

import onnx_ir as ir

from onnxgrad.graph.node import NodeView
from onnxgrad.graph.tensor import Tensor
from onnxgrad.rules import nondiff, op, vjp
from onnxgrad.rules.shape import size_along

ROUNDED = {
    "round_prefer_floor": lambda x: math.ceil(x - 0.5),
    "round_prefer_ceil": lambda x: math.floor(x + 0.5),
    "floor": math.floor,
    "ceil": math.ceil,
}


def _resize(g: Tensor, n: NodeView) -> Tensor:
    axes = range(n.X.rank) if n.axes is None else [a % n.X.rank for a in n.axes]
    for k, axis in enumerate(axes):
        if not _keeps_size(n, axis, k):
            g = _along(g, n, axis, k, len(axes))
    return g


def _keeps_size(n: NodeView, axis: int, k: int) -> bool:
    """Whether the k-th of the axes resized is known to stay as it is."""
    if n.coordinate_transformation_mode == "tf_crop_and_resize":
        return False
    if n.scales is not None:
        scales = n.scales.constant
        return scales is not None and scales[k] == 1
    if n.keep_aspect_ratio_policy != "stretch":
        return False
    held = n.builder.contents_of(n.sizes.value)
    return held is not None and held[k] is not None and held[k] == n.X.shape[axis]


def _repeats(n: NodeView, axis: int, k: int) -> int:
    """How often each element stands in the result, if that is nothing but each one so many times; else 0."""
    scale = _known_scale(n, axis, k)
    if n.mode != "nearest" or scale is None or scale < 1 or scale != int(scale):
        return 0
    if n.coordinate_transformation_mode == "asymmetric":
        coordinates = [j / scale for j in range(int(scale))]
    elif n.coordinate_transformation_mode in ("half_pixel", "half_pixel_symmetric"):
        coordinates = [(j + 0.5) / scale - 0.5 for j in range(int(scale))]
    else:
        return 0
    return int(scale) if all(ROUNDED[n.nearest_mode](x) == 0 for x in coordinates) else 0


def _known_scale(n: NodeView, axis: int, k: int) -> float | None:
    if n.scales is not None:
        scales = n.scales.constant
        return None if scales is None else float(scales[k])
    sizes, size = n.sizes.constant, n.X.shape[axis]
    if sizes is None or not isinstance(size, int) or size == 0 or n.keep_aspect_ratio_policy != "stretch":
        return None
    return float(sizes[k]) / size


def _along(g: Tensor, n: NodeView, axis: int, k: int, count: int) -> Tensor:
    """The gradient of Resize along one axis."""
    size = size_along(n.X, axis)
    if copies := _repeats(n, axis, k):  # copies are summed, one axis after the other
        dims = op.Concat(op.Shape(g, end=axis), size, [copies], op.Shape(g, start=axis + 1), axis=0)
        return op.ReduceSum(op.Reshape(g, dims, allowzero=1), [axis + 1], keepdims=0)
    positions = op.Range(0, op.Squeeze(size), 1)
    if n.mode == "nearest" and n.coordinate_transformation_mode != "tf_crop_and_resize":
        # Resize tells which elements it reads when it is given their numbers.
        read = op.Cast(_resized(n, op.Cast(positions, to=ir.DataType.FLOAT), k, count), to=ir.DataType.INT64)
        shape = op.Concat(op.Shape(g, end=axis), size, op.Shape(g, start=axis + 1), axis=0)
        return op.GatherGrad(shape, read, g, axis=axis)
    identity = op.Cast(op.Unsqueeze(positions, [1]).equals(positions), to=n.X.dtype)
    matrix = _resized(n, identity, k, count)
    last = n.X.rank - 1
    if axis == last:
        return g @ matrix
    if axis == last - 1:
        return op.Transpose(matrix, perm=[1, 0]) @ g
    swapped = list(range(last + 1))
    swapped[axis], swapped[last] = last, axis
    return op.Transpose(op.Transpose(g, perm=swapped) @ matrix, perm=swapped)


def _resized(n: NodeView, x: Tensor, k: int, count: int) -> Tensor:
    """Resize of the first axis of x, as the node does it to the k-th of its axes."""
    attributes = {a.name: a.value for a in n.node.attributes.values()}
    attributes |= {"axes": [0], "extrapolation_value": 0.0}
    roi = None
    if n.coordinate_transformation_mode == "tf_crop_and_resize" and n.roi is not None:
        roi = op.Gather(n.roi, [k, k + count])
    if n.scales is not None:
        return op.Resize(x, roi, op.Gather(n.scales, [k]), **attributes)
    size = op.Gather(n.sizes, [k])
    if n.keep_aspect_ratio_policy == "stretch":
        return op.Resize(x, roi, None, size, **attributes)
    if roi is not None:
        raise ValueError("tf_crop_and_resize has a gradient only with keep_aspect_ratio_policy 'stretch'")
    # All axes are scaled as one of them is: so x gets a second axis, with the sizes of that one.
    before, after = _sizes_of_scale(n)
    columns = op.Transpose(x) if x.rank == 2 else op.Unsqueeze(x, [0])
    wide = op.Expand(op.Unsqueeze(columns, [0, 3]), op.Concat([1, 1, 1], before, axis=0))
    resized = op.Resize(wide, None, None, op.Concat(size, after, axis=0), **attributes | {"axes": [2, 3]})
    one = op.Squeeze(op.Gather(resized, 0, axis=3), [0])
    return op.Transpose(one, perm=[1, 0]) if x.rank == 2 else op.Squeeze(one, [0])


def _sizes_of_scale(n: NodeView) -> tuple[Tensor, Tensor]:
    """Sizes of an axis before and after that are in the proportion which holds for all axes."""
    dims = op.Shape(n.X) if n.axes is None else op.Gather(op.Shape(n.X), n.axes)
    smallest = n.keep_aspect_ratio_policy == "not_larger"
    if dims.constant is None or n.sizes.constant is None:
        scales = op.Cast(n.sizes, to=ir.DataType.FLOAT) / op.Cast(dims, to=ir.DataType.FLOAT)
        chosen = op.ArgMin(scales) if smallest else op.ArgMax(scales)
        return op.Gather(dims, chosen), op.Gather(n.sizes, chosen)
    scales = [Fraction(int(after), int(before)) for before, after in zip(dims.constant, n.sizes.constant, strict=True)]
    scale = min(scales) if smallest else max(scales)
    constant = n.builder.constant
    return constant([scale.denominator], ir.DataType.INT64), constant([scale.numerator], ir.DataType.INT64)


vjp("Resize", X=_resize, roi=nondiff, scales=nondiff, sizes=nondiff)
