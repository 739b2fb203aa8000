"""Plans: for one node and inputs of certain shapes, which native calls to make, laid out in memory for `compute`."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from onnxgrad import arguments
from onnxgrad.cpu.core.memory import FRESH
from onnxgrad.cpu.core.recording import FIRST_WORKSPACE, Recording, record, region_of, without_memory
from onnxgrad.cpu.core.threads import WORTH_SHARING
from onnxgrad.runtime.compute import ABSENT, FROM_INPUT, FROM_OUTPUT, FROM_WORKSPACE
from onnxgrad.runtime.kernels import Node
from onnxgrad.runtime.layout import CALL, COPY, OUTPUT, PATCH, PLAN
from onnxgrad.runtime.native_call import prepare
from onnxgrad.runtime.packed import is_packed, pack, unpacked
from onnxgrad.schema import Known
from onnxgrad.tensor_types import Array

ALIGNMENT = 64


class Plan:
    """The memory of a plan; it lives as long as this object."""

    def __init__(self, key: Sequence[int]) -> None:
        self.memory = np.zeros((), PLAN)
        self._kept: list[Array] = []
        self.memory["key_length"], self.memory["key"] = len(key), self.keep(np.array(key, np.int64))

    @property
    def address(self) -> int:
        return int(self.memory.ctypes.data)

    def keep(self, array: Array) -> int:
        """An array that lives as long as the plan; its address."""
        array = np.ascontiguousarray(array)
        self._kept.append(array)
        return int(array.ctypes.data)


def read_key(node: Node, key: Sequence[int]) -> tuple[list[tuple[int, ...] | None], list[Array | None]]:
    """Shapes of the inputs, and what the host inputs hold."""
    shapes: list[tuple[int, ...] | None] = []
    contents: list[Array | None] = []
    position = 0
    for declared, dtype in zip(node.op.inputs, node.dtypes, strict=True):
        rank = key[position]
        position += 1
        contents.append(None)
        if rank == ABSENT:
            shapes.append(None)
            continue
        shape = tuple(key[position : position + rank])
        position += rank
        shapes.append(shape)
        if declared.constraint.on_host:
            size = int(np.prod(shape, dtype=np.int64))
            contents[-1] = np.array(key[position : position + size], np.int64).astype(dtype).reshape(shape)
            position += size
    return shapes, contents


def make_plan(node: Node, key: Sequence[int]) -> Plan:
    """Checks shapes and settings as a call does, and writes down what it would launch; raises what a call would."""
    shapes, contents = read_key(node, key)
    if node.op.on_host_only:
        return _plan_of_numbers(node, Plan(key), contents)
    try:
        return _plan_of_calls(node, Plan(key), shapes, contents)
    except (TypeError, ValueError, IndexError, MemoryError) as error:
        raise node.op.named(error) from None


def record_calls(
    node: Node, shapes: list[tuple[int, ...] | None], contents: list[Array | None]
) -> tuple[Recording, list[tuple[int, ...]]]:
    """What a node would launch for inputs of these shapes, and the shapes of its outputs."""
    op = node.op
    inputs: list[Array | None] = []
    for k, (declared, shape) in enumerate(zip(op.inputs, shapes, strict=True)):
        if declared.constraint.on_host:
            content = contents[k]
            inputs.append(None if content is None else arguments.to_arrays([declared], [content])[0])
        elif shape is None:
            inputs.append(None)
        else:
            inputs.append(without_memory(k, shape, node.dtypes[k]))
    known = [
        None if x is None else Known(x.shape, tuple(x.tolist()) if d.constraint.on_host else None)
        for x, d in zip(inputs, op.inputs, strict=True)
    ]
    out_shapes = op.output_shapes(known, node.attributes)
    dtypes, first = op.output_dtypes(node.dtypes), len(op.inputs)
    outputs = [
        without_memory(first + o, shape, dtype) if wanted or not op.chooses_outputs else None
        for o, (shape, dtype, wanted) in enumerate(zip(out_shapes, dtypes, node.wanted, strict=True))
    ]
    options = dict(node.attributes)
    if op.kernel_asks_for("cpu", "memory"):
        options["memory"] = FRESH  # outputs of a node that fails are dropped
    with record() as recording:
        results = list(outputs)
        inputs = [unpacked(x) if x is not None and is_packed(x.dtype) else x for x in inputs]
        # An output that the node leaves out but the kernel writes goes to working memory, and so does one to be packed.
        for o, (output, wanted) in enumerate(zip(outputs, node.wanted, strict=True)):
            if output is not None and (not wanted or is_packed(output.dtype)):
                results[o] = recording.workspace(output.shape, output.dtype)
        op.kernel("cpu")(*inputs, *results, **options)
        for result, output, wanted in zip(results, outputs, node.wanted, strict=True):
            if result is not None and output is not None and wanted and is_packed(output.dtype):
                pack(result, output)
    return recording, out_shapes


def _plan_of_calls(node: Node, plan: Plan, shapes: list[tuple[int, ...] | None], contents: list[Array | None]) -> Plan:
    recording, out_shapes = record_calls(node, shapes, contents)
    first = len(node.op.inputs)
    _set_outputs(plan, node, out_shapes)
    starts, total = [], 0
    for size in recording.workspaces:
        starts.append(total)
        total += -(-size // ALIGNMENT) * ALIGNMENT
    plan.memory["workspace"] = total
    calls = []
    for call in recording.calls:
        function, words = prepare(call)
        template: list[int] = []
        patches: list[tuple[int, int, int]] = []
        for word in words:
            source = _source(word, first, starts) if isinstance(word, np.ndarray) else None
            if source is not None:
                patches.append((len(template), *source))
                template.append(0)
            else:
                template.append(plan.keep(word) if isinstance(word, np.ndarray) else int(word))
        shares = int(call.bytes_touched >= WORTH_SHARING)
        addresses = plan.keep(np.array(template, np.int64)), plan.keep(np.array(patches, PATCH))
        calls.append((function, addresses[0], len(template), addresses[1], len(patches), shares))
    plan.memory["calls"], plan.memory["call_count"] = plan.keep(np.array(calls, CALL)), len(calls)
    return plan


def _set_outputs(plan: Plan, node: Node, shapes: Sequence[Sequence[int]]) -> None:
    dims = [plan.keep(np.array(shape, np.int64)) for shape in shapes]
    rows = [(wanted, len(shape), at) for wanted, shape, at in zip(node.wanted, shapes, dims, strict=True)]
    plan.memory["outputs"] = plan.keep(np.array(rows, OUTPUT))


def _source(array: Array, first: int, starts: list[int]) -> tuple[int, int] | None:
    """Where an argument's memory comes from at each run, and the offset there; None if it is the plan's own."""
    region = region_of(array)
    if region is None:
        return None
    number, offset = region
    if number >= FIRST_WORKSPACE:
        return FROM_WORKSPACE, starts[number - FIRST_WORKSPACE] + offset
    return (FROM_INPUT + number, offset) if number < first else (FROM_OUTPUT + number - first, offset)


def _plan_of_numbers(node: Node, plan: Plan, contents: list[Array | None]) -> Plan:
    """Inputs that are all on the host are part of the key, so the results can be part of the plan."""
    results: Any = node.op(*contents, **node.attributes)
    results = results if isinstance(results, tuple) else (results,)
    _set_outputs(plan, node, [r.shape for r in results])
    copies = [(o, plan.keep(r), r.nbytes) for o, r in enumerate(results) if node.wanted[o] and r.size]
    plan.memory["copies"], plan.memory["copy_count"] = plan.keep(np.array(copies, COPY)), len(copies)
    return plan
