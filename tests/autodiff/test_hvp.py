"""hvp(): beside PyTorch's, which names come out, and what is refused."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import numpy_helper, parser
from tests.gradients import names, results_of

import onnxgrad

RNG = np.random.default_rng(0)
W, B, C = (RNG.standard_normal(s) for s in ((3, 4), (4,), ()))
MLP = """g (double[n, 3] x) => (double loss, double[n, 4] y) {
    h = MatMul(x, w)
    a = Add(h, b)
    t = Tanh(a)
    y = Mul(t, c)
    square = Mul(y, y)
    loss = ReduceSum <keepdims = 0> (square)
}"""


def model(text: str = MLP, **weights: np.ndarray) -> onnx.ModelProto:
    made = parser.parse_model('<ir_version: 9, opset_import: ["" : 18]>\n' + text)
    made.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    return made


def expected(of, inputs, vectors):
    """PyTorch's, of the same network."""

    def network(x, w, b, c):
        y = torch.tanh(x @ w + b) * c
        return y.square().sum() if of is None else (y * torch.from_numpy(of)).sum()

    _, products = torch.autograd.functional.hvp(
        network, tuple(torch.tensor(x) for x in inputs), tuple(torch.tensor(v) for v in vectors)
    )
    return [p.numpy() for p in products]


@pytest.mark.parametrize("of", ["loss", "y"])
def test_as_in_pytorch(of):
    """All blocks of the Hessian, those that mix two parameters too, one of which is a scalar."""
    x = RNG.standard_normal((2, 3))
    inputs = {"x": x, "w": W, "b": B, "c": C}
    made = onnxgrad.hvp(model(w=W, b=B, c=C), wrt=list(inputs), of=of)
    seed = {} if of == "loss" else {"y_grad": RNG.standard_normal((2, 4))}
    assert names(made.graph.input) == ["x", *seed, "x_vector", "w_vector", "b_vector", "c_vector"]
    assert names(made.graph.output) == ["loss", "y", "x_hvp", "w_hvp", "b_hvp", "c_hvp"]
    vectors = {name: RNG.standard_normal(v.shape) for name, v in inputs.items()}
    found = results_of(made, x=x, **seed, **{f"{name}_vector": v for name, v in vectors.items()})
    for name, product in zip(inputs, expected(seed.get("y_grad"), inputs.values(), vectors.values()), strict=True):
        np.testing.assert_allclose(found[f"{name}_hvp"], product, rtol=1e-9, atol=1e-12)


def test_an_exponent_of_two_is_no_constant_where_it_is_differentiated():
    text = "g (double[n] x) => (double loss) { p = Pow(x, c)  loss = ReduceSumSquare <keepdims = 0> (p) }"
    x, vectors = np.array([0.5, 1.5]), (np.array([0.3, -0.2]), np.array(0.7))
    made = onnxgrad.hvp(model(text, c=np.array(2.0)), wrt=["x", "c"], of="loss")
    found = results_of(made, x=x, x_vector=vectors[0], c_vector=vectors[1])
    inputs, vector = (torch.tensor(x), torch.tensor(2.0).double()), tuple(map(torch.tensor, vectors))
    _, wanted = torch.autograd.functional.hvp(lambda x, c: (x**c).square().sum(), inputs, vector)
    for name, product in zip(("x", "c"), wanted, strict=True):
        np.testing.assert_allclose(found[f"{name}_hvp"], product, rtol=1e-9)


def test_by_default_all_parameters_which_may_be_inputs():
    text = MLP.replace("Mul(t, c)", "Identity(t)")
    made = onnxgrad.hvp(model(text, w=W, b=B), of="loss", parameters_as_inputs=True)
    assert names(made.graph.input) == ["x", "w_vector", "b_vector", "w", "b"] and not made.graph.initializer
    assert names(made.graph.output) == ["loss", "y", "w_hvp", "b_hvp"]


def test_where_the_result_is_linear_the_product_is_zero():
    text = """g (double[3] x, double[3] z, double w_vector) => (double y) {
        a = Exp(x)
        b = Add(a, z)
        c = Mul(b, w_vector)
        y = ReduceSum <keepdims = 0> (c)
    }"""
    made = onnxgrad.hvp(model(text), wrt=["z", "x"])
    x, v = RNG.standard_normal((2, 3))
    found = results_of(made, x=x, z=x, x_vector=v, z_vector=v, w_vector=np.array(2.0))
    np.testing.assert_array_equal(found["z_hvp"], np.zeros(3))
    np.testing.assert_allclose(found["x_hvp"], 2 * np.exp(x) * v)


def test_gradients_that_are_one_value():
    """Each has a vector of its own."""
    text = """g (double[3] x, double[3] z) => (double y) {
        a = Add(x, z)
        b = Exp(a)
        y = ReduceSum <keepdims = 0> (b)
    }"""
    made = onnxgrad.hvp(model(text), wrt=["x", "z"])
    x, z, v, u = RNG.standard_normal((4, 3))
    found = results_of(made, x=x, z=z, x_vector=v, z_vector=u)
    for name in ("x_hvp", "z_hvp"):
        np.testing.assert_allclose(found[name], np.exp(x + z) * (v + u))


def test_through_a_scan():
    text = """g (double[4, 2] steps, double[2] start) => (double y) {
        last, all = Scan <num_scan_inputs = 1, body = step (double[2] h, double[2] x)
                => (double[2] next, double[2] out) {
            a = Mul(h, x)
            next = Sin(a)
            out = Identity(next)
        }> (start, steps)
        square = Mul(all, all)
        y = ReduceSum <keepdims = 0> (square)
    }"""
    steps, vector = RNG.standard_normal((2, 4, 2))
    start, other = RNG.standard_normal((2, 2))
    found = results_of(
        onnxgrad.hvp(model(text), wrt=["steps", "start"]),
        steps=steps, start=start, steps_vector=vector, start_vector=other,
    )  # fmt: skip

    def unrolled(steps, start):
        total, h = 0, start
        for x in steps:
            h = torch.sin(h * x)
            total = total + h.square().sum()
        return total

    given = tuple(map(torch.tensor, (steps, start))), tuple(map(torch.tensor, (vector, other)))
    _, products = torch.autograd.functional.hvp(unrolled, *given)
    for name, product in zip(("steps_hvp", "start_hvp"), products, strict=True):
        np.testing.assert_allclose(found[name], product, rtol=1e-9, atol=1e-12)


def test_a_graph_in_a_graph_out_and_refusals():
    assert isinstance(onnxgrad.hvp(ir.from_proto(model(w=W, b=B, c=C)), "x", "loss"), ir.Model)
    with pytest.raises(ValueError, match="hvp: `wrt` names 'q'"):
        onnxgrad.hvp(model(w=W, b=B, c=C), "q", "loss")
