"""What onnxgrad train does: checks everything, trains, writes the model, and shows the outcome."""

import contextlib
import math
import shlex
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from onnxgrad.cli.config import as_typed
from onnxgrad.cli.data import write_classes
from onnxgrad.cli.find_lr import find_rate
from onnxgrad.cli.group import Failed, sentence
from onnxgrad.cli.launch import processes
from onnxgrad.cli.outcome import curves, monitored, show_outcome
from onnxgrad.cli.plot import write_plot
from onnxgrad.cli.preparation import Files, Prepared, prepare
from onnxgrad.cli.reporting.facts import bytes_of, facts_at_start
from onnxgrad.cli.reporting.layers import NormRecorder
from onnxgrad.cli.reporting.names import Names
from onnxgrad.cli.reporting.page import write_report
from onnxgrad.cli.reporting.worst import examples_event
from onnxgrad.cli.run_log import Event, RunLog, numbers_of, read_log, up_to
from onnxgrad.cli.tensorboard import EventFile
from onnxgrad.cli.training import Options
from onnxgrad.edit.adapter_files import save_adapter
from onnxgrad.train.callbacks import Callback, EarlyStopping, KeepBest
from onnxgrad.train.fitting import TrainingStoppedError
from onnxgrad.train.interruption import Interrupted
from onnxgrad.train.progress import waiting

# What decides which batches there are: a run that goes on in the middle of an epoch has to have the same.
SAME_BATCHES = (
    "val", "batch_size", "drop_last", "no_shuffle", "accumulate", "seed", "stratify", "columns", "image_size",
    "normalize", "augment", "tokenizer", "length",
)  # fmt: skip


def earlier_events(options: Options, files: Files, steps: int) -> list[Event]:
    """The events of the run that this one resumes."""
    found = read_log(files.metrics) if files.metrics is not None else []
    if options.resume is None:
        unfinished = found and files.checkpoint.is_file() and not any(e["event"] == "end" for e in found)
        if unfinished and not options.overwrite:
            raise ValueError(
                f"{str(files.checkpoint)!r} belongs to an unfinished run: continue it with --resume {files.checkpoint}"
                ", or start over with --overwrite"
            )
        return []
    before: dict[str, Any] = next((e["options"] for e in reversed(found) if e["event"] == "start"), {})
    for name in SAME_BATCHES:
        now = _as_json(options)[name]
        if name in before and before[name] != now:
            raise ValueError(
                f"--resume: the run had --{name.replace('_', '-')} {_shown(before[name])}, now it is {_shown(now)}, "
                "which changes its batches"
            )
    return up_to(found, steps)


def _shown(value: Any) -> str:
    return "not set" if value in (None, False, []) else "set" if value is True else str(value)


def run(options: Options, context: click.Context) -> None:
    """The command."""
    launched = processes(options.device)
    is_first = launched is None or launched.rank == 0
    reports = options.report is not None
    if not is_first:  # it prints and writes nothing
        options = replace(options, quiet=True, metrics="none", plot="none", report=None,
                          tensorboard=None, overwrite=True)  # fmt: skip
    files = Files.of(options, is_first)
    prepared = prepare(options, launched)
    trainer = prepared.trainer
    if options.find_lr:
        find_rate(options, files, prepared)
        return
    earlier = earlier_events(options, files, trainer.steps)
    if not options.quiet:
        numbers = sum(math.prod(shape) for shape in trainer.shapes.values())
        count, examples = len(trainer.shapes), prepared.batches.examples
        training = (
            f"training {numbers:,} numbers in {count} parameters of {options.model.name} on {examples:,} examples"
        )
        for line in (*prepared.remarks, training):
            click.echo(line, err=True)
    if options.keep_best and options.resume is None and is_first:
        files.best.unlink(missing_ok=True)  # of another run
    if prepared.classes and is_first:
        write_classes(files.classes, prepared.classes)
    again = shlex.join(as_typed(context, resume=str(files.checkpoint)))
    if launched is not None:
        again = f"{launched.launcher} {again}"
    with contextlib.ExitStack() as stack:
        run_log = stack.enter_context(RunLog(files.metrics, earlier))
        board = None
        if options.tensorboard is not None:
            board = stack.enter_context(EventFile(options.tensorboard, trainer.steps))
        facts = facts_at_start(trainer, options.model, options.device, prepared.batches, prepared.validation)
        best = monitored(options, prepared.metrics)
        run_log.write({"event": "start", "step": trainer.steps, "options": _as_json(options), "best": best, **facts})
        stack.callback(_draw, files, run_log)  # whatever becomes of the run
        norms = NormRecorder(trainer, facts["parameters"], prepared.updates) if reports else None
        _fit(options, files, prepared, run_log, board, norms, again)
        with _or_go_on(again), waiting(f"writing {options.output.name}", options.quiet):
            if prepared.writes_adapters:
                model_files = save_adapter(trainer, files.output)
            else:
                model_files = trainer.export(files.output)
        run_log.write({"event": "end", "step": trainer.steps, "model_bytes": bytes_of(model_files)})
        if reports:
            run_log.write(_examples(options, prepared))
    if not options.quiet:
        written = _written(files, model_files, options, prepared.writes_adapters)
        written |= {"names of classes": files.classes} if prepared.classes else {}
        show_outcome(run_log, prepared.metrics, options, written)


