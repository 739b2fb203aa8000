"""The task board: a running kernel posts its tasks there, and helping threads look for them.

The kernel's thread opens the board, helpers enter, everyone draws tasks until none is left, the kernel closes the
board and waits for those still inside. It is all native code: Python's lock is not needed between two rounds of tasks,
and there is nothing that a KeyboardInterrupt could cut short.
"""

import ctypes
import os
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.np.numpy_support import carray

from onnxgrad.cpu.core.jit import c_function, int64, machine_code, native
from onnxgrad.tensor_types import Array

# Positions on a board, each on a cache line of its own.
POST, TASK_LOOP, WORK, ROUND, INSIDE, CLOSED = (8 * line for line in range(6))
SIZE = 8 * 6
PATIENCE = 2000  # looks at the board before a thread lets others have the core
OPEN = 1  # ROUND is odd while there is something to do


@machine_code
def _load(typing_context: Any, board: Any, position: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        return builder.load_atomic(_slot(context, builder, board, values), "seq_cst", align=8)

    return types.int64(board, types.int64), generate


@machine_code
def _add(typing_context: Any, board: Any, position: Any, value: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        return builder.atomic_rmw("add", _slot(context, builder, board, values), values[2], "seq_cst")

    return types.int64(board, types.int64, types.int64), generate


def _slot(context: Any, builder: ir.IRBuilder, board: Any, values: Any) -> Any:
    return builder.gep(context.make_array(board)(context, builder, values[0]).data, [values[1]])


@machine_code
def _call(typing_context: Any, task_loop: Any, work: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)]).as_pointer()
        builder.call(builder.inttoptr(values[0], kind), [values[1]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@machine_code
def _step_aside(typing_context: Any) -> Any:
    """Lets another thread have the core, if one wants it."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        if os.name == "posix":
            yields = ir.FunctionType(ir.IntType(32), [])
            builder.call(cgutils.get_or_insert_function(builder.module, yields, "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), generate


@native
def help_kernel(board: Array) -> None:
    """Takes part in whatever is posted, until the board is closed."""
    done, looks = int64(0), 0
    while _load(board, CLOSED) == 0:
        number = _load(board, ROUND)
        if number % 2 == OPEN and number != done:
            _add(board, INSIDE, int64(1))
            if _load(board, ROUND) == number:  # still this round: whoever is inside is waited for
                _call(_load(board, TASK_LOOP), _load(board, WORK))
                done = number
            _add(board, INSIDE, int64(-1))
            looks = 0
        looks += 1
        if looks > PATIENCE:
            _step_aside()


def _post(memory: Any, task_loop: int, work: int, count: int) -> None:
    """The C function that `parallel` calls with the board it was given as its scheduler."""
    board = carray(memory, SIZE)
    board[TASK_LOOP], board[WORK] = task_loop, work
    _add(board, ROUND, int64(1))
    _call(task_loop, work)
    _add(board, ROUND, int64(1))
    looks = 0
    while _load(board, INSIDE) > 0:
        looks += 1
        if looks > PATIENCE:
            _step_aside()


_compiled_post = c_function(types.void(types.CPointer(types.int64), types.int64, types.int64, types.int64))(_post)


def new_board() -> Array:
    """A board; its address is a scheduler."""
    memory = np.zeros(SIZE + 8, np.int64)
    board = memory[-(memory.ctypes.data // 8) % 8 :][:SIZE]
    board[POST] = ctypes.c_int64(_compiled_post.address).value
    return board
