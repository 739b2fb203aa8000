"""FlashAttention and FlashAttentionGrad: attention whose matrix of scores is never held whole."""

from typing import Annotated, NamedTuple

import numpy as np

from onnxgrad.op import op
from onnxgrad.schema import OWN, Dim, Known, agree
from onnxgrad.tensor_types import Array, TypeConstraint, accumulator

T = Annotated[Array, TypeConstraint("T", ("float16", "float", "bfloat16"))]
Mask = Annotated[Array, TypeConstraint("M", ("float", "bool"))]
Statistic = Annotated[Array, TypeConstraint("U", ("float",))]


class Sizes(NamedTuple):
    """Of one call: batches, queries, heads, keys, heads of the keys, and numbers in a head of Q and of V."""

    N: Dim
    S: Dim
    H: Dim
    T: Dim
    groups: Dim
    D: Dim


def sizes_of(Q: Known, K: Known, V: Known, mask: Known | None) -> Sizes | None:
    """Of inputs that fit together; raises if they do not."""
    for name, given in (("Q", Q), ("K", K), ("V", V)):
        if given.dims is not None and len(given.dims) != 4:
            raise ValueError(f"{name} has shape {list(given.dims)}, expected [batch, length, heads, numbers]")
    if K.dims is not None and V.dims is not None and not agree(V.dims, K.dims):
        raise ValueError(f"V has shape {list(V.dims)}, expected {list(K.dims)} as K has")
    keys = V.dims if K.dims is None else K.dims
    if Q.dims is None:
        return None
    N, S, H, D = Q.dims
    T, groups = (None, None) if keys is None else keys[1:3]
    if keys is not None and not agree((keys[0], keys[3]), (N, D)):
        raise ValueError(f"K has shape {list(keys)}, expected [{N}, length, heads, {D}] for Q of shape {list(Q.dims)}")
    if isinstance(H, int) and isinstance(groups, int) and (groups == 0 or H % groups):
        raise ValueError(f"Q has {H} heads and K has {groups}, expected a multiple")
    if mask is not None and mask.dims is not None:
        whole = (N, H, S, T)
        fits = len(mask.dims) <= 4 and all(
            m == 1 or agree((m,), (d,)) for m, d in zip(mask.dims[::-1], whole[::-1], strict=False)
        )
        if not fits:
            raise ValueError(f"mask has shape {list(mask.dims)}, which does not broadcast to {list(whole)}")
    return Sizes(N, S, H, T, groups, D)


def _shapes(
    Q: Known, K: Known, V: Known, mask: Known | None, scale: float, is_causal: int
) -> tuple[tuple[Dim, ...] | None, tuple[Dim, ...] | None]:
    sizes = sizes_of(Q, K, V, mask)
    return Q.dims, None if sizes is None else (2, sizes.N, sizes.H, sizes.S)


def _grad_shapes(
    dY: Known,
    Q: Known,
    K: Known,
    V: Known,
    mask: Known | None,
    Y: Known,
    statistics: Known,
    scale: float,
    is_causal: int,
) -> tuple[tuple[Dim, ...] | None, ...]:
    sizes = sizes_of(Q, K, V, mask)
    for name, given in (("dY", dY), ("Y", Y)):
        if given.dims is not None and Q.dims is not None and not agree(given.dims, Q.dims):
            raise ValueError(f"{name} has shape {list(given.dims)}, expected {list(Q.dims)} as Q has")
    if sizes is not None and statistics.dims is not None:
        expected = (2, sizes.N, sizes.H, sizes.S)
        if not agree(statistics.dims, expected):
            raise ValueError(f"statistics has shape {list(statistics.dims)}, expected {list(expected)}")
    return Q.dims, K.dims, V.dims


def _scores(Q: Array, K: Array, mask: Array | None, scale: float, is_causal: int) -> Array:
    """[N, H, S, T]."""
    work = accumulator(Q.dtype)
    q, k = _by_heads(Q), _repeated(K, Q.shape[2])
    scores = q @ k.swapaxes(2, 3) * work.type(scale)
    if mask is not None:
        scores = np.where(mask, scores, -np.inf) if mask.dtype == bool else scores + mask.astype(work)
    if is_causal:
        scores = np.where(np.tri(Q.shape[1], K.shape[1], dtype=bool), scores, -np.inf)
    found: Array = scores.astype(work)
    return found


