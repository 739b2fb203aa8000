"""The checkpoint file of onnxruntime-training, version 2: a flatbuffer with the identifier ODTC, read and written.

Weights and momenta that are too much for one flatbuffer are in a second file beside it, whose name ends in .data.
"""

import contextlib
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.files import data_file, expect_place, followed, replaced
from onnxgrad.tensor_types import Array

IDENTIFIER, VERSION = b"ODTC", 2
READABLE = (1, VERSION)  # version 1 had no nominal checkpoints, and is the same otherwise
LARGE = 1800 << 20  # bytes of weights that go into a file of their own: offsets in a flatbuffer end at 2 GB
SMALL = 64  # bytes of a tensor that stays in the flatbuffer
WORD = 4  # bytes of an offset or a length


@dataclass
class Parameter:
    """A weight; one of a nominal checkpoint has a name and a type alone."""

    data: Array | None
    requires_grad: bool
    shape: tuple[int, ...] = ()
    dtype: Any = np.float32

    def __post_init__(self) -> None:
        if self.data is not None:
            self.shape, self.dtype = self.data.shape, self.data.dtype


@dataclass
class OptimizerGroup:
    """What an optimizer remembers: updates made, and for each parameter momenta by their names, momentum0 and so on."""

    step: int = 0
    initial_lr: float = 1e-3
    momenta: dict[str, dict[str, Array]] = field(default_factory=dict)
    learning_rate: float = float(np.float32(1e-3))  # of the next update; no file has it, so all begin with this one


@dataclass
class Checkpoint:
    """All of a file; `nominal`: without the values of the parameters; `apart`: with weights in a second file."""

    parameters: dict[str, Parameter] = field(default_factory=dict)
    properties: dict[str, int | float | str] = field(default_factory=dict)
    groups: dict[str, OptimizerGroup] = field(default_factory=dict)
    nominal: bool = False
    apart: bool = False


class _DamagedError(Exception):
    """What is wrong with the bytes of a file."""


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Reads a file that onnxruntime-training or write_checkpoint wrote; parameters in the order that they have there.

    A file that is none, or is damaged, raises one sentence.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{str(path)!r} does not exist, expected a checkpoint of onnxruntime-training")
    data = path.read_bytes()
    if data[WORD : 2 * WORD] != IDENTIFIER:
        raise ValueError(f"{str(path)!r} is not a checkpoint of onnxruntime-training: it lacks the identifier ODTC")
    try:
        return _checkpoint(_Table.root(data), path)
    except _DamagedError as error:
        raise ValueError(f"{str(path)!r} is damaged: {error}; use another checkpoint") from None


def write_checkpoint(path: str | Path, checkpoint: Checkpoint, large: int = LARGE) -> None:
    """Writes a file that onnxruntime-training 1.19.2 reads; it is there, or replaced, only once it is complete.

    Weights and momenta of at least `large` bytes in all go into a second file, which is complete before the first.
    """
    path = followed(Path(path))
    expect_place(path)
    momenta = (a for group in checkpoint.groups.values() for of_one in group.momenta.values() for a in of_one.values())
    arrays = [*(p.data for p in checkpoint.parameters.values() if p.data is not None), *momenta]
    apart = checkpoint.apart or sum(a.nbytes for a in arrays) >= large
    try:
        with contextlib.ExitStack() as stack:
            # The last to be opened takes its name first: whoever finds the new checkpoint finds its data.
            draft = stack.enter_context(replaced(path))
            store = stack.enter_context(_DataFile.opened(data_file(path))) if apart else None
            draft.write_bytes(_Writer(store).checkpoint(checkpoint))
    except OSError as error:
        raise OSError(f"{str(path)!r} cannot be written: {error}") from None


# Reading: a table begins with the distance back to its vtable, which has the distance of each field from the table.


