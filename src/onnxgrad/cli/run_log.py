"""The log of a run: one JSON object per line, written as it goes, and read again when the run is resumed."""

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from onnxgrad.graph.files import errors_about, replaced

Event = dict[str, Any]


class RunLog:
    """The events of a run, in memory and, unless `path` is None, in a file, to which each is written at once.

    An event has a name, `event`: "start", "step", "epoch", "stopped" or "end"; with --report also "gradients" and
    "examples". `earlier` are those of the run that this one resumes: they come first.
    """

    def __init__(self, path: Path | None, earlier: Sequence[Event] = ()) -> None:
        self.events: list[Event] = list(earlier)
        self._file = None
        self._path = Path() if path is None else path
        if path is not None:
            with replaced(path) as draft:
                draft.write_text("".join(map(_line, self.events)), encoding="utf-8")
            self._file = path.open("a", encoding="utf-8", buffering=1)  # so that others can follow it

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._file is not None:
            # Closing tries once more to write what could not be written; the first error is the one to report.
            with contextlib.suppress(OSError) if error is not None else errors_about(self._path):
                self._file.close()

    def write(self, event: Mapping[str, Any]) -> None:
        """Adds an event."""
        self.events.append(dict(event))
        if self._file is not None:
            with errors_about(self._path):
                self._file.write(_line(event))

    def of(self, name: str) -> list[Event]:
        """The events of a name; of an epoch that ended twice the later one."""
        found = [e for e in self.events if e["event"] == name]
        return list({e["epoch"]: e for e in found}.values()) if name == "epoch" else found


def read_log(path: Path) -> list[Event]:
    """The events in a file, of which the last line may be cut off; none if the file does not exist."""
    if not path.is_file():
        return []
    events: list[Event] = []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            event = json.loads(line)
            if not isinstance(event, dict) or not isinstance(event.get("event"), str):
                raise ValueError
        except ValueError:
            if events and number == len(lines):
                break
            raise ValueError(f"{str(path)!r} is not the log of a run: line {number} is not an event") from None
        events.append(event)
    return events


def up_to(events: Sequence[Event], step: int) -> list[Event]:
    """The events up to an update: the later ones will happen again."""
    return [e for e in events if e["event"] != "end" and e.get("step", 0) <= step]


def numbers_of(validation: Mapping[str, Any]) -> dict[str, Any]:
    """What was measured after an epoch, without what is no single number: matrices."""
    return {name: value for name, value in validation.items() if not isinstance(value, list)}


def _line(event: Mapping[str, Any]) -> str:
    return json.dumps(plain(event), ensure_ascii=False, allow_nan=False) + "\n"


def plain(value: Any) -> Any:
    """A value for JSON, which has no NaN and no infinity."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
