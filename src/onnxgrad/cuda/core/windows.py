"""Windows of pools in Triton: three axes always, the missing ones of length 1."""

from collections.abc import Sequence
from typing import TypeAlias

import triton
import triton.language as tl

from onnxgrad.ops.families.windows import ALONE, Axis

BLOCK = 512  # elements of one program
Layout: TypeAlias = list[int]


def three_axes(axes: list[Axis], windows: Sequence[int]) -> Layout:
    """Sizes, windows, kernel, strides, dilations and pads before, of all axes each."""
    padded = [ALONE] * (3 - len(axes)) + [axis._replace(windows=n) for axis, n in zip(axes, windows, strict=True)]
    return [axis[k] for k in range(6) for axis in padded]


@triton.jit
def coordinates(at, D, H, W):
    """(plane, d, h, w) of a flat position."""
    row = at // W
    return row // H // D, row // H % D, row % H, at % W


@triton.jit
def window_of(place, step, windows, S: tl.constexpr, D: tl.constexpr, B: tl.constexpr):
    """Along one axis: the window in which this place is the element of that number, and whether there is one."""
    distance = place + B - step * D
    window = distance // S
    return window, (distance >= 0) & (distance % S == 0) & (window < windows)
