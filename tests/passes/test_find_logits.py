"""Losses of logits given an output that Softmax or Sigmoid made: they take what is before it, and say so."""

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F  # noqa: N812, its usual name
from onnx import parser
from tests.checks import raises

import onnxgrad
from onnxgrad import losses, metrics

RNG = np.random.default_rng(0)
SIZES = {"w": (4, 3), "v": (4, 1), "one": ()}
WEIGHTS = {name: RNG.standard_normal(shape).astype(np.float32) for name, shape in SIZES.items()}
WEIGHTS["one"] = np.float32(1)
X = RNG.standard_normal((8, 4)).astype(np.float32)
CLASSES = RNG.integers(0, 3, 8)
BITS = RNG.integers(0, 2, (8, 1)).astype(np.float32)


def model(body, outputs="float[N,3] y", weight="w"):
    """x @ w = z, then what the body makes of it; the weights have numbers of their own."""
    head = f'<ir_version: 10, opset_import: ["" : 21]> g (float[N,4] x) => ({outputs})'
    text = f"{head} {{ z = MatMul(x, {weight}) {body} }}"
    proto = parser.parse_model(text)
    for name in (weight, *(["one"] if "one" in body else [])):
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(WEIGHTS[name]), name))
    return proto


def trained(proto, loss, batch, weight="w"):
    """Loss and gradient of one batch, and what the trainer said about the loss."""
    trainer = onnxgrad.Trainer(proto, loss, onnxgrad.optim.SGD(lr=0.0), [weight])
    value = trainer.step(batch)
    assert trainer.evaluate([batch])["loss"] == pytest.approx(value, rel=1e-6)
    return value, trainer.gradients[weight].copy(), [r for r in trainer.remarks if type(loss).__name__ in r]


def expected(formula, weight="w"):
    w = torch.tensor(WEIGHTS[weight], requires_grad=True)
    value = formula(torch.tensor(X) @ w)
    value.backward()
    return value.item(), w.grad.numpy()


def assert_same(mine, theirs):
    assert mine[0] == pytest.approx(theirs[0], rel=1e-5)
    assert np.allclose(mine[1], theirs[1], rtol=1e-4, atol=1e-6)


PATHS = {
    "softmax": "y = Softmax(z)",
    "first axis named": "y = Softmax<axis=1>(z)",
    "log": "y = LogSoftmax(z)",
    "identity": "p = Softmax(z) y = Identity(p)",
    "cast": "p = Softmax(z) h = Cast<to=11>(p) y = Cast<to=1>(h)",
    "pixels": """a = Constant<value_ints=[2,3]>() b = Unsqueeze(z, a) p = Softmax<axis=1>(b) y = Flatten(p)""",
    "squeezed": "a = Constant<value_ints=[1]>() b = Unsqueeze(z, a) p = Softmax(b) y = Squeeze(p, a)",
    "reshaped": "a = Constant<value_ints=[2,-1,3]>() c = Constant<value_ints=[-1,3]>()"
    " b = Reshape(z, a) p = Softmax(b) y = Reshape(p, c)",
    "transposed": "b = Transpose(z) p = Softmax<axis=0>(b) y = Transpose(p)",
}


@pytest.mark.parametrize("body", PATHS.values(), ids=PATHS.keys())
def test_cross_entropy_of_softmax(body):
    batch = {"x": X, "target": CLASSES}
    value, grad, said = trained(model(body), losses.CrossEntropy("y"), batch)
    assert_same((value, grad), expected(lambda z: F.cross_entropy(z, torch.tensor(CLASSES))))
    name = "LogSoftmax" if "Log" in body else "Softmax"
    before = "b" if "b = " in body else "z"
    taken = f"so that the loss takes what is before it, {before!r}; the output stays as it is."
    assert said == [f"CrossEntropy: 'y' comes from {name}, {taken}"]


def test_outputs_and_metrics_stay_as_they_are():
    trainer = onnxgrad.Trainer(model(PATHS["softmax"]), losses.CrossEntropy("y"), onnxgrad.optim.SGD(lr=0.1))
    batch = {"x": X, "target": CLASSES}
    sums = trainer.evaluate([batch], {"sum": lambda outputs, _: float(outputs["y"].sum(1).mean())})
    assert sums["sum"] == pytest.approx(1)
    assert not trainer.evaluate([batch], {"accuracy": metrics.Accuracy("y")})["accuracy"] > 1


@pytest.mark.parametrize("path", ["s", "Identity(s)", "Reshape(s, a)", "Cast<to=1>(s)"])
def test_binary_cross_entropy_of_sigmoid(path):
    body = f"a = Constant<value_ints=[-1,1]>() s = Sigmoid(z) y = {path if '(' in path else f'Identity({path})'}"
    mine = trained(model(body, "float[N,1] y", "v"), losses.BCEWithLogits("y"), {"x": X, "target": BITS}, "v")
    assert_same(mine, expected(lambda z: F.binary_cross_entropy_with_logits(z, torch.tensor(BITS)), "v"))
    taken = "so that the loss takes what is before it, 'z'; the output stays as it is."
    assert mine[2] == [f"BCEWithLogits: 'y' comes from Sigmoid, {taken}"]


