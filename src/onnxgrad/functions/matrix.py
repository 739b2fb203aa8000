"""PermutedMatMul as ONNX functions."""

from collections.abc import Callable, Sequence

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
) -> list[Value]:
    def transposed(x: Value, perm: Sequence[int] | None) -> Value:
        return x if not perm else o.Transpose(x, perm=list(perm))

    def compute(work: Callable[[Value], Value]) -> list[Value]:
        product = o.MatMul(transposed(work(A), permA), transposed(work(B), permB))
        if alpha != 1:
            product = product * alpha
        return [transposed(product if bias is None else product + work(bias), permY)]

    return o.in_work_type(A, compute)
