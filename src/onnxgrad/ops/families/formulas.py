"""Element-wise operators as one formula, which NumPy, Numba, Triton and the ONNX functions all read.

The formula is the body of the operator: a plain Python function of single numbers or of whole arrays, with operators
and the names below. Each backend binds these names to its own.
"""

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

import numpy as np

from onnxgrad.op import Op
from onnxgrad.tensor_types import accumulator

where = np.where
# Names, since Numba takes a plain 1 for 64 bits wide, and then computes in float64.
NUMBERS = {"one": 1, "three": 3, "six": 6}
one, three, six = NUMBERS.values()

F = TypeVar("F", bound=Callable[..., Any])


def in_work_type(formula: F) -> F:
    """The formula as a definition: arrays and numbers in the type to compute in, the result rounded once."""

    @functools.wraps(formula)
    def define(first: Any, *others: Any, **numbers: Any) -> Any:
        work = accumulator(first.dtype)
        given = {name: work.type(number) for name, number in numbers.items()}
        return formula(first.astype(work), *(x.astype(work) for x in others), **given).astype(first.dtype)

    return define  # type: ignore[return-value]


def formula_of(op: Op[..., Any]) -> Callable[..., Any]:
    """The body that `in_work_type` has wrapped."""
    return op.body.__wrapped__  # type: ignore[attr-defined, no-any-return]


def bind(function: Callable[..., Any], name: str, **names: Any) -> Callable[..., Any]:
    """The same code, with other meanings of some of the global names that it reads.

    `name` is what compilers take it for: Numba's cache would else confuse functions of the same code.
    """
    assert isinstance(function, FunctionType)
    names = {**function.__globals__, **names}
    bound = FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    bound.__qualname__, bound.__annotations__ = name, function.__annotations__
    return bound
