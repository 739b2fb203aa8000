"""expand_contrib: fused operators of com.microsoft become standard ones, which have gradients.

onnxruntime's optimizer and exporters write them for inference. Those that have a rule (rules/contrib.py) stay, and so
does every one of them in a file that a Trainer exports. The functions here say what onnxruntime's kernels compute, in
the form that expand_nodes.py asks for.
"""

import math
from collections.abc import Callable, Sequence

import ml_dtypes
import onnx_ir as ir

from onnxgrad.graph.builder import builder_at_work, op
from onnxgrad.graph.cast import in_type, wide_type
from onnxgrad.graph.tensor import Tensor
from onnxgrad.passes.draft import Draft
from onnxgrad.passes.expand_nodes import Writer, expand_nodes
from onnxgrad.schema import MICROSOFT

FUSED: dict[str, Writer] = {}  # by the operator
GRID_SAMPLE_OF_ANY_RANK = 20  # the opset since which its modes are linear and cubic
MASKED = -10000.0  # what onnxruntime adds to a score that is masked, unless the node says something else


def expand_contrib(draft: Draft) -> None:
    """Writes other operators in place of those that have a writer here."""
    expand_nodes(draft, FUSED, is_fused)


def is_fused(node: ir.Node) -> bool:
    """Whether it is written with others before it is differentiated."""
    return node.domain == MICROSOFT and node.op_type in FUSED


def fused(name: str) -> Callable[[Writer], Writer]:
    """Registers a function as the writer of an operator."""

    def register(function: Writer) -> Writer:
        FUSED[name] = function
        return function

    return register


# Products and activations


@fused("BiasAdd")
def _bias_add(X: Tensor, bias: Tensor, skip: Tensor) -> Tensor:
    return X + bias + skip


@fused("BiasSplitGelu")
def _bias_split_gelu(X: Tensor, bias: Tensor) -> Tensor:
    left, right = op.Split(X + bias, axis=-1, num_outputs=2, outputs=2)
    return left * op.Gelu(right, domain=MICROSOFT)


@fused("BiasSoftmax")
def _bias_softmax(data: Tensor, bias: Tensor, *, axis: int = 1, is_inner_broadcast: int = 0) -> Tensor:
    """Over all axes from `axis` on, as if they were one; either way to broadcast the bias is ONNX's."""
    total = data + bias
    if axis in (-1, data.rank - 1):
        return op.Softmax(total, axis=-1)
    return op.Reshape(op.Softmax(op.Flatten(total, axis=axis), axis=-1), op.Shape(total), allowzero=1)


@fused("TransposeMatMul")
def _transpose_matmul(A: Tensor, B: Tensor, *, alpha: float = 1.0, transA: int = 0, transB: int = 0) -> Tensor:
    return op.FusedMatMul(A, B, alpha=alpha, transA=transA, transB=transB)


@fused("GemmFastGelu")
def _gemm_fast_gelu(X: Tensor, W: Tensor, bias: Tensor | None = None) -> Tensor:
    return op.FastGelu(X @ W, bias)


@fused("NhwcConv")
def _nhwc_conv(
    X: Tensor,
    W: Tensor,
    B: Tensor | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: list[int] | None = None,
    group: int = 1,
    kernel_shape: list[int] | None = None,
    pads: list[int] | None = None,
    strides: list[int] | None = None,
) -> Tensor:
    """Images and kernels have their channels last."""
    given = {"auto_pad": auto_pad, "dilations": dilations, "group": group, "kernel_shape": kernel_shape}
    Y = op.Conv(_channels_first(X), _channels_first(W), B, pads=pads, strides=strides, **given)
    return op.Transpose(Y, perm=[0, *range(2, X.rank), 1])


def _channels_first(x: Tensor) -> Tensor:
    return op.Transpose(x, perm=[0, x.rank - 1, *range(1, x.rank - 1)])


@fused("CDist")
def _cdist(A: Tensor, B: Tensor, *, metric: str = "sqeuclidean") -> Tensor:
    """The distance of every row of A to every row of B."""
    difference = op.Unsqueeze(A, [1]) - op.Unsqueeze(B, [0])
    return (op.ReduceL2 if metric == "euclidean" else op.ReduceSumSquare)(difference, [2], keepdims=0)


