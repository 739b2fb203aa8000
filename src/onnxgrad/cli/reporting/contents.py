"""What the page of a run shows, from the events of its log."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from onnxgrad.cli.outcome import best_epoch, curves, epoch_table, step_curves
from onnxgrad.cli.plot import Curve, Panel, thinned
from onnxgrad.cli.reporting.layers import norms_by_layer, recorded_norms, sizes_by_layer
from onnxgrad.cli.run_log import Event, RunLog
from onnxgrad.train.progress import clock, figure, in_bytes

MOST_POINTS = 4000  # of a curve: as many as a large screen has, four times
NO_NORMS = "Not recorded: onnxgrad train logs the norms of single parameters when it is given --report."
NO_EXAMPLES = "Not recorded: onnxgrad train looks for these at the end of a run that is given --report."
SIZES = {"memory": in_bytes, "model_bytes": in_bytes}
Pairs = list[list[str]]


def contents(log: RunLog) -> dict[str, Any]:
    """All of the page as one object for JSON."""
    start = next(iter(log.of("start")[::-1]), {})
    options = start.get("options", {})
    measured = list(dict.fromkeys(name for e in log.of("epoch") for name in e["validation"] if name != "loss"))
    heading, rows = epoch_table(log.of("epoch"), measured)
    return {
        "title": Path(options.get("model") or "a run").name,
        "state": _state(log),
        "tiles": _tiles(log, start),
        "panels": [_panel(panel) for panel in (*curves(log), *step_curves(log)) if any(c.points for c in panel.curves)],
        "marks": [[e["step"], "resumed"] for e in log.of("start") if e.get("step")],
        "norms": _norms(log, start),
        "examples": next(iter(log.of("examples")[::-1]), {"problem": NO_EXAMPLES}),
        "epochs": {"heading": heading, "rows": rows},
        "sizes": _sizes(log, start),
        "settings": _settings(options),
        "machine": _machine(start),
    }


def _state(log: RunLog) -> dict[str, str]:
    """How the run ended: only what came last counts."""
    last = next((e for e in reversed(log.events) if e["event"] in ("start", "stopped", "end")), None)
    if last is None:  # what a script has written with fit(log=…)
        return {"kind": "logged", "text": f"{len(log.of('step')):,} updates, as they were logged"}
    if last["event"] == "end":
        return {"kind": "finished", "text": "finished"}
    if last["event"] == "stopped":
        return {"kind": "stopped", "text": last["why"]}
    return {"kind": "unfinished", "text": "not finished: it is still running, or was killed"}


def _tiles(log: RunLog, start: Event) -> Pairs:
    """The numbers that matter most, each with a name and a remark."""
    epochs, steps = log.of("epoch"), log.of("step")
    best, tiles = best_epoch(epochs), []
    if best is not None:
        found = best["validation"] or {"loss": best["loss"]}
        where = f"epoch {best['epoch']} of {epochs[-1]['epoch']}"
        kind = "validation" if best["validation"] else "training"
        tiles += [[f"{kind} {name}", _figure(value), f"best {where}"] for name, value in found.items()]
        tiles.append(["time", clock(sum(e["seconds"] for e in epochs)), f"{len(epochs)} epochs, with validation"])
    elif steps:
        tiles.append(["training loss", _figure(steps[-1]["loss"]), "of the last update"])
    if steps:
        tiles.append(["updates", f"{steps[-1]['step']:,}", ""])
    if "parameters" in start:
        sizes = sizes_by_layer(start["parameters"])
        tiles.append(["trained", f"{sum(sizes.values()):,}", f"numbers in {len(start['parameters'])} parameters"])
    return tiles


def _figure(value: float | None) -> str:
    return "–" if value is None else figure(value)


def _panel(panel: Panel) -> dict[str, Any]:
    return {"title": panel.title, "curves": [_curve(curve) for curve in panel.curves if curve.points]}


def _curve(curve: Curve) -> dict[str, Any]:
    points = list(curve.points) if curve.marked else thinned(curve.points, MOST_POINTS)
    return {
        "name": curve.name, "marked": curve.marked, "pale": curve.pale,
        "x": [float(f"{x:.8g}") for x, _ in points], "y": [float(f"{y:.5g}") for _, y in points],
    }  # fmt: skip


def _norms(log: RunLog, start: Event) -> dict[str, Any]:
    names = list(start.get("parameters", {}))
    steps, rows = recorded_norms(log, names)
    if not steps:
        return {"problem": NO_NORMS}
    layers = norms_by_layer(names, rows)
    kinds = {"layers": {"names": list(layers), "rows": list(layers.values())}}
    if len(layers) < len(names):
        kinds["parameters"] = {"names": names, "rows": rows}
    return {"steps": steps, "kinds": kinds}


def _sizes(log: RunLog, start: Event) -> dict[str, Any]:
    epochs, end = log.of("epoch"), next(iter(log.of("end")), {})
    facts: Pairs = []
    for what, event in (("model before", start), ("model after", end)):
        if "model_bytes" in event:
            facts.append([what, in_bytes(event["model_bytes"])])
    peaks = [e["peak_memory"] for e in epochs if e.get("peak_memory")]
    if peaks:
        facts.append(["peak memory", in_bytes(max(peaks))])
    if epochs:
        facts.append(["an epoch takes", clock(sum(e["seconds"] for e in epochs) / len(epochs))])
    for kind, count in start.get("examples", {}).items():
        if count is not None:
            facts.append([f"examples, {kind}", f"{count:,}"])
    layers = sizes_by_layer(start.get("parameters", {}))
    return {"facts": facts, "layers": [[name, size] for name, size in layers.items()]}


def _settings(options: Mapping[str, Any]) -> Pairs:
    """Those that say something, under their names on the command line."""
    shown = {name: value for name, value in options.items() if value not in (None, False, [])}
    return [[name.replace("_", "-"), _in_words(value)] for name, value in shown.items()]


def _in_words(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "yes" if value is True else str(value)


def _machine(start: Event) -> Pairs:
    words: Mapping[str, Callable[[Any], str]] = SIZES
    found = {**start.get("machine", {}), **start.get("versions", {})}
    return [[name, words.get(name, str)(value)] for name, value in found.items()]


def expect_report(path: Path) -> None:
    """Raises one sentence if the file does not look like a page."""
    if path.suffix not in (".html", ".htm"):
        raise ValueError(f"{str(path)!r} ends in {path.suffix!r}, expected .html for a report")
