"""BiasGrad as an ONNX function."""

from collections.abc import Callable

from onnxgrad.functions.body import Body, Value


def bias_grad(o: Body, dY: Value) -> list[Value]:
    """Of a vector there is nothing to add up."""

    def compute(work: Callable[[Value], Value]) -> list[Value]:
        last = o.Size(o.Shape(dY)) - 1
        axes = o.Range(o.like(0, last), last, o.like(1, last))
        return [o.ReduceSum(work(dY), axes, keepdims=0, noop_with_empty_axes=1)]

    return o.in_work_type(dY, compute)
