"""The outcome of a run: a table of its epochs, the files it wrote, and the curves of its plot."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onnxgrad.cli.plot import Curve, Panel, smoothed
from onnxgrad.cli.run_log import Event, RunLog, numbers_of
from onnxgrad.cli.tables import plain_console, show, size
from onnxgrad.cli.training import Options
from onnxgrad.train.metrics import ConfusionMatrix, Metric
from onnxgrad.train.progress import clock, figure, in_bytes

MOST_EPOCHS = 20  # in the table: the last ones, and the best
MOST_CLASSES = 25  # of a matrix


def show_outcome(
    log: RunLog, metrics: Mapping[str, Metric], options: Options, files: Mapping[str, Path | None]
) -> None:
    """Prints tables."""
    epochs = log.of("epoch")
    best = best_epoch(epochs, **monitored(options, metrics))
    matrices = {name: metric for name, metric in metrics.items() if isinstance(metric, ConfusionMatrix)}
    heading, rows = epoch_table(epochs, [name for name in metrics if name not in matrices], best)
    first = len(epochs) - MOST_EPOCHS
    rows = [row for k, row in enumerate(rows) if k >= first or epochs[k] is best]
    show(heading, rows, numbers=len(heading) - 2)
    written = best if options.keep_best else epochs[-1] if epochs else None
    for name, metric in matrices.items():
        if written is not None and name in written["validation"]:
            show_matrix(name, written["epoch"], written["validation"][name], metric.classes)
    console = plain_console()
    if len(rows) < len(epochs):
        console.print(f"… and {len(epochs) - len(rows)} epochs before", markup=False)
    console.print(f"trained in {clock(sum(e['seconds'] for e in epochs))}", markup=False)
    found = {what: path for what, path in files.items() if path is not None and path.exists()}
    show(["written", "", ""], [[what, str(p), "" if p.is_dir() else size(p)] for what, p in found.items()], numbers=1)


def monitored(options: Options, metrics: Mapping[str, Metric]) -> dict[str, Any]:
    """What decides which epoch is best; the arguments of best_epoch()."""
    monitor = options.monitor or "loss"
    return {"monitor": monitor, "is_max": monitor in metrics and metrics[monitor].higher_is_better}


def epoch_table(
    epochs: Sequence[Event], metrics: Sequence[str], best: Event | None
) -> tuple[list[str], list[list[str]]]:
    """The heading, and a row for each epoch."""
    measured = ["loss", *metrics] if any(e["validation"] for e in epochs) else []
    heading = ["epoch", "", "updates", "train loss", *(f"val {name}" for name in measured), "time", "peak memory"]
    rows = [
        [str(e["epoch"]), "best" if e is best else "", str(e["step"]), _number(e["loss"]),
         *(_number(e["validation"].get(name)) for name in measured), clock(e["seconds"]),
         in_bytes(e["peak_memory"]) if e.get("peak_memory") else "–"]
        for e in epochs
    ]  # fmt: skip
    return heading, rows


def show_matrix(name: str, epoch: int, matrix: Sequence[Sequence[int]], classes: Sequence[str]) -> None:
    """Prints the table of a confusion matrix."""
    labels = list(classes) or [str(k) for k in range(len(matrix))]
    heading = f"{name} of epoch {epoch}, a row for each true class, a column for each predicted one"
    if len(labels) > MOST_CLASSES:
        plain_console().print(f"{heading}: {len(labels)} classes, too many for a table; the log has it", markup=False)
        return
    plain_console().print(heading, markup=False)
    show(["", *labels], [[label, *map(str, row)] for label, row in zip(labels, matrix, strict=True)], len(labels))


def best_epoch(epochs: Sequence[Event], monitor: str = "loss", is_max: bool = False) -> Event | None:
    """The first of the best ones on validation data, or without such that with the least loss in training."""
    if not epochs:
        return None
    sign = -1 if is_max else 1
    return min(epochs, key=lambda e: _sortable(e["validation"].get(monitor) if e["validation"] else e["loss"], sign))


def _sortable(value: float | None, sign: int) -> float:
    return sign * value if value is not None and not math.isnan(value) else math.inf


def _number(value: float | None) -> str:
    return "–" if value is None else figure(value)


def step_curves(log: RunLog) -> list[Panel]:
    """The learning rate and the norm of the gradient at every update."""
    steps = log.of("step")
    found = {"learning rate": "lr", "gradient norm": "gradient_norm"}
    return [
        Panel(title, [Curve(title, [(e["step"], e[name]) for e in steps if e.get(name) is not None])])
        for title, name in found.items()
    ]


def curves(log: RunLog) -> list[Panel]:
    """The loss of every update, its mean, and what was measured after each epoch."""
    steps = [(e["step"], e["loss"]) for e in log.of("step") if e["loss"] is not None]
    epochs = [e for e in log.of("epoch") if e["validation"]]
    names = dict.fromkeys(name for e in epochs for name in numbers_of(e["validation"]))
    measured = {
        name: Curve(
            f"validation {name}",
            [(e["step"], v) for e in epochs if (v := e["validation"].get(name)) is not None],
            marked=True,
        )
        for name in names
    }
    loss = [Curve("each update", steps, pale=True), Curve("training", smoothed(steps))]
    if "loss" in measured:
        loss.append(measured.pop("loss"))
    return [Panel("loss", loss), *(Panel(name, [curve]) for name, curve in measured.items())]
