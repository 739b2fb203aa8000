"""evaluate(): loss and metrics of batches, without training on them; each rank evaluates some of them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from onnxgrad.tensor_types import Array
from onnxgrad.train import metrics as kinds
from onnxgrad.train.batches import Batches, LocalBatch
from onnxgrad.train.devices import Device
from onnxgrad.train.distributed.ranks import SingleProcess, on_every_rank
from onnxgrad.train.distributed.sharding import examples_of
from onnxgrad.train.graphs import EvaluationGraph
from onnxgrad.train.metrics import Counts
from onnxgrad.train.session import Session

Metric = Callable[[Mapping[str, Array], Mapping[str, Any]], Any]


def expect_evaluable(caller: str, batches: Any, metrics: Any, name: str = "batches") -> None:
    """Raises one sentence for what is easily given instead of a list of batches, or of metrics by name."""
    if isinstance(batches, Mapping):
        raise TypeError(f"{caller}: {name} is a dict, expected a list of batches or onnxgrad.Batches(data, size)")
    if metrics is None:
        return
    if not isinstance(metrics, Mapping):
        raise TypeError(f"{caller}: metrics is a {type(metrics).__name__}, expected a dict of metrics by name")
    for key, metric in metrics.items():
        if isinstance(metric, type) or not callable(metric):
            raise TypeError(
                f"{caller}: metrics[{key!r}] is {metric!r}, expected one of onnxgrad.metrics or a function of outputs "
                "and batch"
            )


class _MeanOfBatches(kinds.Metric):
    """The mean of numbers that are known of batches only, weighted by their examples."""

    def result(self, counts: Counts) -> float:
        return float(counts["total"] / counts["examples"])


MEAN = _MeanOfBatches("")


class Measured(NamedTuple):
    """The counts of a metric: those of one batch, or of all up to it."""

    number: int  # of the batch
    counts: Counts


class Evaluation:
    """Evaluates a model in inference mode.

    One rank evaluates all of a batch, and the results are summed in the order of the batches: whatever a metric does
    with a batch, the result is that of a single process.
    """

    def __init__(
        self,
        graph: EvaluationGraph,
        open_session: Callable[[], Session],
        device: Device,
        targets: Sequence[str],
        ranks: SingleProcess,
        skips: Callable[[Mapping[str, Any]], bool],
    ) -> None:
        """`skips` says whether a batch is left out, and may change what runs it."""
        self.use(graph, open_session)
        self._device, self._targets, self._ranks, self._skips = device, targets, ranks, skips

    def use(self, graph: EvaluationGraph, open_session: Callable[[], Session]) -> None:
        """From now on another graph and session."""
        self._graph, self._open_session = graph, open_session
        self._session: Session | None = None

    def open(self) -> Session:
        """The session, made when it is first needed: onnxruntime takes its time for a large one."""
        if self._session is None:
            self._session = self._open_session()
        return self._session

    def __call__(self, batches: Iterable[Mapping[str, Any]], metrics: Mapping[str, Metric]) -> dict[str, Any]:
        """The loss, and the results of the metrics."""
        merging = {"loss": MEAN, **{n: m if isinstance(m, kinds.Metric) else MEAN for n, m in metrics.items()}}
        mine: dict[str, list[Measured]] = {name: [] for name in merging}
        error, skipped = None, False
        with self._ranks.together():
            try:
                for number, batch in self._round_robin(batches):
                    if self._skips(batch):
                        skipped = True
                        continue
                    for name, counts in self._measured(batch, metrics).items():
                        _keep(mine[name], Measured(number, counts), merging[name])
            except Exception as problem:  # all ranks raise it, once all are done
                error = problem
            of_all = self._ranks.all_gather(mine, error)
        if not any(theirs["loss"] for theirs in of_all):
            what = "batches of the size that the model takes" if skipped else "examples"
            raise on_every_rank(ValueError(f"evaluate: there are no {what}"))
        try:
            return {name: _result(metric, [one for theirs in of_all for one in theirs[name]])
                    for name, metric in merging.items()}  # fmt: skip
        except Exception as problem:
            raise on_every_rank(problem) from None

    def _round_robin(self, batches: Iterable[Mapping[str, Any]]) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """This rank's batches, with their numbers."""
        rank, size = self._ranks.rank, self._ranks.size
        if isinstance(batches, Batches):
            yield from zip(count(rank, size), batches.round_robin(rank, size), strict=False)
            return
        for number, batch in enumerate(batches):
            if number % size == rank or isinstance(batch, LocalBatch):
                yield number, batch

    def _measured(self, batch: Mapping[str, Any], metrics: Mapping[str, Metric]) -> dict[str, Counts]:
        with self._device.at_work():
            results = self.open().run(batch)
        outputs = {name: results[name] for name in self._graph.predictions}
        examples = examples_of(batch, self._targets)
        if not examples:  # and no mean of them
            return {}

        def weighted(number: Any) -> Counts:
            return {"total": float(number) * examples, "examples": examples}

        found = {"loss": weighted(results[self._graph.loss].reshape(()))}
        for name, metric in metrics.items():
            if isinstance(metric, kinds.Metric):
                found[name] = metric.of_batch(outputs, batch)
            else:
                found[name] = weighted(metric(outputs, batch))
        return found


def _keep(kept: list[Measured], one: Measured, metric: kinds.Metric) -> None:
    """Adds the counts of a batch; whole numbers at once, as in any order they have the same sum."""
    are_whole = all(np.issubdtype(np.asarray(value).dtype, np.integer) for value in one.counts.values())
    if kept and are_whole:
        one = Measured(one.number, metric.merge([kept.pop().counts, one.counts]))
    kept.append(one)


def _result(metric: kinds.Metric, measured: Sequence[Measured]) -> Any:
    in_order = sorted(measured, key=lambda one: one.number)
    return metric.result(metric.merge([one.counts for one in in_order]))
