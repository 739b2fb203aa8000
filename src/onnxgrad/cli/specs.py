"""Losses, optimizers, schedules and metrics as text: `kind:output:name=value:…`, as the command line has them.

cross-entropy:logits:target=labels:label-smoothing=0.1, adamw:betas=0.9,0.95, cosine:final=0.1, accuracy:logits:top=5
"""

import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from onnxgrad.cli.suggest import listed, suggestion
from onnxgrad.train import losses, metrics, optim, schedules

LOSSES: dict[str, type] = {
    "mse": losses.MSE, "l1": losses.L1, "huber": losses.Huber, "cross-entropy": losses.CrossEntropy,
    "bce-with-logits": losses.BCEWithLogits, "kl-div": losses.KLDiv,
}  # fmt: skip
OPTIMIZERS: dict[str, type] = {
    "sgd": optim.SGD, "adam": optim.Adam, "adamw": optim.AdamW, "adagrad": optim.Adagrad, "rmsprop": optim.RMSprop,
    "lamb": optim.Lamb,
}  # fmt: skip
SCHEDULES: dict[str, type] = {
    "constant": schedules.Constant, "linear": schedules.Linear, "cosine": schedules.Cosine, "step": schedules.Step,
    "one-cycle": schedules.OneCycle,
}  # fmt: skip
METRICS: dict[str, type] = {
    "accuracy": metrics.Accuracy, "binary-accuracy": metrics.BinaryAccuracy, "mae": metrics.MAE, "mse": metrics.MSE,
}  # fmt: skip

# Where Python's name says something else on a command line: --loss mse:y:weight=0.5 is 0.5 * MSE("y").
RENAMED = {"share": "weight", "weights": "class-weights"}
NOT_WRITTEN = ("prediction", "groups")
SETTING = re.compile(r":([A-Za-z][\w-]*)=")


@dataclass(frozen=True)
class Written:
    """A text taken apart; `option` is where it came from, for messages."""

    option: str
    text: str
    kind: str
    subject: str | None
    settings: dict[str, str]


def read(option: str, text: str) -> Written:
    """Takes a text apart. What comes before the first `:name=` is the kind and, after a colon, what it is about."""
    head, *rest = SETTING.split(text)
    kind, colon, subject = head.partition(":")
    names = [n.replace("_", "-") for n in rest[::2]]
    return Written(option, text, kind, subject if colon else None, dict(zip(names, rest[1::2], strict=True)))


def settings_of(kind: type) -> dict[str, str]:
    """The names of what can be set: as written, and as the class has them."""
    found = [f.name for f in fields(kind) if f.name not in NOT_WRITTEN]
    return {RENAMED.get(name, name).replace("_", "-"): name for name in found}


def made(written: Written, kinds: Mapping[str, type], given: Mapping[str, Any] | None = None) -> Any:
    """One of the kinds, with the settings written; `given` are more, under the names of the class."""
    if written.kind not in kinds:
        raise ValueError(
            f"{written.option} {written.text!r}: there is no {written.kind!r}{suggestion(written.kind, kinds)}"
        )
    kind = kinds[written.kind]
    values = dict(given or {}) | converted(written, kind)
    needed = [n for n in settings_of(kind).values() if n not in values and _required(kind, n)]
    if needed:
        raise ValueError(f"{written.option} {written.text!r}: {written.kind} needs {needed[0]}")
    return kind(**values)


def _required(kind: type, name: str) -> bool:
    return not hasattr(kind, name)  # a default is an attribute of the class


def converted(written: Written, kind: type) -> dict[str, Any]:
    """The settings as values, under the names of the class."""
    known, hints = settings_of(kind), typing.get_type_hints(kind)
    values = {}
    for name, text in written.settings.items():
        if name not in known:
            raise ValueError(
                f"{written.option} {written.text!r}: {written.kind} has no setting {name!r}{suggestion(name, known)}"
            )
        try:
            values[known[name]] = value_of(text, hints[known[name]])
        except ValueError as error:
            raise ValueError(f"{written.option} {written.text!r}: {name} is {text!r}, expected {error}") from None
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
    choices = [c for c in typing.get_args(hint) if c is not types.NoneType]
    if isinstance(hint, types.UnionType) and len(choices) == 1:
        return value_of(text, choices[0])
    if isinstance(hint, types.UnionType):  # one number, or several
        return value_of(text, choices["," in text])
    count = len(choices) if typing.get_origin(hint) is tuple else None
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or (count is not None and len(numbers) != count):
        raise ValueError(f"{count} numbers with a comma between them" if count else "numbers with commas between them")
    return numbers


