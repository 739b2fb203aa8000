"""Preparation of a run of onnxgrad train: all errors in its options and files are found here."""

import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.cli import specs
from onnxgrad.cli.data import balanced, expect_classes, expect_columns, read_both, validation_of
from onnxgrad.cli.launch import Processes
from onnxgrad.cli.overwriting import expect_other_files
from onnxgrad.cli.plot import expect_plottable
from onnxgrad.cli.reporting.contents import expect_report
from onnxgrad.cli.training import Options
from onnxgrad.edit.adapter_files import ADAPTER_FILES, is_adapter_path
from onnxgrad.edit.lora import lora
from onnxgrad.edit.replace_head import replace_head
from onnxgrad.graph.adapters import adapters_of
from onnxgrad.graph.files import expect_place, load
from onnxgrad.graph.head import head_of
from onnxgrad.graph.suggest import suggestion
from onnxgrad.passes.find_logits import activation_of
from onnxgrad.sources.fields import fields_of
from onnxgrad.sources.source import Source
from onnxgrad.train.batches import Batches
from onnxgrad.train.losses import Total
from onnxgrad.train.metrics import Metric
from onnxgrad.train.trainer import Trainer


@dataclass(frozen=True)
class Files:
    """The files that a run writes; None is not written."""

    output: Path
    checkpoint: Path
    best: Path
    metrics: Path | None
    plot: Path | None
    report: Path | None
    classes: Path

    @classmethod
    def of(cls, options: Options, are_written: bool = True) -> "Files":
        """By default beside the output; each place is tried if it is this process that writes."""
        output = options.output
        if not output.name:  # "." or "/"
            expect_place(output)

        def beside(given: str | Path | None, suffix: str) -> Path:
            return Path(given) if given is not None else output.with_suffix(suffix)

        is_taken = output.suffix == ".safetensors"  # by adapters
        files = cls(
            output,
            beside(options.checkpoint, ".checkpoint.safetensors" if is_taken else ".safetensors"),
            output.with_suffix(".best.safetensors"),
            None if options.metrics == "none" else beside(options.metrics, ".jsonl"),
            None if options.plot == "none" else beside(options.plot, ".svg"),
            options.report,
            output.with_suffix(".classes.json"),
        )
        if not are_written:
            return files
        named = {
            "--output": output, "--checkpoint": files.checkpoint, "--metrics": files.metrics, "--plot": files.plot,
            "--report": files.report,
        }  # fmt: skip
        taken: dict[Path, str] = {options.model.absolute(): "MODEL", options.data.absolute(): "--data"}
        if options.val is not None:
            taken.setdefault(Path(options.val).absolute(), "--val")
        for option, path in named.items():
            if path is None:
                continue
            other = taken.setdefault(path.absolute(), option)
            if other != option and (other, option) != ("MODEL", "--output"):  # of these the user is asked
                raise ValueError(f"{option} and {other} are both {str(path)!r}, expected files of their own")
            if not (option == "--output" and path.is_dir()):  # which is for adapters; preparing a run looks for such
                expect_place(path)
            expect_writable(option, path.parent)
        if files.plot is not None:
            expect_plottable(files.plot)
        if files.report is not None:
            expect_report(files.report)
        if options.tensorboard is not None:
            there = next(p for p in (options.tensorboard, *options.tensorboard.absolute().parents) if p.exists())
            expect_writable("--tensorboard", there)
        return files


def expect_writable(option: str, folder: Path) -> None:
    """Raises one sentence unless a file can be written: permissions alone do not tell."""
    with _sentence_about(option, folder), tempfile.TemporaryFile(dir=folder):
        pass


