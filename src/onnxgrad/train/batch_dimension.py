"""Batches of any size for models that were exported for one; tests on random inputs that results stay the same."""

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.tensor import dims_of
from onnxgrad.passes.draft import Draft
from onnxgrad.passes.finish import FOR_SESSIONS
from onnxgrad.passes.free_batch import free_batch
from onnxgrad.passes.train_mode import to_inference_mode
from onnxgrad.tensor_types import Array
from onnxgrad.train.devices import Cpu
from onnxgrad.train.session import Session

CLOSE, CLOSE_HALF = 1e-3, 2e-2  # of the largest number in a result: products of other sizes round differently
SMALL = 3  # a dimension that is free already


def with_free_batch(prepared: Draft, size: int) -> Draft | None:
    """A draft that takes batches of any size; None if examples give other results in other batches, or it fails."""
    freed = prepared.clone()
    return freed if free_batch(freed, size) and _agree(prepared, freed, size) else None


def _agree(fixed: Draft, freed: Draft, size: int) -> bool:
    """Whether two batches that overlap have, example by example, the results that they have in one larger batch."""
    more = {str(v.name): _random(v, size) for v in fixed.graph.inputs}
    parted = {str(v.name) for v in fixed.graph.inputs if (dims_of(v) or (None,))[0] == size}
    try:
        any_size, one_size = _session(freed), _session(fixed)
        together = any_size.run(more)
        apart = [
            one_size.run({name: a[k : k + size] if name in parted else a for name, a in more.items()}) for k in (0, 1)
        ]
    except Exception:  # whatever onnxruntime or a kernel finds wrong with it
        return False
    return all(
        len(together[name]) == size + 1 and _is_close(together[name][k : k + size], expected)
        for k, results in enumerate(apart)
        for name, expected in results.items()
    )


def _random(value: ir.Value, size: int) -> Array:
    """Numbers for an input: one example more than fits into a batch, if it has examples."""
    dims = [d if isinstance(d, int) else SMALL for d in dims_of(value) or ()]
    if dims and dims[0] == size:
        dims[0] += 1
    assert value.dtype is not None
    rng = np.random.default_rng(0)
    numbers = rng.standard_normal(dims) if value.dtype.is_floating_point() else rng.integers(0, 2, dims)
    return numbers.astype(value.dtype.numpy())


def _session(draft: Draft) -> Session:
    """Of the model as it is, in inference mode."""
    copy = draft.clone()
    to_inference_mode(copy.model)
    return Session(copy.run(FOR_SESSIONS).model, {}, {}, Cpu(), quiet=True)


def _is_close(found: Array, expected: Array) -> bool:
    if found.shape != expected.shape or expected.dtype.kind not in "fV":
        return bool(np.array_equal(found, expected))
    a, b = found.astype(np.float64), expected.astype(np.float64)
    scale = np.max(np.abs(b), where=np.isfinite(b), initial=0)
    close = CLOSE_HALF if expected.dtype.itemsize == 2 else CLOSE
    return bool(np.allclose(a, b, rtol=0, atol=close * scale, equal_nan=True))
