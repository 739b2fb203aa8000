"""MaxPoolGrad of squares, two by two, side by side: a vector of windows at a time, maxima and gradient in one pass."""

from typing import Any

from llvmlite import ir
from numba import types

from onnxgrad.cpu.core.halves import zero
from onnxgrad.cpu.core.jit import machine_code, native
from onnxgrad.cpu.core.parallel import parallel
from onnxgrad.cpu.core.pooling.windows import axis_at
from onnxgrad.cpu.core.vectors import INT64, VECTOR_BYTES, Vectors, data_of
from onnxgrad.tensor_types import Array

TASK = 1 << 15  # elements of one task, at least


@machine_code
def _squares(typing_context: Any, X: Any, upper: Any, lower: Any, dY: Any, y_start: Any, dX: Any, windows: Any) -> Any:
    """dX of a row of windows, up to a vector of them, whose two lines begin at `upper` and `lower`."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        x_array, above, below, dy_array, y_at, dx_array, count = values
        v = Vectors(builder, X.dtype.bitwidth // 8)
        lanes = v.lanes
        x_data, dy_data, dx_data = (
            data_of(context, builder, *each) for each in ((X, x_array), (dY, dy_array), (dX, dx_array))
        )

        def vector_at(data: Any, line: Any, half: int) -> Any:
            return v.at(data, builder.add(line, INT64(half * lanes)))

        elements = builder.mul(count, INT64(2))
        masks = [v.compare("<", elements), v.compare("<", elements, lanes)]
        numbers = []
        for line in (above, below):
            upper, lower = [v.masked_load(vector_at(x_data, line, half), valid) for half, valid in enumerate(masks)]
            for first in (0, 1):  # of each pair
                numbers.append(v.shuffle(upper, lower, list(range(first, 2 * lanes, 2))))
        best = ir.Constant(v.type, [float("-inf")] * lanes)
        larger = []
        for number in numbers:
            larger.append(builder.fcmp_ordered(">", number, best))
            best = builder.select(larger[-1], number, best)
        # The last that is larger than all before has the maximum; if none is larger than -inf, it is the first.
        dy = v.masked_load(v.at(dy_data, y_at), v.compare("<", count))
        free, gradients = ir.Constant(v.mask_type, [1] * lanes), []
        for position in (3, 2, 1, 0):
            here = builder.and_(free, larger[position]) if position > 0 else free
            gradients.append(builder.select(here, dy, v.zeros))
            free = builder.and_(free, builder.not_(here))
        gradients.reverse()
        for row, line in enumerate((above, below)):
            pair = gradients[2 * row], gradients[2 * row + 1]
            for half, valid in enumerate(masks):
                together = [half * lanes // 2 + k // 2 + k % 2 * lanes for k in range(lanes)]
                v.masked_store(v.shuffle(*pair, together), vector_at(dx_data, line, half), valid)
        return context.get_dummy_value()

    n = types.int64
    return types.void(X, n, n, dY, n, dX, n), generate


def are_squares(layout: Array) -> bool:
    """Whether windows are two by two elements of a plane, side by side from its first corner on, none reaching out."""
    depth, *plane = layout.tolist()
    is_flat = depth[0] == depth[1] and depth[2:4] == [1, 1] and depth[5] == 0
    return is_flat and all(axis[2:] == [2, 2, 1, 0] and 2 * axis[1] <= axis[0] for axis in plane)


@native
def _planes(task: int, dY: Array, X: Array, dX: Array, layout: Array, planes: int, per_task: int) -> None:
    H, OH, _, _, _, _ = axis_at(layout, 1)
    W, OW, _, _, _, _ = axis_at(layout, 2)
    lanes = VECTOR_BYTES // X.itemsize
    for plane in range(task * per_task, min(planes, (task + 1) * per_task)):
        for row in range(OH):
            upper, y = (plane * H + 2 * row) * W, (plane * OH + row) * OW
            for first in range(0, OW, lanes):
                at = upper + 2 * first
                _squares(X, at, at + W, dY, y + first, dX, min(lanes, OW - first))
            if 2 * OW < W:
                zero(dX, upper + 2 * OW, upper + W)
                zero(dX, upper + W + 2 * OW, upper + 2 * W)
        zero(dX, (plane * H + 2 * OH) * W, (plane + 1) * H * W)


@native
def squares_gradient(dY: Array, X: Array, dX: Array, layout: Array, planes: int, scheduler: int) -> None:
    """dX, for a `layout` of squares; a plane is an image of one channel."""
    planes *= layout[0, 0]
    per_task = max(1, TASK // (dX.size // planes))
    parallel(scheduler, (planes + per_task - 1) // per_task, _planes, (dY, X, dX, layout, planes, per_task))
