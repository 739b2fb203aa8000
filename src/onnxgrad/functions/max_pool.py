"""MaxPoolGrad as an ONNX function."""

from collections.abc import Callable
from typing import Any

from onnxgrad.functions.body import Body, Value
from onnxgrad.functions.windows import shape_of
from onnxgrad.ops.families.windows import PoolSettings, pool_settings


def max_pool_grad(
    o: Body, dY: Value, X: Value, auto_pad: str, ceil_mode: int, dilations: Any, kernel_shape: Any, pads: Any,
    strides: Any,
) -> list[Value]:  # fmt: skip
    given = pool_settings(auto_pad, ceil_mode, dilations, kernel_shape, pads, strides)

    def compute(work: Callable[[Value], Value]) -> list[Value]:
        image, g = o.Reshape(work(X), shape_of(o, o.Shape(X), given), allowzero=1), work(dY)
        _, indices = o.nodes("MaxPool", 2, image, **attributes_of(given))
        zeros = o.fill(0, o.Reshape(o.Size(image), [1]), g)
        dX = o.ScatterElements(zeros, o.Reshape(indices, [-1]), o.Reshape(g, [-1]), axis=0, reduction="add")
        return [o.Reshape(dX, o.Shape(X), allowzero=1)]

    return o.in_work_type(dY, compute)


def attributes_of(given: PoolSettings) -> dict[str, Any]:
    """Those of MaxPool."""
    how: dict[str, Any] = {"kernel_shape": given.kernel, "strides": given.strides, "ceil_mode": int(given.ceil_mode)}
    how |= {"pads": given.pads} if given.auto_pad == "NOTSET" else {"auto_pad": given.auto_pad}
    return how | ({"dilations": given.dilations} if max(given.dilations) > 1 else {})
