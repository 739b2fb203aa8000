"""Models that were exported for batches of one size: freed where nothing depends on it."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper
from tests.checks import raises
from tests.torch_export import export
from torch import nn

from onnxgrad import cli
from onnxgrad.graph.files import load
from onnxgrad.passes.free_batch import fixed_batch
from onnxgrad.passes.prepare import prepare
from onnxgrad.train import losses, optim
from onnxgrad.train.batch_dimension import with_free_batch
from onnxgrad.train.batches import Batches
from onnxgrad.train.trainer import Trainer


class Patches(nn.Module):
    """What a vision transformer does: patches, a token for the class, attention, flattened windows."""

    def __init__(self):
        super().__init__()
        self.patch, self.norm = nn.Conv2d(3, 8, 4, 4), nn.BatchNorm2d(8)
        self.token, self.place = nn.Parameter(torch.randn(1, 1, 8)), nn.Parameter(torch.randn(1, 5, 8))
        self.qkv, self.last = nn.Linear(8, 24), nn.Linear(8, 3)

    def forward(self, x):
        x = self.norm(self.patch(x)).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.place
        q, k, v = self.qkv(x).reshape(len(x), 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
        scores = (q.reshape(-1, 5, 4) @ k.reshape(-1, 5, 4).transpose(1, 2)).softmax(-1)
        x = (scores.reshape(len(x), 2, 5, 5) @ v).transpose(1, 2).reshape(len(x), 5, 8)
        return self.last(x[:, 0])


class Steps(nn.Module):
    """Recurrent layers with states of zeros, steps first and examples first; a mean along windows."""

    def __init__(self, first):
        super().__init__()
        self.first = first
        self.gru, self.lstm = nn.GRU(6, 6, batch_first=first), nn.LSTM(6, 4, 2, batch_first=first)
        self.attention, self.last = nn.MultiheadAttention(4, 2), nn.Linear(4, 3)

    def forward(self, x):
        x = x if self.first else x.transpose(0, 1)
        x = self.lstm(self.gru(x)[0])[0]
        x = x.transpose(0, 1) if self.first else x
        return self.last(self.attention(x, x, x, need_weights=False)[0].mean(0))


MODULES = {
    "patches": (Patches, (3, 8, 8)),
    "examples first": (lambda: Steps(True), (5, 6)),
    "steps first": (lambda: Steps(False), (5, 6)),
}
EXPORTERS = {"dynamo": {"optimize": False}, "optimized": {"optimize": True}, "torchscript": {"dynamo": False}}


def check_freed(name, size, path, **how):
    torch.manual_seed(0)
    make, shape = MODULES[name]
    module = make().eval()
    export(module, torch.randn(size, *shape), path, dynamic=False, **how)
    draft = prepare(load(path, "test"), "test")
    assert fixed_batch(draft.graph) == size
    freed = with_free_batch(draft, size)
    assert freed is not None
    assert [v.shape[0].value for v in (*freed.graph.inputs, *freed.graph.outputs)] == ["batch"] * 2
    trainer = Trainer(path, losses.MSE("y"), optim.SGD(lr=0.1))
    x, target = torch.randn(7, *shape), torch.randn(7, 3)
    expected = nn.functional.mse_loss(module(x), target).item()
    assert trainer.evaluate([{"x": x, "target": target}])["loss"] == pytest.approx(expected, rel=1e-4)
    for rows in (slice(0, 4), slice(4, 7)):
        trainer.step({"x": x[rows], "target": target[rows]})
    told = f"the model was exported for batches of {size}, but nothing in it depends on that: it takes any size"
    assert told in trainer.remarks


def test_a_transformer_of_torch_is_freed(tmp_path):
    check_freed("patches", 1, tmp_path / "m.onnx", optimize=True)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("name", MODULES)
def test_torch_models_are_freed(name, exporter, size, tmp_path):
    check_freed(name, size, tmp_path / "m.onnx", **EXPORTERS[exporter])


def layer(nodes, size=4, output=3):
    """Two layers, with nodes between h and g."""
    rng = np.random.default_rng(0)
    arrays = {"w": rng.standard_normal((5, 3)), "v": rng.standard_normal((3, 3))}
    made = [helper.make_node("MatMul", ["x", "w"], ["h"], name="first"), *nodes]
    made.append(helper.make_node("MatMul", ["g", "v"], ["y"], name="last"))
    infos = [[helper.make_tensor_value_info(n, TensorProto.FLOAT, [size, k])] for n, k in (("x", 5), ("y", output))]
    weights = [numpy_helper.from_array(a.astype(np.float32), n) for n, a in arrays.items()]
    graph = helper.make_graph(made, "graph", *infos, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


MIXING = [helper.make_node("Softmax", ["h"], ["g"], axis=0)]  # examples depend on the others of their batch


def data(examples):
    rng = np.random.default_rng(examples)
    x = rng.standard_normal((examples, 5)).astype(np.float32)
    return {"x": x, "target": rng.standard_normal((examples, 3)).astype(np.float32)}


def test_batches_of_the_exported_size_leave_the_model_as_it_is():
    plain = [helper.make_node("Relu", ["h"], ["g"], name="relu")]
    trainer = Trainer(layer(plain), losses.MSE("y"), optim.SGD(lr=0.1))
    trainer.fit(Batches(data(8), 4), validation=Batches(data(4), 4), quiet=True)
    assert trainer._model.fixed == 4 and trainer.remarks == []
    trainer.fit(Batches(data(9), 4), validation=Batches(data(6), 4), quiet=True)
    assert trainer._model.fixed is None and trainer.steps == 2 + 3
    free = Trainer(layer(plain, "N"), losses.MSE("y"), optim.SGD(lr=0.1))
    free.fit(Batches(data(8), 4), quiet=True)
    free.fit(Batches(data(9), 4), quiet=True)
    for name, array in free.parameters.items():
        np.testing.assert_allclose(trainer.parameters[name], array, rtol=1e-5, atol=1e-6)


def test_what_depends_on_the_batch_drops_the_last_one_and_says_so(capsys):
    trainer = Trainer(layer(MIXING), losses.MSE("y"), optim.SGD(lr=0.1))
    batches = Batches(data(10), 4)
    records = trainer.fit(batches, 2, validation=Batches(data(7), 4))
    assert trainer.steps == 4 and len(records) == 2 and not batches.drop_last
    assert capsys.readouterr().err.splitlines()[:3] == [
        "the model was exported for batches of 4, and depends on that: batches of other sizes are refused",
        "training leaves out the last 2 of 10 examples in every epoch: the model takes batches of 4 only",
        "validation leaves out the last 3 of 7 examples in every epoch: the model takes batches of 4 only",
    ]
    listed = [{n: a[k : k + 4] for n, a in data(6).items()} for k in (0, 4)]
    trainer.fit(listed, validation=listed, quiet=True)
    assert trainer.steps == 5
    text = (
        "fit: the model takes batches of 4 only, not {}: give it Batches of 4 (--batch-size), or export it with a free "
        "first dimension"
    )
    for examples, size, wrong in ((10, 5, 5), (3, 4, 3)):
        with raises(ValueError, text.format(wrong)):
            trainer.fit(Batches(data(examples), size), quiet=True)
    with raises(ValueError, "the batch's x has shape [5, 5], expected [4, 5]"):
        trainer.step(data(5))
    with raises(ValueError, "evaluate: there are no batches of the size that the model takes"):
        trainer.evaluate([data(3)])


def test_other_inputs_do_not_count():
    model = layer([helper.make_node("Mul", ["h", "temperature"], ["g"], name="mul")])
    model.graph.input.insert(0, helper.make_tensor_value_info("temperature", TensorProto.FLOAT, [1]))
    draft = prepare(load(model, "test"), "test")
    assert fixed_batch(draft.graph) == 4
    freed = with_free_batch(draft, 4)
    assert [v.shape[0] for v in freed.graph.inputs] == [1, "batch"]


@pytest.mark.parametrize(
    ("inputs", "outputs", "size"),
    [
        ("float[4, 3] x, float[4, 2] z", "float[n, 3] y", 4),
        ("float[4, 3] x, float[5, 2] z", "float[n, 3] y", None),
        ("float[4, 3] x", "float y", None),
        ("float[m, 3] x", "float[n, 3] y", None),
    ],
)
def test_an_output_of_unknown_size_may_have_that_of_all_inputs(inputs, outputs, size):
    text = f'<ir_version: 10, opset_import: ["" : 21]> m ({inputs}) => ({outputs}) {{ y = Relu(x) }}'
    assert fixed_batch(ir.from_proto(onnx.parser.parse_model(text)).graph) == size


INSIDE = {
    "Gradient": """y = MatMul(x, w)  z = Mul(y, y)
        slope = ai.onnx.preview.training.Gradient <xs = ["x"], zs = ["w"], y = "z"> (x, w)""",
    "Loop": """n = Constant <value = int64 {2}> ()
        slope = Loop (n, , x) <body = b (int64 i, bool c, float[4, 3] h) => (bool d, float[4, 3] t) {
            d = Identity(c)  a = MatMul(h, w)  t = Tanh(a) }>""",
}


@pytest.mark.parametrize("kind", INSIDE)
def test_what_is_not_rewritten_is_declared_anew(kind):
    header = '<ir_version: 9, opset_import: ["" : 18, "ai.onnx.preview.training" : 1]> '
    text = header + f"g (float[4, 3] x) => (float[4, 3] slope) {{ {INSIDE[kind]} }}"
    models = [onnx.parser.parse_model(text.replace("[4,", f"[{size},")) for size in ("4", "N")]
    for model in models:
        model.graph.initializer.append(numpy_helper.from_array(np.eye(3, dtype=np.float32) + 0.1, "w"))
    fixed, free = (Trainer(model, losses.MSE("slope"), optim.SGD(lr=0.1)) for model in models)
    x = np.random.default_rng(0).standard_normal((7, 3)).astype(np.float32)
    for size in (4, 7):
        batch = {"x": x[:size], "target": np.zeros((size, 3), np.float32)}
        assert fixed.step(batch) == pytest.approx(free.step(batch))
        np.testing.assert_allclose(fixed.gradients["w"], free.gradients["w"], rtol=1e-5)


def test_an_output_that_is_one_number_keeps_the_batch_fixed():
    text = """<ir_version: 9, opset_import: ["" : 18]> m (float[4, 3] x) => (float[4, 3] y, float mean) {
        y = MatMul(x, w)  mean = ReduceMean <keepdims = 0> (y) }"""
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(numpy_helper.from_array(np.eye(3, dtype=np.float32), "w"))
    trainer = Trainer(model, "mean", optim.SGD(lr=0.1))
    assert trainer.step({"x": np.ones((4, 3), np.float32)}) == pytest.approx(1)
    with pytest.raises(ValueError, match="x has shape"):
        trainer.step({"x": np.ones((2, 3), np.float32)})


def test_what_cannot_be_told_apart_stays_fixed():
    reshape = [helper.make_node("Reshape", ["h", "shape"], ["g"], name="reshape")]
    model = layer(reshape, output=4)  # examples and numbers change places
    model.graph.initializer.append(numpy_helper.from_array(np.array([3, 4]), "shape"))
    model.graph.initializer[1].CopyFrom(numpy_helper.from_array(np.eye(4, dtype=np.float32), "v"))
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.FLOAT, [3, 4]))
    onnx.checker.check_model(model, full_check=True)
    draft = prepare(load(model, "test"), "test")
    assert fixed_batch(draft.graph) is None and with_free_batch(draft, 4) is None


def test_the_command_line_says_it_before_training(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.savez("data.npz", **data(10))
    relu = [helper.make_node("Relu", ["h"], ["g"], name="relu")]
    command = "train m.onnx --data data.npz --val 0.4 --loss mse:y -o trained.onnx --overwrite"
    for nodes, more, code, told in (
        (relu, "", 0, "exported for batches of 4, but nothing in it depends on that: it takes any size"),
        (MIXING, "--batch-size 4", 0, "training leaves out the last 2 of 6 examples in every epoch"),
        (MIXING, "", 2, "the model takes batches of 4 only, not"),
    ):
        onnx.save(layer(nodes), "m.onnx")
        done = CliRunner().invoke(cli.main, [*command.split(), *more.split()])
        assert done.exit_code == code and told in done.stderr, done.output
    onnx.save(layer(relu), "m.onnx")
    assert "batches: of any size, though exported for 4" in CliRunner().invoke(cli.main, ["inspect", "m.onnx"]).output
