"""FlashAttention and FlashAttentionGrad on CUDA: tiles of scores that never leave the chip, in one or two launches.

As FlashAttention-2 does it: programs of the forward pass have a block of queries each and go along the keys, with a
softmax that is corrected when a higher score turns up. Of the gradient, programs with a block of queries find dQ, then
others with a block of keys find dK and dV; so every sum has one order. Half types are multiplied as they are. As cuDNN
does, products of float32 use TF32 as long as torch.backends.cudnn.allow_tf32 says so, which is its default.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from onnxgrad.cuda.core.indices import BadIndex
from onnxgrad.cuda.core.launch import (
    CUTS_OFF,
    bits_of,
    ceil_div,
    counting_type,
    float_of,
    launch,
    power_of_two,
    to_type,
)

LONGEST_HEAD = 256  # numbers; of longer ones a tile would not fit on the chip
NO_MASK, NUMBERS, TRUTH_VALUES = 0, 1, 2
NEGATIVE_INFINITY = tl.constexpr(float("-inf"))


class Tiling(NamedTuple):
    """How a kernel is cut: rows of a program's own block, rows that it takes at a time, warps, stages of loads."""

    block: int
    step: int
    num_warps: int
    num_stages: int


def _tiling(head: int, itemsize: int, is_gradient: bool) -> Tiling:
    """By the numbers in a head, a power of two: what fits into 227 kB of shared memory and into registers."""
    if itemsize == 4:
        if head <= 64:
            return Tiling(64, 32, 4, 2)
        return Tiling(32, 32, 4, 2) if head <= 128 else Tiling(32, 16, 4, 1)
    if is_gradient:
        if head <= 64:
            return Tiling(64, 32, 4, 3)
        return Tiling(64, 32, 4, 2) if head <= 128 else Tiling(64, 32, 8, 1)
    if head <= 64:
        return Tiling(64, 64, 4, 2)
    return Tiling(128, 64, 8, 2) if head <= 128 else Tiling(64, 32, 4, 2)


def flash_attention(
    Q: torch.Tensor,
    K: torch.Tensor,
    V: torch.Tensor,
    mask: torch.Tensor | None,
    Y: torch.Tensor,
    statistics: torch.Tensor,
    scale: float,
    is_causal: int,
    bad: BadIndex,
) -> None:
    """No index can be bad."""
    if statistics.numel() == 0:
        return
    sizes = _expect_short_heads(Q)
    tiling = _tiling(_width(Q.shape[3]), Q.itemsize, False)
    launch(
        _forward, ceil_div(sizes.S, tiling.block) * sizes.N * sizes.H, Q, K, V, *_masked(mask, Q, K), Y, statistics,
        *_numbers(Q, K, Y, scale), *_constants(Q, K, mask, statistics, is_causal), *tiling[:2],
        num_warps=tiling.num_warps, num_stages=tiling.num_stages,
    )  # fmt: skip


def flash_attention_grad(
    dY: torch.Tensor,
    Q: torch.Tensor,
    K: torch.Tensor,
    V: torch.Tensor,
    mask: torch.Tensor | None,
    Y: torch.Tensor,
    statistics: torch.Tensor,
    dQ: torch.Tensor,
    dK: torch.Tensor,
    dV: torch.Tensor,
    scale: float,
    is_causal: int,
    bad: BadIndex,
) -> None:
    """No index can be bad."""
    if statistics.numel() == 0 or K.numel() == 0:  # what is there without the other is without influence
        for result in (dQ, dK, dV):
            result.zero_()
        return
    N, S, H = _expect_short_heads(Q)
    tiling = _tiling(_width(Q.shape[3]), Q.itemsize, True)
    options = {"num_warps": tiling.num_warps, "num_stages": tiling.num_stages}
    shared = (*_numbers(Q, K, Y, scale), *_constants(Q, K, mask, statistics, is_causal), *tiling[:2])
    inner = torch.empty((N, H, S), dtype=torch.float32, device=Q.device)  # sums of dY · Y
    inputs = (dY, Q, K, V, *_masked(mask, Q, K))
    launch(_of_queries, ceil_div(S, tiling.block) * N * H, *inputs, Y, statistics, inner, dQ, *shared, **options)
    programs = ceil_div(K.shape[1], tiling.block) * N * K.shape[2]
    launch(_of_keys, programs, *inputs, statistics, inner, dK, dV, *shared, **options)


class _Rows(NamedTuple):
    """Batches, queries and heads."""

    N: int
    S: int
    H: int


def _expect_short_heads(Q: torch.Tensor) -> _Rows:
    if Q.shape[3] > LONGEST_HEAD:
        raise ValueError(f"heads have {Q.shape[3]} numbers, expected at most {LONGEST_HEAD} on a GPU")
    return _Rows(*Q.shape[:3])


