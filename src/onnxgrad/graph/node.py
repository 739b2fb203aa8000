"""A node as its rule sees it, by the names in its operator's schema, and what else is asked about nodes."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import onnx_ir as ir
from onnx import defs, helper

from onnxgrad.graph.builder import Builder
from onnxgrad.graph.tensor import Tensor, rank_of
from onnxgrad.schema import is_standard

RESHAPING = {"Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"}  # which onnxruntime computes by copying nothing


class NodeView:
    """`n.data`, `n.axis`, `n.Y`; None for an optional input left out, a list for a variadic one.

    An output that the node did not have until now is added to it when a rule asks for it. `n.grads` are the gradients
    of the outputs, None where nothing depends on one.
    """

    def __init__(
        self,
        builder: Builder,
        node: ir.Node,
        schema: Any,
        input_names: Sequence[str],
        grads: Sequence[Tensor | None],
        write_gradient: Callable[..., dict[ir.Value, Tensor]],
    ) -> None:
        self.builder, self.node, self.grads = builder, node, list(grads)
        self._write_gradient = write_gradient  # the engine's
        self._schema, self._input_names = schema, list(input_names)
        last = schema.inputs[-1] if schema is not None and schema.inputs else None
        self._variadic = last is not None and last.option == defs.OpSchema.FormalParameterOption.Variadic

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in self._input_names:
            return self._input(self._input_names.index(name))
        outputs = [o.name for o in self._schema.outputs] if self._schema is not None else []
        if name in outputs:
            return self.result(outputs.index(name))
        if name in self.node.attributes:
            return _plain(self.node.attributes[name])
        if self._schema is not None and name in self._schema.attributes:
            default = self._schema.attributes[name].default_value
            value = helper.get_attribute_value(default) if default.name else None
            return [_text(v) for v in value] if isinstance(value, list) else _text(value)
        if self._schema is None:
            return None
        raise AttributeError(f"{self.node.op_type} has no input, output or attribute {name!r}")

    def _input(self, k: int) -> Any:
        last = k == len(self._input_names) - 1
        if self._variadic and last:
            return [None if v is None else self.builder.tensor(v) for v in self.node.inputs[k:]]
        value = self.node.inputs[k] if k < len(self.node.inputs) else None
        return None if value is None else self.builder.tensor(value)

    @property
    def torch_op(self) -> str:
        """The PyTorch operation that it was exported from (`aten.clamp.default`), if torch's exporter has noted it."""
        hierarchy = self.node.metadata_props.get("pkg.torch.onnx.class_hierarchy", "")
        return hierarchy.strip("[]").rpartition(", ")[2].strip("'\"")

    @property
    def torch_call(self) -> str:
        """The PyTorch call with its arguments, `aten.embedding.default](args = (%weight, %x, 0), …`, if it is noted."""
        return self.node.metadata_props.get("pkg.torch.onnx.fx_node", "").partition("torch.ops.")[2]

    def result(self, k: int) -> Tensor:
        """The k-th output."""
        self.builder.ask_for_outputs(self.node, k + 1)
        return self.builder.tensor(self.node.outputs[k])

    def write_gradient(
        self, seeds: dict[ir.Value, Tensor], wrt: Sequence[ir.Value], builder: Builder | None = None
    ) -> dict[ir.Value, Tensor]:
        """The gradients of `wrt`, given those of nodes that a rule wrote itself, with a builder of its own maybe."""
        return self._write_gradient(builder or self.builder, seeds, wrt)

    def grad(self, k: int) -> Tensor | None:
        """The gradient of the k-th output, if anything depends on it."""
        return self.grads[k] if k < len(self.grads) else None


def captured(node: ir.Node) -> list[ir.Value]:
    """What the subgraphs of a node read of the graphs around them."""
    found: dict[ir.Value, None] = {}
    for graph in subgraphs(node):
        inside = {graph, *graph.subgraphs()}
        read = [v for inner in graph.all_nodes() for v in inner.inputs if v is not None]
        found |= dict.fromkeys(v for v in (*read, *graph.outputs) if v.graph not in inside)
    return list(found)


def values_read(node: ir.Node) -> list[ir.Value]:
    """A node's inputs, and what its subgraphs read of the graphs around them."""
    return [*(v for v in node.inputs if v is not None), *captured(node)]


def needed_for(nodes: Iterable[ir.Node], results: set[ir.Value]) -> set[ir.Node]:
    """The nodes that the results are computed by."""
    wanted, found = set(results), set()
    for node in reversed(list(nodes)):
        if any(v in wanted for v in node.outputs):
            found.add(node)
            wanted.update(values_read(node))
    return found


def descendants(nodes: Iterable[ir.Node], values: Iterable[ir.Value]) -> set[ir.Node]:
    """The nodes, which are in order, that some values go into, and those that their results go into."""
    reached, found = set(values), set()
    for node in nodes:
        if not reached.isdisjoint(values_read(node)):
            found.add(node)
            reached.update(node.outputs)
    return found


def subgraphs(node: ir.Node) -> list[ir.Graph]:
    """A node's own, without those in them."""
    if not node.attributes:  # as most
        return []
    graphs = [a.value for a in node.attributes.values() if a.type == ir.AttributeType.GRAPH]
    return graphs + [g for a in node.attributes.values() if a.type == ir.AttributeType.GRAPHS for g in a.value]


def only_user(node: ir.Node) -> ir.Node | None:
    """The one node that uses the first result of another, which is no result of the graph."""
    value = node.outputs[0]
    users = [user for user, _ in value.uses()]
    return users[0] if len(users) == 1 and not value.is_graph_output() else None


def is_transpose(node: ir.Node | None) -> bool:
    """Whether it is a Transpose of a value of known rank."""
    return (
        node is not None
        and node.op_type == "Transpose"
        and is_standard(node.domain)
        and node.outputs[0].shape is not None
    )


def permutation(transpose: ir.Node) -> list[int]:
    """The attribute perm, or what it is if it is left out; the rank must be known."""
    return list(transpose.attributes.get_ints("perm", range(rank_of(transpose.outputs[0]))[::-1]))


def named(node: ir.Node) -> str:
    """Its operator and its name, for messages."""
    return f"{node.op_type} (node {node.name!r})"


def reshapes(node: ir.Node | None) -> bool:
    """Whether its result is its first input, in another shape at most."""
    return node is not None and is_standard(node.domain) and node.op_type in RESHAPING


def _plain(attribute: ir.Attr) -> Any:
    value = attribute.value
    return list(value) if isinstance(value, (tuple, list)) else value


def _text(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value
