"""Batches: arrays of examples cut into shuffled batches, and the check of a batch against the inputs of a session."""

import itertools
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from onnxgrad.interop import is_foreign, is_on_gpu, to_numpy
from onnxgrad.tensor_types import Array

Batch = Mapping[str, Any]
NUMPY_TYPES = {
    "tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(float16)": np.float16, "tensor(int64)": np.int64,
    "tensor(int32)": np.int32, "tensor(int16)": np.int16, "tensor(int8)": np.int8, "tensor(uint8)": np.uint8,
    "tensor(uint16)": np.uint16, "tensor(uint32)": np.uint32, "tensor(uint64)": np.uint64, "tensor(bool)": np.bool_,
    "tensor(bfloat16)": ml_dtypes.bfloat16,
}  # fmt: skip


class BatchChecker:
    """Converts a batch to the arrays that a session takes, or raises one sentence that says what is wrong with it."""

    def __init__(self, inputs: Sequence[Any], on_gpu: bool = False) -> None:
        """`inputs` are the session's descriptions of its inputs; with `on_gpu` tensors on a GPU are taken as well."""
        self._on_gpu = on_gpu
        self._expected = {i.name: (_numpy_type(i), list(i.shape)) for i in inputs}
        # Arrays that fit take a short path: a step leaves the caches full of numbers, so every line of Python is slow.
        self._fixed = {
            name: (dtype, tuple(shape))
            for name, (dtype, shape) in self._expected.items()
            if all(isinstance(d, int) for d in shape)
        }

    @property
    def dims(self) -> dict[str, Sequence[Any]]:
        """The declared dimensions of each input."""
        return {name: shape for name, (_, shape) in self._expected.items()}

    def __call__(self, batch: Batch) -> dict[str, Any]:
        if not isinstance(batch, Mapping):
            raise TypeError(f"a batch is a {type(batch).__name__}, expected a dict of arrays by input name")
        if batch.keys() != self._expected.keys():
            missing = [n for n in self._expected if n not in batch]
            extra = [n for n in batch if n not in self._expected]
            what = f"lacks {missing[0]!r}" if missing else f"has {extra[0]!r}"
            raise ValueError(f"the batch {what}, expected {', '.join(self._expected)}")
        named: dict[str, tuple[int, str]] = {}
        return {name: self._checked(name, batch[name], named) for name in self._expected}

    def one(self, name: str, given: Any) -> Any:
        """One array of a batch."""
        return self._checked(name, given, {})

    def _checked(self, name: str, given: Any, named: dict[str, tuple[int, str]]) -> Any:
        if given.__class__ is np.ndarray and (given.dtype, given.shape) == self._fixed.get(name) and given.flags.carray:
            return given
        dtype, _ = self._expected[name]
        if is_foreign(given) and is_on_gpu(given):
            return self._checked_on_gpu(name, given, named)
        try:
            array = to_numpy(given) if is_foreign(given) else np.asarray(given)
        except ValueError:  # NumPy's error for lists of different lengths
            raise TypeError(f"the batch's {name} holds lists of different lengths, expected {dtype}") from None
        if array.dtype != dtype and not np.can_cast(array.dtype, dtype, "same_kind"):
            raise TypeError(f"the batch's {name} holds {array.dtype}, expected {dtype}")
        self._check_shape(name, array.shape, named)
        return np.ascontiguousarray(array, dtype).reshape(array.shape)

    def _checked_on_gpu(self, name: str, tensor: Any, named: dict[str, tuple[int, str]]) -> Any:
        """A torch tensor, which stays on the GPU."""
        dtype, _ = self._expected[name]
        kind = str(tensor.dtype).removeprefix("torch.")
        if not self._on_gpu or not hasattr(tensor, "data_ptr"):
            raise TypeError(f"the batch's {name} is a {type(tensor).__name__} on a GPU, expected a NumPy array")
        if kind != dtype.name:
            raise TypeError(f"the batch's {name} holds {kind}, expected {dtype}")
        self._check_shape(name, tuple(tensor.shape), named)
        return tensor.contiguous()

    def _check_shape(self, name: str, given: tuple[int, ...], named: dict[str, tuple[int, str]]) -> None:
        _, shape = self._expected[name]
        if len(given) != len(shape):
            raise ValueError(f"the batch's {name} has shape {list(given)}, expected {len(shape)} dimensions")
        for have, want in zip(given, shape, strict=True):
            known = want if isinstance(want, int) else None
            if isinstance(want, str):
                known, source = named.setdefault(want, (have, name))
                if known != have:
                    raise ValueError(f"the batch's {name} has shape {list(given)}, but {want} is {known} in {source}")
            if known is not None and have != known:
                expected = [d if d is not None else "any" for d in shape]
                raise ValueError(f"the batch's {name} has shape {list(given)}, expected {expected}")


