"""The trainer on a GPU: the losses of the CPU, and checkpoints that go from one to the other."""

import tempfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from safetensors.numpy import load_file
from tests.checks import DEVICE
from tests.runtime.sessions import needs_provider
from tests.train.two_layers import batch, mlp

from onnxgrad.train import losses, optim
from onnxgrad.train.trainer import Trainer

pytestmark = [needs_provider, pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")]


def trainer(device, **how):
    loss = losses.CrossEntropy("logits")
    return Trainer(mlp(dropout=0.3), loss, optim.AdamW(lr=0.01), device=device, seed=3, **how)


@pytest.mark.parametrize("how", [{}, {"accumulate": 2}, {"clip_norm": 0.1}, {"clip_value": 0.01}], ids=str)
def test_losses_as_on_the_cpu(how):
    """With Dropout, whose seed is another in each step: the same numbers are dropped."""
    mine, expected = (
        [t.step(batch(k, 32)) for k in range(20)] for t in (trainer("cuda", **how), trainer("cpu", **how))
    )
    assert np.allclose(mine, expected, rtol=1e-4)


def test_a_checkpoint_goes_from_one_to_the_other():
    first, second, whole = trainer("cuda"), trainer("cpu"), trainer("cpu")
    expected = [whole.step(batch(k)) for k in range(10)]
    mine = [first.step(batch(k)) for k in range(5)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.safetensors")
        first.save(path)
        second.restore(path)
        mine += [second.step(batch(k)) for k in range(5, 10)]
        first.restore(path)
    assert np.allclose(mine, expected, rtol=1e-4)
    assert np.isclose(first.step(batch(5)), expected[5], rtol=1e-4)


def test_evaluation_and_batches_on_the_gpu():
    import torch

    mine, expected = trainer("cuda"), trainer("cpu")
    on_gpu = {name: torch.from_numpy(a).cuda() for name, a in batch(1, 16).items()}
    assert np.isclose(mine.step(on_gpu), expected.step(batch(1, 16)), rtol=1e-5)
    found, wanted = (t.evaluate([batch(2, 16)])["loss"] for t in (mine, expected))
    assert np.isclose(found, wanted, rtol=1e-5)


def cnn():
    model, random = onnx.parser.parse_model(CNN), np.random.default_rng(0)
    shapes = {"w1": (8, 3, 3, 3), "w2": (8, 8, 3, 3), "s": (8,), "b": (8,), "mean": (8,), "var": (8,), "head": (8, 3)}
    for name, shape in shapes.items():
        array = np.abs(random.standard_normal(shape)) if len(shape) == 1 else random.standard_normal(shape) / 5
        model.graph.initializer.append(numpy_helper.from_array(array.astype(np.float32), name))
    return model


CNN = """
<ir_version: 9, opset_import: ["" : 17]>
cnn (float[n, 3, 16, 16] x) => (float[n, 3] logits) {
    c = Conv <pads = [1, 1, 1, 1]> (x, w1)
    n1 = BatchNormalization (c, s, b, mean, var)
    r = Relu(n1)
    p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (r)
    d = Conv <pads = [1, 1, 1, 1]> (p, w2)
    q = GlobalAveragePool(d)
    f = Flatten(q)
    logits = MatMul(f, head)
}
"""


def trained(device, model, shape):
    """Losses of ten steps, and the statistics."""
    mine = Trainer(model, losses.CrossEntropy("logits"), optim.AdamW(lr=0.01), device=device)
    random = np.random.default_rng(1)
    found = [
        float(mine.step({"x": random.standard_normal(shape).astype(np.float32), "target": random.integers(0, 3, 8)}))
        for _ in range(10)
    ]
    with tempfile.TemporaryDirectory() as folder:
        mine.save(Path(folder, "run.safetensors"))
        saved = load_file(Path(folder, "run.safetensors"))
    return found, {name: array for name, array in saved.items() if name.startswith("statistics/")}


def test_a_network_with_batch_normalization():
    (mine, statistics), (expected, wanted) = (trained(device, cnn(), (8, 3, 16, 16)) for device in ("cuda", "cpu"))
    assert np.allclose(mine, expected, rtol=1e-3)
    assert len(wanted) == 2
    for name, array in wanted.items():
        assert np.allclose(statistics[name], array, rtol=1e-3, atol=1e-4)


LSTM = """
<ir_version: 9, opset_import: ["" : 17]>
lstm (float[5, n, 3] x) => (float[n, 3] logits) {
    y, last = LSTM <hidden_size = 4> (x, w, r)
    flat = Squeeze(last, zero)
    logits = MatMul(flat, head)
}
"""


def test_a_network_whose_gradients_are_computed_on_the_cpu():
    """LSTM has no kernels for CUDA: what its gradient gives is brought to the GPU before the update reads it."""
    model, random = onnx.parser.parse_model(LSTM), np.random.default_rng(0)
    for name, shape in {"w": (1, 16, 3), "r": (1, 16, 4), "head": (4, 3)}.items():
        model.graph.initializer.append(numpy_helper.from_array(random.standard_normal(shape).astype(np.float32), name))
    model.graph.initializer.append(numpy_helper.from_array(np.array([0]), "zero"))
    (mine, _), (expected, _) = (trained(device, model, (5, 8, 3)) for device in ("cuda", "cpu"))
    assert np.allclose(mine, expected, rtol=1e-4)


@pytest.mark.parametrize("shard_optimizer", [False, True])
def test_a_process_group_of_nccl_reads_the_gradients_on_the_gpu(shard_optimizer, tmp_path):
    """One process, which sums with nobody: the losses of a trainer alone, and nothing is staged on the host."""
    from torch import distributed

    given = {"store": distributed.FileStore(str(tmp_path / "store"), 1), "rank": 0, "world_size": 1}
    distributed.init_process_group("cpu:gloo,cuda:nccl", **given)
    try:
        group = {"communicator": distributed.group.WORLD, "shard_optimizer": shard_optimizer}
        mine, expected = trainer("cuda", clip_norm=0.1, **group), trainer("cuda", clip_norm=0.1)
        assert mine.ranks.reads_gpu and mine._collectives._staged is None
        losses_ = [[t.step(batch(k, 32)) for k in range(20)] for t in (mine, expected)]
        assert np.allclose(*losses_, rtol=1e-5)
        mine.save(tmp_path / "run.safetensors")
        expected.restore(tmp_path / "run.safetensors")
        assert np.isclose(mine.step(batch(20, 32)), expected.step(batch(20, 32)), rtol=1e-5)
        # BatchNormalization's sums, which go through the host.
        assert np.isclose(step_of_cnn(communicator=distributed.group.WORLD), step_of_cnn(), rtol=1e-4)
    finally:
        distributed.destroy_process_group()


def step_of_cnn(**how):
    """The second loss, which the first update has changed."""
    mine = Trainer(cnn(), losses.CrossEntropy("logits"), optim.AdamW(lr=0.01), device="cuda", **how)
    x = np.random.default_rng(1).standard_normal((8, 3, 16, 16)).astype(np.float32)
    return [mine.step({"x": x, "target": np.arange(8) % 3}) for _ in range(2)][-1]
