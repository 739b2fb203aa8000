"""A node's run in native code: no Python, no lock, no copies, as long as its inputs have shapes seen before.

onnxruntime calls `compute` with a kernel and a context. A kernel knows the plans made for it so far. A plan says, for
inputs of certain shapes, which native calls to make. Where none fits, Python is asked for one; where a call finds bad
values, Python is asked for the sentence. layout.py says what these look like in memory.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from onnxgrad.cpu.core.c_calls import INT64, invoke, keep
from onnxgrad.cpu.core.jit import c_function, inlined, int64, machine_code, native
from onnxgrad.runtime.api import FAIL, SLOTS
from onnxgrad.runtime.interrupts import UNANSWERED
from onnxgrad.runtime.layout import ANSWER, CALL, COPY, KERNEL, MOST_VALUES, OUTPUT, PATCH, PLAN, SCHEDULER

# Sources of a patch: inputs by their numbers, then outputs by theirs, then working memory.
FROM_INPUT, FROM_OUTPUT, FROM_WORKSPACE = 0, 1 << 16, 1 << 17
ABSENT = -1  # in a key, in place of an input's rank
KEY_ROOM = 1024  # words; a node whose shapes take more is refused

GET_INPUT, GET_OUTPUT = SLOTS["KernelContext_GetInput"], SLOTS["KernelContext_GetOutput"]
GET_SHAPE, GET_DATA = SLOTS["GetTensorElementTypeAndShapeDataReference"], SLOTS["GetTensorMutableData"]
PARALLEL_FOR, CREATE_STATUS = SLOTS["KernelContext_ParallelFor"], SLOTS["CreateStatus"]


@machine_code
def words_at(typing_context: Any, address: Any) -> Any:
    """The memory at an address, as a pointer to words."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.int64)(types.int64), generate


@machine_code
def structure_at(typing_context: Any, address: Any, layout: Any, index: Any) -> Any:
    """The structure at an address, or the one of that index in the array there."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        place = builder.add(values[0], builder.mul(values[2], INT64(layout.dtype.size)))
        return builder.inttoptr(place, context.get_value_type(signature.return_type))

    return layout.dtype(types.int64, layout, types.int64), generate


@machine_code
def int32_at(typing_context: Any, address: Any) -> Any:
    """The 32-bit number at an address."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        pointer = builder.inttoptr(values[0], ir.IntType(32).as_pointer())
        return builder.sext(builder.load(pointer), INT64)

    return types.int64(types.int64), generate


@machine_code
def copy_bytes(typing_context: Any, target: Any, source: Any, count: Any) -> Any:
    """memcpy."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        cgutils.raw_memcpy(builder, builder.inttoptr(values[0], byte), builder.inttoptr(values[1], byte), values[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@machine_code
def stack_words(typing_context: Any, count: Any) -> Any:
    """The address of so many words on the stack, for the time of the function that asks for them.

    Not `cgutils.alloca_once`: that fills them with zeros, here 9 kB at every run of every node.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        with builder.goto_entry_block():
            words = builder.alloca(ir.ArrayType(INT64, count.literal_value))
        return builder.ptrtoint(words, INT64)

    return types.int64(count), generate


@machine_code
def _unanswered_text(typing_context: Any) -> Any:
    """The address of the sentence, as C has it."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        return builder.ptrtoint(context.insert_const_string(builder.module, UNANSWERED), INT64)

    return types.int64(), generate


@inlined
def failure(api_address: int, answer: Any) -> int:
    """The status of an answer without a result; Python gives neither when a signal's handler raises (interrupts.py)."""
    if answer.status != 0:
        return answer.status
    return invoke(words_at(api_address)[CREATE_STATUS], (int64(FAIL), _unanswered_text()))


@inlined
def _read_inputs(kernel: Any, context: int, key: Any, data: Any, out: int) -> int:
    """Fills the key and the inputs' addresses; the key's length, or -1 if it does not fit."""
    api = words_at(kernel.api)
    word = words_at(out)
    length = int64(0)
    for i in range(kernel.inputs):
        invoke(api[GET_INPUT], (context, int64(i), out))
        value = word[0]
        data[i] = 0
        if length + 66 > KEY_ROOM:
            return int64(-1)
        if value == 0:
            key[length] = ABSENT
            length += 1
            continue
        invoke(api[GET_SHAPE], (value, out, out + 8, out + 16))
        rank = word[2]
        if length + 2 + rank > KEY_ROOM:
            return int64(-1)
        key[length] = rank
        dims = words_at(word[1])
        size = int64(1)
        for d in range(rank):
            key[length + 1 + d] = dims[d]
            size *= dims[d]
        length += 1 + rank
        invoke(api[GET_DATA], (value, out))
        data[i] = word[0]
        if kernel.host[i] > 0:
            if size > KEY_ROOM - length - 66:
                return int64(-1)
            if kernel.host[i] == 4:
                for j in range(size):
                    key[length + j] = int32_at(data[i] + 4 * j)
            else:
                content = words_at(data[i])
                for j in range(size):
                    key[length + j] = content[j]
            length += size
    return length


@inlined
def _find_plan(kernel: Any, key: Any, length: int) -> int:
    address = kernel.plan
    while address != 0:
        plan = structure_at(address, PLAN, 0)
        if plan.key_length == length:
            known = words_at(plan.key)
            same = True
            for i in range(length):
                if known[i] != key[i]:
                    same = False
                    break
            if same:
                return address
        address = plan.next
    return int64(0)


