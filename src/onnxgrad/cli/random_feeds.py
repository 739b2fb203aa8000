"""random_feeds(): numbers for the inputs of a model, by their declared shapes and types."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.arguments import check_size

SMALL = 2  # a dimension that is not set


def random_feeds(model: ir.Model, dims: Mapping[str, int] | None = None, seed: int = 0) -> dict[str, Any]:
    """Normal floating-point numbers, integers 0 or 1, which most indices may be, and random truth values.

    `dims` sets dimensions by name, others are 2; the k-th dimension of an input x is x_dim_k if it has no name.
    """
    rng = np.random.default_rng(seed)
    dims = dims or {}
    inputs = [v for v in model.graph.inputs if v.name not in model.graph.initializers]
    names = {name for v in inputs if v.shape is not None for name in _names(v)}
    for name in dims:
        if name not in names:
            known = f"available: {', '.join(map(repr, sorted(names)))}" if names else "all dimensions are fixed"
            raise ValueError(f"no input has a dimension {name!r}; {known}")
    return {str(v.name): _random(v, dims, rng) for v in inputs}


def _random(value: ir.Value, dims: Mapping[str, int], rng: np.random.Generator) -> Any:
    if value.shape is None or not isinstance(value.type, ir.TensorType) or value.dtype == ir.DataType.STRING:
        raise ValueError(f"the input {value.name!r} is not a tensor of numbers with a known rank: give it with --feeds")
    names = iter(_names(value))
    shape = [d if isinstance(d, int) else dims.get(next(names), SMALL) for d in value.shape]
    kind = value.type.dtype
    try:
        check_size(f"the input {value.name!r}", shape)
        np.empty(shape)
    except (MemoryError, ValueError):
        raise ValueError(f"the input {value.name!r} has shape {shape}, more numbers than there is memory for") from None
    if kind.is_floating_point():
        return rng.standard_normal(shape).astype(kind.numpy())
    return rng.integers(0, 2, shape).astype(kind.numpy())


def _names(value: ir.Value) -> list[str]:
    """Of the dimensions that are not fixed."""
    assert value.shape is not None
    return [d.value or f"{value.name}_dim_{k}" for k, d in enumerate(value.shape) if not isinstance(d, int)]
