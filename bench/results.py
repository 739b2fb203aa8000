"""The files of figures, bench/*.csv: a row for each case and side on each kind of processor, kept from run to run."""

import csv
import datetime
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from bench import machine
from bench.measure import Timing

FOLDER = Path(__file__).parent
OPERATORS = FOLDER / "results.csv"
TRAINING = FOLDER / "training.csv"
SESSIONS = FOLDER / "sessions.csv"
PAUSES = FOLDER / "pauses.csv"
BUILDING = FOLDER / "building.csv"
MODELS = FOLDER / "models.csv"
ARTIFACTS = FOLDER / "ort_training.csv"
PRECISION = FOLDER / "precision.csv"
STEP_FILES = FOLDER / "step_files.csv"
FIRST_USE = FOLDER / "first_use.csv"
PROFILE = FOLDER / "step_profile.csv"
THREADS = FOLDER / "threads.csv"


@dataclass
class Row:
    """What one side took for one case, in milliseconds a call; empty where it was not measured."""

    processor: str
    case: str
    work: str
    dtype: str
    side: str
    median_ms: float | None = None
    p10_ms: float | None = None
    p90_ms: float | None = None
    best_ms: float | None = None
    calls: int | None = None
    memory_mb: float | None = None
    loss: float | None = None
    note: str = ""
    machine: str = ""
    date: str = ""
    versions: str = ""

    def set_timing(self, timing: Timing) -> None:
        for name, value in asdict(timing).items():
            setattr(self, name, value)


_NUMBERS = ("median_ms", "p10_ms", "p90_ms", "best_ms", "memory_mb", "loss")


def new_row(case: str, work: str, dtype: str, side: str, versions: str = "") -> Row:
    """A row of this machine, measured today."""
    row = Row(machine.processor(), case, work, dtype, side)
    row.machine, row.date, row.versions = machine.description(), datetime.date.today().isoformat(), versions
    return row


def read(file: Path) -> list[Row]:
    """The rows of a file, none if there is no file."""
    if not file.exists():
        return []
    with file.open(newline="", encoding="utf-8") as lines:
        return [_parsed(record) for record in csv.DictReader(lines)]


def _parsed(record: dict[str, str]) -> Row:
    values: dict[str, Any] = {f.name: record[f.name] for f in fields(Row)}
    values |= {name: float(values[name]) if values[name] else None for name in _NUMBERS}
    values["calls"] = int(values["calls"]) if values["calls"] else None
    return Row(**values)


def update(file: Path, new: Sequence[Row], replaced: Callable[[Row], bool], order: Callable[[Row], Any]) -> None:
    """Puts new rows in the place of those of the same processor that `replaced` picks; other processors' rows stay.

    The processor measured last comes last in the file.
    """
    here = {row.processor for row in new}
    old = read(file)
    kept = [row for row in old if row.processor in here and not replaced(row)]
    write(file, [*(row for row in old if row.processor not in here), *sorted([*kept, *new], key=order)])


def write(file: Path, rows: Iterable[Row]) -> None:
    with file.open("w", newline="", encoding="utf-8") as lines:
        writer = csv.DictWriter(lines, [f.name for f in fields(Row)], lineterminator="\n")
        writer.writeheader()
        for row in rows:
            record = {name: "" if value is None else value for name, value in asdict(row).items()}
            rounded = {name: f"{record[name]:.6g}" for name in _NUMBERS if record[name] != ""}
            writer.writerow(record | rounded)
