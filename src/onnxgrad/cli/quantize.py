"""onnxgrad quantize: a model with few bits, and how much accuracy that costs."""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onnxgrad.cli.group import command
from onnxgrad.cli.overwriting import expect_other_files
from onnxgrad.cli.tables import show, size
from onnxgrad.cli.training import AT_LEAST_1, FILE, KindsOption

if TYPE_CHECKING:
    import onnx_ir as ir

    from onnxgrad.tensor_types import Array

NONE = "none"  # of the values that a model computes
WEIGHTS, ACTIVATIONS = ("int8", "uint8", "int4", "uint4"), ("uint8", "int8", "uint16", "int16", NONE)


@command
@click.argument("model", type=FILE)
@click.option("-o", "--output", required=True, type=FILE, metavar="FILE.onnx", help="The quantized model.")
@click.option(
    "--data", type=FILE, metavar="FILE",
    help="Examples for calibration, .npz or .parquet, with a column for every input.",
)  # fmt: skip
@click.option("--examples", type=AT_LEAST_1, default=512, show_default=True, help="Number of examples for calibration.")
@click.option("--batch-size", type=AT_LEAST_1, default=32, show_default=True, help="Examples in a batch.")
@click.option(
    "--weights", type=click.Choice(WEIGHTS), default="int8", show_default=True, help="Integer type of weights."
)
@click.option(
    "--activations", type=click.Choice(ACTIVATIONS), default="uint8", show_default=True,
    help="Integer type of the values between layers; 'none' leaves them in floating point and needs no data.",
)  # fmt: skip
@click.option(
    "--per-tensor", is_flag=True, help="Use one scale for each weight instead of one for each output channel."
)
@click.option(
    "--block-size", type=AT_LEAST_1, default=32, show_default=True,
    help="Number of 4-bit weights that share a scale, with --activations none.",
)  # fmt: skip
@click.option(
    "--exclude", multiple=True, metavar="PATTERN", help="Nodes or weights to leave in floating point. Repeatable."
)
@click.option(
    "--loss", multiple=True, cls=KindsOption, metavar="KIND:OUTPUT",
    help="KINDS of an output, measured before and after: 'mse:y:target=z'. Repeatable; losses are summed.",
)  # fmt: skip
@click.option(
    "--metric", multiple=True, cls=KindsOption, metavar="KIND[:OUTPUT]",
    help="KINDS, measured before and after: 'accuracy:logits'. Repeatable.",
)  # fmt: skip
@click.option("--val", type=FILE, metavar="FILE", help="Examples for --loss and --metric; by default those of --data.")
@click.option("--overwrite", is_flag=True, help="Allow -o to name MODEL itself.")
def quantize(
    model: Path,
    output: Path,
    data: Path | None,
    examples: int,
    batch_size: int,
    weights: str,
    activations: str,
    per_tensor: bool,
    block_size: int,
    exclude: Sequence[str],
    loss: Sequence[str],
    metric: Sequence[str],
    val: Path | None,
    overwrite: bool,
) -> None:
    """Quantize MODEL for onnxruntime's integer kernels.

    BatchNormalization is folded into convolutions first. `onnxgrad train` trains the result: its weights are rounded in
    every step as they are stored.

    \b
    onnxgrad quantize model.onnx --data train.npz -o model.qdq.onnx
    onnxgrad quantize model.onnx --data train.npz --loss cross-entropy:logits --metric accuracy -o model.qdq.onnx
    onnxgrad quantize model.onnx --weights int4 --activations none -o model.int4.onnx
    onnxgrad train model.qdq.onnx --data train.npz --loss cross-entropy:logits --lr 1e-4 -o trained.qdq.onnx
    """
    from onnxgrad.edit.quantize import quantize as quantized_model
    from onnxgrad.graph.files import expect_place, load, save

    expect_place(output)
    loaded = load(model, "quantize")
    expect_other_files(model, loaded, output, overwrite)
    if data is None and activations != NONE:
        raise ValueError(
            "--data is missing: activations are calibrated on examples; --activations none quantizes weights alone"
        )
    measured = _Measured(loaded, loss, metric, batch_size, ("--data", data) if val is None else ("--val", val))
    result = quantized_model(
        loaded, None if data is None else _batches(loaded, data, examples, batch_size),
        weights, None if activations == NONE else activations,
        per_channel=not per_tensor, block_size=block_size, exclude=exclude,
    )  # fmt: skip
    save(result, output, output)
    rows = [[str(path), size(path), *measured.of(path)] for path in (model, output)]
    show(["model", "size", *measured.heading], rows, numbers=1 + len(measured.heading))


def _batches(model: "ir.Model", data: Path, examples: int, batch_size: int) -> Iterator[dict[str, "Array"]]:
    """Examples from all over the file, in batches that the model takes."""
    from onnxgrad.passes.free_batch import fixed_batch
    from onnxgrad.sources.fields import fields_of
    from onnxgrad.sources.read import read_source
    from onnxgrad.train.batches import Batches

    fixed = fixed_batch(model.graph)
    source = read_source(data, "--data", fields_of(model, None, "quantize"))
    found = Batches(source, fixed or batch_size, drop_last=fixed is not None)
    return itertools.islice(iter(found), -(-examples // found.size))


class _Measured:
    """Loss and metrics of models that have the same inputs and outputs; nothing if no loss is named."""

    def __init__(
        self,
        model: "ir.Model",
        loss: Sequence[str],
        metrics: Sequence[str],
        batch_size: int,
        source: tuple[str, Path | None],
    ) -> None:
        self.heading: list[str] = []
        if not loss:
            if metrics:
                raise ValueError("--metric needs a --loss, whose target it compares with")
            return
        from onnxgrad.cli import specs
        from onnxgrad.cli.preparation import of_sigmoid
        from onnxgrad.sources.fields import fields_of
        from onnxgrad.sources.read import read_source
        from onnxgrad.train.batches import Batches

        option, path = source
        if path is None:
            raise ValueError("--loss needs examples: name a file with --val")
        outputs = [str(v.name) for v in model.graph.outputs]
        self._loss = specs.loss(loss, outputs)
        fields = fields_of(model, self._loss, "quantize")
        needed = [field.name for field in fields]
        self._metrics = specs.metrics_by_name(metrics, self._loss, outputs, needed, of_sigmoid(model.graph))
        self._batches = Batches(read_source(path, option, fields), batch_size, shuffle=False)
        self.heading = ["loss", *self._metrics]

    def of(self, model: Path) -> list[str]:
        """What `heading` names, of one of the models."""
        if not self.heading:
            return []
        from onnxgrad.train.optim import SGD
        from onnxgrad.train.progress import figure
        from onnxgrad.train.trainer import Trainer

        found = Trainer(model, self._loss, SGD()).evaluate(self._batches, self._metrics)
        return [figure(found[name]) for name in self.heading]
