"""cut(): a graph with its gradient as two models, one that runs forward and one that runs backward.

The first has what the second reads of it as further outputs: as few bytes as possible, and nothing that is as well
computed again, such as shapes, masks and views.
"""

import math
from collections.abc import Collection, Iterable
from typing import NamedTuple

import onnx_ir as ir

from onnxgrad.graph.builder import RANDOM
from onnxgrad.graph.dead import drop_dead_nodes
from onnxgrad.graph.node import RESHAPING, descendants, needed_for, reshapes, subgraphs, values_read
from onnxgrad.graph.tensor import may_be_float

SIMPLE = {*RESHAPING, "Cast", "Constant", "ConstantOfShape", "Expand", "Transpose"}
USUAL = 32  # what an unknown dimension is taken to be
UNKNOWN = 1 << 24  # bytes, where not even the number of dimensions is known


class Cut(NamedTuple):
    """Two models; the first has `kept` as outputs, the second as inputs."""

    forward: ir.Model
    backward: ir.Model
    kept: list[str]


def cut(model: ir.Model, results: Collection[str], seeds: Collection[str]) -> Cut:
    """Cuts a model between what computes the `results` and what depends on `seeds`, which are some of its inputs."""
    model.graph.sort()
    kept = _Keeping(model.graph, results, seeds).kept()
    forward, backward = model.clone(), model.clone()
    keep_outputs(forward.graph, [*results, *(name for name in kept if name not in results)])
    gradients = [v for v in backward.graph.outputs if v.name not in results]
    backward.graph.outputs[:] = gradients
    _make_inputs(backward.graph, kept)
    keep_outputs(backward.graph, [str(v.name) for v in gradients])
    return Cut(forward, backward, kept)


class _Keeping:
    """What is kept of a graph that is sorted."""

    def __init__(self, graph: ir.Graph, results: Collection[str], seeds: Collection[str]) -> None:
        nodes = list(graph)
        self._forward = needed_for(nodes, {v for v in graph.outputs if v.name in results})
        given = {v for v in graph.inputs if v.name in seeds}
        backward = descendants(nodes, given)
        moved = {*given, *(v for node in backward for v in node.outputs)}
        self._read = dict.fromkeys(v for n in reversed(nodes) if n in backward for v in values_read(n))
        gradients = (v for v in graph.outputs if v.name not in results)  # which may need no seed, being constant
        self._read |= dict.fromkeys(v for v in gradients if v not in self._read)
        self._read = {v: None for v in self._read if v not in moved and v.producer() is not None}
        self._kept: dict[ir.Value, None] = {}

    def kept(self) -> list[str]:
        """Names of values; first what there is no choice about."""
        for choices in (False, True):
            for value in self._read:
                if self._may_be_computed_again(value) == choices:
                    self._keep(value)
        return [str(v.name) for v in self._kept]

    def _keep(self, value: ir.Value) -> None:
        node = value.producer()
        if node is None or value in self._kept:
            return
        again = self._price_again(node, {}) if self._may_be_computed_again(value) else math.inf
        price = _bytes(value)
        # Moving numbers takes time, so it has to save something; views cost nothing, nor does what only gradients use.
        if again < price or (again == price and (node not in self._forward or reshapes(node))):
            for v in values_read(node):
                self._keep(v)
        else:
            self._kept[value] = None

    def _may_be_computed_again(self, value: ir.Value) -> bool:
        node = value.producer()
        if node is None or node not in self._forward:
            return True
        if node.op_type in SIMPLE:
            return True
        return not (node.op_type in RANDOM or subgraphs(node) or any(map(may_be_float, node.outputs)))

    def _price(self, value: ir.Value, known: dict[ir.Value, float]) -> float:
        """Bytes to be kept so that the backward model has a value."""
        node = value.producer()
        if node is None or value in self._kept:
            return 0
        if value not in known:
            known[value] = _bytes(value)
            if self._may_be_computed_again(value):
                known[value] = min(known[value], self._price_again(node, known))
        return known[value]

    def _price_again(self, node: ir.Node, known: dict[ir.Value, float]) -> float:
        return sum(self._price(v, known) for v in dict.fromkeys(values_read(node)))


def _bytes(value: ir.Value) -> float:
    node = value.producer()
    if node is not None and reshapes(node) and node.inputs[0] is not None:
        return _bytes(node.inputs[0])  # though it may be of unknown shape
    if not isinstance(value.type, ir.TensorType) or value.dtype in (None, ir.DataType.STRING):
        return math.inf  # no tensor that could be kept
    assert value.dtype is not None
    if value.shape is None:
        return UNKNOWN
    return math.prod(d if isinstance(d, int) else USUAL for d in value.shape.dims) * value.dtype.itemsize


def _make_inputs(graph: ir.Graph, names: Iterable[str]) -> None:
    """Values that nodes compute become inputs."""
    made = {str(v.name): v for node in graph for v in node.outputs}
    for name in names:
        old = made[name]
        new = ir.Value(name=name, type=old.type, shape=old.shape)
        old.name = f"{name}_of_forward"
        old.replace_all_uses_with(new)
        graph.inputs.append(new)


def keep_outputs(graph: ir.Graph, names: Collection[str]) -> None:
    """The graph computes what has these names, and is as small as that allows."""
    named = {str(v.name): v for node in graph for v in node.outputs}
    graph.outputs[:] = [named[name] for name in names]
    drop_dead_nodes(graph)
    for name, value in list(graph.initializers.items()):
        if not value.uses():
            graph.initializers.pop(name)
    for value in list(graph.inputs):
        if not value.uses():
            graph.inputs.remove(value)
