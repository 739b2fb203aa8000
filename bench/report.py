"""How figures are told, on the terminal and on pages, and the tables of operators."""

import sys
from collections.abc import Callable, Iterable, Sequence

from rich.console import Console
from rich.table import Table

from bench.cases import FLOOR, INTO, MEMORY
from bench.peers import NUMPY, ORT_TRAINING, OURS, TORCH
from bench.quiet import BUSY
from bench.results import Row

PEERS = (ORT_TRAINING, TORCH, NUMPY)
NOTHING = "–"

Sides = dict[str, Row]
Lines = list[list[str]]


def milliseconds(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def times(ratio: float) -> str:
    digits = 2 if ratio < 0.995 else 1 if ratio < 9.95 else 0
    return f"{ratio:.{digits}f}×"


def median(row: Row | None, unit: float = 1.0) -> str:
    """ "5.14 (4.9–6)": the median, and between which times eight calls of ten are; in so many parts of a ms."""
    if row is None or row.median_ms is None:
        return NOTHING
    told = milliseconds(row.median_ms * unit)
    if row.p10_ms is not None and row.p90_ms is not None:
        told += f" ({milliseconds(row.p10_ms * unit)}–{milliseconds(row.p90_ms * unit)})"
    return told


def ratio(row: Row | None, ours: Row | None) -> float | None:
    """How many times our median a side's is; None where one is missing."""
    if row is None or ours is None or row.median_ms is None or ours.median_ms is None:
        return None
    return row.median_ms / ours.median_ms


def by_case(rows: Iterable[Row]) -> list[Sides]:
    """The sides of each case and type."""
    found: dict[tuple[str, str], Sides] = {}
    for row in rows:
        found.setdefault((row.case, row.dtype), {})[row.side] = row
    return list(found.values())


def by_processor(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """The rows of each kind of processor, first that measured last."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.processor, []).append(row)
    return dict(reversed(found.items()))


def headings(rows: Sequence[Row], peers: Iterable[str]) -> list[str]:
    """The peers, with their versions where these are known."""
    versions = rows[0].versions.split(", ")
    return [next((v for v in versions if v.startswith(peer)), peer).split("+")[0] for peer in peers]


def markdown_table(columns: Sequence[str], lines: Lines, left: int = 1) -> str:
    """The first `left` columns are words, the others numbers."""
    rule = "|" + "---|" * left + "--:|" * (len(columns) - left)
    return "\n".join([f"| {' | '.join(columns)} |", rule, *(f"| {' | '.join(line)} |" for line in lines)])


def terminal_table(title: str, columns: Sequence[str], lines: Lines, left: int = 1) -> Table:
    """The same on a terminal."""
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < left else "right")
    for line in lines:
        table.add_row(*(cell.replace("<br>", "\n").replace("**", "") for cell in line))
    return table


def terminal(width: int = 170) -> Console:
    """Wide enough for tables where it is not a terminal."""
    return Console(width=None if sys.stdout.isatty() else width)


def sections(
    rows: Iterable[Row],
    heading: str,
    module: str,
    table: Callable[[list[Row]], str],
    legend: Callable[[list[Row]], str | None] = lambda rows: None,
) -> str:
    """A section for each kind of processor: a table, and how it was measured by that module of bench."""
    parts = []
    for processor, found in by_processor(rows).items():
        told = [legend(found), *busy(found), origin(found, f"python -m bench.{module}")]
        parts += [f"### {heading} {processor}", table(found), "  \n".join(filter(None, told))]
    return "\n\n".join(parts) or f"Not measured yet: `python -m bench.{module}` does."


def origin(rows: Sequence[Row], command: str) -> str:
    """Where, when and by which versions the rows were measured."""
    machines, dates, versions = (span(getattr(r, name) for r in rows) for name in ("machine", "date", "versions"))
    return f"{machines}, {dates}, `{command}`" + (f": {versions}." if versions else ".")


def span(values: Iterable[str]) -> str:
    """What all rows share, or everything that rows of several runs have."""
    return " and ".join(sorted(set(values)))


def busy(rows: Sequence[Row]) -> list[str]:
    """A sentence, if rows were measured in company."""
    count = sum(row.note.startswith(BUSY) for row in rows)
    return [f"Measured while other processes used the machine: {count} of these."] if count else []


def operators_on_terminal(title: str, rows: Sequence[Row]) -> Table:
    """One line per case."""
    lines = []
    for sides in by_case(rows):
        row, ours = next(iter(sides.values())), sides.get(OURS)
        cells = [median(ours), *(_beside(sides.get(side), ours) for side in (INTO, *PEERS, FLOOR))]
        lines.append([row.work, row.dtype, *cells, _memory(sides.get(MEMORY))])
    return terminal_table(title, ("work", "type", "onnxgrad ms", "into", *PEERS, "floor", "extra memory"), lines, 2)


def operators(rows: Sequence[Row]) -> str:
    """A section for each kind of processor."""
    parts = []
    for processor, measured in by_processor(rows).items():
        first = [r for r in measured if r.dtype in ("float32", "int64")]
        others = [r for r in measured if r.dtype not in ("float32", "int64")]
        parts += [f"### Operators on {processor}", _operators_table(first, with_type=False), _legend(measured)]
        if others:
            parts += ["The other types:", _operators_table(others, with_type=True)]
    return "\n\n".join(parts)


def _operators_table(rows: Sequence[Row], with_type: bool) -> str:
    words = ["work", "type"] if with_type else ["work, float32"]
    lines = []
    for sides in by_case(rows):
        row, ours = next(iter(sides.values())), sides.get(OURS)
        cells = [row.work, *([row.dtype] if with_type else []), median(ours)]
        lines.append([*cells, *(_beside(sides.get(peer), ours) for peer in PEERS), _memory(sides.get(MEMORY))])
    return markdown_table([*words, "onnxgrad ms", *headings(rows, PEERS), "extra memory"], lines, len(words))


def _beside(row: Row | None, ours: Row | None) -> str:
    """ "46 (5.2×)": a side's median, and how many times ours; bold where it is less."""
    many = ratio(row, ours)
    if row is None or row.median_ms is None or many is None:
        return NOTHING
    told = f"{milliseconds(row.median_ms)} ({times(many)})"
    return (f"**{told}**" if many < 1 else told) + _differs(row)


def _differs(row: Row) -> str:
    return "†" if row.note.startswith("differs") else ""


def _memory(row: Row | None) -> str:
    if row is None or row.memory_mb is None:
        return NOTHING
    return f"{row.memory_mb:.1f} MB" + (f" ({row.note})" if row.note else "")


def _legend(rows: Sequence[Row]) -> str:
    sentences = [
        "Milliseconds per call: the median, and the 10th to 90th percentile; in brackets after a peer's, its ratio to "
        f"the median of onnxgrad. **Bold**: faster than onnxgrad. {NOTHING}: not supported.",
    ]
    if any(row.median_ms is not None and row.p10_ms is None for row in rows):
        sentences.append("Where there is no range, the median is that of runs of 70 ms or less, each by its mean.")
    if any(_differs(row) for row in rows):
        sentences.append("†: the result differs from the definition by more than one rounding.")
    sentences += busy(rows)
    sentences += [
        f"{row.work}: zeroing the output and reading dY once, and nothing else, takes {milliseconds(row.median_ms)} ms."
        for row in rows
        if row.side == FLOOR and row.dtype == "float32" and row.median_ms is not None
    ]
    sentences += [
        "PyTorch has one GRU only, the one with linear_before_reset 1; both are compared with it.",
        origin(rows, "python -m bench"),
    ]
    return "  \n".join(sentences)
