"""GatherElementsGrad as an ONNX function."""

from collections.abc import Callable

from onnxgrad.functions.body import Body, Value


def gather_elements_grad(o: Body, dY: Value, shape: Value, indices: Value, axis: int) -> list[Value]:
    def add_up(work: Callable[[Value], Value]) -> list[Value]:
        elements = work(dY)
        return [o.ScatterElements(o.fill(0, shape, elements), indices, elements, axis=axis, reduction="add")]

    return o.in_work_type(dY, add_up)