class _Table:
    """A table of a flatbuffer; nothing is read that is not within the bytes."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data, self._at = data, at
        self._vtable = at - self._number("<i", at)
        self._size = self._number("<H", self._vtable)

    @classmethod
    def root(cls, data: bytes) -> "_Table":
        return cls(data, cls._number_in(data, "<I", 0))

    @staticmethod
    def _number_in(data: bytes, kind: str, at: int) -> Any:
        if not 0 <= at <= len(data) - struct.calcsize(kind):
            raise _DamagedError("it ends too early, or points beyond its end")
        return struct.unpack_from(kind, data, at)[0]

    def _number(self, kind: str, at: int) -> Any:
        return self._number_in(self._data, kind, at)

    def _place(self, slot: int) -> int | None:
        """Where a field is; None if the table does not have it."""
        entry = 4 + 2 * slot  # behind the sizes of vtable and table
        distance = self._number("<H", self._vtable + entry) if entry + 2 <= self._size else 0
        return self._at + distance if distance else None

    def number(self, slot: int, kind: str, default: float) -> Any:
        """A field that is a number, by its letter in struct."""
        place = self._place(slot)
        return default if place is None else self._number(f"<{kind}", place)

    def has(self, slot: int) -> bool:
        return self._place(slot) is not None

    def _target(self, place: int) -> int:
        return place + int(self._number("<I", place))

    def vector(self, slot: int, itemsize: int) -> tuple[int, int]:
        """Where the elements of a vector begin, and how many there are."""
        place = self._place(slot)
        if place is None:
            return 0, 0
        at = self._target(place)
        count = self._number("<I", at)
        if at + WORD + count * itemsize > len(self._data):
            raise _DamagedError("it ends too early, or points beyond its end")
        return at + WORD, count

    def bytes(self, slot: int) -> memoryview:
        at, count = self.vector(slot, 1)
        return memoryview(self._data)[at : at + count]

    def text(self, slot: int) -> str:
        try:
            return self.bytes(slot).tobytes().decode()
        except UnicodeDecodeError:
            raise _DamagedError("a name in it is not text") from None

    def table(self, slot: int) -> "_Table | None":
        place = self._place(slot)
        return None if place is None else _Table(self._data, self._target(place))

    def tables(self, slot: int) -> Iterator["_Table"]:
        at, count = self.vector(slot, WORD)
        for k in range(count):
            yield _Table(self._data, self._target(at + k * WORD))


def _checkpoint(root: _Table, path: Path) -> Checkpoint:
    version = root.number(0, "i", 0)
    if version not in READABLE:
        raise ValueError(
            f"{str(path)!r} is a checkpoint of version {version}, expected {' or '.join(map(str, READABLE))}"
        )
    found = Checkpoint()
    read: Callable[[_Table, int], Any] = _inline
    module = root.table(1)
    if module is not None:
        found.nominal, found.apart = bool(module.number(2, "B", 0)), bool(module.number(3, "B", 0))
        if found.apart:
            read = _reader_of(data_file(path))
        for slot, requires_grad in ((0, True), (1, False)):
            for name, tensor in _named(module.tables(slot), found.parameters):
                dtype = _dtype(name, tensor)
                array = None if found.nominal else _array(name, tensor, read)
                found.parameters[name] = Parameter(array, requires_grad, (), dtype)
    for name, group in _named(root.tables(2), found.groups):
        momenta: dict[str, dict[str, Array]] = {}
        for parameter, state in _named(group.tables(3), momenta):
            of_one = momenta[parameter] = {}
            for momentum, tensor in _named(state.tables(1), of_one):
                of_one[momentum] = _array(momentum, tensor, read)
        found.groups[name] = OptimizerGroup(group.number(1, "q", 0), group.number(2, "f", 0.0), momenta)
    bag = root.table(3)
    if bag is not None:
        for slot, kind in ((0, "q"), (1, "f")):
            for name, entry in _named(bag.tables(slot), found.properties):
                found.properties[name] = entry.number(1, kind, 0)
        for name, entry in _named(bag.tables(2), found.properties):
            found.properties[name] = entry.text(1)
    return found


def _named(tables: Iterator[_Table], known: dict[str, Any]) -> Iterator[tuple[str, _Table]]:
    """Tables with their names, which are their first field; a name that is known already is a damage."""
    for table in tables:
        name = table.text(0)
        if name in known:
            raise _DamagedError(f"it has {name!r} twice")
        yield name, table


def _dtype(name: str, tensor: _Table) -> Any:
    number = tensor.number(3, "i", 0)
    try:
        kind = ir.DataType(number)
        dtype = kind.numpy()
    except (ValueError, TypeError):
        raise _DamagedError(f"{name!r} is of the unknown type {number}") from None
    if kind is ir.DataType.STRING or kind.bitwidth < 8:
        raise _DamagedError(f"{name!r} is of the type {kind.name}, which is not one of weights")
    return dtype


def _array(name: str, tensor: _Table, read: Callable[[_Table, int], Any]) -> Array:
    dtype = _dtype(name, tensor)
    at, rank = tensor.vector(2, 8)
    shape = [tensor._number("<q", at + 8 * k) for k in range(rank)]
    if min(shape, default=0) < 0:
        raise _DamagedError(f"{name!r} has the shape {shape}")
    size = math.prod(shape) * dtype.itemsize
    found = read(tensor, size)
    if len(found) != size:
        raise _DamagedError(f"{name!r} has {len(found)} bytes, expected {size} of the shape {shape}")
    return np.frombuffer(found, dtype).reshape(shape).copy()


def _inline(tensor: _Table, size: int) -> memoryview:
    return tensor.bytes(4)


def _reader_of(path: Path) -> Callable[[_Table, int], Any]:
    if not path.is_file():
        raise FileNotFoundError(f"{str(path)!r} does not exist, in which the checkpoint beside it has its weights")
    stored = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.zeros(0, np.uint8)

    def read(tensor: _Table, size: int) -> Any:
        offset = tensor.number(6, "q", -1)
        return _inline(tensor, size) if offset < 0 else stored[offset : offset + size]

    return read


# Writing: children before their parents, as a flatbuffer grows from its end.


class _DataFile:
    """The second file; tensors one after the other, each where its numbers may begin."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")

    @classmethod
    @contextlib.contextmanager
    def opened(cls, path: Path) -> Iterator["_DataFile"]:
        """Takes the place of `path` once all is written."""
        with replaced(path) as draft:
            store = cls(draft)
            try:
                yield store
            finally:
                store._file.close()

    def add(self, array: Array) -> int:
        """Writes an array; returns where."""
        self._file.write(bytes(-self._file.tell() % max(WORD, array.dtype.itemsize)))
        at = self._file.tell()
        self._file.write(_raw(array).data)
        return at


