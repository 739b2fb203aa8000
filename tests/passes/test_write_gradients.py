"""ONNX's operator Gradient: its own examples, other values in the place of named ones, orders, training through it."""

import numpy as np
import onnx
import pytest
import torch
from onnx import parser
from onnx.backend.test.case.model import collect_testcases

import onnxgrad

RNG = np.random.default_rng(0)
HEADER = '<ir_version: 10, opset_import: ["" : 21, "ai.onnx.preview.training" : 1]>'
NETWORK = """
network (float[N, 2] x) => (%s) <float[2, 3] w = {1, -2, 0.5, 1, 3, -1}, float[3, 1] v = {0.5, 1, -1}> {
    a = MatMul(x, w)
    h = Tanh(a)
    y = MatMul(h, v)
    %s
}"""


def made(outputs, nodes):
    return parser.parse_model(
        HEADER + NETWORK % (outputs, nodes.replace("Gradient", "ai.onnx.preview.training.Gradient"))
    )


def of_torch(x, w=((1, -2, 0.5), (1, 3, -1)), v=((0.5,), (1,), (-1,))):
    x, w, v = (torch.tensor(np.asarray(t, np.float64), requires_grad=True) for t in (x, w, v))
    return x, w, v, torch.tanh(x @ w) @ v


def gradients(y, values, **options):
    return [g.detach().numpy() for g in torch.autograd.grad(y.sum(), values, **options)]


def close(results, wanted):
    for result, other in zip(results, wanted, strict=True):
        np.testing.assert_allclose(result, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["test_gradient_of_add", "test_gradient_of_add_and_mul"])
def test_examples_of_onnx(name):
    (case,) = [case for case in collect_testcases() if case.name == name]
    session = onnxgrad.session(case.model)
    for inputs, outputs in case.data_sets:
        feeds = dict(zip((i.name for i in session.get_inputs()), inputs, strict=True))
        close(session.run(None, feeds), outputs)


def test_sum_over_a_batch_from_a_file(tmp_path):
    """A y that is no scalar is summed; an output may be left out."""
    x = RNG.standard_normal((5, 2)).astype(np.float32)
    model = made(
        "float[N, 1] y, float[N, 2] dx, float[3, 1] dv", 'dx, , dv = Gradient <xs = ["x", "w", "v"], y = "y"> (x, w, v)'
    )
    onnx.save(model, tmp_path / "model.onnx")
    session = onnxgrad.session(tmp_path / "model.onnx")
    tx, _, tv, y = of_torch(x)
    close(session.run(None, {"x": x}), [y.detach(), *gradients(y, (tx, tv))])


def test_at_other_values():
    """With respect to a value inside, at twice that value."""
    x = RNG.standard_normal((5, 2)).astype(np.float32)
    model = made("float[N, 3] dh, float[3, 1] dv", 'b = Add(h, h) dh, dv = Gradient <xs = ["h", "v"], y = "y"> (b, v)')
    dh, dv = onnxgrad.session(model).run(None, {"x": x})
    _, w, v, _ = of_torch(x)
    h = torch.tanh(torch.tensor(x, dtype=torch.float64) @ w)
    close([dh, dv], [np.broadcast_to(v.detach().numpy().T, h.shape), 2 * h.sum(0, keepdim=True).T.detach()])


def test_other_lengths_in_place_of_named_values():
    model = made(
        "float[N, 2] dx",
        't = Concat <axis = 0> (x, x) g = Gradient <xs = ["x"], zs = ["w"], y = "y"> (t, w) '
        "dx, r = Split <axis = 0, num_outputs = 2> (g)",
    )
    x = RNG.standard_normal((4, 2)).astype(np.float32)
    tx, _, _, y = of_torch(x)
    close(onnxgrad.session(model).run(["dx"], {"x": x}), gradients(y, [tx]))


def test_gradient_of_a_gradient():
    """Second order by naming the first one's output, and gradient() through both."""
    model = made(
        "float[N, 2] second",
        'first = Gradient <xs = ["x"], zs = ["w"], y = "y"> (x, w) cubes = Mul(first, first) z = Mul(cubes, first) '
        'second = Gradient <xs = ["x"], zs = ["w"], y = "z"> (x, w)',
    )
    x = RNG.standard_normal((5, 2)).astype(np.float32)
    tx, w, _, y = of_torch(x)
    (first,) = torch.autograd.grad(y.sum(), [tx], create_graph=True)
    (second,) = torch.autograd.grad((first**3).sum(), [tx], create_graph=True)
    close(onnxgrad.session(model).run(None, {"x": x}), [second.detach()])
    with_gradient = onnxgrad.gradient(model, "w")
    assert not any(node.op_type == "Gradient" for node in with_gradient.graph.node)
    seed = RNG.standard_normal(x.shape).astype(np.float32)
    (found,) = onnxgrad.session(with_gradient).run(["w_grad"], {"x": x, "second_grad": seed})
    (wanted,) = torch.autograd.grad((second * torch.tensor(seed)).sum(), [w])
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_training_of_a_derivative():
    """A network whose slope is trained, as one is that obeys an equation of physics."""
    model = made("float[N, 2] slope", 'slope = Gradient <xs = ["x"], y = "y"> (x)')
    x, target = (RNG.standard_normal((8, 2)).astype(np.float32) for _ in range(2))
    trainer = onnxgrad.Trainer(model, onnxgrad.losses.MSE("slope"), onnxgrad.optim.SGD(lr=0.1))
    losses = [float(trainer.step({"x": x, "target": target})) for _ in range(5)]
    _, w, v, _ = of_torch(x)
    weights, wanted = [w, v], []
    for _ in range(5):
        tx = torch.tensor(x, dtype=torch.float64, requires_grad=True)
        y = torch.tanh(tx @ weights[0]) @ weights[1]
        (slope,) = torch.autograd.grad(y.sum(), [tx], create_graph=True)
        loss = torch.nn.functional.mse_loss(slope, torch.tensor(target, dtype=torch.float64))
        wanted.append(loss.item())
        grads = torch.autograd.grad(loss, weights)
        weights = [(p - 0.1 * g).detach().requires_grad_() for p, g in zip(weights, grads, strict=True)]
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)


@pytest.mark.parametrize(
    "node, sentence",
    [
        (
            'g = Gradient <xs = ["X"], y = "y"> (x)',
            " names 'X', which is not a value of its graph; did you mean 'x'?",
        ),
        (
            'g = Gradient <xs = ["x"], zs = ["w"], y = "y"> (x)',
            " has 1 inputs, expected 2, one for each name of xs and zs",
        ),
        (
            'g, k = Gradient <xs = ["x", "h"], y = "y"> (x, h)',
            ": xs and zs name 'x' and a value that depends on it, expected independent ones",
        ),
        (
            'd = Cast <to = 11> (x) g = Gradient <xs = ["x"], y = "y"> (d)',
            ": the input in place of 'x' holds DOUBLE, expected FLOAT",
        ),
    ],
)
def test_what_is_refused(node, sentence):
    model = made("float[N, 1] y", node)
    model.graph.node[-1].name = "g"
    with pytest.raises(ValueError) as caught:
        onnxgrad.gradient(model, "w", "y")
    assert str(caught.value) == f"gradient: Gradient (node 'g'){sentence}"
