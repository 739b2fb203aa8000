"""Weights as they come: half types, mixed types, in files of their own, too many for one file, shared and frozen."""

import subprocess
import sys

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper, parser
from tests.checks import raises, same_bits
from tests.train.two_layers import batch, mlp, weights

import onnxgrad
from onnxgrad import cli, gradient
from onnxgrad.rules.engine import NoRuleError
from onnxgrad.train import losses, optim
from onnxgrad.train.trainer import Trainer

HALVES = {np.dtype(np.float16): TensorProto.FLOAT16, np.dtype(ml_dtypes.bfloat16): TensorProto.BFLOAT16}


def half_mlp(dtype):
    """Weights of a half type, cast where they are used, as converters make them; the bias of the last layer is not."""
    model = mlp()
    kind = HALVES[np.dtype(dtype)]
    casts = []
    for tensor in model.graph.initializer:
        if tensor.name == "fc1.bias":
            continue
        array = numpy_helper.to_array(tensor).astype(dtype)
        name = tensor.name
        tensor.CopyFrom(helper.make_tensor(name, kind, array.shape, array.view(np.uint16).tobytes(), raw=True))
        casts.append(helper.make_node("Cast", [name], [f"{name}.wide"], to=TensorProto.FLOAT, name=f"/cast/{name}"))
    for node in model.graph.node:
        for k, name in enumerate(node.input):
            if any(c.input[0] == name for c in casts):
                node.input[k] = f"{name}.wide"
    nodes = [*casts, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model


@pytest.mark.parametrize("dtype", list(HALVES), ids=str)
def test_half_weights_are_trained_in_float32(dtype, tmp_path):
    """Updates far smaller than a half number's last digit add up; the exported weights are their sum, rounded once."""
    mine = Trainer(half_mlp(dtype), losses.CrossEntropy("logits"), optim.SGD(lr=1e-4))
    assert {a.dtype for a in mine.parameters.values()} == {np.dtype(np.float32)}
    start = {name: a.copy() for name, a in mine.parameters.items()}
    assert same_bits(start["fc0.weight"].astype(dtype), weights()["fc0.weight"].astype(dtype))
    for k in range(20):
        mine.step(batch(k))
    assert all(np.any(start[name] != a) for name, a in mine.parameters.items())
    mine.export(tmp_path / "trained.onnx")
    exported = {t.name: t for t in onnx.load(tmp_path / "trained.onnx").graph.initializer}
    assert exported["fc0.weight"].data_type == HALVES[np.dtype(dtype)]
    assert exported["fc1.bias"].data_type == TensorProto.FLOAT
    found = numpy_helper.to_array(exported["fc0.weight"])
    assert same_bits(found.view(np.uint16), mine.parameters["fc0.weight"].astype(dtype).view(np.uint16))
    # The casts before use give the losses of the rounded weights, in training and in evaluation alike.
    given = batch(3)
    assert mine.evaluate([given])["loss"] == pytest.approx(mine.step(given), rel=1e-6)


@pytest.mark.slow  # kernels for half types are compiled
def test_a_model_that_computes_in_float16():
    model = mlp()
    for tensor in model.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float16), tensor.name))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = TensorProto.FLOAT16
    mine = Trainer(model, losses.CrossEntropy("logits"), optim.AdamW(lr=0.01))
    wide = Trainer(mlp(), losses.CrossEntropy("logits"), optim.AdamW(lr=0.01))
    for k in range(30):
        given = batch(k)
        half = {**given, "x": given["x"].astype(np.float16)}
        assert mine.step(half) == pytest.approx(wide.step(given), rel=0.02)


def test_float64_beside_float32():
    model = mlp()
    last = next(t for t in model.graph.initializer if t.name == "fc1.bias")
    last.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(last).astype(np.float64), last.name))
    model.graph.node[-1].input[2] = "narrow"
    model.graph.node.insert(0, helper.make_node("Cast", ["fc1.bias"], ["narrow"], to=TensorProto.FLOAT))
    mine = Trainer(model, losses.CrossEntropy("logits"), optim.SGD(lr=0.1))
    plain = Trainer(mlp(), losses.CrossEntropy("logits"), optim.SGD(lr=0.1))
    assert {a.dtype for a in mine.parameters.values()} == {np.dtype(np.float64)}
    for k in range(10):
        assert mine.step(batch(k)) == pytest.approx(plain.step(batch(k)), rel=1e-5)