def _width(D: int) -> int:
    """Numbers in a tile's row: tl.dot takes 16 at least."""
    return max(16, power_of_two(D))


def _masked(mask: torch.Tensor | None, Q: torch.Tensor, K: torch.Tensor) -> tuple[Any, ...]:
    """The mask, or anything in its place, and its steps in memory, 0 where it is broadcast."""
    if mask is None:
        return Q, 0, 0, 0, 0
    whole = (Q.shape[0], Q.shape[2], Q.shape[1], K.shape[1])
    steps = mask.view((1,) * (4 - mask.dim()) + tuple(mask.shape)).expand(whole).stride()
    return (mask.view(torch.uint8) if mask.dtype == torch.bool else mask), *steps


def _numbers(Q: torch.Tensor, K: torch.Tensor, Y: torch.Tensor, scale: float) -> tuple[int, ...]:
    """N, queries, keys, heads, how many of these share one of K, the bits of the scale, and steps in memory.

    From batch to batch, row to row and head to head: those of Q and dQ, of K, V and their gradients, and of Y and dY.
    """
    (N, S, H, _), (_, T, groups, _) = Q.shape, K.shape
    return N, S, T, H, H // groups, bits_of(scale), *(step for x in (Q, K, Y) for step in x.stride()[:3])


def _constants(
    Q: torch.Tensor, K: torch.Tensor, mask: torch.Tensor | None, statistics: torch.Tensor, is_causal: int
) -> tuple[Any, ...]:
    kind = NO_MASK if mask is None else TRUTH_VALUES if mask.dtype == torch.bool else NUMBERS
    by_query = mask is not None and mask.dim() > 1 and mask.shape[-2] > 1
    precision = "tf32" if Q.dtype == torch.float32 and torch.backends.cudnn.allow_tf32 else "ieee"
    spans = (_span(Q), _span(K), statistics.numel(), 0 if mask is None else mask.numel())
    counts = counting_type(*spans)
    return Q.shape[3], _width(Q.shape[3]), kind, by_query, bool(is_causal), precision, counts


def _span(x: torch.Tensor) -> int:
    """How far apart its elements lie."""
    return sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True)) + 1


@triton.jit
def _dot(a, b, PRECISION: tl.constexpr):
    """The product of two tiles, in float32; the interpreter multiplies the bits of bfloat16."""
    if CUTS_OFF and a.dtype == tl.bfloat16:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:  # noqa: RET505 - which Triton compiles only if the condition is false
        return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _rows(tensor, at, row, rows, step, column, D: tl.constexpr):
    """A tile: rows of a tensor, zeros beyond its end."""
    here = (row < rows)[:, None] & (column < D)[None, :]
    return tl.load(tensor + at + row[:, None] * step + column[None, :], here, other=0.0)


