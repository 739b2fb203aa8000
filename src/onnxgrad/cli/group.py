"""The group of commands: how commands are added, and how they report errors."""

import functools
import traceback
from collections.abc import Callable
from typing import Any

import click

from onnxgrad.cli.launch import end_all

SENTENCES = (ValueError, TypeError, NotImplementedError, OSError, ImportError, RuntimeError)  # those that we raise
INTERRUPTED = 130  # what shells say of a program that Ctrl-C has ended


class Whole(click.IntRange):
    """A whole number; click would call it an "integer range"."""

    name = "whole number"


class Number(click.FloatRange):
    """A number; click would call it a "float range"."""

    name = "number"


class Refused(click.ClickException):
    """One sentence on stderr."""

    exit_code = 2

    def show(self, file: Any = None) -> None:
        click.echo(f"onnxgrad: {self.message}", file=file, err=file is None)


class Failed(Refused):
    """A valid request that failed while it ran."""

    exit_code = 1


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, no_args_is_help=True)
@click.version_option(package_name="onnxgrad", prog_name="onnxgrad")
def main() -> None:
    """Train ONNX models, and compute their gradients, with stock onnxruntime.

    Look at a model, then train it:

    \b
    onnxgrad inspect model.onnx
    onnxgrad train model.onnx --data train.npz --loss cross-entropy:logits -o trained.onnx

    `onnxgrad COMMAND --help` shows the options of a command, with examples.
    """


def command(function: Callable[..., None]) -> click.Command:
    """A command of `main` whose errors are sentences."""

    @functools.wraps(function)
    def run(debug: bool, **options: Any) -> None:
        try:
            function(**options)
        except click.ClickException as error:
            end_all(error.__context__ or error, error.format_message(), error.exit_code)
            raise
        except (click.exceptions.Exit, click.Abort):
            raise
        except KeyboardInterrupt:
            click.echo("onnxgrad: interrupted", err=True)
            raise click.exceptions.Exit(INTERRUPTED) from None
        except Exception as error:
            if debug:
                traceback.print_exc()
            end_all(error, sentence(error), Refused.exit_code)
            raise Refused(sentence(error)) from None

    debug = click.option("--debug", is_flag=True, help="Show the traceback of an error.")
    return main.command(cls=_Command)(debug(run))


class _Command(click.Command):
    """A command that names all missing arguments and options at once, with an example; click names the first."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.MissingParameter as error:
            values, _, _ = self.make_parser(ctx).parse_args(given)
            values = {**values, **(ctx.default_map or {})}  # a file of settings has given the latter
            missing = [p for p in self.params if p.required and _is_missing(p, values.get(str(p.name)))]
            names = ", ".join(p.human_readable_name if isinstance(p, click.Argument) else p.opts[-1] for p in missing)
            if not names:
                raise
            raise click.UsageError(f"Missing {names}. Example:\n\n  {self._example()}", ctx) from error

    def _example(self) -> str:
        """The first one in the help."""
        return next(line.strip() for line in (self.help or "").splitlines() if line.strip().startswith("onnxgrad "))


def _is_missing(parameter: click.Parameter, value: Any) -> bool:
    return value is None or parameter.value_is_missing(value)


def sentence(error: Exception) -> str:
    """An error as one line; types of errors that are not ours come with their name."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    text = " ".join(str(error).split())
    if isinstance(error, SENTENCES):
        return text
    return f"{type(error).__name__}: {text} (--debug shows where)"