def _by_heads(x: Array) -> Array:
    return x.astype(accumulator(x.dtype)).swapaxes(1, 2)


def _repeated(x: Array, heads: int) -> Array:
    """By heads, as many as Q has."""
    return np.repeat(_by_heads(x), heads // x.shape[2], 1)


def _back(x: Array, heads: int, dtype: np.dtype[np.generic]) -> Array:
    """Undoes `_repeated`: what belongs to heads of K is added up."""
    N, H, T, D = x.shape
    total: Array = x.reshape(N, heads, H // heads, T, D).sum(2)
    return total.swapaxes(1, 2).astype(dtype)


@op("FlashAttention", domain=OWN, outputs=("Y", "statistics?"), shape=_shapes)
def flash_attention(
    Q: T, K: T, V: T, mask: Mask | None = None, *, scale: float = 1.0, is_causal: int = 0
) -> tuple[T, Statistic]:
    """Y = softmax(scale · Q · Kᵀ + mask) · V for each head, without holding the matrix of scores.

    Q is [batch, queries, heads, numbers], Y too; K and V are [batch, keys, heads, numbers], with as many heads as Q or
    a divisor of that: then consecutive heads of Q share one. `mask` broadcasts to [batch, heads, queries, keys]:
    numbers are added, false means -∞. With `is_causal`, queries see no keys after their own position. A query that
    sees no key at all gets zeros.

    `statistics` is what the gradient needs, [2, batch, heads, queries]: the highest score of each query, and 1 over
    the sum of exp(score - highest); both are 0 if it sees no key. The logarithm of the sum would be one number for
    both, but loses the sum beside a mask of the lowest float32 number. Half types are multiplied as they are on a GPU,
    with sums in float32; on the CPU all of it is computed in float32 and rounded once.
    """
    work = accumulator(Q.dtype)
    scores = _scores(Q, K, mask, scale, is_causal)
    highest = np.max(scores, 3, initial=-np.inf)
    highest = np.where(highest == -np.inf, work.type(0), highest)
    with np.errstate(invalid="ignore"):
        e = np.exp(scores - highest[..., None])
    total = e.sum(3)
    inverse = np.where(total == 0, work.type(0), 1 / np.where(total == 0, work.type(1), total))
    Y = (e @ _repeated(V, Q.shape[2]) * inverse[..., None]).swapaxes(1, 2).astype(Q.dtype)
    return np.ascontiguousarray(Y), np.stack([highest, inverse]).astype(work)


@op("FlashAttentionGrad", domain=OWN, outputs=("dQ", "dK", "dV"), shape=_grad_shapes)
def flash_attention_grad(
    dY: T,
    Q: T,
    K: T,
    V: T,
    mask: Mask | None,
    Y: T,
    statistics: Statistic,
    *,
    scale: float = 1.0,
    is_causal: int = 0,
) -> tuple[T, T, T]:
    """Gradient of FlashAttention in Q, K and V, given its outputs Y and statistics; scores are computed once more.

    With P = exp(scores - highest) / sum, dP = dY · Vᵀ and dS = P · (dP - sum of dY · Y over a head's numbers):
    dQ = scale · dS · K, dK = scale · dSᵀ · Q and dV = Pᵀ · dY. Half types are computed as FlashAttention does.
    """
    work, heads = accumulator(Q.dtype), K.shape[2]
    factor = work.type(scale)
    highest, inverse = (s[..., None].astype(work) for s in statistics)
    with np.errstate(invalid="ignore", over="ignore"):
        P = np.exp(_scores(Q, K, mask, scale, is_causal) - highest) * inverse
    q, g = _by_heads(Q), _by_heads(dY)
    dP = g @ _repeated(V, Q.shape[2]).swapaxes(2, 3)
    dS = P * (dP - (g * _by_heads(Y)).sum(3, keepdims=True))
    dQ = (dS @ _repeated(K, Q.shape[2]) * factor).swapaxes(1, 2).astype(Q.dtype)
    dK = _back(dS.swapaxes(2, 3) @ q * factor, heads, K.dtype)
    dV = _back(P.swapaxes(2, 3) @ g, heads, V.dtype)
    return np.ascontiguousarray(dQ), np.ascontiguousarray(dK), np.ascontiguousarray(dV)
