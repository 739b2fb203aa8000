"""Ctrl-C and a batch scheduler's SIGTERM: noted while a step runs, handled when it is complete."""

import contextlib
import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any

SIGNALS = ("SIGINT", "SIGTERM")


class Interrupted(KeyboardInterrupt):
    """A KeyboardInterrupt: a signal stopped training; `saved` is the checkpoint written, `signal` the signal's name."""

    def __init__(self, message: str, signal_name: str, saved: Any) -> None:
        super().__init__(message)
        self.signal, self.saved = signal_name, saved


class Interruption:
    """Within this context the first signal is only noted, in `received`; a second Ctrl-C stops at once.

    Only the main thread receives signals: in any other this does nothing. With `quiet` it prints nothing.
    """

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet
        self.received: str | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():
            for name in SIGNALS:
                self._before[getattr(signal, name)] = signal.signal(getattr(signal, name), self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number).name
        if self._quiet:
            return
        with contextlib.suppress(OSError, ValueError):  # stderr may be closed
            print("\nstopping when this step is done; Ctrl-C again stops at once", file=sys.stderr, flush=True)
