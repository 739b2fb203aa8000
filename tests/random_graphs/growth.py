"""A random graph that grows by an operator at a time, computed at once, so that numbers stay where they are sane."""

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper, numpy_helper
from tests.random_graphs.oracle import as_torch, run_node

import onnxgrad

MOST_ELEMENTS = 160
LARGEST, SMALLEST = 4.0, 0.03  # of values that are computed with: products of larger or smaller ones run away
VANISHED = 1e-5  # what is left of rounding: no scaling makes numbers of it
WILD = 1e3  # what no scaling brings back: differences of such numbers are rounding
FROM_KINKS = 2e-3  # how far numbers stay away from where a derivative jumps
OLDEST, NEWEST = 7, 26  # opsets: onnxruntime 1.31 takes those up to 26
# What onnxruntime has no kernels for, and how often a graph went without it: the tool prints them.
REFUSED: Counter[str] = Counter()
NO_KERNEL = re.compile("NOT_IMPLEMENTED|not implement|INVALID_GRAPH.*Type|Type Error")
_TAKEN: dict[Any, str | None] = {}


class UnsuitableError(Exception):
    """An operator that does not fit the values at hand; the graph goes on with another."""


class Case(NamedTuple):
    """A model, what to feed it, and which of its outputs are differentiated."""

    model: onnx.ModelProto
    feeds: dict[str, Any]
    of: list[str]


class Way(NamedTuple):
    """A way to grow."""

    grow: Callable[["Graph"], Any]
    since: int
    until: int
    weight: float


WAYS: list[Way] = []


def way(since: int = 1, until: int = 999, weight: float = 1.0) -> Callable[[Any], Any]:
    """Registers a function that adds nodes, for graphs of certain opsets."""

    def keep(function: Any) -> Any:
        WAYS.append(Way(function, since, until, weight))
        return function

    return keep


