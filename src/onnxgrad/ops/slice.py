"""SliceGrad: the gradient of Slice."""

from typing import NamedTuple

import numpy as np

from onnxgrad.op import op
from onnxgrad.schema import Dim, Known
from onnxgrad.tensor_types import AnyT, Array, HostIndex, Shape

TO_THE_END = (2**31 - 1, 2**63 - 1)


class Range(NamedTuple):
    """The elements start, start + step, … along one axis, `length` of them."""

    start: int
    step: int
    length: int


def slice_ranges(shape: Array, starts: Array, ends: Array, axes: Array | None, steps: Array | None) -> list[Range]:
    """What Slice reads along every axis, by ONNX's rules as onnxruntime applies them."""
    dims = shape.tolist()
    ranges = [Range(0, 1, d) for d in dims]
    count = len(starts)
    chosen = list(range(count)) if axes is None or len(axes) == 0 else axes.tolist()
    strides = [1] * count if steps is None or len(steps) == 0 else steps.tolist()
    for start, end, axis, step in zip(starts.tolist(), ends.tolist(), chosen, strides, strict=True):
        ranges[axis] = _range(start, end, step, dims[axis])
    return ranges


def _range(start: int, end: int, step: int, dim: int) -> Range:
    if dim == 0:
        return Range(0, 1, 0)
    start = start + dim if start < 0 else start
    if end in TO_THE_END:
        end = dim if step > 0 else -1
    else:
        end = end + dim if end < 0 else end
        end = min(max(end, 0 if step > 0 else -1), dim)
    start = min(max(start, 0), dim if step > 0 else dim - 1)
    length = max(0, -(-(end - start) // step))
    return Range(start, step, length) if length > 1 else Range(start, 1, length)


def _shape_rule(
    dY: Known, shape: Known, starts: Known, ends: Known, axes: Known | None, steps: Known | None
) -> tuple[Dim, ...] | None:
    return shape.as_shape


def _check(dY: Array, shape: Array, starts: Array, ends: Array, axes: Array | None, steps: Array | None) -> None:
    dims = shape.tolist()
    if not dims:
        raise ValueError("shape is empty, expected at least one dimension")
    for name, given in (("ends", ends), ("axes", axes), ("steps", steps)):
        absent = given is None or (name != "ends" and len(given) == 0)
        if not absent and given is not None and len(given) != len(starts):
            raise ValueError(f"{name} has {len(given)} values, expected {len(starts)} as starts has")
    if axes is None or len(axes) == 0:
        if len(starts) > len(dims):
            raise ValueError(f"starts has {len(starts)} values, expected at most {len(dims)} for shape {dims}")
    else:
        for axis in axes.tolist():
            if not -len(dims) <= axis < len(dims):
                raise ValueError(f"axes names {axis}, expected {-len(dims)} to {len(dims) - 1} for shape {dims}")
        if len({axis % len(dims) for axis in axes.tolist()}) < len(axes):
            raise ValueError(f"axes is {axes.tolist()}, expected no axis twice")
    if steps is not None and 0 in steps.tolist():
        raise ValueError(f"steps is {steps.tolist()}, expected no 0")
    expected = tuple(r.length for r in slice_ranges(shape, starts, ends, axes, steps))
    if dY.shape != expected:
        raise ValueError(f"dY has shape {list(dY.shape)}, expected {list(expected)}, the slice of shape {dims}")


@op("SliceGrad", outputs="dX", shape=_shape_rule, check=_check)
def slice_grad(
    dY: AnyT,
    shape: Shape,
    starts: HostIndex,
    ends: HostIndex,
    axes: HostIndex | None = None,
    steps: HostIndex | None = None,
) -> AnyT:
    """Gradient of Slice: dY laid into zeros of `shape`, where Slice had read it.

    starts, ends, axes and steps mean what they mean to Slice: absent axes are the first ones, absent steps 1,
    negative values count from the end, an end of INT32_MAX or INT64_MAX runs to the end (for negative steps: through
    element 0), what lies outside is clamped.
    """
    dX = np.zeros(shape.tolist(), dY.dtype)
    where = np.ix_(*[r.start + r.step * np.arange(r.length) for r in slice_ranges(shape, starts, ends, axes, steps)])
    dX[where] = dY
    return dX
