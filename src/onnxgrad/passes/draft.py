"""A draft: a model on its way through a list of passes, with their findings."""

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import onnx_ir as ir


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Python's collector rests: nodes are many objects that stay, and it would go through all of them again and again.

    Building a trainer of 10,000 nodes takes an eighth less.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Role(NamedTuple):
    """What an initializer is for."""

    kind: str  # weight, bias, scale, embedding, …; scalar, mask, buffer, …
    is_parameter: bool
    why: str
    is_made: bool = False  # by the code of a PyTorch module, as a mask or a state of zeros: nothing that a user knows


@dataclass
class Draft:
    """A pass takes a draft and changes it. `caller` is what sentences about a wrong model begin with."""

    model: Any  # an ir.Model, which a pass may replace by another one
    caller: str
    unnamed: dict[str, ir.Shape] = field(default_factory=dict)  # shapes of inputs before their dimensions got names
    remarks: list[str] = field(default_factory=list)  # sentences about the model that its user should read
    roles: dict[str, Role] = field(default_factory=dict)  # of floating-point initializers

    @property
    def graph(self) -> ir.Graph:
        """The main graph."""
        return self.model.graph  # type: ignore[no-any-return]

    def run(self, passes: Iterable[Callable[[Any], Any]]) -> "Draft":
        """All of them, in their order."""
        with without_garbage_collection():
            for change in passes:
                change(self)
        return self

    def clone(self) -> "Draft":
        """A draft that can be changed apart from this one; both have the same weights."""
        return Draft(self.model.clone(), self.caller, dict(self.unnamed), list(self.remarks), self.roles)


Pass = Callable[[Draft], None]
