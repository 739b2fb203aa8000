"""Specs: losses, optimizers, schedules and metrics as text, `kind:output:name=value:…`, on the command line.

cross-entropy:logits:target=labels:label-smoothing=0.1, adamw:betas=0.9,0.95, cosine:final=0.1, accuracy:logits:top=5

Kinds and settings are the classes of onnxgrad.losses, optim, schedules and metrics and their fields.
"""

import re
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

from onnxgrad.graph.suggest import listed, suggestion
from onnxgrad.train import losses, metrics, optim, schedules

# Where Python's name says something else on a command line: --loss mse:y:weight=0.5 is 0.5 * MSE("y").
RENAMED = {"share": "weight", "weights": "class-weights"}
NOT_SETTINGS = ("prediction", "groups")
SETTING = re.compile(r":([A-Za-z][\w-]*)=")
WORDS = re.compile(r"(?<=[A-Za-z])(?=[A-Z][a-z])")  # where a word begins in BCEWithLogits


def kinds(module: types.ModuleType, base: type, between_words: str = "-") -> dict[str, type]:
    """The classes of a module that derive from `base`, by their names on the command line."""
    found = [c for name, c in vars(module).items() if isinstance(c, type) and issubclass(c, base) and name[0] != "_"]
    return {
        WORDS.sub(between_words, kind.__name__).lower(): kind
        for kind in found if kind is not base and not _needs_a_function(kind)
    }  # fmt: skip


def _needs_a_function(kind: type) -> bool:
    return any(typing.get_origin(hint) is Callable for hint in typing.get_type_hints(kind).values())


LOSSES = kinds(losses, losses.Loss)
METRICS = kinds(metrics, metrics.Metric)
OPTIMIZERS = kinds(optim, optim.Optimizer, "")
SCHEDULES = kinds(schedules, schedules.Schedule)
KINDS = {"--loss": LOSSES, "--metric": METRICS, "--optimizer": OPTIMIZERS, "--schedule": SCHEDULES}


@dataclass(frozen=True)
class Spec:
    """A text taken apart; `option` is where it came from, for messages, `subject` the output or pattern it names."""

    option: str
    text: str
    kind: str
    subject: str | None
    settings: dict[str, str]

    def __str__(self) -> str:
        return f"{self.option} {self.text!r}"


def parse(option: str, text: str) -> Spec:
    """Takes a text apart: before the first `:name=` comes the kind and, after a colon, the subject."""
    head, settings = _parse_settings(text)
    kind, colon, subject = head.partition(":")
    return Spec(option, text, kind, subject if colon else None, settings)


def _parse_settings(text: str) -> tuple[str, dict[str, str]]:
    head, *rest = SETTING.split(text)
    return head, {name.replace("_", "-"): value for name, value in zip(rest[::2], rest[1::2], strict=True)}


def settings_of(kind: type) -> dict[str, str]:
    """The names of the settings on the command line, and as the class has them."""
    names = [f.name for f in fields(kind) if f.name not in NOT_SETTINGS]
    return {RENAMED.get(name, name).replace("_", "-"): name for name in names}


def build(spec: Spec, given: Mapping[str, Any] | None = None) -> Any:
    """An object of the spec's kind; `given` are more settings, under the names of the class."""
    kind = kind_of(spec)
    values = {**(given or {}), **values_of(spec, kind)}
    # A default is an attribute of the class.
    missing = [n for n in settings_of(kind).values() if n not in values and not hasattr(kind, n)]
    if missing:
        raise ValueError(f"{spec}: {spec.kind} needs {missing[0]}")
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"{spec}: {str(error).removeprefix(f'{kind.__name__}: ')}") from None


def kind_of(spec: Spec) -> type:
    """The class of a spec."""
    known = KINDS[spec.option]
    if spec.kind not in known:
        raise ValueError(f"{spec}: {spec.kind!r} does not exist{suggestion(spec.kind, known)}")
    return known[spec.kind]


def values_of(spec: Spec, kind: type, more: Mapping[str, type] = MappingProxyType({})) -> dict[str, Any]:
    """The settings as values, under the names of the class; `more` are such as it does not have itself."""
    known = {**settings_of(kind), **{name.replace("_", "-"): name for name in more}}
    hints = {**typing.get_type_hints(kind), **more}
    values = {}
    for name, text in spec.settings.items():
        if name not in known:
            raise ValueError(f"{spec}: {spec.kind} has no setting {name!r}{suggestion(name, known)}")
        try:
            values[known[name]] = value_of(text, hints[known[name]])
        except ValueError as error:
            raise ValueError(f"{spec}: {name} is {text!r}, expected {error}") from None
    return values