@triton.jit
def _scores(
    s, mask, at, by_query, by_key, query, key, S, T,
    MASK: tl.constexpr, BY_QUERY: tl.constexpr, IS_CAUSAL: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Products with the mask: one of `query` and `key` is a row of numbers, the other a column.

    All of a WHOLE tile are there, and seen as far as the order of queries and keys goes.
    """
    if MASK != 0:
        place = mask + at + key * by_key
        here = key < T
        if BY_QUERY:
            place = place + query * by_query
            here = here & (query < S)
        found = tl.load(place, here, other=0)
        s = s + found.to(tl.float32) if MASK == 1 else tl.where(found != 0, s, NEGATIVE_INFINITY)
    if not WHOLE:
        seen = (key < T) & (query < S)
        if IS_CAUSAL:
            seen = seen & (key <= query)
        s = tl.where(seen, s, NEGATIVE_INFINITY)
    return s


@triton.jit
def _of_block(number, blocks, heads, KIND: tl.constexpr):
    """Which block, batch and head a program has: blocks of queries that see most keys come first."""
    return blocks - 1 - number % blocks, (number // blocks // heads).to(KIND), (number // blocks % heads).to(KIND)


@triton.jit
def _forward(
    Q, K, V, mask, by_batch, by_head, by_query, by_key, Y, statistics, N, S, T, H, share, scale,
    q_batch, q_row, q_head, k_batch, k_row, k_head, y_batch, y_row, y_head,
    D: tl.constexpr, WIDTH: tl.constexpr, MASK: tl.constexpr, BY_QUERY: tl.constexpr, IS_CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    block, n, h = _of_block(tl.program_id(0), tl.cdiv(S, BLOCK), H, KIND)
    factor = float_of(scale, tl.float32)
    query = (block * BLOCK + tl.arange(0, BLOCK)).to(KIND)
    column = tl.arange(0, WIDTH).to(KIND)
    q = _rows(Q, n * q_batch + h * q_head, query, S, q_row, column, D)
    highest = tl.full([BLOCK], NEGATIVE_INFINITY, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    y = tl.zeros([BLOCK, WIDTH], tl.float32)
    end = tl.minimum(T, (block + 1) * BLOCK) if IS_CAUSAL else T
    whole = _whole_tiles(block, S, T, IS_CAUSAL, BLOCK, STEP)
    shared = (q, K, V, n * k_batch + h // share * k_head, k_row, mask, n * by_batch + h * by_head, by_query, by_key)
    for start in range(0, whole, STEP):
        highest, total, y = _add_keys(
            start, highest, total, y, *shared, query, column, factor, S, T, D, MASK, BY_QUERY, IS_CAUSAL, PRECISION,
            KIND, STEP, True,
        )  # fmt: skip
    for start in range(whole, end, STEP):
        highest, total, y = _add_keys(
            start, highest, total, y, *shared, query, column, factor, S, T, D, MASK, BY_QUERY, IS_CAUSAL, PRECISION,
            KIND, STEP, False,
        )  # fmt: skip
    inverse = tl.where(total == 0, 0.0, 1 / tl.where(total == 0, 1.0, total))
    at = (n * H + h) * S + query
    tl.store(statistics + at, tl.where(highest == NEGATIVE_INFINITY, 0.0, highest), query < S)
    tl.store(statistics + tl.cast(N, KIND) * H * S + at, inverse, query < S)
    here = (query < S)[:, None] & (column < D)[None, :]
    place = Y + n * y_batch + h * y_head + query[:, None] * y_row + column[None, :]
    tl.store(place, to_type(y * inverse[:, None], Y.dtype.element_ty), here)


@triton.jit
def _whole_tiles(block, S, T, IS_CAUSAL: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr):
    """How many keys lie in tiles that a block of queries sees whole."""
    keys = tl.minimum(T, block * BLOCK + 1) if IS_CAUSAL else T
    return tl.where((block + 1) * BLOCK <= S, keys // STEP * STEP, 0)


@triton.jit
def _add_keys(
    start, highest, total, y, q, K, V, keys, step, mask, at, by_query, by_key, query, column, factor, S, T,
    D: tl.constexpr, MASK: tl.constexpr, BY_QUERY: tl.constexpr, IS_CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
    KIND: tl.constexpr, STEP: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    key = (start + tl.arange(0, STEP)).to(KIND)
    k = _rows(K, keys, key, T, step, column, D)
    v = _rows(V, keys, key, T, step, column, D)
    s = _scores(
        _dot(q, tl.trans(k), PRECISION) * factor, mask, at, by_query, by_key, query[:, None], key[None, :], S, T,
        MASK, BY_QUERY, IS_CAUSAL, WHOLE,
    )  # fmt: skip
    higher = tl.maximum(highest, tl.max(s, 1))
    level = tl.where(higher == NEGATIVE_INFINITY, 0.0, higher)
    e = tl.exp(s - level[:, None])
    change = tl.exp(highest - level)
    total = total * change + tl.sum(e, 1)
    y = y * change[:, None] + _dot(to_type(e, K.dtype.element_ty), v, PRECISION)
    return higher, total, y


@triton.jit
def _of_queries(
    dY, Q, K, V, mask, by_batch, by_head, by_query, by_key, Y, statistics, inner, dQ, N, S, T, H, share, scale,
    q_batch, q_row, q_head, k_batch, k_row, k_head, y_batch, y_row, y_head,
    D: tl.constexpr, WIDTH: tl.constexpr, MASK: tl.constexpr, BY_QUERY: tl.constexpr, IS_CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """dQ of a block of queries, and their sums of dY · Y."""
    block, n, h = _of_block(tl.program_id(0), tl.cdiv(S, BLOCK), H, KIND)
    factor = float_of(scale, tl.float32)
    query = (block * BLOCK + tl.arange(0, BLOCK)).to(KIND)
    column = tl.arange(0, WIDTH).to(KIND)
    queries, results = n * q_batch + h * q_head, n * y_batch + h * y_head
    q = _rows(Q, queries, query, S, q_row, column, D)
    g = _rows(dY, results, query, S, y_row, column, D)
    y = _rows(Y, results, query, S, y_row, column, D)
    within = tl.sum(g.to(tl.float32) * y.to(tl.float32), 1)
    at = (n * H + h) * S + query
    tl.store(inner + at, within, query < S)
    highest = tl.load(statistics + at, query < S, other=0.0)
    inverse = tl.load(statistics + tl.cast(N, KIND) * H * S + at, query < S, other=0.0)
    total = tl.zeros([BLOCK, WIDTH], tl.float32)
    end = tl.minimum(T, (block + 1) * BLOCK) if IS_CAUSAL else T
    whole = _whole_tiles(block, S, T, IS_CAUSAL, BLOCK, STEP)
    shared = (
        q, g, within, highest, inverse, K, V, n * k_batch + h // share * k_head, k_row, mask,
        n * by_batch + h * by_head, by_query, by_key, query, column, factor, S, T,
    )  # fmt: skip
    for start in range(0, whole, STEP):
        total = _add_to_queries(
            start, total, *shared, D, MASK, BY_QUERY, IS_CAUSAL, PRECISION, KIND, STEP, True
        )  # fmt: skip
    for start in range(whole, end, STEP):
        total = _add_to_queries(
            start, total, *shared, D, MASK, BY_QUERY, IS_CAUSAL, PRECISION, KIND, STEP, False
        )  # fmt: skip
    here = (query < S)[:, None] & (column < D)[None, :]
    place = dQ + queries + query[:, None] * q_row + column[None, :]
    tl.store(place, to_type(total * factor, dQ.dtype.element_ty), here)


@triton.jit
def _add_to_queries(
    start, total, q, g, within, highest, inverse, K, V, keys, step, mask, at, by_query, by_key, query, column, factor,
    S, T,
    D: tl.constexpr, MASK: tl.constexpr, BY_QUERY: tl.constexpr, IS_CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
    KIND: tl.constexpr, STEP: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    key = (start + tl.arange(0, STEP)).to(KIND)
    k = _rows(K, keys, key, T, step, column, D)
    v = _rows(V, keys, key, T, step, column, D)
    s = _scores(
        _dot(q, tl.trans(k), PRECISION) * factor, mask, at, by_query, by_key, query[:, None], key[None, :], S, T,
        MASK, BY_QUERY, IS_CAUSAL, WHOLE,
    )  # fmt: skip
    p = tl.exp(s - highest[:, None]) * inverse[:, None]
    ds = p * (_dot(g, tl.trans(v), PRECISION) - within[:, None])
    return total + _dot(to_type(ds, K.dtype.element_ty), k, PRECISION)


@triton.jit
def _of_keys(
    dY, Q, K, V, mask, by_batch, by_head, by_query, by_key, statistics, inner, dK, dV, N, S, T, H, share, scale,
    q_batch, q_row, q_head, k_batch, k_row, k_head, y_batch, y_row, y_head,
    D: tl.constexpr, WIDTH: tl.constexpr, MASK: tl.constexpr, BY_QUERY: tl.constexpr, IS_CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """dK and dV of a block of keys: scores stand transposed, a row for each key."""
    blocks = tl.cdiv(T, BLOCK)
    groups = H // share
    block = tl.program_id(0) % blocks
    n = (tl.program_id(0) // blocks // groups).to(KIND)
    group = (tl.program_id(0) // blocks % groups).to(KIND)
    factor = float_of(scale, tl.float32)
    key = (block * BLOCK + tl.arange(0, BLOCK)).to(KIND)
    column = tl.arange(0, WIDTH).to(KIND)
    keys = n * k_batch + group * k_head
    k = _rows(K, keys, key, T, k_row, column, D)
    v = _rows(V, keys, key, T, k_row, column, D)
    of_k = tl.zeros([BLOCK, WIDTH], tl.float32)
    of_v = tl.zeros([BLOCK, WIDTH], tl.float32)
    first = block * BLOCK // STEP * STEP if IS_CAUSAL else 0
    for h in range(share):
        head = group * share + h
        queries, results, at = n * q_batch + head * q_head, n * y_batch + head * y_head, (n * H + head) * S
        for start in range(first, S, STEP):
            query = (start + tl.arange(0, STEP)).to(KIND)
            q = _rows(Q, queries, query, S, q_row, column, D)
            g = _rows(dY, results, query, S, y_row, column, D)
            highest = tl.load(statistics + at + query, query < S, other=0.0)
            inverse = tl.load(statistics + tl.cast(N, KIND) * H * S + at + query, query < S, other=0.0)
            within = tl.load(inner + at + query, query < S, other=0.0)
            s = _scores(
                _dot(k, tl.trans(q), PRECISION) * factor, mask, n * by_batch + head * by_head, by_query, by_key,
                query[None, :], key[:, None], S, T, MASK, BY_QUERY, IS_CAUSAL, False,
            )  # fmt: skip
            p = tl.exp(s - highest[None, :]) * inverse[None, :]
            of_v += _dot(to_type(p, Q.dtype.element_ty), g, PRECISION)
            ds = p * (_dot(v, tl.trans(g), PRECISION) - within[None, :])
            of_k += _dot(to_type(ds, Q.dtype.element_ty), q, PRECISION)
    here = (key < T)[:, None] & (column < D)[None, :]
    place = keys + key[:, None] * k_row + column[None, :]
    tl.store(dK + place, to_type(of_k * factor, dK.dtype.element_ty), here)
    tl.store(dV + place, to_type(of_v, dV.dtype.element_ty), here)
