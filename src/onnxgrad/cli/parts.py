"""onnxgrad cut and onnxgrad join: a part of a model, and two models joined."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from onnxgrad.cli.group import command
from onnxgrad.cli.overwriting import expect_other_files
from onnxgrad.cli.tables import described, plain_console, show, size

FILE = click.Path(path_type=Path)
output_option = click.option("-o", "output", required=True, type=FILE, metavar="FILE.onnx", help="File to write.")
overwrite_option = click.option("--overwrite", is_flag=True, help="Allow -o to name a model that is read.")


@command
@click.argument("model", type=FILE)
@click.option(
    "--output", "outputs", multiple=True, required=True, metavar="NAME", help="Value where the part ends. Repeatable."
)
@click.option(
    "--input",
    "inputs",
    multiple=True,
    metavar="NAME",
    help="Value where the part begins; by default the inputs of MODEL. Repeatable.",
)
@output_option
@overwrite_option
def cut(model: Path, outputs: Sequence[str], inputs: Sequence[str], output: Path, overwrite: bool) -> None:
    """Write a part of MODEL, for example up to its features.

    \b
    onnxgrad cut model.onnx --output /layer4/Relu_output_0 -o features.onnx
    onnxgrad cut model.onnx --input features --output logits -o head.onnx
    """
    from onnxgrad.edit.cut import cut as cut_model
    from onnxgrad.graph.files import expect_place, load

    expect_place(output)
    loaded = load(model, "cut")
    expect_other_files(model, loaded, output, overwrite)
    _write(cut_model(loaded, outputs, inputs), output, model)


@command
@click.argument("first", type=FILE)
@click.argument("second", type=FILE)
@click.option(
    "--connect", multiple=True, metavar="OUTPUT=INPUT",
    help="An output of FIRST and the input of SECOND that reads it; by default the only ones. Repeatable.",
)  # fmt: skip
@output_option
@overwrite_option
def join(first: Path, second: Path, connect: Sequence[str], output: Path, overwrite: bool) -> None:
    """Join two models: SECOND reads outputs of FIRST.

    \b
    onnxgrad join features.onnx head.onnx -o model.onnx
    onnxgrad join encoder.onnx decoder.onnx --connect hidden=memory -o model.onnx
    """
    from onnxgrad.edit.join import join as join_models
    from onnxgrad.graph.files import expect_place, load

    expect_place(output)
    one, two = load(first, "join: FIRST"), load(second, "join: SECOND")
    expect_other_files(first, one, output, overwrite)
    expect_other_files(second, two, output, overwrite)
    _write(join_models(one, two, dict(map(_pair, connect)) or None), output, output)


def _pair(text: str) -> tuple[str, str]:
    """`--connect hidden=memory`."""
    name, _, other = text.partition("=")
    if not name or not other:
        raise ValueError(f"--connect {text!r} is not a pair of names, expected OUTPUT=INPUT")
    return name, other


def _write(model: Any, path: Path, source: Path) -> None:
    """The file, and what is in it; weights in files of their own stay in the folder of `source`."""
    from onnxgrad.graph.files import save, weight_files

    files = save(model, path, None if weight_files(model) and source == path else source)
    graph = model.graph
    inputs = [v for v in graph.inputs if v.name not in graph.initializers]
    ends = [("input", v) for v in inputs] + [("output", v) for v in graph.outputs]
    show(["", "name", "type"], [[what, str(v.name), described(v)] for what, v in ends])
    sizes = " + ".join(f"{file.name} {size(file)}" for file in files)
    count = sum(1 for _ in graph.all_nodes())
    plain_console().print(f"{count} node{'s' * (count != 1)}; {sizes}", markup=False)