def not_finite(batch: Batch) -> str | None:
    """Which input of a batch has a number that is not finite, and in which example; None if there is none."""
    for name, given in batch.items():
        array = on_host(given)
        if array.dtype.kind == "f" or array.dtype.name == "bfloat16":
            wrong = ~np.isfinite(array)
            if wrong.any():
                at = np.argwhere(wrong)[0].tolist()
                where = f"in example {at[0]}, at {at}" if at else ""
                return f"{name} is {float(array[tuple(at)])} {where}".rstrip()
    return None


def on_host(given: Any) -> Array:
    """An array of a batch as NumPy's."""
    if not is_foreign(given):
        return np.asarray(given)
    found: Array = given.detach().cpu().numpy() if is_on_gpu(given) else to_numpy(given)
    return found


def _numpy_type(described: Any) -> np.dtype[Any]:
    if described.type not in NUMPY_TYPES:
        raise TypeError(
            f"the model's input {described.name!r} is a {described.type}, which no batch can hold: give the model "
            "numbers, and encode them before it"
        )
    found: np.dtype[Any] = np.dtype(NUMPY_TYPES[described.type])
    return found


class LocalBatch(dict[str, Any]):
    """One rank's slice of a batch.

    `examples` is 0 for a rank that has none: its arrays then hold an example of another rank, which does not count.
    """

    def __init__(self, arrays: Batch, examples: int | None = None) -> None:
        super().__init__(arrays)
        self.examples = examples


def slice_of(examples: int, rank: int, size: int) -> slice:
    """One rank's examples of a batch: as many as the others have, give or take one, in their order."""
    return slice(examples * rank // size, examples * (rank + 1) // size)


class Batches:
    """Arrays of examples, cut into batches of `size`, in a new random order for each epoch.

    `data` is a dict of arrays with the examples along the first axis, the path of an .npz or .parquet file, or a
    Hugging Face `datasets.Dataset`. The order depends only on `seed` and the number of the epoch.
    """

    def __init__(self, data: Any, size: int, *, shuffle: bool = True, seed: int = 0, drop_last: bool = False) -> None:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"Batches: size is {size!r}, expected a number of examples")
        self.arrays, self.size, self.shuffle, self.seed, self.drop_last = _arrays(data), size, shuffle, seed, drop_last
        self.examples = _examples(self.arrays, "Batches")
        self.epoch = 0  # epochs begun

    def __len__(self) -> int:
        whole, rest = divmod(self.examples, self.size)
        return whole + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[dict[str, Array]]:
        return self.starting_at(0)

    @property
    def last(self) -> int:
        """How many examples the last batch has."""
        rest = self.examples % self.size
        return rest if rest and (not self.drop_last or rest == self.examples) else self.size

    def starting_at(self, first: int) -> Iterator[dict[str, Array]]:
        """One epoch, without the first batches; a subclass of yours that changes batches overrides this."""
        for chosen in itertools.islice(self._chosen(), first, None):
            yield {name: a[chosen] for name, a in self.arrays.items()}

    def slices(self, rank: int, size: int, first: int = 0) -> Iterator[Batch]:
        """One rank's slice of every batch after the first ones; the whole batch where a subclass changes batches."""
        if self.is_changed:
            yield from self.starting_at(first)
            return
        for chosen in itertools.islice(self._chosen(), first, None):
            mine = slice_of(len(chosen), rank, size)
            examples = mine.stop - mine.start
            here = chosen[mine] if examples else chosen[:1]
            yield LocalBatch({name: a[here] for name, a in self.arrays.items()}, examples)

    def round_robin(self, rank: int, size: int) -> Iterator[Batch]:
        """The batches of one rank, where each rank has every `size`-th."""
        if self.is_changed:
            yield from itertools.islice(self.starting_at(0), rank, None, size)
            return
        for chosen in itertools.islice(self._chosen(), rank, None, size):
            yield {name: a[chosen] for name, a in self.arrays.items()}

    @property
    def is_changed(self) -> bool:
        """Whether a subclass changes batches, so that only its own method can make them."""
        return type(self).starting_at is not Batches.starting_at

    def _chosen(self) -> Iterator[Array]:
        """The examples of each batch, by their numbers."""
        order = np.arange(self.examples)
        if self.shuffle:
            order = np.random.default_rng([self.seed, self.epoch]).permutation(self.examples)
        self.epoch += 1
        for k in range(len(self)):
            yield order[k * self.size : (k + 1) * self.size]


