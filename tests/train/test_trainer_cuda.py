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
from onnxgrad.train.fitting import TrainingStoppedError
from onnxgrad.train.pending_loss import PendingLoss
from onnxgrad.train.trainer import Trainer

if DEVICE == "cuda":
    import tests.gpu  # noqa: F401, it switches TF32 off

pytestmark = [needs_provider, pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")]


def trainer(device, optimizer=optim.AdamW(lr=0.01), **how):  # noqa: B008 - it never changes
    return Trainer(mlp(dropout=0.3), losses.CrossEntropy("logits"), optimizer, device=device, seed=3, **how)


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
        assert mine.ranks.reads_gpu and mine._state.collectives._staged is None
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


def test_shapes_of_batches_are_captured_each_and_come_back():
    """The second batch of a shape is captured, later ones are replayed: with Dropout and a schedule, as on the CPU."""
    sizes = [32, 32, 16, 32, 16, 16, 7, 32, 16, 7, 7, 32]
    mine, expected = (
        [t.step(batch(k, size)) for k, size in enumerate(sizes)] for t in (trainer("cuda"), trainer("cpu"))
    )
    assert np.allclose(mine, expected, rtol=1e-4)


def test_steps_are_captured_and_losses_wait():
    mine = trainer("cuda")
    found = [mine.step(batch(k, 32)) for k in range(5)]
    assert len(mine._runner.session._captured._captured) == 1 and mine.remarks == []
    assert all(isinstance(loss, PendingLoss) for loss in found)
    assert mine.gradient_norm == found[-1].gradient_norm
    assert abs(np.linalg.norm(list(mine.gradient_norms().values())) / mine.gradient_norm - 1) < 1e-7


@pytest.mark.parametrize("used", ["at once", "by the next step", "by save"])
def test_a_loss_that_is_not_finite_leaves_the_state_before_it(used, tmp_path):
    mine, expected = trainer("cuda"), trainer("cuda")
    for k in range(4):
        mine.step(batch(k, 32)), expected.step(batch(k, 32))
    bad = batch(4, 32)
    bad["x"][3, 2] = np.nan
    loss = mine.step(bad)
    with pytest.raises(TrainingStoppedError, match=r"step 5: the loss is nan: the batch's x .* before the step"):
        {"at once": lambda: float(loss), "by the next step": lambda: mine.step(batch(5, 32)),
         "by save": lambda: mine.save(tmp_path / "run.safetensors")}[used]()  # fmt: skip
    assert mine.steps == 4
    for name, parameter in mine.parameters.items():
        assert np.array_equal(parameter.cpu(), expected.parameters[name].cpu())
    later = [[t.step(batch(k, 32)) for k in range(5, 8)] for t in (mine, expected)]
    assert np.allclose(*later, rtol=1e-6)


def test_fit_stops_at_the_batch_that_is_not_finite(tmp_path):
    batches = [batch(k, 32) for k in range(6)]
    batches[3]["x"][0, 0] = np.inf
    events = []
    mine = trainer("cuda")
    with pytest.raises(TrainingStoppedError, match=r"step 4: .* the state before it is in .*run.safetensors"):
        mine.fit(batches, 2, quiet=True, checkpoint=tmp_path / "run.safetensors", log=events.append)
    assert [event["step"] for event in events] == [1, 2, 3]
    again = trainer("cuda")
    again.restore(tmp_path / "run.safetensors")
    assert again.steps == 3 and again._position.batches == 3


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_has_the_losses_of_float32(precision):
    mine, expected = (
        [float(t.step(batch(k, 32))) for k in range(40)]
        for t in (trainer("cuda", precision=precision), trainer("cuda"))
    )
    assert np.allclose(mine, expected, rtol=2e-2)


def is_cast(mine):
    """Whether a step would read the parameters as they are."""
    mine._runner._halves.refresh()
    data = mine._state.buffers.data
    return (mine._runner._halves.array == data.to(mine._runner._halves.array.dtype)).all()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("optimizer", [optim.AdamW(lr=0.01), optim.Lamb(lr=0.01)], ids=str)
def test_halves_are_those_of_the_parameters_whoever_changed_them(precision, optimizer, tmp_path):
    mine, batches = trainer("cuda", precision=precision, optimizer=optimizer), [batch(k, 32) for k in range(30)]
    for given in batches[:3]:
        mine.step(given)
    assert is_cast(mine)
    mine.save(tmp_path / "run.safetensors")
    mine.find_lr(batches, steps=5)
    assert is_cast(mine)
    for given in batches[3:6]:
        mine.step(given)
    mine.restore(tmp_path / "run.safetensors")
    assert is_cast(mine) and not mine._state.buffers.is_shared
    weight = mine.parameters["fc1.weight"]
    for given in batches[6:8]:
        mine.step(given)
        weight.data.fill_(0.5)  # which counts no write
        assert is_cast(mine)


TRANSFORMER = """
<ir_version: 9, opset_import: ["" : 20]>
transformer (float[n, 16, 32] x) => (float[n, 16, 3] logits) {
    a = LayerNormalization <axis = -1> (x, s1, b1)
    h0 = MatMul(a, w1)
    h1 = Add(h0, c1)
    h2 = Gelu(h1)
    h3 = MatMul(h2, w2)
    h4 = Add(h3, c2)
    h5 = Dropout(h4)
    r = Add(x, h5)
    g0 = MatMul(r, w3)
    g1 = Sigmoid(g0)
    g2 = Mul(g0, g1)
    g3 = Add(g2, r)
    y = LayerNormalization <axis = -1> (g3, s2, b2)
    logits = MatMul(y, w4)
}
"""


@pytest.mark.parametrize(("precision", "bound"), [("float32", 1e-4), ("bf16", 2e-2), ("fp16", 1e-2)])
def test_fused_elementwise_nodes_compute_the_same(precision, bound, monkeypatch):
    """Also for a batch of another size, and with blocks recomputed."""
    model, random = onnx.parser.parse_model(TRANSFORMER), np.random.default_rng(0)
    shapes = {"w1": (32, 64), "w2": (64, 32), "w3": (32, 32), "w4": (32, 3), "c1": (64,)}
    for name, shape in {**shapes, **dict.fromkeys(("c2", "s1", "s2", "b1", "b2"), (32,))}.items():
        array = random.standard_normal(shape).astype(np.float32) / 4 + (name in ("s1", "s2"))
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    batches = [
        {"x": random.standard_normal((n, 16, 32)).astype(np.float32), "target": random.integers(0, 3, (n, 16))}
        for n in (8, 8, 5, 8, 5)
    ]

    def losses_of(**how):
        loss = losses.CrossEntropy("logits", axis=-1)
        mine = Trainer(model, loss, optim.AdamW(lr=0.01), device="cuda", precision=precision, seed=3, **how)
        fused = sum(node.op_type == "FusedElementwise" for node in mine._model.step.model.graph)
        return [float(mine.step(b)) for b in batches], fused

    (found, count), (again, _) = losses_of(), losses_of(recompute="blocks")
    monkeypatch.setattr("onnxgrad.train.graphs.fuse_elementwise", lambda *_: 0)
    expected, none = losses_of()
    assert count > 0 and none == 0
    assert np.allclose(found, expected, rtol=bound)
    assert np.allclose(again, expected, rtol=bound)


@pytest.mark.parametrize(("precision", "bound"), [("float32", 1e-3), ("bf16", 3e-2), ("fp16", 1e-2)])
def test_images_whose_channels_come_last_compute_the_same(precision, bound):
    """A residual block with batch normalization, a pool and two branches: losses and statistics of the CPU."""
    from tests.passes.test_use_channels_last import CLASSES, network

    random = np.random.default_rng(1)
    batches = [
        {"x": random.standard_normal((n, 3, 20, 18)).astype(np.float32), "target": random.integers(0, CLASSES, n)}
        for n in (8, 8, 5, 8, 5)
    ]

    def run(device, precision):
        mine = Trainer(network(), losses.CrossEntropy("y"), optim.SGD(lr=0.05), device=device, precision=precision)
        found = [float(mine.step(b)) for b in batches]
        nodes = [node.op_type for node in mine._model.step.model.graph if node.op_type.startswith("Nhwc")]
        mine.export(path := Path(tempfile.mkdtemp(), "model.onnx"))
        weights = {t.name: numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}
        return found, nodes, weights

    (found, nodes, weights), (expected, none, wanted) = run("cuda", precision), run("cpu", "float32")
    assert len(nodes) == 12 and not none
    assert np.allclose(found, expected, rtol=bound)
    for name in ("m0", "v0", "m1", "v1"):
        assert np.allclose(weights[name], wanted[name], rtol=bound, atol=bound)
