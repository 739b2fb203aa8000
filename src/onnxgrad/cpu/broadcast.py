"""BroadcastGradientArgs on the CPU: a few integers, so no threads."""

from onnxgrad.cpu.core.halves import flat
from onnxgrad.cpu.core.jit import native
from onnxgrad.ops.broadcast import broadcast_axes
from onnxgrad.tensor_types import Array


def broadcast_gradient_args(a_shape: Array, b_shape: Array, a_axes: Array, b_axes: Array) -> tuple[int, int]:
    if not a_shape.flags.carray:  # looked up here: a call of flat takes as long as listing the axes
        a_shape = flat(a_shape)
    if not b_shape.flags.carray:
        b_shape = flat(b_shape)
    lengths: tuple[int, int] = _fill_axes(a_shape, b_shape, a_axes, b_axes)
    if lengths[0] < 0:
        broadcast_axes(a_shape.tolist(), b_shape.tolist())  # raises, and says where they differ
    return lengths


@native
def _fill_axes(a_shape: Array, b_shape: Array, a_axes: Array, b_axes: Array) -> tuple[int, int]:
    """Lists the axes, from last to first, and tells how many; (-1, -1) if the shapes do not broadcast."""
    rank = max(a_shape.size, b_shape.size)
    a_count, b_count = 0, 0
    for axis in range(rank - 1, -1, -1):
        a_at, b_at = axis - rank + a_shape.size, axis - rank + b_shape.size
        a = a_shape[a_at] if a_at >= 0 else -1  # -1: no such dimension
        b = b_shape[b_at] if b_at >= 0 else -1
        if a == b:
            continue
        if a == -1 or (a == 1 and b != -1):
            a_axes[a_count] = axis
            a_count += 1
        elif b == 1 or b == -1:
            b_axes[b_count] = axis
            b_count += 1
        else:
            return -1, -1
    return a_count, b_count
