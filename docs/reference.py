"""The text of docs/api.md: public names with their signatures and docstrings, as the code has them."""

import ast
import dataclasses
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable
from types import ModuleType
from typing import Any

import onnxgrad
from onnxgrad.cli.coverage import operators
from onnxgrad.op import Op

WIDTH = 100  # of a signature on one line
HEAD = """# API reference

Generated from signatures and docstrings by `make docs`. [Getting started](getting-started.md) shows training, [the
guide](guide.md) gradients; [operators.md](operators.md) has inputs, outputs and types of every operator."""

TRAINING = """`onnxgrad.Trainer` trains a model on batches with a loss, an optimizer and a schedule; metrics are
computed on validation data."""
LOSSES = "A loss takes the name of the output that it compares with the target, and adds an input for the target."
OPTIMIZERS = "An optimizer holds its settings, and other settings for groups of parameters by name."
SCHEDULES = "The factor of the learning rate at each update."
CALLBACKS = "Objects that fit() calls: they monitor training, keep the best epoch, and end training early."
SOURCES = """[data.md](data.md) shows how to load data; `Batches` takes a source, which `read` makes from a file
or folder."""
METRICS = "Numbers for validation data in addition to the loss; any function of outputs and batch is a metric too."
FINE_TUNING = "Functions that change a model before training; [fine-tuning.md](fine-tuning.md) shows how."
GRADIENTS = "Functions that take a model and return it with its gradient, or with Hessian-vector products."
RUNTIME = "Functions that add our operators to stock onnxruntime, onnx and models, and set the number of threads."
CALLS = "Every operator is called in the same ways; [operators.md](operators.md) documents each of them."
TORCH = """Models, modules and ONNX operators inside PyTorch, differentiable by torch.autograd; `import onnxgrad.torch`.
[pytorch.md](pytorch.md) shows them."""
ORT_TRAINING = """The names of onnxruntime-training 1.19.2;
[from-onnxruntime-training.md](from-onnxruntime-training.md) says how to change over."""
BLOCKS = """`onnxgrad.ort_training.onnxblock` has these blocks. Within `onnxblock.base(model)` they are called with
names of values, and return the names of their results."""

# What is shown of a class, besides how it is made.
METHODS = {
    "Trainer": (
        "steps",
        "step",
        "gradient_norms",
        "evaluate",
        "fit",
        "find_lr",
        "averages",
        "save",
        "restore",
        "load",
        "export",
    ),
    "Batches": ("starting_at",),
    "Source": ("__len__", "take", "column", "plain", "subset", "split"),
    "Loss": ("target_like", "formula"),
    "Metric": ("count", "merge", "result"),
    "Callback": ("on_start", "on_step", "on_epoch", "on_end", "state", "load_state"),
    "LearningRates": ("smoothed", "suggestion"),
    "GradientCheck": ("worst",),
    "Module": ("export",),
    "Op": ("__call__", "into", "definition"),
    "Block": ("build",),
    "ForwardBlock": ("to_model_proto",),
    "TrainingBlock": ("requires_grad", "parameters", "to_model_proto"),
}
# Classes that are not names of the package itself: its functions return and raise them.
RESULTS = {
    "Record": "onnxgrad.train.fitting",
    "LearningRates": "onnxgrad.train.find_lr",
    "TrainingStoppedError": "onnxgrad.train.fitting",
    "Interrupted": "onnxgrad.train.interruption",
    "StepFiles": "onnxgrad.train.step_file",
    "GradientCheck": "onnxgrad.autodiff.check",
    "Compared": "onnxgrad.autodiff.check",
}
MADE_BY_USERS = ("Trainer", "Batches", "Arrays", "EarlyStopping", "KeepBest", "Module")
NOT_FOR_USERS = ("OptimizerState", "Callbacks", "Monitoring")
VARIABLES = {
    "GradientCheck": "report",
    "ForwardBlock": "block",
    "TrainingBlock": "block",
}  # for those whose name in lower case would be none
CALLS_OF_OPERATORS = {
    "__call__": "operator(*inputs, **attributes, check=True, deterministic=True)",
    "into": "operator.into(out, *inputs, **attributes)",
    "definition": "operator.definition(*inputs, **attributes)",
}


