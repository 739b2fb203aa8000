"""recompute_blocks(): computes activations again in the backward pass, instead of keeping them.

The chosen forward nodes are divided into regions. Gradients read copies of a region's nodes, which begin at what goes
into the region. onnxruntime frees what the forward pass alone reads, so only that is kept. A copy would run as early as
its inputs allow: hence what goes into a region passes a Where that also reads the gradient arriving at the region, and
chooses between twice the same. Then the copies run when the backward pass has come so far, and onnxruntime does not
take them for the same as the nodes they copy.
"""

import fnmatch
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import onnx_ir as ir

from onnxgrad.graph.builder import RANDOM, Builder, op
from onnxgrad.graph.node import descendants, needed_for, subgraphs, values_read
from onnxgrad.graph.suggest import suggestion
from onnxgrad.graph.tensor import is_float
from onnxgrad.graph.torch_export import modules_of
from onnxgrad.passes.draft import Draft

BLOCKS = "blocks"
LAST = 50  # activations, among which is the one that all gradients read: the logits, say
# What is not computed twice: random numbers, which would be others; sums over ranks, which are small and take long;
# BatchNormalization of onnxruntime in train mode, which writes over its running statistics; and shapes.
ONCE = {*RANDOM, "AllReduceSum", "BatchNormalization", "Shape", "Size", "Constant"}


def recompute_blocks(draft: Draft, names: Sequence[str], loss: str, gradients: Mapping[str, str]) -> None:
    """Computes again what is in "blocks", or in nodes whose names, or whose scopes' names, match one of these patterns.

    `gradients` are outputs, by parameter.
    """
    step = _Step(draft.graph, loss, gradients)
    found = step.blocks() if names == [BLOCKS] else _by_patterns(step, names, draft.caller)
    builder = Builder(draft.graph)
    in_regions = {node for region in found for node in region.nodes}
    done = [step.compute_again(builder, region, in_regions) for region in found]
    if not any(done):
        draft.remarks.append(
            "recompute changes nothing: the model has no blocks that a single tensor joins; name its nodes or scopes"
            if names == [BLOCKS]
            else "recompute changes nothing: the gradients read nothing of the nodes that it names"
        )


class _Region(NamedTuple):
    """Forward nodes that are computed again together; what leaves a module or a block is kept all the same."""

    nodes: list[ir.Node]
    is_module: bool = True


class _Step:
    """The graph of a step, which is sorted: which of its nodes are the forward pass, and what flows through it."""

    def __init__(self, graph: ir.Graph, loss: str, gradients: Mapping[str, str]) -> None:
        self._graph = graph
        self._sort()
        self.forward = needed_for(self.nodes, {v for v in graph.outputs if v.name == loss})
        weights = [v for v in graph.inputs if v.name in gradients]
        batch = [v for v in graph.inputs if v.name not in gradients]
        self.of_batch = {*batch, *(v for n in descendants(self.nodes, batch) for v in n.outputs)}
        of_both = descendants(self.nodes, weights) & descendants(self.nodes, batch) & self.forward
        # Activations: floating-point values of the forward pass that weights and the batch both go into.
        self.active = [n for n in self.nodes if n in of_both and any(map(is_float, n.outputs))]
        wanted = set(gradients.values())
        self.flow = self._flow({n for v in graph.outputs if v.name in wanted and (n := v.producer()) is not None})

    def _sort(self) -> None:
        self._graph.sort()
        self.nodes = list(self._graph)
        self.position = {node: k for k, node in enumerate(self.nodes)}

    def _flow(self, gradients: set[ir.Node]) -> set[ir.Node]:
        """Nodes of the backward pass through which the gradient of the loss flows.

        They read the last activations, as all gradients do. Others, which read those of one layer alone, may run early.
        """
        for node in self.active[-LAST:][::-1]:
            found = descendants(self.nodes, node.outputs) - self.forward
            if found >= gradients - self.forward:
                return found
        return set(self.nodes) - self.forward

    def blocks(self) -> list[_Region]:
        """Regions between activations that are the only ones at their point of the forward pass.

        If blocks hold w bytes together, and the tensor between two of them b, then n blocks keep n · b + w / n bytes,
        least with blocks of √(w · b). The last one is not computed again: its gradients are the first.
        """
        nodes = set(self.active)
        floating = [v for node in self.active for v in node.outputs if is_float(v)]
        readers = {v: {n for n, _ in v.uses()} & nodes for v in floating}
        segments: list[list[ir.Node]] = [[]]
        between: list[int] = []
        live: dict[ir.Value, set[ir.Node]] = {}
        for node in self.active:
            segments[-1].append(node)
            for v in live.keys() & set(values_read(node)):
                live[v].discard(node)
                if not live[v]:
                    del live[v]
            live |= {v: set(readers[v]) for v in node.outputs if readers.get(v)}
            if len(live) == 1:
                between.append(_bytes(next(iter(live))))
                segments.append([])
        held = [sum(_bytes(v) for n in segment for v in n.outputs if self._is_kept(v)) for segment in segments]
        enough = math.sqrt(sum(held) * statistics.median(between)) if between else math.inf
        found: list[list[ir.Node]] = [[]]
        in_block = 0
        for segment, size in reversed(list(zip(segments, held, strict=True))):
            found[0] = [*segment, *found[0]]
            in_block += size
            if in_block >= enough:
                found.insert(0, [])
                in_block = 0
        return [_Region(block) for block in found[:-1] if block]

    def _is_kept(self, value: ir.Value) -> bool:
        return any(node not in self.forward for node, _ in value.uses())

    def compute_again(self, builder: Builder, region: _Region, in_regions: set[ir.Node]) -> bool:
        """Has gradients read copies of a region's nodes; false if nothing of them was kept for gradients.

        What other regions, whose nodes are among `in_regions`, begin with is kept.
        """
        inside = {n for n in region.nodes if n in self.forward and _can_be_copied(n)}
        made = {v for n in inside for v in n.outputs}
        elsewhere = (self.forward if region.is_module else in_regions) - inside
        dropped = {v for v in made if not any(n in elsewhere for n, _ in v.uses())}
        readers = {n for v in dropped for n, _ in v.uses() if n in self.position and n not in self.forward}
        after = readers | descendants(self.nodes, [v for n in readers for v in n.outputs])
        arriving = [
            v for n in self.nodes if n in after for v in n.inputs
            if v is not None and (p := v.producer()) in self.flow and p not in after and is_float(v)
        ]  # fmt: skip
        if not readers or not arriving:
            return False
        gradient = max(arriving, key=self._made_at)
        outside = {v: None for n in self.nodes if n in inside for v in n.inputs if v is not None and v not in made}
        active = {v for n in self.active for v in n.outputs}
        starts = [v for v in outside if v in active] or [v for v in outside if v in self.of_batch]
        with builder.at_work(f"{region.nodes[0].name}_again"):
            again = _delayed(builder, starts, gradient)
        for node in self.nodes:
            if node in inside and any(v in again for v in node.inputs):
                again.update(zip(node.outputs, builder.copy_of_node(node, again).outputs, strict=True))
        for old in dropped & again.keys():
            for reader, k in list(old.uses()):
                if reader in readers:
                    reader.replace_input_with(k, again[old])
        self._sort()  # the gradient that the next region waits for must not wait for these copies in turn
        return bool(dropped & again.keys())

    def _made_at(self, value: ir.Value) -> int:
        producer = value.producer()
        return -1 if producer is None else self.position[producer]


