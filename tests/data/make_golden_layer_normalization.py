"""Runs onnxruntime-training 1.19.2 on small cases of LayerNormalizationGrad and of its sister without a mean."""

from collections.abc import Iterator
from typing import Any

import make_golden
import numpy as np
from make_golden import Case, floats, write

LAYER, SIMPLIFIED = "LayerNormalizationGrad", "SimplifiedLayerNormalizationGrad"
make_golden.OUTPUTS |= {LAYER: ("X_grad", "scale_grad", "bias_grad"), SIMPLIFIED: ("X_grad", "scale_grad")}


def layer_cases(centred: bool) -> Iterator[Case]:
    def case(
        name: str, shape: Any = (3, 4), axis: int | None = -1, dtype: Any = np.float32, statistic: Any = np.float32,
        replace: Any = None, invalid: Any = None,
    ) -> Case:  # fmt: skip
        first = (-1 if axis is None else axis) % len(shape)
        over = tuple(range(first, len(shape)))
        Y_grad, X = (floats(f"{name} {n}", *shape, dtype=dtype) for n in ("Y_grad", "X"))
        x = X.astype(np.float64)
        mean = x.mean(over, keepdims=True)
        inv = 1 / np.sqrt(np.mean((x - mean * centred) ** 2, over, keepdims=True) + 0.01)
        inputs = {"Y_grad": Y_grad, "X": X, "scale": floats(f"{name} scale", *shape[first:], dtype=dtype)}
        inputs |= {"mean": mean.astype(statistic)} if centred else {}
        inputs |= {"inv_std_var": inv.astype(statistic)}
        return Case(name, inputs | (replace or {}), {} if axis is None else {"axis": axis}, invalid=invalid)

    shapes = ((3, 4), -1), ((3, 4), 0), ((2, 3, 4), 1), ((2, 3, 4), -2), ((5, 1, 7), 2), ((70, 33), 1), ((6,), 0)
    for shape, axis in shapes:  # in float32: the peer computes float64 no better
        yield case(f"{shape} axis {axis}", shape, axis)
    yield case("no axis given", axis=None)
    yield case("rows of one", (3, 1))
    yield case("no rows", (0, 4))
    yield case("float16", dtype=np.float16)
    yield case("statistics of float64", dtype=np.float64, statistic=np.float64)
    wrong = case("axis 2 of 2", shape=(4, 3), invalid="the axis is out of range")
    yield Case(wrong.name, wrong.inputs, {"axis": 2}, invalid=wrong.invalid)
    transposed = {"Y_grad": floats("transposed", 4, 3)}
    yield case("Y_grad transposed", replace=transposed, invalid="Y_grad does not have the shape of X")


if __name__ == "__main__":
    for operator, centred in ((LAYER, True), (SIMPLIFIED, False)):
        done, cannot, differs = write(operator, layer_cases(centred))
        print(operator, done, "cases; could not run:", cannot, "breaks the contract:", differs)