class Graph:
    """A graph on its way; subgraphs and function bodies have one of their own, which sees what is around it."""

    def __init__(self, rng: np.random.Generator, opset: int, dtype: Any, around: "Graph | None" = None) -> None:
        self.rng, self.opset, self.dtype, self.around = rng, opset, dtype, around
        self.root: Graph = self if around is None else around.root
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.functions: dict[tuple[str, str], onnx.FunctionProto] = {} if around is None else around.root.functions
        self.values: dict[str, Any] = {"": None} if around is None else dict(around.values)
        self.floats: list[str] = []
        self.closed = False  # a function's body sees nothing around it, and has no initializers
        if around is None:
            self.names, self.symbolic = 0, self.chance(0.5)

    # Choices.

    def chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def one_of(self, choices: Sequence[Any]) -> Any:
        return choices[int(self.rng.integers(len(choices)))]

    def between(self, low: int, high: int) -> int:
        return int(self.rng.integers(low, high + 1))

    def some(self, fits: Callable[[Any], bool] = lambda x: True) -> str:
        """A value of the graph that fits, rather a late one, so that graphs are deep."""
        found = [name for name in self.floats if fits(self.values[name])]
        if not found:
            raise UnsuitableError
        near = found[-5:] if self.chance(0.6) else found
        return str(self.one_of(near))

    def of_rank(self, *ranks: int) -> str:
        return self.some(lambda x: x.dim() in ranks)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.values[name].shape)

    # What is added.

    def name(self, prefix: str) -> str:
        self.root.names += 1
        return f"{prefix}{self.root.names}"

    def tensor(self, array: Any, prefix: str = "c") -> str:
        """A constant: an initializer of the main graph or of this one, or a node."""
        array = np.asarray(array)
        name = self.name(prefix)
        may_be_node = array.dtype.kind == "f" or self.opset >= 9
        if self.closed and not may_be_node:
            raise UnsuitableError
        is_node = self.closed or (array.dtype.kind != "f" and may_be_node and self.chance(0.2))
        if is_node:
            self.nodes.append(helper.make_node("Constant", [], [name], value=numpy_helper.from_array(array)))
        else:
            inner = self.chance(0.3) and self.around is not None and self.opset >= 9
            (self if inner else self.root).initializers.append(numpy_helper.from_array(array, name))
        self.values[name] = as_torch(array)
        if not is_node and self.root is not self:
            self.root.values.setdefault(name, self.values[name])
        return name

    def ints(self, *values: Any) -> str:
        return self.tensor(np.array(values, np.int64).reshape(-1))

    def number(self, value: float) -> str:
        return self.tensor(np.array(value, self.dtype))

    def weight(self, *shape: int, scale: float = 0.6, fresh: bool = False) -> str:
        """A parameter; often one that the graph has already."""
        root = self.root
        shared = [t.name for t in root.initializers if t.name[0] == "w" and tuple(t.dims) == tuple(shape)]
        if shared and not fresh and not self.closed and self.chance(0.3):
            chosen = str(self.one_of(shared))
            self.values[chosen] = root.values[chosen]
            return chosen
        return self.tensor((scale * self.rng.standard_normal(shape)).astype(self.dtype), "w")

    def positive_weight(self, *shape: int) -> str:
        return self.tensor(self.rng.uniform(0.5, 1.5, shape).astype(self.dtype), "p")

    def listed(self, name: str, values: Sequence[int], since: int) -> tuple[list[str], dict[str, Any]]:
        """Integers as the opset wants them: as an input since some opset, an attribute before."""
        if self.opset >= since:
            return [self.ints(*values)], {}
        return [], {name: list(values)}

    def node(self, op_type: str, inputs: Sequence[str], outputs: int = 1, domain: str = "", **attributes: Any) -> Any:
        """Adds a node if its results are numbers to go on with; their names."""
        names = [self.name("v") for _ in range(outputs)]
        proto = helper.make_node(op_type, inputs, names, name=self.name(op_type), domain=domain, **attributes)
        values = dict(self.values)
        if not self.known(op_type, domain):
            raise UnsuitableError
        try:
            run_node(proto, values, self.opset, self.functions, torch.float64)
        except (RuntimeError, IndexError) as error:
            raise UnsuitableError(str(error)) from error
        for name in names:
            _expect_sane(values[name])
        if not domain:
            self.expect_kernel(proto, values)
        self.nodes.append(proto)
        self.values.update({name: values[name] for name in names})
        return names[0] if outputs == 1 else names

    def known(self, op_type: str, domain: str) -> bool:
        if domain:
            return True
        if not onnx.defs.has(op_type, max_inclusive_version=self.opset, domain=""):
            return False
        return not onnx.defs.get_schema(op_type, max_inclusive_version=self.opset).deprecated

    def add(self, op_type: str, inputs: Sequence[str], outputs: int = 1, domain: str = "", **attributes: Any) -> Any:
        """The same, scaled, for others to compute with."""
        found = self.node(op_type, inputs, outputs, domain, **attributes)
        kept = [self.tame(name) for name in ([found] if outputs == 1 else found)]
        return kept[0] if outputs == 1 else kept

    def tame(self, name: str) -> str:
        """Into the range of sane numbers, and among the values that others may read."""
        value = self.values[name]
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return name
        largest = float(value.abs().max())
        if 0 < largest < VANISHED:
            return name
        if largest > LARGEST:
            name = self.smaller(name, largest)
        elif 0 < largest < SMALLEST:
            name = self.node("Mul", [name, self.number(round(0.5 / largest, 3))])
        self.floats.append(name)
        return name

    def smaller(self, name: str, largest: float) -> str:
        if largest < 10 and self.chance(0.5):
            return str(self.node("Tanh", [self.node("Mul", [name, self.number(0.2)])]))
        if self.chance(0.4) and self.known("Softsign", ""):
            return str(self.node("Softsign", [name]))
        return str(self.node("Div", [name, self.number(round(largest / 2, 2))]))

    def away_from(self, name: str, *kinks: float) -> None:
        """Whether the numbers of a value stay away from where the operator has a kink."""
        if any(float((self.values[name] - k).abs().min()) < FROM_KINKS for k in kinks):
            raise UnsuitableError

    def without_ties(self, name: str, axes: Sequence[int]) -> None:
        """Whether the largest and smallest number along axes is one alone."""
        value = self.values[name]
        rest = [k for k in range(value.dim()) if k not in axes]
        flat = value.permute([*rest, *axes]).reshape(math.prod(value.shape[k] for k in rest), -1).sort(-1).values
        if flat.shape[1] > 1 and float(flat.diff(dim=-1).min()) < FROM_KINKS:
            raise UnsuitableError

    def inside(self, name: str, bound: float = 0.8) -> str:
        """Between -bound and bound."""
        return str(self.node("Mul", [self.node("Tanh", [name]), self.number(bound)]))

    def positive(self, name: str, least: float = 0.3) -> str:
        how = self.one_of(["Softplus", "Sigmoid", "Exp"])
        return str(self.node("Add", [self.node(how, [name]), self.number(least)]))

    def condition(self) -> str:
        """A truth value, computed from numbers."""
        name = self.some()
        value = self.values[name]
        mean = float(value.mean())
        near = self.node("ReduceMean", [name], keepdims=0)
        limit = mean + self.one_of([-0.1, 0.1])
        return str(self.node(self.one_of(["Greater", "Less"]), [near, self.number(limit)]))

    def child(self) -> "Graph":
        return Graph(self.rng, self.opset, self.dtype, self)

    def expect_kernel(self, proto: onnx.NodeProto, values: dict[str, Any]) -> None:
        """Leaves out what onnxruntime has no kernel for, in this type and opset."""
        if any(a.HasField("g") for a in proto.attribute) or any(
            not isinstance(values[n], torch.Tensor) for n in [*proto.input, *proto.output] if n
        ):
            return
        texts = tuple(f"{a.name}={a.s.decode()}" for a in proto.attribute if a.s)
        ranks = tuple(values[n].dim() for n in proto.input if n)
        key = (proto.op_type, self.opset, np.dtype(self.dtype).name, len(proto.input), texts, ranks)
        refusal = _TAKEN[key] if key in _TAKEN else _refusal(proto, values, self.opset, self.dtype)
        if refusal is None or NO_KERNEL.search(refusal):
            _TAKEN[key] = refusal
        if refusal:
            said = NO_KERNEL.search(refusal)
            REFUSED[f"{proto.op_type}, {np.dtype(self.dtype).name}: {'no kernel' if said else refusal}"] += 1
            raise UnsuitableError


