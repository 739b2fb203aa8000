"""generate_artifacts(): the four files, their names within and without, and what is refused before any is written."""

import inspect

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from tests.checks import raises
from tests.train.two_layers import batch, mlp, weights

from onnxgrad.ort_training import artifacts, onnxblock
from onnxgrad.ort_training.api import CheckpointState, Module, Optimizer
from onnxgrad.ort_training.artifacts import LossType, OptimType, generate_artifacts
from onnxgrad.ort_training.checkpoint_file import read_checkpoint

NAMES = list(weights())
FILES = ["checkpoint", "eval_model.onnx", "optimizer_model.onnx", "training_model.onnx"]
MODELS = ("training_model", "eval_model")
HOW = {"requires_grad": NAMES, "loss": LossType.CrossEntropyLoss, "optimizer": OptimType.AdamW}


def written(folder):
    return sorted(path.name for path in folder.iterdir())


def names(values):
    return [value.name for value in values]


def loaded(folder, name):
    model = onnx.load(folder / f"{name}.onnx")
    onnx.checker.check_model(model)
    return model.graph


def test_signature():
    assert list(inspect.signature(generate_artifacts).parameters) == [
        "model",
        "requires_grad",
        "frozen_params",
        "loss",
        "optimizer",
        "artifact_directory",
        "prefix",
        "ort_format",
        "custom_op_library",
        "additional_output_names",
        "nominal_checkpoint",
        "loss_input_names",
    ]
    assert [(k.name, k.value) for k in (*LossType, *OptimType)] == [
        ("MSELoss", 1),
        ("CrossEntropyLoss", 2),
        ("BCEWithLogitsLoss", 3),
        ("L1Loss", 4),
        ("AdamW", 1),
        ("SGD", 2),
    ]


@pytest.mark.parametrize("loss", LossType)
@pytest.mark.parametrize("optimizer", OptimType)
def test_files_and_their_names(tmp_path, optimizer, loss):
    model = mlp()
    given = model.SerializeToString()
    generate_artifacts(model, NAMES, loss=loss, optimizer=optimizer, artifact_directory=str(tmp_path))
    assert model.SerializeToString() == given and written(tmp_path) == FILES
    target = "labels" if loss is LossType.CrossEntropyLoss else "target"
    training, evaluation = loaded(tmp_path, "training_model"), loaded(tmp_path, "eval_model")
    buffers = [f"{name}_grad.accumulation.buffer" for name in NAMES]
    assert names(training.input) == ["x", target, *NAMES, *buffers, "lazy_reset_grad"]
    assert names(evaluation.input) == ["x", target, *NAMES]
    (value,) = names(evaluation.output)
    assert names(training.output) == [value, *(f"{name}_grad.accumulation.out" for name in NAMES)]
    assert not {*NAMES} & {*names(training.initializer), *names(evaluation.initializer)}
    update = loaded(tmp_path, "optimizer_model")
    assert names(update.input)[:4] == ["learning_rate", "step", "params", "gradients"]
    assert update.node[-1].op_type == {"AdamW": "AdamWOptimizer", "SGD": "SGDOptimizerV2"}[optimizer.name]
    opsets = [onnx.load(tmp_path / f"{name}_model.onnx").opset_import for name in ("training", "eval", "optimizer")]
    assert {o.version for imports in opsets for o in imports if o.domain == ""} == {20}
    checkpoint = read_checkpoint(tmp_path / "checkpoint")
    assert {name: p.requires_grad for name, p in checkpoint.parameters.items()} == dict.fromkeys(NAMES, True)
    assert all(np.array_equal(checkpoint.parameters[name].data, array) for name, array in weights().items())