@pytest.mark.parametrize("trainable", [None, "fc1.*"])
def test_weights_in_files(trainable, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    onnx.save(mlp(), folder / "m.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0)
    mine = Trainer(folder / "m.onnx", losses.CrossEntropy("logits"), optim.SGD(lr=0.1), trainable)
    plain = Trainer(mlp(), losses.CrossEntropy("logits"), optim.SGD(lr=0.1), trainable)
    for k in range(3):
        assert mine.step(batch(k)) == plain.step(batch(k))
    before = (folder / "weights.bin").read_bytes()
    for where in (tmp_path / "trained.onnx", folder / "m.onnx"):  # elsewhere, and in place of the model itself
        mine.export(where)
        assert (where.parent / f"{where.name}.data").exists()
        session = onnxruntime.InferenceSession(where, providers=["CPUExecutionProvider"])
        loaded = {t.name: numpy_helper.to_array(t) for t in onnx.load(where).graph.initializer}
        expected = {**weights(), **mine.parameters}
        assert all(same_bits(loaded[name], a) for name, a in expected.items())
        session.run(None, {"x": batch(0)["x"]})
    assert (folder / "weights.bin").read_bytes() == before


def with_constants():
    """Between x and the layers: a constant that is neither small enough to be read first nor large, and a branch."""
    rng = np.random.default_rng(6)
    shapes = {"there": (6, 700), "back": (700, 6), "factor": (1, 6)}
    arrays = {name: (rng.standard_normal(shape) / 20).astype(np.float32) for name, shape in shapes.items()}
    model = mlp()
    model.graph.initializer.extend(numpy_helper.from_array(arrays[name], name) for name in ("there", "back"))
    model.graph.initializer.append(numpy_helper.from_array(np.array(True), "yes"))
    model.graph.node[0].input[0] = "mixed"
    result = [helper.make_tensor_value_info("result", TensorProto.FLOAT, ["N", 6])]
    factor = [numpy_helper.from_array(arrays["factor"], "factor")]
    then = helper.make_graph([helper.make_node("Mul", ["x", "factor"], ["result"])], "then", [], result, factor)
    other = helper.make_graph([helper.make_node("Identity", ["x"], ["result"])], "other", [], result)
    model.graph.node.insert(0, helper.make_node("If", ["yes"], ["chosen"], then_branch=then, else_branch=other))
    model.graph.node.insert(1, helper.make_node("MatMul", ["chosen", "there"], ["grown"]))
    model.graph.node.insert(2, helper.make_node("MatMul", ["grown", "back"], ["mixed"]))
    return model


def test_constants_in_a_file_are_found_from_any_working_directory(tmp_path, monkeypatch):
    folder, elsewhere = tmp_path / "model", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    path = folder / "m.onnx"
    plain = with_constants()
    onnx.save(plain, path, save_as_external_data=True, location="m.onnx.data", size_threshold=0)
    folder.chmod(0o555)  # nothing is written there
    monkeypatch.chdir(tmp_path)
    loss, some = losses.CrossEntropy("logits"), ["fc0.*", "fc1.*"]
    mine = Trainer("model/m.onnx", loss, optim.SGD(lr=0.1), some)
    whole = Trainer(with_constants(), loss, optim.SGD(lr=0.1), some)
    monkeypatch.chdir(elsewhere)
    assert mine.step(batch(0)) == whole.step(batch(0))
    assert mine.evaluate([batch(1)]) == whole.evaluate([batch(1)])
    mine.export("trained.onnx")
    session = onnxruntime.InferenceSession("trained.onnx", providers=["CPUExecutionProvider"])
    session.run(None, {"x": batch(0)["x"]})
    assert onnxgrad.check_gradient(path, {"x": batch(0)["x"]}, some).worst < 1e-6
    np.savez("data.npz", **batch(0, 20))
    arguments = f"train {path} --data data.npz --val 0.2 --loss cross-entropy:logits --freeze there --freeze back"
    for command in (
        f"{arguments} -o t.onnx",
        f"grad {path} --wrt fc1.* -o grad.onnx",
        f"check {path} --dim N=3 --wrt fc1.*",
    ):
        result = CliRunner().invoke(cli.main, command.split())
        assert result.exit_code == 0, result.output
    folder.chmod(0o755)


def test_a_missing_file_of_weights_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "m.onnx"
    onnx.save(mlp(), path, save_as_external_data=True, location="m.onnx.data", size_threshold=0)
    (tmp_path / "m.onnx.data").unlink()
    text = "Trainer: the weights 'fc0.weight' are in the file {!r}, which does not exist: {}"
    with raises(FileNotFoundError, text.format(f"{path}.data", "expected it next to the model")):
        Trainer("m.onnx", losses.CrossEntropy("logits"), optim.SGD(lr=0.1))
    way_out = "a model that is loaded does not say in which folder its files are: give its path instead"
    with raises(FileNotFoundError, text.format("m.onnx.data", way_out)):
        Trainer(onnx.load(path, load_external_data=False), losses.CrossEntropy("logits"), optim.SGD(lr=0.1))


def test_frozen_weights_that_are_large_are_handed_over_as_they_are(tmp_path):
    """A megabyte and more of frozen weights, in the model and in a file: the losses are those of small ones."""
    rng = np.random.default_rng(4)
    wide = (rng.standard_normal((6, 50_000)) / 6).astype(np.float32)
    back = (rng.standard_normal((50_000, 6)) / 200).astype(np.float32)
    model = mlp()
    model.graph.initializer.extend([numpy_helper.from_array(wide, "wide"), numpy_helper.from_array(back, "back")])
    model.graph.node[0].input[0] = "mixed"
    model.graph.node.insert(0, helper.make_node("MatMul", ["x", "wide"], ["grown"]))
    model.graph.node.insert(1, helper.make_node("MatMul", ["grown", "back"], ["mixed"]))
    apart = onnx.ModelProto.FromString(model.SerializeToString())
    onnx.save(apart, tmp_path / "m.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0)
    folded = {k: {**batch(k), "x": batch(k)["x"] @ wide @ back} for k in range(3)}
    for source in (model, tmp_path / "m.onnx"):
        mine = Trainer(source, losses.CrossEntropy("logits"), optim.SGD(lr=0.1), "fc*")
        plain = Trainer(mlp(), losses.CrossEntropy("logits"), optim.SGD(lr=0.1))
        for k in range(3):
            assert mine.step(batch(k)) == pytest.approx(plain.step(folded[k]), rel=1e-4)


def test_what_cannot_be_trained():
    settings = losses.CrossEntropy("logits"), optim.SGD()
    with raises(ValueError, "Trainer: trainable names 'x', which is an input of the model, not a weight"):
        Trainer(mlp(), *settings, trainable=["x", "fc1.*"])
    with raises(ValueError, "Trainer: trainable names 'fc9.*', which is not an initializer of the model; available: "
                "'fc0.weight', 'fc0.bias', 'fc1.weight', 'fc1.bias'"):  # fmt: skip
        Trainer(mlp(), *settings, trainable="fc9.*")
    assert list(Trainer(mlp(), *settings, trainable="*").parameters) == list(weights())
    with raises(ValueError, "Trainer: device is 'tpu', expected 'cpu' or 'cuda'"):
        Trainer(mlp(), *settings, device="tpu")


HEAD = '<ir_version: 9, opset_import: ["": 20, "my": 1]> g (float[batch, 3] x) => (float[batch, 3] y) '


def test_what_to_do_about_a_model_that_cannot_be_trained(tmp_path):
    """What can be done is an argument of Trainer, and an option of `onnxgrad train`."""
    settings = losses.MSE("y"), optim.SGD()
    bare = parser.parse_model(HEAD + "{ y = Tanh(x) }")
    with raises(ValueError, "Trainer: 'loss' depends on no initializer that has a gradient"):
        Trainer(bare, *settings)
    with raises(
        ValueError,
        "the output 'y' has shape ['batch', 3], expected one number, the loss: losses such as CrossEntropy and MSE "
        "compare an output with a target",
    ):
        Trainer(bare, "y", optim.SGD())
    strange = parser.parse_model(HEAD + "<float[3, 1] w = {1, 2, 3}> { a = MatMul(x, w) [n] y = my.F(a) }")
    rule = "my.F (node 'n') has no gradient rule: add one with onnxgrad.vjp, or "
    with raises(NoRuleError, f"Trainer: {rule}freeze what reaches the loss through it"):
        Trainer(strange, *settings)
    with raises(NoRuleError, f"gradient: {rule}leave out of `wrt` what reaches the result through it"):
        gradient(strange)
    onnx.save(strange, tmp_path / "m.onnx")
    result = CliRunner().invoke(cli.main, ["grad", str(tmp_path / "m.onnx"), "-o", str(tmp_path / "o.onnx")])
    assert result.stderr == f"onnxgrad: grad: {rule}leave out of --wrt what reaches the result through it\n"


def test_without_onnxruntime_it_says_what_to_install():
    code = """
import sys
sys.modules["onnxruntime"] = None
import onnxgrad
from tests.train.two_layers import mlp
for call in (lambda: onnxgrad.Trainer(mlp(), onnxgrad.losses.CrossEntropy("logits"), onnxgrad.optim.SGD()),
             lambda: onnxgrad.session(mlp()), onnxgrad.register):
    try:
        call()
    except ImportError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    install = "needs onnxruntime: pip install 'onnxgrad[cpu]', or onnxruntime-gpu for CUDA"
    for line, caller in zip(done.stdout.splitlines(), ("Trainer", "onnxgrad.", "onnxgrad."), strict=True):
        assert line.startswith(caller) and install in line