@inlined
def _make_outputs(kernel: Any, plan: Any, context: int, results: Any, out: int) -> int:
    """Asks onnxruntime for the outputs; a status if it has none to give."""
    api = words_at(kernel.api)
    word = words_at(out)
    for o in range(kernel.outputs):
        results[o] = 0
        output = structure_at(plan.outputs, OUTPUT, o)
        if output.wanted == 0:
            continue
        status = invoke(api[GET_OUTPUT], (context, int64(o), output.dims, output.rank, out))
        if status != 0:
            return status
        if word[0] != 0:
            invoke(api[GET_DATA], (word[0], out))
            results[o] = word[0]
    return int64(0)


@native
def _make_calls(kernel: Any, plan: Any, context: int, data: Any, results: Any) -> int:
    """Runs a plan; what the first call that found something wrong returned, or -1."""
    for c in range(plan.copy_count):
        copy = structure_at(plan.copies, COPY, c)
        copy_bytes(results[copy.output], copy.source, copy.bytes)
    if plan.call_count == 0:
        return int64(-1)
    api = words_at(kernel.api)
    room = np.empty(plan.workspace + 64, np.uint8)
    workspace = (room.ctypes.data + 63) // 64 * 64
    scheduler = np.empty(1, SCHEDULER)
    scheduler[0].post, scheduler[0].parallel_for = kernel.post, api[PARALLEL_FOR]
    scheduler[0].context, scheduler[0].threads = context, kernel.threads
    found = int64(-1)
    for c in range(plan.call_count):
        call = structure_at(plan.calls, CALL, c)
        template = words_at(call.words)
        words = np.empty(call.word_count + 1, np.int64)
        for i in range(call.word_count):
            words[i] = template[i]
        for p in range(call.patch_count):
            patch = structure_at(call.patches, PATCH, p)
            if patch.source >= FROM_WORKSPACE:
                address = workspace
            elif patch.source >= FROM_OUTPUT:
                address = results[patch.source - FROM_OUTPUT]
            else:
                address = data[patch.source]
            words[patch.word] = address + patch.offset
        words[call.word_count] = scheduler.ctypes.data if call.shares != 0 else 0
        found = invoke(call.function, (words.ctypes.data,))
        keep(words)
        if found >= 0:
            break
    keep(room)
    keep(scheduler)
    return found


@inlined
def _run_plan(
    kernel: Any, plan: Any, context: int, key_address: int, length: int, data_address: int, answer_address: int
) -> int:
    """0, or a status."""
    results_address, out = stack_words(MOST_VALUES), stack_words(3)
    data, results = words_at(data_address), words_at(results_address)
    status = _make_outputs(kernel, plan, context, results, out)
    if status != 0:
        return status
    try:
        found = _make_calls(kernel, plan, context, data, results)
    except Exception:  # no memory to work in; a C function that raises would return 0, for success
        found = int64(0)
    if found < 0:
        return int64(0)
    answer = structure_at(answer_address, ANSWER, 0)
    answer.result, answer.status = 0, 0
    invoke(kernel.explain, (kernel.number, key_address, length, data_address, answer_address))
    return failure(kernel.api, answer)


def _compute(kernel_address: int, context: int) -> int:
    """KernelComputeV2: 0, or a status of onnxruntime's."""
    kernel = structure_at(kernel_address, KERNEL, 0)
    key_address, data_address, answer_address = stack_words(KEY_ROOM), stack_words(MOST_VALUES), stack_words(2)
    key, data, answer = words_at(key_address), words_at(data_address), structure_at(answer_address, ANSWER, 0)
    length = _read_inputs(kernel, context, key, data, stack_words(3))
    address = _find_plan(kernel, key, length) if length >= 0 else int64(0)
    if address == 0:
        answer.result, answer.status = 0, 0
        invoke(kernel.prepare, (kernel.number, key_address, length, answer_address))
        if answer.result == 0:
            return failure(kernel.api, answer)
        address = answer.result
    plan = structure_at(address, PLAN, 0)
    status = _run_plan(kernel, plan, context, key_address, length, data_address, answer_address)
    if plan.for_one_run != 0:
        invoke(kernel.release, (kernel.number, address))
    return status


def _compute_in_python(kernel_address: int, context: int) -> int:
    """KernelComputeV2 for the CUDA provider, where Python launches the kernels."""
    kernel, answer_address = structure_at(kernel_address, KERNEL, 0), stack_words(2)
    answer = structure_at(answer_address, ANSWER, 0)
    answer.result, answer.status = 0, 0
    invoke(kernel.prepare, (kernel.number, context, answer_address))
    return int64(0) if answer.result != 0 else failure(kernel.api, answer)


def _help(pair_address: int, number: int) -> None:
    """What onnxruntime's threads are given: draw tasks until none is left."""
    pair = words_at(pair_address)
    invoke(pair[0], (pair[1],))


def _post(scheduler_address: int, task_loop: int, work: int, count: int) -> None:
    """The scheduler that spreads tasks over the session's own threads."""
    scheduler = structure_at(scheduler_address, SCHEDULER, 0)
    pair = np.empty(3, np.int64)
    pair[0], pair[1] = task_loop, work
    helpers = min(count, scheduler.threads & 0xFFFF)
    helper_address = scheduler.threads >> 16
    invoke(scheduler.parallel_for, (scheduler.context, helper_address, helpers, int64(0), pair.ctypes.data))
    keep(pair)


_word = types.int64
compiled_compute = c_function(_word(_word, _word))(_compute)
compiled_compute_in_python = c_function(_word(_word, _word))(_compute_in_python)
compiled_help = c_function(types.void(_word, _word))(_help)
compiled_post = c_function(types.void(_word, _word, _word, _word))(_post)


def threads_word(count: int) -> int:
    """How many helpers to ask for, and what they call, in one word."""
    return int(compiled_help.address) << 16 | min(count, 0xFFFF)
