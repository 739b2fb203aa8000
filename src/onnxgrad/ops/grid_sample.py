"""GridSampleGrad: the gradients of GridSample with respect to the image and the grid."""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from onnxgrad.op import op
from onnxgrad.schema import OWN, Dim, Known, agree
from onnxgrad.tensor_types import Array, T, accumulator

A = -0.75  # Keys' parameter, as PyTorch has it
WEIGHTS = {  # a row for each power of the distance, a column for each element that is read
    "nearest": [[1.0]],
    "linear": [[1.0, 0.0], [-1.0, 1.0]],
    "cubic": [[0.0, 1.0, 0.0, 0.0], [A, 0.0, -A, 0.0], [-2 * A, -A - 3, 2 * A + 3, A], [A, A + 2, -A - 2, -A]],
}
PADDINGS = ("zeros", "border", "reflection")
MOST_AXES = 3


def weight_tables(mode: str) -> tuple[Array, Array]:
    """Coefficients of the weights, and of their derivatives."""
    table = np.array(WEIGHTS[mode])
    derivatives = table[1:] * np.arange(1, len(table))[:, None]
    return table, derivatives if len(derivatives) else np.zeros((1, table.shape[1]))


def _shapes(
    dY: Known, X: Known, grid: Known, align_corners: int, mode: str, normalized: int, padding_mode: str
) -> tuple[tuple[Dim, ...] | None, ...]:
    if mode not in WEIGHTS:
        raise ValueError(f"mode is {mode!r}, expected one of {', '.join(map(repr, WEIGHTS))}")
    if padding_mode not in PADDINGS:
        raise ValueError(f"padding_mode is {padding_mode!r}, expected one of {', '.join(map(repr, PADDINGS))}")
    if X.dims is not None:
        axes = len(X.dims) - 2
        if not 1 <= axes <= MOST_AXES:
            raise ValueError(f"X has shape {list(X.dims)}, expected images, channels and 1 to {MOST_AXES} axes")
        if grid.dims is not None and not agree(grid.dims, (X.dims[0], *[None] * axes, axes)):
            raise ValueError(
                f"grid has shape {list(grid.dims)}, expected {axes + 2} dimensions for X of shape {list(X.dims)}, the "
                f"first of them {X.dims[0]} and the last {axes}"
            )
        if grid.dims is not None and dY.dims is not None:
            expected = (*X.dims[:2], *grid.dims[1:-1])
            if not agree(dY.dims, expected):
                raise ValueError(f"dY has shape {list(dY.dims)}, expected {list(expected)}")
    return X.dims, grid.dims


class Reads(NamedTuple):
    """The elements that places read along one axis: [..., reads]."""

    at: Array
    weights: Array
    derivatives: Array  # of the weights, by the grid's coordinate


def _padded(x: Array, size: int, padding_mode: str, align_corners: int) -> tuple[Array, Array]:
    """Coordinates brought into the image, and how they change with those given: at the border not at all."""
    sign = np.ones_like(x)
    if padding_mode == "reflection":
        low, span = (0.0, max(size - 1, 1)) if align_corners else (-0.5, size)
        far = np.abs(x - low)
        turns = np.floor(far / span)
        rest, is_odd = far - turns * span, np.mod(turns, 2) > 0
        sign = np.where(is_odd ^ (x < low), -sign, sign)
        x = np.where(is_odd, span - rest, rest) + low
    inside = (x > 0) & (x < size - 1)
    return np.where(inside, x, np.where(x < size - 1, 0, size - 1)), np.where(inside, sign, 0)


def _reads(coordinates: Array, size: int, align_corners: int, mode: str, normalized: int, padding_mode: str) -> Reads:
    places, slopes = coordinates, np.ones_like(coordinates)
    if normalized:
        slopes = slopes * ((size - 1 if align_corners else size) / 2)
        places = (coordinates + 1) * slopes - (0 if align_corners else 0.5)
    if mode == "linear" and padding_mode != "zeros":
        places, signs = _padded(places, size, padding_mode, align_corners)
        slopes = slopes * signs
    first = np.rint(places) if mode == "nearest" else np.floor(places)
    table, slope_table = weight_tables(mode)
    reads = table.shape[1]
    distance = (places - first)[..., None]
    at = first[..., None] + np.arange(reads) - (reads - 1) // 2
    powers = distance ** np.arange(len(table))
    weights, derivatives = powers @ table, powers[..., : len(slope_table)] @ slope_table * slopes[..., None]
    if padding_mode == "zeros":
        inside = (at >= 0) & (at < size)  # which what is no number is not
        weights, derivatives = np.where(inside, weights, 0), np.where(inside, derivatives, 0)
        at = np.where(inside, at, 0)
    elif mode != "linear":
        at, _ = _padded(at, size, padding_mode, align_corners)
    return Reads(np.minimum(at, size - 1).astype(np.int64), weights, derivatives)  # one behind the last has no weight


@op("GridSampleGrad", domain=OWN, outputs=("dX?", "dgrid?"), shape=_shapes)
def grid_sample_grad(
    dY: T,
    X: T,
    grid: T,
    *,
    align_corners: int = 0,
    mode: str = "linear",
    normalized: int = 1,
    padding_mode: str = "zeros",
    outputs: Sequence[str] | None = None,
) -> tuple[T | None, T | None]:
    """Gradient of GridSample with respect to its image and its grid, whose attributes it has.

    dY [N,C,…], X [N,C,…] with 1 to 3 spatial axes, grid [N,…,axes], the last axis first → dX and dgrid. If `normalized`
    is 0, the grid counts elements of X instead of halves of its extent. Where the mode is nearest, and at a border that
    clips, dgrid is 0. With padding zeros, a place that is not a number reads nothing. What has no weight is left
    out, infinite as it may be. float16 and bfloat16 compute in float32.
    """
    work = accumulator(X.dtype)
    (N, C), sizes = X.shape[:2], X.shape[2:]
    count = math.prod(grid.shape[1:-1])
    g, image = dY.astype(work).reshape(N, C, count), X.astype(work).reshape(N, C, math.prod(sizes))
    places = grid.astype(work).reshape(N, count, len(sizes))
    dX, dgrid = np.zeros_like(image), np.zeros_like(places)
    how: Any = (align_corners, mode, normalized, padding_mode)
    with np.errstate(invalid="ignore", over="ignore"):
        axes = [_reads(places[..., -1 - a], size, *how) for a, size in enumerate(sizes)] if X.size else []
        images = np.arange(N)[:, None]
        for taps in itertools.product(*(range(axis.at.shape[-1]) for axis in axes)) if axes else ():
            reads = [Reads(*(array[..., k] for array in axis)) for axis, k in zip(axes, taps, strict=True)]
            weights = [r.weights for r in reads]
            where: Any = (images, slice(None), np.ravel_multi_index([r.at for r in reads], sizes))
            weight = np.prod(weights, axis=0)[..., None]
            np.add.at(dX, where, np.where(weight != 0, g.transpose(0, 2, 1) * weight, 0))
            of_weight = (g.transpose(0, 2, 1) * image[where]).sum(2)
            for a, read in enumerate(reads):
                change = np.prod([*weights[:a], read.derivatives, *weights[a + 1 :]], axis=0)
                dgrid[..., -1 - a] += np.where(change != 0, of_weight * change, 0)
    everything = {"dX": dX.reshape(X.shape), "dgrid": dgrid.reshape(grid.shape)}
    names = everything if outputs is None else outputs
    return tuple(a.astype(X.dtype) if n in names else None for n, a in everything.items())  # type: ignore[return-value]
