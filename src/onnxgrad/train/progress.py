"""What fit() shows: a bar for the epoch, the loss, the rate and the time left, and a line for every epoch done."""

from types import TracebackType
from typing import Any

SMOOTHING = 0.95  # of the loss shown: that of single batches jumps


class Progress:
    """Shown on a terminal; `quiet` shows nothing."""

    def __init__(self, quiet: bool) -> None:
        self._bar: Any = None
        self._task: Any = None
        self._loss: float | None = None
        if quiet:
            return
        from rich import progress

        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[told]}"),
            progress.TimeRemainingColumn(),
        )

    def __enter__(self) -> "Progress":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def start_epoch(self, epoch: int, epochs: int, batches: int | None, done: int = 0) -> None:
        """A new bar, of which some may be done already."""
        if self._bar is None:
            return
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task(f"epoch {epoch}/{epochs}", total=batches, completed=done, told="")

    def advance(self, loss: float, rate: float) -> None:
        """One batch done."""
        if self._bar is None:
            return
        self._loss = loss if self._loss is None else SMOOTHING * self._loss + (1 - SMOOTHING) * loss
        self._bar.update(self._task, advance=1, told=f"loss {self._loss:.4f}  rate {rate:.2e}")

    def end_epoch(self, record: Any) -> None:
        """A line that stays."""
        if self._bar is None:
            return
        found = "".join(f"  {name} {value:.4f}" for name, value in record.validation.items())
        checked = f"  validation:{found}" if found else ""
        self._bar.console.print(f"epoch {record.epoch}: loss {record.loss:.4f}{checked}  {record.seconds:.1f} s")
