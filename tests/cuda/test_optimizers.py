"""The optimizers' kernels for GPUs against those for the CPU, in Triton's interpreter or on a GPU."""

import numpy as np
import pytest
import torch
from tests.checks import DEVICE, same_bits
from tests.gpu import TORCH_DEVICE
from tests.train.test_optim import CHOICES, SHAPES, fill, gradients, trained

from onnxgrad.train import optim
from onnxgrad.train.buffers import Buffers
from onnxgrad.train.devices import Cuda

pytestmark = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU or Triton's interpreter")
GROUPED = optim.SGD(lr=0.1, groups={"layer.*": {"momentum": 0.9, "nesterov": True}, "scale": {"lr": 0.0}})


class WithoutSessions(Cuda):
    """Arrays and kernels, where there may be no onnxruntime for GPUs."""

    def __init__(self):
        self._torch, self._where = torch, TORCH_DEVICE
        self.verdict = torch.ones(4, dtype=torch.float64, device=TORCH_DEVICE)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    "optimizer", [*(c[0] for c in CHOICES), optim.Lamb(), optim.AdamW(form="huggingface"), GROUPED], ids=str
)
def test_as_on_the_cpu(optimizer, dtype):
    mine, expected = (trained(optimizer, 4, dtype, device=d) for d in (WithoutSessions(), None))
    tolerance = 2e-6 if dtype == np.float32 else 1e-14
    for name, array in expected.items():
        assert np.allclose(mine[name], array, rtol=tolerance, atol=tolerance), name
    again = trained(optimizer, 4, dtype, device=WithoutSessions())
    assert all(same_bits(mine[name], again[name]) for name in expected)


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
