"""gradient(recompute=True): the same gradients, from √n of the states."""

import math
from itertools import product

import numpy as np
import onnx
import onnxruntime
import pytest
from tests.gradients import parsed

import onnxgrad
from onnxgrad.train import losses, optim
from onnxgrad.train.trainer import Trainer

RNG = np.random.default_rng(4)
SCAN = """g (float[2,3] h0, float{shape} xs, float[3,3] w) => (float[2,3] hT, float[a,b,c] ys) {{
    hT, ys = Scan <num_scan_inputs = 1, scan_input_axes = [{axis}], scan_input_directions = [{backward}],
                   scan_output_axes = [{out_axis}], scan_output_directions = [{out_backward}],
                   body = step (float[2,3] h, float[2,3] x) => (float[2,3] h1, float[2,3] y) {{
        a = MatMul(h, w)
        b = Add(a, x)
        h1 = Tanh(b)
        y = Mul(h1, h)
    }}> (h0, xs)
}}"""
LOOP = """g (int64 n, bool go, float[B,3] h0, float[3] w, float most) => (float[B,3] h, float[T,B,3] ys) {
    h, ys = Loop (n, go, h0) <body = step (int64 k, bool more, float[B,3] a) => (bool on, float[B,3] b, float[B,3] y) {
        size = ReduceSum<keepdims = 0>(a)
        on = Less(size, most)
        m = Mul(a, w)
        number = CastLike(k, a)
        s = Add(m, number)
        b = Sin(s)
        y = Mul(b, a)
    }>
}"""


def compared(model, feeds, wrt, of):
    """Outputs and gradients with and without it, the first time with seeds made for the outputs."""
    plain, divided = (onnxgrad.gradient(model, wrt, of, recompute=recompute) for recompute in (False, True))
    onnx.checker.check_model(divided, full_check=True)
    results = []
    forward = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    values = dict(zip([o.name for o in forward.get_outputs()], forward.run(None, feeds), strict=True))
    seeds = {f"{n}_grad": np.random.default_rng(1).standard_normal(values[n].shape).astype(np.float32) for n in of}
    for made in (plain, divided):
        session = onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
        results.append(session.run(None, {**feeds, **seeds}))
    for got, expected in zip(*results, strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=1e-6)
    return divided


def single(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("steps, known", [*product([1, 2, 3, 4, 9, 10, 17], [False]), (3, True), (10, True)])
@pytest.mark.parametrize("axis, backward, out_axis, out_backward", [(0, 0, 0, 0), (1, 1, -1, 0), (0, 0, 1, 1)])
def test_a_scan(steps, known, axis, backward, out_axis, out_backward):
    shape = [2, 3]
    shape.insert(axis, steps)
    dims = [d if known or k != axis else "T" for k, d in enumerate(shape)]
    places = {"axis": axis, "backward": backward, "out_axis": out_axis, "out_backward": out_backward}
    model = parsed(SCAN.format(shape=f"[{','.join(map(str, dims))}]", **places))
    compared(model, {"h0": single(2, 3), "xs": single(*shape), "w": single(3, 3)}, ["h0", "xs", "w"], ["hT", "ys"])


def test_what_is_kept():
    """Of 100 states of 24 numbers not many more than 20."""
    model = parsed("""g (float[4,6] h0, float[100] xs, float[6] w) => (float[4,6] y) {
        y = Scan <num_scan_inputs = 1, body = step (float[4,6] h, float x) => (float[4,6] h1) {
            a = Mul(h, w)
            b = Add(a, x)
            h1 = Tanh(b)
        }> (h0, xs)
    }""")
    made = compared(model, {"h0": single(4, 6), "xs": single(100), "w": single(6)}, ["h0", "xs", "w"], ["y"])
    graphs = [made.graph]
    for graph in graphs:
        graphs += [a.g for node in graph.node for a in node.attribute if a.type == onnx.AttributeProto.GRAPH]
    sizes = [
        math.prod(d.dim_value for d in info.type.tensor_type.shape.dim) for graph in graphs for info in graph.value_info
    ]
    assert max(sizes) <= 12 * 24


def test_a_loop_without_a_number_of_steps_stays():
    model = parsed("""g (bool go, float[3] x, float[3] w) => (float[3] y) {
        y = Loop ( , go, x) <body = step (int64 k, bool more, float[3] a) => (bool on, float[3] b) {
            b = Mul(a, w)
            s = ReduceSum<keepdims = 0>(b)
            one = Constant<value = float {1.0}>()
            on = Less(s, one)
        }>
    }""")
    made = onnxgrad.gradient(model, ["x", "w"], recompute=True)
    assert made == onnxgrad.gradient(model, ["x", "w"])


def test_a_state_that_grows():
    model = parsed("""g (int64 n, float[B,3] x, float[3] w) => (float[S,3] y) {
        y = Loop (n, , x) <body = step (int64 k, bool more, float[P,3] a) => (bool on, float[Q,3] b) {
            on = Identity(more)
            m = Mul(a, w)
            s = Sin(m)
            b = Concat<axis = 0>(s, x)
        }>
    }""")
    compared(model, {"n": np.array(7), "x": single(2, 3), "w": single(3)}, ["x", "w"], ["y"])


def test_in_training():
    model = parsed(SCAN.format(shape="[10,2,3]", axis=0, backward=0, out_axis=0, out_backward=0))
    feeds = {"h0": single(2, 3), "xs": single(10, 2, 3), "target": single(2, 3)}
    del model.graph.input[2]
    model.graph.initializer.append(onnx.numpy_helper.from_array(single(3, 3), "w"))
    trainers = [Trainer(model, losses.MSE("hT"), optim.SGD(lr=0.1), recompute=recompute) for recompute in (False, True)]
    for _ in range(4):
        plain, divided = (trainer.step(feeds) for trainer in trainers)
        assert divided == pytest.approx(plain, rel=1e-5)
    np.testing.assert_allclose(trainers[1].parameters["w"], trainers[0].parameters["w"], rtol=1e-5)


@pytest.mark.parametrize("most", [100.0, 0.5])  # so that it stops by the number of steps, or by the condition
@pytest.mark.parametrize("count, go", [(12, True), (10, True), (1, True), (0, True), (5, False)])
def test_a_loop(count, go, most):
    feeds = {
        "n": np.array(count),
        "go": np.array(go),
        "h0": single(2, 3),
        "w": single(3),
        "most": np.array(most, np.float32),
    }
    compared(parsed(LOOP), feeds, ["h0", "w"], ["h", "ys"])
