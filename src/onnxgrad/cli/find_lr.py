"""onnxgrad train --find-lr: tries learning rates, plots the loss at each, and suggests one."""

import math
from pathlib import Path

import click

from onnxgrad.cli.plot import Curve, Panel, Point, text_plot, write_plot
from onnxgrad.cli.preparation import Files, Prepared
from onnxgrad.cli.training import Options
from onnxgrad.train.find_lr import LearningRates


def find_rate(options: Options, files: Files, prepared: Prepared) -> None:
    """Prints what it finds; the model stays as it is."""
    trainer = prepared.trainer
    found = trainer.find_lr(prepared.batches)
    if options.quiet or not trainer.ranks.is_first:
        return
    raw, smoothed = (_points(found, values) for values in (found.losses, found.smoothed))
    click.echo(text_plot(smoothed, "loss", "learning rate, as a power of ten"))
    if files.plot is not None:
        path = Path(options.plot) if options.plot is not None else options.output.with_suffix(".lr.svg")
        write_plot(path, [Panel("loss", _curves(found, raw, smoothed))], "learning rate, as a power of ten")
        click.echo(f"plot: {path}")
    if found.suggestion is None:
        click.echo("no rate lowers the loss: nothing can be suggested")
    else:
        click.echo(f"where the loss falls fastest: --lr {found.suggestion:.2g}")


def _points(found: LearningRates, losses: list[float]) -> list[Point]:
    """Those that are not far above the first: the last ones grow beyond all bounds."""
    first, least = found.smoothed[0], min(found.smoothed)
    most = first + max(first - least, abs(first) / 10)
    return [(math.log10(rate), loss) for rate, loss in zip(found.rates, losses, strict=True) if loss <= most]


def _curves(found: LearningRates, raw: list[Point], smoothed: list[Point]) -> list[Curve]:
    curves = [Curve("each update", raw, pale=True), Curve("smoothed", smoothed)]
    if found.suggestion is not None:
        at = found.rates.index(found.suggestion)
        curves.append(Curve("suggestion", [(math.log10(found.suggestion), found.smoothed[at])], marked=True))
    return curves
