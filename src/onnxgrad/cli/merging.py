"""onnxgrad merge: adapters folded into the weights of a model."""

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
    help="Adapters to merge, if they are not in MODEL: a .safetensors file, or a folder of PEFT's.",
)  # fmt: skip
@click.option("--overwrite", is_flag=True, help="Write over MODEL itself, if -o says so.")
def merge(model: Path, output: Path, adapter: Path | None, overwrite: bool) -> None:
    """Fold the LoRA adapters of MODEL into its weights: what is written is a model as it was before it had adapters.

    Quantized weights are quantized anew, with new scales, which rounds what the adapters have learned.

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
    plain_console().print(f"merged: {count} adapters; {sizes}", markup=False)
