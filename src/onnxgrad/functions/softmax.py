"""SoftmaxGrad_13 and LogSoftmaxGrad_13 as ONNX functions."""

from collections.abc import Callable

from onnxgrad.functions.body import Body, Value


def softmax_grad_13(o: Body, dY: Value, Y: Value, axis: int) -> list[Value]:
    def compute(work: Callable[[Value], Value]) -> list[Value]:
        y = work(Y)
        part = work(dY) * y
        return [part - y * _sum(o, part, axis)]

    return o.in_work_type(dY, compute)


def log_softmax_grad_13(o: Body, dY: Value, Y: Value, axis: int) -> list[Value]:
    def compute(work: Callable[[Value], Value]) -> list[Value]:
        g = work(dY)
        return [g - o.Exp(work(Y)) * _sum(o, g, axis)]

    return o.in_work_type(dY, compute)


def _sum(o: Body, x: Value, axis: int) -> Value:
    """The sum along an axis, which stays.

    Nodes of one model share a function, whose branch for any axis has to be valid for a vector, too.
    """
    if axis in (-1, 0):
        return o.ReduceSum(x, [axis], keepdims=1)
    shape = o.Shape(x)
    after = o.slice(shape, axis + 1)
    grid = o.dims(
        *(o.ReduceProd(part, [0], keepdims=1) for part in (o.slice(shape, 0, axis), _at(o, shape, axis), after))
    )
    total = o.ReduceSum(o.Reshape(x, grid, allowzero=1), [1], keepdims=1)
    return o.Reshape(total, o.dims(o.slice(shape, 0, axis), 1, after), allowzero=1)


def _at(o: Body, shape: Value, axis: int) -> Value:
    return o.slice(shape, axis, axis + 1)
