"""What a FusedElementwise node computes: a program of a few lines, its attribute.

passes/fuse_elementwise/ writes it, cuda/core/fused_elementwise.py compiles it. A value a line: its name, its type
and, unless it is an input of the node, an operation and what that reads; at last the outputs of the node:

    v0 bfloat16
    v1 float32
    v2 float32 Cast v0
    v3 float32 Constant 0.5
    v4 float32 Mul v2 v3
    v5 float32 Add v4 v1
    return v5

Several programs, with an empty line between two, have nothing in common but their node and its launch; their inputs
and outputs are those of the node, one after the other.

Of the operations one is not element-wise: RowMean, the mean along the last dimension. It gives as many numbers as there
are rows, and so does what is computed from such numbers alone.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

NAME = "FusedElementwise"
ROW_MEAN = "RowMean"
DTYPES = ("float16", "bfloat16", "float32", "float64", "int32", "int64", "bool")


class Line(NamedTuple):
    """One value."""

    name: str
    dtype: str
    operation: str = ""  # of an input: none
    arguments: tuple[str, ...] = ()  # names; of a Constant its number


class Program(NamedTuple):
    """Lines that read only what is above them, and the names of the outputs."""

    lines: tuple[Line, ...]
    results: tuple[str, ...]

    @property
    def inputs(self) -> list[Line]:
        """Those of the node, in its order."""
        return [line for line in self.lines if not line.operation]

    @property
    def dtypes(self) -> dict[str, str]:
        """By name."""
        return {line.name: line.dtype for line in self.lines}

    @property
    def has_rows(self) -> bool:
        """Whether it has means of rows."""
        return any(line.operation == ROW_MEAN for line in self.lines)

    @property
    def of_rows(self) -> set[str]:
        """The names of values that have one number a row."""
        found: set[str] = set()
        constants = {line.name for line in self.lines if line.operation == "Constant"}
        for line in self.lines:
            from_rows = set(line.arguments) & found and set(line.arguments) <= found | constants
            if line.operation == ROW_MEAN or from_rows:
                found.add(line.name)
        return found

    def shapes(self, given: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
        """Those of the outputs, for inputs of such shapes."""
        whole, rows = broadcast(given), self.of_rows
        return [(*whole[:-1], 1) if name in rows else whole for name in self.results]

    def text(self) -> str:
        """As the attribute has it."""
        lines = [" ".join(part for part in (n, d, o, *a) if part) for n, d, o, a in self.lines]
        return "\n".join([*lines, " ".join(("return", *self.results))])


def parse(text: str) -> Program:
    """Back again."""
    *lines, last = (line.split() for line in text.splitlines())
    return Program(tuple(_line(*words) for words in lines), tuple(last[1:]))


def parse_all(text: str) -> list[Program]:
    """The programs of a node."""
    return [parse(part) for part in text.split("\n\n")]


def by_program(programs: Sequence[Program], values: Sequence[Any]) -> list[list[Any]]:
    """What belongs to the inputs of a node, divided among its programs."""
    rest = iter(values)
    return [list(itertools.islice(rest, len(program.inputs))) for program in programs]


def _line(name: str, dtype: str, operation: str = "", *arguments: str) -> Line:
    return Line(name, dtype, operation, arguments)


def broadcast(shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The shape of what is computed from arrays of such shapes."""
    rank = max(map(len, shapes))
    columns = zip(*([1] * (rank - len(s)) + list(s) for s in shapes), strict=True)
    return tuple(next((n for n in sizes if n != 1), 1) for sizes in columns)
