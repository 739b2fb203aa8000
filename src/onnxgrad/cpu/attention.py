"""FlashAttention and FlashAttentionGrad on the CPU: strips of scores that stay in the cache, products by microkernels.

A task packs the keys and values of a head once and goes along the queries, some rows at a time: their scores with all
keys are one strip. Of the gradient a task has all heads of Q that share one of K, so that each dK and dV is one sum in
one order. Half types widen to float32.
"""

from typing import Any, NamedTuple

import numpy as np

from onnxgrad.cpu.core.convert import narrow, widen, working_copy
from onnxgrad.cpu.core.halves import flat, load, store, zero
from onnxgrad.cpu.core.jit import inlined, native
from onnxgrad.cpu.core.matmul.microkernel import (
    ROWS,
    Matrix,
    Panels,
    aligned,
    gemm_address,
    multiply,
    pack,
    packed_matrix,
)
from onnxgrad.cpu.core.parallel import parallel
from onnxgrad.cpu.core.recurrent.activations import exp
from onnxgrad.cpu.core.reductions import add_in_any_order
from onnxgrad.cpu.core.threads import launch
from onnxgrad.tensor_types import Array

STRIP = 1 << 15  # scores of a strip: 128 kB, so that two and what is packed of them fit the second-level cache
MOST_ROWS = 64  # of a strip
QUERIES = 512  # of one task of the forward pass, at most
LANES = 16  # of the running maximum, so that it goes through the machine's vectors
LOWEST = np.float32(-np.inf)
NOTHING_LEFT = np.float32(-86.6)  # exp of less is 0


class Sizes(NamedTuple):
    """Of one call: batches, queries, heads, keys, heads of the keys, numbers in a head, rows of a strip."""

    N: int
    S: int
    H: int
    T: int
    groups: int
    D: int
    rows: int


class Mask(NamedTuple):
    """Numbers to add or truth values, one of them empty, and the steps from batch to batch, by head, query and key."""

    numbers: Any
    truth: Any
    steps: Any


def flash_attention(
    Q: Array,
    K: Array,
    V: Array,
    mask: Array | None,
    Y: Array,
    statistics: Array,
    scale: float,
    is_causal: int,
) -> None:
    if statistics.size == 0:
        return
    result, inputs = working_copy(Y, Q.dtype), tuple(widen(x) for x in (Q, K, V))
    settings = (*_mask(mask, Q, K), _sizes(Q, K), np.float32(scale), bool(is_causal))
    work = Q.size * K.shape[1] // 8  # counted as bytes that many threads might go over
    launch(_forward, *inputs, *settings, result, flat(statistics), gemm_address(result.dtype), bytes_touched=work)
    narrow(result, Y)


def flash_attention_grad(
    dY: Array,
    Q: Array,
    K: Array,
    V: Array,
    mask: Array | None,
    Y: Array,
    statistics: Array,
    dQ: Array,
    dK: Array,
    dV: Array,
    scale: float,
    is_causal: int,
) -> None:
    inputs = tuple(widen(x) for x in (dY, Q, K, V))
    results = tuple(working_copy(x, Q.dtype) for x in (dQ, dK, dV))
    settings = (*_mask(mask, Q, K), _sizes(Q, K), np.float32(scale), bool(is_causal))
    work = Q.size * K.shape[1] // 4
    gemm = gemm_address(np.dtype(np.float32))
    launch(_backward, *inputs, widen(Y), flat(statistics), *settings, results, gemm, bytes_touched=work)
    for result, given in zip(results, (dQ, dK, dV), strict=True):
        narrow(result, given)