# Operators that ONNX has by now


@fused("Trilu")
def _trilu(X: Tensor, k: Tensor | None = None, *, upper: int = 1) -> Tensor:
    return op.Trilu(X, k, upper=upper)


@fused("GridSample")
def _grid_sample(
    X: Tensor, Grid: Tensor, *, mode: str = "bilinear", padding_mode: str = "zeros", align_corners: int = 0
) -> Tensor:
    if builder_at_work().opsets[""] >= GRID_SAMPLE_OF_ANY_RANK:
        mode = mode.removeprefix("bi")
    return op.GridSample(X, Grid, mode=mode, padding_mode=padding_mode, align_corners=align_corners)


@fused("QuantizeLinear")
def _quantize_linear(x: Tensor, y_scale: Tensor, y_zero_point: Tensor | None = None, *, axis: int = 1) -> Tensor:
    return op.QuantizeLinear(x, y_scale, y_zero_point, axis=axis)


@fused("DequantizeLinear")
def _dequantize_linear(x: Tensor, x_scale: Tensor, x_zero_point: Tensor | None = None, *, axis: int = 1) -> Tensor:
    return op.DequantizeLinear(x, x_scale, x_zero_point, axis=axis)


# Normalizations


@fused("GroupNorm")
def _group_norm(
    X: Tensor,
    gamma: Tensor,
    beta: Tensor,
    *,
    activation: int,
    groups: int,
    epsilon: float = 1e-5,
    channels_last: int = 1,
) -> Tensor:
    x = _channels_first(X) if channels_last else X
    kind = wide_type(gamma)
    grouped = op.Reshape(in_type(x, kind), [0, groups, -1])
    mean = op.ReduceMean(grouped, [2], keepdims=1)
    centred = grouped - mean
    variance = op.ReduceMean(centred * centred, [2], keepdims=1)
    normal = op.Reshape(centred / op.Sqrt(variance + epsilon), op.Shape(x))
    axes = list(range(1, X.rank - 1))
    Y = normal * op.Unsqueeze(in_type(gamma, kind), axes) + op.Unsqueeze(in_type(beta, kind), axes)
    Y = in_type(Y * op.Sigmoid(Y) if activation else Y, X.dtype)
    return op.Transpose(Y, perm=[0, *range(2, X.rank), 1]) if channels_last else Y


@fused("SkipGroupNorm")
def _skip_group_norm(
    X: Tensor,
    gamma: Tensor,
    beta: Tensor,
    skip: Tensor,
    bias: Tensor | None = None,
    *,
    activation: int,
    groups: int,
    epsilon: float = 1e-5,
    channels_last: int = 1,
) -> list[Tensor]:
    if len(skip.shape or ()) == 2:  # of images and channels alone
        skip = op.Unsqueeze(skip, list(range(1, X.rank - 1)))
    total = X + skip if bias is None else X + skip + bias
    shape = {"groups": groups, "channels_last": channels_last}
    return [_group_norm(total, gamma, beta, activation=activation, epsilon=epsilon, **shape), total]


@fused("EmbedLayerNormalization")
def _embed_layer_normalization(
    input_ids: Tensor,
    segment_ids: Tensor | None,
    word_embedding: Tensor,
    position_embedding: Tensor,
    segment_embedding: Tensor | None,
    gamma: Tensor,
    beta: Tensor,
    mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    *,
    epsilon: float = 1e-12,
) -> list[Tensor]:
    length = op.Shape(input_ids, start=1, end=2)
    if position_ids is None:
        position_ids = _counted(length)
    total = op.Gather(word_embedding, input_ids) + op.Gather(position_embedding, position_ids)
    if segment_embedding is not None and segment_ids is not None:
        total = total + op.Gather(segment_embedding, segment_ids)
    lengths = op.Mul(input_ids, 0) if mask is None else op.Cast(mask.equals(1), to=ir.DataType.INT32.value)
    return [
        op.LayerNormalization(total, gamma, beta, axis=-1, epsilon=epsilon),
        op.Cast(op.ReduceSum(lengths, [1], keepdims=0), to=ir.DataType.INT32.value),
        total,
    ]


