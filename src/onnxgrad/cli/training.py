"""onnxgrad train: its options; run.py does what they say."""

import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import click

from onnxgrad.cli.config import use_config
from onnxgrad.cli.group import Number, Whole, command

FILE = click.Path(path_type=Path)
AT_LEAST_0, AT_LEAST_1 = Whole(0), Whole(1)
POSITIVE, NOT_NEGATIVE = Number(0, min_open=True), Number(0)


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
        "Read settings from a file, with the names of these options; the command line takes precedence.", "FILE.toml",
        is_eager=True, callback=use_config)]
    output: Annotated[Path, option(
        "The trained model. A folder, a .safetensors or an .onnx_adapter file gets the LoRA adapters alone.",
        "FILE.onnx", "-o", required=True)]
    data: Annotated[Path, option(
        "Examples with the inputs of the model and every target: a table (.csv, .tsv, .parquet, .jsonl), arrays (.npz, "
        "a folder of .npy), text (.txt), a folder with a subfolder of images for each class, or a Hugging Face dataset "
        "on disk.", "FILE|FOLDER", required=True)]
    val: Annotated[str | None, option(
        "Validation examples, or the share of --data to hold out for validation, for example 0.1; by default the "
        "subfolder val/ of --data, if it exists.", "FILE|SHARE")]
    stratify: Annotated[bool, option("Hold out the same share of every class.")]
    columns: Annotated[Sequence[str], option(
        "Columns of a table that form an input or target; patterns are allowed. By default an input takes all "
        "remaining columns. Repeatable.", "NAME=COLUMN,…")]
    image_size: Annotated[str | None, option("Image size, where the model leaves it open: 224, or 480x640.", "PIXELS")]
    normalize: Annotated[str | None, option(
        "Normalization of images: imagenet, 0..1, -1..1, 0..255 or MEANS/DEVIATIONS with a comma between channels; by "
        "default imagenet for three channels.", "KIND")]
    augment: Annotated[str | None, option("Random image augmentations: flip, crop, color, rotate.", "NAME,…")]
    tokenizer: Annotated[Path | None, option("The tokenizer.json for text.", "FILE")]
    length: Annotated[int | None, option(
        "Maximum number of tokens in an example, or in a chunk of a .txt file.", "TOKENS", type=AT_LEAST_1)]
    workers: Annotated[int, option(
        "Number of processes that load examples in the background; results do not depend on it.",
        type=AT_LEAST_0, default=0)]
    loss: Annotated[Sequence[str], option(
        "KINDS of an output, with settings: 'mse:y:target=z:weight=0.5'. Or the name of an output that is the loss. "
        "Repeatable; losses are summed.", "KIND:OUTPUT", cls=KindsOption, required=True)]
    metric: Annotated[Sequence[str], option(
        "KINDS, measured on --val: 'accuracy:logits:top=5'. Repeatable.", "KIND[:OUTPUT]", cls=KindsOption)]
    class_weights: Annotated[str | None, option(
        "Weight the classes of the loss by their inverse frequency.", "[balanced]", type=click.Choice(["balanced"]))]
    new_head: Annotated[int | None, option(
        "Replace the last layer before the output of --loss with a new one for this number of classes; '--trainable "
        "head' trains only the new layer.", "CLASSES", type=AT_LEAST_1)]
    epochs: Annotated[int, option("Number of passes over the examples.", type=AT_LEAST_1, default=1)]
    batch_size: Annotated[int, option("Number of examples in a batch.", type=AT_LEAST_1, default=32)]
    drop_last: Annotated[bool, option("Drop the last batch if it is smaller than the others.")]
    no_shuffle: Annotated[bool, option("Keep the examples in their order.")]
    optimizer: Annotated[str, option(
        "KINDS, with settings: 'adamw:betas=0.9,0.95'.", "KIND", cls=KindsOption, default="adamw")]
    lr: Annotated[float | None, option("Learning rate; by default that of the optimizer.", type=NOT_NEGATIVE)]
    weight_decay: Annotated[float | None, option("Weight decay; by default that of the optimizer.", type=NOT_NEGATIVE)]
    momentum: Annotated[float | None, option("Momentum, for optimizers that have it.", type=NOT_NEGATIVE)]
    group: Annotated[Sequence[str], option(
        "Settings for parameters that match a pattern: '*.bias:weight-decay=0', 'encoder.*:lr-factor=0.1'. Repeatable.",
        "PATTERN:NAME=VALUE")]
    layer_decay: Annotated[float | None, option(
        "Factor that multiplies the learning rate once for each layer between a parameter and the end of the model.",
        "FACTOR",
        type=Number(0, 1, min_open=True))]
    schedule: Annotated[str, option(
        "Learning rate schedule: KINDS, with settings: 'step:every=500'.", "KIND", cls=KindsOption, default="constant")]
    warmup: Annotated[float | None, option(
        "Number of updates, or below 1 the share of all updates, in which the learning rate rises to its full value.",
        "UPDATES|SHARE",
        type=NOT_NEGATIVE)]
    find_lr: Annotated[bool, option(
        "Try a range of learning rates instead of training, show the loss at each, and suggest one.")]
    trainable: Annotated[Sequence[str], option(
        "Weights to train; by default all parameters that `onnxgrad inspect` shows; 'head' is a new head. Repeatable.",
        "PATTERN")]
    freeze: Annotated[Sequence[str], option(
        "Parameters and running statistics to keep unchanged. Repeatable.", "PATTERN")]
    freeze_statistics: Annotated[bool, option(
        "Freeze the running statistics of BatchNormalization layers whose weights are frozen, and normalize "
        "with them.")]
    lora: Annotated[Sequence[str], option(
        "Add LoRA adapters to these weights, and train only the adapters and what --trainable selects: "
        "'*query*|*value*'. Repeatable.", "PATTERN")]
    lora_rank: Annotated[int | None, option("Rank of the adapters; by default 8.", type=AT_LEAST_1)]
    lora_alpha: Annotated[float | None, option(
        "The adapters are scaled by alpha / rank; by default 16.", type=POSITIVE)]
    clip_norm: Annotated[float | None, option("Maximum norm of the gradient over all parameters.", type=POSITIVE)]
    clip_value: Annotated[float | None, option(
        "Maximum absolute value of each element of the gradient.", type=POSITIVE)]
    accumulate: Annotated[int, option(
        "Number of batches whose gradients are averaged for one update.", type=AT_LEAST_1, default=1)]
    ema: Annotated[float | None, option(
        "Decay of an exponential moving average of the parameters, for example 0.999. Validation and the written model "
        "use the average.", "DECAY",
        type=Number(0, 1, min_open=True, max_open=True))]
    seed: Annotated[int, option(
        "Random seed of the order of examples, the split of --val, Dropout and a new head.", type=AT_LEAST_0,
        default=0)]
    device: Annotated[str, option(
        "Device to train on.", "[cpu|cuda]", type=click.Choice(["cpu", "cuda"]), default="cpu")]
    precision: Annotated[str, option(
        "Precision of matrix products and, on a GPU, convolutions; fp16 needs a GPU.", "[float32|bf16|fp16]",
        type=click.Choice(["float32", "bf16", "fp16"]), default="float32")]
    recompute: Annotated[Sequence[str], option(
        "Save memory by computing values again in the backward pass: 'steps' keeps about √n states of a Loop or Scan "
        "of n steps; 'blocks', or patterns of node or scope names, also recompute the activations of those blocks. "
        "Repeatable.", "steps|blocks|PATTERN")]
    shard_optimizer: Annotated[bool, option(
        "Shard the optimizer state over the processes of mpiexec or torchrun.")]
    checkpoint: Annotated[Path | None, option("Checkpoint to write; by default next to the output.", "FILE")]
    save_every: Annotated[int | None, option(
        "Also write the checkpoint every UPDATES updates, not only after each epoch.", "UPDATES", type=AT_LEAST_1)]
    keep_best: Annotated[bool, option("Write the model of the best epoch, by --monitor.")]
    early_stopping: Annotated[int | None, option(
        "Stop after this many epochs without improvement.", "EPOCHS", type=AT_LEAST_1)]
    monitor: Annotated[str | None, option(
        "The metric for --keep-best and --early-stopping, by its name in the table; by default the validation loss.",
        "METRIC")]
    resume: Annotated[Path | None, option("Resume from a checkpoint, with the same settings.", "FILE")]
    overwrite: Annotated[bool, option(
        "Start over although an unfinished checkpoint exists; allow -o to name MODEL itself.")]
    metrics: Annotated[str | None, option(
        "Log with a line of JSON for every update; by default next to the output; 'none' disables it.", "FILE.jsonl")]
    plot: Annotated[str | None, option(
        "Plot of the losses, .svg or .png; by default next to the output; 'none' disables it.", "FILE.svg")]
    report: Annotated[Path | None, option(
        "Report for the browser in one file: curves, gradient norms by layer, and the validation examples with the "
        "highest loss.", "FILE.html")]
    tensorboard: Annotated[Path | None, option("Folder for TensorBoard event files.", "FOLDER")]
    quiet: Annotated[bool, option("Print only errors.")]
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
    """Train MODEL on examples, and write the trained model.

    All settings are checked before training starts. A checkpoint is written after every epoch. Ctrl-C writes it too,
    and prints the command that resumes: a resumed run computes the same numbers as an uninterrupted one. Under mpiexec
    or torchrun all processes train together, each on its slice of every batch.

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
