"""What ONNX operators compute, written with PyTorch, whose autograd then says what their gradients are."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper
from torch.nn import functional

Values = dict[str, Any]
COMPUTES: dict[str, Callable[..., Any]] = {}


class Node:
    """A node, its attributes as Python has them, and what surrounds it."""

    def __init__(self, proto: NodeProto, opset: int, scope: Values, functions: Mapping[Any, Any], wide: Any) -> None:
        self.proto, self.opset, self.scope, self.functions, self.wide = proto, opset, scope, functions, wide
        self.attributes = {a.name: helper.get_attribute_value(a) for a in proto.attribute}

    def __call__(self, name: str, default: Any = None) -> Any:
        value = self.attributes.get(name, default)
        return value.decode() if isinstance(value, bytes) else value

    def ints(self, name: str, given: Any, default: Any = None) -> Any:
        """A list of integers, which old opsets have as an attribute and new ones as an input."""
        if given is not None:
            return [int(k) for k in given.reshape(-1)]
        return self(name, default)

    def of(self, value: TensorProto) -> Any:
        """A constant; numbers are as wide as those of the run."""
        return as_torch(numpy_helper.to_array(value), self.wide)

    def body(self, graph: GraphProto, inputs: Sequence[Any]) -> list[Any]:
        """The outputs of a subgraph, which sees what is around the node."""
        values = {**self.scope, **dict(zip([i.name for i in graph.input], inputs, strict=True))}
        run_nodes(graph, values, self.opset, self.functions, self.wide)
        return [values[o.name] for o in graph.output]


def as_torch(array: Any, wide: Any = torch.float64) -> Any:
    """A copy of an array; floating-point numbers in the type of the run."""
    array = np.array(array)
    return torch.from_numpy(array).to(wide) if array.dtype.kind == "f" else torch.from_numpy(array)


def run_model(model: ModelProto, feeds: Mapping[str, Any], wide: Any = torch.float64) -> Values:
    """Every value of a model, given its inputs and those of its initializers that are to be others."""
    opset = next(o.version for o in model.opset_import if o.domain == "")
    functions = {(f.domain, f.name): f for f in model.functions}
    values: Values = {"": None, **feeds}
    run_nodes(model.graph, values, opset, functions, wide)
    return values


def run_nodes(graph: GraphProto, values: Values, opset: int, functions: Any, wide: Any) -> None:
    for tensor in graph.initializer:
        if tensor.name not in values:
            values[tensor.name] = as_torch(numpy_helper.to_array(tensor), wide)
    for node in graph.node:
        run_node(node, values, opset, functions, wide)


def run_node(node: NodeProto, values: Values, opset: int, functions: Any, wide: Any) -> None:
    inputs = [values[name] if name else None for name in node.input]
    if (node.domain, node.op_type) in functions:
        results = _call(functions[node.domain, node.op_type], node, inputs, functions, wide)
    else:
        results = COMPUTES[node.op_type](Node(node, opset, values, functions, wide), *inputs)
    results = results if isinstance(results, tuple) else (results,)
    values.update({name: r for name, r in zip(node.output, results, strict=False) if name})


def _call(function: Any, node: NodeProto, inputs: list[Any], functions: Any, wide: Any) -> tuple[Any, ...]:
    """A function's outputs; its nodes get the attributes of the call."""
    values: Values = {"": None, **dict(zip(function.input, inputs, strict=False))}
    opset = next(o.version for o in function.opset_import if o.domain == "")
    given = {a.name: a for a in [*function.attribute_proto, *node.attribute]}
    for inner in function.node:
        bound = NodeProto()
        bound.CopyFrom(inner)
        for attribute in bound.attribute:
            if attribute.ref_attr_name:
                name = attribute.name
                attribute.CopyFrom(given[attribute.ref_attr_name])
                attribute.name = name
        run_node(bound, values, opset, functions, wide)
    return tuple(values[name] for name in function.output)


def computes(*names: str) -> Callable[[Any], Any]:
    def keep(function: Any) -> Any:
        COMPUTES.update(dict.fromkeys(names, function))
        return function

    return keep


def _erf_gelu(x: Any) -> Any:
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


