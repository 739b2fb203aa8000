"""Random graphs of operators that have rules, against differences in float64, differentiated once and twice."""

import math
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from tests.gradients import evaluate, feeds_for_seeds

import onnxgrad

pytestmark = pytest.mark.slow

SMOOTH = ["Tanh", "Sigmoid", "Sin", "Softplus", "Erf", "Neg", "Atan", "Identity", "Gelu", "Mish"]
KINKED = ["Relu", "Abs", "LeakyRelu", "Elu", "HardSigmoid"]  # random numbers hardly ever sit on a kink
REDUCTIONS = ["ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceLogSumExp", "ReduceSumSquare"]
LARGEST = 50  # of results: differences of larger numbers are inexact
EXACT = 1e-5
ZERO = 1e-9  # what rounding makes of it: some graphs do not depend on what comes in


class Graph:
    """A graph that grows by one operator at a time, chosen by `draw`."""

    def __init__(self, draw: Any, kinks: bool) -> None:
        self.draw, self.kinks = draw, kinks
        self.rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.inputs = [f"x{k}" for k in range(draw(st.integers(1, 3)))]
        for name in self.inputs:
            self.shapes[name] = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))

    def one_of(self, choices: Any) -> Any:
        return self.draw(st.sampled_from(list(choices)))

    def some(self) -> tuple[str, tuple[int, ...]]:
        """A value; rather a late one, so that graphs are deep."""
        return self.one_of(list(self.shapes.items())[-4:])

    def constant(self, array: Any) -> str:
        name = f"c{len(self.initializers)}"
        self.initializers.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def add(self, op_type: str, inputs: list[str], *shapes: tuple[int, ...], **attributes: Any) -> None:
        names = [f"v{len(self.shapes) + k}" for k in range(len(shapes))]
        self.nodes.append(helper.make_node(op_type, inputs, names, **attributes))
        self.shapes.update(zip(names, shapes, strict=True))

    def grow(self) -> None:
        self.one_of([self.unary, self.binary, self.product, self.reduction, self.normalized, self.moved, self.read])()

    def unary(self) -> None:
        name, shape = self.some()
        self.add(self.one_of(SMOOTH + (KINKED if self.kinks else [])), [name], shape)

    def binary(self) -> None:
        (a, left), (b, right) = self.some(), self.some()
        try:
            shape = np.broadcast_shapes(left, right)
        except ValueError:
            b, shape = self.constant(self.rng.standard_normal(left[-1:])), left
        if math.prod(shape) > 64:
            return
        self.add(self.one_of(["Add", "Sub", "Mul", "Sum"] + (["Max", "Min"] if self.kinks else [])), [a, b], shape)

    def product(self) -> None:
        name, shape = self.some()
        width = self.draw(st.integers(1, 3))
        weight = self.constant(self.rng.standard_normal((shape[-1], width)) if shape else np.ones((1, 1)))
        if not shape:
            self.add("Unsqueeze", [name, self.constant(np.array([0, 1]))], (1, 1))
        elif len(shape) == 2 and self.draw(st.booleans()):
            self.add("Gemm", [name, weight], (shape[0], width), alpha=0.5)
        elif len(shape) > 1 and self.draw(st.booleans()):
            swapped = f"v{len(self.shapes)}"
            order = [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2]
            self.add("Transpose", [name], tuple(shape[k] for k in order), perm=order)
            self.add("MatMul", [name, swapped], (*shape[:-1], shape[-2]))
        else:
            self.add("MatMul", [name, weight], (*shape[:-1], width))

    def reduction(self) -> None:
        name, shape = self.some()
        if not shape:  # onnx.reference fails
            return
        op_type = self.one_of(REDUCTIONS if self.kinks else [r for r in REDUCTIONS if r[-3:] not in ("Max", "Min")])
        axes = self.draw(st.sets(st.integers(0, len(shape) - 1)))
        keep = self.draw(st.booleans())
        reduced = axes or set(range(len(shape)))
        kept = [1 if k in reduced else d for k, d in enumerate(shape) if keep or k not in reduced]
        given = [self.constant(np.array(sorted(axes), np.int64))] if axes else []
        self.add(op_type, [name, *given], tuple(kept), keepdims=int(keep))

    def normalized(self) -> None:
        name, shape = self.some()
        if not shape:
            return
        axis = self.draw(st.integers(-len(shape), len(shape) - 1))
        if self.draw(st.booleans()):
            self.add(self.one_of(["Softmax", "LogSoftmax"]), [name], shape, axis=axis)
        else:
            scale = self.constant(self.rng.standard_normal(shape[axis % len(shape) :]))
            self.add("LayerNormalization", [name, scale], shape, axis=axis, epsilon=0.1)

    def moved(self) -> None:
        """Shapes."""
        name, shape = self.some()
        if not shape:
            return
        how = self.one_of(["Transpose", "Reshape", "Unsqueeze", "Expand", "Flatten", "Squeeze"])
        if how == "Transpose":
            order = self.draw(st.permutations(range(len(shape))))
            self.add(how, [name], tuple(shape[k] for k in order), perm=order)
        elif how == "Reshape":
            self.add(how, [name, self.constant(np.array([-1]))], (math.prod(shape),))
        elif how == "Unsqueeze" and len(shape) < 4:
            axis = self.draw(st.integers(0, len(shape)))
            self.add(how, [name, self.constant(np.array([axis]))], (*shape[:axis], 1, *shape[axis:]))
        elif how == "Expand" and math.prod(shape) < 20:
            self.add(how, [name, self.constant(np.array([2, *[1] * len(shape)]))], (2, *shape))
        elif how == "Flatten":
            self.add(how, [name], (shape[0], math.prod(shape[1:])), axis=1)
        elif how == "Squeeze" and 1 in shape:
            axis = shape.index(1)
            self.add(how, [name, self.constant(np.array([axis]))], (*shape[:axis], *shape[axis + 1 :]))

    def read(self) -> None:
        """Parts of it, and several together."""
        name, shape = self.some()
        if not shape or math.prod(shape) > 32:
            return
        axis = self.draw(st.integers(0, len(shape) - 1))
        size = shape[axis]

        def sized(d: int) -> tuple[int, ...]:
            return (*shape[:axis], d, *shape[axis + 1 :])

        how = self.one_of(["Gather", "GatherElements", "Slice", "Concat", "Split", "Pad", "CumSum", "Tile", "Where"])
        if how == "Gather":
            self.add(how, [name, self.constant(self.rng.integers(-size, size, 2))], sized(2), axis=axis)
        elif how == "GatherElements":
            self.add(how, [name, self.constant(self.rng.integers(0, size, sized(2)))], sized(2), axis=axis)
        elif how == "Slice":
            bounds = [self.constant(np.array([k])) for k in (size - 1, -100, axis, -2)]
            self.add(how, [name, *bounds], sized((size + 1) // 2))
        elif how == "Concat":
            self.add(how, [name, name], sized(2 * size), axis=axis)
        elif how == "Split" and size > 1:
            parts = self.constant(np.array([1, size - 1]))
            self.add(how, [name, parts], sized(1), sized(size - 1), axis=axis)
        elif how == "Pad":
            before, after = np.zeros((2, len(shape)), np.int64)
            before[axis], after[axis] = 1, 1
            mode = self.one_of(["constant", "edge"])
            self.add(how, [name, self.constant(np.concatenate([before, after]))], sized(size + 2), mode=mode)
        elif how == "CumSum":
            self.add(how, [name, self.constant(np.array(axis))], shape, reverse=self.draw(st.integers(0, 1)))
        elif how == "Tile":
            times = np.ones(len(shape), np.int64)
            times[axis] = 2
            self.add(how, [name, self.constant(times)], sized(2 * size))
        elif how == "Where":
            chosen = self.constant(self.rng.random(shape) < 0.5)
            self.add(how, [chosen, name, self.constant(self.rng.standard_normal(shape))], shape)

    def model(self) -> tuple[onnx.ModelProto, dict[str, Any]]:
        known = self.draw(st.booleans())
        last = [name for name in self.shapes if name not in self.inputs][-1:]
        infos = [
            helper.make_tensor_value_info(
                n, TensorProto.DOUBLE, self.shapes[n] if known else [None] * len(self.shapes[n])
            )
            for n in self.inputs
        ]
        results = [helper.make_tensor_value_info(n, TensorProto.DOUBLE, [None] * len(self.shapes[n])) for n in last]
        graph = helper.make_graph(self.nodes, "random", infos, results, self.initializers)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
        return model, {n: self.rng.standard_normal(self.shapes[n]) for n in self.inputs}


@st.composite
def graphs(draw: Any, kinks: bool) -> tuple[onnx.ModelProto, dict[str, Any]]:
    graph = Graph(draw, kinks)
    for _ in range(draw(st.integers(3, 10))):
        graph.grow()
    assume(graph.nodes)
    model, feeds = graph.model()
    onnx.checker.check_model(model)
    assume(np.abs(evaluate(model, feeds)[0]).max(initial=0) < LARGEST)
    return model, feeds


def checked(model: onnx.ModelProto, feeds: dict[str, Any], of: list[str]) -> None:
    try:
        found = onnxgrad.check_gradient(model, feeds, "*", of, directions=2)
    except ValueError as error:
        assume("depends on nothing that" not in str(error))
        raise
    wrong = [row for row in found if not (row.error < EXACT or max(abs(row.gradient), abs(row.difference)) < ZERO)]
    assert not wrong, f"{found}\n{onnx.printer.to_text(model)}"


@settings(max_examples=200, deadline=None, derandomize=True)
@given(graphs(kinks=True))
def test_once(case):
    model, feeds = case
    checked(model, feeds, [model.graph.output[0].name])


@settings(max_examples=70, deadline=None, derandomize=True)
@given(graphs(kinks=False))
def test_twice(case):
    model, feeds = case
    result = model.graph.output[0].name
    try:
        once = onnxgrad.gradient(model, "*", result)
    except ValueError as error:
        assume("depends on nothing that" not in str(error))
        raise
    checked(once, {**feeds, **feeds_for_seeds(once, model, feeds)}, [o.name for o in once.graph.output[1:]])
