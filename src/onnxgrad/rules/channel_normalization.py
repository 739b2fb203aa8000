"""Normalizations that scale each channel: BatchNormalization, InstanceNormalization, GroupNormalization."""

from collections.abc import Sequence

from onnxgrad.graph.cast import in_type, wide_type
from onnxgrad.graph.node import NodeView
from onnxgrad.graph.tensor import Tensor
from onnxgrad.rules import by_rewriting, op, vjp
from onnxgrad.rules.normalization import share_along, standardized
from onnxgrad.schema import MICROSOFT


def _other_axes(x: Tensor) -> list[int]:
    """All axes but that of the channels."""
    return [k for k in range(x.rank) if k != 1]


def _along_channels(v: Tensor, x: Tensor) -> Tensor:
    """One number per channel, shaped so that it meets the channels of x."""
    return op.Unsqueeze(v, list(range(1, x.rank - 1))) if x.rank > 2 else v


class Channels:
    """What the gradients of x̂ · scale + B share: sums over all that one element of scale meets.

    `own` are the axes of g that share an element of scale, `more` those that x is normalized along besides.
    """

    def __init__(self, g: Tensor, xhat: Tensor, inv: Tensor, scale: Tensor, own: list[int], more: list[int]) -> None:
        self.g, self.xhat, self.inv, self.scale, self.own, self.more = g, xhat, inv, scale, own, more
        self.sum = op.ReduceSum(g, own, keepdims=1)

    @property
    def dot(self) -> Tensor:
        """The sum of g · x̂."""
        return op.ReduceSum(self.g * self.xhat, self.own, keepdims=1)

    def of_input(self) -> Tensor:
        """The gradient of x."""
        share = share_along(self.xhat, [*self.own, *self.more], self.xhat.dtype)
        if not self.more:
            return (self.g - self.sum * share - self.xhat * (self.dot * share)) * (self.scale * self.inv)
        a, b = (op.ReduceSum(x * self.scale, self.more, keepdims=1) * share for x in (self.sum, self.dot))
        return (self.g * self.scale - a - self.xhat * b) * self.inv


def _per_channel(x: Tensor, like: Tensor) -> Tensor:
    """Summed over all but the channels, in the type of `like`."""
    return in_type(op.ReduceSum(x, _other_axes(x), keepdims=int(x.rank == 1)), like.dtype)


def _inverse_deviation(n: NodeView) -> Tensor:
    return op.Reciprocal(op.Sqrt(n.input_var + n.epsilon))


def _slope(n: NodeView) -> Tensor:
    """What each channel of X is multiplied by, in inference."""
    inv = _inverse_deviation(n)
    return in_type(n.scale, inv.dtype) * inv


def _trained(g: Tensor, n: NodeView) -> tuple[Tensor, ...]:
    """The gradients of X, scale and B in training: one node computes them, and the statistics of the batch too."""
    gradients: tuple[Tensor, ...] = op.BatchNormalizationGrad(g, n.X, n.scale, epsilon=n.epsilon, outputs=3)
    return gradients


def _batch_input(g: Tensor, n: NodeView) -> Tensor:
    if n.training_mode:
        return _trained(g, n)[0]
    return g * _along_channels(in_type(_slope(n), g.dtype), n.X)


def _batch_scale(g: Tensor, n: NodeView) -> Tensor:
    if n.training_mode:
        return _trained(g, n)[1]
    dtype = wide_type(n.X, n.input_mean)
    centred = in_type(n.X, dtype) - _along_channels(in_type(n.input_mean, dtype), n.X)
    total = _per_channel(in_type(g, dtype) * centred, n.input_var)
    return in_type(total * _inverse_deviation(n), n.scale.dtype)


def _batch_shift(g: Tensor, n: NodeView) -> Tensor:
    return _trained(g, n)[2] if n.training_mode else _per_channel(in_type(g, wide_type(g)), n.B)


def _batch_mean(g: Tensor, n: NodeView) -> Tensor | None:
    if n.training_mode:
        return None
    return in_type(-in_type(_batch_shift(g, n), n.input_var.dtype) * _slope(n), n.input_mean.dtype)