COMPUTES.update({
    "Abs": lambda n, x: x.abs(), "Acos": lambda n, x: x.acos(), "Acosh": lambda n, x: x.acosh(),
    "Asin": lambda n, x: x.asin(), "Asinh": lambda n, x: x.asinh(), "Atan": lambda n, x: x.atan(),
    "Atanh": lambda n, x: x.atanh(), "Cos": lambda n, x: x.cos(), "Cosh": lambda n, x: x.cosh(),
    "Sin": lambda n, x: x.sin(), "Sinh": lambda n, x: x.sinh(), "Tan": lambda n, x: x.tan(),
    "Tanh": lambda n, x: x.tanh(), "Exp": lambda n, x: x.exp(), "Log": lambda n, x: x.log(),
    "Sqrt": lambda n, x: x.sqrt(), "Neg": lambda n, x: -x, "Reciprocal": lambda n, x: 1 / x,
    "Erf": lambda n, x: x.erf(), "Sigmoid": lambda n, x: x.sigmoid(), "Softplus": lambda n, x: functional.softplus(x),
    "Softsign": lambda n, x: x / (1 + x.abs()), "Relu": lambda n, x: x.relu(), "Mish": lambda n, x: functional.mish(x),
    "Identity": lambda n, x: x.clone() if isinstance(x, torch.Tensor) else x,
    "HardSwish": lambda n, x: functional.hardswish(x),
    "Swish": lambda n, x: x * torch.sigmoid(n("alpha", 1.0) * x),
    "Gelu": lambda n, x: functional.gelu(x, approximate="tanh") if n("approximate") == "tanh" else _erf_gelu(x),
    "Celu": lambda n, x: functional.celu(x, n("alpha", 1.0)), "Elu": lambda n, x: functional.elu(x, n("alpha", 1.0)),
    "LeakyRelu": lambda n, x: functional.leaky_relu(x, n("alpha", 0.01)),
    "Selu": lambda n, x: n("gamma", 1.0507009873554805) * functional.elu(x, n("alpha", 1.6732632423543772)),
    "HardSigmoid": lambda n, x: (n("alpha", 0.2) * x + n("beta", 0.5)).clamp(0, 1),
    "ThresholdedRelu": lambda n, x: torch.where(x > n("alpha", 1.0), x, 0 * x),
    "PRelu": lambda n, x, slope: torch.where(x < 0, x * slope, x),
    "Ceil": lambda n, x: x.ceil(), "Floor": lambda n, x: x.floor(), "Round": lambda n, x: x.round(),
    "Sign": lambda n, x: x.sign(), "Not": lambda n, x: ~x,
    "Add": lambda n, a, b: a + b, "Sub": lambda n, a, b: a - b, "Mul": lambda n, a, b: a * b,
    "Pow": lambda n, a, b: a**b, "Sum": lambda n, *x: sum(x), "Mean": lambda n, *x: sum(x) / len(x),
    "Greater": lambda n, a, b: a > b, "Less": lambda n, a, b: a < b, "Equal": lambda n, a, b: a == b,
    "GreaterOrEqual": lambda n, a, b: a >= b, "LessOrEqual": lambda n, a, b: a <= b,
    "And": lambda n, a, b: a & b, "Or": lambda n, a, b: a | b, "Xor": lambda n, a, b: a ^ b,
    "Where": lambda n, c, a, b: torch.where(c, a, b),
    "MatMul": lambda n, a, b: a @ b, "Det": lambda n, x: torch.linalg.det(x),
    "Einsum": lambda n, *x: torch.einsum(n("equation").replace(" ", ""), *x),
    "Dropout": lambda n, x, *rest: x.clone(),
    "Size": lambda n, x: torch.tensor(x.numel()),
    "Transpose": lambda n, x: x.permute(n("perm", list(range(x.dim()))[::-1])),
    "Concat": lambda n, *x: torch.cat(x, n("axis")),
    "SequenceConstruct": lambda n, *x: list(x), "SequenceAt": lambda n, s, k: s[int(k)],
    "SequenceLength": lambda n, s: torch.tensor(len(s)), "SequenceEmpty": lambda n: [],
    "SequenceErase": lambda n, s, k=None: [x for i, x in enumerate(s) if i != (-1 if k is None else int(k)) % len(s)],
    "GatherND": lambda n, x, k: _gather_nd(x, k, n("batch_dims", 0)),
    "ReduceL1": lambda n, x, axes=None: _reduce(n, x, axes, lambda y: y.abs().sum(-1)),
    "ReduceL2": lambda n, x, axes=None: _reduce(n, x, axes, lambda y: y.square().sum(-1).sqrt()),
    "ReduceSum": lambda n, x, axes=None: _reduce(n, x, axes, lambda y: y.sum(-1)),
    "ReduceMean": lambda n, x, axes=None: _reduce(n, x, axes, lambda y: y.mean(-1)),
    "ReduceMax": lambda n, x, axes=None: _reduce(n, x, axes, lambda y: y.amax(-1)),
    "ReduceMin": lambda n, x, axes=None: _reduce(n, x, axes, lambda y: y.amin(-1)),
    "ReduceProd": lambda n, x, axes=None: _reduce(n, x, axes, lambda y: y.prod(-1)),
    "ReduceLogSum": lambda n, x, axes=None: _reduce(n, x, axes, lambda y: y.sum(-1).log()),
    "ReduceLogSumExp": lambda n, x, axes=None: _reduce(n, x, axes, lambda y: y.logsumexp(-1)),
    "ReduceSumSquare": lambda n, x, axes=None: _reduce(n, x, axes, lambda y: y.square().sum(-1)),
    "GlobalAveragePool": lambda n, x: x.mean(tuple(range(2, x.dim())), keepdim=True),
    "GlobalMaxPool": lambda n, x: x.amax(tuple(range(2, x.dim())), keepdim=True),
    "GlobalLpPool": lambda n, x: _lp(x.flatten(2), n("p", 2)).reshape(*x.shape[:2], *[1] * (x.dim() - 2)),
    "InstanceNormalization": lambda n, x, s, b: functional.instance_norm(x, weight=s, bias=b, eps=n("epsilon", 1e-5)),
    "LRN": lambda n, x: functional.local_response_norm(x, n("size"), n("alpha", 1e-4), n("beta", 0.75), n("bias", 1.0)),
    "AffineGrid": lambda n, theta, size: functional.affine_grid(theta, size.tolist(), bool(n("align_corners", 0))),
})  # fmt: skip


