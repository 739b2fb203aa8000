"""expect_other_files(): an output does not overwrite its input model, unless the user agrees."""

import sys
from pathlib import Path
from typing import Any

import click

from onnxgrad.cli.group import Refused


def expect_other_files(model: Path, loaded: Any, output: Path, overwrite: bool) -> None:
    """Asks, on a terminal, if the output would take the place of the model or its weights; elsewhere it is refused."""
    from onnxgrad.graph.files import data_file, weight_files

    read = {path.resolve() for path in (model, *weight_files(loaded))}
    same = next((path for path in (output, data_file(output)) if path.resolve() in read), None)
    if same is None or overwrite:
        return
    what = f"{str(same)!r} is the model itself" if same == output else f"{str(same)!r} holds the model's weights"
    if not is_terminal():
        raise Refused(f"-o: {what}: name another file, or add --overwrite")
    if not click.confirm(f"onnxgrad: {what}: overwrite it?", err=True):
        raise Refused(f"-o: {what}, and is not overwritten")


def is_terminal() -> bool:
    """Whether a user can answer."""
    return sys.stdin.isatty()
