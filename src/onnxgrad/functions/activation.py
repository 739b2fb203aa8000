"""ReluGrad, LeakyReluGrad, SigmoidGrad and TanhGrad as ONNX functions."""

from collections.abc import Callable

from onnxgrad.functions.body import Body, Value


def relu_grad(o: Body, dY: Value, X: Value) -> list[Value]:
    return [o.Where(X > 0, dY, o.like(0, dY))]


def leaky_relu_grad(o: Body, dY: Value, Y: Value, alpha: float) -> list[Value]:
    (small,) = o.in_work_type(dY, lambda work: [work(dY) * alpha])
    return [o.Where(Y > 0, dY, small)]


def sigmoid_grad(o: Body, dY: Value, Y: Value) -> list[Value]:
    def compute(work: Callable[[Value], Value]) -> list[Value]:
        y = work(Y)
        return [work(dY) * y * (1 - y)]

    return o.in_work_type(dY, compute)


def tanh_grad(o: Body, dY: Value, Y: Value) -> list[Value]:
    def compute(work: Callable[[Value], Value]) -> list[Value]:
        y = work(Y)
        return [work(dY) * (1 - y * y)]

    return o.in_work_type(dY, compute)
