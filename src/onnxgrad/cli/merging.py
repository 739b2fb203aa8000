"""onnxgrad merge: merges adapters into the weights of a model."""

from pathlib import Path

import click
from rich.console import Console

from onnxgrad.cli.gradients import model_argument
from onnxgrad.cli.group import command
from onnxgrad.cli.overwriting import expect_other_files
from onnxgrad.cli.tables import plain_console, size


@command
@model_argument
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="File to write.")
@click.option(
    "--adapter", type=click.Path(path_type=Path), metavar="FILE|FOLDER",
    help="Adapters to merge that MODEL does not contain: a .safetensors file or a PEFT folder.",
)  # fmt: skip
@click.option("--overwrite", is_flag=True, help="Allow -o to name MODEL itself.")
def merge(model: Path, output: Path, adapter: Path | None, overwrite: bool) -> None:
    """Merge the LoRA adapters of MODEL into its weights.

    The written model has the nodes and weights that it had before it got adapters. Quantized weights are quantized
    again, with new scales, which rounds what the adapters have learned.

    \b
    onnxgrad merge trained.onnx -o merged.onnx
    onnxgrad merge model.onnx --adapter adapter -o merged.onnx
    """
    from onnxgrad.edit.adapter_files import load_adapter
    from onnxgrad.edit.merge_lora import merge_lora
    from onnxgrad.graph.adapters import adapters_of
    from onnxgrad.graph.files import expect_place, load, save

    expect_place(output)
    loaded = load(model, "merge")
    expect_other_files(model, loaded, output, overwrite)
    with Console(stderr=True).status("merging"):
        adapted = loaded if adapter is None else load_adapter(loaded, adapter)
        count = len(adapters_of(adapted))
        files = save(merge_lora(adapted), output, model)
    sizes = " + ".join(f"{path.name} {size(path)}" for path in files)
    plain_console().print(f"merged: {count} adapter{'s' * (count > 1)}; {sizes}", markup=False)
