"""What a reader sees of bench/training.csv: a table on the terminal, and the one in README.md."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from rich.table import Table
from rich.text import Text

from bench import report
from bench.peers import ORT_TRAINING, TORCH
from bench.report import NOTHING, milliseconds, span, times
from bench.results import BUSY

OURS = "onnxgrad"
PEERS = (ORT_TRAINING, TORCH)
BEGIN, END = "<!-- training:begin -->", "<!-- training:end -->"
_NUMBERS = ("best_ms", "median_ms", "ratio_to_ours", "peak_mb", "loss")


@dataclass
class Row:
    """What one side needed for a training step; ratio_to_ours is its time over ours, so more than 1: we are faster."""

    case: str
    work: str
    side: str
    best_ms: float | None = None
    median_ms: float | None = None
    ratio_to_ours: float | None = None
    peak_mb: float | None = None
    loss: float | None = None  # of the last step that is compared
    bar: str = ""
    passed: bool | None = None
    note: str = ""
    machine: str = ""
    date: str = ""
    versions: str = ""

    def record(self) -> dict[str, Any]:
        """For a file."""
        record = asdict(self)
        for name in _NUMBERS:
            record[name] = "" if record[name] is None else f"{record[name]:.6g}"
        record["passed"] = {True: "yes", False: "no", None: ""}[self.passed]
        return record

    @classmethod
    def parsed(cls, record: dict[str, str]) -> "Row":
        """From a file."""
        values: dict[str, Any] = {f.name: record[f.name] for f in fields(cls)}
        for name in _NUMBERS:
            values[name] = float(values[name]) if values[name] else None
        values["passed"] = {"yes": True, "no": False}.get(values["passed"])
        return cls(**values)


def _by_case(rows: Iterable[Row]) -> dict[str, dict[str, Row]]:
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(row.case, {})[row.side] = row
    return found


def _time(row: Row) -> str:
    if row.best_ms is None or row.ratio_to_ours is None:
        return row.note or NOTHING
    return milliseconds(row.best_ms) + (f" ({times(row.ratio_to_ours)})" if row.side != OURS else "")


def _memory(row: Row) -> str:
    return NOTHING if row.peak_mb is None else f"{row.peak_mb:.0f}"


def _loss(row: Row) -> str:
    return NOTHING if row.loss is None else f"{row.loss:.5f}"


def terminal_table(rows: Iterable[Row]) -> Table:
    """One line per network; green where a bar is met, red and ✗ where it is missed."""
    table = Table("training step, float32")
    for what in ("ms", "peak MB", "loss"):
        for side in (OURS, *PEERS):
            table.add_column(f"{side} {what}", justify="right")
    for sides in _by_case(rows).values():
        cells = [_coloured(_time(sides[s]), sides[s] if s != OURS else None) for s in (OURS, *PEERS)]
        cells += [_coloured(_memory(sides[s]), sides[s] if s == OURS else None) for s in (OURS, *PEERS)]
        cells += [Text(_loss(sides[s])) for s in (OURS, *PEERS)]
        table.add_row(sides[OURS].work, *cells)
    return table


def _coloured(words: str, row: Row | None) -> Text:
    if row is None or row.passed is None:
        return Text(words)
    return Text(words, style="green") if row.passed else Text(f"✗ {words}", style="bold red")


def missed(rows: Iterable[Row]) -> list[str]:
    """A line for every bar that was not reached."""
    found = []
    for row in rows:
        if row.passed is False:
            what = f"peak memory {_memory(row)} MB" if row.side == OURS else f"{row.side} takes {_time(row)}"
            found.append(f"{row.work}: {what}, asked for {row.bar}")
    return found


def markdown(rows: Sequence[Row]) -> str:
    """The block for README.md."""
    if not rows:
        return "Nothing measured yet: `python -m bench.training` fills this in."
    versions = rows[0].versions.split(", ")
    headings = [next((v for v in versions if v.startswith(peer)), peer).split("+")[0] for peer in PEERS]
    lines = [
        f"| training step, float32 | onnxgrad ms | {' | '.join(headings)} | peak MB | {' | '.join(PEERS)} | loss |",
        "|---|" + "--:|" * 7,
    ]
    for sides in _by_case(rows).values():
        cells = [sides[OURS].work, _time(sides[OURS])]
        for peer in PEERS:
            loses = (sides[peer].ratio_to_ours or 1) < 1
            cells.append(f"**{_time(sides[peer])}**" if loses else _time(sides[peer]))
        held = sides[OURS].peak_mb
        cells.append(_memory(sides[OURS]))
        for peer in PEERS:
            less = held is not None and (sides[peer].peak_mb or held) < held
            cells.append(f"**{_memory(sides[peer])}**" if less else _memory(sides[peer]))
        lines.append(f"| {' | '.join([*cells, _losses(sides)])} |")
    return "\n".join(lines) + "\n\n" + _legend(rows)


def _losses(sides: dict[str, Row]) -> str:
    """The loss, or those of all where they can be told apart."""
    told = [_loss(sides[side]) for side in (OURS, *PEERS) if sides[side].loss is not None]
    return told[0] if len(set(told)) == 1 else ", ".join(told)


def _legend(rows: Sequence[Row]) -> str:
    sentences = [
        "Forward, backward and AdamW; milliseconds a step, best of alternating rounds, in brackets how many times "
        "onnxgrad's time. **Bold**: better than onnxgrad. Peak memory of building and five steps, besides what the "
        "libraries hold. Loss of the fifth step: onnxgrad's, onnxruntime-training's and PyTorch's, once where they are "
        "the same.",
    ]
    if busy := sum(row.note.startswith(BUSY) for row in rows):
        sentences.append(f"{busy} of these were measured while other processes used the machine.")
    sentences.append(
        f"{span(r.machine for r in rows)}, {span(r.date for r in rows)}, `python -m bench.training`: "
        f"{span(r.versions for r in rows)}."
    )
    return "  \n".join(sentences)


def update_readme(rows: Sequence[Row]) -> bool:
    """Rewrites the block between the markers; False if README.md has none."""
    return report.replace_block(BEGIN, END, markdown(rows))
