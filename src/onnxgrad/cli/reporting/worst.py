"""The examples that a trained model gets most wrong: one more pass over those to validate with."""

import heapq
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrad.cli.data import hold_out
from onnxgrad.cli.reporting.confusion import Confusion
from onnxgrad.cli.reporting.describe import described_outcome, inputs_of
from onnxgrad.cli.reporting.example_loss import ExampleLoss
from onnxgrad.cli.reporting.names import Names, Tokens, class_names
from onnxgrad.cli.run_log import Event
from onnxgrad.graph.files import load
from onnxgrad.passes.find_logits import activation_of
from onnxgrad.tensor_types import Array
from onnxgrad.train.batches import Batches
from onnxgrad.train.losses import Loss, Total
from onnxgrad.train.trainer import Trainer

KEPT = 24  # examples
NONE_TO_SEE = "No examples to validate with: --val names a file, or the share of --data to hold out."
OWN_LOSS = "The model computes its loss itself, for whole batches: single examples have none."
NOT_FIRST = "{!r} does not have the examples along its first dimension, so that they have no losses of their own."


class WorstExamples:
    """A metric that keeps those examples, of all that it is called with, whose loss is highest."""

    def __init__(self, parts: Sequence[Loss], model: Path, rank: int, ranks: int, batch_size: int) -> None:
        graph = load(model, "report").graph
        values = {str(v.name): v for node in graph for v in node.outputs}
        made_by = {name: activation_of(values[name])[0] for part in parts if (name := part.prediction) in values}
        self._of_sigmoid = [name for name, node in made_by.items() if node is not None and node.op_type == "Sigmoid"]
        self._parts, self._loss = parts, ExampleLoss(parts, self._of_sigmoid)
        self._inputs = [str(v.name) for v in graph.inputs if v.name not in graph.initializers]
        self.names = Names(class_names(model), Tokens(model))
        self._at, self._step, self._size = rank * batch_size, ranks * batch_size, batch_size
        self.confusions = [Confusion(part, part.prediction in self._of_sigmoid) for part in parts]
        self.kept: list[tuple[float, int, dict[str, Any]]] = []  # a heap, the lowest loss first
        self.problem = ""

    def __call__(self, outputs: Mapping[str, Array], batch: Mapping[str, Any]) -> float:
        first, self._at = self._at, self._at + self._step
        examples = len(next(iter(batch.values())))
        for name, array in [(p.prediction, outputs[p.prediction]) for p in self._parts] + list(batch.items()):
            if np.ndim(array) == 0 or len(array) != examples:
                self.problem = NOT_FIRST.format(name)
                return 0.0
        for confusion in self.confusions:
            confusion.add(outputs[confusion.part.prediction], np.asarray(batch[confusion.part.target]))
        for k, loss in enumerate(self._loss(outputs, batch).tolist()):
            if self._counts(batch, k):
                self._offer(math.inf if math.isnan(loss) else loss, first + k, outputs, batch, k)
        return 0.0

    def _counts(self, batch: Mapping[str, Any], k: int) -> bool:
        """Whether any target of an example counts: without one the loss is 0 / 0."""
        return all(part.count(np.asarray(batch[part.target])[k : k + 1]) != 0 for part in self._parts)

    def _offer(self, loss: float, index: int, outputs: Mapping[str, Array], batch: Mapping[str, Any], k: int) -> None:
        if len(self.kept) == KEPT and (loss, -index) <= self.kept[0][:2]:
            return
        outcomes = [
            described_outcome(p, outputs[p.prediction][k], np.asarray(batch[p.target])[k], self.names,
                              p.prediction in self._of_sigmoid)
            for p in self._parts
        ]  # fmt: skip
        shown = {"inputs": inputs_of(batch, k, self._inputs, self.names), "outcomes": outcomes}
        put = heapq.heappush if len(self.kept) < KEPT else heapq.heappushpop
        put(self.kept, (loss, -index, shown))


def examples_event(
    trainer: Trainer, total: Total | str, validation: Batches | None, model: Path, rows: Array | None
) -> Event:
    """The event "examples"; with several processes, all of them make it together.

    `rows` are those of the examples in --data, where they were held out of it.
    """
    facts: Event = {"event": "examples", "step": trainer.steps}
    if validation is None or isinstance(total, str):
        return {**facts, "problem": NONE_TO_SEE if validation is None else OWN_LOSS}
    missing = [part.target for part in total.parts if part.target not in validation.arrays]
    if missing:  # the model has it: a constant, the same for every example
        return {**facts, "problem": NOT_FIRST.format(missing[0])}
    ranks = trainer.ranks
    worst = WorstExamples(total.parts, model, ranks.rank, ranks.size, validation.size)
    trainer.evaluate(validation, {"worst": worst})
    gathered = ranks.all_gather((worst.problem, worst.kept, [(c.classes, c.pairs) for c in worst.confusions]))
    problem = next((found for found, _, _ in gathered if found), "")
    if problem:
        return {**facts, "problem": problem}
    for k, confusion in enumerate(worst.confusions):
        confusion.take_all(counts[k] for _, _, counts in gathered)
    kept = heapq.nlargest(KEPT, (one for _, mine, _ in gathered for one in mine), key=lambda one: one[:2])
    return {
        **facts, "examples": validation.examples, "of": "--val" if rows is None else "--data",
        "worst": [
            {"index": -number if rows is None else int(rows[-number]), "loss": loss, **shown}
            for loss, number, shown in kept
        ],
        "confusion": [found for c in worst.confusions if (found := c.shown(worst.names)) is not None],
    }  # fmt: skip


def rows_held_out(share: str, seed: int, training: int, validation: int) -> Array | None:
    """Which rows of --data are those held out of it; None if they come from a file of their own."""
    try:
        number = float(share)
    except ValueError:
        return None
    _, aside = hold_out({"row": np.arange(training + validation)}, number, seed)
    return aside["row"]
