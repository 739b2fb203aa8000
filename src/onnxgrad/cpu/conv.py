"""ConvGrad on the CPU: products of several images at a time, of unfolded ones, or, for small groups, sums over lines.
DepthwiseConv, whose channels are convolved one by one.

Half types are widened to float32 on the way in and rounded on the way out.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from onnxgrad.cpu.core.conv.depthwise import depthwise, forward_tables, input_gradient_tables
from onnxgrad.cpu.core.conv.direct import bias_gradient, clear, direct_weight_gradient
from onnxgrad.cpu.core.conv.input_grad import ELEMENTS, WINDOWS, input_gradient
from onnxgrad.cpu.core.conv.input_grad_batch import IMAGES as ROWS_AT_ONCE
from onnxgrad.cpu.core.conv.input_grad_batch import batch_input_gradient
from onnxgrad.cpu.core.conv.tables import input_tables, line_table, weight_tables
from onnxgrad.cpu.core.conv.weight_grad import COLUMNS, DEPTH, ROWS, chunk_count, panels_of, weight_gradient
from onnxgrad.cpu.core.conv.weight_grad_batch import COPIED_DEPTH as RUN
from onnxgrad.cpu.core.conv.weight_grad_batch import IMAGES as BLOCK
from onnxgrad.cpu.core.conv.weight_grad_batch import batch_weight_gradient, row_step
from onnxgrad.cpu.core.convert import narrow, widen, working_copy
from onnxgrad.cpu.core.matmul.microkernel import CACHE_LINE, gemm_address
from onnxgrad.cpu.core.matmul.microkernel import ROWS as TILE
from onnxgrad.cpu.core.memory import workspace
from onnxgrad.cpu.core.threads import launch
from onnxgrad.ops.conv import axes_of
from onnxgrad.ops.families.windows import ALONE, Axis
from onnxgrad.tensor_types import Array

# Channels of dY in a group for which sums over lines beat products.
FEW_FOR_WEIGHTS = 4
# For which several images at a time beat unfolding: channels of the image in a group, and images.
CHANNELS_FOR_INPUT = 16
IMAGES_FOR_WEIGHTS = 4
TASKS = 16  # wanted
RESULT = 1 << 18  # bytes of dW in a task, about: they stay in the second-level cache
AT_ONCE = 1 << 26  # bytes of X and dY that are laid out anew at a time, about


def conv_grad(
    dY: Array,
    X: Array,
    W: Array,
    dX: Array | None,
    dW: Array | None,
    dB: Array | None,
    auto_pad: str,
    dilations: Sequence[int] | None,
    group: int,
    kernel_shape: Sequence[int] | None,
    pads: Sequence[int] | None,
    strides: Sequence[int] | None,
) -> None:
    axes = _axes(X, W, {"auto_pad": auto_pad, "dilations": dilations, "pads": pads, "strides": strides})
    g = widen(dY)
    sizes = X.shape[0], group, X.shape[1] // group, W.shape[0] // group
    is_empty = 0 in (*dY.shape, *X.shape, *W.shape)
    if dX is not None:
        result = working_copy(dX, X.dtype)
        _clear(result) if is_empty else _input(g, widen(W), result, sizes, axes)
        narrow(result, dX)
    if dW is not None:
        result = working_copy(dW, X.dtype)
        _clear(result) if is_empty else _weights(g, widen(X), result, sizes, axes)
        narrow(result, dW)
    if dB is not None:
        result = working_copy(dB, X.dtype)
        launch(bias_gradient, g, result, X.shape[0], math.prod(dY.shape[2:]), bytes_touched=g.nbytes)
        narrow(result, dB)


def depthwise_conv(
    X: Array,
    W: Array,
    B: Array | None,
    Y: Array,
    dilations: Sequence[int] | None,
    group: int,
    pads: Sequence[int] | None,
    strides: Sequence[int] | None,
) -> None:
    axes = _axes(X, W, {"auto_pad": "NOTSET", "dilations": dilations, "pads": pads, "strides": strides})
    if 0 in Y.shape:
        return
    result = working_copy(Y, X.dtype)
    bias = np.empty(0, result.dtype) if B is None else widen(B)
    images, channels = X.shape[:2]
    tables = forward_tables((*[ALONE] * (2 - len(axes)), *axes), channels)
    work = Y.size * W.size // channels // 4
    launch(depthwise, widen(X), widen(W), bias, result, *tables, images * channels, bytes_touched=work)
    narrow(result, Y)


def _axes(X: Array, W: Array, attributes: dict[str, Any]) -> list[Axis]:
    """The stride after a single window is of no matter, and would take memory."""
    return [a if a.windows > 1 else a._replace(stride=1) for a in axes_of(X, W, attributes)]


def _clear(array: Array) -> None:
    launch(clear, array, bytes_touched=array.nbytes)


def _tables(axes: Sequence[Axis]) -> tuple[Array, Array, tuple[int, ...]]:
    """`lines`, `taps` and `geometry`, as core/conv/im2col.py describes them."""
    last, lines = axes[-1], line_table(tuple(axes))
    taps = np.array([last.reads(k) for k in range(last.kernel)], np.int64)
    geometry = (
        math.prod(a.size for a in axes), lines.shape[1], last.windows, lines.shape[0], last.kernel, last.stride,
    )  # fmt: skip
    return np.where(lines < 0, -1, lines * last.size).reshape(-1), taps.reshape(-1), geometry


def _work(sizes: tuple[int, ...], geometry: tuple[int, ...]) -> int:
    """Multiplications, counted as bytes that many threads might go over."""
    images, groups, inputs, outputs = sizes
    return images * groups * inputs * outputs * math.prod(geometry[1:5]) // 16


def _is_depthwise(groups: int, inputs: int, outputs: int, axes: int) -> bool:
    """Whether channels are convolved one by one, in one or two dimensions."""
    return groups > 1 and inputs == outputs == 1 and axes <= 2


def _is_small(sizes: tuple[int, ...], few: int) -> bool:
    return sizes[1] > 1 and sizes[3] <= few


def _is_plain(axes: Sequence[Axis]) -> bool:
    """Whether windows are elements of the image, one for one."""
    return all((a.kernel, a.stride, a.before, a.windows) == (1, 1, 0, a.size) for a in axes)


def _weights(dY: Array, X: Array, dW: Array, sizes: tuple[int, ...], axes: Sequence[Axis]) -> None:
    lines, taps, geometry = _tables(axes)
    images, groups, inputs, outputs = sizes
    if _is_small(sizes, FEW_FOR_WEIGHTS):
        last = axes[-1]
        last_axis = last.size, last.before, last.dilation
        launch(
            direct_weight_gradient,
            dY,
            X,
            dW,
            lines,
            taps,
            geometry,
            sizes,
            last_axis,
            bytes_touched=_work(sizes, geometry),
        )
        return
    if geometry[3] * geometry[4] > 1 and images >= IMAGES_FOR_WEIGHTS:
        _weights_batch(dY, X, dW, sizes, axes, lines, geometry)
        return
    windows = geometry[1] * geometry[2]
    is_plain = _is_plain(axes) and 2 * windows > DEPTH
    is_one_block = is_plain and max(inputs, outputs) <= COLUMNS and dW.nbytes // groups <= RESULT
    # One block packs dY where it uses it, best the larger of the two; else it is written and read again: the smaller.
    is_swapped = is_plain and (inputs > outputs if is_one_block else inputs < outputs)
    if is_swapped:
        dY, X, inputs, outputs = X, dY, outputs, inputs
        sizes = images, groups, inputs, outputs
    rows = inputs * geometry[3] * geometry[4]
    row_blocks, column_blocks = 1 if is_one_block else -(-rows // ROWS), -(-outputs // COLUMNS)
    height = -(-rows // row_blocks // TILE) * TILE
    cuts = height, -(-rows // height), column_blocks
    chunks = chunk_count(images, windows, groups * cuts[1] * column_blocks)
    needed = images * groups * panels_of(dW, outputs) * windows + CACHE_LINE
    packed = workspace((needed if cuts[1] * column_blocks > 1 else 0,), dW.dtype)
    partial_sums = workspace((chunks * dW.size,), dW.dtype)
    launch(
        weight_gradient, dY, X, dW, packed, partial_sums, lines, taps, geometry, sizes, cuts, chunks,
        is_plain, is_swapped, gemm_address(dW.dtype),
        bytes_touched=_work(sizes, geometry),
    )  # fmt: skip


def _input(dY: Array, W: Array, dX: Array, sizes: tuple[int, ...], axes: Sequence[Axis]) -> None:
    lines, taps, geometry = _tables(axes)
    images, groups, inputs, outputs = sizes
    if _is_depthwise(groups, inputs, outputs, len(axes)):
        tables = input_gradient_tables((*[ALONE] * (2 - len(axes)), *axes), groups)
        none = np.empty(0, dX.dtype)
        launch(depthwise, dY, W, none, dX, *tables, images * groups, bytes_touched=_work(sizes, geometry))
        return
    kernel = geometry[3] * geometry[4]
    fills_tiles = images >= ROWS_AT_ONCE or 2 * images == ROWS_AT_ONCE
    if kernel > 1 and fills_tiles and inputs >= CHANNELS_FOR_INPUT:
        _input_batch(dY, W, dX, sizes, axes, geometry)
        return
    is_plain = _is_plain(axes) and 2 * geometry[1] * geometry[2] > WINDOWS
    channels = min(inputs, max(1, ELEMENTS // kernel))
    room = -(-channels * kernel // TILE) * TILE
    packed = workspace((groups * -(-inputs // channels) * room * outputs,), dX.dtype)
    launch(
        input_gradient, dY, W, dX, packed, lines, taps, geometry, sizes, channels, is_plain, gemm_address(dX.dtype),
        bytes_touched=_work(sizes, geometry),
    )  # fmt: skip


def _input_batch(
    dY: Array, W: Array, dX: Array, sizes: tuple[int, ...], axes: Sequence[Axis], geometry: tuple[int, ...]
) -> None:
    images, groups, inputs, outputs = sizes
    tables, order, bands, slots = input_tables(tuple(axes), ROWS_AT_ONCE * geometry[2] * outputs * dX.itemsize)
    panels = panels_of(dX, inputs)
    packed = workspace((groups * panels * geometry[3] * geometry[4] * outputs + CACHE_LINE,), dX.dtype)
    tasks = -(-images // ROWS_AT_ONCE) * groups * bands
    cuts = bands, min(panels // panels_of(dX, 1), -(-TASKS // tasks)), slots
    launch(
        batch_input_gradient, dY, W, dX, packed, order, tables, sizes, geometry, cuts, gemm_address(dX.dtype),
        bytes_touched=_work(sizes, geometry),
    )  # fmt: skip


def _weights_batch(
    dY: Array,
    X: Array,
    dW: Array,
    sizes: tuple[int, ...],
    axes: Sequence[Axis],
    lines: Array,
    geometry: tuple[int, ...],
) -> None:
    images, groups, inputs, outputs = sizes
    area, out_lines, width = geometry[:3]
    taps, places = weight_tables(axes[-1])
    together = min(images, BLOCK * max(1, RUN // (BLOCK * width)))
    transposed_block = groups * inputs * row_step(area * together, dW)
    packed_block = groups * panels_of(dW, outputs) * out_lines * width * together
    most = max(1, AT_ONCE // ((transposed_block + packed_block) * dW.itemsize))
    blocks = min(most, -(-images // together))
    # Tasks are made of chunks as long as adding these up is little beside reading dY, else of channels of the image.
    column_blocks, is_gathered = -(-outputs // COLUMNS), inputs < TILE
    fixed = groups * column_blocks
    chunks = max(1, min(blocks * out_lines, -(-TASKS // fixed), dY.nbytes // dW.nbytes // 2))
    row_blocks = 1 if is_gathered else max(-(-dW.nbytes // fixed // RESULT), -(-TASKS // (fixed * chunks)))
    height = inputs if is_gathered else -(-inputs // row_blocks // TILE) * TILE
    row_blocks = -(-inputs // height)
    packed = workspace((blocks * packed_block + CACHE_LINE if row_blocks * column_blocks > 1 else 0,), dW.dtype)
    transposed = workspace((blocks * transposed_block + CACHE_LINE,), dW.dtype)
    partial_sums = workspace((chunks * dW.size,), dW.dtype)
    cuts = together, blocks * together, height, row_blocks, column_blocks, chunks, int(is_gathered)
    launch(
        batch_weight_gradient, dY, X, dW, packed, transposed, partial_sums, lines, taps, places, geometry, sizes,
        cuts, gemm_address(dW.dtype),
        bytes_touched=_work(sizes, geometry),
    )  # fmt: skip
