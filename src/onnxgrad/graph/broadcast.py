"""Undoing a broadcast: a gradient summed to the shape of what was broadcast."""

from collections.abc import Sequence
from typing import Any

from onnxgrad.graph.builder import op
from onnxgrad.graph.tensor import Tensor


def sum_to_shape(g: Tensor, x: Tensor) -> Tensor:
    """Undoes a broadcast: `g` summed to the shape of `x`."""
    have, want = g.shape, x.shape
    if have is not None and have == want and None not in have:
        return g
    if have is not None and want is not None and _comparable(have, want):
        lead = len(have) - len(want)
        ones = [lead + k for k, d in enumerate(want) if d == 1 and have[lead + k] != 1]
        if ones:
            g = op.ReduceSum(g, [*range(lead), *ones] if lead == 0 else ones, keepdims=1)
        return op.ReduceSum(g, [*range(lead)], keepdims=0) if lead else g
    shape = op.Shape(x)
    if have is not None and want is not None and len(have) == len(want):
        # Axes of one element, which may be one in `g`, too. Stock onnxruntime takes 20 µs for the gradient of a Loop's
        # step instead of 52 (EPYC): there BroadcastGradientArgs is some 40 nodes.
        axes = op.Squeeze(op.NonZero(shape.equals(1)), [0])
    else:
        axes = op.BroadcastGradientArgs(shape, op.Shape(g), outputs=2)[0]
    # Without axes ReduceSum would sum over all of them, unless told not to.
    return op.Reshape(op.ReduceSum(g, axes, keepdims=1, noop_with_empty_axes=1), shape, allowzero=1)


def _comparable(have: Sequence[Any], want: Sequence[Any]) -> bool:
    """Whether it is known which axes were broadcast: each dimension is 1, or the same in both."""
    lead = len(have) - len(want)
    return lead >= 0 and all(d == 1 or (d is not None and d == have[lead + k]) for k, d in enumerate(want))