@pytest.mark.parametrize("loss", LossType)
def test_training_agrees_with_pytorch(tmp_path, loss):
    """Two batches for each update."""
    generate_artifacts(mlp(), NAMES[1:], NAMES[:1], loss, OptimType.SGD, tmp_path)
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state, tmp_path / "eval_model.onnx")
    optimizer = Optimizer(tmp_path / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(0.1)
    theirs = {name: torch.tensor(array, requires_grad=name != NAMES[0]) for name, array in weights().items()}
    sgd, criterion = torch.optim.SGD([theirs[n] for n in NAMES[1:]], 0.1), getattr(torch.nn, loss.name)()
    for k in range(6):
        x, target = batch(k).values()
        target = target if loss is LossType.CrossEntropyLoss else np.eye(3, dtype=np.float32)[target]
        hidden = torch.tanh(torch.tensor(x) @ theirs["fc0.weight"].T + theirs["fc0.bias"])
        expected = criterion(hidden @ theirs["fc1.weight"].T + theirs["fc1.bias"], torch.tensor(target))
        expected.backward()
        assert np.allclose(module(x, target), expected.item(), rtol=1e-5)
        if k % 2:
            optimizer.step()
            module.lazy_reset_grad()
            sgd.step()
            sgd.zero_grad()
    for name, parameter in state.parameters:
        assert np.allclose(parameter.data, theirs[name].detach().numpy(), 1e-4, 1e-6)
    assert np.array_equal(state.parameters[NAMES[0]].data, weights()[NAMES[0]])


def test_frozen_parameters_and_constants(tmp_path):
    trained, frozen, constant = NAMES[2:], NAMES[:1], NAMES[1]
    absent = "num_batches_tracked"  # frozen names come from PyTorch, where there are more
    generate_artifacts(mlp(), trained, [*frozen, absent], LossType.CrossEntropyLoss, artifact_directory=tmp_path)
    assert written(tmp_path) == [name for name in FILES if "optimizer" not in name]
    training, evaluation = loaded(tmp_path, "training_model"), loaded(tmp_path, "eval_model")
    for graph in (training, evaluation):
        assert names(graph.input)[2:5] == [*frozen, *trained] and names(graph.initializer)[0] == constant
    assert names(training.output)[1:] == [f"{name}_grad.accumulation.out" for name in trained]
    parameters = read_checkpoint(tmp_path / "checkpoint").parameters
    assert {name: p.requires_grad for name, p in parameters.items()} == {
        **dict.fromkeys(trained, True),
        frozen[0]: False,
    }


def test_gradient_of_an_input(tmp_path):
    generate_artifacts(mlp(), [*NAMES, "x"], loss=LossType.MSELoss, artifact_directory=tmp_path)
    assert "x_grad.accumulation.out" in names(loaded(tmp_path, "training_model").output)
    assert list(read_checkpoint(tmp_path / "checkpoint").parameters) == NAMES


def test_prefix_and_nominal_checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    generate_artifacts(mlp(), **HOW, prefix="my_", nominal_checkpoint=True)
    assert written(tmp_path) == sorted([*(f"my_{name}" for name in FILES), "my_nominal_checkpoint"])
    nominal = read_checkpoint(tmp_path / "my_nominal_checkpoint")
    assert nominal.nominal and list(nominal.parameters) == NAMES
    assert all(p.data is None and p.requires_grad for p in nominal.parameters.values())
    before = (tmp_path / "my_checkpoint").read_bytes()
    generate_artifacts(mlp(), **HOW, prefix="my_")  # replaces what is there
    assert (tmp_path / "my_checkpoint").read_bytes() == before


def test_outputs_besides_the_loss(tmp_path):
    """Of the model, and values within it."""
    generate_artifacts(mlp(), **HOW, artifact_directory=tmp_path, additional_output_names=["logits", "a"])
    assert names(loaded(tmp_path, "training_model").output)[1:3] == ["logits", "a"]
    assert names(loaded(tmp_path, "eval_model").output)[1:] == ["logits", "a"]


def test_the_loss_of_some_outputs(tmp_path):
    model = mlp()
    model.graph.output.insert(0, helper.make_tensor_value_info("a", onnx.TensorProto.FLOAT, ["N", 16]))
    generate_artifacts(model, **HOW, artifact_directory=tmp_path, loss_input_names=["logits"])
    node = next(n for n in loaded(tmp_path, "eval_model").node if n.op_type == "SoftmaxCrossEntropyLoss")
    assert list(node.input) == ["logits", "labels"]


def test_a_model_that_has_its_loss(tmp_path):
    model = mlp()
    model.graph.node.append(helper.make_node("ReduceMean", ["logits"], ["loss"], keepdims=0))
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("loss", onnx.TensorProto.FLOAT, []))
    generate_artifacts(model, NAMES, artifact_directory=tmp_path)
    assert names(loaded(tmp_path, "eval_model").output) == ["loss"]


class Weighted(onnxblock.Block):
    """0.4 times the loss of one output and 0.6 times that of the other."""

    def __init__(self):
        self._losses = onnxblock.loss.MSELoss(), onnxblock.loss.L1Loss()
        self._weights = onnxblock.blocks.Constant(0.4), onnxblock.blocks.Constant(0.6)
        self._add, self._mul = onnxblock.blocks.Add(), onnxblock.blocks.Mul()

    def build(self, *outputs):
        targets = ("target1", "target2")
        losses = [loss(o, target_name=t) for loss, o, t in zip(self._losses, outputs, targets, strict=True)]
        return self._add(*(self._mul(w(), loss) for w, loss in zip(self._weights, losses, strict=True)))


