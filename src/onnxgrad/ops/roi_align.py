"""RoiAlignGrad: the gradients of RoiAlign with respect to the image and the regions, where its bins are averages."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from onnxgrad.arguments import check_size
from onnxgrad.op import op
from onnxgrad.schema import OWN, Dim, Known, agree
from onnxgrad.tensor_types import Array, Index, T, accumulator

TRANSFORMATIONS = ("half_pixel", "output_half_pixel")
AXES = ((1, 3), (0, 2))  # where a region has its start and its end, along rows and along columns


def _shapes(
    dY: Known,
    X: Known,
    rois: Known,
    batch_indices: Known,
    coordinate_transformation_mode: str,
    output_height: int,
    output_width: int,
    sampling_ratio: int,
    spatial_scale: float,
) -> tuple[tuple[Dim, ...] | None, ...]:
    if coordinate_transformation_mode not in TRANSFORMATIONS:
        raise ValueError(
            f"coordinate_transformation_mode is {coordinate_transformation_mode!r}, expected one of "
            f"{', '.join(map(repr, TRANSFORMATIONS))}"
        )
    for name, number in (("output_height", output_height), ("output_width", output_width)):
        if number < 1:
            raise ValueError(f"{name} is {number}, expected at least 1")
    # Each place reads two elements along an axis, with three numbers for each.
    check_size("what a region reads", (max(1, sampling_ratio), max(output_height, output_width), 2, 3))
    if X.dims is not None and len(X.dims) != 4:
        raise ValueError(f"X has shape {list(X.dims)}, expected four dimensions")
    if rois.dims is not None and not agree(rois.dims, (None, 4)):
        raise ValueError(f"rois has shape {list(rois.dims)}, expected four numbers for each region")
    if rois.dims is not None and batch_indices.dims is not None and not agree(batch_indices.dims, rois.dims[:1]):
        raise ValueError(f"batch_indices has shape {list(batch_indices.dims)}, expected {list(rois.dims[:1])}")
    if dY.dims is not None and X.dims is not None and rois.dims is not None:
        expected = (rois.dims[0], X.dims[1], output_height, output_width)
        if not agree(dY.dims, expected):
            raise ValueError(f"dY has shape {list(dY.dims)}, expected {list(expected)}")
    return X.dims, rois.dims


class Weights(NamedTuple):
    """Of each element of an axis in each bin of a region, and their derivatives: [bins, size]."""

    weights: Array
    of_start: Array
    of_end: Array


def _weights(start: Any, end: Any, bins: int, size: int, half_pixel: bool, sampling_ratio: int) -> Weights:
    """A bin is the mean of its places, each of which reads the two elements beside it."""
    extent, moves = end - start, 1
    if not half_pixel and not extent > 1:  # a smaller region counts as one element
        extent, moves = type(extent)(1), 0
    places = sampling_ratio if sampling_ratio > 0 else np.ceil(extent / bins)
    tables = Weights(*np.zeros((3, bins, size), np.asarray(extent).dtype))
    step = extent / (max(places, 1) * bins)
    for b in range(bins if places >= 1 and math.isfinite(step) else 0):
        begin = start + extent * b / bins
        first, beyond = 0, places
        if sampling_ratio <= 0:  # places far outside of the image, which may be many, have no weight
            first = min(places, max(0, np.floor((-1 - begin) / step) - 1))
            beyond = min(places, max(0, np.ceil((size - begin) / step) + 1))
        for i in range(int(first), int(beyond)):
            part = ((i + 0.5) / places + b) / bins
            at = start + part * extent
            if not -1 <= at <= size:
                continue
            inside = 0 < at < size - 1
            at = at if inside else 0 if at < size - 1 else size - 1
            low, distance = math.floor(at), at - math.floor(at)
            tables.weights[b, low] += (1 - distance) / places
            tables.weights[b, min(low + 1, size - 1)] += distance / places
            if inside:
                for table, share in ((tables.of_start, 1 - part * moves), (tables.of_end, part * moves)):
                    table[b, low] -= share / places
                    table[b, low + 1] += share / places
    return tables


@op("RoiAlignGrad", domain=OWN, outputs=("dX?", "drois?"), shape=_shapes)
def roi_align_grad(
    dY: T,
    X: T,
    rois: T,
    batch_indices: Index,
    *,
    coordinate_transformation_mode: str = "half_pixel",
    output_height: int = 1,
    output_width: int = 1,
    sampling_ratio: int = 0,
    spatial_scale: float = 1.0,
    outputs: Sequence[str] | None = None,
) -> tuple[T | None, T | None]:
    """Gradient of RoiAlign whose mode is avg, and whose other attributes it has, for the image and the regions.

    dY [regions,C,output_height,output_width], X [N,C,H,W], rois [regions,4], batch_indices [regions] → dX and drois. A
    region of an image that does not exist reads nothing. float16 and bfloat16 compute in float32.
    """
    work = accumulator(X.dtype)
    g, image, scale = dY.astype(work), X.astype(work), work.type(spatial_scale)
    half_pixel = coordinate_transformation_mode == "half_pixel"
    dX, drois = np.zeros_like(image), np.zeros(rois.shape, work)
    with np.errstate(invalid="ignore", over="ignore"):
        corners = rois.astype(work) * scale - work.type(0.5 if half_pixel else 0)
    for r, n in enumerate(batch_indices.tolist()):
        if not 0 <= n < len(X) or 0 in X.shape:
            continue
        bins = (output_height, output_width)
        down, across = (
            _weights(corners[r, start], corners[r, end], bins[a], X.shape[2 + a], half_pixel, sampling_ratio)
            for a, (start, end) in enumerate(AXES)
        )
        dX[n] += np.einsum("ij,cik,kl->cjl", down.weights, g[r], across.weights, optimize=True)
        seen = np.einsum("cik,cjl->ijkl", g[r], image[n], optimize=True)
        for a, (start, end) in enumerate(AXES):
            for k, table in ((start, 1), (end, 2)):
                tables = (down[table], across[0]) if a == 0 else (down[0], across[table])
                drois[r, k] = np.einsum("ijkl,ij,kl->", seen, *tables, optimize=True) * scale
    everything = {"dX": dX, "drois": drois}
    names = everything if outputs is None else outputs
    return tuple(a.astype(X.dtype) if n in names else None for n, a in everything.items())  # type: ignore[return-value]
