"""Targets: the weights that can have an adapter, and the names that select them."""

import fnmatch
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from onnxgrad.graph.adapters import CONV, EMBEDDING, LINEAR
from onnxgrad.graph.suggest import listed, suggestion
from onnxgrad.graph.torch_export import module_of
from onnxgrad.passes.find_parameters import role_at
from onnxgrad.schema import MICROSOFT, is_standard

PASSED = {"Cast", "DequantizeLinear", "Identity", "QuantizeLinear", "Transpose"}  # between a weight and its user
_ENDING = re.compile(r"\.weight(_\w+)?$")  # quantizers append to names: query.weight_quantized, query.weight_Q4
_OF_INTEGERS = {"MatMulInteger": 1, "ConvInteger": 1, "QLinearMatMul": 3, "QLinearConv": 3}  # where the weight is
_KINDS = {"MatMul": (LINEAR, 1), "Gemm": (LINEAR, 1), "Conv": (CONV, 1), "Gather": (EMBEDDING, 0)}


@dataclass
class Target:
    """A weight and the nodes that use it in one way."""

    kind: str
    at: int  # which input of the nodes it is
    weight: ir.Value  # the initializer
    shape: tuple[int, ...]  # as the nodes read it
    dtype: ir.DataType
    nodes: list[ir.Node]
    module: str = ""
    refused: str = ""  # why it can have no adapter
    names: list[str] = field(default_factory=list)  # that choose it

    @property
    def groups(self) -> int:
        """Of a convolution."""
        return self.nodes[0].attributes.get_int("group", 1)

    @property
    def sizes(self) -> tuple[int, int]:
        """The numbers of inputs and outputs; of an embedding rows and columns."""
        node = self.nodes[0]
        if node.op_type == "MatMulNBits":
            return node.attributes.get_int("K", 0), node.attributes.get_int("N", 0)
        first, second = self.shape[:2]
        is_transposed = self.kind == CONV or bool(node.attributes.get_int("transB", 0))
        return (second, first) if is_transposed else (first, second)


def find_targets(graph: ir.Graph) -> list[Target]:
    """All weights of products, convolutions and embeddings, in the order of the graph."""
    found: dict[tuple[ir.Value, object], Target] = {}
    for node in graph.all_nodes():
        target = _target(node)
        if target is not None:
            key = target.weight, _how(target)
            found.setdefault(key, target)
            if found[key] is not target:
                found[key].nodes.append(node)
    taken: set[str] = set()
    ways = Counter(weight for weight, _ in found)
    for target in found.values():
        _name(target, taken, is_tied=ways[target.weight] > 1)
    return list(found.values())


def choose(targets: Sequence[Target], patterns: str | Sequence[str], rank: int, caller: str) -> list[Target]:
    """Those that patterns name; raises one sentence about a pattern that names none.

    A name without wildcards also stands for layers whose names end with it, as in PEFT. "*query*|*value*" is one
    pattern: it names something if one of its alternatives does.
    """
    given = [patterns] if isinstance(patterns, str) else patterns
    split = [[part.strip() for part in pattern.split("|") if part.strip()] for pattern in given]
    alternatives = [part for parts in split for part in parts]
    able = [t for t in targets if not (t.refused or _refusal(t, rank))]
    chosen = [t for t in able if any(_matches(t, p) for p in alternatives)]
    for wanted in filter(None, split):
        if not any(_matches(t, p) for t in chosen for p in wanted):
            raise ValueError(_nothing(targets, able, wanted, rank, caller))
    if not chosen:
        raise ValueError(f"{caller}: targets is empty, expected names or patterns such as {listed(_examples(able))}")
    return chosen


def _nothing(targets: Sequence[Target], able: Sequence[Target], wanted: Sequence[str], rank: int, caller: str) -> str:
    shown = " or ".join(map(repr, wanted))
    for target in targets:
        why = target.refused or _refusal(target, rank)
        if why and any(_matches(target, p) for p in wanted):
            return f"{caller}: {target.module!r}, which {shown} names, can have no adapter: {why}"
    if not able:
        why = next((f"; {t.module!r} can have none: {t.refused}" for t in targets if t.refused), "")
        expected = "a product, a convolution or an embedding to put an adapter beside"
        return f"{caller}: the model has no weight of {expected}{why}"
    modules = [t.module for t in able]
    plain = wanted[0].strip("*.")
    close = suggestion(plain, [*dict.fromkeys(m.rpartition(".")[2] for m in modules), *modules])
    examples = "" if not close.startswith("; did") else f" Names are {listed(_examples(able))}."
    close = close if close.startswith("; did") else f"; there are {listed(_examples(able))}"
    return f"{caller}: no layer is named {shown}{close}{examples}"


def _examples(targets: Sequence[Target]) -> list[str]:
    """A few of the names, of layers of each kind and last part."""
    by_ending = {t.module.rpartition(".")[2]: t.module for t in reversed(targets)}
    return list(by_ending.values())[::-1][:6]


