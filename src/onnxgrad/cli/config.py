"""A file of settings: `--name value` on the command line is `name = value` in TOML."""

import tomllib
from pathlib import Path
from typing import Any

import click

from onnxgrad.cli.group import Refused
from onnxgrad.graph.suggest import suggestion

NOT_SETTINGS = ("config", "help", "debug")


def use_config(context: click.Context, _parameter: Any, path: Path | None) -> Path | None:
    """The callback of --config: its settings become defaults, so that the command line wins."""
    if path is not None:
        context.default_map = defaults(path, context.command)
    return path


def defaults(path: Path, command: click.Command) -> dict[str, Any]:
    """The settings of a file, as text, which is read as the command line would be."""
    if not path.is_file():
        raise Refused(f"--config: {str(path)!r} does not exist")
    try:
        with path.open("rb") as file:
            table = tomllib.load(file)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise Refused(f"--config: {str(path)!r} is not TOML: {error}") from None
    known = {str(p.name).replace("_", "-"): p for p in command.params if p.name not in NOT_SETTINGS}
    found = {}
    for key, value in table.items():
        name = key.replace("_", "-")
        if name not in known:
            raise Refused(f"--config: {str(path)!r} has {key!r}, which is not a setting{suggestion(name, known)}")
        found[str(known[name].name)] = _as_given(f"--config: {key!r} in {str(path)!r}", value, known[name])
    return found


def _as_given(what: str, value: Any, parameter: click.Parameter) -> Any:
    """A value of TOML as click takes it from a command line."""
    if getattr(parameter, "is_flag", False):
        if not isinstance(value, bool):
            raise Refused(f"{what} is {value!r}, expected true or false")
        return value
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(v, (str, int, float)) and not isinstance(v, bool) for v in values):
        raise Refused(f"{what} is {value!r}, expected text or a number")
    texts = [v if isinstance(v, str) else repr(v) for v in values]
    if getattr(parameter, "multiple", False):
        return texts
    if isinstance(value, list):
        raise Refused(f"{what} is a list, expected one value")
    return texts[0]


def as_typed(context: click.Context, **changed: str) -> list[str]:
    """The command line as it was given, with options changed or added: what to type to run it again."""
    words = ["onnxgrad", str(context.info_name)]
    for parameter in context.command.params:
        name = str(parameter.name)
        given = context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
        value = changed.get(name, context.params.get(name) if given else None)
        if value is None or value is False:
            continue
        if isinstance(parameter, click.Argument):
            words.append(str(value))
            continue
        option = max(parameter.opts, key=len)
        if value is True:
            words.append(option)
            continue
        for one in value if isinstance(value, tuple) else (value,):
            words += [option, str(one)]
    return words