def api_page() -> str:
    """The whole page."""
    parts = [HEAD, "## Training", TRAINING]
    parts += [entry(getattr(onnxgrad, name), f"onnxgrad.{name}") for name in ("Trainer", "Batches")]
    parts += [of_result(name) for name in ("Record", "LearningRates", "TrainingStoppedError", "Interrupted")]
    parts += [entry(onnxgrad.export_step, "onnxgrad.export_step"), of_result("StepFiles")]
    namespaces = {"losses": LOSSES, "optim": OPTIMIZERS, "schedules": SCHEDULES, "metrics": METRICS}
    for name, sentence in {**namespaces, "callbacks": CALLBACKS}.items():
        parts += [f"## onnxgrad.{name}", sentence, *classes(getattr(onnxgrad, name), f"onnxgrad.{name}")]
    names = ("read", "Source", "Arrays", "balanced_weights")
    sources = [entry(getattr(onnxgrad.sources, name), f"onnxgrad.sources.{name}") for name in names]
    parts += ["## onnxgrad.sources", SOURCES, *sources]
    parts += ["## Fine-tuning", FINE_TUNING]
    names = ("replace_head", "cut", "join", "lora", "save_adapter", "load_adapter", "merge_lora", "quantize")
    parts += [entry(getattr(onnxgrad, name), f"onnxgrad.{name}") for name in names]
    parts += ["## Gradients", GRADIENTS]
    parts += [entry(getattr(onnxgrad, name), f"onnxgrad.{name}") for name in ("gradient", "hvp", "check_gradient")]
    parts += [of_result(name) for name in ("GradientCheck", "Compared")]
    parts += [entry(onnxgrad.vjp, "onnxgrad.vjp"), "## Sessions, models and threads", RUNTIME]
    names = ("session", "register", "add_functions", "reference_ops", "set_num_threads", "get_num_threads")
    parts += [entry(getattr(onnxgrad, name), f"onnxgrad.{name}") for name in names]
    parts += ["## Operators", CALLS, *methods(Op, "operator"), operator_calls()]
    module = importlib.import_module("onnxgrad.torch")
    parts += ["## onnxgrad.torch", TORCH, *(entry(getattr(module, n), f"onnxgrad.torch.{n}") for n in module.__all__)]
    return "\n\n".join([*parts, *ort_training()]) + "\n"


def ort_training() -> list[str]:
    """The files of a training and the blocks that they are built of."""
    home = "onnxgrad.ort_training"
    artifacts, onnxblock = (importlib.import_module(f"{home}.{name}") for name in ("artifacts", "onnxblock"))
    made = entry(artifacts.generate_artifacts, f"{home}.artifacts.generate_artifacts")
    names = (
        "Block",
        "ForwardBlock",
        "TrainingBlock",
        "base",
        "empty_base",
        "save_checkpoint",
        "load_checkpoint_to_model",
    )
    described = [entry(getattr(onnxblock, name), f"{home}.onnxblock.{name}") for name in names]
    return [f"## {home}", ORT_TRAINING, made, f"### {home}.onnxblock", BLOCKS, blocks_table(onnxblock), *described]


def blocks_table(onnxblock: ModuleType) -> str:
    """One line for each block, loss and optimizer."""
    lines = ["| block | |", "|---|---|"]
    for module in (onnxblock.blocks, onnxblock.loss, onnxblock.optim):
        for name in (n for n in module.__all__ if n != "Block"):
            kind = getattr(module, name)
            sentence = documented(kind).split("\n\n")[0].replace("\n", " ").replace("|", "\\|")
            lines.append(f"| `{module.__name__.rpartition('.')[2]}.{name}{call_text(kind)}` | {sentence} |")
    return "\n".join(lines)


def call_text(kind: type) -> str:
    """What it is made of, without types."""
    given = [p for p in inspect.signature(kind).parameters.values() if p.name != "temp_file_name"]
    return f"({', '.join(p.name if p.default is p.empty else f'{p.name}={p.default!r}' for p in given)})"


def of_result(name: str) -> str:
    """A class that is not a name of the package itself."""
    return entry(getattr(importlib.import_module(RESULTS[name]), name), f"{RESULTS[name]}.{name}")


def classes(module: ModuleType, name: str) -> list[str]:
    """The public classes that a module defines, in its order."""
    found = [c for c in vars(module).values() if inspect.isclass(c) and c.__module__ == module.__name__]
    return [entry(c, f"{name}.{c.__name__}") for c in found if c.__name__ not in NOT_FOR_USERS and c.__name__[0] != "_"]


