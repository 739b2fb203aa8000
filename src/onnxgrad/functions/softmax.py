"""SoftmaxGrad_13 and LogSoftmaxGrad_13 as ONNX functions."""

from collections.abc import Callable

from onnxgrad.functions.body import Body, Value


def softmax_grad_13(o: Body, dY: Value, Y: Value, axis: int) -> list[Value]:
    def compute(work: Callable[[Value], Value]) -> list[Value]:
        y = work(Y)
        part = work(dY) * y
        return [part - y * o.ReduceSum(part, [axis], keepdims=1)]

    return o.in_work_type(dY, compute)


def log_softmax_grad_13(o: Body, dY: Value, Y: Value, axis: int) -> list[Value]:
    def compute(work: Callable[[Value], Value]) -> list[Value]:
        g = work(dY)
        return [g - o.Exp(work(Y)) * o.ReduceSum(g, [axis], keepdims=1)]

    return o.in_work_type(dY, compute)
