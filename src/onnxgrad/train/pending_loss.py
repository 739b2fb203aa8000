"""PendingLoss: the loss of a step that a GPU may still be computing, a number that waits when it is used."""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from onnxgrad.tensor_types import Array


class StepAhead(NamedTuple):
    """A step that a GPU may still be at."""

    verdict: Callable[[], Sequence[float]]  # waits for it: loss, norm of the gradient, factor, whether it is good
    batch: Mapping[str, Any]
    before: tuple[int, int]  # updates and batches


class PendingLoss:
    """A number like a float: computing, comparing, printing wait for the step, and raise if it went wrong."""

    def __init__(self, wait: Callable[[], tuple[float, float]]) -> None:
        """`wait` gives the loss and the norm of the gradient."""
        self._wait = wait
        self._found: tuple[float, float] | None = None

    def _numbers(self) -> tuple[float, float]:
        if self._found is None:
            self._found = self._wait()
        return self._found

    @property
    def gradient_norm(self) -> float:
        """Of the same step, before clipping."""
        return self._numbers()[1]

    def __float__(self) -> float:
        return self._numbers()[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.array(float(self), dtype)

    def __repr__(self) -> str:
        return repr(float(self))

    def __format__(self, spec: str) -> str:
        return format(float(self), spec)

    def __hash__(self) -> int:
        return hash(float(self))


def _operation(function: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """A function of a pending loss and more numbers, and one of another number and a pending loss."""

    def forward(self: PendingLoss, *others: Any) -> Any:
        return function(float(self), *(float(x) if isinstance(x, PendingLoss) else x for x in others))

    def reflected(self: PendingLoss, other: Any) -> Any:
        return function(other, float(self))

    return forward, reflected


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    _forward, _reflected = _operation(getattr(operator, _name))
    setattr(PendingLoss, f"__{_name}__", _forward)
    setattr(PendingLoss, f"__r{_name}__", _reflected)
for _function in (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge, operator.neg,
                  operator.pos, operator.abs, bool, int, round, math.trunc, math.floor, math.ceil):  # fmt: skip
    setattr(PendingLoss, f"__{_function.__name__}__", _operation(_function)[0])
