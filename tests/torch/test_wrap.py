"""onnxgrad.torch.wrap: modules run by onnxruntime give what PyTorch gives."""

import copy
import pickle

import pytest
import torch
from tests.checks import raises
from tests.gpu import TORCH_DEVICE
from tests.torch.test_module import DEVICE
from torch import nn
from torch.nn import functional

from onnxgrad.torch import wrap


class Block(nn.Module):
    """Something of everything: statistics, a table, constants, structures in and out."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 5), nn.BatchNorm1d(5)
        self.register_buffer("table", torch.arange(5.0))
        self.kind = "block"

    def forward(self, x, power=1, *, mask=None, pair=None):
        h = self.norm(self.linear(x)) ** power + self.table
        if mask is not None:
            h = h * mask
        if pair is not None:
            h = h + pair["a"] * pair["b"].detach()
        return {"h": h, "power": power, "nothing": None, "more": (h.detach() * h, self.linear.weight, h)}


@pytest.fixture
def both():
    torch.manual_seed(0)
    expected = Block().to(DEVICE)
    return wrap(copy.deepcopy(expected)), expected


def batch(size):
    torch.manual_seed(size)
    pair = {name: torch.randn(size, 5, device=DEVICE, requires_grad=True) for name in "ab"}
    return torch.randn(size, 4, device=DEVICE), {"pair": pair, "mask": torch.ones(size, 1, device=DEVICE)}


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_training_goes_on_as_with_the_module(both):
    gradients = []
    optimizers = [torch.optim.SGD(module.parameters(), 0.001, momentum=0.9) for module in both]
    for size in (3, 6, 6):
        for module, optimizer in zip(both, optimizers, strict=True):
            x, others = batch(size)
            y = module(x, 2, **others)
            assert y["power"] == 2 and y["nothing"] is None and torch.equal(y["more"][1], module.linear.weight)
            optimizer.zero_grad()
            (y["h"].square().sum() + y["more"][0].sum() + y["more"][2].sum()).backward()
            optimizer.step()
            assert others["pair"]["b"].grad is None  # which is detached
            gradients.append(others["pair"]["a"].grad)
    close(gradients[::2], gradients[1::2])
    ours, theirs = (module.state_dict() for module in both)
    close(ours, theirs)
    assert list(ours) == list(theirs) and ours["norm.num_batches_tracked"] == 3
    assert len(both[0]._exports) == 1 and [len(found) for found in both[0]._exports.values()] == [1]  # any batch
    for module in both:
        module.eval()
    x, others = batch(4)
    close(both[0](x)["h"], both[1](x)["h"])
    close(both[0](pair=others["pair"], x=x)["h"], both[1](x, pair=others["pair"])["h"])


@pytest.mark.slow
def test_weights_and_attributes_are_the_modules_own(both):
    module = both[1]
    wrapped = wrap(module)
    assert wrap(wrapped) is wrapped and wrapped.kind == "block" and wrapped.linear is module.linear
    assert [*wrapped.parameters()] == [*module.parameters()] and list(wrapped.state_dict()) == list(module.state_dict())
    wrapped.eval()
    assert not module.training and not module.norm.training
    x, _ = batch(3)
    close(wrapped(x)["h"], module(x)["h"])
    other, again = copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))
    with torch.no_grad():
        module.linear.weight.zero_()
    close(wrapped(x)["h"], module(x)["h"])
    close(other(x)["h"], again(x)["h"])
    assert not torch.equal(other(x)["h"], wrapped(x)["h"])
    with pytest.raises(AttributeError, match="'Block' object has no attribute 'missing'"):
        wrapped.missing  # noqa: B018


@pytest.mark.slow
def test_a_layer_in_inference_mode_keeps_its_statistics(both):
    x, _ = batch(6)
    for module in both:
        module.train()
        module.norm.eval()
    close(both[0](x)["h"], both[1](x)["h"])
    assert both[0].norm.running_mean.tolist() == [0] * 5 and both[0].norm.num_batches_tracked == 0


@pytest.mark.slow
def test_dropout_follows_torchs_seed():
    module, x = wrap(nn.Dropout(0.3).to(DEVICE)), torch.ones(50, 20, device=DEVICE, requires_grad=True)
    torch.manual_seed(1)
    y = module(x)
    torch.manual_seed(1)
    assert torch.equal(module(x), y) and 0.25 < (y == 0).float().mean() < 0.35
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())
    assert torch.equal(module.eval()(x), x)


def test_second_gradients():
    module = nn.Sequential(nn.Linear(3, 4), nn.Softplus(), nn.Linear(4, 1)).to(DEVICE)
    x, found = torch.randn(5, 3, device=DEVICE, requires_grad=True), []
    for function in (wrap(module), module):
        (slope,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
        found.append(torch.autograd.grad(slope.square().sum(), [x, module[0].weight, module[2].weight]))
    close(*found)


class Tied(nn.Module):
    """An embedding that is the last layer, too."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return functional.log_softmax(self.head(self.embedding(tokens)), -1)


@pytest.mark.slow
def test_weights_of_two_names():
    module, tokens = Tied().to(DEVICE), torch.tensor([[1, 2], [2, 6]], device=DEVICE)
    wrapped, found = wrap(module), []
    for function in (wrapped, module):
        found.append(torch.autograd.grad(function(tokens).square().sum(), list(wrapped.parameters())))
    assert len(found[0]) == 1
    close(*found)


class Mixed(nn.Module):
    """Attention over steps."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        scores = torch.softmax(self.linear(x) @ x.transpose(1, 2), -1)
        return (scores @ x).mean(1)


@pytest.mark.slow
def test_sizes_that_change_become_free():
    module = Mixed().to(DEVICE)
    wrapped = wrap(module)
    for size, steps in ((2, 5), (3, 5), (3, 7), (4, 9), (2, 6), (1, 9), (1, 9)):
        x = torch.randn(size, steps, 3, device=DEVICE)
        close(wrapped(x), module(x))
    ((*exports,),) = wrapped._exports.values()
    assert len(exports) == 3  # for 5 steps, for any number of them, and for batches of one


class Undecided(nn.Module):
    """What is computed depends on numbers."""

    def forward(self, x):
        return x if x.sum() > 0 else -x


@pytest.mark.slow
def test_modules_that_cannot_be_exported():
    with pytest.raises(
        RuntimeError, match=r"^wrap: torch\.onnx\.export cannot export Undecided: .*data-dependent.*\)$"
    ):
        wrap(Undecided())(torch.ones(3))


def test_what_is_no_module():
    with raises(TypeError, "wrap: module is a builtin_function_or_method, expected a torch.nn.Module"):
        wrap(torch.relu)


@pytest.mark.skipif(TORCH_DEVICE == "cpu", reason="needs a GPU")
def test_inputs_on_another_device(both):
    with raises(
        ValueError,
        "wrap: 'module.linear.weight' is on cuda:0, but 'tensors_0' is on cpu: move the input, or the module by .to()",
    ):
        both[0](torch.ones(2, 4))
