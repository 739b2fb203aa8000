"""The tables of training steps: on the terminal, in docs/speed.md, and the short one of README.md."""

from collections.abc import Sequence

from rich.table import Table

from bench import step_floor
from bench.cases import FLOOR
from bench.machine import AVX2_ALONE
from bench.peers import ORT_TRAINING, OURS, TORCH
from bench.report import (
    NOTHING,
    Lines,
    Sides,
    busy,
    by_case,
    by_processor,
    headings,
    markdown_table,
    median,
    milliseconds,
    origin,
    ratio,
    terminal_table,
    times,
)
from bench.results import Row

PEERS = (ORT_TRAINING, TORCH)
# Runs of each side, and the steps of one: the second number where a step takes more than 100 ms.
RUNS, LONG_RUN, SHORT_RUN = 5, 100, 30


def step_legend(ours: str = OURS) -> str:
    """What `step_time` says."""
    return (
        "Milliseconds for forward, backward and AdamW: the median, in brackets the 10th to 90th percentile, and the "
        f"ratio to the median of {ours}. The second line is the best step."
    )


def on_terminal(rows: Sequence[Row]) -> Table:
    """One line per network."""
    return terminal_table("", _columns(rows), _lines(rows))


def training(rows: Sequence[Row]) -> str:
    """A section for each kind of processor."""
    parts = []
    for processor, measured in by_processor(rows).items():
        parts += [f"### Training steps on {processor}", markdown_table(_columns(measured), _lines(measured))]
        parts.append(_legend(measured))
    return "\n\n".join(parts)


def training_short(rows: Sequence[Row]) -> str:
    """For README.md: the processor measured last, medians alone."""
    measured = next(rows for name, rows in by_processor(rows).items() if not name.endswith(AVX2_ALONE))
    columns = ["training step, float32", "onnxgrad", *headings(measured, PEERS)]
    lines = [[sides[OURS].work, *(_median_time(sides[side], sides[OURS]) for side in (OURS, *PEERS))]
             for sides in by_case(measured)]  # fmt: skip
    bold = "**Bold**: faster than onnxgrad. " if any("**" in cell for line in lines for cell in line) else ""
    legend = (
        "Median milliseconds for forward, backward and AdamW; in brackets, how many times the median of onnxgrad. "
        f"{bold}{origin(measured, 'python -m bench.training')}"
    )
    return markdown_table(columns, lines) + "\n\n" + legend


def _median_time(row: Row, ours: Row) -> str:
    """A median; a peer's with how many times ours."""
    if row.median_ms is None:
        return row.note or NOTHING
    many = ratio(row, ours)
    if row is ours or many is None:
        return milliseconds(row.median_ms)
    cell = f"{milliseconds(row.median_ms)} ({times(many)})"
    return f"**{cell}**" if many < 1 else cell


def _columns(rows: Sequence[Row]) -> list[str]:
    return ["training step, float32", "onnxgrad ms", *headings(rows, PEERS), "floor", "peak MB", *PEERS, "loss"]


def _lines(rows: Sequence[Row]) -> Lines:
    lines = []
    for sides in by_case(rows):
        ours = sides[OURS]
        cells = [ours.work, *(step_time(sides[side], ours) for side in (OURS, *PEERS)), _floor(sides)]
        lines.append([*cells, *(_memory(sides[side], ours) for side in (OURS, *PEERS)), _losses(sides)])
    return lines


def step_time(row: Row, ours: Row) -> str:
    """The median and its range, below it the best step; a peer's with how many times ours."""
    if row.median_ms is None or row.best_ms is None:
        return row.note or NOTHING
    above, below = median(row), f"best {milliseconds(row.best_ms)}"
    many = ratio(row, ours)
    if row is not ours and many is not None and ours.best_ms is not None:
        above, below = f"{above}, {times(many)}", f"{below}, {times(row.best_ms / ours.best_ms)}"
        above = f"**{above}**" if many < 1 else above
    return f"{above}<br>{below}"


def _floor(sides: Sides) -> str:
    """ "220, 1.2×": the floor, and how many times the floor our step takes."""
    row, ours = sides.get(FLOOR), sides[OURS]
    many = ratio(ours, row)
    if row is None or row.median_ms is None or many is None:
        return NOTHING
    return f"{milliseconds(row.median_ms)}, × {many:.2f}"


def _memory(row: Row, ours: Row) -> str:
    if row.memory_mb is None:
        return NOTHING
    less = ours.memory_mb is not None and row.memory_mb < ours.memory_mb
    return f"**{row.memory_mb:.0f}**" if less else f"{row.memory_mb:.0f}"


def _losses(sides: Sides) -> str:
    """The loss, or those of all where they can be told apart."""
    told = [f"{sides[side].loss:.5f}" for side in (OURS, *PEERS) if sides[side].loss is not None]
    return told[0] if len(set(told)) == 1 else ", ".join(told)


def _legend(rows: Sequence[Row]) -> str:
    sentences = [
        f"{step_legend()} **Bold**: better than onnxgrad. Peak memory is that of building and five steps, without the "
        "libraries. Losses are those of the fifth step: onnxgrad, onnxruntime-training and PyTorch, or one number if "
        "they are equal.",
        *_floor_legend(rows),
    ]
    return "  \n".join([*sentences, *_notes(rows), origin(rows, "python -m bench.training")])


def _floor_legend(rows: Sequence[Row]) -> list[str]:
    """What the floor is, where there is one, and of what it was made."""
    told = [f"{row.work.split(':')[0]}: {row.note}" for row in rows if row.side == FLOOR]
    if not told:
        return []
    return [
        "Floor: a step whose products run at the machine's peak, the best rate that onnxgrad or PyTorch reaches on one "
        f"product of {step_floor.SIZE}, and whose other work runs at the speed of a large copy: results of products go "
        f"through memory {step_floor.PER_RESULT} times, parameters {step_floor.PER_PARAMETER} times; then how many "
        f"times the floor onnxgrad takes. {'; '.join(told)}."
    ]


def _notes(rows: Sequence[Row]) -> list[str]:
    """How long the runs were, and what else a reader should know of them."""
    found = []
    if any(row.p10_ms is not None for row in rows):
        found.append(
            f"Each side runs in its own process; the sides alternate, with {RUNS} runs of at least {LONG_RUN} steps."
        )
    if any(row.median_ms is not None and row.p10_ms is None for row in rows):
        found.append(
            "Rows without a range come from short runs (45 ms, the MLP 15 ms): their median and best are those of the "
            "means of runs."
        )
    short = [r for r in rows if r.calls is not None and r.calls < RUNS * LONG_RUN]
    if told := [f"{r.calls // RUNS} of {r.work.split(':')[0]} with {r.side}" for r in short if r.calls]:
        found.append(f"Runs are shorter where a step takes more than 100 ms: {', '.join(told)}.")
    if rows[0].processor.endswith(AVX2_ALONE):
        found.append("NumPy, PyTorch and onnxgrad use no newer instructions; onnxruntime has no such switch.")
    return found + busy(rows)
