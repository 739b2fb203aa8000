"""What a reader sees: a table on the terminal and the one in README.md, both from the same rows."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from bench.cases import FLOOR, INTO, MEMORY, OURS
from bench.peers import NUMPY, ORT_TRAINING, TORCH
from bench.results import BUSY, Row

README = Path(__file__).resolve().parents[1] / "README.md"
BEGIN, END = "<!-- speed:begin -->", "<!-- speed:end -->"
PEERS = (ORT_TRAINING, TORCH, NUMPY)
NOTHING = "–"

By = dict[tuple[str, str], dict[str, Row]]


def _by_case(rows: Iterable[Row]) -> By:
    found: By = {}
    for row in rows:
        found.setdefault((row.case, row.dtype), {})[row.side] = row
    return found


def milliseconds(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def times(ratio: float) -> str:
    digits = 2 if ratio < 0.995 else 1 if ratio < 9.95 else 0
    return f"{ratio:.{digits}f}×"


def _differs(row: Row) -> str:
    return "†" if row.note.startswith("differs") else ""


def _figure(row: Row | None) -> str:
    """ "46 (5.2×)": milliseconds, and how many times ours."""
    if row is None or row.best_ms is None or row.ratio_to_ours is None:
        return NOTHING
    ratio = f" ({times(row.ratio_to_ours)})" if row.side != OURS else ""
    return milliseconds(row.best_ms) + ratio + _differs(row)


def _memory(row: Row | None) -> str:
    if row is None or row.extra_mb is None:
        return NOTHING
    return f"{row.extra_mb:.1f} MB" + (f" ({row.note})" if row.note else "")


def terminal_table(title: str, rows: Iterable[Row]) -> Table:
    """One line per case; green where a bar is met, red and ✗ where it is missed."""
    table = Table(title=title, title_justify="left", caption_justify="left")
    table.add_column("work")
    table.add_column("type")
    for heading in ("onnxgrad ms", "into", *PEERS, "floor", "extra memory"):
        table.add_column(heading, justify="right")
    for (_, dtype), sides in _by_case(rows).items():
        cells = [_coloured(_figure(sides.get(side)), sides.get(side)) for side in (OURS, INTO, *PEERS, FLOOR)]
        cells.append(_coloured(_memory(sides.get(MEMORY)), sides.get(MEMORY)))
        table.add_row(next(iter(sides.values())).work, dtype, *cells)
    return table


def _coloured(words: str, row: Row | None) -> Text:
    if row is None or row.passed is None:
        return Text(words)
    return Text(words, style="green") if row.passed else Text(f"✗ {words}", style="bold red")


def missed(rows: Iterable[Row]) -> list[str]:
    """A line for every bar that was not reached."""
    return [f"{r.work}, {r.dtype}: {_what(r)}, asked for {r.bar}" for r in rows if r.passed is False]


def not_compared(rows: Iterable[Row]) -> list[str]:
    """A line for every bar that had nothing to be held against."""
    return [f"{r.work}, {r.dtype}: no figure of {r.side}, {r.note}" for r in rows if r.bar and r.passed is None]


def _what(row: Row) -> str:
    if row.side == MEMORY:
        return f"extra memory {_memory(row)}"
    if row.side == OURS:
        return f"{_figure(row)} ms"
    if row.side == FLOOR:
        return f"{1 / (row.ratio_to_ours or 1):.2f}× the floor of {milliseconds(row.best_ms or 0)} ms"
    return f"{row.side} takes {row.ratio_to_ours:.2f}× our time"


def markdown(rows: Sequence[Row]) -> str:
    """The block for README.md."""
    if not rows:
        return "Nothing measured yet: `make bench` fills this in."
    tables = [_markdown_table([r for r in rows if r.dtype in ("float32", "int64")], "float32", with_type=False)]
    others = [r for r in rows if r.dtype not in ("float32", "int64")]
    if others:
        tables += ["The other types:", _markdown_table(others, "", with_type=True)]
    tables.insert(1, _legend(rows))
    return "\n\n".join(tables)


def _markdown_table(rows: Sequence[Row], dtype: str, with_type: bool) -> str:
    versions = rows[0].versions.split(", ") if rows else []
    headings = [next((v for v in versions if v.startswith(peer)), peer).split("+")[0] for peer in PEERS]
    work = f"work, {dtype}" if dtype else "work"
    lines = [
        f"| {work} | " + ("type | " if with_type else "") + f"onnxgrad ms | {' | '.join(headings)} | extra memory |",
        "|---|" + ("---|" if with_type else "") + "--:|" * (len(PEERS) + 2),
    ]
    for (_, case_type), sides in _by_case(rows).items():
        cells = [next(iter(sides.values())).work, *([case_type] if with_type else []), _figure(sides.get(OURS))]
        cells += [_emphasised(sides.get(peer)) for peer in PEERS]
        lines.append(f"| {' | '.join([*cells, _memory(sides.get(MEMORY))])} |")
    return "\n".join(lines)


def _emphasised(row: Row | None) -> str:
    loss = row is not None and row.ratio_to_ours is not None and row.ratio_to_ours < 1
    return f"**{_figure(row)}**" if loss else _figure(row)


def _legend(rows: Sequence[Row]) -> str:
    sentences = [
        "Milliseconds a call, best of alternating rounds, smaller is better; in brackets, how many times onnxgrad's "
        f"time. **Bold**: faster than onnxgrad. {NOTHING}: cannot do it.",
    ]
    if any(_differs(row) for row in rows):
        sentences.append("†: its result differs from the definition by more than rounding once.")
    if busy := sum(row.note.startswith(BUSY) for row in rows):
        sentences.append(f"{busy} of these cases were measured while other processes used the machine.")
    sentences += [
        f"{row.work}: zeroing the output and reading dY once, and nothing else, takes {milliseconds(row.best_ms)} ms."
        for row in rows
        if row.side == FLOOR and row.dtype == "float32" and row.best_ms is not None
    ]
    sentences += [
        "PyTorch has one GRU only, the one with linear_before_reset 1; both are compared with it.",
        f"{span(r.machine for r in rows)}, {span(r.date for r in rows)}, `make bench`: "
        f"{span(r.versions for r in rows)}.",
    ]
    return "  \n".join(sentences)


def span(values: Iterable[str]) -> str:
    """What all rows share, or everything that rows of several runs have."""
    return " and ".join(sorted(set(values)))


def update_readme(rows: Sequence[Row]) -> bool:
    """Rewrites the block between the markers; False if README.md has none."""
    return replace_block(BEGIN, END, markdown(rows))


def replace_block(begin: str, end: str, words: str) -> bool:
    """Puts words between two markers of README.md; False if it has none."""
    text = README.read_text(encoding="utf-8") if README.exists() else ""
    if begin not in text or end not in text:
        return False
    head, _, rest = text.partition(begin)
    _, _, tail = rest.partition(end)
    README.write_text(f"{head}{begin}\n{words}\n{end}{tail}", encoding="utf-8")
    return True
