"""Ways to grow: branches, loops, functions and sequences, whose bodies grow in the same way."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from onnx import TensorProto, helper
from tests.random_graphs import elementwise, norms, products, shapes
from tests.random_graphs.growth import WAYS, Graph, UnsuitableError, grow, way

PLAIN = [elementwise, norms, products, shapes]
INSIDE = [w for w in WAYS if w.grow.__module__ in {m.__name__ for m in PLAIN}]


def inner_nodes(body: Graph, count: int) -> None:
    for _ in range(4 * count):
        if len(body.nodes) >= count:
            return
        grow(body, INSIDE)


def body_graph(body: Graph, inputs: Sequence[Any], outputs: Sequence[str]) -> Any:
    infos = [_info(body, n) for n in outputs]
    return helper.make_graph(body.nodes, body.root.name("body"), list(inputs), infos, body.initializers)


def _info(g: Graph, name: str, shape: Any = "own") -> Any:
    value = g.values[name]
    kinds = {torch.int64: TensorProto.INT64, torch.bool: TensorProto.BOOL, torch.int32: TensorProto.INT32}
    own = helper.np_dtype_to_tensor_dtype(np.dtype(g.dtype))
    return helper.make_tensor_value_info(
        name, kinds.get(value.dtype, own), list(value.shape) if shape == "own" else shape
    )


def shaped(body: Graph, like: str) -> str:
    """A value of the body in the shape of another: one that grew, or one made of what grew."""
    wanted = body.shape(like)
    made = {n for node in body.nodes for n in node.output}
    found = [n for n in body.floats if body.shape(n) == wanted and n in made]
    if found and body.chance(0.7):
        return found[-1]
    late = [n for n in body.floats if n in made]
    total = body.node("ReduceMean", [late[-1]], keepdims=0) if late else body.weight()
    return str(body.node("Tanh", [body.node("Add", [body.node("Mul", [like, total]), body.weight(*wanted)])]))


@way(weight=1.5)
def branch(g: Graph) -> None:
    like = g.some()
    condition = g.condition() if g.chance(0.7) else g.tensor(np.array(g.chance(0.5)))
    graphs = []
    for _ in range(2):
        body = g.child()
        body.floats = list(g.floats[-6:])
        inner_nodes(body, g.between(1, 4))
        graphs.append(body_graph(body, [], [shaped(body, like)]))
    g.add("If", [condition], then_branch=graphs[0], else_branch=graphs[1])


@way(weight=1.5)
def loop(g: Graph) -> None:
    state = g.some(lambda x: 0 < x.numel() <= 24)
    steps = g.between(1, 4)
    body = g.child()
    count, going, inside = g.name("i"), g.name("going"), g.name("s")
    body.values |= {count: torch.tensor(0), going: torch.tensor(True), inside: g.values[state]}
    body.floats = [*g.floats[-3:], inside]
    inner_nodes(body, g.between(1, 3))
    after = body.node("Tanh", [body.node("Add", [shaped(body, inside), inside])])
    onward = body.node("Identity", [going])
    scanned = [body.node("Mul", [after, body.weight()])] if g.chance(0.6) else []
    if scanned and g.chance(0.4):  # what a step computes with its number
        number = body.node("Cast", [count], to=helper.np_dtype_to_tensor_dtype(np.dtype(g.dtype)))
        scanned = [body.node("Mul", [scanned[0], body.node("Sin", [number])])]
    inputs = [
        helper.make_tensor_value_info(count, TensorProto.INT64, []),
        helper.make_tensor_value_info(going, TensorProto.BOOL, []),
        _info(body, inside),
    ]
    made = body_graph(body, inputs, [onward, after, *scanned])
    most = g.tensor(np.array(steps))
    if g.chance(0.3) and g.opset >= 11:  # known at run time alone
        length = g.node("Shape", [g.some(lambda x: x.dim() == 1 and x.shape[0] <= 4)])
        inputs_, settings = g.listed("axes", [0], 13)
        most = g.node("Squeeze", [length, *inputs_], **settings)
    condition = "" if g.chance(0.5) and g.opset >= 11 else g.tensor(np.array(True))
    g.add("Loop", [most, condition, state], 1 + len(scanned), body=made)


@way(since=9, weight=1.5)
def scan(g: Graph) -> None:
    given = g.some(lambda x: x.dim() > 1 and x.shape[0] <= 4)
    row = g.values[given][0]
    body = g.child()
    state, part = g.name("s"), g.name("part")
    start = g.weight(*row.shape)
    body.values |= {state: g.values[start], part: row}
    body.floats = [*g.floats[-2:], state, part]
    inner_nodes(body, g.between(1, 3))
    mixed = body.node("Add", [body.node("Mul", [shaped(body, state), body.weight()]), part])
    after = body.node("Tanh", [body.node("Add", [mixed, state])])
    out = body.node("Sin", [after])
    made = body_graph(body, [_info(body, state), _info(body, part)], [after, out])
    settings: dict[str, Any] = {"scan_input_directions": [1]} if g.chance(0.3) else {}
    if g.chance(0.3):
        settings["scan_output_axes"] = [row.dim()]
    if g.chance(0.3):
        settings["scan_output_directions"] = [1]
    g.add("Scan", [start, given], 2, body=made, num_scan_inputs=1, **settings)


@way(weight=1.5)
def function(g: Graph) -> None:
    """A function of two values, with an attribute, that may be called more than once."""
    a = g.some()
    b = elementwise.partner(g, a)
    known = [key for key in g.functions if key[1] in ("Blend", "Mix")]
    name = g.one_of(["Blend", "Mix"])
    if ("local", name) not in g.functions or not known:
        _define(g, name)
    attribute = {"alpha": float(g.one_of([0.3, 0.7]))} if g.dtype == np.float32 else {}
    g.add(name, [a, b], domain="local", **attribute)


def _define(g: Graph, name: str) -> None:
    own = helper.make_opsetid("", g.opset)
    if g.dtype == np.float64:  # for which onnxruntime has neither
        nodes = [
            helper.make_node("Tanh", ["A"], ["t"], name="bend"),
            helper.make_node("Mul", ["t", "B"], ["Y"], name="times"),
        ]
        g.functions["local", name] = helper.make_function("local", name, ["A", "B"], ["Y"], nodes, [own])
        return
    leaky = helper.make_node("Elu" if name == "Blend" else "LeakyRelu", ["s"], ["e"], name="leaky")
    attribute = leaky.attribute.add()
    attribute.name, attribute.ref_attr_name, attribute.type = "alpha", "alpha", 1
    nodes = [
        helper.make_node("Tanh", ["A"], ["t"], name="bend"),
        helper.make_node("Mul", ["t", "B"], ["m"], name="times"),
        helper.make_node("Add", ["m", "A"], ["s"], name="plus"),
        leaky,
        helper.make_node("Sin", ["e"], ["Y"], name="wave"),
    ]
    g.functions["local", name] = helper.make_function("local", name, ["A", "B"], ["Y"], nodes, [own], ["alpha"])


@way(since=11, weight=1.2)
def sequence(g: Graph) -> None:
    a = g.some(lambda x: x.dim() > 0)
    shape = g.shape(a)
    b = g.some(lambda x: tuple(x.shape) == shape)
    made = g.node("SequenceConstruct", [a, b, a] if g.chance(0.3) else [a, b])
    if g.chance(0.4):
        third = g.weight(*shape)
        made = g.node("SequenceInsert", [made, third, *([g.tensor(np.array(0))] if g.chance(0.5) else [])])
    if g.chance(0.3):
        made = g.node("SequenceErase", [made, g.tensor(np.array(0))])
    if g.chance(0.5):
        g.add("ConcatFromSequence", [made], axis=0, new_axis=g.between(0, 1))
    else:
        g.add("SequenceAt", [made, g.tensor(np.array(g.between(-1, 0)))])


@way(since=11, weight=0.8)
def split_to_sequence(g: Graph) -> None:
    name = g.some(lambda x: x.dim() > 0 and x.shape[0] > 1)
    size = g.shape(name)[0]
    if g.chance(0.5):
        made = g.node("SplitToSequence", [name, g.ints(1, size - 1)], axis=0)
    else:
        made = g.node("SplitToSequence", [name], axis=0, keepdims=g.between(0, 1))
    if g.chance(0.6):
        g.add("SequenceAt", [made, g.tensor(np.array(-1))])
    else:
        if len({tuple(x.shape) for x in g.values[made]}) > 1:
            raise UnsuitableError
        g.add("ConcatFromSequence", [made], axis=0, new_axis=1)
