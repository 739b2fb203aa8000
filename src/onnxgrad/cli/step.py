"""onnxgrad step: a training step as plain ONNX files."""

import functools
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from onnxgrad.cli.group import command
from onnxgrad.cli.tables import plain_console, show, size
from onnxgrad.cli.training import AT_LEAST_1, FILE, with_options

SHARED = (
    "model", "loss", "optimizer", "lr", "weight_decay", "momentum", "group", "schedule", "warmup", "trainable",
    "freeze", "freeze_statistics", "clip_norm", "clip_value", "seed",
)  # fmt: skip
CONTENTS = {
    "step": "batch, learning rate, state → loss, next state", "evaluation": "batch, parameters → loss, predictions",
    "model": "the model, whose weights can be written over", "initial": "the state to begin with",
    "description": "which output feeds which input",
}  # fmt: skip


@command
@functools.partial(with_options, names=SHARED)
@click.option(
    "-o",
    "--output",
    required=True,
    type=FILE,
    metavar="STEP.onnx",
    help="The step; the other files are written next to it.",
)
@click.option(
    "--updates", type=AT_LEAST_1, metavar="NUMBER", help="Total number of updates, for --schedule and --warmup."
)
def step(model: Path, output: Path, updates: int | None, **options: Any) -> None:
    """Write a training step of MODEL as plain ONNX files.

    Any onnxruntime runs them, without onnxgrad. STEP.onnx takes a batch, the learning rate and the state, and returns
    the loss and the next state: parameters, running statistics, optimizer state and the number of updates.
    STEP.eval.onnx returns loss and predictions, STEP.safetensors holds the initial state, STEP.model.onnx is the model
    with inputs for the trained weights, and STEP.json maps outputs to inputs.

    \b
    onnxgrad step model.onnx --loss cross-entropy:logits --optimizer adamw --lr 1e-3 -o step.onnx
    onnxgrad step model.onnx --loss mse:y --trainable 'head.*' --schedule cosine --updates 500 -o step.onnx
    """
    from onnxgrad.cli import specs
    from onnxgrad.graph.files import expect_place, load
    from onnxgrad.train.step_file import export_step

    expect_place(output)
    loaded = load(model, "step")
    outputs = [str(v.name) for v in loaded.graph.outputs]
    loss = specs.loss(options["loss"], outputs, {str(v.name) for node in loaded.graph for v in node.outputs})
    given = {name: options[name] for name in ("lr", "weight_decay", "momentum")}
    optimizer = specs.optimizer(options["optimizer"], given, options["group"])
    schedule = specs.schedule(options["schedule"], options["warmup"], updates or 1)
    if updates is None and schedule != specs.schedule("constant", None, 1):
        raise ValueError("--schedule and --warmup need --updates, the total number of updates")
    with Console(stderr=True).status("writing the step"):
        files = export_step(
            model, output, loss, optimizer, options["trainable"] or None, freeze=options["freeze"],
            freeze_statistics=options["freeze_statistics"], clip_norm=options["clip_norm"],
            clip_value=options["clip_value"], seed=options["seed"], schedule=schedule,
        )  # fmt: skip
    rows = [[getattr(files, field).name, size(getattr(files, field)), text] for field, text in CONTENTS.items()]
    show(["file", "size", "content"], rows)
    plain_console().print("docs/anywhere.md shows the loop in several languages", markup=False)
