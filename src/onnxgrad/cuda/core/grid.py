"""Programs of one launch that wait for each other, so that a loop over time needs no launch for each step."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from onnxgrad.cuda.core.launch import INTERPRETED, ceil_div

ON_A_PROCESSOR = 227 * 1024  # bytes of shared memory
STAGES = 3  # of loads, as Triton has it by default


class Tiling(NamedTuple):
    """The tiles of a matrix of states, and how many programs compute them."""

    rows: int
    columns: int
    depth: int
    programs: int
    warps: int


def choose_tiling(rows: int, columns: int, gates: int, itemsize: int, device: torch.device) -> Tiling:
    """Tiles that read least from the second-level cache, as far as there are processors for them.

    A tile of n rows and m columns reads n rows of the states and `gates` · m rows of the weights at every step. One
    program to a processor at most: they wait for each other, so all of them must be running. Both are loaded `depth`
    columns at a time, as many as the processor's own memory holds in all stages.
    """
    processors = 1 if INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count
    best, least = None, 0
    for n in (16, 32, 64, 128):
        for m in (16, 32, 64):
            tiles = ceil_div(rows, n) * ceil_div(columns, m)
            cost = ceil_div(tiles, processors) * (n + gates * m)
            if best is None or cost < least:
                best, least = (n, m, tiles), cost
    assert best is not None
    n, m, tiles = best
    depth = 64
    while (n + gates * m) * depth * itemsize * STAGES > ON_A_PROCESSOR:
        depth //= 2
    return Tiling(n, m, depth, min(tiles, processors), 4)


@triton.jit
def tile_of(tile, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows and columns of a tile of a matrix, which of its elements exist, and where they lie in memory."""
    across = tl.cdiv(columns, COLUMNS)
    row = (tile // across) * ROWS + tl.arange(0, ROWS)
    column = (tile % across) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    return row, column, inside, row[:, None] * columns + column[None, :]


@triton.jit
def wait_for_all(counter, meeting, PROGRAMS: tl.constexpr):
    """Returns once every program has come to this meeting, its writes visible to all; meetings count from 1."""
    tl.debug_barrier()  # threads of one program read each other's results, too
    if PROGRAMS > 1:
        tl.atomic_add(counter, 1, sem="acq_rel")
        while tl.load(counter, volatile=True) < meeting * PROGRAMS:
            pass
        tl.atomic_add(counter, 0, sem="acq_rel")
        tl.debug_barrier()
