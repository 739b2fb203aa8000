"""RoiAlign: pools what it reads at places between elements, a few of them in each bin of each region of an image.

MaxRoiPool is its ancestor: it takes the largest of whole elements.
"""

from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.functions.roi_align import Bins, How, Reads, reads_along
from onnxgrad.graph.cast import in_type, wide_type
from onnxgrad.graph.function_body import GraphBody
from onnxgrad.graph.node import NodeView
from onnxgrad.graph.tensor import Tensor
from onnxgrad.rules import by_rewriting, nondiff, op, vjp
from onnxgrad.schema import OWN


def _how(n: NodeView) -> How:
    transformation = getattr(n, "coordinate_transformation_mode", "output_half_pixel")  # new in opset 16
    return How(transformation, n.output_height, n.output_width, n.sampling_ratio, n.spatial_scale)


def _written_out(dY: Tensor, n: NodeView, mode: str) -> list[Tensor]:
    """dX and drois in standard operators, which can be differentiated again."""
    o: Any = GraphBody(n.builder)
    g, X, rois = (in_type(x, wide_type(n.X)) for x in (dY, n.X, n.rois))
    down, across = (reads_along(o, X, rois, axis, mode, _how(n)) for axis in (0, 1))  # type: ignore[arg-type]
    bins: Any = Bins(o, g, X, down, across, n.batch_indices, mode)  # type: ignore[arg-type]
    return [in_type(gradient, n.X.dtype) for gradient in (bins.of_image(), bins.of_regions(n.spatial_scale))]


def _gradients(g: Tensor, n: NodeView) -> list[Tensor]:
    if n.mode != "avg":
        return _written_out(g, n, n.mode)
    return list(op.RoiAlignGrad(g, n.X, n.rois, n.batch_indices, outputs=2, **_how(n)._asdict()))


vjp(
    "RoiAlign",
    doc="With max, where several tie, each gets an equal share. torchvision has no gradient of the regions.",
    X=lambda g, n: _gradients(g, n)[0],
    rois=lambda g, n: _gradients(g, n)[1],
    batch_indices=nondiff,
)
vjp(
    "RoiAlignGrad",
    domain=OWN,
    rewrite=lambda n: _written_out(n.dY, n, "avg"),
    dY=by_rewriting,
    X=by_rewriting,
    rois=by_rewriting,
    batch_indices=nondiff,
)


def _whole_reads(n: NodeView, axis: int) -> Reads:
    """Those of MaxRoiPool, whose regions and bins begin and end with elements."""
    start, end = (
        op.Floor(op.Unsqueeze(op.Gather(n.rois, k, axis=1), [1]) * n.spatial_scale + 0.5) for k in (2 - axis, 4 - axis)
    )
    bins = n.pooled_shape[axis]
    step = op.Max(end - start + 1, 1) / bins
    length = op.Cast(op.Shape(n.X, start=2 + axis, end=3 + axis), to=n.rois.dtype)
    first, last = (
        op.Min(op.Max(edge + start, 0), length)
        for edge in (op.Floor(step * np.arange(bins)), op.Ceil(step * np.arange(1, bins + 1)))
    )  # [regions, bins]
    most = op.ReduceMax(op.Concat([1.0], op.Reshape(last - first, [-1]), axis=0), keepdims=0)
    constant = n.builder.constant
    at = op.Unsqueeze(first, [2]) + op.Range(constant(0, n.rois.dtype), most, constant(1, n.rois.dtype))
    exist = at < op.Unsqueeze(last, [2])
    counted = op.Cast(exist, to=n.rois.dtype)
    fixed = op.Mul(counted, 0)  # a region that moves by less than an element changes nothing
    return Reads(op.Cast(op.Min(at, length - 1), to=ir.DataType.INT64), counted, fixed, fixed, exist)


def _pool(g: Tensor, n: NodeView) -> Tensor:
    o: Any = GraphBody(n.builder)
    images = op.Gather(n.rois, 0, axis=1)
    bins: Any = Bins(o, g, n.X, _whole_reads(n, 0), _whole_reads(n, 1), images, "max")  # type: ignore[arg-type]
    found: Tensor = bins.of_image()
    return found


vjp("MaxRoiPool", doc="Where several tie, each gets an equal share.", X=_pool, rois=nondiff)
