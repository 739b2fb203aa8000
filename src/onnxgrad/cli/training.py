"""onnxgrad train: its options; run.py does what they say."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from onnxgrad.cli.config import use_config
from onnxgrad.cli.group import command

FILE = click.Path(path_type=Path)
ABOVE_0 = click.FloatRange(0, min_open=True)


def option(*names: str, **how: Any) -> Any:
    """An option whose help says what it is by default."""
    if "metavar" not in how and isinstance(how.get("type"), (click.IntRange, click.FloatRange)):
        how["metavar"] = "NUMBER"
    return click.option(*names, show_default="default" in how, **how)


OPTIONS = [
    click.argument("model", type=FILE),
    option("--config", type=FILE, is_eager=True, callback=use_config, metavar="FILE.toml",
           help="Settings from a file, under these names; the command line wins."),
    option("-o", "--output", required=True, type=FILE, metavar="FILE.onnx", help="The trained model."),
    option("--data", required=True, type=FILE, metavar="FILE",
           help="Examples, .npz or .parquet, with a column for every input of the model and every target."),
    option("--val", metavar="FILE|SHARE",
           help="Examples to validate with after each epoch, or the share of --data to hold out for it (0.1)."),
    option("--loss", multiple=True, required=True, metavar="KIND:OUTPUT",
           help="mse, l1, huber, cross-entropy, bce-with-logits or kl-div of an output, with settings: "
           "'mse:y:target=z:weight=0.5'. Or an output that is the loss. Repeatable: they are added."),
    option("--metric", multiple=True, metavar="KIND[:OUTPUT]",
           help="accuracy, binary-accuracy, mae or mse, measured on --val: 'accuracy:logits:top=5'. Repeatable."),
    option("--epochs", default=1, type=click.IntRange(1), help="How often to go through the examples."),
    option("--batch-size", default=32, type=click.IntRange(1), help="Examples in a batch."),
    option("--drop-last", is_flag=True, help="Leave out a last batch that is smaller than the others."),
    option("--no-shuffle", is_flag=True, help="Take the examples in their order."),
    option("--optimizer", default="adamw", metavar="KIND",
           help="sgd, adam, adamw, adagrad, rmsprop or lamb, with settings: 'adamw:betas=0.9,0.95'."),
    option("--lr", type=click.FloatRange(0), help="Learning rate; by default the optimizer's."),
    option("--weight-decay", type=click.FloatRange(0), help="By default the optimizer's."),
    option("--momentum", type=click.FloatRange(0), help="Of sgd and rmsprop."),
    option("--group", multiple=True, metavar="PATTERN:NAME=VALUE",
           help="Other settings for parameters of some names: '*.bias:weight-decay=0'. Repeatable."),
    option("--schedule", default="constant", metavar="KIND",
           help="Of the learning rate: constant, linear, cosine, step or one-cycle, with settings: 'step:every=500'."),
    option("--warmup", type=click.FloatRange(0), metavar="UPDATES|SHARE",
           help="How long the learning rate grows to what it is; under 1 a share of all updates."),
    option("--trainable", multiple=True, metavar="PATTERN", help="Parameters to train; by default all. Repeatable."),
    option("--freeze", multiple=True, metavar="PATTERN", help="Parameters to leave as they are. Repeatable."),
    option("--clip-norm", type=ABOVE_0, help="Bound of the gradient's length, over all parameters."),
    option("--clip-value", type=ABOVE_0, help="Bound of every number in the gradient."),
    option("--accumulate", default=1, type=click.IntRange(1), help="Batches averaged for one update."),
    option("--seed", default=0, type=click.IntRange(0), help="Of the examples' order, of --val and of Dropout."),
    option("--device", default="cpu", type=click.Choice(["cpu", "cuda"]), help="Where to compute."),
    option("--shard-optimizer", is_flag=True,
           help="Under mpiexec: share the optimizer's state among the processes instead of keeping all of it in each."),
    option("--checkpoint", type=FILE, metavar="FILE", help="What to resume from; by default beside the output."),
    option("--save-every", type=click.IntRange(1), metavar="UPDATES",
           help="Write the checkpoint within epochs, too, not only after them."),
    option("--keep-best", is_flag=True, help="Write the model of the epoch with the least loss on --val."),
    option("--resume", type=FILE, metavar="FILE", help="Go on from a checkpoint, with the same settings."),
    option("--overwrite", is_flag=True, help="Start anew although there is a checkpoint to resume."),
    option("--metrics", metavar="FILE.jsonl",
           help="A line of JSON for every update; by default beside the output; 'none' for none."),
    option("--plot", metavar="FILE.svg",
           help="Picture of the losses, .svg or .png; by default beside the output; 'none' for none."),
    option("--tensorboard", type=FILE, metavar="FOLDER", help="Where to write event files for TensorBoard."),
    option("--quiet", is_flag=True, help="Print nothing but errors."),
]  # fmt: skip


def with_options(function: Callable[..., None]) -> Callable[..., None]:
    """In the order of the list, in the help as well."""
    for add in reversed(OPTIONS):
        function = add(function)
    return function


@command
@with_options
def train(**options: Any) -> None:
    """Train MODEL on the examples of a file and write it with the trained weights.

    Everything is looked at before training starts. The state is saved after every epoch. Ctrl-C saves it as well and
    says how to go on: a resumed run gives the same numbers as one that was never stopped. Started by mpiexec, all
    processes train together, each on its part of every batch.

    \b
    onnxgrad train model.onnx --data train.npz --loss cross-entropy:logits --epochs 3 --lr 1e-3 -o trained.onnx
    onnxgrad train model.onnx --data train.parquet --val 0.1 --metric accuracy --config run.toml -o trained.onnx
    onnxgrad train model.onnx --data more.npz --loss mse:y --freeze 'encoder.*' --schedule cosine -o tuned.onnx
    mpiexec -n 4 onnxgrad train model.onnx --data train.npz --loss mse:y -o trained.onnx
    """
    from onnxgrad.cli.preparation import Options
    from onnxgrad.cli.run import run

    del options["config"]
    run(Options(**options), click.get_current_context())