def value_of(text: str, hint: Any) -> Any:
    """A text as a value of a type; the error says what was expected."""
    if hint is str:
        return text
    if hint is bool:
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        raise ValueError("true or false")
    if hint in (int, float):
        try:
            return hint(text)
        except ValueError:
            raise ValueError("a whole number" if hint is int else "a number") from None
    if hint == tuple[str, ...]:
        return tuple(text.split(","))
    choices = [c for c in typing.get_args(hint) if c is not types.NoneType]
    if isinstance(hint, types.UnionType) and len(choices) == 1:
        return value_of(text, choices[0])
    if isinstance(hint, types.UnionType):  # one number, or several
        return value_of(text, choices["," in text])
    count = len(choices) if typing.get_origin(hint) is tuple else None
    try:
        numbers = tuple(float(number) for number in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or (count is not None and len(numbers) != count):
        raise ValueError(f"{count} numbers with a comma between them" if count else "numbers with commas between them")
    return numbers


def loss(texts: Sequence[str], outputs: Sequence[str], inner: Collection[str] = ()) -> losses.Total | str:
    """The sum of the losses of outputs, or of values inside the model; the name of an output stands for itself."""
    own = [t for t in texts if t in outputs]
    if own:
        if len(texts) > 1:
            raise ValueError(f"--loss {own[0]!r} is an output of the model: it must be the only loss")
        return own[0]
    terms: list[losses.Loss] = []
    for text in texts:
        spec = parse("--loss", text)
        if spec.kind not in LOSSES:
            raise ValueError(
                f"{spec}: {spec.kind!r} is neither a loss nor an output of the model"
                f"{suggestion(spec.kind, [*LOSSES, *outputs])}"
            )
        terms.append(build(spec, {"prediction": _output(spec, outputs, inner)}))
    return terms[0] if len(terms) == 1 else losses.Total(terms)


def _output(spec: Spec, outputs: Sequence[str], inner: Collection[str] = ()) -> str:
    """The output, or the value inside the model, that a spec names; the only output if it names none."""
    if spec.subject is None:
        if len(outputs) != 1:
            raise ValueError(f"{spec} names no output, as in {spec.kind}:{outputs[0]}; the model has {listed(outputs)}")
        return outputs[0]
    if spec.subject not in outputs and spec.subject not in inner:
        raise ValueError(f"{spec}: {spec.subject!r} is not an output of the model{suggestion(spec.subject, outputs)}")
    return spec.subject


def optimizer(text: str, given: Mapping[str, Any], groups: Sequence[str]) -> optim.Optimizer:
    """An optimizer; `given` are the settings with options of their own (--lr), which override those of the text."""
    spec = _without_subject(parse("--optimizer", text))
    plain: optim.Optimizer = build(spec)
    kind, chosen = type(plain), {name: value for name, value in given.items() if value is not None}
    for name in chosen:
        _expect_setting(spec, kind, name)
    changed = {}
    for group in groups:
        pattern, settings = _parse_settings(group)
        if not settings:
            raise ValueError(
                f"--group {group!r} sets nothing, expected a pattern of names as in '*.bias:weight-decay=0'"
            )
        changed[pattern] = values_of(Spec("--group", group, spec.kind, pattern, settings), kind, {optim.FACTOR: float})
    return replace(plain, **chosen, groups=changed)


def schedule(text: str, warmup: float | None, updates: int) -> schedules.Schedule:
    """A schedule over so many updates; a `warmup` under 1 is a share of them."""
    spec = _without_subject(parse("--schedule", text))
    kind = kind_of(spec)
    whole_run = {"steps": updates, "every": max(1, updates // 3)}
    given: dict[str, Any] = {name: n for name, n in whole_run.items() if name in settings_of(kind).values()}
    if warmup is not None:
        _expect_setting(spec, kind, "warmup")
        given["warmup"] = round(warmup * updates) if warmup < 1 else round(warmup)
    result: schedules.Schedule = build(spec, given)
    return result


def _expect_setting(spec: Spec, kind: type, name: str) -> None:
    """Raises if a kind lacks the setting that an option of its own is for."""
    if name not in settings_of(kind).values():
        having = [k for k, c in KINDS[spec.option].items() if name in settings_of(c).values()]
        raise ValueError(f"--{name.replace('_', '-')} is for {', '.join(having)}: {spec.kind} has no such setting")


def _without_subject(spec: Spec) -> Spec:
    if spec.subject is not None:
        raise ValueError(f"{spec}: {spec.subject!r} is not a setting, expected name=value as in {spec.kind}:name=value")
    return spec


def metrics_by_name(
    texts: Sequence[str],
    total: losses.Total | str,
    outputs: Sequence[str],
    inputs: Sequence[str],
    of_sigmoid: Collection[str] = (),
) -> dict[str, metrics.Metric]:
    """Metrics by the name they are shown with; one that names no output is of the first loss's.

    A metric has the settings that it has in common with the loss of its output, its target among them; outputs
    `of_sigmoid` are probabilities, whatever the loss.
    """
    found: dict[str, metrics.Metric] = {}
    terms = () if isinstance(total, str) else total.parts
    for text in texts:
        spec = parse("--metric", text)
        kind = kind_of(spec)
        name = spec.settings.pop("name", None)
        prediction = (
            terms[0].prediction
            if spec.subject is None and terms
            else _output(spec, outputs, [term.prediction for term in terms])
        )
        of_output = next((term for term in terms if term.prediction == prediction), None)
        common = [n for n in settings_of(kind).values() if hasattr(of_output, n)]
        given = {"prediction": prediction, **{n: getattr(of_output, n) for n in common}}
        if prediction in of_sigmoid and "threshold" in settings_of(kind).values():
            given["threshold"] = losses.BCE.threshold
        metric = build(spec, given)
        if metric.target not in inputs:
            raise ValueError(
                f"{spec}: its target {metric.target!r} is not an input of the model or the loss"
                f"{suggestion(metric.target, inputs)}"
            )
        name = name or (spec.kind if spec.kind not in found else text)
        if name in found or name == "loss":
            raise ValueError(f"{spec}: {name!r} is the name of another number: choose one with name=")
        found[name] = metric
    return found
