"""Runs onnxruntime-training 1.19.2 on gradients of activations and of Dropout and stores what it gives in golden/."""

from collections.abc import Iterator
from typing import Any

import make_golden
import numpy as np
from make_golden import FLOATS, Case, floats, write

FROM_RESULT = ("LeakyReluGrad", "SigmoidGrad", "TanhGrad")
WITH_BIAS = ("BiasGeluGrad_dX", "BiasFastGeluGrad_dX")
FROM_INPUT = ("ReluGrad", "GeluGrad", "FastGeluGrad", "QuickGeluGrad", *WITH_BIAS)
make_golden.OUTPUTS |= dict.fromkeys((*FROM_RESULT, *FROM_INPUT), ("dX",)) | {"DropoutGrad": ("dx",)}


def activation_cases(operator: str) -> Iterator[Case]:
    name = "Y" if operator in FROM_RESULT else "X"
    reach = 1 if operator in FROM_RESULT else 8  # what the forward operator may give, or be given

    def case(title: str, *shape: int, dtype: Any = np.float32, **attributes: Any) -> Case:
        inputs = {"dY": floats(title, *shape, dtype=dtype), name: floats(f"{title} x", *shape, dtype=dtype) * reach}
        if operator == "SigmoidGrad":
            inputs["Y"] = np.abs(inputs["Y"])
        if operator in WITH_BIAS:
            inputs["B"] = floats(f"{title} b", shape[-1], dtype=dtype)
        return Case(title, {n: a.astype(dtype) for n, a in inputs.items()}, attributes)

    for dtype in FLOATS:
        yield case(dtype, 3, 50, dtype=np.dtype(dtype))
    yield case("a vector", 7)
    yield case("rank 4", 2, 3, 4, 5)
    yield case("nothing", 0, 3)
    if operator in ("LeakyReluGrad", "QuickGeluGrad"):
        yield case("alpha 0.75", 4, 5, alpha=0.75)
        yield case("alpha -0.5", 4, 5, alpha=-0.5)
    if operator == "ReluGrad":
        edges = np.array([-1, -0.0, 0, 1e-30, 1, np.inf, -np.inf], np.float32)
        yield Case("edges", {"dY": np.arange(1, 8, dtype=np.float32), "X": edges})


def dropout_cases() -> Iterator[Case]:
    def case(title: str, *shape: int, dtype: Any = np.float32, ratio: Any = None, training: Any = None) -> Case:
        return Case(
            title,
            {
                "dy": floats(title, *shape, dtype=dtype),
                "mask": np.asarray(floats(f"{title} mask", *shape) < 0.5),
                "ratio": ratio,
                "training_mode": None if training is None else np.array(training),
            },
        )

    for dtype in FLOATS:
        yield case(f"{dtype}", 3, 40, dtype=np.dtype(dtype))
        for kind in FLOATS:
            ratio = np.array(0.25, kind)
            yield case(f"{dtype} with a {kind} ratio", 3, 40, dtype=np.dtype(dtype), ratio=ratio, training=True)
    yield case("ratio 0", 3, 4, ratio=np.array(0, np.float32), training=True)
    yield case("ratio in a vector", 3, 4, ratio=np.array([0.1], np.float32))
    yield case("a scalar", ratio=np.array(0.5, np.float32), training=True)
    yield case("nothing", 0, 4, ratio=np.array(0.5, np.float32), training=True)


if __name__ == "__main__":
    for operator in (*FROM_RESULT, *FROM_INPUT):
        print(operator, *write(operator, activation_cases(operator)))
    print("DropoutGrad", *write("DropoutGrad", dropout_cases()))
