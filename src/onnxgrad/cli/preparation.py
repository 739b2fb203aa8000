"""A run of onnxgrad train before it starts: everything that can be wrong with it is found here."""

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from onnxgrad.cli import specs
from onnxgrad.cli.data import Columns, expect_classes, expect_columns, read_columns, unused, validation
from onnxgrad.cli.launch import Processes
from onnxgrad.cli.overwriting import expect_other_files
from onnxgrad.cli.plot import expect_plottable
from onnxgrad.cli.training import Options
from onnxgrad.graph.files import expect_place, load
from onnxgrad.passes.find_logits import activation_of
from onnxgrad.train.batches import Batches
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

    @classmethod
    def of(cls, options: Options, are_written: bool = True) -> "Files":
        """By default beside the output; each place is tried if it is this process that writes."""
        output = options.output

        def beside(given: str | Path | None, suffix: str) -> Path:
            return Path(given) if given is not None else output.with_suffix(suffix)

        files = cls(
            output,
            beside(options.checkpoint, ".safetensors"),
            output.with_suffix(".best.safetensors"),
            None if options.metrics == "none" else beside(options.metrics, ".jsonl"),
            None if options.plot == "none" else beside(options.plot, ".svg"),
        )
        if not are_written:
            return files
        named = {"--output": output, "--checkpoint": files.checkpoint, "--metrics": files.metrics, "--plot": files.plot}
        taken: dict[Path, str] = {options.model.absolute(): "MODEL", options.data.absolute(): "--data"}
        if options.val is not None:
            taken.setdefault(Path(options.val).absolute(), "--val")
        for option, path in named.items():
            if path is None:
                continue
            other = taken.setdefault(path.absolute(), option)
            if other != option and (other, option) != ("MODEL", "--output"):  # of these the user is asked
                raise ValueError(f"{option} and {other} are both {str(path)!r}, expected files of their own")
            expect_place(path)
            expect_writable(option, path.parent)
        if files.plot is not None:
            expect_plottable(files.plot)
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
    batches: Batches
    validation: Batches | None
    metrics: dict[str, Metric]
    remarks: list[str]


def prepare(options: Options, processes: Processes | None = None) -> Prepared:
    """Reads and checks everything, and makes the trainer."""
    loaded = load(options.model, "train")
    expect_other_files(options.model, loaded, options.output, options.overwrite)
    graph = loaded.graph
    outputs = [str(v.name) for v in graph.outputs]
    values = {str(v.name): v for node in graph for v in node.outputs}
    loss = specs.loss(options.loss, outputs, values)
    targets = [] if isinstance(loss, str) else [part.target for part in loss.parts]
    inputs = [str(v.name) for v in graph.inputs if v.name not in graph.initializers]
    needed = list(dict.fromkeys([*inputs, *(t for t in targets if t not in graph.initializers)]))
    expect_columns(str(options.model), needed)
    if options.metric and options.val is None:
        raise ValueError("--metric is measured on examples to validate with: name a file or a share with --val")
    if options.keep_best and options.val is None:
        raise ValueError("--keep-best goes by the loss on examples to validate with: name a file or a share with --val")
    metrics = specs.metrics_by_name(options.metric, loss, outputs, needed, of_sigmoid(graph))
    columns, others = read_columns("--data", options.data, needed)
    remarks = [unused(options.data, others)] if others else []
    held_out: Columns | None = None
    if options.val is not None:
        columns, held_out = validation(options.val, columns, options.seed)
    shapes = {str(v.name): list(v.shape or ()) for v in graph.outputs}
    for option, examples in (("--data", columns), ("--val", held_out)):
        if examples is not None:
            expect_classes(option, examples, loss, shapes)
    batches = Batches(
        columns, options.batch_size, shuffle=not options.no_shuffle, seed=options.seed, drop_last=options.drop_last
    )
    updates = options.epochs * len(batches) // options.accumulate
    if not updates:
        raise ValueError(
            f"{batches.examples} examples in batches of {options.batch_size} make no update: lower --batch-size, "
            "--accumulate or leave out --drop-last"
        )
    given = {"lr": options.lr, "weight_decay": options.weight_decay, "momentum": options.momentum}
    optimizer = specs.optimizer(options.optimizer, given, options.group)
    schedule = specs.schedule(options.schedule, options.warmup, updates)
    if options.shard_optimizer and processes is None:
        raise ValueError("--shard-optimizer is for several processes: start them by mpiexec or torchrun")
    is_first = processes is None or processes.rank == 0
    if is_first and options.resume is not None and not options.resume.is_file():
        raise FileNotFoundError(f"--resume: {str(options.resume)!r} does not exist, expected a checkpoint")
    trainer = Trainer(
        options.model, loss, optimizer, options.trainable or None,
        freeze=options.freeze, freeze_statistics=options.freeze_statistics, device=options.device,
        precision=options.precision, schedule=schedule, clip_norm=options.clip_norm, clip_value=options.clip_value,
        accumulate=options.accumulate, seed=options.seed, recompute=options.recompute,
        communicator=None if processes is None else processes.communicator, shard_optimizer=options.shard_optimizer,
    )  # fmt: skip
    if options.resume is not None:
        trainer.restore(options.resume)
    validating = None if held_out is None else Batches(held_out, options.batch_size, shuffle=False)
    trainer.expect_sizes(batches, validating)
    _try_out("--data", trainer, columns, options.batch_size, {})
    if held_out is not None:
        _try_out("--val", trainer, held_out, options.batch_size, metrics)
    return Prepared(trainer, batches, validating, metrics, remarks)


def of_sigmoid(graph: ir.Graph) -> set[str]:
    """Values that are probabilities."""
    made_by = {str(v.name): activation_of(v)[0] for node in graph for v in node.outputs}
    return {name for name, node in made_by.items() if node is not None and node.op_type == "Sigmoid"}


def _try_out(option: str, trainer: Trainer, columns: Columns, size: int, metrics: Mapping[str, Metric]) -> None:
    """Evaluates one batch, which changes nothing: the others have the same shapes and types."""
    try:
        trainer.evaluate([{name: a[:size] for name, a in columns.items()}], metrics)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{option}: {error}") from None