def _expect_sane(value: Any) -> None:
    if isinstance(value, list):
        for each in value:
            _expect_sane(each)
        return
    if value.numel() > MOST_ELEMENTS or value.numel() == 0 or value.dim() > 5:
        raise UnsuitableError
    if value.is_floating_point() and not bool(((value.abs() < WILD) & value.isfinite()).all()):
        raise UnsuitableError


def as_numpy(value: Any, dtype: Any) -> Any:
    return value.numpy().astype(dtype) if value.is_floating_point() else value.numpy()


def _refusal(proto: onnx.NodeProto, values: dict[str, Any], opset: int, dtype: Any) -> str | None:
    """Why onnxruntime does not run a node, if so."""
    arrays = {n: as_numpy(values[n], dtype) for n in [*proto.input, *proto.output] if n}
    infos = {n: _info(n, a.dtype, a.shape) for n, a in arrays.items()}
    inputs = list(dict.fromkeys(n for n in proto.input if n))
    # Constant, as most of what operators want to know ahead is.
    fixed = [numpy_helper.from_array(arrays[n], n) for n in inputs if arrays[n].dtype.kind != "f"]
    fed = [n for n in inputs if arrays[n].dtype.kind == "f"]
    graph = helper.make_graph([proto], "one", [infos[n] for n in fed], [infos[n] for n in proto.output], fixed)
    try:
        session = open_plain(model_of(graph, opset))
        session.run(None, {n: arrays[n] for n in fed})
    except Exception as error:  # onnxruntime's errors have no type in common
        return str(error).replace(proto.name, proto.op_type)[:160]
    return None


def model_of(graph: onnx.GraphProto, opset: int, functions: Sequence[Any] = ()) -> onnx.ModelProto:
    imports = [helper.make_opsetid("", opset)] + ([helper.make_opsetid("local", 1)] if functions else [])
    lowest = helper.find_min_ir_version_for(imports[:1])
    version = max(lowest, 8) if functions else lowest
    return helper.make_model(graph, opset_imports=imports, ir_version=version, functions=list(functions))


def open_plain(model: onnx.ModelProto, ours: bool = False, is_optimized: bool = True) -> Any:
    """A session with one thread: graphs are small, and many."""
    options = onnxgrad.register() if ours else onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    if not is_optimized:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    is_double = any(i.type.tensor_type.elem_type == TensorProto.DOUBLE for i in model.graph.input)
    # It rounds factors of products to float32, also of those in float64.
    disabled = ["MatMulScaleFusion"] if is_double else []
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"], disabled_optimizers=disabled
    )


def _info(name: str, dtype: Any, shape: Sequence[Any]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape)


def random_case(seed: int, nodes: int = 50, opset: int | None = None) -> Case:
    """The graph of a seed."""
    rng = np.random.default_rng(seed)
    if opset is None:
        opset = int(rng.integers(18, NEWEST + 1) if rng.random() < 0.6 else rng.integers(OLDEST, NEWEST + 1))
    graph = Graph(rng, opset, np.float32 if rng.random() < 0.75 else np.float64)
    inputs = _inputs(graph)
    while len(graph.nodes) < nodes:
        grow(graph)
    of = _outputs(graph)
    return _finished(graph, inputs, of)


