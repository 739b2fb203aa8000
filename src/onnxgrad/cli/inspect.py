"""onnxgrad inspect: the contents of a model, and which of them training would change."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onnxgrad.cli.group import command
from onnxgrad.cli.tables import described, plain_console, show
from onnxgrad.schema import is_standard

if TYPE_CHECKING:
    import onnx_ir as ir

    from onnxgrad.passes.draft import Draft

YES = {True: "yes", False: "no"}
MOST_ROWS = 60  # of initializers, unless all are asked for


@command
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--all", "all_rows", is_flag=True, help="List every initializer, including scalars.")
def inspect(model: Path, all_rows: bool) -> None:
    """Show the weights of MODEL and which are trained.

    For each initializer: its role, whether `onnxgrad train` trains it by default, and why. Also inputs and outputs,
    free batch sizes, and operators without a gradient rule.

    \b
    onnxgrad inspect model.onnx
    """
    from onnxgrad.graph.files import load
    from onnxgrad.passes.prepare import prepare_for_training

    loaded = load(model, "inspect")
    nodes, opset = sum(1 for _ in loaded.graph.all_nodes()), loaded.graph.opset_imports.get("", "?")
    maker = f"made by {loaded.producer_name} {loaded.producer_version or ''}".rstrip() if loaded.producer_name else ""
    draft = prepare_for_training(loaded, "inspect")
    graph, console = draft.graph, plain_console()
    facts = (f"{nodes} nodes", f"opset {opset}", f"IR version {loaded.ir_version}", maker)
    console.print(f"{model}: {', '.join(filter(None, facts))}", markup=False)
    inputs = [v for v in graph.inputs if v.name not in graph.initializers]
    ends = [("input", v) for v in inputs] + [("output", v) for v in graph.outputs]
    show(["", "name", "type"], [[what, str(v.name), described(v)] for what, v in ends])
    weights = [
        (name, role, tensor) for name, role in draft.roles.items()
        if (value := graph.initializers.get(name)) is not None and (tensor := value.const_value) is not None
    ]  # fmt: skip
    shown = weights if all_rows else [w for w in weights if w[1].kind not in ("scalar", "unused")][:MOST_ROWS]
    show(["initializer", "shape", "numbers", "role", "trained", "why"], [
        [name, str(list(tensor.shape.numpy())), f"{tensor.size:,}", role.kind, YES[role.is_parameter], role.why]
        for name, role, tensor in shown
    ])  # fmt: skip
    if len(shown) < len(weights):
        console.print(f"and {len(weights) - len(shown)} more: --all shows them")
    trained = [tensor.size for _, role, tensor in weights if role.is_parameter]
    lines = [*_about_head(draft), *_about_adapters(draft)]
    lines += [f"trained by default: {sum(trained):,} numbers in {len(trained)} initializers"]
    lines += [*_about_batches(draft, model), *_about_modes(graph), *_about_rules(graph), *draft.remarks]
    for line in lines:
        console.print(line, markup=False)


def _about_head(draft: "Draft") -> list[str]:
    """What replace_head() made, which has a word of its own."""
    from onnxgrad.graph.head import head_of

    names = head_of(draft.model)
    return [f"head: {', '.join(names)}; `--trainable head` trains it alone"] if names else []


def _about_adapters(draft: "Draft") -> list[str]:
    """How many, and of what rank."""
    from onnxgrad.graph.adapters import adapters_of

    adapters = adapters_of(draft.model)
    if not adapters:
        return []
    ranks = ", ".join(str(rank) for rank in sorted({adapter.rank for adapter in adapters}))
    return [f"adapters: {len(adapters)} of rank {ranks}; `onnxgrad merge` folds them into the weights"]


def _about_batches(draft: "Draft", model: Path) -> list[str]:
    """Whether batches of any size fit."""
    from onnxgrad.graph.files import load
    from onnxgrad.passes.free_batch import fixed_batch
    from onnxgrad.train.batch_dimension import with_free_batch

    inputs = [v for v in draft.graph.inputs if v.shape is not None and len(v.shape)]
    fixed = [f"{v.name} has {v.shape[0]} examples" for v in inputs if v.shape and isinstance(v.shape[0], int)]
    size = fixed_batch(draft.graph)
    if not inputs:
        return []
    if not fixed:
        return ["batches: of any size"]
    if size is not None and with_free_batch(draft, size, lambda: load(model, "inspect")) is not None:
        return [f"batches: of any size, though exported for {size}: nothing in the model depends on that"]
    return [f"batches: {', '.join(fixed)}, no more and no fewer"]


def _about_modes(graph: "ir.Graph") -> list[str]:
    """What changes in train mode."""
    from onnxgrad.graph.torch_export import is_folded_norm

    count = Counter(node.op_type for node in graph if is_standard(node.domain))
    lines = []
    if dropouts := count["Dropout"]:
        lines.append(f"Dropout: {dropouts} nodes drop in training, and pass everything in evaluation and exports")
    if norms := count["BatchNormalization"]:
        lines.append(
            f"BatchNormalization: {norms} nodes measure their batches in training and update their statistics; frozen "
            "ones stay"
        )
    elif any(is_folded_norm(node) for node in graph):
        lines.append(
            "BatchNormalization: the exporter folded it into other layers, so there is none to train: to keep it, "
            "export in train mode with optimize=False"
        )
    return lines


def _about_rules(graph: "ir.Graph") -> list[str]:
    """Operators that a gradient cannot go through."""
    from onnxgrad.rules.registry import RULES

    count = Counter(
        f"{node.domain}.{node.op_type}" if not is_standard(node.domain) else node.op_type
        for node in graph.all_nodes()
        if ("" if is_standard(node.domain) else node.domain, node.op_type) not in RULES
    )
    if not count:
        return ["gradients: every operator has a rule"]
    listed = ", ".join(f"{name} ({number})" for name, number in count.most_common())
    return [f"gradients: no rule for {listed}; what depends on them is not trained"]