def test_blocks_of_your_own(tmp_path):
    model = mlp()
    model.graph.output.append(helper.make_tensor_value_info("a", onnx.TensorProto.FLOAT, ["N", 16]))
    optimizer = onnxblock.optim.AdamW(weight_decay=0.5, clip_grad=onnxblock.optim.ClipGradNorm(1.0))
    generate_artifacts(model, NAMES, loss=Weighted(), optimizer=optimizer, artifact_directory=tmp_path)
    assert names(loaded(tmp_path, "training_model").input)[:3] == ["x", "target1", "target2"]
    assert [n.op_type for n in loaded(tmp_path, "optimizer_model").node] == ["InplaceClipGradNorm", "AdamWOptimizer"]


class Forward(onnxblock.ForwardBlock):
    """A loss that makes a model of its own on the way."""

    def build(self, output):
        return onnxblock.loss.MSELoss()(onnxblock.blocks.Neg()(output))


def test_a_forward_block_is_a_loss(tmp_path):
    generate_artifacts(mlp(), NAMES, loss=Forward(), artifact_directory=tmp_path, additional_output_names=["logits"])
    assert names(loaded(tmp_path, "eval_model").output)[1:] == ["logits"]


def test_operators_of_a_library(tmp_path):
    """Nobody here knows their shapes; gradients do not reach them."""
    model = mlp()
    model.opset_import.append(helper.make_opsetid("custom", 1))
    model.graph.node.insert(0, helper.make_node("Twist", ["x"], ["twisted"], domain="custom"))
    model.graph.node[1].input[0] = "twisted"
    model.graph.value_info.append(helper.make_tensor_value_info("twisted", onnx.TensorProto.FLOAT, ["N", 6]))
    library = tmp_path / "operators.so"
    library.touch()
    generate_artifacts(model, **HOW, artifact_directory=tmp_path, custom_op_library=library)
    graph = onnx.load(tmp_path / "training_model.onnx").graph
    assert graph.node[0].op_type == "Twist" and names(graph.output)[1] == f"{NAMES[0]}_grad.accumulation.out"


@pytest.mark.parametrize("one_file", [True, False])
def test_models_with_weights_in_files(tmp_path, one_file, monkeypatch):
    source, folder = tmp_path / "source", tmp_path / "artifacts"
    source.mkdir()
    folder.mkdir()
    how = {"save_as_external_data": True, "all_tensors_to_one_file": one_file, "size_threshold": 0}
    onnx.save(mlp(), source / "model.onnx", **how, location="weights" if one_file else None)
    before = written(source)
    monkeypatch.chdir(folder)
    for path in (str(source / "model.onnx"), source / "model.onnx"):
        generate_artifacts(path, **HOW)
        assert written(folder) == FILES and written(source) == before
        found = read_checkpoint(folder / "checkpoint").parameters
        assert all(np.array_equal(found[name].data, array) for name, array in weights().items())


