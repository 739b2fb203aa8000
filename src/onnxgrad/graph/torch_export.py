"""What torch's exporters leave in a file about the module it was made from.

The exporter on torch.export writes the signature of the module's forward into the graph's metadata, what an initializer
was (PARAMETER, BUFFER, …) into its value's, and the module and the call that a node came from into the node's. The
older one, on TorchScript, says the module in the names of nodes (`/layers.0/fc1/MatMul`).
"""

import ast
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import onnx_ir as ir

PRODUCER = "pytorch"
PARAMETER = "PARAMETER"
_SIGNATURE = "pkg.torch.export.ExportedProgram.graph_signature"
_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
_SCOPES = "pkg.torch.onnx.name_scopes"
_CALL = "pkg.torch.onnx.fx_node"
_FOLDED = "pkg.onnxscript.optimizer.folded_from"
# Calls that move numbers and change none; values are named after the calls that computed them, constants `val_7`.
_MOVES = {
    "alias", "arange", "broadcast_to", "chunk", "clone", "contiguous", "detach", "embedding", "expand", "flatten",
    "gather", "getitem", "index", "lift_fresh_copy", "permute", "repeat", "reshape", "select", "slice", "split",
    "squeeze", "t", "to", "transpose", "unsqueeze", "val", "view",
}  # fmt: skip
_READS_ROWS = {"embedding", "gather", "index"}
_SPEC = re.compile(r"^(\w+): (\w+) target='([^']*)'", re.MULTILINE)
_ARGUMENT = re.compile(r"%(\w+)")
_SCRIPT_CONSTANT = re.compile(r"(/.*)?/Constant(_\d+)?_output_0")
_STATE_DICT = re.compile(r"\w+(\.\w+)*")


class Input(NamedTuple):
    """What a module's forward reads: a parameter, a buffer or a constant, by its name in the module."""

    kind: str
    name: str


def signature(graph: ir.Graph) -> dict[str, Input]:
    """What forward reads, by the names that calls have for it; empty if another exporter made the file."""
    text = graph.metadata_props.get(_SIGNATURE, "")
    return {argument: Input(kind, name) for argument, kind, name in _SPEC.findall(text)}


def kind_of(value: ir.Value) -> str | None:
    """What an initializer was in the module, if the file says so."""
    return value.metadata_props.get(_KIND)


def is_constant_of_script(name: str) -> bool:
    """Whether the exporter on TorchScript wrote a value of this name as a Constant, for a tensor that forward makes."""
    return _SCRIPT_CONSTANT.fullmatch(name) is not None


def is_of_state_dict(name: str, users: Iterable[ir.Node]) -> bool:
    """Whether the exporter on TorchScript gave this name to a parameter or a buffer, and not to a value of a node.

    It names the nodes that use them by modules, which files of the other exporter do not, nor do those that onnxruntime
    or another tool has taken the metadata from.
    """
    is_name = _STATE_DICT.fullmatch(name) is not None and not name.isdigit()
    return is_name and any(node.name is not None and node.name.startswith("/") for node in users)


def modules_of(node: ir.Node) -> list[str] | None:
    """The names of the modules that torch.export saw a node in, the outer ones first: "", `layers`, `layers.0`."""
    text = node.metadata_props.get(_SCOPES)
    return None if text is None else ast.literal_eval(text)[:-1]


def module_of(node: ir.Node) -> str | None:
    """The name of the module that a node came from: `layers.0.fc1`, and "" for the whole."""
    modules = modules_of(node)
    if modules is not None:
        return modules[-1] if modules else ""
    name = node.name or ""
    if not name.startswith("/"):
        return None
    parts = name.split("/")[1:-1]  # those of a Sequential begin with its own name: /net/net.0/fc/MatMul
    return ".".join(p for p, inner in zip(parts, [*parts[1:], ""], strict=False) if not inner.startswith(f"{p}."))


def inputs_of_call(node: ir.Node, signature: Mapping[str, Input]) -> list[Input]:
    """The parameters, buffers and constants that the call which a node came from was given, in order."""
    _, _, arguments = node.metadata_props.get(_CALL, "").partition("](args")
    return [signature[name] for name in _ARGUMENT.findall(arguments) if name in signature]


def is_detach(node: ir.Node) -> bool:
    """Whether a node came from a call of detach(), behind which there is no gradient."""
    return node.op_type == "Identity" and "torch.ops.aten.detach.default]" in node.metadata_props.get(_CALL, "")


class Folding(NamedTuple):
    """What an initializer was computed from by the exporter, before it wrote the file."""

    parameters: list[str]
    is_moved: bool  # whether its numbers are those of a parameter
    reads_rows: bool  # of a table, some more than once perhaps


def folding_of(value: ir.Value, signature: Mapping[str, Input]) -> Folding | None:
    """What an initializer was computed from; None if the file does not say, and once it has a parameter's name."""
    text = value.metadata_props.get(_FOLDED)
    kinds = {i.name: i.kind for i in signature.values()}
    if text is None or value.name in kinds:
        return None
    names = ast.literal_eval(text)
    calls = {re.sub(r"_\d+$", "", name) for name in (str(value.name), *names) if name not in kinds}
    parameters = [name for name in names if kinds.get(name) == PARAMETER]
    is_moved = "embedding" in calls or calls <= _MOVES  # what else was computed were an embedding's indices
    return Folding(parameters, len(parameters) == 1 and is_moved, bool(calls & _READS_ROWS))


def is_made_by_code(value: ir.Value, signature: Mapping[str, Input]) -> bool:
    """Whether the file says that forward's code makes an initializer, of no parameter: a mask, a state of zeros."""
    folding = folding_of(value, signature)
    return is_constant_of_script(str(value.name)) or (folding is not None and not folding.parameters)


def is_folded_norm(node: ir.Node) -> bool:
    """Whether a node came from the call of a batch norm that the exporter folded into the node before it."""
    return "batch_norm" in node.metadata_props.get(_CALL, "") and node.op_type != "BatchNormalization"


def mark(value: ir.Value, kind: str) -> None:
    """Says what an initializer is, as the exporter does."""
    value.metadata_props[_KIND] = kind


def forget_call(node: ir.Node) -> None:
    """Of a node whose weights are no longer those that the call was given."""
    node.metadata_props.pop(_CALL, None)


def forget_signature(graph: ir.Graph) -> None:
    """Of a graph that is no longer that of one module."""
    graph.metadata_props.pop(_SIGNATURE, None)