def entry(thing: Any, name: str) -> str:
    """Heading, signature and docstring; for a class also its methods."""
    lines = [f"### {name}"]
    if inspect.isclass(thing):
        variable = VARIABLES.get(thing.__name__, thing.__name__.lower())
        shown = signature_of_class(thing, name)
        lines += [block(shown)] if shown else []
        lines += [documented(thing), *methods(thing, variable)]
    else:
        lines += [block(signature(thing, name)), documented(thing)]
    return "\n\n".join(lines)


def documented(thing: Any) -> str:
    """Its own docstring, which has to be there."""
    text = inspect.cleandoc(thing.__doc__ or "")
    if not text:
        raise SystemExit(f"{thing!r} has no docstring")
    return text


def methods(kind: type, variable: str) -> list[str]:
    """The methods shown of a class, as called on a variable of that name."""
    found = []
    for name in METHODS.get(kind.__name__, ()):
        member = inspect.getattr_static(kind, name)
        if isinstance(member, property):
            found += [f"`{variable}.{name}`", documented(member)]
            continue
        function = inspect.unwrap(getattr(kind, name))
        called = kind.__name__ if isinstance(member, classmethod) else variable
        written = CALLS_OF_OPERATORS[name] if kind is Op else signature(function, f"{called}.{name}", leave_out=1)
        found += [block(written), documented(function)]
    return found


def operator_calls() -> str:
    """One line for each operator."""
    lines = ["| call | |", "|---|---|"]
    for op in operators():
        parameters = inspect.signature(op.body).parameters.values()
        shown = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters]
        call = f"onnxgrad.{op.function_name}({', '.join(shown)})"
        sentence = op.doc.split("\n\n")[0].replace("\n", " ").replace("|", "\\|")
        lines.append(f"| [`{call}`](operators.md#{op.name.lower()}) | {sentence} |")
    return "\n".join(lines)


def block(text: str) -> str:
    return f"```py\n{text}\n```"


def signature(function: Callable[..., Any], name: str, leave_out: int = 0) -> str:
    """As it is written in the source, aliases of types and all."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(node, ast.FunctionDef)
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + [ast.unparse(d) for d in arguments.defaults]
    shown = [parameter(a, d) for a, d in zip(positional, defaults, strict=True)][leave_out:]
    if arguments.vararg:
        shown.append(f"*{arguments.vararg.arg}")
    elif arguments.kwonlyargs:
        shown.append("*")
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        shown.append(parameter(argument, None if default is None else ast.unparse(default)))
    if arguments.kwarg:
        shown.append(f"**{arguments.kwarg.arg}")
    gives = "" if node.returns is None or node.name == "__init__" else f" -> {ast.unparse(node.returns)}"
    return joined(name, shown, gives)


def parameter(argument: ast.arg, default: str | None) -> str:
    """Name, type, default."""
    kind = "" if argument.annotation is None else f": {ast.unparse(argument.annotation)}"
    if default is None:
        return argument.arg + kind
    return f"{argument.arg}{kind}{' = ' if kind else '='}{default}"


def signature_of_class(kind: type, name: str) -> str:
    """How it is made, or what it is made of if users do not make it; nothing for bases and errors."""
    if kind.__name__ in MADE_BY_USERS:
        return signature(kind.__init__, name, leave_out=1)  # type: ignore[misc]
    if dataclasses.is_dataclass(kind):
        fields = dataclasses.fields(kind)
        by_place, by_name = ([field_text(f) for f in fields if f.kw_only is kw_only] for kw_only in (False, True))
        return joined(name, [*by_place, *(["*", *by_name] if by_name else [])], "")
    if issubclass(kind, tuple):
        return joined(name, [f"{n}: {type_text(t)}" for n, t in kind.__annotations__.items()], "")
    return ""


def field_text(field: "dataclasses.Field[Any]") -> str:
    shown = f"{field.name}: {type_text(field.type)}"
    if field.default is not dataclasses.MISSING:
        return f"{shown} = {field.default!r}"
    return f"{shown} = {field.default_factory()!r}" if field.default_factory is not dataclasses.MISSING else shown


def type_text(kind: Any) -> str:
    """A type without the modules of its names."""
    return re.sub(r"\b(?:[A-Za-z_]\w*\.)+(?=\w)", "", inspect.formatannotation(kind))


def joined(name: str, parameters: list[str], gives: str) -> str:
    """On one line if it fits, else a line for each parameter."""
    parameters, gives = [p.replace("'", '"') for p in parameters], gives.replace("'", "")
    line = f"{name}({', '.join(parameters)}){gives}"
    if len(line) <= WIDTH:
        return line
    return "\n".join([f"{name}(", *(f"    {p}," for p in parameters), f"){gives}"])