def _arrays(data: Any) -> dict[str, Array]:
    if isinstance(data, (str, Path)):
        return read_arrays(Path(data))
    if isinstance(data, Mapping):
        if not data:
            raise ValueError("Batches: data is empty, expected arrays by input name")
        return {str(name): _column(str(name), a, "Batches") for name, a in data.items()}
    if hasattr(data, "with_format") and hasattr(data, "column_names"):  # a Hugging Face dataset
        whole = data.with_format("numpy")[:]
        return {name: _column(name, whole[name], "Batches") for name in data.column_names}
    raise TypeError(
        f"Batches: data is a {type(data).__name__}, expected a dict of arrays, a path or a datasets.Dataset"
    )


def read_arrays(path: Path, subject: str = "Batches") -> dict[str, Array]:
    """The arrays of a file by name; `subject` is what errors are about."""
    if not path.is_file():
        raise FileNotFoundError(f"{subject}: {str(path)!r} does not exist, expected an .npz or .parquet file")
    if path.suffix not in (".npz", ".parquet"):
        raise ValueError(f"{subject}: {str(path)!r} ends in {path.suffix!r}, expected .npz or .parquet")
    try:
        if path.suffix == ".npz":
            columns: dict[str, Any] = dict(read_npz(path))
            dtypes = {name: array.dtype for name, array in columns.items()}
        else:
            columns, dtypes = _read_parquet(path, subject)
    except (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error) as error:  # of NumPy and pyarrow
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"{subject}: {str(path)!r} cannot be read as {path.suffix} ({reason})") from None
    arrays = {name: _column(name, values, subject).astype(dtypes[name], copy=False) for name, values in columns.items()}
    _examples(arrays, subject)
    return arrays


def read_npz(path: Path) -> dict[str, Array]:
    """The arrays of a file of numpy.savez."""
    with path.open("rb") as file:
        archive = np.load(file, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise ValueError("it holds a single array, without a name")
        columns = {}
        for name in archive.files:
            try:
                columns[name] = archive[name]
            except ValueError:  # NumPy speaks of pickle
                raise ValueError(f"{name!r} holds Python objects, expected numbers") from None
    return columns


def _read_parquet(path: Path, subject: str) -> tuple[dict[str, Any], dict[str, Any]]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise ImportError(f"{subject}: reading .parquet needs pyarrow: pip install pyarrow") from None
    table = parquet.read_table(path)
    columns, dtypes = {}, {}
    for name in table.column_names:
        column = table.column(name)
        kind = column.type
        while hasattr(kind, "value_type"):  # lists, or lists of lists
            kind = kind.value_type
        columns[name], dtypes[name] = column.to_pylist(), kind.to_pandas_dtype()
    return columns, dtypes


def _examples(arrays: Mapping[str, Array], subject: str) -> int:
    """The number of examples, the same in all arrays."""
    single = next((name for name, a in arrays.items() if a.ndim == 0), None)
    if single is not None:
        raise ValueError(f"{subject}: {single!r} is a single value, expected examples along the first dimension")
    lengths = {name: len(a) for name, a in arrays.items()}
    if len(set(lengths.values())) != 1:
        numbers = ", ".join(f"{name}: {n}" for name, n in lengths.items())
        raise ValueError(f"{subject}: the arrays have different numbers of examples ({numbers})")
    return next(iter(lengths.values()))


def _column(name: str, values: Any, subject: str) -> Array:
    try:
        array = np.asarray(values)
    except ValueError:  # NumPy's error for lists of different lengths
        array = np.empty(0, object)
    if array.dtype == object:
        raise ValueError(
            f"{subject}: the column {name!r} holds objects, lists of different lengths, or has gaps, expected numbers, "
            "the same shape for every example"
        )
    return array
