"""BroadcastGradientArgs on the CPU: a few integers, so no threads."""

from onnxgrad.cpu.core.jit import native
from onnxgrad.tensor_types import Array


def broadcast_gradient_args(a_shape: Array, b_shape: Array, a_axes: Array, b_axes: Array) -> None:
    _fill_axes(a_shape, b_shape, a_axes, b_axes)


@native
def _fill_axes(a_shape: Array, b_shape: Array, a_axes: Array, b_axes: Array) -> None:
    """Lists the axes, from last to first; the shapes are known to broadcast and the outputs to be long enough."""
    rank = max(a_shape.size, b_shape.size)
    a_count, b_count = 0, 0
    for k in range(1, rank + 1):
        a = a_shape[a_shape.size - k] if k <= a_shape.size else -1
        b = b_shape[b_shape.size - k] if k <= b_shape.size else -1
        if a == -1 or (a == 1 and b != 1 and b != -1):
            a_axes[a_count] = rank - k
            a_count += 1
        elif b == -1 or (b == 1 and a != 1):
            b_axes[b_count] = rank - k
            b_count += 1
