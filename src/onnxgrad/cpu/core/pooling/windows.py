"""Windows of pools in native code: three axes always, the missing ones of length 1."""

import numpy as np

from onnxgrad.cpu.core.jit import inlined, int64
from onnxgrad.ops.families.windows import ALONE, Axis
from onnxgrad.tensor_types import Array

NUMBERS = 6  # of an axis that native code needs


def as_three(axes: list[Axis], windows: tuple[int, ...]) -> Array:
    """One row for each axis, with the number of windows that dY has."""
    padded = [ALONE] * (3 - len(axes)) + [axis._replace(windows=n) for axis, n in zip(axes, windows, strict=True)]
    return np.array([axis[:NUMBERS] for axis in padded], np.int64)


@inlined
def axis_at(layout: Array, a: int) -> tuple[int, int, int, int, int, int]:
    """Size, windows, kernel, stride, dilation and the pad before, of one axis."""
    return layout[a, 0], layout[a, 1], layout[a, 2], layout[a, 3], layout[a, 4], layout[a, 5]


@inlined
def first_inside(begin: int, dilation: int) -> int:
    """The number of the first element of a window that lies in the image, or past it."""
    return int64(0) if begin >= 0 else (-begin + dilation - 1) // dilation


@inlined
def end_inside(begin: int, dilation: int, kernel: int, size: int) -> int:
    """The number after that of the last element of a window that lies in the image, or before it."""
    return int64(0) if begin >= size else min(kernel, (size - begin + dilation - 1) // dilation)
