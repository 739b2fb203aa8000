"""evaluate(): loss and metrics of batches, without training on them; each rank evaluates some of them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

from onnxgrad.tensor_types import Array
from onnxgrad.train.batches import Batches, LocalBatch
from onnxgrad.train.devices import Device
from onnxgrad.train.distributed.ranks import SingleProcess, on_every_rank
from onnxgrad.train.distributed.sharding import examples_of
from onnxgrad.train.graphs import EvaluationGraph
from onnxgrad.train.session import Session

Metric = Callable[[Mapping[str, Array], Mapping[str, Any]], float]


class Measured(NamedTuple):
    """The loss and metrics of a batch."""

    number: int
    examples: int
    values: dict[str, float]


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

    def __call__(self, batches: Iterable[Mapping[str, Any]], metrics: Mapping[str, Metric]) -> dict[str, float]:
        """Means over examples."""
        mine: list[Measured] = []
        error, skipped = None, False
        with self._ranks.together():
            try:
                for number, batch in self._round_robin(batches):
                    if self._skips(batch):
                        skipped = True
                        continue
                    mine.append(Measured(number, examples_of(batch, self._targets), self._measured(batch, metrics)))
            except Exception as problem:  # all ranks raise it, once all are done
                error = problem
            found = [one for theirs in self._ranks.all_gather(mine, error) for one in theirs]
        if not found:
            of_size = " of the size that the model takes" if skipped else ""
            raise on_every_rank(ValueError(f"evaluate: there are no batches{of_size}"))
        totals: dict[str, float] = {}
        for one in sorted(found, key=lambda m: m.number):
            for name, value in one.values.items():
                totals[name] = totals.get(name, 0.0) + value * one.examples
        examples = sum(one.examples for one in found)
        return {name: total / examples for name, total in totals.items()}

    def _round_robin(self, batches: Iterable[Mapping[str, Any]]) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """This rank's batches, with their numbers."""
        rank, size = self._ranks.rank, self._ranks.size
        if isinstance(batches, Batches):
            yield from zip(count(rank, size), batches.round_robin(rank, size), strict=False)
            return
        for number, batch in enumerate(batches):
            if number % size == rank or isinstance(batch, LocalBatch):
                yield number, batch

    def _measured(self, batch: Mapping[str, Any], metrics: Mapping[str, Metric]) -> dict[str, float]:
        with self._device.at_work():
            results = self.open().run(batch)
        outputs = {name: results[name] for name in self._graph.predictions}
        loss = float(results[self._graph.loss].reshape(()))
        return {"loss": loss, **{name: float(metric(outputs, batch)) for name, metric in metrics.items()}}
