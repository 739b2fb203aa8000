"""Files of opset 9 and 13, from PyTorch's exporter on TorchScript, train as in PyTorch."""

import io
import warnings

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F  # noqa: N812, its usual name
from tests.gradients import daily
from torch import nn

import onnxgrad
from onnxgrad import losses, optim

STEPS = 5
WAYS = [(9, "eval"), (13, "eval"), (13, "train")]  # below opset 12 the exporter has no train mode


class CNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.again, self.normal = nn.Conv2d(6, 8, 3, stride=2), nn.BatchNorm2d(8)
        self.drop, self.fc = nn.Dropout(0.0), nn.Linear(8 * 4 * 4, 3)

    def forward(self, x):
        x = self.norm(F.relu(self.conv(x)))  # in eval mode the exporter folds it into a convolution right before it
        x = self.normal(F.hardtanh(self.again(x)))
        return self.fc(self.drop(x.flatten(1)))


class LSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(5, 6, num_layers=2, batch_first=True, bidirectional=True)
        self.fc = nn.Linear(12, 3)

    def forward(self, x):
        return F.softmax(self.fc(self.lstm(x)[0][:, -1]), 1)


CASES = {"cnn": (CNN, (8, 2, 10, 10)), "lstm": (LSTM, (8, 7, 5))}


def exported(module, x, opset, mode):
    file = io.BytesIO()
    training = {"training": torch.onnx.TrainingMode.TRAINING, "do_constant_folding": False} if mode == "train" else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # this exporter is deprecated, and says so in many ways
        torch.onnx.export(
            module.train(mode == "train"), (x,), file, dynamo=False, opset_version=opset, input_names=["x"],
            output_names=["y"], dynamic_axes={"x": {0: "N"}, "y": {0: "N"}}, **training,
        )  # fmt: skip
    model = onnx.load_from_string(file.getvalue())
    assert model.opset_import[0].version == opset
    return model


@pytest.mark.slow
@pytest.mark.parametrize("opset, mode", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_steps_as_in_pytorch(name, opset, mode, tmp_path):
    torch.manual_seed(0)
    make, shape = CASES[name]
    module, x = make(), torch.randn(shape)
    model = exported(module, x, opset, mode)
    before = model.SerializeToString()
    module.train()
    target = torch.randint(0, 3, (shape[0],))
    batch = {"x": x.numpy(), "target": target.numpy()}
    trainer = onnxgrad.Trainer(model, losses.CrossEntropy("y"), optim.SGD(lr=0.1, momentum=0.9))
    theirs = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for _ in range(STEPS):
        theirs.zero_grad()
        y = module(x)
        loss = F.cross_entropy(y, target) if name == "cnn" else F.nll_loss(torch.log(y), target)
        loss.backward()
        assert trainer.step(batch) == pytest.approx(loss.item(), rel=1e-4)
        theirs.step()
    assert sum(a.size for a in trainer.parameters.values()) == sum(p.numel() for p in module.parameters())
    for parameter, weight in module.named_parameters():
        if not parameter.startswith("lstm"):  # whose weights are in another order in ONNX
            np.testing.assert_allclose(trainer.parameters[parameter], weight.detach(), rtol=1e-3, atol=1e-5)
    assert model.SerializeToString() == before  # it is the caller's
    module.eval()
    trainer.export(tmp_path / "trained.onnx")
    assert onnx.load(tmp_path / "trained.onnx").opset_import[0].version == opset
    (y,) = onnxruntime.InferenceSession(str(tmp_path / "trained.onnx")).run(None, {"x": batch["x"]})
    np.testing.assert_allclose(y, module(x).detach().numpy(), rtol=1e-3, atol=1e-4)


def test_a_batch_norm_with_five_outputs_is_in_train_mode():
    """Before opset 14 the number of outputs said so; onnx's converter refuses what the exporter wrote."""
    torch.manual_seed(0)
    module, x = CNN(), torch.randn(CASES["cnn"][1]).requires_grad_()
    model = exported(module, x.detach(), 13, "train")
    assert {len(n.output) for n in model.graph.node if n.op_type == "BatchNormalization"} == {5}
    y = module.train()(x)
    y.sum().backward()
    with_gradient = onnxgrad.gradient(model, "x", "y")
    session = onnxruntime.InferenceSession(with_gradient.SerializeToString(), onnxgrad.register())
    feeds = {"x": x.detach().numpy(), "y_grad": np.ones(y.shape, np.float32)}
    mine, of_x = session.run(["y", "x_grad"], feeds)
    np.testing.assert_allclose(mine, y.detach().numpy(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(of_x, x.grad.numpy(), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("opset", [9, 13])
@pytest.mark.parametrize("name", daily(CASES, "cnn"))  # of the other, kernels for float64 are compiled
def test_gradients_against_differences(name, opset):
    torch.manual_seed(0)
    make, shape = CASES[name]
    model = exported(make(), torch.randn(shape), opset, "eval")
    found = onnxgrad.check_gradient(model, {"x": torch.randn(2, *shape[1:]).numpy()}, None, "y")
    assert found.worst < 1e-5, found
