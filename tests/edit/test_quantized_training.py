"""Quantization-aware training beside PyTorch's: the same network, scales, batches and optimizer."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper, parser
from sklearn.datasets import load_digits
from torch.nn import functional

import onnxgrad

pytestmark = pytest.mark.slow
NETWORK = """
<ir_version: 10, opset_import: ["" : 21]>
digits (float[batch, 1, 8, 8] x) => (float[batch, 10] logits)
{
    c1 = Conv <pads = [1, 1, 1, 1]> (x, w1, b1)
    r1 = Relu(c1)
    c2 = Conv <pads = [1, 1, 1, 1]> (r1, w2, b2)
    r2 = Relu(c2)
    p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (r2)
    f = Flatten(p)
    logits = Gemm(f, w3, b3)
}
"""
SHAPES = {"w1": (8, 1, 3, 3), "b1": (8,), "w2": (8, 8, 3, 3), "b2": (8,), "w3": (128, 10), "b3": (10,)}
HELD_OUT, BATCH, EPOCHS = 597, 32, 6
LOSS = onnxgrad.losses.CrossEntropy("logits")


def data():
    pictures, digits = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(digits))
    columns = {"x": (pictures[order] / 16).astype(np.float32).reshape(-1, 1, 8, 8), "target": digits[order]}
    return {n: a[HELD_OUT:] for n, a in columns.items()}, {n: a[:HELD_OUT] for n, a in columns.items()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The network in float32, trained for a little while."""
    path = tmp_path_factory.mktemp("digits") / "float.onnx"
    model, random = parser.parse_model(NETWORK), np.random.default_rng(0)
    for name, shape in SHAPES.items():
        inputs = shape[0] if len(shape) == 2 else max(1, int(np.prod(shape[1:])))
        array = random.standard_normal(shape) * np.sqrt(2 / inputs) if name[0] == "w" else np.zeros(shape)
        model.graph.initializer.append(numpy_helper.from_array(array.astype(np.float32), name))
    trainer = onnxgrad.Trainer(model, LOSS, onnxgrad.optim.SGD(0.02, momentum=0.9))
    trainer.fit(onnxgrad.Batches(data()[0], BATCH), 4, quiet=True)
    trainer.export(path)
    return path


class Rounded(torch.nn.Module):
    """The quantized network, as its file says, in PyTorch's own fake quantization."""

    def __init__(self, model, bits):
        super().__init__()
        given = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
        self.high = 2 ** (bits - 1) - 1
        self.scales = {n: torch.from_numpy(np.array(a)) for n, a in given.items() if n.endswith("_scale")}
        self.zeros = {n.removesuffix("_zero_point"): int(a) for n, a in given.items() if n.endswith("_zero_point")
                      and a.ndim == 0}  # fmt: skip
        self.parameter = torch.nn.ParameterDict()
        for name in SHAPES:
            scale = given[f"{name}_scale" if name[0] == "w" else f"{name}_quantized_scale"]
            axis = 1 if name == "w3" else 0
            each = scale.reshape([-1 if k == axis else 1 for k in range(len(SHAPES[name]))])
            self.parameter[name] = torch.nn.Parameter(
                torch.from_numpy(given[f"{name}_quantized"].astype(np.float32) * each)
            )

    def weight(self, name):
        axis, scale = 1 if name == "w3" else 0, self.scales[f"{name}_scale"]
        zeros = torch.zeros(len(scale), dtype=torch.int32)
        return torch.fake_quantize_per_channel_affine(
            self.parameter[name], scale, zeros, axis, -self.high - 1, self.high
        )

    def value(self, name, x):
        scale = float(self.scales[f"{name}_scale"])
        return torch.fake_quantize_per_tensor_affine(x, scale, self.zeros[name], 0, 255)

    def forward(self, x):
        x, b = self.value("x", x), self.parameter
        x = self.value("r1", functional.conv2d(x, self.weight("w1"), b["b1"], padding=1))
        x = self.value("r2", functional.conv2d(x, self.weight("w2"), b["b2"], padding=1))
        x = functional.max_pool2d(x, 2).flatten(1)
        return self.value("logits", x @ self.weight("w3") + b["b3"])


@pytest.mark.parametrize("bits", [8, 4])
def test_it_learns_what_pytorch_learns(bits, trained, tmp_path):
    train, test = data()
    quantized = onnxgrad.quantize(trained, onnxgrad.Batches(train, 200, shuffle=False), f"int{bits}")
    assert {n.op_type for n in quantized.graph.node if n.name.startswith("Relu")} == set()  # zero points of 0 do it
    schedule = onnxgrad.schedules.Cosine(EPOCHS * -(-len(train["x"]) // BATCH))
    trainer = onnxgrad.Trainer(quantized, LOSS, onnxgrad.optim.SGD(0.01, momentum=0.9), schedule=schedule)
    theirs = Rounded(quantized, bits)
    optimizer = torch.optim.SGD(theirs.parameters(), 0.01, momentum=0.9)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    for name, parameter in theirs.parameter.items():
        np.testing.assert_array_equal(trainer.parameters[name], parameter.detach())
    losses = []
    for _ in range(EPOCHS):
        for batch in onnxgrad.Batches(train, BATCH):
            optimizer.zero_grad()
            loss = functional.cross_entropy(theirs(torch.from_numpy(batch["x"])), torch.from_numpy(batch["target"]))
            loss.backward()
            optimizer.step()
            rates.step()
            losses.append((trainer.step(batch), float(loss.detach())))
    ours, other = np.array(losses).T
    np.testing.assert_allclose(ours[:4], other[:4], rtol=1e-5)  # until a number rounds to the other side
    assert ours[-30:].mean() == pytest.approx(other[-30:].mean(), rel=0.02)
    trainer.export(tmp_path / "m.onnx")
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath, options.log_severity_level = str(tmp_path / "optimized.onnx"), 4
    (logits,) = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"), options).run(None, {"x": test["x"]})
    kernels = [n.op_type for n in onnx.load(tmp_path / "optimized.onnx").graph.node]
    assert (kernels.count("QLinearConv"), kernels.count("QGemm")) == ((2, 1) if bits == 8 else (0, 0))
    with torch.no_grad():
        expected = theirs(torch.from_numpy(test["x"])).numpy()
    accuracies = [np.mean(found.argmax(1) == test["target"]) for found in (logits, expected)]
    assert abs(accuracies[0] - accuracies[1]) <= 0.005
    predicted = {}
    trainer.evaluate([test], {"": lambda outputs, _: predicted.update(outputs) or 0.0})
    step = float(theirs.scales["logits_scale"])
    assert abs(logits - predicted["logits"]).max() < 1.001 * step
