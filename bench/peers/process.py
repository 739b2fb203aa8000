"""A side in a process of its own, driven over its pipes by pickled messages: what to call, and for how many calls."""

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.peers import CannotRunError

ROOT = Path(__file__).resolve().parents[2]


class Process:
    """child.py, by an interpreter, with a folder to import from before all others; started when first asked."""

    def __init__(self, interpreter: Path | None = None, folder: Path | None = None) -> None:
        self.interpreter = interpreter or Path(sys.executable)
        paths = [str(folder) if folder else "", os.environ.get("PYTHONPATH", "")]
        self._environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
        self._child: subprocess.Popen[bytes] | None = None

    def ask(self, method: str, **arguments: Any) -> Any:
        """Calls a method of child.py's server and waits for what it gives."""
        child = self._running()
        assert child.stdin is not None and child.stdout is not None
        try:
            pickle.dump((method, arguments), child.stdin)
            child.stdin.flush()
            answer = pickle.load(child.stdout)
        except (EOFError, BrokenPipeError):
            self.close()
            raise CannotRunError("its process died") from None
        if "cannot" in answer:
            raise CannotRunError(answer["cannot"])
        return answer["result"]

    def run(self, calls: int) -> list[float]:
        """Seconds of each of so many calls on end."""
        seconds: list[float] = self.ask("run", calls=calls)
        return seconds

    def prepare_training(self, side: str, folder: Path, case: str, threads: int, steps: int) -> list[float]:
        """Gets a training step ready; the losses of the first so many."""
        what = {"side": side, "folder": folder, "case": case, "size": "full", "threads": threads}
        losses: list[float] = self.ask("prepare_training", steps=steps, **what)
        return losses

    def close(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.communicate()
            self._child = None

    def _running(self) -> "subprocess.Popen[bytes]":
        if self._child is None:
            self._child = subprocess.Popen(
                [str(self.interpreter), "-m", "bench.peers.child"],
                cwd=ROOT,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        return self._child