def loss(texts: Sequence[str], outputs: Sequence[str]) -> losses.Total | str:
    """The sum of the losses written, of outputs of the model; the name of an output stands for itself."""
    own = [t for t in texts if t in outputs]
    if own:
        if len(texts) > 1:
            raise ValueError(f"--loss {own[0]!r} is an output of the model, which stands alone: others cannot be added")
        return own[0]
    parts: list[losses.Loss] = []
    for text in texts:
        written = read("--loss", text)
        if written.kind not in LOSSES:
            raise ValueError(
                f"--loss {text!r}: {written.kind!r} is neither a loss nor an output of the model"
                f"{suggestion(written.kind, [*LOSSES, *outputs])}"
            )
        parts.append(made(written, LOSSES, {"prediction": _output(written, outputs)}))
    return parts[0] if len(parts) == 1 else losses.Total(parts)


def _output(written: Written, outputs: Sequence[str]) -> str:
    """The output that is meant: the only one if none is named."""
    if written.subject is None:
        if len(outputs) != 1:
            raise ValueError(
                f"{written.option} {written.text!r} names no output, as in {written.kind}:{outputs[0]}; the model has "
                f"{listed(outputs)}"
            )
        return outputs[0]
    if written.subject not in outputs:
        raise ValueError(
            f"{written.option} {written.text!r}: {written.subject!r} is no output of the model"
            f"{suggestion(written.subject, outputs)}"
        )
    return written.subject


def optimizer(text: str, given: Mapping[str, Any], groups: Sequence[str]) -> optim.Optimizer:
    """`given` are options of their own (--lr), which count if both are there."""
    written = _about_nothing(read("--optimizer", text))
    plain: optim.Optimizer = made(written, OPTIMIZERS)
    kind, chosen = type(plain), {name: value for name, value in given.items() if value is not None}
    for name in chosen:
        if name not in settings_of(kind).values():
            having = [k for k, c in OPTIMIZERS.items() if name in settings_of(c).values()]
            raise ValueError(f"--{name.replace('_', '-')} is of {' and '.join(having)}, {written.kind} has none")
    changed = {}
    for group in groups:
        head, *rest = SETTING.split(group)
        if not rest:
            raise ValueError(
                f"--group {group!r} sets nothing, expected a pattern of names as in '*.bias:weight-decay=0'"
            )
        of_group = Written(
            "--group",
            group,
            written.kind,
            head,
            {n.replace("_", "-"): v for n, v in zip(rest[::2], rest[1::2], strict=True)},
        )
        changed[head] = converted(of_group, kind)
    return replace(plain, **chosen, groups=changed)


def schedule(text: str, warmup: float | None, updates: int) -> schedules.Schedule:
    """A schedule over so many updates; a `warmup` under 1 is a share of them."""
    written = _about_nothing(read("--schedule", text))
    kind = SCHEDULES.get(written.kind, schedules.Constant)  # one that is unknown is refused below
    known = settings_of(kind).values()
    given: dict[str, Any] = {}
    if "steps" in known:
        given["steps"] = updates
    if "every" in known:
        given["every"] = max(1, updates // 3)
    if warmup is not None:
        if "warmup" not in known:
            having = [k for k, c in SCHEDULES.items() if "warmup" in settings_of(c).values()]
            raise ValueError(f"--warmup is of {', '.join(having)}: {written.kind} has none")
        given["warmup"] = round(warmup * updates) if warmup < 1 else round(warmup)
    result: schedules.Schedule = made(written, SCHEDULES, given)
    for name in ("steps", "every"):
        if getattr(result, name, 1) < 1:
            raise ValueError(f"--schedule {text!r}: {name} is {getattr(result, name)}, expected at least 1")
    return result


def _about_nothing(written: Written) -> Written:
    if written.subject is not None:
        raise ValueError(
            f"{written.option} {written.text!r}: {written.subject!r} is no setting, expected name=value as in "
            f"{written.kind}:name=value"
        )
    return written


def measures(
    texts: Sequence[str], total: losses.Total | str, outputs: Sequence[str], inputs: Sequence[str]
) -> dict[str, metrics.Metric]:
    """Metrics by the name they are shown with; output and target are those of the first loss if none are named."""
    found: dict[str, metrics.Metric] = {}
    first = None if isinstance(total, str) else total.parts[0]
    for text in texts:
        written = read("--metric", text)
        name = written.settings.pop("name", None)
        given: dict[str, Any] = {}
        if written.subject is None and first is not None:
            given["prediction"] = first.prediction
        elif written.kind in METRICS:
            given["prediction"] = _output(written, outputs)
        alike = [p for p in (() if isinstance(total, str) else total.parts) if p.prediction == given.get("prediction")]
        if alike:
            given["target"] = alike[0].target
        if alike and written.kind == "accuracy" and isinstance(alike[0], losses.CrossEntropy):
            given |= {"axis": alike[0].axis, "ignore_index": alike[0].ignore_index}
        metric = made(written, METRICS, given)
        if metric.target not in inputs:
            raise ValueError(
                f"--metric {text!r}: its target {metric.target!r} is none of the inputs of model and loss"
                f"{suggestion(metric.target, inputs)}"
            )
        name = name or (written.kind if written.kind not in found else text)
        if name in found or name == "loss":
            raise ValueError(f"--metric {text!r}: {name!r} is shown already, give it another one with name=")
        found[name] = metric
    return found
