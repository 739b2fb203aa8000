"""Runs onnxruntime-training 1.19.2 on small cases of BatchNormalizationGrad."""

from collections.abc import Iterator
from typing import Any

import make_golden
import numpy as np
from make_golden import Case, floats, write

OPERATOR = "BatchNormalizationGrad"
make_golden.OUTPUTS |= {OPERATOR: ("X_grad", "scale_grad", "bias_grad")}


def cases() -> Iterator[Case]:
    def case(
        name: str, shape: Any = (3, 4, 5), dtype: Any = np.float32, replace: Any = None, invalid: Any = None
    ) -> Case:
        over = tuple(k for k in range(len(shape)) if k != 1)
        dY, X = (floats(f"{name} {n}", *shape, dtype=dtype) for n in ("dY", "X"))
        x = X.astype(np.float64)
        count = max(1, x.size // shape[1])
        mean = x.sum(over, keepdims=True) / count
        inv = 1 / np.sqrt(((x - mean) ** 2).sum(over) / count + 0.01)
        inputs = {"dY": dY, "X": X, "scale": floats(f"{name} scale", shape[1], dtype=dtype)}
        inputs |= {"mean": mean.ravel().astype(dtype), "inv_std": inv.astype(dtype)}
        return Case(name, inputs | (replace or {}), {"epsilon": 0.01}, invalid=invalid)

    for shape in ((3, 4, 5), (6, 4), (2, 3, 4, 5), (2, 3, 2, 2, 2), (40, 3, 9), (3, 1, 7), (70, 33)):
        yield case(f"{shape}", shape)
    yield case("float16", dtype=np.float16)
    yield case("float64", dtype=np.float64)
    others = {"scale": floats("scale", 4), "mean": np.zeros(4, np.float32), "inv_std": np.ones(4, np.float32)}
    yield case("statistics that are not those of X", replace=others)
    yield case("scale too short", replace={"scale": floats("short", 3)}, invalid="scale has too few channels")
    yield case("mean of two dimensions", replace={"mean": np.zeros((4, 1), np.float32)}, invalid="mean is no vector")
    yield case("dY transposed", replace={"dY": floats("transposed", 5, 4, 3)}, invalid="dY has not the shape of X")


if __name__ == "__main__":
    done, cannot, differs = write(OPERATOR, cases())
    print(OPERATOR, done, "cases; could not run:", cannot, "breaks the contract:", differs)