def _batch_variance(g: Tensor, n: NodeView) -> Tensor | None:
    if n.training_mode:
        return None
    dscale = in_type(_batch_scale(g, n), n.input_var.dtype)
    return dscale * _slope(n) * _inverse_deviation(n) * -0.5


for _name, _domain in (("BatchNormalization", ""), ("BatchNormInternal", MICROSOFT)):
    vjp(
        _name,
        domain=_domain,
        doc="In training the gradient flows through the statistics of the batch, and not through the running ones.",
        X=_batch_input,
        scale=_batch_scale,
        B=_batch_shift,
        input_mean=_batch_mean,
        input_var=_batch_variance,
    )


def _written_out(n: NodeView) -> list[Tensor]:
    """The three results of BatchNormalizationGrad, in standard operators."""
    dtype, axes = wide_type(n.X, n.scale), _other_axes(n.X)
    g, x, scale = in_type(n.dY, dtype), in_type(n.X, dtype), _along_channels(in_type(n.scale, dtype), n.X)
    if n.mean is None:
        xhat, inv = standardized(x, axes, n.epsilon)
    else:
        mean, inv = (_along_channels(in_type(v, dtype), n.X) for v in (n.mean, n.inv_std))
        xhat = (x - mean) * inv
    found = Channels(g, xhat, inv, scale, axes, [])
    sums = (_per_channel(total, n.scale) for total in (found.dot, found.sum))
    return [in_type(found.of_input(), n.X.dtype), *sums]


vjp(
    "BatchNormalizationGrad",
    domain=MICROSOFT,
    rewrite=_written_out,
    dY=by_rewriting,
    X=by_rewriting,
    scale=by_rewriting,
    mean=by_rewriting,
    inv_std=by_rewriting,
)


def _instance(g: Tensor, n: NodeView) -> Channels:
    dtype, axes = wide_type(n.input, n.scale), list(range(2, n.input.rank))
    xhat, inv = standardized(in_type(n.input, dtype), axes, n.epsilon)
    return Channels(in_type(g, dtype), xhat, inv, _along_channels(in_type(n.scale, dtype), n.input), axes, [])


vjp(
    "InstanceNormalization",
    input=lambda g, n: in_type(_instance(g, n).of_input(), n.input.dtype),
    scale=lambda g, n: _per_channel(_instance(g, n).dot, n.scale),
    B=lambda g, n: _per_channel(_instance(g, n).sum, n.B),
)


def _group(g: Tensor, n: NodeView) -> Channels:
    """Seen as [N, groups, channels of a group, all else]."""
    X, groups, dtype = n.X, n.num_groups, wide_type(n.X)
    shape = _grouped_shape(X, groups)
    grouped, dY = op.Reshape(in_type(X, dtype), shape), op.Reshape(in_type(g, dtype), shape)
    xhat, inv = standardized(grouped, [2, 3], n.epsilon)
    by_group = n.builder.opsets[""] < 21  # one scale for each group rather than for each channel
    scale = op.Reshape(in_type(n.scale, dtype), [groups, -1, 1])
    return Channels(dY, xhat, inv, scale, [2, 3] if by_group else [3], [] if by_group else [2])


def _grouped_shape(x: Tensor, groups: int) -> Tensor | Sequence[int]:
    channels = x.shape[1] if x.shape is not None else None
    if isinstance(channels, int):
        return [0, groups, channels // groups, -1]
    return op.Concat([0, groups], op.Div(op.Gather(op.Shape(x), [1]), [groups]), [-1], axis=0)


def _as_scale(x: Tensor, n: NodeView) -> Tensor:
    return in_type(op.Reshape(op.ReduceSum(x, [0], keepdims=0), [-1]), n.scale.dtype)


vjp(
    "GroupNormalization",
    X=lambda g, n: in_type(op.Reshape(_group(g, n).of_input(), op.Shape(n.X)), n.X.dtype),
    scale=lambda g, n: _as_scale(_group(g, n).dot, n),
    bias=lambda g, n: _as_scale(_group(g, n).sum, n),
)
