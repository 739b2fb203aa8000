"""SliceGrad: the gradient of Slice."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from onnxgrad.op import op
from onnxgrad.schema import Dim, Known, agree
from onnxgrad.tensor_types import AnyT, Array, HostIndex, Shape

TO_THE_END = (2**31 - 1, 2**63 - 1)


class Range(NamedTuple):
    """The elements start, start + step, … along one axis, `length` of them."""

    start: int
    step: int
    length: int

    def as_slice(self) -> slice:
        end = self.start + self.step * self.length
        return slice(self.start, end if end >= 0 else None, self.step)  # a negative end would count from the end


def slice_ranges(
    dims: Sequence[int],
    starts: Sequence[int],
    ends: Sequence[int],
    axes: Sequence[int] | None,
    steps: Sequence[int] | None,
) -> list[Range]:
    """What Slice reads along every axis, by ONNX's rules as onnxruntime applies them."""
    ranges = [Range(0, 1, d) for d in dims]
    chosen, strides = axes or range(len(starts)), steps or [1] * len(starts)
    for start, end, axis, step in zip(starts, ends, chosen, strides, strict=True):
        ranges[axis] = _range(start, end, step, dims[axis])
    return ranges


def ranges_of(dims: Sequence[int], starts: Array, ends: Array, axes: Array | None, steps: Array | None) -> list[Range]:
    """The same for arrays."""
    lists = (None if a is None else a.tolist() for a in (axes, steps))
    return slice_ranges(dims, starts.tolist(), ends.tolist(), *lists)


def merged_ranges(
    shape: Sequence[int], starts: Array, ends: Array, axes: Array | None, steps: Array | None
) -> list[tuple[int, Range]]:
    """Length and range of each axis, neighbours joined wherever what is read lies in one piece or at one step."""
    dims = list(zip(shape, ranges_of(shape, starts, ends, axes, steps), strict=True))
    merged = [dims[0]]
    for dim, taken in dims[1:]:
        before, outer = merged[-1]
        if taken == Range(0, 1, dim) and outer.step == 1:
            merged[-1] = (before * dim, Range(outer.start * dim, 1, outer.length * dim))
        elif dim == 1 and taken.length == 1:
            continue
        else:
            merged.append((dim, taken))
    return merged


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
    dims = shape.as_shape
    if dims is None:
        return None
    if not dims:
        raise ValueError("shape is empty, expected at least one dimension")
    values = [None if given is None else given.numbers for given in (starts, ends, axes, steps)]
    first, last, chosen, strides = values
    if first is None or last is None or (axes and chosen is None) or (steps and strides is None):
        if dY.dims is not None and len(dY.dims) != len(dims):
            raise ValueError(f"dY has {len(dY.dims)} dimensions, expected {len(dims)} as shape {list(dims)} has")
        return dims  # the rest is to be seen when the numbers are there
    _check_numbers(len(dims), list(dims), first, last, chosen, strides)
    if dY.dims is not None:
        sizes = [d if isinstance(d, int) else -1 for d in dims]
        ranges = slice_ranges(sizes, first, last, chosen, strides)
        expected = [None if d < 0 else r.length for d, r in zip(sizes, ranges, strict=True)]
        if not agree(dY.dims, expected):
            raise ValueError(f"dY has shape {list(dY.dims)}, expected {expected}, the slice of shape {list(dims)}")
    return dims


def _check_numbers(
    rank: int,
    dims: list[Dim],
    starts: tuple[int, ...],
    ends: tuple[int, ...],
    axes: tuple[int, ...] | None,
    steps: tuple[int, ...] | None,
) -> None:
    for name, given in (("ends", ends), ("axes", axes or starts), ("steps", steps or starts)):
        if len(given) != len(starts):
            raise ValueError(f"{name} has {len(given)} values, expected {len(starts)} as starts has")
    if not axes and len(starts) > rank:
        raise ValueError(f"starts has {len(starts)} values, expected at most {rank} for shape {dims}")
    for axis in axes or ():
        if not -rank <= axis < rank:
            raise ValueError(f"axes names {axis}, expected {-rank} to {rank - 1} for shape {dims}")
    if axes and len({axis % rank for axis in axes}) < len(axes):
        raise ValueError(f"axes is {list(axes)}, expected no axis twice")
    if steps and 0 in steps:
        raise ValueError(f"steps is {list(steps)}, expected no 0")


@op("SliceGrad", outputs="dX", shape=_shape_rule)
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
    ranges = ranges_of(dX.shape, starts, ends, axes, steps)
    dX[tuple(r.as_slice() for r in ranges)] = dY
    return dX
