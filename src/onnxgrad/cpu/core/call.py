"""A call of an operator whose arrays are in the CPU's memory: results are allocated, then the kernel writes them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from onnxgrad import arguments
from onnxgrad.cpu.core.memory import GIVEN, allocate
from onnxgrad.op import Op
from onnxgrad.tensor_types import Array


def run(op: Op[..., Any], out: Sequence[Array | None] | None, values: Sequence[Any]) -> tuple[Array | None, ...]:
    """The results, in `out` if the caller gives arrays to write to."""
    inputs = arguments.to_arrays(op.inputs, values)
    attributes, wanted = op.settings(values) if len(values) > len(inputs) else ({}, None)
    kernel = op.kernel("cpu")
    if op.longest is not None and out is None:
        room = [np.empty(n, arguments.NATIVE_INT64) for n in op.longest(*inputs, **attributes)]
        filled = kernel(*inputs, *room, **attributes)
        return tuple([array[:length] for array, length in zip(room, filled, strict=True)])
    results = _results(op, out, inputs, attributes, wanted)
    kernel(*inputs, *results, **attributes)
    return results


def _results(
    op: Op[..., Any],
    out: Sequence[Array | None] | None,
    inputs: Sequence[Array | None],
    attributes: dict[str, Any],
    wanted: frozenset[str] | None,
) -> tuple[Array | None, ...]:
    """The arrays to write to, the caller's or new ones; a kernel that asks for it is told what they are."""
    shapes = op.checked_shapes(inputs, attributes)
    dtypes = op.output_dtypes([None if x is None else x.dtype for x in inputs])
    if out is not None:
        return arguments.check_out(out, op.output_names, shapes, dtypes, wanted, inputs)
    asked = [wanted is None or name in wanted for name in op.output_names]
    made = [allocate(s, d) if a else (None, GIVEN) for a, s, d in zip(asked, shapes, dtypes, strict=True)]
    if op.kernel_asks_for("cpu", "memory"):
        attributes["memory"] = made[0][1]
    return tuple(array for array, _ in made)