def _matches(target: Target, pattern: str) -> bool:
    return any(fnmatch.fnmatchcase(n, pattern) or n.endswith((f".{pattern}", f"/{pattern}")) for n in target.names)


def _target(node: ir.Node) -> Target | None:
    if node.domain == MICROSOFT and node.op_type == "MatMulNBits":
        weight, scales = node.inputs[1], node.inputs[2]
        if weight is None or scales is None or weight.const_value is None or scales.dtype is None:
            return None
        return Target(LINEAR, 1, weight, (), scales.dtype, [node])
    if not is_standard(node.domain):
        return None
    if node.op_type in _OF_INTEGERS:
        value = node.inputs[_OF_INTEGERS[node.op_type]]
        why = f"{node.op_type} rounds what it multiplies, and passes no gradient on: quantize the weights alone"
        if value is None or value.const_value is None:
            return None
        return Target("", 1, value, (), ir.DataType.FLOAT, [node], refused=why)
    kind, at = _KINDS.get(node.op_type, ("", 1))
    value = node.inputs[at] if at < len(node.inputs) else None
    found = None if value is None or role_at(node, at) is None else weight_behind(value)
    if found is None:
        return None
    target = Target(kind, at, found[0], *_as_read(*found), [node])
    if not target.dtype.is_floating_point():
        return None  # indices, shapes
    target.refused = _why_not(target)
    return target


def weight_behind(value: ir.Value) -> tuple[ir.Value, list[ir.Node]] | None:
    """The initializer that a value is, or is made from by nodes that change no order but Transpose's; its user last."""
    path: list[ir.Node] = []
    while (node := value.producer()) is not None:
        if node.op_type not in PASSED or node.inputs[0] is None:
            return None
        path.insert(0, node)
        value = node.inputs[0]
    return (value, path) if value.const_value is not None else None


def _as_read(weight: ir.Value, path: Sequence[ir.Node]) -> tuple[tuple[int, ...], ir.DataType]:
    """The shape and the type of what nodes make from an initializer."""
    tensor = weight.const_value
    assert tensor is not None
    shape, dtype = tuple(tensor.shape.numpy()), tensor.dtype
    for node in path:
        if node.op_type == "Transpose":
            shape = tuple(shape[k] for k in node.attributes.get_ints("perm", range(len(shape))[::-1]))
        elif node.op_type == "Cast":
            dtype = ir.DataType(node.attributes["to"].as_int())
        elif node.op_type == "DequantizeLinear":
            scale = node.inputs[1]
            given = ir.DataType(node.attributes.get_int("output_dtype", 0))
            dtype = given or (scale.dtype if scale is not None and scale.dtype is not None else ir.DataType.FLOAT)
        elif node.op_type == "QuantizeLinear":
            dtype = ir.DataType.INT8
    return shape, dtype


def _why_not(target: Target) -> str:
    node, rank = target.nodes[0], len(target.shape)
    if not target.kind:
        return f"it is the {role_at(node, target.at)} of {node.op_type}, expected one of MatMul, Gemm, Conv or Gather"
    if target.kind == CONV:
        return ""
    if rank != 2:
        return f"it has {rank} dimensions, expected 2"
    if node.op_type == "Gather" and node.attributes.get_int("axis", 0) % 2:
        return "Gather reads its columns, expected rows"
    if node.op_type == "Gemm" and not node.attributes.get_float("alpha", 1.0):
        return "the alpha of Gemm is 0"
    return ""


def _refusal(target: Target, rank: int) -> str:
    if target.kind == CONV and (rank % target.groups or target.shape[0] % target.groups):
        return f"its convolution has {target.groups} groups, expected a rank that is a multiple of that, not {rank}"
    return ""


def _how(target: Target) -> object:
    """Nodes that use a weight in the same way share an adapter, as calls of one module do."""
    node = target.nodes[0]
    if target.kind == LINEAR:
        return LINEAR, target.shape, node.attributes.get_int("transB", 0), node.attributes.get_float("alpha", 1.0)
    if target.kind == EMBEDDING:
        return EMBEDDING
    return node.op_type, *(str(node.attributes.get(name)) for name in ("strides", "pads", "dilations", "auto_pad"))


def _name(target: Target, taken: set[str], is_tied: bool) -> None:
    """The layer's name: that of its weight without `.weight`, or of the module its first node is in.

    An embedding that is also the last layer has one name; the modules that use it have one each.
    """
    weight = str(target.weight.name)
    scope = module_of(target.nodes[0]) or ""
    stem = _ENDING.sub("", weight)
    wanted = [stem] if stem != weight and not (is_tied and scope) else [scope, weight]
    wanted += [scope, f"{stem}.{target.kind or target.nodes[0].op_type}"]
    free = (name for name in wanted if name and name not in taken)
    target.module = next(free, "") or f"{weight}.{target.nodes[0].name}"
    taken.add(target.module)
    scopes = [module_of(node) or "" for node in target.nodes]
    nodes = [str(node.name or "") for node in target.nodes]
    target.names = list(dict.fromkeys(n for n in (target.module, weight, *scopes, *nodes) if n))
