"""bench/results.csv: one row for every case and side, kept from run to run."""

import csv
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from bench.cases import DTYPES, GROUPS

FILE = Path(__file__).with_name("results.csv")
BUSY = "other processes used"  # how the note of a row opens that was measured in company


@dataclass
class Row:
    """What one side needed for one case; ratio_to_ours is its time over ours, so more than 1 means we are faster."""

    case: str
    work: str
    dtype: str
    side: str
    best_ms: float | None = None
    median_ms: float | None = None
    ratio_to_ours: float | None = None
    extra_mb: float | None = None
    bar: str = ""
    passed: bool | None = None
    note: str = ""
    machine: str = ""
    date: str = ""
    versions: str = ""

    @property
    def group(self) -> str:
        return self.case.split("/")[0]


_NUMBERS = ("best_ms", "median_ms", "ratio_to_ours", "extra_mb")


def read() -> list[Row]:
    """The rows of the file, none if there is no file."""
    if not FILE.exists():
        return []
    with FILE.open(newline="", encoding="utf-8") as file:
        return [_parse(record) for record in csv.DictReader(file)]


def _parse(record: dict[str, str]) -> Row:
    row = Row(**{f.name: record.get(f.name, "") for f in fields(Row)})  # type: ignore[arg-type]
    for name in _NUMBERS:
        setattr(row, name, float(record[name]) if record[name] else None)
    row.passed = {"yes": True, "no": False}.get(record["passed"])
    return row


def replace(old: Iterable[Row], new: Sequence[Row], groups: Sequence[str], dtypes: Sequence[str]) -> list[Row]:
    """The old rows with those of the groups and types that were run again replaced, in the usual order."""
    kept = [row for row in old if row.group not in groups or row.dtype not in dtypes]
    types = [*DTYPES, "int64"]
    return sorted([*kept, *new], key=lambda row: (GROUPS.index(row.group), types.index(row.dtype)))


def write(rows: Iterable[Row]) -> None:
    with FILE.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Row)], lineterminator="\n")
        writer.writeheader()
        for row in rows:
            record = asdict(row)
            for name in _NUMBERS:
                record[name] = "" if record[name] is None else f"{record[name]:.5g}"
            record["passed"] = {True: "yes", False: "no", None: ""}[row.passed]
            writer.writerow(record)