class _Writer:
    """Writes tables into a flatbuffer; `store` takes the tensors that are not small."""

    def __init__(self, store: _DataFile | None) -> None:
        import flatbuffers  # onnxruntime brings it

        self._builder, self._store = flatbuffers.Builder(1024), store

    def checkpoint(self, given: Checkpoint) -> memoryview:
        """All of it, as the bytes of a file."""
        module = self._module(given) if given.parameters else None
        groups = self._vector([self._group(name, group) for name, group in sorted(given.groups.items())])
        bag = self._bag(given.properties) if given.properties else None
        root = self._table(("Int32", VERSION, 0), _at(module), _at(groups), _at(bag))
        self._builder.Finish(root, file_identifier=IDENTIFIER)
        return memoryview(self._builder.Bytes)[self._builder.Head() :]

    def _module(self, given: Checkpoint) -> int:
        trained, frozen = (
            self._vector(
                [self._parameter(n, p) for n, p in given.parameters.items() if p.requires_grad is requires_grad]
            )
            for requires_grad in (True, False)
        )
        nominal, apart = ("Bool", given.nominal, False), ("Bool", self._store is not None, False)
        return self._table(_at(trained), _at(frozen), nominal, apart)

    def _parameter(self, name: str, parameter: Parameter) -> int:
        # onnxruntime-training wants a tensor even where there is no data: an empty one of rank 1 has none.
        return self._tensor(name, np.zeros(0, parameter.dtype) if parameter.data is None else parameter.data)

    def _group(self, name: str, group: OptimizerGroup) -> int:
        states = []
        for parameter, momenta in sorted(group.momenta.items()):
            tensors = self._vector([self._tensor(n, a) for n, a in sorted(momenta.items())])
            states.append(self._table(_at(self._text(parameter)), _at(tensors)))
        of_all, label = self._vector(states), self._text(name)
        step, rate = ("Int64", group.step, 0), ("Float32", group.initial_lr, 0.0)
        return self._table(_at(label), step, rate, _at(of_all))

    def _bag(self, properties: dict[str, int | float | str]) -> int:
        found: dict[type, list[int]] = {int: [], float: [], str: []}
        for name, value in sorted(properties.items()):
            kind = next((k for k in (str, int) if isinstance(value, k)), float)
            label = self._text(name)
            entry = _at(self._text(str(value))) if kind is str else ("Int64" if kind is int else "Float32", value, 0)
            found[kind].append(self._table(_at(label), entry))
        return self._table(*[_at(self._vector(entries)) for entries in found.values()])

    def _tensor(self, name: str, array: Array) -> int:
        kind = ir.DataType.from_numpy(array.dtype).value
        label, dims = self._text(name), self._builder.CreateNumpyVector(np.array(array.shape, np.int64))
        if self._store is not None and array.nbytes >= SMALL:
            data, offset = None, self._store.add(array)
        else:
            data, offset = self._builder.CreateNumpyVector(_raw(array)), -1
        return self._table(_at(label), None, _at(dims), ("Int32", kind, 0), _at(data), None, ("Int64", offset, -1))

    def _text(self, text: str) -> int:
        return int(self._builder.CreateString(text))

    def _vector(self, offsets: Sequence[int]) -> int:
        self._builder.StartVector(WORD, len(offsets), WORD)
        for offset in reversed(offsets):
            self._builder.PrependUOffsetTRelative(offset)
        return int(self._builder.EndVector())

    def _table(self, *fields: tuple[str, Any, Any] | None) -> int:
        """Each field is (type in the builder's words, value, default); None has a place and no value."""
        self._builder.StartObject(len(fields))
        for slot, entry in enumerate(fields):
            if entry is not None:
                kind, value, default = entry
                getattr(self._builder, f"Prepend{kind}Slot")(slot, value, default)
        return int(self._builder.EndObject())


def _at(offset: int | None) -> tuple[str, int, int] | None:
    return None if offset is None else ("UOffsetTRelative", offset, 0)


def _raw(array: Array) -> Array:
    """The bytes of an array."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
