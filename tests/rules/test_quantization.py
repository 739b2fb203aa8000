"""Quantization and back: straight through to the input, LSQ's gradient to the scale."""

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import onnxgrad

RNG = np.random.default_rng(0)
FLOATS = {np.float32: TensorProto.FLOAT, np.float16: TensorProto.FLOAT16}


def quantized(x, scale, zero_point, dtype=np.float32, static=True, **attributes):
    """y = DequantizeLinear(QuantizeLinear(x, scale, zero_point), scale, zero_point), what to feed it."""
    kind = FLOATS[dtype]
    quantize = helper.make_node("QuantizeLinear", ["x", "scale", "zero_point"], ["q"], name="quantize", **attributes)
    back = helper.make_node("DequantizeLinear", ["q", "scale", "zero_point"], ["y"], name="back", **attributes)
    dims = x.shape if static else [None, *x.shape[1:]]
    inputs = [
        helper.make_tensor_value_info("x", kind, dims),
        helper.make_tensor_value_info("scale", kind, scale.shape),
    ]
    output = helper.make_tensor_value_info("y", kind, dims)
    graph = helper.make_graph([quantize, back], "graph", inputs, [output], [zero_point])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return model, {"x": x.astype(dtype), "scale": scale.astype(dtype)}


def run(model, feeds):
    return onnxgrad.session(model).run(None, feeds)


def lsq(x, scale, zero_point, g, low, high):
    """The gradients of x and of each element's scale, by the paper."""
    x, scale, g = (a.astype(np.float64) for a in (x, scale, g))
    quotient = x / scale
    integer = np.round(quotient) + zero_point
    inside = (integer >= low) & (integer <= high)
    ends = np.where(integer < low, low, high) - zero_point
    return np.where(inside, g, 0), g * np.where(inside, np.round(quotient) - quotient, ends)


CASES = {
    "per tensor": ((), {}),
    "per axis": ((3,), {"axis": 1}),
    "last axis": ((8,), {"axis": -1}),
    "blocked": ((2, 3, 2), {"axis": 2, "block_size": 4}),
    "blocked, a rest": ((2, 3, 3), {"axis": -1, "block_size": 3}),
}


@pytest.mark.parametrize("kind", [np.int8, np.uint8])
@pytest.mark.parametrize("static", [True, False], ids=["known", "unknown"])
@pytest.mark.parametrize("name", CASES)
def test_the_scale_has_the_gradient_of_lsq(name, kind, static):
    shape, attributes = CASES[name]
    x = RNG.standard_normal((2, 3, 8)).astype(np.float32)
    scale = RNG.uniform(0.008, 0.02, shape).astype(np.float32)
    zero_point = RNG.integers(100, 120, shape).astype(kind)
    each = {"blocked": lambda a: a.repeat(4, 2), "blocked, a rest": lambda a: a.repeat(3, 2)[..., :8]}
    spread = each.get(name, lambda a: a.reshape(1, 3, 1) if a.shape == (3,) else a)
    model, feeds = quantized(x, scale, numpy_helper.from_array(zero_point, "zero_point"), static=static, **attributes)
    g = RNG.standard_normal(x.shape).astype(np.float32)
    _, dx, ds = run(onnxgrad.gradient(model, ["x", "scale"]), {**feeds, "y_grad": g})
    limits = np.iinfo(kind)
    zeros = spread(zero_point).astype(np.float64)
    want_x, want_each = lsq(x, spread(scale), zeros, g, limits.min, limits.max)
    assert 0 < np.mean(want_x == 0) < 1, "some, not all are cut off"
    np.testing.assert_allclose(dx, want_x, rtol=1e-6)
    blocks = attributes.get("block_size")
    if blocks:
        want = np.add.reduceat(want_each, np.arange(0, 8, blocks), axis=2)
    else:
        kept = {(): (), (3,): (1,), (8,): (2,)}[shape]
        want = want_each.sum(axis=tuple(k for k in range(3) if k not in kept))
    np.testing.assert_allclose(ds, want, rtol=1e-4, atol=1e-4)


def test_as_torch_learns_scales():
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0), requires_grad=True)
    scale = torch.tensor([0.01], requires_grad=True)
    zero_point = torch.tensor([5.0], requires_grad=True)
    y = torch._fake_quantize_learnable_per_tensor_affine(x, scale, zero_point, -128, 127, 1.0)
    g = RNG.standard_normal(x.shape).astype(np.float32)
    y.backward(torch.from_numpy(g))
    number = numpy_helper.from_array(np.array(5, np.int8), "zero_point")
    model, feeds = quantized(x.detach().numpy(), np.array(0.01), number)
    got, dx, ds = run(onnxgrad.gradient(model, ["x", "scale"]), {**feeds, "y_grad": g})
    np.testing.assert_allclose(got, y.detach(), rtol=1e-5)
    np.testing.assert_allclose(dx, x.grad, rtol=1e-5)
    np.testing.assert_allclose(ds, scale.grad[0], rtol=1e-4)


def test_float16():
    x, scale = RNG.standard_normal((3, 4)), np.array(0.0125)
    number = numpy_helper.from_array(np.array(3, np.int8), "zero_point")
    model, feeds = quantized(x, scale, number, dtype=np.float16)
    g = RNG.standard_normal(x.shape).astype(np.float16)
    _, dx, ds = run(onnxgrad.gradient(model, ["x", "scale"]), {**feeds, "y_grad": g})
    assert dx.dtype == ds.dtype == np.float16
    want, each = lsq(feeds["x"], feeds["scale"], 3, g, -128, 127)
    np.testing.assert_allclose(dx, want, rtol=1e-2)
    np.testing.assert_allclose(ds, each.sum(), rtol=1e-2)


