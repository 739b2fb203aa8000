"""Running variances as PyTorch has them: of a sample, n/(n-1) times the variance of the batch that ONNX takes."""

import math
from collections.abc import Sequence
from dataclasses import replace

from onnxgrad.graph.builder import Builder, op
from onnxgrad.graph.cast import in_type
from onnxgrad.graph.tensor import Dim, Tensor, dims_of
from onnxgrad.passes.train_mode import MOMENTUM, Statistics


def use_sample_variance(builder: Builder, statistics: Sequence[Statistics]) -> list[Statistics]:
    """Corrects the running variance after a step, of every BatchNormalization, which is in train mode.

    What the node itself computes stays an output: onnxruntime writes it over the variance before the step otherwise,
    which the correction reads.
    """
    nodes = {node.name: node for node in builder.graph}
    changed = []
    for found in statistics:
        node = nodes[found.node]
        x, before = (builder.tensor(v) for v in (node.inputs[0], node.inputs[4]) if v is not None)
        following = node.outputs[2]
        with builder.at_work(f"{node.name}_sample"):
            after = builder.tensor(following)
            momentum = node.attributes.get_float("momentum", MOMENTUM)
            # n/(n-1) is 1 + 1/(n-1), so that the variance of the batch counts once more, by 1/(n-1).
            corrected = after + (after - before * momentum) / _degrees_of_freedom(builder, x, before)
        following.name, corrected.value.name = f"{following.name}_of_population", following.name
        builder.graph.outputs.append(corrected.value)
        changed.append(replace(found, unread=str(following.name)))
    return changed


def _degrees_of_freedom(builder: Builder, x: Tensor, variance: Tensor) -> Tensor:
    """n - 1, where n is how many numbers a channel has; 1 if that is one."""
    dims = [] if x.shape is None else [d for k, d in enumerate(x.shape) if k != 1]
    known, free = math.prod(d for d in dims if isinstance(d, int)), [d for d in dims if not isinstance(d, int)]
    if dims and not free:
        return builder.constant(max(known - 1, 1), variance.dtype)
    batch = _free_dimension(builder, free[0]) if len(free) == 1 else None
    if batch is None:
        count = in_type(op.Size(x), variance.dtype) / in_type(op.Size(variance), variance.dtype)
    else:
        count = in_type(batch, variance.dtype) * known
    degrees: Tensor = op.Max(count - 1, 1)
    return degrees


def _free_dimension(builder: Builder, name: Dim) -> Tensor | None:
    """Its size, read from an input that has it: all layers then share the computation."""
    for value in builder.graph.inputs:
        dims = dims_of(value) or ()
        if name is not None and name in dims:
            at = dims.index(name)
            size: Tensor = op.Shape(builder.tensor(value), start=at, end=at + 1)
            return size
    return None
