"""The optimizers' kernels for GPUs against those for the CPU, in Triton's interpreter or on a GPU."""

import ml_dtypes
import numpy as np
import pytest
import torch
from tests.checks import DEVICE, same_bits
from tests.gpu import TORCH_DEVICE
from tests.train.test_ema import averaged
from tests.train.test_optim import CHOICES, SHAPES, fill, gradients, trained

from onnxgrad.train import optim
from onnxgrad.train.buffers import Buffers
from onnxgrad.train.devices import Cuda
from onnxgrad.train.half_copy import HalfCopy

pytestmark = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU or Triton's interpreter")
ODD = {"odd": (5003,), "single": (1,), "even": (16, 16)}  # gaps behind parameters, and chunks that end in one
GROUPED = optim.SGD(lr=0.1, groups={"layer.*": {"momentum": 0.9, "nesterov": True}, "scale": {"lr": 0.0}})


class WithoutSessions(Cuda):
    """Arrays and kernels, where there may be no onnxruntime for GPUs."""

    def __init__(self):
        self._torch, self._where = torch, TORCH_DEVICE
        self.verdict = torch.ones(4, dtype=torch.float64, device=TORCH_DEVICE)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("optimizer", [*(c[0] for c in CHOICES), GROUPED], ids=str)
def test_as_on_the_cpu(optimizer, dtype):
    mine, expected = (trained(optimizer, 4, dtype, device=d) for d in (WithoutSessions(), None))
    tolerance = 2e-6 if dtype == np.float32 else 1e-14
    for name, array in expected.items():
        assert np.allclose(mine[name], array, rtol=tolerance, atol=tolerance), name
    again = trained(optimizer, 4, dtype, device=WithoutSessions())
    assert all(same_bits(mine[name], again[name]) for name in expected)


def started(optimizer, shapes=ODD, dtype=np.float32, half="bfloat16", is_updated=True):
    """The state of an optimizer for random parameters and gradients, with a half copy that is up to date."""
    buffers, random = Buffers(shapes, dtype, WithoutSessions()), np.random.default_rng(0)
    for whole in (buffers.data, buffers.grad):
        fill(buffers, whole, {name: random.standard_normal(shape).astype(dtype) for name, shape in shapes.items()})
    state = optimizer.start(buffers)
    copy = HalfCopy(state, ml_dtypes.bfloat16 if half == "bfloat16" else np.float16, is_updated=is_updated)
    copy.refresh()
    return state, copy


def is_current(state, copy):
    return torch.equal(copy.array, state.buffers.data.to(copy.array.dtype))


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("optimizer", [c[0] for c in CHOICES], ids=str)
def test_updates_write_the_half_copy(optimizer, dtype, half):
    state, copy = started(optimizer, dtype=dtype, half=half)
    first = copy.array.clone()
    writes = WithoutSessions().writes(state.buffers.data)
    for _ in range(2):
        state.step()
    assert is_current(state, copy) and not torch.equal(copy.array, first)
    assert WithoutSessions().writes(state.buffers.data) == writes  # so that the next step does not cast them again


@pytest.mark.parametrize("optimizer", [optim.Adam(eps=0.0), optim.Adagrad(eps=0.0), optim.Lamb(eps=0.0)], ids=str)
def test_gaps_between_parameters_stay_zero(optimizer):
    state, copy = started(optimizer)
    with np.errstate(invalid="ignore"):  # of 0 / 0 there, in the interpreter
        state.step()
    outside = torch.ones(state.buffers.length, dtype=torch.bool)
    for view in state.buffers.views(outside).values():
        view[...] = False
    assert outside.any()
    for array in (state.data, copy.array):
        assert (array.cpu()[outside] == 0).all() and torch.isfinite(array).all()


def test_a_step_that_is_not_good_leaves_the_half_copy():
    state, copy = started(optim.AdamW())
    before = copy.array.clone()
    state.buffers.device.verdict[-1] = 0
    state.step()
    assert torch.equal(copy.array, before) and is_current(state, copy)


def write_outside(state):
    state.buffers.is_shared = True  # by Trainer.parameters
    state.buffers.views(state.buffers.data)["even"].data.fill_(3.0)


