"""Functions of a number or of a value in a graph, for the formulas of optimizers and schedules."""

import math
from typing import Any

from onnxgrad.graph.builder import op
from onnxgrad.graph.tensor import Tensor


def square_root(x: Any) -> Any:
    return op.Sqrt(x) if isinstance(x, Tensor) else math.sqrt(x)


def cosine(x: Any) -> Any:
    return op.Cos(x) if isinstance(x, Tensor) else math.cos(x)


def floor(x: Any) -> Any:
    return op.Floor(x) if isinstance(x, Tensor) else math.floor(x)


def least(x: Any, bound: float) -> Any:
    return op.Min(x, bound) if isinstance(x, Tensor) else min(x, bound)


def most(x: Any, bound: float) -> Any:
    return op.Max(x, bound) if isinstance(x, Tensor) else max(x, bound)


def choose(condition: Any, yes: Any, no: Any) -> Any:
    """One or the other; both are computed."""
    return op.Where(condition, yes, no) if isinstance(condition, Tensor) else yes if condition else no
