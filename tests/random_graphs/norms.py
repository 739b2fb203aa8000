"""Ways to grow: reductions, sums along axes, softmaxes, normalizations and losses."""

import numpy as np
from tests.random_graphs.growth import Graph, UnsuitableError, way
from tests.random_graphs.products import image

SUMS = ["ReduceSum", "ReduceMean", "ReduceLogSumExp", "ReduceSumSquare", "ReduceMax", "ReduceMin", "ReduceL1",
        "ReduceL2", "ReduceProd", "ReduceLogSum"]  # fmt: skip


@way(weight=2.5)
def reduction(g: Graph) -> None:
    name = g.some(lambda x: x.dim() > 0)
    rank = len(g.shape(name))
    op_type = g.one_of(SUMS)
    axes = sorted(int(k) for k in g.rng.choice(rank, g.between(1, rank), replace=False))
    if op_type in ("ReduceMax", "ReduceMin"):
        g.without_ties(name, axes)
    elif op_type == "ReduceL1":
        g.away_from(name, 0)
    elif op_type in ("ReduceL2", "ReduceLogSum"):
        name = g.positive(name)
    inputs, settings = g.listed("axes", axes, 13 if op_type == "ReduceSum" else 18)
    if g.chance(0.2):
        inputs, settings = [], {}
        if op_type in ("ReduceMax", "ReduceMin"):
            g.without_ties(name, range(rank))
    g.add(op_type, [name, *inputs], keepdims=g.between(0, 1), **settings)


@way(since=11)
def cumulative(g: Graph) -> None:
    name = g.some(lambda x: x.dim() > 0)
    axis = g.tensor(np.array(g.between(0, len(g.shape(name)) - 1)))
    op_type = "CumProd" if g.opset >= 26 and g.chance(0.5) else "CumSum"
    g.add(op_type, [name, axis], reverse=g.between(0, 1), exclusive=g.between(0, 1))


@way(weight=2)
def softmax(g: Graph) -> None:
    name = g.some(lambda x: x.dim() > 0)
    rank = len(g.shape(name))
    axis = g.between(0 if g.opset < 11 else -rank, rank - 1)
    if g.values[name].shape[axis] == 1:
        raise UnsuitableError
    g.add(g.one_of(["Softmax", "LogSoftmax"]), [name], axis=axis)


@way(since=17, weight=2.5)
def layer_norm(g: Graph) -> None:
    name = g.some(lambda x: x.dim() > 0 and x.shape[-1] > 2)
    rank = len(g.shape(name))
    axis = -1 if g.chance(0.7) else g.between(-rank, -1)
    shape = g.shape(name)[axis:]
    if g.opset >= 23 and g.chance(0.4):
        g.add("RMSNormalization", [name, g.positive_weight(*shape)], axis=axis, epsilon=0.01)
        return
    bias = [g.weight(*shape)] if g.chance(0.7) else []
    g.add("LayerNormalization", [name, g.positive_weight(*shape), *bias], axis=axis, epsilon=0.01)


@way(weight=1.5)
def channel_norm(g: Graph) -> None:
    name = image(g)
    channels = g.shape(name)[1]
    scale, bias = g.positive_weight(channels), g.weight(channels)
    how = g.one_of(["BatchNormalization", "InstanceNormalization", "GroupNormalization"])
    if how == "BatchNormalization":
        # Fresh: a value that is a statistic here and a weight elsewhere is trained as neither.
        mean = g.tensor((0.3 * g.rng.standard_normal(channels)).astype(g.dtype), "mean")
        variance = g.tensor(g.rng.uniform(0.5, 1.5, channels).astype(g.dtype), "variance")
        g.add(how, [name, scale, bias, mean, variance], epsilon=0.01)
    elif how == "InstanceNormalization":
        g.add(how, [name, scale, bias], epsilon=0.05)
    else:
        groups = g.one_of([1, channels, *([2] if channels % 2 == 0 else [])])
        if g.opset < 21:
            scale, bias = g.positive_weight(groups), g.weight(groups)
        g.add(how, [name, scale, bias], num_groups=groups, epsilon=0.05)


@way(weight=0.7)
def lrn(g: Graph) -> None:
    name = image(g, 4)
    g.add("LRN", [name], size=g.one_of([1, 3]), alpha=0.1, beta=0.6, bias=1.0)


@way(weight=0.7)
def lp_norm(g: Graph) -> None:
    name = g.some(lambda x: x.dim() > 1 and x.shape[-1] > 1)
    p = g.between(1, 2)
    if p == 1:
        g.away_from(name, 0)
    else:
        name = g.positive(name)
    g.add("LpNormalization", [name], p=p, axis=-1)


@way(since=9, weight=0.7)
def mean_variance(g: Graph) -> None:
    name, axes = image(g, 4), g.one_of([[0, 2, 3], [1, 2, 3], [2, 3]])
    values = g.values[name]
    if bool((values.var(axes, correction=0) < 1e-3 * (1 + values.square().mean(axes))).any()):
        raise UnsuitableError  # onnxruntime's variance, without an epsilon, would be rounding errors, negative ones too
    g.add("MeanVarianceNormalization", [name], axes=axes)


@way(since=12, weight=1)
def loss(g: Graph) -> None:
    name = g.some(lambda x: x.dim() in (2, 3) and x.shape[1] > 1)
    batch, classes, *rest = g.shape(name)
    target = g.tensor(g.rng.integers(0, classes, (batch, *rest)))
    weight = [g.positive_weight(classes)] if g.chance(0.4) else []
    reduction_ = g.one_of(["mean", "sum", "none"])
    if g.chance(0.5):
        log = g.node("LogSoftmax", [name], axis=1)
        if len(rest) and g.opset < 13:
            raise UnsuitableError
        g.add("NegativeLogLikelihoodLoss", [log, target, *weight], reduction=reduction_)
    elif g.chance(0.5):
        g.add("SoftmaxCrossEntropyLoss", [name, target, *weight], reduction=reduction_)
    else:
        g.add("SoftmaxCrossEntropyLoss", [name, target, *weight], 2, reduction=reduction_)
