"""Progress: the bar that fit() shows, with loss, learning rate and time left, and a line for every epoch."""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any

SMOOTHING = 0.95  # of the loss shown, because that of single batches jumps
PATIENCE = 30.0  # seconds between lines where there is no terminal for a bar
NOTICED = 1.0  # seconds, after which a bar that stands still says what it waits for


class Progress:
    """On stderr: a bar on a terminal, elsewhere a line for each epoch and, in long ones, some more; or nothing."""

    def __init__(self, quiet: bool) -> None:
        self._bar: Any = None
        self._task: Any = None
        self._loss: float | None = None
        self._epoch = self._epochs = self._done = self._total_done = 0
        self._batches: int | None = None
        self._console: Any = None
        self._compiled = 0
        self._began = self._first_done = self._printed = time.monotonic()
        if quiet:
            return
        from rich import progress
        from rich.console import Console

        self._console = Console(file=sys.stderr, highlight=False)
        if not self._console.is_terminal:
            return
        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(bar_width=24),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[state]}"),
            console=self._console,
            transient=True,
        )

    def __enter__(self) -> "Progress":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def start_epoch(self, epoch: int, epochs: int, batches: int | None, done: int = 0) -> None:
        """A new bar; `done` batches of the epoch came before this run."""
        self._epoch, self._epochs, self._batches, self._done = epoch, epochs, batches, done
        if self._bar is None:
            return
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task(f"epoch {epoch}/{epochs}", total=batches, completed=done, state="")

    @contextlib.contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Around what may take long: it is said beside the bar, or without one in a line."""
        if self._console is None:
            yield
            return
        timer = threading.Timer(PATIENCE if self._bar is None else NOTICED, self._say_doing, [what])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _say_doing(self, what: str) -> None:
        if self._bar is None:
            self.say(f"epoch {self._epoch}/{self._epochs}: {what}")
        else:
            self._bar.update(self._task, state=f"{what} …")

    def advance(self, loss: float, rate: float) -> None:
        """One batch done, at a learning rate."""
        self._done += 1
        self._total_done += 1
        self._loss = loss if self._loss is None else SMOOTHING * self._loss + (1 - SMOOTHING) * loss
        now = time.monotonic()
        if self._total_done == 1:
            self._first_done = now
        if self._bar is not None:
            self._bar.update(self._task, advance=1, state=self._state(now, rate))
        elif self._console is not None and now - self._printed > PATIENCE:
            of = f"/{self._batches}" if self._batches is not None else ""
            self.say(f"epoch {self._epoch}/{self._epochs}: {self._done}{of}  {self._state(now, rate)}")

    def tell_of_kernel(self, name: str, types: Any, found: bool) -> None:
        """Where kernels are not shipped, and not kept from an earlier process, the first steps are slow."""
        if found:
            return
        self._compiled += 1
        if self._bar is not None and self._task is not None:
            short = name.rpartition(".")[2].partition("-")[0].strip("_")
            self._bar.update(self._task, state=f"compiling kernels for this machine, once: {self._compiled} {short}")
        elif self._compiled == 1:
            self.say("compiling kernels for this machine, once")

    def _state(self, now: float, rate: float) -> str:
        assert self._loss is not None
        # The first step compiles kernels, and says nothing about the others.
        steps, since = (self._total_done - 1, self._first_done) if self._total_done > 1 else (1, self._began)
        speed = steps / (now - since) if now > since else 0.0
        state = f"loss {figure(self._loss)}  lr {rate:.2e}  {_speed(speed)} batches/s"
        if self._batches is None or not speed:
            return state
        ahead = self._batches - self._done + self._batches * (self._epochs - self._epoch)
        return f"{state}  {clock(ahead / speed)} left"

    def end_epoch(self, record: Any) -> None:
        """A line that stays."""
        numbers = {name: value for name, value in record.validation.items() if not isinstance(value, list)}
        found = "".join(f"  {name} {figure(value)}" for name, value in numbers.items())
        checked = f"  validation:{found}" if found else ""
        held = f"  peak memory {in_bytes(record.peak_memory)}" if record.peak_memory else ""
        end = f"{checked}  {clock(record.seconds)}{held}"
        self.say(f"epoch {record.epoch}/{self._epochs}: loss {figure(record.loss)}{end}")

    def say(self, line: str) -> None:
        """Prints a line, above the bar."""
        if self._console is not None:
            self._printed = time.monotonic()
            self._console.print(line, markup=False, soft_wrap=True)


@contextlib.contextmanager
def waiting(what: str, quiet: bool) -> Iterator[None]:
    """Around what may take long, with no bar: a terminal shows what it is."""
    from rich.console import Console

    console = Console(file=sys.stderr, highlight=False)
    with contextlib.nullcontext() if quiet or not console.is_terminal else console.status(what):
        yield


def figure(value: float) -> str:
    """Four digits after the point, unless the number is very small or large."""
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e4 else f"{value:.3e}"


def in_bytes(number: float) -> str:
    """So many bytes, in a few letters."""
    for unit in ("B", "kB", "MB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} GB"


def _speed(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def clock(seconds: float) -> str:
    """Hours, minutes and seconds; short times to a tenth."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
