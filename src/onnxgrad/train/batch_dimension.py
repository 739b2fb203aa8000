"""Batches of any size for models that were exported for one; tests on random inputs that results stay the same."""

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.tensor import dims_of
from onnxgrad.passes.draft import Draft
from onnxgrad.passes.finish import FOR_SESSIONS
from onnxgrad.passes.free_batch import free_batch
from onnxgrad.passes.prepare import prepare_for_training
from onnxgrad.passes.train_mode import to_inference_mode
from onnxgrad.tensor_types import Array
from onnxgrad.train.devices import Cpu
from onnxgrad.train.session import Session

CLOSE, CLOSE_HALF = 1e-3, 2e-2  # of the largest number in a result: products of other sizes round differently
SMALL = 3  # a dimension that is free already


def with_free_batch(prepared: Draft, size: int, again: Callable[[], ir.Model] | None = None) -> Draft | None:
    """A draft that takes batches of any size; None if examples give other results in other batches, or it fails.

    Where it cannot be rewritten for them, as with subgraphs or gradients in it, the model, loaded `again`, is prepared
    for them from the beginning: it may be that nothing but its declared shapes has that size.
    """
    freed = prepared.clone()
    if free_batch(freed, size) and _agree(prepared, freed, size):
        return freed
    if again is None:
        return None
    model = again()
    _declare_free(model.graph, size)
    try:
        freed = prepare_for_training(model, prepared.caller)
    except ValueError:  # what is inside has that size, too
        return None
    return freed if _agree(prepared, freed, size) else None


def _declare_free(graph: ir.Graph, size: int) -> None:
    """Gives inputs of this size a free one, and forgets the shapes that were found for it."""
    taken = {d for v in graph.inputs for d in dims_of(v) or ()}
    name = next(name for name in ("batch", "batch_size", "free_batch") if name not in taken)
    for value in graph.inputs:
        dims = dims_of(value)
        if dims and dims[0] == size and not value.is_initializer():
            value.shape = ir.Shape([name, *dims[1:]])
    inside = [v for inner in graph.subgraphs() for v in inner.inputs]
    for value in (*inside, *(v for node in graph.all_nodes() for v in node.outputs)):
        dims = dims_of(value)
        value.shape = None if dims is None else ir.Shape([None] * len(dims))


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
        together[name].shape[:1] == (size + 1,) and _is_close(together[name][k : k + size], expected)
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