def grow(graph: Graph, choices: Sequence[Way] | None = None) -> None:
    """One of the ways that there are, if it fits."""
    open_ones = [w for w in choices or WAYS if w.since <= graph.opset <= w.until]
    weights = np.array([w.weight for w in open_ones])
    chosen = open_ones[int(graph.rng.choice(len(open_ones), p=weights / weights.sum()))]
    with suppress(UnsuitableError):
        chosen.grow(graph)


SHAPES = [(3,), (2, 3), (4, 3), (3, 4), (2, 3, 4), (2, 4, 3), (1, 2, 4, 4), (2, 2, 3, 3), (1, 4, 5, 4), (1, 3, 6)]


def _inputs(graph: Graph) -> list[str]:
    names = [f"x{k}" for k in range(graph.between(1, 3))]
    for name in names:
        array = graph.rng.standard_normal(graph.one_of(SHAPES)).astype(graph.dtype)
        graph.values[name] = as_torch(array)
        graph.floats.append(name)
    return names


def _outputs(graph: Graph) -> list[str]:
    """Those that nothing reads, or a sum over most of them, and now and then one that something reads."""
    read = {name for node in graph.nodes for name in node.input}
    ends = [n for n in dict.fromkeys(graph.floats) if n not in read]
    made = {name for node in graph.nodes for name in node.output}
    ends = [n for n in ends if n in made]
    kept = [ends.pop() for _ in range(min(len(ends), graph.between(1, 3)))]
    if len(ends) > 2 and graph.chance(0.8):
        few = [graph.node("ReduceMean", [n], keepdims=0) if graph.shape(n) else n for n in ends[-graph.between(3, 8) :]]
        kept.append(graph.node("Sum", few))
    inner = [n for n in graph.floats if n in read and n in made]
    if inner and graph.chance(0.3):
        kept.append(graph.one_of(inner))
    return list(dict.fromkeys(kept))


def _finished(graph: Graph, inputs: list[str], of: list[str]) -> Case:
    symbolic = graph.symbolic
    infos = [_info(n, graph.dtype, _declared(graph, n, symbolic)) for n in inputs]
    made = [n for node in graph.nodes for n in node.output]
    others = [n for n in made if n in graph.values and _is_integer(graph.values[n])]
    outputs = [*of, *([graph.one_of(others)] if others and graph.chance(0.3) else [])]
    results = [
        _info(n, as_numpy(graph.values[n], graph.dtype).dtype, _declared(graph, n, symbolic, "o")) for n in outputs
    ]
    used = {n for node in graph.nodes for n in node.input} | _read_inside(graph.nodes)
    kept = [t for t in graph.initializers if t.name in used]
    if graph.opset < 9:  # their IR declares weights as inputs
        infos += [helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in kept]
    proto = helper.make_graph(graph.nodes, "random", infos, results, kept)
    called = {node.op_type for node in graph.nodes if node.domain == "local"}
    functions = [f for (_, name), f in graph.functions.items() if name in called]
    model = model_of(proto, graph.opset, functions)
    return Case(model, {n: as_numpy(graph.values[n], graph.dtype) for n in inputs}, of)


def _is_integer(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_floating_point()


def _read_inside(nodes: Sequence[onnx.NodeProto]) -> set[str]:
    """What subgraphs read."""
    graphs = [a.g for node in nodes for a in node.attribute if a.HasField("g")]
    return (
        {n for g in graphs for node in g.node for n in node.input}
        | {n for g in graphs for n in _read_inside(g.node)}
        | {o.name for g in graphs for o in g.output}
    )


def _declared(graph: Graph, name: str, symbolic: bool, prefix: str = "d") -> list[Any]:
    """A shape as the file has it: dimensions known, named or unknown."""
    shape = graph.shape(name)
    if not symbolic:
        return list(shape)
    return [graph.one_of([d, None, f"{prefix}_{name}_{k}"]) for k, d in enumerate(shape)]


def nodes_of(graph: Any) -> list[onnx.NodeProto]:
    """All nodes, those of subgraphs too."""
    found = []
    for node in graph.node:
        found.append(node)
        for attribute in node.attribute:
            if attribute.HasField("g"):
                found += nodes_of(attribute.g)
    return found


FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE)