def _sizes(Q: Array, K: Array) -> tuple[int, ...]:
    rows = max(ROWS, min(MOST_ROWS, STRIP // max(1, K.shape[1])) // ROWS * ROWS)
    return *Q.shape[:3], *K.shape[1:], rows


def _mask(mask: Array | None, Q: Array, K: Array) -> tuple[Array, Array, tuple[int, ...]]:
    numbers, truth = np.empty(0, np.float32), np.empty(0, np.uint8)
    if mask is None:
        return numbers, truth, (0, 0, 0, 0)
    steps, step = [], 1
    for size in (mask.shape[::-1] + (1,) * 4)[:4]:
        steps.append(0 if size == 1 else step)
        step *= size
    if mask.dtype == np.bool_:
        return numbers, flat(mask).view(np.uint8), tuple(steps[::-1])
    return flat(mask), truth, tuple(steps[::-1])


@native
def _forward(
    Q: Array,
    K: Array,
    V: Array,
    numbers: Array,
    truth: Array,
    steps: Any,
    sizes: Any,
    scale: float,
    is_causal: bool,
    Y: Array,
    statistics: Array,
    gemm: int,
    scheduler: int,
) -> None:
    S = sizes[1]
    chunks = (S + QUERIES - 1) // QUERIES
    work = (Q, K, V, Mask(numbers, truth, steps), sizes, scale, is_causal, Y, statistics, gemm)
    parallel(scheduler, sizes[0] * sizes[2] * chunks, _forward_task, work)


@native
def _forward_task(
    number: int,
    Q: Array,
    K: Array,
    V: Array,
    mask: Mask,
    given: Any,
    scale: float,
    is_causal: bool,
    Y: Array,
    statistics: Array,
    gemm: int,
) -> None:
    """Some queries of one head."""
    sizes = Sizes(*given)
    S, H, T, D = sizes.S, sizes.H, sizes.T, sizes.D
    chunks = (S + QUERIES - 1) // QUERIES
    first, head = number % chunks * QUERIES, number // chunks
    n, h = head // H, head % H
    last = min(S, first + QUERIES)
    seen = min(T, last) if is_causal else T
    row_step, keys, queries = sizes.groups * D, _of_keys(sizes, n, h), n * S * H * D + h * D
    k = _packed(K, keys, 1, row_step, D, seen)
    v = _packed(V, keys, row_step, 1, seen, D)
    strip = np.empty(sizes.rows * T, np.float32)
    lanes = np.empty(LANES, np.float32)
    for start in range(first, last, sizes.rows):
        rows = min(sizes.rows, last - start)
        columns = min(T, start + rows) if is_causal else T
        q = Matrix(Q, queries + start * H * D, H * D)
        multiply(gemm, q, k, Matrix(strip, 0, T), (rows, D, columns), False)
        for i in range(rows):
            at, query = i * T, start + i
            _finish_scores(strip, at, columns, mask, sizes, n, h, query, scale, is_causal)
            highest = _highest(strip, at, columns, lanes)
            highest = np.float32(0) if highest == LOWEST else highest
            total = np.float32(0)
            for j in range(columns):
                e = _exp(load(strip, at + j) - highest)
                store(strip, at + j, e)
                total = add_in_any_order(total, e)
            inverse = np.float32(0) if total == 0 else np.float32(1) / total
            for j in range(columns):
                store(strip, at + j, load(strip, at + j) * inverse)
            store(statistics, head * S + query, highest)
            store(statistics, (sizes.N * H + head) * S + query, inverse)
        y = Matrix(Y, queries + start * H * D, H * D)
        multiply(gemm, Matrix(strip, 0, T), v, y, (rows, columns, D), False)


@native
def _backward(
    dY: Array,
    Q: Array,
    K: Array,
    V: Array,
    Y: Array,
    statistics: Array,
    numbers: Array,
    truth: Array,
    steps: Any,
    sizes: Any,
    scale: float,
    is_causal: bool,
    results: Any,
    gemm: int,
    scheduler: int,
) -> None:
    inputs = (dY, Q, K, V, Y, statistics)
    work = (inputs, Mask(numbers, truth, steps), sizes, scale, is_causal, results, gemm)
    parallel(scheduler, sizes[0] * sizes[4], _backward_task, work)


@native
def _backward_task(
    number: int, inputs: Any, mask: Mask, given: Any, scale: float, is_causal: bool, results: Any, gemm: int
) -> None:
    """All heads of Q that share one of K."""
    dY, Q, K, V, Y, statistics = inputs
    dQ, dK, dV = results
    sizes = Sizes(*given)
    S, H, T, D = sizes.S, sizes.H, sizes.T, sizes.D
    n, group, share = number // sizes.groups, number % sizes.groups, H // sizes.groups
    row_step, keys = sizes.groups * D, _of_keys(sizes, n, group * share)
    for j in range(T):
        zero(dK, keys + j * row_step, keys + j * row_step + D)
        zero(dV, keys + j * row_step, keys + j * row_step + D)
    to_scores, to_dP = _packed(K, keys, 1, row_step, D, T), _packed(V, keys, 1, row_step, D, T)
    to_dQ = _packed(K, keys, row_step, 1, T, D)
    P, dS = np.empty(sizes.rows * T, np.float32), np.empty(sizes.rows * T, np.float32)
    room = (T + ROWS - 1) // ROWS * ROWS * sizes.rows + ROWS
    left = np.empty(room, np.float32)
    for h in range(group * share, (group + 1) * share):
        queries = n * S * H * D + h * D
        for start in range(0, S, sizes.rows):
            rows = min(sizes.rows, S - start)
            columns = min(T, start + rows) if is_causal else T
            here = queries + start * H * D
            multiply(gemm, Matrix(Q, here, H * D), to_scores, Matrix(P, 0, T), (rows, D, columns), False)
            multiply(gemm, Matrix(dY, here, H * D), to_dP, Matrix(dS, 0, T), (rows, D, columns), False)
            for i in range(rows):
                at, query = i * T, start + i
                _finish_scores(P, at, columns, mask, sizes, n, h, query, scale, is_causal)
                highest = load(statistics, (n * H + h) * S + query)
                inverse = load(statistics, ((sizes.N + n) * H + h) * S + query)
                inner = np.float32(0)
                for d in range(D):
                    inner = add_in_any_order(inner, load(dY, here + i * H * D + d) * load(Y, here + i * H * D + d))
                for j in range(columns):
                    p = _exp(load(P, at + j) - highest) * inverse
                    store(P, at + j, p)
                    store(dS, at + j, p * (load(dS, at + j) - inner) * scale)
            multiply(gemm, Matrix(dS, 0, T), to_dQ, Matrix(dQ, here, H * D), (rows, columns, D), False)
            begin = aligned(left)
            q, g = _packed(Q, here, H * D, 1, rows, D), _packed(dY, here, H * D, 1, rows, D)
            pack(dS, 0, T, 1, rows, columns, ROWS, left, begin)
            multiply(gemm, Matrix(left, begin, -1), q, Matrix(dK, keys, row_step), (columns, rows, D), True)
            pack(P, 0, T, 1, rows, columns, ROWS, left, begin)
            multiply(gemm, Matrix(left, begin, -1), g, Matrix(dV, keys, row_step), (columns, rows, D), True)


@inlined
def _of_keys(sizes: Sizes, n: int, h: int) -> int:
    """Where the first key is that a head of Q sees."""
    return n * sizes.T * sizes.groups * sizes.D + h // (sizes.H // sizes.groups) * sizes.D


@native
def _packed(source: Array, start: int, k_step: int, column_step: int, depth: int, columns: int) -> Panels:
    """The right side of a product."""
    packed = packed_matrix(source, start, k_step, column_step, depth, columns, 0)
    return Panels(packed, aligned(packed), depth)


@inlined
def _exp(x: Any) -> Any:
    return np.float32(0) if x < NOTHING_LEFT else exp(x)


@native
def _finish_scores(
    strip: Array,
    at: int,
    columns: int,
    mask: Mask,
    sizes: Sizes,
    n: int,
    h: int,
    query: int,
    scale: float,
    is_causal: bool,
) -> None:
    """Products of a query with keys become scores: times the scale, and masked."""
    by_batch, by_head, by_query, by_key = mask.steps
    place = n * by_batch + h * by_head + query * by_query
    for j in range(columns):
        store(strip, at + j, load(strip, at + j) * scale)
    if mask.numbers.size > 0:
        if by_key == 1:
            for j in range(columns):
                store(strip, at + j, load(strip, at + j) + load(mask.numbers, place + j))
        else:
            for j in range(columns):
                store(strip, at + j, load(strip, at + j) + load(mask.numbers, place + j * by_key))
    if mask.truth.size > 0:
        for j in range(columns):
            if load(mask.truth, place + j * by_key) == 0:
                store(strip, at + j, LOWEST)
    if is_causal:
        for j in range(query + 1, columns):
            store(strip, at + j, LOWEST)


@native
def _highest(strip: Array, at: int, columns: int, lanes: Array) -> Any:
    for k in range(LANES):
        store(lanes, k, LOWEST)
    whole = columns // LANES * LANES
    for i in range(0, whole, LANES):
        for k in range(LANES):
            x = load(strip, at + i + k)
            store(lanes, k, x if x > load(lanes, k) else load(lanes, k))
    found = LOWEST
    for k in range(LANES):
        found = max(found, load(lanes, k))
    for i in range(whole, columns):
        x = load(strip, at + i)
        found = x if x > found else found
    return found
