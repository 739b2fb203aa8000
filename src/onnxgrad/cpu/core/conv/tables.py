"""Tables for the convolutions that take several images at a time: which lines, taps and windows meet."""

import functools
import math

import numpy as np

from onnxgrad.ops.families.windows import Axis
from onnxgrad.tensor_types import Array

BAND = 320  # elements of an image in a band, about, so that a band's result stays in cache
SEEN = 1 << 20  # bytes of dY that a band sees, about


def line_table(axes: tuple[Axis, ...]) -> Array:
    """[kernel line, output line]: the line of the image that is seen, or -1 in the padding."""
    lines, sees = np.zeros((1, 1), np.int64), np.ones((1, 1), np.bool_)
    for axis in axes[:-1]:
        place = np.arange(axis.kernel)[:, None] * axis.dilation + np.arange(axis.windows) * axis.stride - axis.before
        # [kernel lines so far, this axis' kernel, output lines so far, this axis' windows]
        shape = lines.shape[0] * axis.kernel, lines.shape[1] * axis.windows
        inside = (place >= 0) & (place < axis.size)
        lines = (lines[:, None, :, None] * axis.size + place[None, :, None, :]).reshape(shape)
        sees = (sees[:, None, :, None] & inside[None, :, None, :]).reshape(shape)
    return np.where(sees, lines, -1)


def _seen_from(lines: Array, in_lines: int) -> Array:
    """[kernel line, line of the image]: the output line that sees it, or -1."""
    result = np.full((lines.shape[0], in_lines), -1, np.int64)
    kernel_line, out_line = np.nonzero(lines >= 0)
    result[kernel_line, lines[kernel_line, out_line]] = out_line
    return result


def _runs(last: Axis) -> tuple[Array, Array, Array]:
    """`spots`, `runs` and `order`, as core/conv/input_grad_batch.py describes them."""
    starts = [k * last.dilation - last.before for k in range(last.kernel)]
    places = sorted(range(last.kernel), key=lambda k: (starts[k] % last.stride, -k))
    spots, runs = [0], []
    for x in range(last.size):
        found: list[list[int]] = []
        for place, tap in enumerate(places):
            window, rest = divmod(x - starts[tap], last.stride)
            if rest or not 0 <= window < last.windows:
                continue
            if found and (place, window) == (found[-1][0] + found[-1][2], found[-1][1] + found[-1][2]):
                found[-1][2] += 1
            else:
                found.append([place, window, 1])
        runs += found
        spots.append(len(runs))
    return np.array(spots), np.array(runs, np.int64).reshape(-1), np.argsort(places)


@functools.lru_cache(64)
def input_tables(axes: tuple[Axis, ...], line_bytes: int) -> tuple[tuple[Array, ...], Array, int, int]:
    """Tables and `order` of input_grad_batch.py, bands, and slots of a band; a line of dY has `line_bytes`."""
    last, in_lines = axes[-1], math.prod(a.size for a in axes[:-1])
    seen = _seen_from(line_table(axes), in_lines)
    height = max(1, min(in_lines, BAND // last.size))
    while height > 1 and max(len(s) for s in _band_lines(seen, height)) * line_bytes > SEEN:
        height = (height + 1) // 2
    bands: list[tuple[int, ...]] = []
    stretches: list[tuple[int, ...]] = []
    slots = np.full_like(seen, -1)
    needed = _band_lines(seen, height)
    for band, seen_from in enumerate(needed):
        begin, end = band * height, min(in_lines, (band + 1) * height)
        cuts = np.flatnonzero(np.diff(seen_from) != 1) + 1
        chunks = np.split(np.arange(len(seen_from)), cuts) if len(seen_from) else []
        bands.append((begin, end, len(stretches), len(stretches) + len(chunks)))
        stretches += [(seen_from[p[0]], len(p), p[0]) for p in chunks]
        here = seen[:, begin:end]
        slots[:, begin:end] = np.where(here < 0, -1, np.searchsorted(seen_from, here))
    spots, runs, order = _runs(last)
    flat = tuple(np.array(t, np.int64).reshape(-1) for t in (bands, stretches, slots, spots, runs))
    return flat, order, len(bands), max(len(s) for s in needed)


def _band_lines(seen: Array, height: int) -> list[Array]:
    """The output lines that each band of so many lines is seen from."""
    bands = (np.unique(seen[:, begin : begin + height]) for begin in range(0, seen.shape[1], height))
    return [found[found >= 0] for found in bands]


@functools.lru_cache(64)
def weight_tables(last: Axis) -> tuple[Array, Array]:
    """`taps` and `places` of core/conv/weight_grad_batch.py."""
    step = last.stride
    firsts = np.cumsum([0, *(len(range(phase, last.size, step)) for phase in range(step))])
    taps = []
    for k in range(last.kernel):
        first, end, start = last.reads(k)
        taps.append((first, end, firsts[start % step] + start // step))
    where = np.arange(last.size)
    places = firsts[where % step] + where // step if step > 1 else where[:0]
    return np.array(taps, np.int64).reshape(-1), np.ascontiguousarray(places, np.int64)
