"""Optimizers against PyTorch's, bit for bit the same on any number of threads; what they refuse."""

import numpy as np
import pytest
import torch
from tests.checks import on_threads, raises, same_bits
from tests.train.torch_optimizers import HuggingFaceAdamW, Lamb

from onnxgrad.train import optim, schedules
from onnxgrad.train.buffers import Buffers

SHAPES = {"layer.weight": (7, 5), "layer.bias": (5,), "scale": (), "large.weight": (300, 250)}
STEPS = 20
CHOICES = [
    (optim.SGD(lr=0.05), torch.optim.SGD, {"lr": 0.05}),
    (optim.SGD(lr=0.05, momentum=0.9, weight_decay=0.01), torch.optim.SGD,
     {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
    (optim.SGD(lr=0.05, momentum=0.9, nesterov=True), torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    (optim.SGD(lr=0.05, momentum=0.9, dampening=0.1), torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.1}),
    (optim.Adam(lr=0.01), torch.optim.Adam, {"lr": 0.01}),
    (optim.Adam(lr=0.01, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.1), torch.optim.Adam,
     {"lr": 0.01, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.1}),
    (optim.AdamW(lr=0.01, weight_decay=0.1), torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    (optim.Adagrad(lr=0.1, lr_decay=0.1, weight_decay=0.01, initial_accumulator_value=0.5), torch.optim.Adagrad,
     {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.01, "initial_accumulator_value": 0.5}),
    (optim.RMSprop(lr=0.01), torch.optim.RMSprop, {"lr": 0.01}),
    (optim.RMSprop(lr=0.01, alpha=0.9, momentum=0.5, centered=True, weight_decay=0.1), torch.optim.RMSprop,
     {"lr": 0.01, "alpha": 0.9, "momentum": 0.5, "centered": True, "weight_decay": 0.1}),
    (optim.AdamW(lr=0.01, eps=1e-6, weight_decay=0.1, form="huggingface"), HuggingFaceAdamW,
     {"lr": 0.01, "eps": 1e-6, "decay": 0.1}),
    (optim.Lamb(lr=0.01, weight_decay=0.05), Lamb, {"lr": 0.01, "decay": 0.05}),
]  # fmt: skip


def start(dtype=np.float32):
    rng = np.random.default_rng(0)
    return {name: np.asarray(rng.standard_normal(shape), dtype) for name, shape in SHAPES.items()}


def gradients(step, dtype=np.float32):
    rng = np.random.default_rng(100 + step)
    return {name: np.asarray(rng.standard_normal(shape), dtype) for name, shape in SHAPES.items()}


def trained(optimizer, steps=STEPS, dtype=np.float32, rate=lambda step: 1.0, device=None):
    buffers = Buffers(SHAPES, dtype, device)
    fill(buffers, buffers.data, start(dtype))
    state = optimizer.start(buffers)
    for step in range(steps):
        fill(buffers, buffers.grad, gradients(step, dtype))
        state.step(rate(step))
    return {name: buffers.device.to_numpy(a) for name, a in buffers.views(buffers.data).items()}


def fill(buffers, whole, arrays):
    for name, view in buffers.views(whole).items():
        buffers.device.copy(view, arrays[name])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("mine, theirs, settings", CHOICES, ids=lambda c: str(c)[:60])
def test_as_in_pytorch(mine, theirs, settings, dtype):
    tensors = {name: torch.tensor(a, requires_grad=True) for name, a in start(dtype).items()}
    peer = theirs(tensors.values(), **settings)
    for step in range(STEPS):
        for name, tensor in tensors.items():
            tensor.grad = torch.tensor(gradients(step, dtype)[name])
        peer.step()
    tolerance = 1e-6 if dtype == np.float32 else 1e-12
    for name, result in trained(mine, dtype=dtype).items():
        assert np.allclose(result, tensors[name].detach().numpy(), rtol=tolerance, atol=tolerance), name


@pytest.mark.parametrize("optimizer", [c[0] for c in CHOICES], ids=lambda o: o.name)
def test_threads_change_no_bit(optimizer):
    results = []
    for count in (1, 2):
        with on_threads(count):
            results.append(trained(optimizer, steps=3))
    assert all(same_bits(results[0][name], results[1][name]) for name in SHAPES)


def test_groups_by_name():
    mine = trained(optim.SGD(lr=0.1, groups={"*.bias": {"lr": 0.0}, "large.*": {"weight_decay": 0.5}}), steps=1)
    first, grad = start(), gradients(0)
    assert same_bits(mine["layer.bias"], first["layer.bias"])
    assert np.allclose(mine["layer.weight"], first["layer.weight"] - 0.1 * grad["layer.weight"])
    large = first["large.weight"] - 0.1 * (grad["large.weight"] + 0.5 * first["large.weight"])
    assert np.allclose(mine["large.weight"], large, atol=1e-6)


def test_what_is_refused():
    with raises(ValueError, "SGD: lr is -1, expected a number of at least 0"):
        optim.SGD(lr=-1)
    with raises(ValueError, "Adam: betas are (0.9, 1.0), expected two numbers of at least 0 and under 1"):
        optim.Adam(betas=(0.9, 1.0))
    with raises(ValueError, "AdamW: betas are 0.9, expected two numbers of at least 0 and under 1"):
        optim.AdamW(betas=0.9)
    with raises(TypeError, "SGD: groups is ['*'], expected settings by pattern, as a dict of dicts"):
        optim.SGD(groups=["*"])
    for wrong, sentence in {
        lambda: schedules.Cosine(0): "Cosine: steps is 0, expected a number of updates, at least 1",
        lambda: schedules.Step("9"): "Step: every is '9', expected a number of updates, at least 1",
        lambda: schedules.Constant(-1): "Constant: warmup is -1, expected a number of updates, at least 0",
    }.items():
        with raises(ValueError, sentence):
            wrong()
    with raises(ValueError, "AdamW: form is 'x', expected 'torch' or 'huggingface'"):
        optim.AdamW(form="x")
    with raises(
        ValueError,
        "SGD: groups['*'] has 'rate', expected some of dampening, lr, lr_factor, momentum, nesterov, weight_decay",
    ):
        optim.SGD(groups={"*": {"rate": 1}})
    with raises(ValueError, "SGD: groups has 'nothing', which no parameter's name matches"):
        optim.SGD(groups={"nothing": {"lr": 1}}).start(Buffers(SHAPES, np.float32))


@pytest.mark.parametrize(
    "mine, theirs",
    [
        (schedules.Step(7, 0.5), lambda o: torch.optim.lr_scheduler.StepLR(o, 7, 0.5)),
        (schedules.Cosine(50), lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 50)),
        (schedules.Linear(50, final=0.25), lambda o: torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.25, 50)),
        (schedules.OneCycle(50), lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1.0, 50, cycle_momentum=False)),
    ],
    ids=lambda s: type(s).__name__,
)
def test_schedules_as_in_pytorch(mine, theirs):
    peer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = theirs(peer)
    for step in range(50):
        assert mine(step) == pytest.approx(peer.param_groups[0]["lr"], rel=1e-6, abs=1e-9), step
        peer.step()
        schedule.step()


def test_warm_up():
    assert [schedules.Constant(warmup=3)(k) for k in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    cosine = schedules.Cosine(10, warmup=3)
    assert [cosine(k) for k in (0, 2, 3, 10, 99)] == pytest.approx([0.25, 0.75, 1.0, 0.0, 0.0])
