"""Callbacks: objects that fit() calls during training; they may monitor it, save, and end it."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnxgrad.graph.files import expect_place
from onnxgrad.graph.suggest import suggestion
from onnxgrad.train.distributed.ranks import SingleProcess, on_every_rank
from onnxgrad.train.metrics import Metric
from onnxgrad.train.progress import figure

if TYPE_CHECKING:
    from onnxgrad.train.fitting import Record
    from onnxgrad.train.trainer import Trainer

MODES = ("min", "max")


class Callback:
    """The methods that fit() calls; a custom callback overrides those that it needs.

    on_start, on_step and on_epoch may return a sentence, which ends training and is the reason. With several processes
    every one calls them, and all end if one asks to. `state()` returns a dict for JSON, which every checkpoint
    contains; `load_state()` gets it before on_start when training is resumed, and otherwise an empty dict.
    """

    def on_start(self, trainer: "Trainer") -> str | None:
        """Before the first step."""

    def on_step(self, trainer: "Trainer", record: Mapping[str, Any]) -> str | None:
        """After every update, with what fit(log=…) gets of it."""

    def on_epoch(self, trainer: "Trainer", record: "Record") -> str | None:
        """After every epoch and its validation, before the checkpoint is written."""

    def on_end(self, trainer: "Trainer") -> None:
        """After the last epoch, unless an error or a signal stopped training."""

    def state(self) -> dict[str, Any]:
        """What a resumed run has to know."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continues from a state; from the beginning if it is empty."""


class Monitoring(Callback):
    """A callback that watches one number: `monitor` is "loss" or the name of a metric, of the validation data if any.

    `mode` says whether "min" or "max" is best; metrics of onnxgrad.metrics know it themselves.
    """

    def __init__(self, monitor: str = "loss", mode: str | None = None) -> None:
        if mode not in (None, *MODES):
            raise ValueError(f"{type(self).__name__}: mode is {mode!r}, expected 'min' or 'max'")
        self.monitor, self.mode = monitor, mode
        self.best: float | None = None
        self._is_max = mode == "max"

    def expect(self, metrics: Mapping[str, Any] | None) -> None:
        """Raises one sentence unless the number to watch will be there, and can be compared."""
        known, name = metrics or {}, type(self).__name__
        if self.monitor not in ("loss", *known):
            raise ValueError(f"{name}: {self.monitor!r} is not measured{suggestion(self.monitor, ['loss', *known])}")
        if self.mode is None:
            self._is_max = self.monitor != "loss" and _is_better_if_higher(known[self.monitor], name, self.monitor)

    def improves(self, record: "Record", by: float = 0.0) -> bool:
        """Whether an epoch is better than the best before it, by more than that; if so it is the best from now on."""
        value = self._watched(record)
        is_first = self.best is None or (math.isnan(self.best) and not math.isnan(value))
        if not is_first:
            assert self.best is not None
            gain = value - self.best if self._is_max else self.best - value
            if not gain > by:  # NaN is not
                return False
        self.best = value
        return True

    def _watched(self, record: "Record") -> float:
        value = record.validation.get(self.monitor, record.loss) if self.monitor == "loss" else None
        value = record.validation[self.monitor] if value is None else value
        if not isinstance(value, float | int):
            raise on_every_rank(
                TypeError(f"{type(self).__name__}: {self.monitor!r} is a {type(value).__name__}, expected a number")
            )
        return float(value)

    def state(self) -> dict[str, Any]:
        return {"monitor": self.monitor, "best": None if self.best is None else str(self.best)}  # JSON has no NaN

    def load_state(self, state: Mapping[str, Any]) -> None:
        best = state.get("best") if state.get("monitor") == self.monitor else None
        self.best = None if best is None else float(best)


def _is_better_if_higher(metric: Any, name: str, monitor: str) -> bool:
    found = metric.higher_is_better if isinstance(metric, Metric) else None
    if found is None:
        what = "a function" if not isinstance(metric, Metric) else f"a {type(metric).__name__}"
        raise ValueError(f"{name}: {monitor!r} is {what}: mode='min' or mode='max' says which of its numbers are best")
    return found


class EarlyStopping(Monitoring):
    """Ends training after `patience` epochs in which `monitor` did not improve by more than `min_delta`.

    `monitor` is "loss" or the name of a metric: of the validation data, or without validation data the training loss.
    `mode` says whether "min" or "max" is best; the loss and the metrics of onnxgrad.metrics do not need it.
    """

    def __init__(
        self, patience: int = 3, monitor: str = "loss", min_delta: float = 0.0, *, mode: str | None = None
    ) -> None:
        if isinstance(patience, bool) or not isinstance(patience, int) or patience < 1:
            raise ValueError(f"EarlyStopping: patience is {patience!r}, expected a number of epochs, at least 1")
        if not 0 <= min_delta < math.inf:
            raise ValueError(f"EarlyStopping: min_delta is {min_delta!r}, expected a number of at least 0")
        super().__init__(monitor, mode)
        self.patience, self.min_delta = patience, min_delta
        self.waited = 0  # epochs since the best one

    def on_start(self, trainer: "Trainer") -> str | None:
        return self._verdict()  # a run that has ended so is not resumed

    def on_epoch(self, trainer: "Trainer", record: "Record") -> str | None:
        self.waited = 0 if self.improves(record, self.min_delta) else self.waited + 1
        return self._verdict()

    def _verdict(self) -> str | None:
        if self.waited < self.patience or self.best is None:
            return None
        epochs = "epoch" if self.waited == 1 else f"{self.waited} epochs"
        return f"{self.monitor} has not been better than {figure(self.best)} for {epochs}"

    def state(self) -> dict[str, Any]:
        return {**super().state(), "waited": self.waited}

    def load_state(self, state: Mapping[str, Any]) -> None:
        super().load_state(state)
        self.waited = 0 if self.best is None else int(state.get("waited", 0))


