"""No figure for a wrong result: what a side computed, against the definition in float64."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.cases import Case, Named
from bench.peers import Array, is_half


def right_results(case: Case, inputs: Named) -> list[Array]:
    """What the operator means, in float64 where its inputs are numbers."""
    exact = [a if a is None or a.dtype.kind in "iu" else a.astype(np.float64) for a in inputs.values()]
    results = case.op.definition(*exact, **case.attributes)
    return list(results) if isinstance(results, tuple) else [results]


def _epsilon(dtype: np.dtype[Any]) -> float:
    if dtype.kind in "iu":
        return 0.0
    return 2.0**-7 if dtype.name == "bfloat16" else float(np.finfo(dtype).eps)


def first_difference(
    names: Sequence[str], results: Sequence[Array | None], right: Sequence[Array], reduction_length: int
) -> str | None:
    """A sentence on the first output that is off by more than rounding, None if all are right.

    Rounding allows one unit in the last place of the result's type, and one in the type sums are kept in (float32 for
    the half types) for every number added up. Outputs that are None are not looked at.
    """
    for name, got, expected in zip(names, results, right, strict=True):
        if got is None:
            continue
        if got.shape != expected.shape:
            return f"{name} has shape {list(got.shape)}, expected {list(expected.shape)}"
        sums = np.dtype(np.float32) if is_half(got.dtype) else got.dtype
        scale = float(np.abs(expected).max(initial=0))
        allowed = _epsilon(got.dtype) * np.abs(expected) + _epsilon(sums) * reduction_length * scale
        # Not "error > allowed": NaN must count as wrong.
        wrong = ~(np.abs(got.astype(expected.dtype) - expected) <= allowed)
        if wrong.any():
            where = np.unravel_index(int(np.argmax(wrong)), got.shape)
            spelled = ", ".join(str(int(i)) for i in where)
            return (
                f"{name}[{spelled}] is {got[where]}, expected {expected[where]}; "
                f"{np.count_nonzero(wrong)} of {wrong.size} elements are off"
            )
    return None
