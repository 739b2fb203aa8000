"""Element-wise kernels on the CPU, compiled from formulas: one pass, as fast as memory is."""

from collections.abc import Callable
from typing import Any

import numpy as np

from onnxgrad.cpu.core.halves import flat, load, store
from onnxgrad.cpu.core.jit import inlined, native
from onnxgrad.cpu.core.parallel import parallel
from onnxgrad.cpu.core.threads import launch
from onnxgrad.ops.families.formulas import NUMBERS, bind
from onnxgrad.tensor_types import Array, accumulator

TASK = 1 << 14  # elements
# They take the type of the number they meet, while int64 and float32 make a float64.
SMALL = {name: np.int8(number) for name, number in NUMBERS.items()}


class Elementwise:
    """dX[i] = formula(dY[i], X[i], *numbers) for every element."""

    def __init__(self, formula: Callable[..., Any]) -> None:
        name = formula.__name__
        formula = inlined(bind(formula, name, where=_where, **SMALL))
        elements = native(bind(_elements, f"{name}_elements", compute=formula))
        with_bias = native(bind(_elements_with_bias, f"{name}_elements_with_bias", compute=formula))
        self._plain = native(bind(_all, f"{name}_all", some=elements))
        self._with_bias = native(bind(_all, f"{name}_all_with_bias", some=with_bias))

    def __call__(self, dY: Array, X: Array, dX: Array, *numbers: float) -> None:
        typed = tuple([accumulator(dX.dtype).type(number) for number in numbers])
        launch(self._plain, flat(dY), flat(X), flat(dX), typed, bytes_touched=3 * dX.nbytes)

    def with_bias(self, dY: Array, X: Array, B: Array, dX: Array) -> None:
        """dX[i] = formula(dY[i], X[i] + B[i % B.size])."""
        launch(self._with_bias, flat(dY), flat(X), flat(dX), (flat(B),), bytes_touched=3 * dX.nbytes)


compute: Any = None  # the names that are bound to each formula's own functions
some: Any = None


def _all(dY: Array, X: Array, dX: Array, rest: Any, scheduler: int) -> None:
    parallel(scheduler, (dX.size + TASK - 1) // TASK, some, (dY, X, dX, rest))


def _elements(task: int, dY: Array, X: Array, dX: Array, numbers: tuple[float, ...]) -> None:
    for i in range(task * TASK, min(dX.size, (task + 1) * TASK)):
        store(dX, i, compute(load(dY, i), load(X, i), *numbers))


def _elements_with_bias(task: int, dY: Array, X: Array, dX: Array, bias: tuple[Array]) -> None:
    (B,) = bias
    at, end = task * TASK, min(dX.size, (task + 1) * TASK)
    while at < end:  # the rest of a row, or as much of it as belongs to the task
        column = at % B.size
        count = min(B.size - column, end - at)
        for i in range(count):
            store(dX, at + i, compute(load(dY, at + i), load(X, at + i) + load(B, column + i)))
        at += count


@inlined
def _where(condition: bool, a: float, b: float) -> float:
    return a if condition else type(a)(b)
