"""Requests to readers: the inputs of a model and its loss, and the settings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrad.graph.suggest import listed

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

    def in_columns(self, name: str, columns: str) -> str:
        """How a caller says which columns an input is made of: on the command line, or in Python."""
        if self.subject.startswith("--"):
            return f"--columns {name}={columns}"
        listing = ", ".join(c if c == "…" else repr(c) for c in columns.split(","))
        return f"columns={{{name!r}: [{listing}]}}"

    def option(self, name: str) -> str:
        """A setting as its caller writes it."""
        return f"--{name}" if self.subject.startswith("--") else f"{name}="

    def lacks(self, name: str, there: str) -> ValueError:
        """The sentence for an input that nothing in the file is for."""
        return self.error(f"lacks {name!r}, an input of the model or the loss{there}")


def expect_taken(request: Request, what: str, takes: Sequence[str]) -> None:
    """Raises one sentence if a setting is given that a kind of data has no use for."""
    extra = [name for name in request.settings.given if name not in takes]
    if extra:
        raise request.error(f"is {what}, which has no use for {listed(n.replace('_', '-') for n in extra)}")