def test_constants_that_are_too_much_for_one_file(tmp_path, monkeypatch):
    monkeypatch.setattr(artifacts, "LARGEST", 1000)
    large, small = np.ones((6, 300), np.float32), np.ones((300, 3), np.float32)
    nodes = [helper.make_node("MatMul", ["x", "large"], ["h"]), helper.make_node("MatMul", ["h", "small"], ["y"])]
    infos = [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, ["N", k]) for n, k in (("x", 6), ("y", 3))]
    tensors = [numpy_helper.from_array(large, "large"), numpy_helper.from_array(small, "small")]
    graph = helper.make_graph(nodes, "g", infos[:1], infos[1:], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    generate_artifacts(model, ["small"], loss=LossType.MSELoss, artifact_directory=tmp_path)
    for name in MODELS:
        assert (
            (tmp_path / f"{name}.onnx").stat().st_size
            < large.nbytes
            < (tmp_path / f"{name}.onnx.data").stat().st_size + 1
        )
        (tensor,) = (t for t in loaded(tmp_path, name).initializer if t.name == "large")
        assert np.array_equal(numpy_helper.to_array(tensor), large)


def refused(error, text, folder, model=None, **how):
    with raises(error, text):
        generate_artifacts(model or mlp(), **{**HOW, "artifact_directory": folder, **how})
    assert not written(folder)


def test_what_is_refused_before_anything_is_written(tmp_path):
    refused(
        NotImplementedError,
        "generate_artifacts: ort_format=True is not supported, because stock onnxruntime no longer trains from .ort "
        "files; the .onnx files that are written without it train everywhere",
        tmp_path,
        ort_format=True,
    )
    both = f"generate_artifacts: {NAMES[1:2]} are named in both requires_grad and frozen_params"
    refused(RuntimeError, both, tmp_path, frozen_params=NAMES[1:2])
    kinds = "expected a LossType or an onnxblock.Block"
    refused(RuntimeError, f"generate_artifacts: loss is a str, {kinds}", tmp_path, loss="mse")
    kinds = "expected an OptimType or an onnxblock.Block"
    refused(TypeError, f"generate_artifacts: optimizer is a str, {kinds}", tmp_path, optimizer="adam")
    kinds = "expected a path or an onnx.ModelProto"
    refused(RuntimeError, f"generate_artifacts: model is a int, {kinds}", tmp_path, model=7)
    text = "generate_artifacts: additional_output_names is a str, expected a list of names"
    refused(RuntimeError, text, tmp_path, additional_output_names="logits")
    text = "requires_grad: the model has no initializer or input 'fc0.weigth'; did you mean 'fc0.weight'?"
    refused(RuntimeError, text, tmp_path, requires_grad=["fc0.weigth"])
    text = "the graph has no value 'nothing' whose type is known"
    refused(LookupError, text, tmp_path, additional_output_names=["nothing"])
    text = "the optimizer has nothing to update: no parameter requires a gradient"
    refused(RuntimeError, text, tmp_path, requires_grad=None)
    text = "the library of custom operators 'operators.so' does not exist"
    refused(RuntimeError, text, tmp_path, custom_op_library=b"operators.so")


def test_a_folder_in_the_place_of_a_file(tmp_path):
    """Nothing is replaced, also where another file has no place."""
    generate_artifacts(mlp(), **HOW, artifact_directory=tmp_path)
    (tmp_path / "checkpoint").unlink()
    (tmp_path / "checkpoint").mkdir()
    before = (tmp_path / "eval_model.onnx").read_bytes()
    place = str(tmp_path / "checkpoint")
    with raises(IsADirectoryError, f"{place!r} is a folder, expected the name of a file to write"):
        generate_artifacts(mlp(), NAMES, loss=LossType.L1Loss, artifact_directory=tmp_path)
    assert (tmp_path / "eval_model.onnx").read_bytes() == before and written(tmp_path) == FILES


def test_a_training_block_alone():
    class Training(onnxblock.TrainingBlock):
        def __init__(self):
            super().__init__()
            self.loss = onnxblock.loss.CrossEntropyLoss()

        def build(self, output):
            return self.loss(output), output

    block = Training()
    with raises(RuntimeError, "Training has no parameters yet: call it first, within onnxblock.base(model)"):
        block.parameters()
    with raises(RuntimeError, "Training has no models yet: call it first, within onnxblock.base(model)"):
        block.to_model_proto()
    for name in NAMES:
        block.requires_grad(name)
    block.requires_grad(NAMES[0], False)
    with onnxblock.base(mlp()) as accessor:
        loss, output = block("logits")
        training, evaluation = block.to_model_proto()
        assert accessor.model == training
    assert output == "logits" and names(evaluation.graph.output) == [loss, "logits"]
    trained, frozen = block.parameters()
    assert (names(trained), names(frozen)) == (NAMES[1:], NAMES[:1])
    assert all(np.array_equal(numpy_helper.to_array(t), weights()[t.name]) for t in (*trained, *frozen))


def test_nothing_to_train(tmp_path):
    """Then the training model runs forward only; the eval model is in inference mode."""
    model = mlp(dropout=0.5)
    model.graph.initializer.append(numpy_helper.from_array(np.array(True), "mode"))
    dropout = next(node for node in model.graph.node if node.op_type == "Dropout")
    dropout.input.append("mode")
    generate_artifacts(model, loss=LossType.MSELoss, artifact_directory=tmp_path)
    assert written(tmp_path) == [name for name in FILES if "optimizer" not in name]
    training = loaded(tmp_path, "training_model")
    assert names(training.input) == ["x", "target", "lazy_reset_grad"] and len(training.output) == 1
    assert not read_checkpoint(tmp_path / "checkpoint").parameters
    modes = [[n.input[2] for n in loaded(tmp_path, m).node if n.op_type == "Dropout"] for m in MODELS]
    assert modes == [["mode"], [""]]


def test_a_checkpoint_into_a_model(tmp_path):
    generate_artifacts(
        mlp(), NAMES[2:], NAMES[:1], LossType.MSELoss, artifact_directory=tmp_path, nominal_checkpoint=True
    )
    model = mlp()
    for tensor in model.graph.initializer:
        array = numpy_helper.to_array(tensor)
        tensor.CopyFrom(numpy_helper.from_array(np.zeros_like(array), tensor.name))
    onnxblock.load_checkpoint_to_model(tmp_path / "checkpoint", model)
    found = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    for name, array in weights().items():
        assert np.array_equal(found[name], np.zeros_like(array) if name == NAMES[1] else array)
    path = str(tmp_path / "nominal_checkpoint")
    with raises(RuntimeError, f"load_checkpoint_to_model: {path!r} is a nominal checkpoint, which has no values"):
        onnxblock.load_checkpoint_to_model(path, model)
    sentence = "save_checkpoint: parameters is None, expected those that are trained and those that are not"
    with raises(RuntimeError, sentence):
        onnxblock.save_checkpoint(None, tmp_path / "another")
