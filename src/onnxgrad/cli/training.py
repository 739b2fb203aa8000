"""onnxgrad train: its options; run.py does what they say."""

import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import click

from onnxgrad.cli.config import use_config
from onnxgrad.cli.group import command

FILE = click.Path(path_type=Path)
AT_LEAST_0, AT_LEAST_1 = click.IntRange(0), click.IntRange(1)
POSITIVE, NOT_NEGATIVE = click.FloatRange(0, min_open=True), click.FloatRange(0)


class KindsOption(click.Option):
    """An option whose help names the kinds there are: specs.py reads them from the classes when help is shown."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        from onnxgrad.cli.specs import KINDS

        *first, last = KINDS[self.opts[0]]
        self.help = str(self.help).replace("KINDS", f"{', '.join(first)} or {last}")
        return super().get_help_record(ctx)


def option(help: str, metavar: str = "NUMBER", *names: str, **settings: Any) -> dict[str, Any]:
    """What a field of Options is on the command line: its help, and what else click.option takes."""
    return {"help": help, "metavar": metavar, "names": names, **settings}


# fmt: off
@dataclass(frozen=True)
class Options:
    """The argument and the options of the command line; a field is all that a new option needs."""

    model: Path
    config: Annotated[Path | None, option(
        "Settings from a file, under these names; the command line wins.", "FILE.toml",
        is_eager=True, callback=use_config)]
    output: Annotated[Path, option(
        "The trained model; or its adapters alone, if that is a folder, a .safetensors or an .onnx_adapter file.",
        "FILE.onnx", "-o", required=True)]
    data: Annotated[Path, option(
        "Examples with the inputs of the model and every target: a table (.csv, .tsv, .parquet, .jsonl), arrays (.npz, "
        "a folder of .npy), a text (.txt), a folder with a folder of images for each class, or a Hugging Face dataset "
        "on disk.", "FILE|FOLDER", required=True)]
    val: Annotated[str | None, option(
        "Examples to validate with after each epoch, or the share of --data to hold out for it (0.1); by default the "
        "folder val/ of --data, if there is one.", "FILE|SHARE")]
    stratify: Annotated[bool, option("Hold out the same share of each class.")]
    columns: Annotated[Sequence[str], option(
        "The columns of a table that an input or target is made of, patterns allowed; by default those that are left. "
        "Repeatable.", "NAME=COLUMN,…")]
    image_size: Annotated[str | None, option("Of images, where the model leaves it open: 224, or 480x640.", "PIXELS")]
    normalize: Annotated[str | None, option(
        "Which numbers stand for colors: imagenet, 0..1, -1..1, 0..255 or MEANS/DEVIATIONS, with commas between those "
        "of channels; by default imagenet for three channels.", "KIND")]
    augment: Annotated[str | None, option("Change images at random: flip, crop, color, rotate.", "NAME,…")]
    tokenizer: Annotated[Path | None, option("The tokenizer.json for data that is text.", "FILE")]
    length: Annotated[int | None, option(
        "The most tokens of an example, or those of a chunk of a text.", "TOKENS", type=AT_LEAST_1)]
    workers: Annotated[int, option(
        "Processes that read examples ahead of the step; the numbers stay the same.", type=AT_LEAST_0, default=0)]
    loss: Annotated[Sequence[str], option(
        "KINDS of an output, with settings: 'mse:y:target=z:weight=0.5'. Or an output that is the loss. Repeatable: "
        "they are added.", "KIND:OUTPUT", cls=KindsOption, required=True)]
    metric: Annotated[Sequence[str], option(
        "KINDS, measured on --val: 'accuracy:logits:top=5'. Repeatable.", "KIND[:OUTPUT]", cls=KindsOption)]
    class_weights: Annotated[str | None, option(
        "Weigh the classes of the loss so that all count the same.", "[balanced]", type=click.Choice(["balanced"]))]
    new_head: Annotated[int | None, option(
        "A new last layer for so many classes in place of the one before the output that --loss is of; '--trainable "
        "head' trains it alone.", "CLASSES", type=AT_LEAST_1)]
    epochs: Annotated[int, option("How often to go through the examples.", type=AT_LEAST_1, default=1)]
    batch_size: Annotated[int, option("Examples in a batch.", type=AT_LEAST_1, default=32)]
    drop_last: Annotated[bool, option("Leave out a last batch that is smaller than the others.")]
    no_shuffle: Annotated[bool, option("Take the examples in their order.")]
    optimizer: Annotated[str, option(
        "KINDS, with settings: 'adamw:betas=0.9,0.95'.", "KIND", cls=KindsOption, default="adamw")]
    lr: Annotated[float | None, option("Learning rate; by default the optimizer's.", type=NOT_NEGATIVE)]
    weight_decay: Annotated[float | None, option("By default the optimizer's.", type=NOT_NEGATIVE)]
    momentum: Annotated[float | None, option("Of the optimizers that have it.", type=NOT_NEGATIVE)]
    group: Annotated[Sequence[str], option(
        "Other settings for parameters of some names: '*.bias:weight-decay=0', 'encoder.*:lr-factor=0.1'. Repeatable.",
        "PATTERN:NAME=VALUE")]
    layer_decay: Annotated[float | None, option(
        "Factor of the learning rate for each layer between a parameter and the model's end.", "FACTOR",
        type=click.FloatRange(0, 1, min_open=True))]
    schedule: Annotated[str, option(
        "Of the learning rate: KINDS, with settings: 'step:every=500'.", "KIND", cls=KindsOption, default="constant")]
    warmup: Annotated[float | None, option(
        "How long the learning rate grows to its full value; under 1 a share of all updates.", "UPDATES|SHARE",
        type=NOT_NEGATIVE)]
    find_lr: Annotated[bool, option(
        "Try learning rates instead of training: shows the loss at each of them, and suggests one.")]
    trainable: Annotated[Sequence[str], option(
        "What to train; by default all parameters, as `onnxgrad inspect` shows them; 'head' is a new head. Repeatable.",
        "PATTERN")]
    freeze: Annotated[Sequence[str], option("Parameters and statistics to leave as they are. Repeatable.", "PATTERN")]
    freeze_statistics: Annotated[bool, option(
        "BatchNormalization whose weights are not trained keeps its statistics and normalizes with them.")]
    lora: Annotated[Sequence[str], option(
        "Put LoRA adapters beside these weights and train them alone, and what --trainable names: '*query*|*value*'. "
        "Repeatable.", "PATTERN")]
    lora_rank: Annotated[int | None, option("Of the adapters; by default 8.", type=AT_LEAST_1)]
    lora_alpha: Annotated[float | None, option(
        "Adapters are multiplied by alpha / rank; by default 16.", type=POSITIVE)]
    clip_norm: Annotated[float | None, option("Bound of the gradient's norm, over all parameters.", type=POSITIVE)]
    clip_value: Annotated[float | None, option("Bound of every number in the gradient.", type=POSITIVE)]
    accumulate: Annotated[int, option("Batches averaged for one update.", type=AT_LEAST_1, default=1)]
    ema: Annotated[float | None, option(
        "Keep a moving average of the parameters (0.999): validation and the written model use it.", "DECAY",
        type=click.FloatRange(0, 1, min_open=True, max_open=True))]
    seed: Annotated[int, option(
        "Of the examples' order, of --val, of Dropout and of a new head.", type=AT_LEAST_0, default=0)]
    device: Annotated[str, option("Where to compute.", "[cpu|cuda]", type=click.Choice(["cpu", "cuda"]), default="cpu")]
    precision: Annotated[str, option(
        "Of products and, on a GPU, convolutions; fp16 is for GPUs.", "[float32|bf16|fp16]",
        type=click.Choice(["float32", "bf16", "fp16"]), default="float32")]
    recompute: Annotated[Sequence[str], option(
        "Compute again instead of keeping it until the gradients are computed: 'steps', all but about √n states of a "
        "Loop or Scan of n steps; with 'blocks', or patterns of node or scope names, also the activations in those. "
        "Repeatable.", "steps|blocks|PATTERN")]
    shard_optimizer: Annotated[bool, option(
        "Under mpiexec or torchrun: each process keeps a shard of the optimizer's state instead of all of it.")]
    checkpoint: Annotated[Path | None, option("File to resume from; by default beside the output.", "FILE")]
    save_every: Annotated[int | None, option(
        "Write the checkpoint within epochs, too, not only after them.", "UPDATES", type=AT_LEAST_1)]
    keep_best: Annotated[bool, option("Write the model of the best epoch: that with the least loss on --val.")]
    early_stopping: Annotated[int | None, option(
        "Stop after so many epochs in a row that were no better than the best one.", "EPOCHS", type=AT_LEAST_1)]
    monitor: Annotated[str | None, option(
        "What --keep-best and --early-stopping go by, as the table names it: 'accuracy'. By default the loss.",
        "METRIC")]
    resume: Annotated[Path | None, option("Go on from a checkpoint, with the same settings.", "FILE")]
    overwrite: Annotated[bool, option(
        "Start anew although there is a checkpoint to resume; write over MODEL itself, if -o says so.")]
    metrics: Annotated[str | None, option(
        "A line of JSON for every update; by default beside the output; 'none' for none.", "FILE.jsonl")]
    plot: Annotated[str | None, option(
        "Plot of the losses, .svg or .png; by default beside the output; 'none' for none.", "FILE.svg")]
    report: Annotated[Path | None, option(
        "A page to look at the run in a browser, complete in one file: curves, norms of gradients by layer, the "
        "examples of --val with the highest loss.", "FILE.html")]
    tensorboard: Annotated[Path | None, option("Where to write event files for TensorBoard.", "FOLDER")]
    quiet: Annotated[bool, option("Print nothing but errors.")]
# fmt: on


def with_options(function: Callable[..., None], names: Sequence[str] | None = None) -> Callable[..., None]:
    """Adds all options, or those of some names, in the order of the fields."""
    for name, hint in reversed(typing.get_type_hints(Options, include_extras=True).items()):
        if names is None or name in names:
            function = _decorator(name, hint)(function)
    return function


def _decorator(name: str, hint: Any) -> Callable[..., Any]:
    """The click.option of a field, or the click.argument of one that is not described."""
    if hint is Path:
        return click.argument(name, type=FILE)
    hint, described = typing.get_args(hint)
    settings = dict(described)
    kind, *_ = typing.get_args(hint) if isinstance(hint, types.UnionType) else [hint]
    if kind is Path:
        settings["type"] = FILE
    settings |= {"is_flag": True} if kind is bool else {"show_default": "default" in settings}
    settings |= {"multiple": True} if typing.get_origin(kind) is Sequence else {}
    return click.option(*settings.pop("names"), f"--{name.replace('_', '-')}", **settings)


@command
@with_options
def train(**options: Any) -> None:
    """Train MODEL on the examples of a file and write it with the trained weights.

    Everything is checked before training starts. The state is saved after every epoch. Ctrl-C saves it as well and
    says how to go on: a resumed run gives the same numbers as one that was never stopped. Started by mpiexec or
    torchrun, all processes train together, each on its slice of every batch.

    \b
    onnxgrad train model.onnx --data train.npz --loss cross-entropy:logits --epochs 3 --lr 1e-3 -o trained.onnx
    onnxgrad train model.onnx --data train.parquet --val 0.1 --metric accuracy --config run.toml -o trained.onnx
    onnxgrad train model.onnx --data iris.csv --val 0.2 --stratify --loss cross-entropy:probabilities -o trained.onnx
    onnxgrad train model.onnx --data photos --augment flip,crop --workers 2 --loss cross-entropy:logits -o trained.onnx
    onnxgrad train model.onnx --data pets.npz --loss cross-entropy:logits --new-head 2 --trainable head -o pets.onnx
    onnxgrad train model.onnx --data more.npz --loss mse:y --freeze 'encoder.*' --schedule cosine -o tuned.onnx
    onnxgrad train model.onnx --data train.npz --loss cross-entropy:logits --lora '*query*|*value*' -o adapter
    mpiexec -n 4 onnxgrad train model.onnx --data train.npz --loss mse:y -o trained.onnx
    torchrun --nproc-per-node 8 -m onnxgrad train model.onnx --data train.npz --loss mse:y --device cuda -o trained.onnx
    """
    from onnxgrad.cli.run import run

    run(Options(**options), click.get_current_context())
