"""Table: named columns of numbers, text or pictures, and how columns become the inputs of a model and its loss."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from onnxgrad.graph.suggest import listed, suggestion
from onnxgrad.sources.request import Field, Request
from onnxgrad.sources.source import Arrays, Source
from onnxgrad.tensor_types import Array

LABELS = ("target", "label", "labels", "class", "y")  # what a column of targets is called as a rule
TAKES = ("columns", "tokenizer", "length", "image_size", "normalize", "augment")  # of Settings


class Table(ABC):
    """Columns by name, read when they are asked for."""

    names: Sequence[str]
    classes: Mapping[str, Sequence[str]] = {}  # the names of classes, of columns that are class numbers already

    @abstractmethod
    def __len__(self) -> int:
        """The number of rows."""

    @abstractmethod
    def is_text(self, name: str) -> bool:
        """Whether a column is text."""

    @abstractmethod
    def texts(self, name: str) -> Sequence[str]:
        """A column of text."""

    @abstractmethod
    def numbers(self, name: str, whole: bool) -> Array:
        """A column of numbers, or of lists of them, the same shape for every row; `whole` ones, if there is a way."""

    @abstractmethod
    def place(self, row: int) -> str:
        """Where a row is, for messages: "line 7"."""

    def is_picture(self, name: str) -> bool:
        """Whether a column has images, as bytes of files."""
        return False

    def pictures(self, name: str) -> Any:
        """A column of images, as images.py takes them."""
        raise NotImplementedError


def from_table(table: Table, request: Request) -> Source:
    """What the model and its loss take, of a table."""
    if not len(table):
        raise request.error("has no examples")
    if request.fields is None:
        return _everything(table, request)
    if request.settings.tokenizer is not None:
        from onnxgrad.sources.text import from_texts

        return from_texts(table, request)
    ids = [f.name for f in request.inputs if "input_ids" in f.name and f.name not in table.names]
    if ids and any(map(table.is_text, table.names)):
        raise request.error(
            f"is text, and the model takes token ids, {ids[0]!r}: name its tokenizer.json with "
            f"{request.option('tokenizer')}"
        )
    if any(table.is_picture(name) for name in table.names):
        from onnxgrad.sources.images import from_pictures

        return from_pictures(table, request)
    return Assembly(table, request).source(request.inputs)


def _everything(table: Table, request: Request) -> Source:
    assembly = Assembly(table, request)
    names = [n for n in table.names if not table.is_picture(n)]
    arrays = {n: assembly.numbers(n, Field(n)) for n in names}
    for name, columns in request.settings.columns.items():
        arrays[name] = assembly.join(Field(name), assembly.matching(name, columns))
    return Arrays(arrays, assembly.classes, assembly.remarks)


class Assembly:
    """Which columns an input is made of: those that are named, one of its own name, or all that are left."""

    def __init__(self, table: Table, request: Request) -> None:
        self._table, self._request = table, request
        known = [*_names(request.fields or ()), "text"]
        unknown = next((n for n in request.settings.columns if request.fields is not None and n not in known), None)
        if unknown is not None:
            raise ValueError(
                f"{request.subject}: columns names {unknown!r}, which is not an input of the model or the loss"
                f"{suggestion(unknown, known[:-1])}"
            )
        self.classes: dict[str, Sequence[str]] = {}
        self.remarks: list[str] = []

    def source(self, inputs: Sequence[Field]) -> Source:
        """The inputs, and all targets, as arrays in memory."""
        targets = self._request.targets
        made_of = self.choose([*inputs, *targets])
        arrays = {f.name: self.join(f, made_of[f.name]) for f in (*inputs, *targets)}
        self.say_unused(made_of)
        return Arrays(arrays, self.classes, self.remarks)

    def say_unused(self, made_of: Mapping[str, Sequence[str]], others: Sequence[str] = ()) -> None:
        """A remark on the columns that nothing is made of."""
        used = {*others, *(c for columns in made_of.values() for c in columns)}
        unused = [n for n in self._table.names if n not in used]
        if unused:
            self.remarks.append(f"{self._request.path.name}: not used: {listed(unused)}")

    def choose(self, fields: Sequence[Field], taken: Sequence[str] = ()) -> dict[str, Sequence[str]]:
        """The columns that each is made of; those in `taken` are for something else."""
        request, names = self._request, self._table.names
        made_of: dict[str, Sequence[str]] = {
            n: self.matching(n, patterns) for n, patterns in request.settings.columns.items() if n in _names(fields)
        }
        made_of |= {f.name: [f.name] for f in fields if f.name not in made_of and f.name in names}
        used = {*taken, *(c for columns in made_of.values() for c in columns)}
        free = [n for n in names if n not in used]
        missing = [f for f in fields if f.name not in made_of]
        needed = sum(f.numbers or 0 for f in missing if not f.is_target)
        for target in [f for f in missing if f.is_target]:
            # A target whose name somebody chose is a column of that name.
            column = self._label(free, len(missing) == 1, needed) if target.name.lower() in LABELS else None
            if column is None:
                there = suggestion(target.name, names)
                way_out = (
                    ""
                    if "did you mean" in there
                    else f"; {request.in_columns(target.name, names[-1])} names the column"
                )
                raise request.lacks(target.name, there + way_out)
            made_of[target.name] = [column]
            free.remove(column)
            missing.remove(target)
            self.remarks.append(f"{request.path.name}: {target.name!r} is the column {column!r}")
        if missing:
            made_of[missing[0].name] = self._rest(missing, free)
        return made_of

    def _label(self, free: Sequence[str], is_alone: bool, needed: int) -> str | None:
        """The column of a target under another name: one that is called as targets are, or the last."""
        called = [n for n in free if n.lower() in LABELS]
        if len(called) == 1:
            return called[0]
        if len(free) == 1 if is_alone else len(free) > 1 and needed in (0, len(free) - 1):
            return free[-1]
        return None

    def _rest(self, missing: Sequence[Field], free: Sequence[str]) -> Sequence[str]:
        """All columns that are left, for the one input that has none of its name."""
        first, request = missing[0], self._request
        if not free:
            raise request.lacks(first.name, suggestion(first.name, self._table.names))
        if len(missing) > 1:
            say = f"{request.in_columns(first.name, f'{free[0]},…')} names the columns of an input"
            raise request.lacks(first.name, f", and {missing[1].name!r}; {say}")
        if first.numbers is not None and len(free) != first.numbers and not self._fits_list(first, free):
            close = suggestion(first.name, free)
            if len(free) < first.numbers and "did you mean" in close:
                raise request.lacks(first.name, close)
            way_out = f"; {request.in_columns(first.name, f'{free[0]},…')} selects some" * (len(free) > first.numbers)
            raise request.error(
                f"has {len(free)} column{'s' * (len(free) > 1)} for {first.name!r}, which takes {first.numbers}: "
                f"{listed(free)}{way_out}"
            )
        return free

    def _fits_list(self, field: Field, free: Sequence[str]) -> bool:
        """Whether it is a single column that has all the numbers in each of its cells."""
        if len(free) != 1 or self._table.is_text(free[0]):
            return False
        return self._table.numbers(free[0], False)[:1].size == field.numbers

    def matching(self, name: str, patterns: Sequence[str]) -> list[str]:
        """The columns that are named, in the order of the names, and of a pattern in that of the file."""
        names, found = self._table.names, []
        for pattern in patterns:
            hits = [pattern] if pattern in names else [n for n in names if fnmatchcase(n, pattern)]
            if not hits:
                raise self._request.error(f"lacks {pattern!r}, a column for {name!r}{suggestion(pattern, names)}")
            found += hits
        return found

    def join(self, field: Field, columns: Sequence[str]) -> Array:
        """One array of several columns, in the shape that the model takes."""
        parts = [self.numbers(column, field) for column in columns]
        if len(parts) == 1 and (field.shape is None or parts[0].ndim == len(field.shape) + 1):
            return self._typed(field, parts[0])
        deep = next((c for c, a in zip(columns, parts, strict=True) if a.ndim > 1 and len(parts) > 1), None)
        if deep is not None:
            raise self._request.error(f"has lists in {deep!r}, which cannot be joined with other columns")
        whole = parts[0] if len(parts) == 1 else np.stack(parts, 1)
        numbers = int(np.prod(whole.shape[1:], dtype=np.int64))
        if field.shape is not None:
            if field.shape.count(None) > (field.numbers is None) or (field.numbers or numbers) != numbers:
                shape = [d if d is not None else "any" for d in field.shape]
                raise self._request.error(
                    f"has {numbers} number{'s' * (numbers > 1)} for {field.name!r} in each example, expected {shape}"
                )
            whole = whole.reshape(len(whole), *(-1 if d is None else d for d in field.shape))
        return self._typed(field, whole)

    def _typed(self, field: Field, array: Array) -> Array:
        """In the model's type, where that loses nothing but precision."""
        if field.dtype is None or array.dtype == field.dtype or array.dtype.kind == field.dtype.kind == "f":
            return array
        if field.dtype.kind == "b" and array.dtype.kind in "iu" and ((array == 0) | (array == 1)).all():
            return array.astype(bool)
        return array.astype(field.dtype) if np.can_cast(array.dtype, field.dtype, "same_kind") else array

    def numbers(self, column: str, field: Field) -> Array:
        """A column as numbers; text becomes class numbers."""
        if not self._table.is_text(column):
            if field.is_target and column in self._table.classes:
                self.classes[field.name] = self._table.classes[column]
            return self._table.numbers(column, field.is_whole)
        texts = self._table.texts(column)
        if field.is_target and field.dtype is not None and field.dtype.kind == "f" and len(set(texts)) > 2:
            raise self._request.error(
                f"has text in the column {column!r}, {texts[0]!r} in {self._table.place(0)}, expected numbers for "
                f"{field.name!r}"
            )
        key = field.name if field.is_target else column
        known = self._request.classes.get(key)
        names = list(known) if known is not None else in_order(texts)
        if known is None:
            self.remarks.append(f"{self._request.path.name}: {classes_told(column, names)}")
        self.classes[key] = names
        return numbered(self._request, self._table, column, texts, names)


def numbered(
    request: Request, table: Table, column: str, texts: Iterable[str], names: Sequence[str]
) -> Array:  # fmt: skip
    """The class numbers of texts."""
    number = {name: k for k, name in enumerate(names)}
    found = np.empty(len(table), np.int64)
    for row, text in enumerate(texts):
        k = number.get(text)
        if k is None:
            raise request.error(
                f"has {text!r} in the column {column!r} in {table.place(row)}, which is not one of the classes: "
                f"{listed(names)}"
            )
        found[row] = k
    return found


def in_order(names: Iterable[str]) -> list[str]:
    """The names of classes, sorted; numbers by their size, so that 10 comes after 9."""
    found = set(names)
    return sorted(found, key=int if all(n.isdecimal() for n in found) else None)


def classes_told(column: str, names: Sequence[str]) -> str:
    """A remark on text that became classes."""
    shown = [f"{k} {name}" for k, name in enumerate(names)]
    more = f", … {shown[-1]}" if len(shown) > 6 else ""
    return f"{column!r} as {len(names)} classes: {', '.join(shown[:5] if more else shown)}{more}"


def _names(fields: Sequence[Field]) -> list[str]:
    return [f.name for f in fields]