# Attention


def _heads(x: Tensor, count: int) -> Tensor:
    """[batch, sequence, count · size] as [batch, count, sequence, size]; what has four dimensions is so already."""
    return x if x.rank == 4 else op.Transpose(op.Reshape(x, [0, 0, count, -1]), perm=[0, 2, 1, 3])


def _joined_heads(x: Tensor) -> Tensor:
    return op.Reshape(op.Transpose(x, perm=[0, 2, 1, 3]), [0, 0, -1])


def _size(x: Tensor, axis: int) -> Tensor:
    """As a vector of one element."""
    return op.Shape(x, start=axis, end=axis + 1)


def _counted(size: Tensor) -> Tensor:
    """0, 1, …"""
    return op.Range(0, op.Squeeze(size, [0]), 1)


def _column(x: Tensor) -> Tensor:
    return op.Unsqueeze(x, [-1])


def _default_scale(query: Tensor) -> float | Tensor:
    size = None if query.shape is None else query.shape[3]
    if isinstance(size, int):
        return 1 / math.sqrt(size)
    return 1 / op.Sqrt(op.Cast(op.Shape(query, start=3), to=query.dtype.value))


def _attended(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    added: Sequence[Tensor],
    softcap: float = 0.0,
    sink: Tensor | None = None,
) -> Tensor:
    """softmax(scale · query @ keyᵀ + what is added) @ value, where a sink is one more score, of nothing."""
    scores = query * (scale or _default_scale(query)) @ op.Transpose(key, perm=[0, 1, 3, 2])
    if softcap:
        scores = op.Tanh(scores / softcap) * softcap
    for term in added:
        scores = scores + term
    if sink is None:
        return op.Softmax(scores, axis=-1) @ value
    column = op.Expand(sink, op.Concat(op.Shape(scores, end=3), [1], axis=0))
    weights = op.Softmax(op.Concat(column, scores, axis=3), axis=-1)
    return op.Slice(weights, [1], _size(weights, 3), [3]) @ value


def _mask(keep: Tensor, dtype: ir.DataType, masked: float | None = None) -> Tensor:
    """What is added to scores: 0, or a number that makes them vanish; -∞ would be NaN where a query sees nothing."""
    constant = builder_at_work().constant
    if masked is None:
        masked = float(ml_dtypes.finfo(dtype.numpy()).min) / 2  # type: ignore[no-untyped-call]
    return op.Where(keep, constant(0, dtype), constant(masked, dtype))


def _not_after(query: Tensor, key: Tensor) -> Tensor:
    """Which keys a query may see: those up to its own place, if the last query belongs to the last key."""
    queries, keys = _size(query, 2), _size(key, 2)
    return op.LessOrEqual(_counted(keys), _column(_counted(queries) + (keys - queries)))


