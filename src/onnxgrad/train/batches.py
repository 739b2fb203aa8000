"""Batches: arrays of examples cut into shuffled batches, and the check of a batch against the inputs of a session."""

import itertools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from onnxgrad.interop import is_foreign, is_on_gpu, to_numpy
from onnxgrad.sources.arrays import as_column, count_examples
from onnxgrad.sources.read import read_source
from onnxgrad.sources.source import Arrays, Source
from onnxgrad.sources.workers import Task, Workers
from onnxgrad.tensor_types import Array

Batch = Mapping[str, Any]
NUMPY_TYPES = {
    "tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(float16)": np.float16, "tensor(int64)": np.int64,
    "tensor(int32)": np.int32, "tensor(int16)": np.int16, "tensor(int8)": np.int8, "tensor(uint8)": np.uint8,
    "tensor(uint16)": np.uint16, "tensor(uint32)": np.uint32, "tensor(uint64)": np.uint64, "tensor(bool)": np.bool_,
    "tensor(bfloat16)": ml_dtypes.bfloat16,
}  # fmt: skip


class Advice(NamedTuple):
    """What to do about an array of a batch that is wrong: the ends of sentences."""

    type: str = ""
    shape: str = ""


NO_ADVICE = Advice()


class BatchChecker:
    """Converts a batch to the arrays that a session takes, or raises one sentence that says what is wrong with it."""

    def __init__(self, inputs: Sequence[Any], on_gpu: bool = False, advice: Mapping[str, Advice] | None = None) -> None:
        """`inputs` are the session's descriptions of its inputs; with `on_gpu` tensors on a GPU are taken as well.

        `advice` is by name what to do about a wrong array.
        """
        self._on_gpu, self._advice = on_gpu, advice or {}
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
            advice = self._advice.get(name, NO_ADVICE).type
            raise TypeError(f"the batch's {name} holds {array.dtype}, expected {dtype}{advice}")
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
        (_, shape), advice = self._expected[name], self._advice.get(name, NO_ADVICE).shape
        if len(given) != len(shape):
            if len(given) == len(shape) + 1 and given[-1] == 1:
                advice = "; leave out its last one, of size 1"
            raise ValueError(f"the batch's {name} has shape {list(given)}, expected {len(shape)} dimensions{advice}")
        for have, want in zip(given, shape, strict=True):
            known = want if isinstance(want, int) else None
            if isinstance(want, str):
                known, source = named.setdefault(want, (have, name))
                if known != have:
                    raise ValueError(
                        f"the batch's {name} has shape {list(given)}, but {want} is {known} in {source}{advice}"
                    )
            if known is not None and have != known:
                expected = [d if d is not None else "any" for d in shape]
                raise ValueError(f"the batch's {name} has shape {list(given)}, expected {expected}{advice}")


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
            f"the model's input {described.name!r} is a {described.type}, which no batch can hold: train the part of "
            "the model behind its encoding, which onnxgrad.cut takes, and put both together with onnxgrad.join"
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
    """Splits examples into batches of `size`, in a new random order for each epoch.

    - `data`: a dict of arrays with the examples along the first axis, a source from `onnxgrad.sources.read`, the path
      of a file or folder that it reads, or a Hugging Face `datasets.Dataset`.
    - `seed`: the order, and random augmentations, depend only on it and the number of the epoch.
    - `drop_last`: drops a last batch that is smaller.
    - `workers`: the number of processes that make batches in the background; the batches do not depend on it.
    """

    def __init__(
        self, data: Any, size: int, *, shuffle: bool = True, seed: int = 0, drop_last: bool = False, workers: int = 0
    ) -> None:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"Batches: size is {size!r}, expected a number of examples")
        if isinstance(workers, bool) or not isinstance(workers, int) or workers < 0:
            raise ValueError(f"Batches: workers is {workers!r}, expected a number of processes")
        self.source, self.size, self.shuffle, self.seed, self.drop_last = _source(data), size, shuffle, seed, drop_last
        self.examples = len(self.source)
        self.epoch = 0  # epochs begun
        self.workers = 0 if self.source.is_ready else workers
        self._idle: list[Workers] = []  # those of an iterator that has come to its end, for the next one

    @property
    def arrays(self) -> dict[str, Array]:
        """The arrays that hold all examples, where there are any."""
        if not isinstance(self.source, Arrays):
            raise TypeError(f"Batches: a {type(self.source).__name__} has no arrays of all examples")
        return self.source.arrays

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
        yield from self._taken(itertools.islice(self._tasks(), first, None))

    def slices(self, rank: int, size: int, first: int = 0) -> Iterator[Batch]:
        """One rank's slice of every batch after the first ones; the whole batch where a subclass changes batches."""
        if self.is_changed:
            yield from self.starting_at(first)
            return
        counts: deque[int] = deque()  # of the batches under way
        rest = itertools.islice(self._tasks(), first, None)
        for batch in self._taken(_sliced(rest, rank, size, counts)):
            yield LocalBatch(batch, counts.popleft())

    def round_robin(self, rank: int, size: int) -> Iterator[Batch]:
        """The batches of one rank, where each rank has every `size`-th."""
        if self.is_changed:
            yield from itertools.islice(self.starting_at(0), rank, None, size)
            return
        yield from self._taken(itertools.islice(self._tasks(), rank, None, size))

    @property
    def is_changed(self) -> bool:
        """Whether a subclass changes batches, so that only its own method can make them."""
        return type(self).starting_at is not Batches.starting_at

    def _tasks(self) -> Iterator[Task]:
        """The examples of each batch, by their numbers, and what is random in them."""
        order, seed = np.arange(self.examples), (self.seed, self.epoch)
        if self.shuffle:
            order = np.random.default_rng(seed).permutation(self.examples)
        self.epoch += 1
        for k in range(len(self)):
            yield order[k * self.size : (k + 1) * self.size], seed

    def _taken(self, tasks: Iterator[Task]) -> Iterator[dict[str, Array]]:
        """The batches of these examples."""
        if not self.workers:
            for examples, seed in tasks:
                yield self.source.take(examples, seed)
            return
        workers = self._idle.pop() if self._idle else Workers(self.source, self.workers)
        yield from workers.take(tasks)
        self._idle.append(workers)


def _sliced(tasks: Iterator[Task], rank: int, size: int, counts: deque[int]) -> Iterator[Task]:
    """One rank's examples of each batch, and how many they are; of a rank that has none, one that does not count."""
    for examples, seed in tasks:
        mine = slice_of(len(examples), rank, size)
        counts.append(mine.stop - mine.start)
        yield examples[mine] if counts[-1] else examples[:1], seed


def _source(data: Any) -> Source:
    if isinstance(data, Source):
        return data
    if isinstance(data, (str, Path)):
        return read_source(Path(data), "Batches")
    if isinstance(data, Mapping):
        if not data:
            raise ValueError("Batches: data is empty, expected arrays by input name")
        return _in_memory({str(name): a for name, a in data.items()})
    if hasattr(data, "with_format") and hasattr(data, "column_names"):  # a Hugging Face dataset
        whole = data.with_format("numpy")[:]
        return _in_memory({name: whole[name] for name in data.column_names})
    raise TypeError(
        f"Batches: data is a {type(data).__name__}, expected a dict of arrays, a path, a source of onnxgrad.sources or "
        "a datasets.Dataset"
    )


def _in_memory(columns: Mapping[str, Any]) -> Source:
    arrays = {name: as_column(name, values, "Batches") for name, values in columns.items()}
    count_examples(arrays, "Batches")
    return Arrays(arrays)
