"""FlashAttention and FlashAttentionGrad as ONNX functions, with the matrix of scores."""

from onnx import TensorProto

from onnxgrad.functions.body import Body, Value

LOWEST = float("-inf")


class _Heads:
    """What both share: matrices for each head of K, with the queries of all heads of Q that share it as rows."""

    def __init__(self, o: Body, Q: Value, K: Value, scale: float, is_causal: int) -> None:
        self.o, self.scale, self.is_causal = o, scale, is_causal
        self.q_shape, self.k_shape = o.Shape(Q), o.Shape(K)
        N, S, H, D = (o.slice(self.q_shape, k, k + 1) for k in range(4))
        T, groups = o.slice(self.k_shape, 1, 2), o.slice(self.k_shape, 2, 3)
        share = H / groups
        self.S, self.T = S, T
        self.by_heads, self.rows = o.dims(N, H, S, D), o.dims(N, groups, share * S, D)
        self.scores_by_heads, self.scores_by_rows = o.dims(N, H, S, T), o.dims(N, groups, share * S, T)
        self.statistic = o.dims(N, groups, share * S, 1)
        self.q, self.k = self.to_rows(Q), self.of_keys(K)

    def to_rows(self, x: Value) -> Value:
        """Of what has the shape of Q."""
        return self.o.Reshape(
            self.o.Transpose(self.o.Cast(x, to=TensorProto.FLOAT), perm=[0, 2, 1, 3]), self.rows, allowzero=1
        )

    def from_rows(self, x: Value) -> Value:
        """Back to the shape of Q."""
        return self.o.Transpose(self.o.Reshape(x, self.by_heads, allowzero=1), perm=[0, 2, 1, 3])

    def of_keys(self, x: Value) -> Value:
        """Of what has the shape of K."""
        return self.o.Transpose(self.o.Cast(x, to=TensorProto.FLOAT), perm=[0, 2, 1, 3])

    def transposed(self, x: Value) -> Value:
        return self.o.Transpose(x, perm=[0, 1, 3, 2])

    def scores(self, mask: Value | None) -> Value:
        o = self.o
        found = o.MatMul(self.q, self.transposed(self.k)) * self.scale
        if mask is None and not self.is_causal:
            return found
        found = o.Reshape(found, self.scores_by_heads, allowzero=1)
        if mask is not None:
            found = found + self._added(mask)
        if self.is_causal:
            zero, one = (o.node("Constant", value_int=number) for number in (0, 1))
            queries, keys = (o.Range(zero, o.Squeeze(n, [0]), one) for n in (self.S, self.T))
            hidden = o.Unsqueeze(queries, [1]) < keys
            found = o.Where(hidden, o.like(LOWEST, found), found)
        return o.Reshape(found, self.scores_by_rows, allowzero=1)

    def _added(self, mask: Value) -> Value:
        """What a mask adds to scores: truth values are known by having no 2."""
        o = self.o
        is_truth = o.Cast(o.like(2, mask), to=TensorProto.FLOAT).equals(1)
        number = o.Cast(mask, to=TensorProto.FLOAT)
        as_number = o.Where(o.Cast(mask, to=TensorProto.BOOL), o.like(0, number), o.like(LOWEST, number))
        return o.Where(is_truth, as_number, number)


def flash_attention(
    o: Body, Q: Value, K: Value, V: Value, mask: Value | None, scale: float, is_causal: int
) -> list[Value]:
    expect_agreement("FlashAttention", mask)
    heads = _Heads(o, Q, K, scale, is_causal)
    scores = heads.scores(mask)
    highest = o.ReduceMax(scores, [-1], keepdims=1)
    highest = o.Where(highest.equals(LOWEST), o.like(0, highest), highest)
    e = o.Exp(scores - highest)
    total = o.ReduceSum(e, [-1], keepdims=1)
    inverse = o.Where(total.equals(0), total, o.Reciprocal(total))
    Y = heads.from_rows(o.MatMul(e, heads.of_keys(V)) * inverse)
    shape = o.dims(1, o.slice(heads.by_heads, 0, 3))
    statistics = o.Concat(*(o.Reshape(x, shape, allowzero=1) for x in (highest, inverse)), axis=0)
    return [o.CastLike(Y, Q), statistics]


def flash_attention_grad(
    o: Body,
    dY: Value,
    Q: Value,
    K: Value,
    V: Value,
    mask: Value | None,
    Y: Value,
    statistics: Value,
    scale: float,
    is_causal: int,
) -> list[Value]:
    expect_agreement("FlashAttentionGrad", mask)
    heads = _Heads(o, Q, K, scale, is_causal)
    highest, inverse = (o.Reshape(o.slice(statistics, k, k + 1), heads.statistic, allowzero=1) for k in range(2))
    P = o.Exp(heads.scores(mask) - highest) * inverse
    g = heads.to_rows(dY)
    dP = o.MatMul(g, heads.transposed(heads.of_keys(V)))
    dS = P * (dP - o.ReduceSum(g * heads.to_rows(Y), [-1], keepdims=1)) * scale
    dK, dV = (o.MatMul(heads.transposed(left), right) for left, right in ((dS, heads.q), (P, g)))
    results = heads.from_rows(o.MatMul(dS, heads.k)), heads.of_keys(dK), heads.of_keys(dV)
    return [o.CastLike(result, Q) for result in results]


def expect_agreement(name: str, mask: Value | None) -> None:
    """Raises if only some of the nodes that share the function have a mask."""
    if mask is not None and mask.guarded:
        raise ValueError(
            f"{name}: some nodes of the model have a mask, others have not; as a function it needs all of them to "
            "agree: give each node one"
        )
