"""Results whose rank the branch of an If decides."""

import numpy as np
import onnxruntime
import pytest
from tests.gradients import check_model, parsed

import onnxgrad
from onnxgrad.graph.files import load
from onnxgrad.passes.prepare import prepare

RNG = np.random.default_rng(2)


def numbers(*shape):
    return RNG.standard_normal(shape)


TWO_RANKS = """g (bool flag, float[3,4] x, float[4,4] w) => (float y, float[N] other) {
    minus = Constant<value_ints: ints = [-1]>()
    axes = Constant<value_ints: ints = [0]>()
    b = If (flag) <
        then_branch = t () => (float[4] p) { p = ReduceSum<keepdims = 0>(x, axes) },
        else_branch = e () => (float[3,4] q) { q = Mul(x, x) }
    >
    c = MatMul(b, w)
    flat = Reshape(c, minus)
    mean = ReduceMean<keepdims = 0>(flat)
    scaled = Mul(w, mean)
    d = MatMul(c, scaled)
    s = Sin(d)
    y = ReduceSum<keepdims = 0>(s)
    other = Mul(flat, flat)
}"""


@pytest.mark.parametrize("flag", [True, False])
def test_what_reads_a_result_of_two_ranks_moves_into_the_branches(flag):
    """Also what lies between two nodes that move: mean and scaled."""
    model, feeds = parsed(TWO_RANKS), {"flag": np.array(flag), "x": numbers(3, 4), "w": numbers(4, 4)}
    check_model(model, feeds, ["x", "w"])
    single = {n: a.astype(np.float32) if a.dtype.kind == "f" else a for n, a in feeds.items()}
    results = []
    for made in (model, onnxgrad.gradient(model, "x", "y")):
        session = onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
        results.append(session.run(["y", "other"], single))
    for got, expected in zip(*results, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5)
    assert [n.op_type for n in prepare(load(model, "test"), "test").graph].count("MatMul") == 0


@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("inner", [True, False])
def test_an_if_in_a_branch_decides_a_rank(outer, inner):
    model = parsed("""g (bool outer, bool inner, float[4,4] x, float[4,4] w) => (float y) {
        axes = Constant<value_ints: ints = [0]>()
        b = If (outer) <
            then_branch = t () => (float[] p) {
                a = If (inner) <
                    then_branch = tt () => (float[4] pp) { pp = ReduceSum<keepdims = 0>(x, axes) },
                    else_branch = te () => (float[1,4,4] pq) { pq = Unsqueeze(x, axes) }
                >
                p = Sin(a)
            },
            else_branch = e () => (float[4,4] q) { q = Mul(x, x) }
        >
        c = MatMul(b, w)
        y = ReduceSum<keepdims = 0>(c)
    }""")
    feeds = {"outer": np.array(outer), "inner": np.array(inner), "x": numbers(4, 4), "w": numbers(4, 4)}
    check_model(model, feeds, ["x", "w"], twice=False)


def test_what_training_changes_does_not_move():
    model = parsed(TWO_RANKS.replace("s = Sin(d)", "s = Dropout(d)"))
    assert [n.op_type for n in prepare(load(model, "test"), "test").graph].count("MatMul") == 2