def _draw(files: Files, run_log: RunLog) -> None:
    """Writes the plot and the report."""
    drawn: dict[str, tuple[Path | None, Callable[[Path], None]]] = {
        "plot": (files.plot, lambda path: write_plot(path, curves(run_log))),
        "report": (files.report, lambda path: write_report(path, run_log)),
    }
    for what, (path, write) in drawn.items():
        if path is not None:
            try:
                write(path)
            except OSError as error:  # no reason to lose more than this one
                click.echo(f"onnxgrad: the {what} could not be written: {sentence(error)}", err=True)


def _examples(options: Options, prepared: Prepared) -> Event:
    """The examples that the trained model gets most wrong."""
    targets = [] if isinstance(prepared.loss, str) else [part.target for part in prepared.loss.parts]
    of_data = next((prepared.classes[name] for name in targets if name in prepared.classes), None)
    names = Names.found(options.model, of_data, options.tokenizer)
    with waiting("looking for the examples with the highest loss", options.quiet):
        return examples_event(prepared.trainer, prepared.loss, prepared.validation, options.model, names)


def _fit(
    options: Options,
    files: Files,
    prepared: Prepared,
    run_log: RunLog,
    board: EventFile | None,
    norms: NormRecorder | None,
    again: str,
) -> None:
    trainer = prepared.trainer

    def log(event: Event) -> None:
        run_log.write(event)
        if norms is not None and (found := norms.after(event)) is not None:
            run_log.write(found)
        if board is not None:
            to_board(board, event)

    log.on_every_rank = norms is not None  # type: ignore[attr-defined]  # each has the norms of its shard

    try:
        trainer.fit(
            prepared.batches, options.epochs, validation=prepared.validation, metrics=prepared.metrics,
            quiet=options.quiet, checkpoint=files.checkpoint, save_every=options.save_every, log=log,
            callbacks=_callbacks(options, files),
        )  # fmt: skip
    except Interrupted as stop:
        run_log.write({"event": "stopped", "step": trainer.steps, "why": str(stop)})
        go_on = f"; to resume: {again}" if stop.saved is not None else ""
        if trainer.ranks.is_first:
            click.echo(f"onnxgrad: {stop}{go_on}", err=True)
        raise click.exceptions.Exit(128 + signal.Signals[stop.signal]) from None
    except TrainingStoppedError as error:
        run_log.write({"event": "stopped", "step": trainer.steps, "why": str(error)})
        raise Failed(str(error)) from None
    except OSError as error:  # the disk is full, or gone
        why = sentence(error)
        raise Failed(f"{why}; to resume: {again}" if files.checkpoint.is_file() else why) from None


@contextlib.contextmanager
def _or_go_on(again: str) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError) as error:  # the disk is full, or onnx refuses the model
        raise Failed(
            f"the model could not be written: {sentence(error)}; the checkpoint has the trained weights: {again}"
        ) from None


def _callbacks(options: Options, files: Files) -> list[Callback]:
    monitor = options.monitor or "loss"
    stopping = [] if options.early_stopping is None else [EarlyStopping(options.early_stopping, monitor)]
    return [*stopping, *([KeepBest(files.best, monitor)] if options.keep_best else [])]


def to_board(board: EventFile, event: Event) -> None:
    """An event as scalars."""
    if event["event"] == "step":
        values = {
            f"train/{name}": event[name] for name in ("loss", "lr", "gradient_norm") if event.get(name) is not None
        }
        board.scalars(event["step"], values)
    else:
        values = {f"validation/{name}": value for name, value in numbers_of(event["validation"]).items()}
        board.scalars(event["step"], {"train/epoch_loss": event["loss"], **values})
        board.flush()


def _as_json(options: Options) -> dict[str, Any]:
    return {
        name: str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value
        for name, value in asdict(options).items()
    }


def _written(files: Files, model_files: Sequence[Path], options: Options, is_adapter: bool) -> dict[str, Path | None]:
    model = (
        {"adapters": model_files[0], "their settings": next(iter(model_files[1:]), None)}
        if is_adapter
        else {"trained model": files.output, "its weights": next(iter(model_files[1:]), None)}
    )
    return {
        **model,
        "checkpoint": files.checkpoint,
        "checkpoint of the best epoch": files.best if options.keep_best else None,
        "every update": files.metrics, "plot": files.plot, "report": files.report, "TensorBoard": options.tensorboard,
    }  # fmt: skip
