"""vjp(): how an operator passes a gradient back, one function per input, by the names of the ONNX schema.

A function gets `g`, the gradient of the first output, and `n`, the node (graph/node.py): `n.<name>` is its input,
output or attribute of that name. It returns the gradient of its input. For a variadic input it also gets the number of
that input. The engine undoes broadcasts, sums gradients, and leaves out what is not needed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from onnx import defs

Function = Callable[..., Any]


class Mark:
    """Stands where a function could."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


nondiff = Mark("nondiff")  # the gradient is zero, or there is none: an integer, a comparison, a step
todo = Mark("todo")  # there is one, but it is not written
by_rewriting = todo  # never read: the engine rewrites the node first, and the new nodes have gradients


@dataclass(frozen=True)
class Rule:
    """The arguments of vjp() for one operator."""

    op_type: str
    domain: str
    by_input: dict[str, Function | Mark]
    broadcast: bool  # whether inputs are broadcast, so that their gradients must be summed to their shapes
    outputs: tuple[str, ...]  # whose gradients it deals with; the first one if empty
    rewrite: Function | None = None
    subgraphs: Function | None = None
    doc: str = ""
    names: list[str] = field(default_factory=list)

    def of_input(self, k: int) -> Function | Mark:
        """What it has for a node's k-th input; the last of its inputs may be variadic."""
        return self.by_input[self.names[min(k, len(self.names) - 1)]]

    @property
    def is_zero(self) -> bool:
        """Whether no gradient ever passes."""
        return self.subgraphs is None and all(f is nondiff for f in self.by_input.values())


RULES: dict[tuple[str, str], Rule] = {}


def vjp(
    op_type: str,
    *,
    domain: str = "",
    broadcast: bool = False,
    outputs: Sequence[str] = (),
    rewrite: Function | None = None,
    subgraphs: Function | None = None,
    doc: str = "",
    **by_input: Function | Mark,
) -> None:
    """Registers a gradient rule for an operator: a function `(g, n)` for each input, under the name of the input.

    `g` is the gradient of the first output and `n` the node, whose inputs, outputs and attributes are `n.<name>`. The
    function returns the gradient of its input. Instead of a function, `nondiff` marks an input without a gradient, and
    `todo` one whose gradient is not implemented.

    - `broadcast`: the inputs are broadcast to a common shape; the engine sums the gradients back.
    - `outputs`: names of the outputs whose gradients the functions use as `n.grad(k)`, if not only the first.
    - `rewrite`: a function that takes the node before differentiation and returns values that replace its outputs, for
      example an operator that keeps what the gradient needs.
    - `subgraphs`: for an operator with subgraphs, a function that takes the node and a list of values, inputs and what
      the subgraphs read from outside, and returns pairs of a value and the node's contribution to its gradient.
    - `doc`: the choice at a kink, for the table of rules.

    `onnxgrad.vjp("Squash", domain="my.domain", x=lambda g, n: g / (1 + op.Abs(n.x)) ** 2)` adds a rule with `op` from
    onnxgrad.rules.
    """
    names = list(by_input)
    if defs.has(op_type, domain):
        expected = [i.name for i in defs.get_schema(op_type, domain=domain).inputs]
        if names != expected:
            raise TypeError(f"vjp: {op_type} has the inputs {', '.join(expected)}, the rule names {', '.join(names)}")
    for name, function in by_input.items():
        if not isinstance(function, Mark) and not callable(function):
            raise TypeError(
                f"vjp: the rule for {name} of {op_type} is a {type(function).__name__}, expected a function"
            )
    RULES[domain, op_type] = Rule(op_type, domain, by_input, broadcast, tuple(outputs), rewrite, subgraphs, doc, names)


def no_gradient(*op_types: str) -> None:
    """Registers operators whose results do not depend on their inputs smoothly, or not on them at all."""
    for op_type in op_types:
        inputs = [i.name for i in defs.get_schema(op_type).inputs]
        RULES["", op_type] = Rule(op_type, "", dict.fromkeys(inputs, nondiff), False, (), names=inputs)