@computes("Div")
def _div(n: Node, a: Any, b: Any) -> Any:
    return a / b if a.is_floating_point() else torch.div(a, b, rounding_mode="trunc")


@computes("Mod")
def _mod(n: Node, a: Any, b: Any) -> Any:
    return torch.fmod(a, b) if n("fmod", 0) else torch.remainder(a, b)


@computes("Max", "Min")
def _extreme(n: Node, *inputs: Any) -> Any:
    found = inputs[0]
    for other in inputs[1:]:
        found = (torch.maximum if n.proto.op_type == "Max" else torch.minimum)(found, other)
    return found.clone()


@computes("Shrink")
def _shrink(n: Node, x: Any) -> Any:
    lambd, bias = n("lambd", 0.5), n("bias", 0.0)
    return torch.where(x < -lambd, x + bias, torch.where(x > lambd, x - bias, 0 * x))


@computes("Clip")
def _clip(n: Node, x: Any, low: Any = None, high: Any = None) -> Any:
    low = n("min") if low is None else low
    high = n("max") if high is None else high
    x = x if low is None else torch.maximum(x, torch.as_tensor(low, dtype=x.dtype))
    return x.clone() if high is None else torch.minimum(x, torch.as_tensor(high, dtype=x.dtype))


@computes("Cast")
def _cast(n: Node, x: Any) -> Any:
    to = helper.tensor_dtype_to_np_dtype(n("to"))
    return x.to(n.wide) if np.dtype(to).kind == "f" else x.to(getattr(torch, np.dtype(to).name))


@computes("CastLike")
def _cast_like(n: Node, x: Any, like: Any) -> Any:
    return x.to(like.dtype)


@computes("Constant")
def _constant(n: Node) -> Any:
    return n.of(n("value"))


@computes("ConstantOfShape")
def _constant_of_shape(n: Node, shape: Any) -> Any:
    value = n.of(n("value")) if n("value") is not None else torch.zeros(1, dtype=n.wide)
    return value.reshape(()).expand(shape.tolist()).clone()


@computes("EyeLike")
def _eye_like(n: Node, x: Any) -> Any:
    eye = torch.ones(x.shape, dtype=n.wide)
    return torch.triu(torch.tril(eye, n("k", 0)), n("k", 0))


@computes("Gemm")
def _gemm(n: Node, a: Any, b: Any, c: Any = None) -> Any:
    a, b = (a.mT if n("transA", 0) else a), (b.mT if n("transB", 0) else b)
    found = n("alpha", 1.0) * (a @ b)
    return found if c is None else found + n("beta", 1.0) * c


@computes("Shape")
def _shape(n: Node, x: Any) -> Any:
    return torch.tensor(list(x.shape)[n("start", 0) : n("end", x.dim())], dtype=torch.int64)


@computes("Reshape")
def _reshape(n: Node, x: Any, shape: Any) -> Any:
    dims = [x.shape[k] if d == 0 and not n("allowzero", 0) else d for k, d in enumerate(shape.tolist())]
    return x.reshape(dims).clone()


@computes("Flatten")
def _flatten(n: Node, x: Any) -> Any:
    axis = n("axis", 1) + x.dim() if n("axis", 1) < 0 else n("axis", 1)
    return x.reshape(math.prod(x.shape[:axis]), -1)


@computes("Squeeze")
def _squeeze(n: Node, x: Any, axes: Any = None) -> Any:
    found = n.ints("axes", axes)
    return x.squeeze().clone() if found is None else x.squeeze(tuple(found))


@computes("Unsqueeze")
def _unsqueeze(n: Node, x: Any, axes: Any = None) -> Any:
    found = n.ints("axes", axes)
    rank = x.dim() + len(found)
    for axis in sorted(k % rank for k in found):
        x = x.unsqueeze(axis)
    return x.clone()


@computes("Expand")
def _expand(n: Node, x: Any, shape: Any) -> Any:
    return x.expand(torch.broadcast_shapes(tuple(x.shape), tuple(shape.tolist()))).clone()


@computes("Tile")
def _tile(n: Node, x: Any, repeats: Any) -> Any:
    return x.repeat(repeats.tolist())