def test_two_classes_of_one_sigmoid():
    body = "s = Sigmoid(z) n = Sub(one, s) y = Concat<axis=1>(n, s)"
    batch = {"x": X, "target": BITS[:, 0].astype(np.int64)}
    mine = trained(model(body, "float[N,2] y", "v"), losses.CrossEntropy("y"), batch, "v")
    assert_same(mine, expected(lambda z: F.binary_cross_entropy_with_logits(z, torch.tensor(BITS)), "v"))


@pytest.mark.parametrize("sum_of", ["ReduceSum", "ReduceL1"])
def test_positive_numbers_over_their_sum(sum_of):
    """As one-vs-rest classifiers have them."""
    body = f"a = Constant<value_ints=[1]>() s = Sigmoid(z) t = {sum_of}(s, a) y = Div(s, t)"
    mine = trained(model(body), losses.CrossEntropy("y"), {"x": X, "target": CLASSES})

    def theirs(z):
        s = torch.sigmoid(z)
        return F.nll_loss(torch.log(s / s.sum(1, keepdim=True)), torch.tensor(CLASSES))

    assert_same(mine, expected(theirs))
    taken = "so that the loss takes its logarithm; the output stays as it is."
    assert mine[2] == [f"CrossEntropy: 'y' comes from a division by its sum, {taken}"]


UNCLEAR = {
    "classes along another axis": "y = Softmax<axis=0>(z)",
    "classes moved by a reshape": "a = Constant<value_ints=[-1]>() b = Constant<value_ints=[-1,3]>()"
    " p = Softmax(z) f = Reshape(p, a) y = Reshape(f, b)",
}


@pytest.mark.parametrize("body", UNCLEAR.values(), ids=UNCLEAR.keys())
def test_nothing_is_guessed(body):
    value, _, said = trained(model(body), losses.CrossEntropy("y"), {"x": X, "target": CLASSES})
    axis = 0 if "axis=0" in body else 1
    y = torch.softmax(torch.tensor(X) @ torch.tensor(WEIGHTS["w"]), axis)
    assert value == pytest.approx(F.cross_entropy(y, torch.tensor(CLASSES)).item(), rel=1e-5)
    assert said == [
        "CrossEntropy: 'y' comes from Softmax, but not along the classes as far as can be seen, so that the loss takes "
        "it for logits; to have what is before it, 'z', name that."
    ]


def test_the_wrong_loss_is_mentioned():
    said = trained(model("y = Sigmoid(z)"), losses.CrossEntropy("y"), {"x": X, "target": CLASSES})[2]
    assert said == ["CrossEntropy: 'y' comes from Sigmoid, but the loss is of logits and applies Softmax to it."]
    target = np.eye(3, dtype=np.float32)[CLASSES]
    said = trained(model("y = Softmax(z)"), losses.BCEWithLogits("y"), {"x": X, "target": target})[2]
    assert said == ["BCEWithLogits: 'y' comes from Softmax, but the loss is of logits and applies Sigmoid to it."]


@pytest.mark.parametrize("loss", [losses.NLL("y"), losses.NLL("y", log_prediction=False)], ids=["log", "probabilities"])
def test_likelihood_of_probabilities(loss):
    mine = trained(model("y = Softmax(z)"), loss, {"x": X, "target": CLASSES})
    assert_same(mine, expected(lambda z: F.cross_entropy(z, torch.tensor(CLASSES))))
    assert len(mine[2]) == 1
    mine = trained(model("y = LogSoftmax(z)"), losses.NLL("y"), {"x": X, "target": CLASSES})
    assert_same(mine, expected(lambda z: F.cross_entropy(z, torch.tensor(CLASSES))))
    assert mine[2] == []


def test_inner_values_by_name():
    proto = model("p = Softmax(z) y = Mul(p, p)")
    mine = trained(proto, losses.CrossEntropy("z"), {"x": X, "target": CLASSES})
    assert_same(mine, expected(lambda z: F.cross_entropy(z, torch.tensor(CLASSES))))
    both = losses.CrossEntropy("p") + losses.MSE("y", target="t")
    batch = {"x": X, "target": CLASSES, "t": np.zeros((8, 3), np.float32)}
    trainer = onnxgrad.Trainer(proto, both, onnxgrad.optim.SGD(lr=0.1))
    found = trainer.evaluate([batch], {"accuracy": metrics.Accuracy("p")})  # what a loss names, metrics may name
    assert 0 <= found["accuracy"] <= 1
    of_inner = model("p = Softmax(z) y = Mul(p, p) s = ReduceMean<keepdims=0>(y)")
    assert onnxgrad.Trainer(of_inner, "s", onnxgrad.optim.SGD(lr=0.1)).step({"x": X}) > 0
    sentence = "'logits' is neither an output of the model nor a value inside it, expected 'y' or an inner value"
    with raises(ValueError, f"CrossEntropy: {sentence}"):
        onnxgrad.Trainer(proto, losses.CrossEntropy("logits"), onnxgrad.optim.SGD(lr=0.1))
