"""DropoutGrad, and SeededDropout: Dropout whose choice follows from a seed alone, so that its gradient is itself."""

from typing import Annotated

import numpy as np

from onnxgrad.op import op
from onnxgrad.schema import OWN, Dim, Known, agree
from onnxgrad.tensor_types import FLOATS, Array, T, TypeConstraint, accumulator

Ratio = Annotated[Array, TypeConstraint("T1", FLOATS)]
Flags = Annotated[Array, TypeConstraint("T2", ("bool",))]
Seed = Annotated[Array, TypeConstraint("Tseed", ("int64",))]

# The generator is splitmix64: a counter, multiplied and mixed. It has no state, so any element can be drawn alone.
GAMMA, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
BITS = 24  # of a draw that are compared with the ratio


def splitmix(z: Array) -> Array:
    """Numbers of 64 bits, mixed."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(FIRST)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(SECOND)
    mixed: Array = z ^ (z >> np.uint64(31))
    return mixed


def batch_seed(seed: int, batch: int) -> int:
    """What the choices in a batch depend on, given the seed of a run and the number of the batch."""
    counter = (seed + (batch + 1) * GAMMA) % 2**64
    return int(splitmix(np.array([counter], np.uint64))[0] >> np.uint64(1))


def threshold(ratio: float) -> int:
    """Draws below it are dropped."""
    return int(ratio * 2**BITS + 0.5)


def _shape_rule(data: Known, seed: Known, ratio: float) -> tuple[Dim, ...] | None:
    if not 0 <= ratio < 1:
        raise ValueError(f"ratio is {ratio}, expected a number of at least 0 and under 1")
    if seed.dims is not None and len(seed.dims) != 0 and seed.dims != (1,):
        raise ValueError(f"seed has shape {list(seed.dims)}, expected a single number")
    return data.dims


@op("SeededDropout", domain=OWN, outputs="output", shape=_shape_rule)
def seeded_dropout(data: T, seed: Seed, ratio: float = 0.5) -> T:
    """Zeroes about `ratio` of the numbers and multiplies the others by 1 / (1 - ratio).

    Which ones depends on `seed`, one number, and on their positions: the same seed makes the same choice, on any device
    and in any order. So the gradient is the operator itself, applied to the gradient of the output.
    """
    with np.errstate(over="ignore"):
        z = np.arange(1, data.size + 1, dtype=np.uint64) + seed.reshape(-1)[:1].astype(np.uint64)
        z = splitmix(z * np.uint64(GAMMA))
    kept = (z >> np.uint64(64 - BITS)) >= threshold(ratio)
    work = accumulator(data.dtype)
    scaled = data.astype(work) * work.type(1 / (1 - ratio))
    dropped: Array = np.where(kept.reshape(data.shape), scaled, work.type(0))
    return dropped.astype(data.dtype)


def _grad_shape_rule(
    dy: Known, mask: Known, ratio: Known | None, training_mode: Known | None
) -> tuple[Dim, ...] | None:
    for name, given in (("ratio", ratio), ("training_mode", training_mode)):
        if given is not None and given.dims is not None and given.dims not in ((), (1,), (None,)):
            raise ValueError(f"{name} has shape {list(given.dims)}, expected a single value")
    if dy.dims is None or mask.dims is None:
        return mask.dims if dy.dims is None else dy.dims
    if not agree(dy.dims, mask.dims):
        raise ValueError(f"dy has shape {list(dy.dims)}, expected {list(mask.dims)} as mask has")
    return tuple(there if here is None else here for here, there in zip(dy.dims, mask.dims, strict=True))


@op("DropoutGrad", outputs="dx", shape=_grad_shape_rule)
def dropout_grad(dy: T, mask: Flags, ratio: Ratio | None = None, training_mode: Flags | None = None) -> T:
    """Gradient of Dropout: dx = dy / (1 - ratio) where `mask` says that a number was kept, else 0.

    Without `ratio` it is 0.5. A ratio of 0, or a `training_mode` that is false, means that Dropout dropped nothing, and
    dx = dy; without a `training_mode` it was true. float16 and bfloat16 compute in float32 and round once.
    """
    share = 0.5 if ratio is None else ratio.reshape(-1)[0]
    if share == 0 or (training_mode is not None and not training_mode.reshape(-1)[0]):
        return dy.copy()
    work = accumulator(dy.dtype)
    scaled = dy.astype(work) / (work.type(1) - work.type(share))
    dx: Array = np.where(mask, scaled, work.type(0))
    return dx.astype(dy.dtype)
