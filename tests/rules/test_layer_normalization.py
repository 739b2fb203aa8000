"""LayerNormalizationGrad and SimplifiedLayerNormalizationGrad, and who writes them."""

import ml_dtypes
import numpy as np
import onnxruntime
import pytest
from tests.gradients import check_model, check_rule, evaluate, model_of_node, parsed

import onnxgrad

RNG = np.random.default_rng(5)
LAYER, SIMPLIFIED = "LayerNormalizationGrad", "SimplifiedLayerNormalizationGrad"


def inputs_of(name, shape, axis):
    over = shape[axis % len(shape) :]
    of_rows = (*shape[: axis % len(shape)], *(1,) * len(over))
    statistics = [RNG.uniform(0.5, 1.5, of_rows) for _ in range(1 + (name == LAYER))]
    return RNG.standard_normal(shape), RNG.standard_normal(shape), RNG.uniform(0.5, 1.5, over), *statistics


@pytest.mark.parametrize(("shape", "axis"), [((3, 4), -1), ((2, 3, 4), 1), ((4,), 0)])
@pytest.mark.parametrize("name", [LAYER, SIMPLIFIED])
def test_gradients(name, shape, axis):
    outputs = 3 if name == LAYER else 2
    check_rule(name, *inputs_of(name, shape, axis), outputs=outputs, domain="com.microsoft", axis=axis)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "of"), [(LAYER, 0), (LAYER, 1), (LAYER, 2), (SIMPLIFIED, 0), (SIMPLIFIED, 1)])
def test_gradients_of_one_output(name, of):
    outputs = 3 if name == LAYER else 2
    wrt = [0] if of == 2 else None  # the others do not matter to bias_grad
    check_rule(name, *inputs_of(name, (3, 4), -1), outputs=outputs, of=[of], wrt=wrt, domain="com.microsoft")


X = RNG.standard_normal((2, 3, 4))
SCALE, SHIFT = RNG.uniform(0.5, 1.5, (2, 4))
WRITERS = {
    "LayerNormalization": (LAYER, "", (X, SCALE, SHIFT)),
    "RMSNormalization": (SIMPLIFIED, "", (X, SCALE)),
    "SimplifiedLayerNormalization": (SIMPLIFIED, "", (X, SCALE)),
    "SkipLayerNormalization": (LAYER, "com.microsoft", (X, X[::-1], SCALE, SHIFT)),
    "SkipSimplifiedLayerNormalization": (SIMPLIFIED, "com.microsoft", (X, X[::-1], SCALE)),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("name", WRITERS)
def test_written_once_for_all_inputs(name, static, dtype):
    written, domain, inputs = WRITERS[name]
    model, _ = model_of_node(name, inputs, domain=domain, opset=23, static=static, dtype=dtype)
    once = onnxgrad.gradient(model, [i.name for i in model.graph.input])
    assert [n.op_type for n in once.graph.node if n.op_type.endswith("NormalizationGrad")] == [written]


def test_little_stands_around_it_where_the_scale_is_known():
    """A scale of more than one number is not broadcast, whatever the rows are called."""
    inputs = X, SCALE, SHIFT
    model, _ = model_of_node("LayerNormalization", inputs, static=False, fixed=(1, 2), dtype=np.float32)
    once = onnxgrad.gradient(model, ["in_0", "in_1", "in_2"])
    kinds = [n.op_type for n in once.graph.node]
    assert sorted(set(kinds) - {"Identity"}) == ["LayerNormalization", LAYER]


def test_a_scale_of_each_row_is_left_to_plain_operators():
    model, feeds = model_of_node("LayerNormalization", (X, RNG.uniform(0.5, 1.5, (3, 1)), SHIFT))
    once = onnxgrad.gradient(model, ["in_0", "in_1"])
    assert not any(n.op_type == LAYER for n in once.graph.node)
    assert onnxgrad.check_gradient(model, feeds, ["in_0", "in_1"]).worst < 2e-6


@pytest.mark.parametrize("name", ["LayerNormalization", "SimplifiedLayerNormalization"])
def test_sessions_with_and_without_kernels(name):
    """float16 too: the statistics stay float32."""
    inputs = WRITERS[name][2]
    for dtype, near in ((np.float32, 1e-5), (np.float16, 1e-2)):
        model, feeds = model_of_node(name, inputs, dtype=dtype)
        once = onnxgrad.gradient(model, list(feeds))
        feeds["out_0_grad"] = RNG.standard_normal(X.shape).astype(dtype)
        wide, _ = model_of_node(name, inputs)
        exact = {n: a.astype(np.float64) for n, a in feeds.items()}
        expected = evaluate(onnxgrad.gradient(wide, list(feeds)[:-1]), exact)[1:]
        for options in (onnxruntime.SessionOptions(), onnxgrad.register()):
            session = onnxruntime.InferenceSession(once.SerializeToString(), options)
            for got, wanted in zip(session.run(None, feeds)[1:], expected, strict=True):
                np.testing.assert_allclose(got.astype(np.float64), wanted, rtol=near, atol=near * np.abs(wanted).max())


def test_two_axes_beside_a_vector():
    """Nodes share a function, whose branch for two axes has to be valid for the vector, too."""
    model = parsed("""g (float[2,3,4] x, float[4] v, float[3,4] s, float[4] t) => (float z) {
        a = LayerNormalization <axis = -2> (x, s)
        b = LayerNormalization <axis = -1> (v, t)
        c = Mul (a, b)
        d = Mul (c, c)
        z = ReduceSum <keepdims = 0> (d)
    }""")
    feeds = {"x": (2, 3, 4), "v": (4,), "s": (3, 4), "t": (4,)}
    check_model(model, {n: RNG.standard_normal(shape) for n, shape in feeds.items()}, list(feeds), twice=False)


def test_softmax_along_two_axes_beside_a_vector():
    model = parsed("""g (float[2,3,4] x, float[4] v) => (float[2,3,4] a, float[4] b, float[2,3,4] c, float[4] d) {
        a = Softmax <axis = -2> (x)
        b = Softmax <axis = -1> (v)
        c = LogSoftmax <axis = 1> (x)
        d = LogSoftmax <axis = 0> (v)
    }""")
    feeds = {"x": RNG.standard_normal((2, 3, 4)), "v": RNG.standard_normal(4)}
    check_model(model, feeds, ["x", "v"], ["a", "b", "c", "d"], twice=False)