@pytest.mark.parametrize("kind", [TensorProto.INT4, TensorProto.UINT4, TensorProto.INT16, TensorProto.FLOAT8E4M3FN])
def test_other_types(kind):
    """What lies within the range of the type has a gradient."""
    high = {TensorProto.INT4: 7, TensorProto.UINT4: 15, TensorProto.INT16: 32767, TensorProto.FLOAT8E4M3FN: 448}[kind]
    x = np.array([0.2, 0.9, 1.2], np.float32) * high
    number = helper.make_tensor("zero_point", kind, [], [0])
    model, feeds = quantized(x, np.array(1.0), number)
    _, dx = run(onnxgrad.gradient(model, "x"), {**feeds, "y_grad": np.ones(3, np.float32)})
    np.testing.assert_array_equal(dx, [1, 1, 0])


def test_weights_in_integers():
    """The scale of weights that are stored as integers can be trained."""
    q = RNG.integers(-128, 128, (4, 3)).astype(np.int8)
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21]>
        graph (float[N, 4] x, float[3] scale) => (float[N, 3] y) {
            w = DequantizeLinear <axis = 1> (q, scale)
            y = MatMul (x, w)
        }""")
    model.graph.initializer.append(numpy_helper.from_array(q, "q"))
    x, scale, g = (RNG.standard_normal(s).astype(np.float32) for s in ((2, 4), (3,), (2, 3)))
    _, ds = run(onnxgrad.gradient(model, "scale"), {"x": x, "scale": scale, "y_grad": g})
    np.testing.assert_allclose(ds, ((x.T @ g) * q).sum(0), rtol=1e-4)


def test_a_scale_that_is_measured():
    """DynamicQuantizeLinear: its definition, with the gradient passed through Round, in PyTorch."""
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21]>
        graph (float[N, 5] x) => (float[N, 5] y) {
            q, scale, zero_point = DynamicQuantizeLinear (x)
            y = DequantizeLinear (q, scale, zero_point)
        }""")
    for shift in (0, 5, -5):
        values = (RNG.standard_normal((4, 5)) + shift).astype(np.float32)
        g = RNG.standard_normal(values.shape).astype(np.float32)
        got, dx = run(onnxgrad.gradient(model, "x"), {"x": values, "y_grad": g})
        x = torch.from_numpy(values).requires_grad_()
        scale = (x.max().clamp(min=0) - x.min().clamp(max=0)) / 255
        quotient = x / scale
        y = (quotient + (quotient.round() - quotient).detach()) * scale
        y.backward(torch.from_numpy(g))
        np.testing.assert_allclose(got, y.detach(), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(dx, x.grad, rtol=1e-4, atol=1e-4)


def test_integers_that_nobody_dequantizes_have_no_gradient():
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21]>
        graph (float[N] x, float scale) => (float[N] y, float[N] z) {
            q = QuantizeLinear (x, scale)
            z = DequantizeLinear (q, scale)
            numbers = Cast <to = 1> (q)
            y = Mul (numbers, x)
        }""")
    x = np.array([1.4, 2.6], np.float32)
    _, _, dx = run(onnxgrad.gradient(model, "x", "y"), {"x": x, "scale": np.array(1.0, np.float32), "y_grad": x})
    np.testing.assert_allclose(dx, x * [1, 3])


def test_twice():
    """The gradient of a square: 2y straight through, and that 2 straight through."""
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21]>
        graph (float[N] x, float scale) => (float y) {
            q = QuantizeLinear (x, scale)
            z = DequantizeLinear (q, scale)
            square = Mul (z, z)
            y = ReduceSum <keepdims = 0> (square)
        }""")
    x, scale = np.array([1.4, 2.6, 300.0], np.float32), np.array(1.0, np.float32)
    once = onnxgrad.gradient(model, "x")
    twice = onnxgrad.gradient(once, "x", "x_grad")
    feeds = {"x": x, "scale": scale, "x_grad_grad": np.ones(3, np.float32)}
    _, first, second = run(twice, {n: a for n, a in feeds.items() if n in {i.name for i in twice.graph.input}})
    np.testing.assert_allclose(first, [2, 6, 0])
    np.testing.assert_allclose(second, [2, 2, 0])


@pytest.mark.parametrize(("trainable", "rate"), [(None, 0.05), ("scales", 1e-5)])
def test_training(trainable, rate):
    """QDQ: weights are trained by default, scales where they are named: these cut off most of the weights."""
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21]>
        graph (float[N, 4] x) => (float[N, 2] y) {
            q = QuantizeLinear <axis = 1> (w, scales, zeros)
            d = DequantizeLinear <axis = 1> (q, scales, zeros)
            y = MatMul (x, d)
        }""")
    w = RNG.uniform(0.5, 1, (4, 2)).astype(np.float32)
    scales = np.full(2, 0.004 if trainable else 0.02, np.float32)
    for name, array in (("w", w), ("scales", scales), ("zeros", np.zeros(2, np.int8))):
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    x = RNG.standard_normal((32, 4)).astype(np.float32)
    batch = {"x": x, "target": x @ w if trainable else x[:, :2] - x[:, 2:]}
    trainer = onnxgrad.Trainer(model, onnxgrad.losses.MSE("y"), onnxgrad.optim.SGD(rate), trainable)
    assert set(trainer.parameters) == {trainable or "w"}
    losses = [trainer.step(batch) for _ in range(100)]
    assert losses[-1] < losses[0] / 50
