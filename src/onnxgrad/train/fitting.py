"""fit(): epochs of steps with progress and checkpoints, and a valid state on disk if anything stops it."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from onnxgrad.cpu.core.compiling import asked_for
from onnxgrad.graph.files import expect_place
from onnxgrad.sources.source import Arrays
from onnxgrad.train.batches import Batches, not_finite
from onnxgrad.train.callbacks import Callbacks
from onnxgrad.train.distributed.ranks import Ranks, SingleProcess, on_every_rank
from onnxgrad.train.evaluation import expect_evaluable
from onnxgrad.train.interruption import Interrupted, Interruption
from onnxgrad.train.pending_loss import PendingLoss
from onnxgrad.train.progress import Progress

if TYPE_CHECKING:
    from onnxgrad.train.evaluation import Metric
    from onnxgrad.train.trainer import Trainer

STOPPED = Path("onnxgrad-stopped.safetensors")  # where a run without a checkpoint leaves its state
Log = Callable[[dict[str, Any]], None]


class TrainingStoppedError(ArithmeticError):
    """The loss or a gradient is not finite: an ArithmeticError, which says where the last good state is."""


@dataclass(frozen=True)
class Record:
    """One epoch of fit(): its number, updates so far, the mean loss, its time, and the results of evaluate().

    `peak_memory` is in bytes: the maximum that the process has held so far; on a GPU, the memory in use.
    """

    epoch: int
    steps: int
    loss: float
    seconds: float
    validation: dict[str, Any]
    peak_memory: int = 0


@dataclass
class Position:
    """How far a fit() has come; its checkpoints contain it, and a fit() after restore() continues from there."""

    epoch: int = 0  # epochs done
    batches: int = 0  # done of the current epoch
    passes: int = 0  # epochs of `batches` begun before it
    total: float = 0.0  # sum of the losses in the current epoch
    waiting: int = 0  # batches since the last update
    waiting_total: float = 0.0  # sum of their losses


@dataclass(frozen=True)
class FitOptions:
    """The arguments of fit(), checked."""

    batches: Iterable[Mapping[str, Any]]
    epochs: int
    validation: Iterable[Mapping[str, Any]] | None
    metrics: "Mapping[str, Metric] | None"
    checkpoint: Path | None
    save_every: int | None
    log: Log | None
    callbacks: Callbacks

    def __post_init__(self) -> None:
        for name, least in (("epochs", 1), ("save_every", 1)):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise ValueError(f"fit: {name} is {value!r}, expected a number of at least {least}")
        expect_evaluable("fit", self.batches, None)
        expect_evaluable("fit", self.validation, self.metrics, "validation")
        if self.log is not None and not callable(self.log):
            raise TypeError(f"fit: log is {self.log!r}, expected a function of an event, a dict")
        if self.save_every is not None and self.checkpoint is None:
            raise ValueError("fit: save_every needs a checkpoint, the file to write")
        self.callbacks.expect({} if self.validation is None else self.metrics)

    def expect_place(self) -> None:
        """Raises one sentence if there can be no checkpoint."""
        if self.checkpoint is not None:
            expect_place(self.checkpoint, "fit")


def fit(
    trainer: "Trainer", options: FitOptions, position: Position, states: Mapping[str, Any], quiet: bool
) -> list[Record]:
    """Runs from a position, which it moves along; the position is the trainer's, whose checkpoints contain it.

    `states` are those of the callbacks, if the run is resumed.
    """
    records: list[Record] = []
    ranks = trainer.ranks
    with (
        Progress(quiet or not ranks.is_first) as progress,
        Interruption(quiet=not ranks.is_first) as interruption,
        asked_for(progress.tell_of_kernel),
    ):
        _say_remarks(trainer, progress)
        ranks.listen_to(interruption)
        try:
            reason = options.callbacks.start(trainer, states)
            while position.epoch < options.epochs and reason is None:
                reason = _epoch(trainer, options, position, progress, records)
                if ranks.agree_to_stop():
                    raise _Signalled
            if reason is not None:
                progress.say(f"training ends after epoch {position.epoch}, step {trainer.steps}: {reason}")
            options.callbacks.end(trainer)
        except _Signalled:
            assert ranks.stop is not None
            raise on_every_rank(_interrupted(trainer, options, ranks.stop)) from None
        except TrainingStoppedError as error:
            where = _first_in_data(options) + _leave_state(trainer, options)
            error.args = (f"{error.args[0]}; {where}",)
            raise
        finally:
            ranks.listen_to(None)
    return records


class _Signalled(Exception):  # noqa: N818, nothing went wrong
    """A signal has come, and the step is complete."""


def _epoch(
    trainer: "Trainer", options: FitOptions, position: Position, progress: Progress, records: list[Record]
) -> str | None:
    """Adds the record of an epoch; why training ends with it, or within it, if it does."""
    start = time.perf_counter()
    length = len(options.batches) if isinstance(options.batches, Sized) else None
    progress.start_epoch(position.epoch + 1, options.epochs, length, position.batches)
    ranks = trainer.ranks
    unseen: _Step | None = None  # a step whose loss is not looked at yet: a GPU may still be at it
    for batch in ranks.each(rest_of_epoch(options.batches, position, ranks)):
        if trainer.skips(batch):
            progress.say("a batch is left out: it is smaller than those that the model takes")
            continue
        before, skipped = trainer.steps, trainer.skipped
        loss = trainer.step(batch)
        _say_remarks(trainer, progress)
        if unseen is not None:
            _see(unseen, options, position, progress)
        if trainer.skipped > skipped:
            progress.say("an update is left out: its gradients are too large for fp16; the loss scale is halved")
        rate = trainer.optimizer.lr * trainer.schedule(max(0, trainer.steps - 1))
        updates = trainer.steps > before
        unseen = _Step(loss, trainer.steps if updates else None, rate, trainer, time.perf_counter() - start)
        saves_here = updates and options.save_every is not None and trainer.steps % options.save_every == 0
        reason = None
        if ranks.stop or saves_here or options.callbacks.watch_steps or not isinstance(loss, PendingLoss):
            reason = _see(unseen, options, position, progress)
            unseen = None
        if (saves_here or reason is not None) and options.checkpoint is not None:
            trainer.save(options.checkpoint)
        if ranks.stop:
            raise _Signalled
        if reason is not None:
            return reason
    if unseen is not None:
        _see(unseen, options, position, progress)
    if not position.batches:
        raise on_every_rank(
            ValueError("fit: there are no batches; give a list or Batches, since an iterator ends after one epoch")
        )
    trainer.expect_no_drift()
    with progress.doing("validating"):
        found = {} if options.validation is None else trainer.evaluate(options.validation, options.metrics)
    seconds = time.perf_counter() - start
    mean = position.total / position.batches
    record = Record(position.epoch + 1, trainer.steps, mean, seconds, found, trainer.peak_memory)
    position.epoch, position.batches, position.total = position.epoch + 1, 0, 0.0
    position.passes = getattr(options.batches, "epoch", 0)
    progress.end_epoch(record)
    facts = {"step" if k == "steps" else k: v for k, v in asdict(record).items()}
    _log(options, event="epoch", **facts)
    records.append(record)
    reason = options.callbacks.after_epoch(trainer, record)
    if options.checkpoint is not None:
        trainer.save(options.checkpoint)
    return reason


def _say_remarks(trainer: "Trainer", progress: Progress) -> None:
    for remark in trainer.unsaid_remarks():
        progress.say(remark)


class _Step(NamedTuple):
    """A step of fit()."""

    loss: float  # or a PendingLoss
    number: int | None  # of the update that it made, if any
    rate: float
    trainer: "Trainer"
    seconds: float  # since the epoch began


def _see(step: _Step, options: FitOptions, position: Position, progress: Progress) -> str | None:
    """Takes the outcome of a step into account: it raises if the step went wrong, and then has not been made.

    Returns why training ends, if a callback wants that.
    """
    loss = float(step.loss)
    position.batches += 1
    position.total += loss
    position.waiting += 1
    position.waiting_total += loss
    progress.advance(loss, step.rate)
    if step.number is None:
        return None
    mean, norm = position.waiting_total / position.waiting, getattr(step.loss, "gradient_norm", None)
    position.waiting, position.waiting_total = 0, 0.0
    facts = {
        "epoch": position.epoch + 1, "step": step.number, "loss": mean, "lr": step.rate,
        "gradient_norm": step.trainer.gradient_norm if norm is None else norm, "seconds": step.seconds,
    }  # fmt: skip
    _log(options, event="step", **facts)
    return options.callbacks.after_step(step.trainer, facts)


def rest_of_epoch(
    batches: Iterable[Mapping[str, Any]], position: Position, ranks: SingleProcess
) -> Iterator[Mapping[str, Any]]:
    """The batches left of an epoch; those of Batches in the order they would have come, sliced by rank."""
    if isinstance(batches, Batches):
        if position.batches or position.passes > batches.epoch:
            batches.epoch = position.passes
        position.passes = batches.epoch
        if isinstance(ranks, Ranks):
            return batches.slices(ranks.rank, ranks.size, position.batches)
        return batches.starting_at(position.batches)
    return islice(iter(batches), position.batches, None)


def _log(options: FitOptions, **facts: Any) -> None:
    if options.log is not None:
        options.log(facts)


def _interrupted(trainer: "Trainer", options: FitOptions, name: str) -> Interrupted:
    path = options.checkpoint or STOPPED
    try:
        trainer.save(path)
    except OSError as error:
        return Interrupted(f"stopped by {name} after step {trainer.steps}; nothing was saved: {error}", name, None)
    return Interrupted(f"stopped by {name} after step {trainer.steps}; the state is in {str(path)!r}", name, path)


def _first_in_data(options: FitOptions) -> str:
    """Where the first number to train on is not finite: in a batch the examples have other numbers."""
    source = options.batches.source if isinstance(options.batches, Batches) else None
    found = not_finite(source.arrays) if isinstance(source, Arrays) else None
    return "" if found is None else f"in the data, {found}; "


def _leave_state(trainer: "Trainer", options: FitOptions) -> str:
    """Saves the state before a step that failed, which that step has not changed."""
    path = options.checkpoint or STOPPED
    with suppress(OSError):
        trainer.save(path)
        return f"the state before it is in {str(path)!r}"
    return f"the state before it could not be saved in {str(path)!r}"
