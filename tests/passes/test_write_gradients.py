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


def small(body, inputs="float[3] x", outputs="float[3] dx", functions=""):
    text = f"g ({inputs}) => ({outputs}) {{ {body} }} {functions}".replace(
        "Gradient", "ai.onnx.preview.training.Gradient"
    )
    return onnxgrad.session(parser.parse_model(HEADER.replace("]", ', "local" : 1]') + text))


def test_behind_an_operator_that_is_rewritten():
    """LSTM is replaced by one that keeps what its own gradient needs, where there is one."""
    inputs = "float[2, 1, 3] x, float[1, 8, 3] w, float[1, 8, 2] r"
    body = 'h = LSTM <hidden_size = 2> (x, w, r) y = Mul(h, h) dh = Gradient <xs = ["h"], y = "y"> (h)'
    session = small(body, inputs, "float[2, 1, 1, 2] h, float[2, 1, 1, 2] dh")
    shapes = {"x": (2, 1, 3), "w": (1, 8, 3), "r": (1, 8, 2)}
    h, dh = session.run(None, {name: RNG.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()})
    assert np.abs(h).min() > 0
    np.testing.assert_allclose(dh, 2 * h, rtol=1e-6)


@pytest.mark.parametrize("given", ["x, x", "x, t", "t, x", "t, t"])
def test_values_that_depend_on_each_other(given):
    """Partial derivatives, though one of the values is computed from another, or is the same."""
    body = f'y = Mul(x, z) t = Mul(x, x) dx, dz = Gradient <xs = ["x", "z"], y = "y"> ({given})'
    x = np.array([1, 2, 3], np.float32)
    dx, dz = small(body, "float[3] x, float[3] z", "float[3] dx, float[3] dz").run(None, {"x": x, "z": 10 * x})
    at_x, at_z = ({"x": x, "t": x * x}[name] for name in given.split(", "))
    close([dx, dz], [at_z, at_x])


def test_other_lengths_in_subgraphs():
    branches = "then_branch = t () => (float[3] a) { a = Mul(p, p) }, else_branch = e () => (float[3] b) { b = Exp(p) }"
    body = f'p = Mul(x, x) y = If(c) <{branches}> q = Concat <axis = 0> (p, x) g = Gradient <xs = ["p"], y = "y"> (q)'
    x = np.array([1, 2, 3], np.float32)
    session = small(body, "float[3] x, bool c", "float[6] g")
    q = np.concatenate([x * x, x])
    close(session.run(None, {"x": x, "c": np.array(True)}), [2 * q])
    close(session.run(None, {"x": x, "c": np.array(False)}), [np.exp(q)])


def test_in_a_function():
    function = '<domain: "local", opset_import: ["" : 21, "ai.onnx.preview.training" : 1]> slope (a) => (da) '
    function += '{ y = Mul(a, a) da = Gradient <xs = ["a"], y = "y"> (a) }'
    x = np.array([1, 2, 3], np.float32)
    close(small("dx = local.slope(x)", functions=function).run(None, {"x": x}), [2 * x])


def test_checked_by_differences():
    model = made("float[N, 2] slope", 'slope = Gradient <xs = ["x"], y = "y"> (x)')
    found = onnxgrad.check_gradient(model, {"x": RNG.standard_normal((3, 2)).astype(np.float32)}, ["x", "w"])
    assert found.worst < 1e-7


def test_a_weight_of_a_file_of_pytorch_keeps_the_name_that_a_gradient_names():
    """The exporter on TorchScript numbers weights, and training calls them as the module does."""
    model = made("float[2, 3] dw", 'dw = Gradient <xs = ["w"], y = "y"> (w)')
    model.producer_name = "pytorch"
    for node in model.graph.node:
        node.name = f"/layer/{node.op_type}_{node.output[0]}"
        node.input[:] = [{"w": "onnx::MatMul_7"}.get(name, name) for name in node.input]
    model.graph.node[-1].attribute[0].strings[0] = b"onnx::MatMul_7"
    (weight,) = (tensor for tensor in model.graph.initializer if tensor.name == "w")
    weight.name = "onnx::MatMul_7"
    x = RNG.standard_normal((5, 2)).astype(np.float32)
    trainer = onnxgrad.Trainer(model, onnxgrad.losses.MSE("dw"), onnxgrad.optim.SGD(lr=0.1))
    _, w, _, y = of_torch(x)
    (wanted,) = gradients(y, [w])
    assert float(trainer.step({"x": x, "target": wanted.astype(np.float32)})) < 1e-10


SLOPE = 'slope = Gradient <xs = ["x"], y = "y"> (x)'


def test_a_cut_keeps_what_a_gradient_names():
    x = RNG.standard_normal((5, 2)).astype(np.float32)
    part = onnxgrad.cut(made("float[N, 2] slope, float[N, 1] other", f"{SLOPE} other = Exp(y)"), "slope")
    assert [list(node.input) for node in part.graph.node if node.op_type == "Gradient"] == [["x"]]
    tx, _, _, y = of_torch(x)
    close(onnxgrad.session(part).run(None, {"x": x}), gradients(y, [tx]))


def test_a_gradient_behind_a_model_with_the_same_names():
    """Its x is what the first model computes by now, and its y has another name."""
    x = RNG.standard_normal((5, 2)).astype(np.float32)
    first = parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> f (float[N, 2] x) => (float[N, 2] y) { y = Tanh(x) }'
    )
    model = onnxgrad.join(first, made("float[N, 2] slope", SLOPE))
    tx, _, _, y = of_torch(np.tanh(x))
    close(onnxgrad.session(model).run(None, {"x": x}), gradients(y, [tx]))


def test_a_new_head_beside_a_gradient():
    x = RNG.standard_normal((5, 2)).astype(np.float32)
    model = made("float[N, 1] z, float[N, 2] slope", f"{SLOPE} z = MatMul(h, v)")
    changed = onnxgrad.replace_head(model, 4, output="z")
    tx, _, _, y = of_torch(x)
    scores, slope = onnxgrad.session(changed).run(None, {"x": x})
    assert scores.shape == (5, 4)
    close([slope], gradients(y, [tx]))


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
            "k = If(c) <then_branch = t () => (float[N, 2] p) { p = Tanh(x) }, else_branch = e () => (float[N, 2] q) "
            '{ q = Exp(x) }> z = Add(x, k) g, gk = Gradient <xs = ["x", "k"], y = "z"> (x, k)',
            ": xs and zs name 'x' and a value that depends on it, expected independent ones",
        ),
        (
            'd = Cast <to = 11> (x) g = Gradient <xs = ["x"], y = "y"> (d)',
            ": the input in place of 'x' holds DOUBLE, expected FLOAT",
        ),
    ],
)
def test_what_is_refused(node, sentence):
    model = made("float[N, 1] y", f"c = Constant <value = bool {{1}}> () {node}")
    model.graph.node[-1].name = "g"
    with pytest.raises(ValueError) as caught:
        onnxgrad.gradient(model, "w", "y")
    assert str(caught.value) == f"gradient: Gradient (node 'g'){sentence}"
