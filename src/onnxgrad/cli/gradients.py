"""onnxgrad grad and onnxgrad check: the gradient of a model, written and compared."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from onnxgrad.cli.group import Whole, command
from onnxgrad.cli.overwriting import expect_other_files
from onnxgrad.cli.tables import described, plain_console, show, size

LARGEST_ERROR = 1e-4  # of a gradient that `check` lets pass
MOST_ROWS = 24  # of gradients that `grad` lists


model_argument = click.argument("model", type=click.Path(path_type=Path))
of_option = click.option(
    "--of", multiple=True, metavar="NAME", help="Output to differentiate; by default the only one. Repeatable."
)
wrt_option = click.option(
    "--wrt", multiple=True, metavar="PATTERN",
    help="Inputs and initializers whose gradients to compute, by name or pattern ('layer1.*'); by default all "
    "parameters, as `onnxgrad inspect` shows them. Repeatable.",
)  # fmt: skip


@command
@model_argument
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="File to write.")
@of_option
@wrt_option
@click.option("--parameters-as-inputs", is_flag=True, help="Turn the differentiated initializers into inputs.")
@click.option("--hvp", is_flag=True, help="Add Hessian-vector products instead of gradients.")
@click.option("--overwrite", is_flag=True, help="Allow -o to name MODEL itself.")
def grad(
    model: Path,
    output: Path,
    of: Sequence[str],
    wrt: Sequence[str],
    parameters_as_inputs: bool,
    hvp: bool,
    overwrite: bool,
) -> None:
    """Add gradients to MODEL, as outputs NAME_grad.

    The new model has an output NAME_grad for every input or parameter NAME that --wrt selects. With --hvp it has an
    output NAME_hvp instead, and an input NAME_vector for the vector that multiplies the Hessian.

    A scalar output is differentiated as it is. For any other the new model has an input that takes the gradient of
    that output. Weights in files of their own are not loaded: they stay where they are if the new model is in the same
    folder, otherwise they are copied beside it. An existing file is replaced once the new one is complete.

    \b
    onnxgrad grad model.onnx -o training.onnx --parameters-as-inputs
    onnxgrad grad classifier.onnx -o saliency.onnx --of logits --wrt image
    onnxgrad grad model.onnx -o head.onnx --of loss --wrt 'classifier.*'
    onnxgrad grad model.onnx -o hessian.onnx --of loss --wrt image --hvp
    """
    from onnxgrad.autodiff.differentiate import add_gradient, add_hvp
    from onnxgrad.graph.files import expect_place, load, save
    from onnxgrad.passes.finish import FINISH
    from onnxgrad.passes.prepare import prepare

    expect_place(output)
    loaded = load(model, "grad")
    expect_other_files(model, loaded, output, overwrite)
    was = sum(1 for _ in loaded.graph.all_nodes())
    with Console(stderr=True).status("differentiating"):
        draft = prepare(loaded, "grad")
        vectors: dict[str, str] = {}
        chosen = list(wrt) or None, list(of) or None
        if hvp:
            draft, made, vectors = add_hvp(draft, *chosen, parameters_as_inputs=parameters_as_inputs)
        else:
            made = add_gradient(draft, *chosen, parameters_as_inputs=parameters_as_inputs)
        result = draft.run(FINISH).model
    with Console(stderr=True).status("writing"):
        files = save(result, output, model)
    outputs = {v.name: v for v in result.graph.outputs}
    rows = [[name, grad, described(outputs[grad])] for name, grad in made.outputs.items()]
    show(["hvp of" if hvp else "gradient of", "output", "type"], rows[:MOST_ROWS])
    console = plain_console()
    if len(rows) > MOST_ROWS:
        console.print(f"… and {len(rows) - MOST_ROWS} more")
    inputs = {v.name: v for v in result.graph.inputs}
    for name, seed in made.seeds.items():
        console.print(f"new input: {seed}, {described(inputs[seed])}, takes the gradient of {name}", markup=False)
    if vectors:
        console.print(f"new inputs: {', '.join(list(vectors.values())[:MOST_ROWS])}, take the vector", markup=False)
    now = sum(1 for _ in result.graph.all_nodes())
    sizes = " + ".join(f"{path.name} {size(path)}" for path in files)
    console.print(f"differentiated: {', '.join(made.results)}; nodes: {was} → {now}; {sizes}", markup=False)


def set_dims(_context: Any, _parameter: Any, given: Sequence[str]) -> dict[str, int]:
    """`--dim name=number`."""
    dims = {}
    for text in given:
        name, _, number = text.rpartition("=")
        if not name or not number.isdecimal():
            raise click.BadParameter(f"{text!r}, expected a name and a number, as in batch=4")
        dims[name] = int(number)
    return dims


@command
@model_argument
@click.option(
    "--feeds",
    type=click.Path(path_type=Path),
    help="An .npz file with an array for each input; by default inputs are random.",
)
@click.option(
    "--dim", "dims", multiple=True, metavar="NAME=SIZE", callback=set_dims,
    help="Size of a free dimension of random inputs; by default 2. Repeatable.",
)  # fmt: skip
@of_option
@wrt_option
@click.option(
    "--directions",
    default=3,
    show_default=True,
    type=Whole(1),
    metavar="NUMBER",
    help="Number of random directions to compare.",
)
def check(
    model: Path, feeds: Path | None, dims: dict[str, int], of: Sequence[str], wrt: Sequence[str], directions: int
) -> None:
    """Compare the gradients of MODEL with central differences.

    Both are computed in float64. Without --feeds inputs are random: normally distributed floating-point numbers, and
    integers 0 or 1. The error of a correct gradient is about 1e-8, unless the model has a kink at these inputs. The
    exit code is 1 if an error is larger than 1e-4.

    \b
    onnxgrad check model.onnx --dim batch=4 --dim sequence=16
    onnxgrad check model.onnx --feeds sample.npz --of loss --wrt 'encoder.*'
    """
    from onnxgrad.autodiff.check import check_gradient
    from onnxgrad.cli.random_feeds import random_feeds
    from onnxgrad.graph.files import load

    loaded = load(model, "check")
    if feeds is None:
        given = random_feeds(loaded, dims)
    elif dims:
        raise ValueError("--dim sets the sizes of random inputs, which --feeds replaces: give one of them")
    else:
        given = read_feeds(feeds, [str(v.name) for v in loaded.graph.inputs])
    console = plain_console()
    kinds = ", ".join(f"{name} {array.dtype}{list(array.shape)}" for name, array in given.items())
    console.print(f"{'random inputs' if feeds is None else 'inputs'}: {kinds or 'none'}", markup=False)
    with Console(stderr=True).status("comparing with difference quotients"):
        found = check_gradient(model, given, list(wrt) or None, list(of) or None, directions=directions)
    rows = [
        [row.name, str(list(row.shape)), f"{row.gradient:.6g}", f"{row.difference:.6g}", f"{row.error:.1e}"]
        for row in found
    ]
    show(["input", "shape", "gradient", "difference", "error"], rows, numbers=3)
    wrong = [row.name for row in found if not row.error <= LARGEST_ERROR]
    if wrong:
        click.echo(f"onnxgrad: off by more than {LARGEST_ERROR:g}: {', '.join(wrong)}", err=True)
        sys.exit(1)


def read_feeds(path: Path, names: Sequence[str]) -> dict[str, Any]:
    """The arrays of an .npz file, which must be inputs of the model."""
    from onnxgrad.graph.suggest import suggestion
    from onnxgrad.sources.kinds.npz import read_npz

    if not path.is_file():
        raise FileNotFoundError(f"{str(path)!r} does not exist, expected an .npz file")
    try:
        given = read_npz(path)
    except Exception as error:  # of zipfile or NumPy
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"{str(path)!r} cannot be read as .npz ({reason})") from error
    for name in given:
        if name not in names:
            raise ValueError(
                f"{str(path)!r} has an array {name!r}, which is not an input of the model{suggestion(name, names)}"
            )
    return given
