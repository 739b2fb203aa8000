"""MaxPoolGrad of squares, two by two, side by side: a vector of windows at a time, maxima and gradient in one pass."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from onnxgrad.cpu.core.halves import zero
from onnxgrad.cpu.core.jit import machine_code, native
from onnxgrad.cpu.core.matmul.microkernel import VECTOR_BYTES
from onnxgrad.cpu.core.parallel import parallel
from onnxgrad.cpu.core.pooling.windows import axis_at
from onnxgrad.tensor_types import Array

TASK = 1 << 15  # elements of one task, at least
INT64, INT32, BIT = ir.IntType(64), ir.IntType(32), ir.IntType(1)


@machine_code
def _squares(typing_context: Any, X: Any, upper: Any, lower: Any, dY: Any, y_start: Any, dX: Any, windows: Any) -> Any:
    """dX of a row of windows, up to a vector of them, whose two lines begin at `upper` and `lower`."""
    size = X.dtype.bitwidth // 8
    lanes = VECTOR_BYTES // size
    vector = ir.VectorType(ir.FloatType() if size == 4 else ir.DoubleType(), lanes)
    mask_type, counts = ir.VectorType(BIT, lanes), ir.VectorType(INT64, lanes)

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        x_array, above, below, dy_array, y_at, dx_array, count = values
        name = f"v{lanes}f{size * 8}"
        nothing = ir.Constant(vector, None)

        def function(result: Any, arguments: list[Any], intrinsic_name: str) -> Any:
            return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, arguments), intrinsic_name)

        def vector_at(kind: Any, array: Any, start: Any, offset: int) -> Any:
            data = context.make_array(kind)(context, builder, array).data
            return builder.bitcast(builder.gep(data, [builder.add(start, INT64(offset))]), vector.as_pointer())

        def order(numbers: list[int]) -> Any:
            return ir.Constant(ir.VectorType(INT32, lanes), numbers)

        def mask(first: int, end: Any) -> Any:
            alone = builder.insert_element(ir.Constant(counts, ir.Undefined), end, INT32(0))
            spread = builder.shuffle_vector(alone, ir.Constant(counts, ir.Undefined), order([0] * lanes))
            return builder.icmp_signed("<", ir.Constant(counts, list(range(first, first + lanes))), spread)

        masked_load = function(
            vector, [vector.as_pointer(), INT32, mask_type, vector], f"llvm.masked.load.{name}.p0{name}"
        )
        masked_store = function(
            ir.VoidType(), [vector, vector.as_pointer(), INT32, mask_type], f"llvm.masked.store.{name}.p0{name}"
        )
        elements = builder.mul(count, INT64(2))
        masks = [mask(0, elements), mask(lanes, elements)]
        numbers = []
        for line in (above, below):
            halves = [
                builder.call(masked_load, [vector_at(X, x_array, line, half * lanes), INT32(size), valid, nothing])
                for half, valid in enumerate(masks)
            ]
            for first in (0, 1):  # of each pair
                numbers.append(builder.shuffle_vector(*halves, order(list(range(first, 2 * lanes, 2)))))
        best = ir.Constant(vector, [float("-inf")] * lanes)
        larger = []
        for number in numbers:
            larger.append(builder.fcmp_ordered(">", number, best))
            best = builder.select(larger[-1], number, best)
        # The last that is larger than all before has the maximum; if none is larger than -inf, it is the first.
        dy = builder.call(masked_load, [vector_at(dY, dy_array, y_at, 0), INT32(size), mask(0, count), nothing])
        free, gradients = ir.Constant(mask_type, [1] * lanes), []
        for position in (3, 2, 1, 0):
            here = builder.and_(free, larger[position]) if position > 0 else free
            gradients.append(builder.select(here, dy, nothing))
            free = builder.and_(free, builder.not_(here))
        gradients.reverse()
        for row, line in enumerate((above, below)):
            pair = gradients[2 * row], gradients[2 * row + 1]
            for half, valid in enumerate(masks):
                together = [half * lanes // 2 + k // 2 + k % 2 * lanes for k in range(lanes)]
                result = builder.shuffle_vector(*pair, order(together))
                place = vector_at(dX, dx_array, line, half * lanes)
                builder.call(masked_store, [result, place, INT32(size), valid])
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