def _by_patterns(step: _Step, patterns: Sequence[str], caller: str) -> list[_Region]:
    """A region for each scope that a pattern matches, and for nodes that it matches, as far as they are connected."""
    regions: dict[tuple[str, str], list[ir.Node]] = {}
    for node in step.active:
        names = [*_scopes(node), str(node.name)]
        matching = ((p, name) for p in patterns for name in names if fnmatch.fnmatchcase(name, p))
        pattern, name = next(matching, (None, ""))
        if pattern is not None:
            regions.setdefault((pattern, "" if name == node.name else name), []).append(node)
    for pattern in patterns:
        if not any(p == pattern for p, _ in regions):
            known = dict.fromkeys(name for n in step.active for name in (*_scopes(n), str(n.name)))
            raise ValueError(
                f"{caller}: recompute names {pattern!r}, which matches no node or scope of the model"
                f"{suggestion(pattern, known)}"
            )
    modules = [_Region(nodes) for (_, scope), nodes in regions.items() if scope]
    single = [n for (_, scope), nodes in regions.items() if not scope for n in nodes]
    return modules + [_Region(nodes, is_module=False) for nodes in _connected(single)]


def _connected(nodes: Iterable[ir.Node]) -> list[list[ir.Node]]:
    """Groups of nodes that read each other's results."""
    groups: list[list[ir.Node]] = []
    for node in nodes:
        producers = {v.producer() for v in values_read(node)}
        near = [group for group in groups if not producers.isdisjoint(group)]
        groups = [group for group in groups if group not in near] + [[*(n for group in near for n in group), node]]
    return groups


def _scopes(node: ir.Node) -> list[str]:
    """The modules that a node is in, the outer ones first: /layers/layers.0 of …/layers.0/up/MatMul, or layers.0."""
    parts = str(node.name).split("/")
    of_name = ["/".join(parts[:k]) for k in range(1, len(parts))]
    return [name for name in (*of_name, *(modules_of(node) or ())) if name]


def _delayed(builder: Builder, starts: Sequence[ir.Value], gradient: ir.Value) -> dict[ir.Value, ir.Value]:
    """Values as they are, but not before a gradient is there."""
    some = op.Slice(op.Reshape(builder.tensor(gradient), [-1]), [0], [1], [0])
    either = op.IsNaN(some)
    return {v: op.Where(either, builder.tensor(v), builder.tensor(v)).value for v in starts}


def _can_be_copied(node: ir.Node) -> bool:
    return node.op_type not in ONCE and not subgraphs(node)


def _bytes(value: ir.Value) -> int:
    """Of one example, where the other dimensions are known."""
    dims = () if value.shape is None else value.shape.dims
    size = math.prod(d for d in dims if isinstance(d, int))
    return size * (1 if value.dtype is None else math.ceil(value.dtype.itemsize))
