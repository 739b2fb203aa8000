"""PermutedMatMul as ONNX functions."""

from collections.abc import Callable, Sequence

from onnx import TensorProto

from onnxgrad.functions.body import Body, Value


def permuted_mat_mul(
    o: Body,
    A: Value,
    B: Value,
    bias: Value | None,
    alpha: float,
    permA: Sequence[int] | None,
    permB: Sequence[int] | None,
    permY: Sequence[int] | None,
    precision: str,
) -> list[Value]:
    def transposed(x: Value, perm: Sequence[int] | None) -> Value:
        return x if not perm else o.Transpose(x, perm=list(perm))

    def compute(work: Callable[[Value], Value]) -> list[Value]:
        a, b = transposed(work(A), permA), transposed(work(B), permB)
        if alpha != 1:
            a = a * alpha
        product = o.MatMul(*(in_precision(o, x, precision) for x in (a, b)))
        return [transposed(product if bias is None else product + work(bias), permY)]

    return o.in_work_type(A, compute)


def in_precision(o: Body, x: Value, precision: str) -> Value:
    """What is multiplied: with "bfloat16" rounded to that, except float64."""
    if precision != "bfloat16":
        return x
    narrow = o.CastLike(o.Cast(x, to=TensorProto.BFLOAT16), x)
    return o.Where(o.like(1 + 2**-40, x).equals(1), narrow, x)  # float64 keeps its digits