@contextlib.contextmanager
def _sentence_about(option: str, folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(f"{option}: nothing can be written into {str(folder)!r} ({error.strerror})") from None


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to start."""

    trainer: Trainer
    loss: Total | str
    batches: Batches
    validation: Batches | None
    metrics: dict[str, Metric]
    updates: int
    remarks: list[str]
    classes: Mapping[str, Sequence[str]]  # of targets and features that are text
    writes_adapters: bool = False  # alone, without the model


def prepare(options: Options, processes: Processes | None = None) -> Prepared:
    """Reads and checks everything, and makes the trainer."""
    loaded = load(options.model, "train")
    expect_other_files(options.model, loaded, options.output, options.overwrite)
    loss = _loss(options, loaded)
    if options.new_head is not None:
        loaded = _with_new_head(options, loaded, loss)
    loaded = _with_adapters(loaded, options)
    writes_adapters = _writes_adapters(loaded, options.output)
    graph = loaded.graph
    outputs = [str(v.name) for v in graph.outputs]
    targets = [] if isinstance(loss, str) else [part.target for part in loss.parts]
    wanted = fields_of(loaded, loss, "train")
    needed = [field.name for field in wanted]
    expect_columns(str(options.model), needed)
    is_validated = validation_of(options) is not None
    for name in ("--metric", "--keep-best", "--early-stopping"):
        if getattr(options, name[2:].replace("-", "_")) and not is_validated:
            raise ValueError(f"{name} needs validation examples: name a file or a share with --val")
    metrics = specs.metrics_by_name(options.metric, loss, outputs, needed, of_sigmoid(graph))
    _expect_comparable(options, metrics)
    source, held_out, remarks = read_both(options, wanted, targets)
    remarks += [] if options.new_head is None else [_about_head(loaded)]
    shapes = {str(v.name): list(v.shape or ()) for v in graph.outputs}
    for option, examples in (("--data", source), ("--val", held_out)):
        if examples is not None:
            expect_classes(option, examples, loss, shapes)
    if options.class_weights is not None:
        loss = balanced(source, loss, shapes)
    batches = Batches(
        source, options.batch_size, shuffle=not options.no_shuffle, seed=options.seed, drop_last=options.drop_last,
        workers=options.workers,
    )  # fmt: skip
    updates = options.epochs * len(batches) // options.accumulate
    if not updates:
        raise ValueError(
            f"{batches.examples} examples in batches of {options.batch_size} make no update: lower --batch-size, "
            "--accumulate or leave out --drop-last"
        )
    trainer = _trainer(options, loaded, loss, updates, processes)
    validating = None
    if held_out is not None:
        validating = Batches(held_out, options.batch_size, shuffle=False, workers=options.workers)
    trainer.expect_sizes(batches, validating)
    _try_out("--data", trainer, source, options.batch_size, {})
    if held_out is not None:
        _try_out("--val", trainer, held_out, options.batch_size, metrics)
    return Prepared(trainer, loss, batches, validating, metrics, updates, remarks, source.classes, writes_adapters)


def _trainer(
    options: Options, loaded: ir.Model, loss: Total | str, updates: int, processes: Processes | None
) -> Trainer:
    """With the state of the checkpoint that is to be resumed, if any."""
    given = {"lr": options.lr, "weight_decay": options.weight_decay, "momentum": options.momentum}
    optimizer = specs.optimizer(options.optimizer, given, options.group)
    schedule = specs.schedule(options.schedule, options.warmup, updates)
    if options.shard_optimizer and processes is None:
        raise ValueError("--shard-optimizer is for several processes: start them by mpiexec or torchrun")
    is_first = processes is None or processes.rank == 0
    if is_first and options.resume is not None and not options.resume.is_file():
        raise FileNotFoundError(f"--resume: {str(options.resume)!r} does not exist, expected a checkpoint")
    trainer = Trainer(
        loaded if options.lora or options.new_head is not None else options.model, loss, optimizer,
        options.trainable or None,
        freeze=options.freeze, freeze_statistics=options.freeze_statistics, device=options.device,
        precision=options.precision, schedule=schedule, clip_norm=options.clip_norm, clip_value=options.clip_value,
        accumulate=options.accumulate, seed=options.seed, recompute=options.recompute, ema=options.ema,
        layer_decay=options.layer_decay,
        communicator=None if processes is None else processes.communicator, shard_optimizer=options.shard_optimizer,
    )  # fmt: skip
    if options.resume is not None:
        trainer.restore(options.resume)
    return trainer


def _with_adapters(loaded: ir.Model, options: Options) -> ir.Model:
    """The model with the adapters that were asked for."""
    given = {"rank": options.lora_rank, "alpha": options.lora_alpha}
    settings: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if options.lora:
        return lora(loaded, options.lora, seed=options.seed, **settings)  # type: ignore[no-any-return]
    for name in settings:
        raise ValueError(f"--lora-{name} needs --lora, which names the weights that get adapters")
    return loaded


def _writes_adapters(loaded: ir.Model, output: Path) -> bool:
    """Whether the output is for adapters alone; raises if it is and there are none."""
    if is_adapter_path(output) and adapters_of(loaded):
        return True
    if output.suffix in ADAPTER_FILES:
        raise ValueError(
            f"-o: {str(output)!r} is a file for adapters, and the model has none: add some with --lora, or name a file "
            "that ends with .onnx"
        )
    if output.is_dir():
        raise IsADirectoryError(f"{str(output)!r} is a folder, expected the name of a file to write")
    return False


def _expect_comparable(options: Options, metrics: Mapping[str, Metric]) -> None:
    """Raises one sentence unless --monitor names what can tell which epoch is the best."""
    name = options.monitor
    if name is None:
        return
    if not options.keep_best and options.early_stopping is None:
        raise ValueError("--monitor is for --keep-best and --early-stopping")
    if name not in ("loss", *metrics):
        raise ValueError(f"--monitor: {name!r} is not measured{suggestion(name, ['loss', *metrics])}")
    if name != "loss" and metrics[name].higher_is_better is None:
        raise ValueError(f"--monitor: {name!r} is a {type(metrics[name]).__name__}, not a number that can be best")


def _loss(options: Options, loaded: ir.Model) -> Total | str:
    outputs = [str(v.name) for v in loaded.graph.outputs]
    return specs.loss(options.loss, outputs, [str(v.name) for node in loaded.graph for v in node.outputs])


def _with_new_head(options: Options, loaded: ir.Model, loss: Total | str) -> ir.Model:
    """The model with a head for other classes, the same for the same seed: a checkpoint of a run fits the next one."""
    outputs = [str(v.name) for v in loaded.graph.outputs]
    predicted = [] if isinstance(loss, str) else [part.prediction for part in loss.parts if part.prediction in outputs]
    output = predicted[0] if len(set(predicted)) == 1 else None
    found: ir.Model = replace_head(loaded, options.new_head, output=output, seed=options.seed)
    return found


def _about_head(model: ir.Model) -> str:
    shapes = {name: list(model.graph.initializers[name].shape or ()) for name in head_of(model)}
    return f"new head: {', '.join(f'{name} {shape}' for name, shape in shapes.items())}"


def of_sigmoid(graph: ir.Graph) -> set[str]:
    """Values that are probabilities."""
    made_by = {str(v.name): activation_of(v)[0] for node in graph for v in node.outputs}
    return {name for name, node in made_by.items() if node is not None and node.op_type == "Sigmoid"}


def _try_out(option: str, trainer: Trainer, source: Source, size: int, metrics: Mapping[str, Metric]) -> None:
    """Evaluates one batch, which changes nothing: the others have the same shapes and types."""
    try:
        trainer.evaluate([source.take(np.arange(min(size, len(source))))], metrics)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{option}: {error}") from None