CHANGES = {
    "by whoever has the parameters": write_outside,
    "by a checkpoint": lambda state: state.buffers.device.copy(state.buffers.views(state.data)["odd"], np.ones(5003)),
    "by what is restored": lambda state: state.buffers.device.copy(state.data, np.ones(len(state.data), np.float32)),
    "in place": lambda state: state.buffers.views(state.data)["single"].mul_(2),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_changes_parameters_beside_updates_is_found_out(change):
    state, copy = started(optim.SGD())
    for _ in range(2):
        change(state)
        assert not is_current(state, copy)
        copy.refresh()
        assert is_current(state, copy)
        state.step()
        assert is_current(state, copy)
        state.data.zero_()


def test_parameters_are_cast_only_when_they_changed(monkeypatch):
    casts, cast = [], Cuda.copy
    monkeypatch.setattr(Cuda, "copy", lambda *args: casts.append(cast(*args)))
    state, copy = started(optim.SGD())
    casts.clear()
    for _ in range(3):
        copy.refresh()
        state.step()
    assert not casts
    state, copy = started(optim.SGD(), is_updated=False)
    casts.clear()
    for _ in range(3):
        copy.refresh()
        state.step()
    assert len(casts) == 3 and state.copies == []


def test_parameters_made_in_inference_mode_are_cast_each_time():
    with torch.inference_mode():
        state, copy = started(optim.SGD())
        state.data.mul_(2)
        copy.refresh()
        assert is_current(state, copy)


@pytest.mark.parametrize("decay", [0.3, 0.99])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_averages_as_on_the_cpu(dtype, decay):
    mine, expected = (averaged(decay, 4, dtype, device=d) for d in (WithoutSessions(), None))
    tolerance = 2e-6 if dtype == np.float32 else 1e-14
    for name, array in expected.items():
        assert np.allclose(mine[name], array, rtol=tolerance, atol=tolerance), name


def test_a_step_that_is_not_good_changes_no_average():
    device = WithoutSessions()
    buffers = Buffers(SHAPES, np.float32, device)
    fill(buffers, buffers.data, gradients(0))
    average = buffers.new()
    for is_good in (0.0, 1.0):
        device.verdict[-1] = is_good
        device.run("average", buffers.chunks(dict.fromkeys(SHAPES, 0)), buffers.data, average, 1.0)
        assert np.array_equal(device.to_numpy(average), device.to_numpy(buffers.data) * is_good)


@pytest.mark.parametrize("kernel, argument", [("scale", 0.3), ("clamp", 0.5), ("squares", None), ("add", None)])
def test_what_is_done_to_gradients(kernel, argument):
    found = []
    for device in (WithoutSessions(), None):
        buffers = Buffers(SHAPES, np.float32, device)
        fill(buffers, buffers.grad, gradients(0))
        chunks = buffers.chunks(dict.fromkeys(SHAPES, 0))
        rest = [] if argument is None else [argument]
        result = buffers.grad
        if kernel == "squares":
            result = buffers.device.zeros(len(chunks), np.float64)
            rest = [result]
        elif kernel == "add":
            rest = [buffers.grad]
        buffers.device.run(kernel, chunks, buffers.grad, *rest)
        found.append(buffers.device.to_numpy(result))
    if kernel == "squares":  # of chunks that differ in length
        found = [f.sum() for f in found]
    assert np.allclose(*found, rtol=1e-6)


@pytest.mark.parametrize("loss, clip_norm, is_good", [(2.5, 0.5, True), (2.5, None, True), (np.nan, 0.5, False)])
def test_a_step_is_judged_and_updates_nothing_unless_it_is_good(loss, clip_norm, is_good):
    device = WithoutSessions()
    buffers = Buffers(SHAPES, np.float32, device)
    fill(buffers, buffers.grad, gradients(0))
    fill(buffers, buffers.data, gradients(1))
    state = optim.SGD(lr=1.0).start(buffers)
    sums, before = device.zeros(len(state.chunks), np.float64), device.to_numpy(buffers.data).copy()
    given = device.to_numpy(buffers.grad).astype(np.float64)
    device.run("squares", state.chunks, buffers.grad, sums)
    device.run("judge", state.chunks, sums, device.from_numpy(np.float32(loss)), clip_norm)
    norm = np.sqrt(np.square(given).sum())
    factor = 1.0 if clip_norm is None else clip_norm / norm
    found = device.to_numpy(device.verdict)
    assert np.allclose(found, [loss, norm, factor, is_good], rtol=1e-5, equal_nan=True)
    if clip_norm is not None:
        device.run("clip", state.chunks, buffers.grad)
    state.step()
    expected = before - factor * given if is_good else before
    assert np.allclose(device.to_numpy(buffers.data), expected, rtol=1e-4, atol=1e-6)
    following = device.from_numpy(np.full(3, 7.0, np.float32))
    current = device.zeros(3, np.float32)
    device.run("replace", state.chunks, current, following)
    assert (device.to_numpy(current) == (7.0 if is_good else 0.0)).all()
