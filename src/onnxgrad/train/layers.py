"""Layers: the depth of each parameter in the model, for learning rates that fall from its end to its beginning.

A block is what the names count: `encoder.layer.3` of all parameters that begin with it, by the first number in a name,
or in the names of the nodes that read it. Its layer follows from the way of the data through the graph: one more than
that of the blocks before it. What comes before all blocks is layer 0, what comes after them, a norm and the classifier
as a rule, is the last layer. Where names count nothing, each weight with two dimensions or more is a block.
"""

import re
from collections.abc import Callable, Mapping, Sequence

import onnx_ir as ir

from onnxgrad.graph.node import values_read
from onnxgrad.graph.tensor import is_float

Block = tuple[str, ...]
BlockOf = Callable[[str, str], Block | None]  # of the names of a parameter and of a node that reads it
SEPARATORS = re.compile(r"[./]")
NUMBER, LAST_NUMBER = re.compile(r"\d+"), re.compile(r".*_\d+")
COUNTED_AGAIN = {"blocks", "layers"}  # within a stage: `stages.1.blocks.0`
STEM = "stem"  # `stem.0` is before all blocks


def factors(depths: Mapping[str, int], parameters: Mapping[str, object], decay: float) -> dict[str, float]:
    """The factor of the learning rate for each parameter: 1 in the last layer, times `decay` for each one before."""
    last = max(depths.get(name, 0) for name in parameters)
    return {name: decay ** (last - depths.get(name, 0)) for name in parameters}


def depths(graph: ir.Graph) -> dict[str, int]:
    """The layer of each floating-point initializer that the outputs depend on."""
    weights = {
        str(v.name): () if v.shape is None else tuple(v.shape) for v in graph.initializers.values() if is_float(v)
    }
    counted = {block for name in (*weights, *(str(node.name or "") for node in graph)) if (block := _by_number(name))}
    stages = {block[:-2] for block in counted if block[-2:-1] and block[-2] in COUNTED_AGAIN}

    def by_number(weight: str, node: str) -> Block | None:
        found = _by_number(weight) or _by_number(node, is_node=True)
        return None if found in stages else found

    for block_of in (by_number, _by_last_digits):
        found = _Depths(graph, weights, block_of)
        if len(found.of_block) > 1:
            return found.of_weight
    by_shape = {name: (name,) if len(shape) > 1 else None for name, shape in weights.items()}
    return _Depths(graph, weights, lambda weight, node: by_shape[weight], others_follow=True).of_weight


def _by_number(name: str, is_node: bool = False) -> Block | None:
    """The part of a name up to its first number, `("encoder", "layer", "3")` or `("encoder", "layer_3")`.

    The name of a node may end in a number of its own, and repeats the names of modules: /blocks/blocks.3/norm.
    """
    parts = _parts(name)
    at = next((k for k in range(len(parts)) if _counts(parts, k, is_node)), None)
    if at is None or parts[max(at - 1, 0)] == STEM:
        return None
    rest = parts[at + 1 : at + 3]
    if len(rest) == 2 and rest[0] in COUNTED_AGAIN and NUMBER.fullmatch(rest[1]):
        at += 2
    return tuple(parts[: at + 1])


def _parts(name: str) -> list[str]:
    found = [part for part in SEPARATORS.split(name) if part]
    return [part for k, part in enumerate(found) if not k or part != found[k - 1] or part.isdigit()]


def _counts(parts: Sequence[str], k: int, is_node: bool) -> bool:
    is_scope = k < len(parts) - 1 and not is_node
    return bool(NUMBER.fullmatch(parts[k]) or (is_scope and LAST_NUMBER.fullmatch(parts[k])))


def _by_last_digits(weight: str, node: str) -> Block | None:
    """The part of a name up to the first word that ends in a number, `("features", "denseblock3")`."""
    scope = _parts(weight)[:-1]
    at = next((k for k, part in enumerate(scope) if part[-1].isdigit()), None)
    return None if at is None else tuple(scope[: at + 1])


class _Depths:
    """The layers of blocks and weights, found along the way from the inputs.

    With `others_follow` what is in no block belongs to the one before it, a bias to its weight.
    """

    def __init__(
        self, graph: ir.Graph, weights: Mapping[str, object], block_of: BlockOf, others_follow: bool = False
    ) -> None:
        self.of_block: dict[Block, int] = {}
        self.of_weight: dict[str, int] = {}
        self._block_of, self._others_follow = block_of, others_follow
        self._depth: dict[ir.Value, int] = {value: 0 for value in graph.inputs if value.name not in graph.initializers}
        # Weights that values are computed from which depend on no input: a transposed one, for example.
        self._sources = {value: [name] for name, value in graph.initializers.items() if name in weights}
        for node in graph:
            self._visit(node)

    def _visit(self, node: ir.Node) -> None:
        read = values_read(node)
        weights = list(dict.fromkeys(name for value in read for name in self._sources.get(value, ())))
        before = [self._depth[value] for value in read if value in self._depth]
        if not before:
            self._sources |= dict.fromkeys(node.outputs, weights)
            return
        depth = max(before)
        blocks = {name: self._block_of(name, str(node.name or "")) for name in weights}
        for block in (found for found in blocks.values() if found is not None):
            self.of_block.setdefault(block, max(before) + 1)
            depth = max(depth, self.of_block[block])
        apart = depth if self._others_follow or not depth else depth + 1
        for name, own in blocks.items():
            self.of_weight.setdefault(name, apart if own is None else self.of_block[own])
        self._depth |= dict.fromkeys(node.outputs, depth)
