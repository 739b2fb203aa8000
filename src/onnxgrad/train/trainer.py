"""Trainer: an ONNX model, a loss and an optimizer, put to work by stock onnxruntime."""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.differentiate import load
from onnxgrad.tensor_types import Array
from onnxgrad.threads import launch
from onnxgrad.train.bound import BoundSession
from onnxgrad.train.buffers import Buffers
from onnxgrad.train.checkpoint import copy_into, read_checkpoint, replaced, write_checkpoint
from onnxgrad.train.forms import SEED, to_inference_form
from onnxgrad.train.graphs import evaluation_graph, step_graph
from onnxgrad.train.losses import Total
from onnxgrad.train.optim import Optimizer
from onnxgrad.train.schedules import Constant, Schedule

Metric = Callable[[Mapping[str, Array], Mapping[str, Any]], float]


class TrainingStoppedError(ArithmeticError):
    """The loss is no longer a number."""


@dataclass(frozen=True)
class Record:
    """One epoch of fit()."""

    epoch: int
    steps: int
    loss: float
    seconds: float
    validation: dict[str, float]


class Trainer:
    """Trains a model.

    `model` is a path, an onnx.ModelProto or an onnx_ir.Model, which is not changed. `loss` is one of onnxgrad.losses or
    a sum of such, or the name of an output that is the loss. `trainable` names the parameters to train, patterns
    allowed; by default all. A schedule multiplies the learning rate. `clip_norm` bounds the length of the whole
    gradient, `clip_value` each of its numbers; `accumulate` micro-batches are averaged for one update. `seed` decides
    what Dropout drops.
    """

    def __init__(
        self,
        model: Any,
        loss: Total | str,
        optimizer: Optimizer,
        trainable: str | Sequence[str] | None = None,
        *,
        schedule: Schedule | None = None,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        accumulate: int = 1,
        seed: int = 0,
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"Trainer: optimizer is a {type(optimizer).__name__}, expected one of onnxgrad.optim")
        if accumulate < 1:
            raise ValueError(f"Trainer: accumulate is {accumulate}, expected at least 1")
        for name, limit in (("clip_norm", clip_norm), ("clip_value", clip_value)):
            if limit is not None and not limit > 0:
                raise ValueError(f"Trainer: {name} is {limit!r}, expected a number above 0")
        self._source, self.optimizer, self.schedule = model, optimizer, schedule or Constant()
        self._clip_norm, self._clip_value, self._accumulate = clip_norm, clip_value, accumulate
        step = step_graph(model, loss, trainable)
        weights = {name: v.const_value for name, v in load(model).graph.initializers.items()}
        self._buffers = Buffers({name: _trainable(name, weights[name]) for name in step.gradients})
        self.parameters = self._buffers.views(self._buffers.data)
        self.gradients = self._buffers.views(self._buffers.grad)
        self._state = optimizer.start(self._buffers)
        names = [n for s in step.statistics for n in s.current]
        self.statistics = {name: _trainable(name, weights[name]) for name in names}
        self._following = {n: np.empty_like(self.statistics[c]) for s in step.statistics
                           for c, n in zip(s.current, s.following, strict=True)}  # fmt: skip
        self._loss = np.zeros((), self._buffers.dtype)
        # Gradients of several micro-batches are added up here; a single one is used where it is.
        self._total = self._buffers.new() if accumulate > 1 else None
        self._waiting = 0  # micro-batches in it
        self._sums = np.zeros(len(self._state.pieces))
        outputs = {step.loss: self._loss, **{out: self.gradients[n] for n, out in step.gradients.items()}}
        changed = {**self.parameters, **self.statistics}
        self.seed, self._batches = seed, 0
        self._seed = np.zeros(1, np.int64)  # of the batch at hand
        bound = {**changed, **({SEED: self._seed} if step.drops else {})}
        self._step_session = BoundSession(step.model, bound, {**outputs, **self._following})
        evaluation = evaluation_graph(model, loss, list(changed))
        self._evaluation = evaluation
        used = {str(v.name) for v in evaluation.model.graph.inputs}
        bound = {name: array for name, array in changed.items() if name in used}
        self._evaluation_session = BoundSession(evaluation.model, bound, {})

    @property
    def steps(self) -> int:
        """Updates made."""
        return self._state.steps

    def step(self, batch: Mapping[str, Any]) -> float:
        """Runs a batch and, if enough have come together, updates the parameters; the loss before the update."""
        self._seed[0] = int(np.random.SeedSequence([self.seed, self._batches]).generate_state(1, np.uint64)[0] >> 1)
        self._step_session.run(batch)
        self._batches += 1
        loss = float(self._loss)
        if not math.isfinite(loss):
            self._stop(f"the loss is {loss}")
        if self._total is not None and not self._gather():
            return loss
        self._clip()
        self._state.step(self.schedule(self._state.steps))
        self._update_statistics()
        return loss

    def _gather(self) -> bool:
        """Adds up the gradients of a micro-batch; true if it was the last for an update."""
        from onnxgrad.train.update import add, scale

        assert self._total is not None
        pieces, grad = self._state.pieces, self._buffers.grad
        if self._waiting == 0:
            self._total[...] = grad
        else:
            launch(add, pieces, self._total, grad, bytes_touched=2 * grad.nbytes)
        self._waiting += 1
        self._update_statistics()
        if self._waiting < self._accumulate:
            return False
        self._waiting = 0
        grad[...] = self._total
        launch(scale, pieces, grad, 1 / self._accumulate, bytes_touched=grad.nbytes)
        return True

    def _clip(self) -> None:
        from onnxgrad.train.update import clamp, scale, squares

        pieces, grad = self._state.pieces, self._buffers.grad
        launch(squares, pieces, grad, self._sums, bytes_touched=grad.nbytes)
        norm = math.sqrt(float(np.sum(self._sums)))
        if not math.isfinite(norm):
            self._stop("a gradient is no number")
        if self._clip_norm is not None and norm > self._clip_norm:
            launch(scale, pieces, grad, self._clip_norm / (norm + 1e-6), bytes_touched=grad.nbytes)
        if self._clip_value is not None:
            launch(clamp, pieces, grad, self._clip_value, bytes_touched=grad.nbytes)

    def _update_statistics(self) -> None:
        for current, following in zip(self.statistics.values(), self._following.values(), strict=True):
            current[...] = following

    def _stop(self, why: str) -> None:
        bad = next((name for name, g in self.gradients.items() if not np.isfinite(g).all()), None)
        told = f", and so is the gradient of {bad!r}" if bad is not None else ""
        raise TrainingStoppedError(f"step {self.steps + 1}: {why}{told}; the parameters are those before the step")

    def evaluate(
        self, batches: Iterable[Mapping[str, Any]], metrics: Mapping[str, Metric] | None = None
    ) -> dict[str, float]:
        """The mean loss over batches, in inference form, and the means of metrics(outputs, batch), by examples."""
        totals: dict[str, float] = {}
        count = 0
        for batch in batches:
            results = self._evaluation_session.run(batch)
            examples = max((len(a) for a in map(np.asarray, batch.values()) if a.ndim), default=1)
            count += examples
            found = {"loss": float(results[self._evaluation.loss].reshape(()))}
            outputs = {name: results[name] for name in self._evaluation.predictions}
            found.update({name: float(metric(outputs, batch)) for name, metric in (metrics or {}).items()})
            for name, value in found.items():
                totals[name] = totals.get(name, 0.0) + value * examples
        if not count:
            raise ValueError("evaluate: there are no batches")
        return {name: total / count for name, total in totals.items()}

    def fit(
        self,
        batches: Iterable[Mapping[str, Any]],
        epochs: int = 1,
        *,
        validation: Iterable[Mapping[str, Any]] | None = None,
        metrics: Mapping[str, Metric] | None = None,
        quiet: bool = False,
    ) -> list[Record]:
        """Goes through the batches `epochs` times, with a progress bar; a record for each epoch."""
        from onnxgrad.train.progress import Progress

        records = []
        with Progress(quiet) as progress:
            for epoch in range(1, epochs + 1):
                start, losses = time.perf_counter(), []
                progress.start_epoch(epoch, epochs, len(batches) if isinstance(batches, Sized) else None)
                for batch in batches:
                    losses.append(self.step(batch))
                    progress.advance(losses[-1], self.optimizer.lr * self.schedule(self.steps))
                if not losses:
                    raise ValueError("fit: there are no batches; an iterator is used up after one epoch")
                found = {} if validation is None else self.evaluate(validation, metrics)
                seconds = time.perf_counter() - start
                records.append(Record(epoch, self.steps, float(np.mean(losses)), seconds, found))
                progress.end_epoch(records[-1])
        return records

    def save(self, path: str | Path) -> None:
        """Writes weights, statistics, the optimizer's state and where training is, as one safetensors file.

        The file at `path` is replaced in one go, when all of the new one is on the disk.
        """
        arrays = {f"parameter/{name}": a for name, a in self.parameters.items()}
        arrays |= {f"statistics/{name}": a for name, a in self.statistics.items()}
        for slot, array in self._state.slots.items():
            arrays |= {f"optimizer/{slot}/{name}": a for name, a in self._buffers.views(array).items()}
        if self._total is not None and self._waiting:
            arrays |= {f"waiting/{name}": a for name, a in self._buffers.views(self._total).items()}
        facts = {
            "steps": self._state.steps, "batches": self._batches, "seed": self.seed, "waiting": self._waiting,
            "optimizer": self.optimizer.name,
        }  # fmt: skip
        write_checkpoint(Path(path), arrays, facts)

    def restore(self, path: str | Path) -> None:
        """Goes on where the trainer was that saved the file: the same numbers follow as if it had not stopped."""
        arrays, facts = read_checkpoint(Path(path))
        if facts["optimizer"] != self.optimizer.name:
            raise ValueError(f"{str(path)!r} is of a run with {facts['optimizer']}, not {self.optimizer.name}")
        groups = {"parameter": self.parameters, "statistics": self.statistics}
        groups |= {f"optimizer/{slot}": self._buffers.views(array) for slot, array in self._state.slots.items()}
        if facts["waiting"]:
            if self._total is None:
                raise ValueError(f"{str(path)!r} was saved between micro-batches: set accumulate as it was")
            groups["waiting"] = self._buffers.views(self._total)
        targets = {f"{group}/{name}": a for group, views in groups.items() for name, a in views.items()}
        copy_into(targets, arrays, str(path))
        self._state.steps, self._batches = facts["steps"], facts["batches"]
        self.seed, self._waiting = facts["seed"], facts["waiting"]

    @classmethod
    def load(
        cls, path: str | Path, model: Any, loss: Total | str, optimizer: Optimizer, *args: Any, **kwargs: Any
    ) -> "Trainer":
        """A trainer as it was saved; model, loss and the rest as for Trainer()."""
        trainer = cls(model, loss, optimizer, *args, **kwargs)
        trainer.restore(path)
        return trainer

    def export(self, path: str | Path) -> None:
        """Writes the model as it came, in inference form, with the trained weights."""
        model = load(self._source)
        for name, array in {**self.parameters, **self.statistics}.items():
            value = model.graph.initializers[name]
            value.const_value = ir.Tensor(array, name=name)
        to_inference_form(model.graph)
        with replaced(Path(path)) as draft:
            ir.save(model, draft)


def _trainable(name: str, tensor: Any) -> Array:
    array: Array = np.array(tensor.numpy())
    if array.dtype not in (np.float32, np.float64):
        raise ValueError(f"Trainer: {name!r} is {array.dtype}, parameters are trained in float32 or float64")
    return array