class KeepBest(Monitoring):
    """Saves the checkpoint of the best epoch in the file `path`, and restores it into the trainer when fit() ends.

    `monitor` and `mode` are those of EarlyStopping; of equal epochs the first is kept. With `restores=False` the
    trainer keeps the state after the last epoch.
    """

    def __init__(
        self, path: str | Path, monitor: str = "loss", *, mode: str | None = None, restores: bool = True
    ) -> None:
        super().__init__(monitor, mode)
        self.path, self.restores = Path(path), restores

    def on_start(self, trainer: "Trainer") -> str | None:
        trainer.ranks.on_first(lambda: expect_place(self.path, "KeepBest"))
        if not trainer.ranks.on_first(self.path.is_file):  # the best one so far is lost
            self.best = None
        return None

    def on_epoch(self, trainer: "Trainer", record: "Record") -> str | None:
        if self.improves(record):
            trainer.save(self.path)
        return None

    def on_end(self, trainer: "Trainer") -> None:
        if self.restores and self.best is not None:
            trainer.restore(self.path)


class Callbacks:
    """The callbacks of a fit(), as one: its ranks agree about the end of training."""

    def __init__(self, given: Iterable[Callback], ranks: SingleProcess) -> None:
        if isinstance(given, Callback):
            raise TypeError(f"fit: callbacks is a single {type(given).__name__}, expected a list of callbacks")
        self._given, self._ranks = list(given), ranks
        for one in self._given:
            if not isinstance(one, Callback):
                raise TypeError(f"fit: callbacks has a {type(one).__name__}, expected onnxgrad.callbacks.Callback")
        # Each step would have to wait for what none of them asks for.
        self.watch_steps = any(type(one).on_step is not Callback.on_step for one in self._given)

    def expect(self, metrics: Mapping[str, Any] | None) -> None:
        """Raises one sentence if what one of them watches is not measured."""
        for one in self._given:
            if isinstance(one, Monitoring):
                one.expect(metrics)

    def start(self, trainer: "Trainer", states: Mapping[str, Mapping[str, Any]]) -> str | None:
        """Gives each its state; why training ends before it begins, if it does."""
        for name, one in self._named():
            one.load_state(states.get(name, {}))
        return self._agree("on_start", [one.on_start(trainer) for one in self._given])

    def after_step(self, trainer: "Trainer", record: Mapping[str, Any]) -> str | None:
        """Why training ends after a step."""
        if not self.watch_steps:
            return None
        return self._agree("on_step", [one.on_step(trainer, record) for one in self._given])

    def after_epoch(self, trainer: "Trainer", record: "Record") -> str | None:
        """Why training ends after an epoch; what saves checkpoints comes last, so that they have the others' state."""
        in_order = sorted(self._given, key=lambda one: isinstance(one, KeepBest))
        return self._agree("on_epoch", [one.on_epoch(trainer, record) for one in in_order])

    def end(self, trainer: "Trainer") -> None:
        """After the last epoch."""
        for one in self._given:
            one.on_end(trainer)

    def states(self) -> dict[str, dict[str, Any]]:
        """What checkpoints have of them."""
        found = {name: state for name, one in self._named() if (state := one.state())}
        for name, state in found.items():
            try:
                json.dumps(state)
            except (TypeError, ValueError) as error:
                raise TypeError(f"fit: the state of the callback {name} cannot be saved as JSON: {error}") from None
        return found

    def _named(self) -> list[tuple[str, Callback]]:
        """By class, and numbered where there are several of one."""
        kinds = [type(one).__name__ for one in self._given]
        numbers = [kinds[:k].count(kind) for k, kind in enumerate(kinds)]
        names = (f"{kind} {number + 1}" if number else kind for kind, number in zip(kinds, numbers, strict=True))
        return list(zip(names, self._given, strict=True))

    def _agree(self, method: str, found: Sequence[Any]) -> str | None:
        """The first reason of the first rank that has one."""
        wrong = next((one for one in found if one is not None and not isinstance(one, str)), None)
        error = None
        if wrong is not None:
            error = TypeError(f"fit: {method} of a callback returned {wrong!r}, expected None, or why training ends")
        of_all = self._ranks.all_gather([one for one in found if one], error) if self._given else []
        return next((reason for reasons in of_all for reason in reasons), None)