def _kept(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Which keys a mask lets queries see: one for each key, or the place where the keys of an example end."""
    if mask.rank > 1:
        keep = mask > 0
        if mask.rank == 4:  # for all that a model may be given: here are the last queries
            keys, queries = _size(key, 2), _size(query, 2)
            return op.Slice(keep, op.Concat(keys - queries, [0], axis=0), op.Concat(keys, keys, axis=0), [2, 3])
        return op.Unsqueeze(keep, [1, 2] if mask.rank == 2 else [1])
    if mask.static_shape is not None and isinstance(batch := (query.shape or (None,))[0], int):
        (size,) = mask.static_shape
        if size not in (batch, 2 * batch):
            raise ValueError(f"its mask has {size} elements, expected one or two for each of {batch} examples")
    # The ends of all examples and, maybe, their starts.
    examples = _size(query, 0)
    both = op.Concat(op.Cast(mask, to=ir.DataType.INT64.value), op.Expand([0], examples), axis=0)
    ends, starts = op.Slice(both, [0], examples, [0]), op.Slice(both, examples, examples * 2, [0])
    place = _counted(_size(key, 2))
    return (place < op.Unsqueeze(ends, [1, 2, 3])) & (place >= op.Unsqueeze(starts, [1, 2, 3]))


def _refuse(**given: object) -> None:
    """Raises one sentence for inputs and attributes that are not left out and that no writer here knows."""
    for name, value in given.items():
        if value:
            raise ValueError(f"it has {name}, which there is no gradient for")


@fused("Attention")
def _attention(
    input: Tensor,
    weights: Tensor,
    bias: Tensor | None = None,
    mask_index: Tensor | None = None,
    past: Tensor | None = None,
    attention_bias: Tensor | None = None,
    past_sequence_length: Tensor | None = None,
    *,
    num_heads: int,
    unidirectional: int = 0,
    qkv_hidden_sizes: list[int] | None = None,
    scale: float = 0.0,
    mask_filter_value: float = MASKED,
    do_rotary: int = 0,
    past_present_share_buffer: int = 0,
) -> list[Tensor | None]:
    """One product gives queries, keys and values."""
    _refuse(do_rotary=do_rotary, past_present_share_buffer=past_present_share_buffer)
    projected = input @ weights if bias is None else input @ weights + bias
    if qkv_hidden_sizes:
        parts = op.Split(projected, qkv_hidden_sizes, axis=-1, outputs=3)
    else:
        parts = op.Split(projected, axis=-1, num_outputs=3, outputs=3)
    query, key, value = (_heads(x, num_heads) for x in parts)
    present = None
    if past is not None:
        key = op.Concat(op.Gather(past, 0, axis=0), key, axis=2)
        value = op.Concat(op.Gather(past, 1, axis=0), value, axis=2)
    if qkv_hidden_sizes is None or qkv_hidden_sizes[1] == qkv_hidden_sizes[2]:
        present = op.Concat(op.Unsqueeze(key, [0]), op.Unsqueeze(value, [0]), axis=0)
    added = [] if attention_bias is None else [attention_bias]
    if mask_index is not None:
        added.append(_mask(_kept(mask_index, query, key), input.dtype, mask_filter_value))
    if unidirectional:
        added.append(_mask(_not_after(query, key), input.dtype))
    return [_joined_heads(_attended(query, key, value, scale, added)), present]


@fused("MultiHeadAttention")
def _multi_head_attention(
    query: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    bias: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    attention_bias: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    past_sequence_length: Tensor | None = None,
    cache_indirection: Tensor | None = None,
    *,
    num_heads: int,
    scale: float = 0.0,
    mask_filter_value: float = MASKED,
    unidirectional: int = 0,
) -> list[Tensor]:
    """Queries, keys and values are inputs; packed ones come as [batch, sequence, heads, 2 or 3, size]."""
    _refuse(past_sequence_length=past_sequence_length, cache_indirection=cache_indirection)
    dtype = query.dtype
    if key is None:
        query, key, value = _unpacked(query, 3)
    elif value is None:
        key, value = _unpacked(key, 2)
    q, k, v = _heads(query, num_heads), _heads(key, num_heads), _heads(value, num_heads)
    if bias is not None:  # keys and values that come in heads have theirs already
        sizes = [op.Mul(_size(x, 3), [num_heads]) for x in (q, k, v)]
        parts = op.Split(bias, op.Concat(*sizes, axis=0), axis=0, outputs=3)
        q, k, v = (
            x if given.rank == 4 else x + op.Reshape(b, [num_heads, 1, -1])
            for x, b, given in zip((q, k, v), parts, (query, key, value), strict=True)
        )
    if past_key is not None and past_value is not None:
        k, v = op.Concat(past_key, k, axis=2), op.Concat(past_value, v, axis=2)
    added = [] if attention_bias is None else [attention_bias]
    if key_padding_mask is not None:
        added.append(_mask(_kept(key_padding_mask, q, k), dtype, mask_filter_value))
    if unidirectional:
        added.append(_mask(_not_after(q, k), dtype))
    return [_joined_heads(_attended(q, k, v, scale, added)), k, v]


def _unpacked(x: Tensor, count: int) -> list[Tensor]:
    """The parts of [batch, sequence, heads, count, size], each as [batch, heads, sequence, size]."""
    parts = op.Split(op.Transpose(x, perm=[3, 0, 2, 1, 4]), axis=0, num_outputs=count, outputs=count)
    return [op.Squeeze(part, [0]) for part in parts]


def _rotated(x: Tensor, positions: Tensor, cos_cache: Tensor, sin_cache: Tensor, interleaved: int) -> Tensor:
    """The first numbers of every head, twice as many as the tables have columns, turned by their position.

    `x` is [batch, heads, sequence, size], `positions` [batch, sequence].
    """
    cos, sin = (op.Unsqueeze(op.Gather(table, positions), [1]) for table in (cos_cache, sin_cache))
    half = _size(cos_cache, 1)
    turned = op.Slice(x, [0], half * 2, [3])
    if interleaved:
        pairs = op.Reshape(turned, [0, 0, 0, -1, 2])
        first, second = (op.Gather(pairs, k, axis=4) for k in (0, 1))
    else:
        first, second = op.Split(turned, axis=3, num_outputs=2, outputs=2)
    real, imaginary = first * cos - second * sin, first * sin + second * cos
    if interleaved:
        turned = op.Reshape(op.Concat(_column(real), _column(imaginary), axis=4), op.Shape(turned))
    else:
        turned = op.Concat(real, imaginary, axis=3)
    size, whole = (None if t.shape is None else t.shape[k] for t, k in ((x, 3), (cos_cache, 1)))
    if isinstance(size, int) and isinstance(whole, int) and size == 2 * whole:
        return turned
    return op.Concat(turned, op.Slice(x, half * 2, _size(x, 3), [3]), axis=3)


@fused("RotaryEmbedding")
def _rotary_embedding(
    input: Tensor,
    position_ids: Tensor,
    cos_cache: Tensor,
    sin_cache: Tensor,
    *,
    interleaved: int = 0,
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
    is_packed_batching: int = 0,
) -> Tensor:
    _refuse(is_packed_batching=is_packed_batching)
    x = input
    if x.rank == 3:  # without a number of heads, their size is what the tables are for
        shape = [0, 0, num_heads, -1] if num_heads else op.Concat([0, 0, -1], _size(cos_cache, 1) * 2, axis=0)
        x = op.Transpose(op.Reshape(input, shape), perm=[0, 2, 1, 3])
    if position_ids.rank == 1:  # where the first one is
        position_ids = op.Unsqueeze(_counted(_size(x, 2)) + position_ids, [0])
    turned = _rotated(x, position_ids, cos_cache, sin_cache, interleaved)
    return turned if input.rank == 4 else _joined_heads(turned)


@fused("GroupQueryAttention")
def _group_query_attention(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    past_key: Tensor | None,
    past_value: Tensor | None,
    seqlens_k: Tensor,
    total_sequence_length: Tensor,
    cos_cache: Tensor | None = None,
    sin_cache: Tensor | None = None,
    position_ids: Tensor | None = None,
    attention_bias: Tensor | None = None,
    head_sink: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    *,
    num_heads: int,
    kv_num_heads: int,
    scale: float = 0.0,
    softcap: float = 0.0,
    local_window_size: int = -1,
    do_rotary: int = 0,
    rotary_interleaved: int = 0,
    smooth_softmax: int = 0,
    causal: int = 1,
    qk_output: int = 0,
    qk_norm_epsilon: float = 1e-6,
    k_quant_type: str = "NONE",
    v_quant_type: str = "NONE",
    sliding_window_cache: int = 0,
) -> list[Tensor]:
    """Several heads of queries share one of keys and values; keys before them come from a cache, per example."""
    _refuse(k_scale=k_scale, v_scale=v_scale, qk_output=qk_output, sliding_window_cache=sliding_window_cache)
    if key is None or value is None:
        parts = op.Reshape(query, [0, 0, num_heads + 2 * kv_num_heads, -1])
        counts = [num_heads, kv_num_heads, kv_num_heads]
        q, k, v = op.Split(op.Transpose(parts, perm=[0, 2, 1, 3]), counts, axis=1, outputs=3)
    else:
        q, k, v = _heads(query, num_heads), _heads(key, kv_num_heads), _heads(value, kv_num_heads)
    if q_norm_weight is not None and k_norm_weight is not None:
        q, k = (_rms(x, w, qk_norm_epsilon) for x, w in ((q, q_norm_weight), (k, k_norm_weight)))
    length = _size(q, 2)
    ends = _column(op.Cast(op.Reshape(seqlens_k, [-1]), to=ir.DataType.INT64.value) + 1)  # [batch, 1], of all keys
    first = op.Mul(ends, 0)  # where the new keys go
    total = op.Cast(op.Reshape(total_sequence_length, [1]), to=ir.DataType.INT64.value)
    if past_key is not None and (past_key.shape is None or past_key.shape[2] != 0):
        # There is nothing before the first prompt, whose examples may end before their padding does.
        first = op.Where(total.equals(length), first, ends - length)
    places = first + _counted(length)  # [batch, sequence]
    if do_rotary and cos_cache is not None and sin_cache is not None:
        at = places if position_ids is None else position_ids
        q, k = (_rotated(x, at, cos_cache, sin_cache, rotary_interleaved) for x in (q, k))
    if past_key is not None and past_value is not None:
        total = op.Max(total, _size(past_key, 2))
        k, v = (_appended(past, x, first, total) for past, x in ((past_key, k), (past_value, v)))
    seen = op.Unsqueeze(_counted(_size(k, 2)), [0, 1])  # [1, 1, keys]
    keep = seen < _column(ends)
    if causal:
        keep = keep & (seen <= _column(places))
    if local_window_size >= 0:
        keep = keep & (seen > _column(places) - local_window_size)
    added = [] if attention_bias is None else [attention_bias]
    added.append(_mask(op.Unsqueeze(keep, [1]), query.dtype))
    sink = builder_at_work().constant(0, query.dtype) if smooth_softmax > 0 else None
    sink = sink if head_sink is None else op.Reshape(head_sink, [1, num_heads, 1, 1])
    every_k, every_v = (repeated_heads(x, num_heads // kv_num_heads) for x in (k, v))
    mixed = _attended(q, every_k, every_v, scale, added, softcap, sink)
    return [_joined_heads(mixed), k, v]


def repeated_heads(x: Tensor, times: int | Tensor) -> Tensor:
    """Every head of keys or values as often as queries have it; a number, or a vector of one."""
    if times == 1 or (isinstance(times, Tensor) and times.constant == 1):
        return x
    shape = op.Concat(
        _size(x, 0), _size(x, 1), [times] if isinstance(times, int) else times, op.Shape(x, start=2), axis=0
    )
    joined = op.Concat(_size(x, 0), [-1], op.Shape(x, start=2), axis=0)
    return op.Reshape(op.Expand(op.Unsqueeze(x, [2]), shape), joined)


def _rms(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    wide = in_type(x, wide_type(x))
    root = op.Sqrt(op.ReduceMean(wide * wide, [-1], keepdims=1) + epsilon)
    return in_type(wide / root, x.dtype) * weight


def _appended(past: Tensor, new: Tensor, first: Tensor, total: Tensor) -> Tensor:
    """A cache of `total` places, with what is new from the place `first` on, which examples have each its own."""
    place = op.Unsqueeze(_counted(total), [0])  # [1, total]
    length, kept = _size(new, 2), _size(past, 2)
    after = op.Min(op.Max(place - first, 0), length - 1) + kept
    source = op.Where(place < first, place, after)  # [batch, total], in both one after the other
    both = op.Transpose(op.Concat(past, new, axis=2), perm=[0, 2, 1, 3])
    found = op.Transpose(op.GatherND(both, _column(source), batch_dims=1), perm=[0, 2, 1, 3])
    filled = op.Unsqueeze(place < first + length, [1, 3])
    return op.Where(filled, found, builder_at_work().constant(0, new.dtype))
