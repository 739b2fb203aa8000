"""Arrays as data: selects those that are needed, and checks that all have the same number of examples."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from onnxgrad.graph.suggest import listed, suggestion
from onnxgrad.sources.request import Request
from onnxgrad.sources.source import Arrays, Source
from onnxgrad.tensor_types import Array


def from_arrays(arrays: Mapping[str, Any], request: Request) -> Source:
    """The arrays that the model and its loss take."""
    columns = {name: as_column(name, a, request.subject) for name, a in arrays.items()}
    count_examples(columns, request.subject)
    if request.fields is None:
        return Arrays(columns)
    wanted = [f.name for f in request.fields]
    for name in wanted:
        if name not in columns:
            raise request.lacks(name, suggestion(name, columns))
    found = {name: columns[name] for name in wanted}
    if not len(found[wanted[0]]):
        raise request.error("has no examples")
    unused = [name for name in columns if name not in found]
    return Arrays(found, remarks=[f"{request.path.name}: not used: {listed(unused)}"] if unused else [])


def cannot_be_read(request: Request, error: Exception) -> ValueError:
    """The sentence for a file that a library refuses."""
    reason = (str(error) or type(error).__name__).splitlines()[0]
    return request.error(f"cannot be read as {request.path.suffix} ({reason})")


def as_column(name: str, values: Any, subject: str) -> Array:
    """One array, whose first dimension are examples."""
    try:
        array: Array = np.asarray(values)
    except ValueError:  # NumPy's error for lists of different lengths
        array = np.empty(0, object)
    if array.dtype == object:
        raise ragged(name, subject)
    return array


def ragged(name: str, subject: str) -> ValueError:
    """The sentence for a column that is no array."""
    return ValueError(
        f"{subject}: the column {name!r} holds objects, lists of different lengths, or has gaps, expected numbers, "
        "the same shape for every example"
    )


def count_examples(arrays: Mapping[str, Array], subject: str) -> int:
    """The number of examples, the same in all arrays."""
    if not arrays:
        raise ValueError(f"{subject}: there are no arrays, expected one for each input and target")
    single = next((name for name, a in arrays.items() if a.ndim == 0), None)
    if single is not None:
        raise ValueError(f"{subject}: {single!r} is a single value, expected examples along the first dimension")
    lengths = {name: len(a) for name, a in arrays.items()}
    if len(set(lengths.values())) != 1:
        numbers = ", ".join(f"{name}: {n}" for name, n in lengths.items())
        raise ValueError(f"{subject}: the arrays have different numbers of examples ({numbers})")
    return next(iter(lengths.values()))