@computes("Split")
def _split(n: Node, x: Any, sizes: Any = None) -> Any:
    axis, parts = n("axis", 0), n.ints("split", sizes)
    if parts is None:
        each = -(-x.shape[axis] // len(n.proto.output))
        parts = [min(each, x.shape[axis] - k) for k in range(0, x.shape[axis], each)]
    return tuple(p.clone() for p in torch.split(x, parts, axis))


@computes("Slice")
def _slice(n: Node, x: Any, *bounds: Any) -> Any:
    starts, ends, axes, steps = [None if b is None else b.tolist() for b in (*bounds, *[None] * (4 - len(bounds)))]
    starts, ends = starts or n("starts"), ends or n("ends")
    axes = axes or n("axes") or list(range(len(starts)))
    for start, end, axis, step in zip(starts, ends, axes, steps or [1] * len(starts), strict=True):
        rows = range(*slice(start, end, step).indices(x.shape[axis]))
        x = x.index_select(axis, torch.tensor(list(rows), dtype=torch.int64))
    return x


@computes("Pad")
def _pad(n: Node, x: Any, pads: Any = None, value: Any = None, axes: Any = None) -> Any:
    found, rank = n.ints("pads", pads), x.dim()
    chosen = list(range(rank)) if axes is None else [int(k) % rank for k in axes]
    value = torch.as_tensor(n("value", 0.0), dtype=x.dtype) if value is None else value
    for k, axis in enumerate(chosen):
        x = _pad_axis(x, axis, found[k], found[k + len(chosen)], n("mode", "constant"), value)
    return x


def _pad_axis(x: Any, axis: int, before: int, after: int, mode: str, value: Any) -> Any:
    size = x.shape[axis]
    x = x.narrow(axis, max(0, -before), size - max(0, -before) - max(0, -after))
    before, after, size = max(before, 0), max(after, 0), x.shape[axis]
    places = np.arange(-before, size + after)
    if mode == "constant":
        inside = torch.from_numpy((places >= 0) & (places < size)).reshape(-1, *[1] * (x.dim() - 1 - axis))
        return torch.where(inside, x.index_select(axis, torch.from_numpy(places.clip(0, size - 1))), value)
    if mode == "edge":
        places = places.clip(0, size - 1)
    elif mode == "wrap":
        places %= size
    else:
        places = np.pad(np.arange(size), (before, after), mode="reflect")
    return x.index_select(axis, torch.from_numpy(places))


@computes("Gather")
def _gather(n: Node, x: Any, k: Any) -> Any:
    axis = n("axis", 0) % x.dim()
    found = x.index_select(axis, (k % x.shape[axis]).reshape(-1))
    return found.reshape([*x.shape[:axis], *k.shape, *x.shape[axis + 1 :]])


@computes("GatherElements")
def _gather_elements(n: Node, x: Any, k: Any) -> Any:
    return x.gather(n("axis", 0), k % x.shape[n("axis", 0)])


def _gather_nd(x: Any, k: Any, batch: int) -> Any:
    if batch:
        return torch.stack([_gather_nd(a, b, batch - 1) for a, b in zip(x, k, strict=True)])
    return x[tuple(k[..., i] for i in range(k.shape[-1]))]


@computes("ScatterElements", "Scatter")
def _scatter_elements(n: Node, x: Any, k: Any, updates: Any) -> Any:
    axis, how = n("axis", 0), n("reduction", "none")
    k = k % x.shape[axis]
    if how == "none":
        return x.scatter(axis, k, updates)
    return x.scatter_reduce(axis, k, updates, {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}[how])


@computes("ScatterND")
def _scatter_nd(n: Node, x: Any, k: Any, updates: Any) -> Any:
    return x.index_put(tuple(k[..., i] for i in range(k.shape[-1])), updates, accumulate=n("reduction") == "add")


@computes("OneHot")
def _one_hot(n: Node, k: Any, depth: Any, values: Any) -> Any:
    depth, axis = int(depth), n("axis", -1)
    on = functional.one_hot(k.long() % depth, depth).bool().movedim(-1, axis)
    return torch.where(on, values[1], values[0])


@computes("Compress")
def _compress(n: Node, x: Any, condition: Any) -> Any:
    axis = n("axis")
    x = x.reshape(-1) if axis is None else x
    return x.index_select(axis or 0, torch.nonzero(condition)[:, 0])


@computes("ReverseSequence")
def _reverse_sequence(n: Node, x: Any, lengths: Any) -> Any:
    time, batch = n("time_axis", 0), n("batch_axis", 1)
    rows = [
        torch.cat([r[: int(k)].flip(0), r[int(k) :]])
        for r, k in zip(x.movedim((batch, time), (0, 1)), lengths, strict=True)
    ]
    return torch.stack(rows).movedim((0, 1), (batch, time))


@computes("Trilu")
def _trilu(n: Node, x: Any, k: Any = None) -> Any:
    return (torch.triu if n("upper", 1) else torch.tril)(x, 0 if k is None else int(k))


@computes("TopK")
def _top_k(n: Node, x: Any, k: Any = None) -> Any:
    return tuple(x.topk(n.ints("k", k) if k is None else int(k), n("axis", -1), bool(n("largest", 1)), True))


@computes("Unique")
def _unique(n: Node, x: Any) -> Any:
    order = torch.argsort(x.reshape(-1))
    return (x.reshape(-1)[order], order)


@computes("ArgMax", "ArgMin")
def _arg_extreme(n: Node, x: Any) -> Any:
    return (torch.argmax if n.proto.op_type == "ArgMax" else torch.argmin)(x, n("axis", 0), bool(n("keepdims", 1)))


@computes("NonZero")
def _non_zero(n: Node, x: Any) -> Any:
    return torch.nonzero(x).mT.clone()


@computes("Range")
def _range(n: Node, start: Any, limit: Any, delta: Any) -> Any:
    count = max(0, math.ceil((float(limit.detach()) - float(start.detach())) / float(delta.detach())))
    return start + torch.arange(count).to(start.dtype) * delta


@computes("CumSum", "CumProd")
def _cumulate(n: Node, x: Any, axis: Any) -> Any:
    axis = int(axis)
    x = x.flip(axis) if n("reverse", 0) else x
    product = n.proto.op_type == "CumProd"
    if n("exclusive", 0):
        first = torch.full_like(x.narrow(axis, 0, 1), float(product))
        x = torch.cat([first, x.narrow(axis, 0, x.shape[axis] - 1)], axis)
    found = x.cumprod(axis) if product else x.cumsum(axis)
    return found.flip(axis) if n("reverse", 0) else found


def _reduce(n: Node, x: Any, axes: Any, how: Any) -> Any:
    """The axes are made one, the last, which is reduced."""
    found = n.ints("axes", axes)
    if not found:
        if n("noop_with_empty_axes", 0):
            return how(x.unsqueeze(-1))  # of one element each
        found = list(range(x.dim()))
    found = sorted(k % x.dim() for k in found) if x.dim() else []
    rest = [k for k in range(x.dim()) if k not in found]
    result = how(x.permute([*rest, *found]).reshape(*[x.shape[k] for k in rest], -1))
    for axis in found if n("keepdims", 1) else []:
        result = result.unsqueeze(axis)
    return result


@computes("Softmax", "LogSoftmax")
def _softmax(n: Node, x: Any) -> Any:
    function = torch.softmax if n.proto.op_type == "Softmax" else torch.log_softmax
    if n.opset >= 13:
        return function(x, n("axis", -1))
    axis = n("axis", 1) % x.dim() if x.dim() > 1 or n("axis", 1) < 1 else 1
    return function(x.reshape(math.prod(x.shape[:axis]), -1), -1).reshape(x.shape)


@computes("LayerNormalization", "RMSNormalization")
def _layer_norm(n: Node, x: Any, scale: Any, bias: Any = None) -> Any:
    axes = tuple(range(n("axis", -1) % x.dim(), x.dim()))
    centered = x - x.mean(axes, keepdim=True) if n.proto.op_type[0] == "L" else x
    inverse = (centered.square().mean(axes, keepdim=True) + n("epsilon", 1e-5)).rsqrt()
    found = centered * inverse * scale
    return found if bias is None else found + bias


@computes("LpNormalization")
def _lp_norm(n: Node, x: Any) -> Any:
    return x / _lp(x.movedim(n("axis", -1), -1), n("p", 2)).unsqueeze(n("axis", -1))


def _lp(x: Any, p: int) -> Any:
    """The norm along the last axis."""
    return x.abs().sum(-1) if p == 1 else (x.abs() ** p).sum(-1) ** (1 / p)


@computes("MeanVarianceNormalization")
def _mean_variance(n: Node, x: Any) -> Any:
    axes = tuple(n("axes", [0, 2, 3]))
    centered = x - x.mean(axes, keepdim=True)
    return centered / (centered.square().mean(axes, keepdim=True).sqrt() + 1e-9)


@computes("BatchNormalization")
def _batch_norm(n: Node, x: Any, scale: Any, bias: Any, mean: Any, variance: Any) -> Any:
    shape = (-1, *[1] * (x.dim() - 2))  # PyTorch has no gradient of the statistics
    scale, bias, mean, variance = (v.reshape(shape) for v in (scale, bias, mean, variance))
    return (x - mean) * (variance + n("epsilon", 1e-5)).rsqrt() * scale + bias


@computes("GroupNormalization")
def _group_norm(n: Node, x: Any, scale: Any, bias: Any) -> Any:
    groups = n("num_groups")
    if n.opset < 21:  # a scale for each group
        each = x.shape[1] // groups
        scale, bias = scale.repeat_interleave(each), bias.repeat_interleave(each)
    return functional.group_norm(x, groups, scale, bias, n("epsilon", 1e-5))


def _pads(n: Node, x: Any, kernel: Sequence[int]) -> tuple[list[int], list[int]]:
    """What is padded before and after each axis of an image."""
    rank = len(kernel)
    strides, dilations, auto = n("strides", [1] * rank), n("dilations", [1] * rank), n("auto_pad", "NOTSET")
    if auto in ("NOTSET", ""):
        pads = n("pads", [0] * 2 * rank)
        return list(pads[:rank]), list(pads[rank:])
    if auto == "VALID":
        return [0] * rank, [0] * rank
    totals = [
        max(0, (-(-size // s) - 1) * s + (k - 1) * d + 1 - size)
        for size, s, k, d in zip(x.shape[2:], strides, kernel, dilations, strict=True)
    ]
    less, more = [t // 2 for t in totals], [t - t // 2 for t in totals]
    return (less, more) if auto == "SAME_UPPER" else (more, less)


def _padded(n: Node, x: Any, kernel: Sequence[int], value: float = 0.0) -> Any:
    before, after = _pads(n, x, kernel)
    flat = [p for pair in zip(before[::-1], after[::-1], strict=True) for p in pair]
    return functional.pad(x, flat, value=value)


@computes("Conv")
def _conv(n: Node, x: Any, w: Any, b: Any = None) -> Any:
    kernel = list(w.shape[2:])
    rank = len(kernel)
    convolve = (functional.conv1d, functional.conv2d, functional.conv3d)[rank - 1]
    padded = _padded(n, x, kernel)
    return convolve(padded, w, b, n("strides", 1), 0, n("dilations", 1), n("group", 1))


@computes("ConvTranspose")
def _conv_transpose(n: Node, x: Any, w: Any, b: Any = None) -> Any:
    rank = w.dim() - 2
    pads = n("pads", [0] * 2 * rank)
    convolve = (functional.conv_transpose1d, functional.conv_transpose2d)[rank - 1]
    found = convolve(x, w, b, n("strides", 1), 0, n("output_padding", 0), n("group", 1), n("dilations", 1))
    for k in range(rank):
        found = found.narrow(k + 2, pads[k], found.shape[k + 2] - pads[k] - pads[k + rank])
    return found


def _windows(n: Node, x: Any, kernel: Sequence[int], value: float) -> Any:
    """The elements of every window, on a last axis; with ceil_mode the last window may reach beyond the end."""
    rank = len(kernel)
    strides, dilations = n("strides", [1] * rank), n("dilations", [1] * rank)
    x = _padded(n, x, kernel, value)
    for k in range(rank):
        reach = (kernel[k] - 1) * dilations[k] + 1
        room = x.shape[k + 2] - reach
        count = room // strides[k] + 1
        starts = torch.arange(count) * strides[k]
        places = starts[:, None] + torch.arange(kernel[k]) * dilations[k]
        axis = k + 2
        x = x.index_select(axis, places.reshape(-1))
        x = x.reshape(*x.shape[:axis], count, kernel[k], *x.shape[axis + 1 :]).movedim(axis + 1, -1)
    return x.flatten(-rank)


@computes("AveragePool")
def _average_pool(n: Node, x: Any) -> Any:
    kernel = n("kernel_shape")
    counted = _windows(n, torch.ones_like(x), kernel, float(n("count_include_pad", 0)))
    return _windows(n, x, kernel, 0.0).sum(-1) / counted.sum(-1)


@computes("MaxPool")
def _max_pool(n: Node, x: Any) -> Any:
    found, _ = _windows(n, x, n("kernel_shape"), -math.inf).max(-1)
    return found


@computes("LpPool")
def _lp_pool(n: Node, x: Any) -> Any:
    return _lp(_windows(n, x, n("kernel_shape"), 0.0), n("p", 2))


@computes("DepthToSpace")
def _depth_to_space(n: Node, x: Any) -> Any:
    b, (batch, c, h, w) = n("blocksize"), x.shape
    if n("mode", "DCR") == "DCR":
        x = x.reshape(batch, b, b, c // b**2, h, w).permute(0, 3, 4, 1, 5, 2)
    else:
        x = x.reshape(batch, c // b**2, b, b, h, w).permute(0, 1, 4, 2, 5, 3)
    return x.reshape(batch, c // b**2, h * b, w * b)


@computes("SpaceToDepth")
def _space_to_depth(n: Node, x: Any) -> Any:
    b, (batch, c, h, w) = n("blocksize"), x.shape
    x = x.reshape(batch, c, h // b, b, w // b, b).permute(0, 3, 5, 1, 2, 4)
    return x.reshape(batch, c * b * b, h // b, w // b)


@computes("Resize", "Upsample")
def _resize(n: Node, x: Any, *rest: Any) -> Any:
    mode = n("mode", "nearest")
    if len(rest) == 3 and rest[2] is not None:  # sizes
        target = rest[2].tolist()
    else:
        scales = n("scales") or rest[1 if len(rest) > 1 else 0].tolist()
        target = [int(d * s) for d, s in zip(x.shape, scales, strict=True)]
    assert target[:2] == list(x.shape[:2])
    if mode == "nearest":
        return functional.interpolate(x, target[2:], mode="nearest")
    corners = n("coordinate_transformation_mode", "half_pixel") == "align_corners"
    name = {1: "linear", 2: "bilinear"}[x.dim() - 2] if mode == "linear" else "bicubic"
    return functional.interpolate(x, target[2:], mode=name, align_corners=corners)


@computes("GridSample")
def _grid_sample(n: Node, x: Any, grid: Any) -> Any:
    mode = {"linear": "bilinear", "cubic": "bicubic"}.get(n("mode", "linear"), n("mode", "bilinear"))
    return functional.grid_sample(x, grid, mode, n("padding_mode", "zeros"), bool(n("align_corners", 0)))


@computes("Col2Im")
def _col2im(n: Node, x: Any, image: Any, block: Any) -> Any:
    pads = n("pads", [0] * 4)
    return functional.fold(x, image.tolist(), block.tolist(), n("dilations", 1), pads[:2], n("strides", 1))


@computes("CenterCropPad")
def _center_crop_pad(n: Node, x: Any, shape: Any) -> Any:
    for axis, wanted in zip(n("axes", list(range(x.dim()))), shape.tolist(), strict=True):
        have = x.shape[axis]
        if wanted <= have:
            x = x.narrow(axis, (have - wanted) // 2, wanted)
        else:
            before = (wanted - have) // 2
            zero = torch.zeros((), dtype=x.dtype)
            x = _pad_axis(x, axis % x.dim(), before, wanted - have - before, "constant", zero)
    return x


ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "Tanh": torch.tanh, "Sigmoid": torch.sigmoid, "Softsign": functional.softsign, "Softplus": functional.softplus,
}  # fmt: skip


def _recurrent(n: Node, x: Any, lengths: Any, states: list[Any], step: Callable[..., list[Any]]) -> Any:
    """All directions: `step(direction, x, states)` gives the next states, the first of which is the output."""
    batch_first = bool(n("layout", 0))
    x = x.transpose(0, 1) if batch_first else x
    steps, batch = x.shape[:2]
    every, last = [], []
    for d in range(states[0].shape[0]):
        lengths = torch.full((batch,), steps) if lengths is None else lengths
        reverse = n("direction", "forward") == "reverse" or d == 1
        now, found = [s[d] for s in states], [torch.zeros(())] * steps
        for t in reversed(range(steps)) if reverse else range(steps):
            alive = (lengths > t)[:, None]
            then = step(d, x[t], now)
            now = [torch.where(alive, a, b) for a, b in zip(then, now, strict=True)]
            found[t] = torch.where(alive, now[0], torch.zeros_like(now[0]))
        every.append(torch.stack(found))
        last.append(now)
    y = torch.stack(every, 1)
    ends = [torch.stack(s) for s in zip(*last, strict=True)]
    if batch_first:
        y, ends = y.permute(2, 0, 1, 3), [s.transpose(0, 1) for s in ends]
    return (y, *ends)


def _start(n: Node, x: Any, w: Any, given: Any) -> Any:
    if given is not None:
        return given.transpose(0, 1) if n("layout", 0) else given
    batch = x.shape[0 if n("layout", 0) else 1]
    return torch.zeros(w.shape[0], batch, n("hidden_size"), dtype=x.dtype)


def _activations(n: Node, default: list[str]) -> Callable[[int], list[Any]]:
    named = [a.decode() for a in n("activations", [])] or default * 2
    each = len(default)
    return lambda d: [ACTIVATIONS[a] for a in named[d * each : (d + 1) * each]]


@computes("RNN")
def _rnn(n: Node, x: Any, w: Any, r: Any, b: Any = None, lengths: Any = None, h0: Any = None) -> Any:
    functions = _activations(n, ["Tanh"])

    def step(d: int, xt: Any, states: list[Any]) -> list[Any]:
        z = xt @ w[d].mT + states[0] @ r[d].mT
        return [functions(d)[0](z if b is None else z + b[d].reshape(2, -1).sum(0))]

    return _recurrent(n, x, lengths, [_start(n, x, w, h0)], step)


@computes("GRU")
def _gru(n: Node, x: Any, w: Any, r: Any, b: Any = None, lengths: Any = None, h0: Any = None) -> Any:
    functions, before = _activations(n, ["Sigmoid", "Tanh"]), n("linear_before_reset", 0)

    def step(d: int, xt: Any, states: list[Any]) -> list[Any]:
        f, g = functions(d)
        h, (h_size, _) = states[0], (n("hidden_size"), 0)
        wb, rb = (torch.zeros(6 * h_size, dtype=x.dtype) if b is None else b[d]).reshape(2, -1)
        xz, xr, xh = (xt @ w[d].mT + wb).chunk(3, -1)
        rz, rr, rh = r[d].chunk(3, 0)
        bz, br, bh = rb.chunk(3, 0)
        z, reset = f(xz + h @ rz.mT + bz), f(xr + h @ rr.mT + br)
        candidate = g(xh + (reset * (h @ rh.mT + bh) if before else (reset * h) @ rh.mT + bh))
        return [(1 - z) * candidate + z * h]

    return _recurrent(n, x, lengths, [_start(n, x, w, h0)], step)


@computes("LSTM")
def _lstm(
    n: Node, x: Any, w: Any, r: Any, b: Any = None, lengths: Any = None, h0: Any = None, c0: Any = None, p: Any = None
) -> Any:
    functions = _activations(n, ["Sigmoid", "Tanh", "Tanh"])

    def step(d: int, xt: Any, states: list[Any]) -> list[Any]:
        f, g, last = functions(d)
        h, c = states
        z = xt @ w[d].mT + h @ r[d].mT
        z = z if b is None else z + b[d].reshape(2, -1).sum(0)
        i, o, forget, cell = z.chunk(4, -1)
        pi, po, pf = (0.0, 0.0, 0.0) if p is None else p[d].chunk(3, 0)
        c_new = f(forget + pf * c) * c + f(i + pi * c) * g(cell)
        return [f(o + po * c_new) * last(c_new), c_new]

    return _recurrent(n, x, lengths, [_start(n, x, w, h0), _start(n, x, w, c0)], step)


@computes("If")
def _if(n: Node, condition: Any) -> Any:
    return tuple(n.body(n("then_branch") if bool(condition) else n("else_branch"), []))


@computes("Loop")
def _loop(n: Node, most: Any, condition: Any, *states: Any) -> Any:
    body, now, kept = n("body"), list(states), []
    k, going = 0, True if condition is None else bool(condition)
    while going and (most is None or k < int(most)):
        going, *found = n.body(body, [torch.tensor(k), torch.tensor(True), *now])
        going = bool(going)
        now, scanned = found[: len(states)], found[len(states) :]
        kept.append(scanned)
        k += 1
    return (*now, *[torch.stack(s) for s in zip(*kept, strict=True)])


@computes("Scan")
def _scan(n: Node, *inputs: Any) -> Any:
    body, count = n("body"), n("num_scan_inputs")
    now, scanned = list(inputs[:-count]), inputs[-count:]
    axes, back = n("scan_input_axes", [0] * count), n("scan_input_directions", [0] * count)
    kept = []
    steps = scanned[0].shape[axes[0]]
    for t in range(steps):
        parts = [s.select(a, steps - 1 - t if r else t) for s, a, r in zip(scanned, axes, back, strict=True)]
        found = n.body(body, [*now, *parts])
        now = found[: len(now)]
        kept.append(found[len(now) :])
    outs = list(zip(*kept, strict=True))
    out_axes, out_back = n("scan_output_axes", [0] * len(outs)), n("scan_output_directions", [0] * len(outs))
    stacked = [torch.stack(o[::-1] if r else o, a) for o, a, r in zip(outs, out_axes, out_back, strict=True)]
    return (*now, *stacked)


@computes("SplitToSequence")
def _split_to_sequence(n: Node, x: Any, split: Any = None) -> Any:
    axis = n("axis", 0)
    parts = list(torch.split(x, 1 if split is None else int(split) if split.dim() == 0 else split.tolist(), axis))
    return [p.squeeze(axis) for p in parts] if split is None and not n("keepdims", 1) else parts


@computes("SequenceInsert")
def _sequence_insert(n: Node, sequence: Any, x: Any, k: Any = None) -> Any:
    at = len(sequence) if k is None else int(k) + (len(sequence) if int(k) < 0 else 0)
    return [*sequence[:at], x, *sequence[at:]]


@computes("ConcatFromSequence")
def _concat_from_sequence(n: Node, sequence: Any) -> Any:
    return (torch.stack if n("new_axis", 0) else torch.cat)(sequence, n("axis"))


@computes("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss")
def _nll(n: Node, x: Any, target: Any, weight: Any = None) -> Any:
    soft = n.proto.op_type[0] == "S"
    log = torch.log_softmax(x, 1) if soft else x
    weights = torch.ones_like(log[0, :, *[0] * (log.dim() - 2)]) if weight is None else weight
    each = weights[target]  # PyTorch has no gradient of the weights
    losses = -log.gather(1, target.unsqueeze(1)).squeeze(1) * each
    how = n("reduction", "mean")
    loss = losses if how == "none" else losses.sum() / (each.sum() if how == "mean" else 1)
    return (loss, log) if soft else loss


@computes("Attention")
def _attention(n: Node, q: Any, k: Any, v: Any, mask: Any = None) -> Any:
    scale = n("scale") or q.shape[-1] ** -0.5
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = scale * (q @ k.mT)
    if n("is_causal", 0):
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    if mask is not None:
        scores = scores + mask if mask.is_floating_point() else scores.masked_fill(~mask, -math.inf)
    return torch.softmax(scores, -1) @ v


@computes("DFT")
def _dft(n: Node, x: Any, length: Any = None, axis: Any = None) -> Any:
    axis = n("axis", 1) if axis is None else int(axis)
    signal = torch.complex(x[..., 0], torch.zeros_like(x[..., 0]) if x.shape[-1] == 1 else x[..., 1])
    axis = axis % x.dim()
    size = None if length is None else int(length)
    found = torch.fft.ifft(signal, size, axis) if n("inverse", 0) else torch.fft.fft(signal, size, axis)
    if n("onesided", 0):
        found = found.narrow(axis, 0, found.shape[axis] // 2 + 1)
    return torch.view_as_real(found)
