"""BatchNormalization statistics over the slices of all ranks: sums that are all-reduced while the graph runs."""

from collections.abc import Sequence

import onnx_ir as ir

from onnxgrad.graph.builder import Builder, op
from onnxgrad.graph.cast import in_type, wide_type
from onnxgrad.graph.tensor import Tensor
from onnxgrad.passes.batch_slice import TAKES_PART
from onnxgrad.passes.train_mode import MOMENTUM, Statistics


def measure_together(
    builder: Builder, statistics: Sequence[Statistics], place: ir.Value, group: int, *, of_sample: bool
) -> None:
    """Writes every BatchNormalization, which is in train mode, in terms of sums over all ranks.

    The running variance is PyTorch's (sample_variance.py) if it is `of_sample`.
    """
    nodes = {node.name: node for node in builder.graph}
    for found in statistics:
        node = nodes[found.node]
        with builder.at_work(f"{node.name}_together"):
            results = _normalized(builder, node, builder.tensor(place), group, of_sample)
        for value, result in zip(node.outputs, results, strict=True):
            _put(builder, value, result)
        builder.graph.remove(node, safe=True)
    if statistics:
        builder.graph.sort()  # what was written came last


def _normalized(builder: Builder, node: ir.Node, place: Tensor, group: int, of_sample: bool) -> list[Tensor]:
    """The outputs of a node: the numbers, and the running statistics that follow."""
    x, scale, shift, mean, variance = (builder.tensor(v) for v in node.inputs if v is not None)
    epsilon, momentum = node.attributes.get_float("epsilon", 1e-5), node.attributes.get_float("momentum", MOMENTUM)
    dtype, axes = wide_type(x, scale), [k for k in range(x.rank) if k != 1]
    wide = in_type(x, dtype)
    takes_part = in_type(op.Gather(place, [TAKES_PART]), dtype)

    def along(v: Tensor) -> Tensor:
        """One number per channel, shaped so that it meets the channels of x."""
        return op.Unsqueeze(in_type(v, dtype), list(range(1, x.rank - 1))) if x.rank > 2 else in_type(v, dtype)

    def added_up(values: Tensor) -> Tensor:
        return op.AllReduceSum(values * takes_part, group=group)

    count = in_type(op.ReduceProd(op.Gather(op.Shape(x), axes), keepdims=1), dtype)
    sums = added_up(op.Concat(op.ReduceSum(wide, axes, keepdims=0), count, axis=0))
    total = op.Gather(sums, [-1], axis=0)
    measured_mean = op.Slice(sums, [0], [-1], [0]) / total
    centred = wide - along(measured_mean)
    # In two rounds: the mean of the squares less the square of the mean would lose digits.
    measured_variance = added_up(op.ReduceSum(centred * centred, axes, keepdims=0)) / total
    inverse = op.Reciprocal(op.Sqrt(measured_variance + epsilon))
    y = centred * along(in_type(scale, dtype) * inverse) + along(shift)
    if of_sample:
        measured_variance = measured_variance * (total / op.Max(total - 1, 1))
    following = [
        in_type(in_type(now, dtype) * momentum + measured * (1 - momentum), now.dtype)
        for now, measured in ((mean, measured_mean), (variance, measured_variance))
    ]
    return [in_type(y, x.dtype), *following]


def _put(builder: Builder, value: ir.Value, result: Tensor) -> None:
    """A result goes where an output went, and takes its name where that is an output of the graph."""
    new = builder.copy(result).value if value.is_graph_output() else result.value
    if value.is_graph_output():
        name, value.name = value.name, f"{value.name}_alone"
        new.name = name
    new.shape = value.shape if value.shape is not None else new.shape
    value.replace_all_uses_with(new, replace_graph_outputs=True)
