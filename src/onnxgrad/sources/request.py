"""What a reader is asked for: the inputs of a model and its loss, and the settings of those who have the data."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.files import load
from onnxgrad.graph.suggest import listed
from onnxgrad.graph.tensor import dims_of

Dims = tuple[int | None, ...]


@dataclass(frozen=True)
class Field:
    """An input of the model, or a target of its loss: what one example of it is like, as far as that is known."""

    name: str
    dtype: np.dtype[Any] | None = None
    shape: Dims | None = None
    is_target: bool = False
    ignore: int | None = None  # a class that does not count

    @property
    def numbers(self) -> int | None:
        """How many numbers an example has, if that is known."""
        if self.shape is None or None in self.shape:
            return None
        return int(np.prod(self.shape, dtype=np.int64))  # type: ignore[arg-type]

    @property
    def is_whole(self) -> bool:
        """Whether it takes whole numbers."""
        return self.dtype is not None and self.dtype.kind in "iu"


@dataclass(frozen=True)
class Settings:
    """How to read data; what is None, or empty, is found out."""

    columns: Mapping[str, Sequence[str]] = field(default_factory=dict)
    image_size: tuple[int, int] | None = None  # height, width
    normalize: str | None = None
    augment: Sequence[str] = ()
    tokenizer: Path | None = None
    length: int | None = None  # tokens

    @property
    def given(self) -> list[str]:
        """The names of those that are set."""
        return [f.name for f in fields(self) if getattr(self, f.name) not in (None, (), {})]


@dataclass(frozen=True)
class Request:
    """What is asked of a reader; `subject` is what errors are about, `fields` is None where every column is wanted."""

    path: Path
    subject: str
    fields: tuple[Field, ...] | None
    settings: Settings
    classes: Mapping[str, Sequence[str]] = field(default_factory=dict)  # of text, where they are known already

    @property
    def inputs(self) -> list[Field]:
        """What the model takes."""
        return [f for f in self.fields or () if not f.is_target]

    @property
    def targets(self) -> list[Field]:
        """What the loss takes besides."""
        return [f for f in self.fields or () if f.is_target]

    def error(self, sentence: str) -> ValueError:
        """A sentence about the file."""
        return ValueError(f"{self.subject}: {str(self.path)!r} {sentence}")

    def lacks(self, name: str, there: str) -> ValueError:
        """The sentence for an input that nothing in the file is for."""
        return self.error(f"lacks {name!r}, an input of model or loss{there}")


class _Prediction(NamedTuple):
    """As much of a value as a loss asks to say what its target is like."""

    dtype: ir.DataType
    shape: tuple[Any, ...] | None
    rank: int


def fields_of(model: Any, loss: Any, caller: str) -> tuple[Field, ...]:
    """The inputs of a model and the targets of its loss; `model` is a path, an onnx.ModelProto or an onnx_ir.Model."""
    graph = (model if isinstance(model, ir.Model) else load(model, caller)).graph
    values = {str(v.name): v for node in graph for v in node.outputs}
    targets = {part.target: _target(part, values.get(part.prediction)) for part in getattr(loss, "parts", ())}
    found = {}
    for value in graph.inputs:
        name = str(value.name)
        if name not in graph.initializers:
            known = targets.get(name)
            ignore = None if known is None else known.ignore
            dtype = None if value.dtype is None else value.dtype
            found[name] = Field(name, _numpy(dtype), _example(dims_of(value)), known is not None, ignore)
    found |= {n: f for n, f in targets.items() if n not in found and n not in graph.initializers}
    return tuple(found.values())


def _target(part: Any, value: ir.Value | None) -> Field:
    ignore = getattr(part, "ignore_index", None)
    shape = None if value is None else dims_of(value)
    # Of a value whose shape is unknown, a loss of classes still says that it takes classes.
    rank = len(shape) if shape is not None else max(2, getattr(part, "axis", 1) + 1)
    dtype = ir.DataType.FLOAT if value is None or value.dtype is None else value.dtype
    try:
        kind, dims = part.target_like(_Prediction(dtype, shape, rank))
    except (ValueError, AttributeError):  # the trainer says what is wrong with it, or the loss asks for more
        return Field(part.target, is_target=True)
    return Field(part.target, _numpy(kind), None if shape is None else _example(dims), True, ignore)


def _numpy(dtype: ir.DataType | None) -> np.dtype[Any] | None:
    try:
        return None if dtype is None else dtype.numpy()
    except TypeError:  # text, which no batch can hold: the trainer refuses it
        return None


def _example(dims: Iterable[Any] | None) -> Dims | None:
    """The dimensions of one example."""
    return None if dims is None else tuple(d if isinstance(d, int) else None for d in dims)[1:]


def expect_taken(request: Request, what: str, takes: Sequence[str]) -> None:
    """Raises one sentence if a setting is given that a kind of data has no use for."""
    extra = [name for name in request.settings.given if name not in takes]
    if extra:
        raise request.error(f"is {what}, which has no use for {listed(n.replace('_', '-') for n in extra)}")
