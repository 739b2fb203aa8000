"""Small calls of every operator, of every type and with every pattern of optional inputs, for any runtime to run."""

import functools
import importlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tests.checks import FLOATS

from onnxgrad.op import OPERATORS


@dataclass(frozen=True)
class NodeCase:
    """A node and what it is run with."""

    op: Any
    parameters: dict[str, str]  # what tells it from the operator's other cases; together they are its name
    make_inputs: Callable[[], Sequence[Any]]  # None for one that is absent
    attributes: dict[str, Any] = field(default_factory=dict)
    outputs: Sequence[str] | None = None  # those that the node has, if not all

    def __repr__(self) -> str:
        return "_".join([self.op.function_name, *filter(None, self.parameters.values())])


@functools.cache
def all_cases() -> list[NodeCase]:
    """What tests/ops/test_<module>.py has of every operator, found by the name of its module."""
    modules = sorted({op.module for op in OPERATORS.values()})
    return [case for m in modules for case in importlib.import_module(f"tests.ops.test_{m}").node_cases()]


def elementwise_cases(*ops: Any) -> Iterator[NodeCase]:
    """Of gradients of activations."""
    for op, dtype in itertools.product(ops, FLOATS):

        def make(op=op, dtype=dtype):
            rng = np.random.default_rng(0)
            shapes = [(3, 40), (3, 40), (40,)][: len(op.inputs)]
            return [rng.standard_normal(shape).astype(dtype) for shape in shapes]

        attributes = {"alpha": 0.75} if op.attributes else {}
        yield NodeCase(op, {"type": str(dtype)}, make, attributes)


def axis_name(axis: int) -> str:
    """For the name of a case."""
    return f"axis_{axis}" if axis >= 0 else "last_axis"


def without(names: Sequence[str]) -> str:
    """The inputs that are absent, for the name of a case."""
    return "_".join(["without", *names]) if names else ""


def only(outputs: Sequence[str] | None) -> str:
    """The outputs that it has, for the name of a case."""
    return "_".join(["only", *outputs]) if outputs else ""
