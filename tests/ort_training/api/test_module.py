"""Module and Optimizer on artifacts of onnxruntime-training 1.19.2: its losses, its gradients, its parameters."""

import numpy as np
import onnx
import onnxruntime
import pytest
from tests.ort_training.golden import CHECKPOINTS, NETWORKS, VARIANTS, batches, expected, folder_of, numbers, variant

from onnxgrad.ort_training import artifacts
from onnxgrad.ort_training.api import CheckpointState, LinearLRScheduler, Module, Optimizer
from onnxgrad.ort_training.checkpoint_file import Parameter, read_checkpoint, write_checkpoint

CLOSE = 1e-5  # of losses, relative
MLP, CNN = "mlp_ce_adamw", variant("cnn_ce")


def opened(name, checkpoint=None, **settings):
    """A state and a module of some artifacts."""
    folder = folder_of(name)
    state = CheckpointState.load_checkpoint(checkpoint or folder / "checkpoint")
    return state, Module(folder / "training_model.onnx", state, folder / "eval_model.onnx", **settings)


def optimizer_of(module, name=MLP):
    optimizer = Optimizer(folder_of(name) / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(float(expected(name)["rate"]))
    return optimizer


def train(name, module, optimizer, steps):
    """The losses of some steps."""
    data, losses = batches(name), []
    for step in steps:
        losses.append(float(module(*data[step % len(data)])))
        optimizer.step()
        module.lazy_reset_grad()
    return losses


@pytest.mark.parametrize("name", VARIANTS)
def test_numbers_are_those_of_1_19_2(name):
    known = expected(name)
    state, module = opened(name)
    optimizer = optimizer_of(module, name)
    losses = [float(module(*batches(name)[0]))]
    for key, gradient in known.items():
        if key.startswith("gradient/"):
            found = state.parameters[key.partition("/")[2]].grad
            np.testing.assert_allclose(found, gradient, rtol=1e-4, atol=1e-6, err_msg=key)
    optimizer.step()
    module.lazy_reset_grad()
    losses += train(name, module, optimizer, range(1, len(known["losses"])))
    np.testing.assert_allclose(losses, known["losses"], rtol=CLOSE)
    module.eval()
    evaluated = [float(module(*batch)) for batch in batches(name)]
    np.testing.assert_allclose(evaluated, known.get("evaluated", evaluated), rtol=CLOSE)
    for parameter, found in state.parameters:
        np.testing.assert_allclose(found.data, known[f"parameter/{parameter}"], rtol=1e-3, atol=1e-4)


def test_gradients_are_added_until_they_are_reset():
    state, module = opened(MLP)
    first, second, *_ = batches(MLP)
    assert all(not p.grad.any() for _, p in state.parameters)
    found = []
    for batch in (first, second):
        module.lazy_reset_grad()
        module(*batch)
        found.append({name: p.grad for name, p in state.parameters})
    module(*first)  # added to those of the second
    for name, parameter in state.parameters:
        np.testing.assert_array_equal(parameter.grad, found[1][name] + found[0][name])
    module.lazy_reset_grad()
    assert state.parameters["fc1.weight"].grad.any()  # until the next call
    module(*first)
    for name, parameter in state.parameters:
        np.testing.assert_array_equal(parameter.grad, found[0][name])


def test_running_statistics_are_parameters_that_training_changes():
    state, module = opened(CNN)
    before = {name: p.data for name, p in state.parameters}
    batch = batches(CNN)[0]
    module.eval()
    module(*batch)
    assert all((p.data == before[name]).all() for name, p in state.parameters)
    module.train()
    module(*batch)
    changed = {name for name, p in state.parameters if (p.data != before[name]).any()}
    assert changed == {"bn.mean", "bn.variance"}
    assert state.parameters["bn.mean"].grad is None and not state.parameters["bn.mean"].requires_grad


def test_ortvalues_in_ortvalues_out():
    _, module = opened(MLP)
    batch = batches(MLP)[0]
    expected = module(*batch)
    module.lazy_reset_grad()
    found = module(*[onnxruntime.OrtValue.ortvalue_from_numpy(a) for a in batch])
    assert isinstance(found, onnxruntime.OrtValue) and isinstance(expected, np.ndarray)
    assert found.numpy() == expected
    module.eval()
    assert isinstance(module(*[onnxruntime.OrtValue.ortvalue_from_numpy(a) for a in batch]), onnxruntime.OrtValue)


def test_contiguous_parameters_go_out_and_in():
    state, module = opened(CNN)
    every, trained = (module.get_contiguous_parameters(trainable_only=only).numpy() for only in (False, True))
    assert (module.get_parameters_size(False), module.get_parameters_size()) == (every.size, trained.size)
    assert every.size - trained.size == 8
    weights = {name: p.data for name, p in state.parameters}
    graph = onnx.load(folder_of(CNN) / "training_model.onnx").graph
    order = [i.name for i in graph.input if i.name in weights]
    np.testing.assert_array_equal(every, np.concatenate([weights[name].ravel() for name in order]))
    doubled = onnxruntime.OrtValue.ortvalue_from_numpy(2 * trained)
    for buffer in (doubled, doubled._ortvalue, 2 * trained):
        module.copy_buffer_to_parameters(buffer)
        np.testing.assert_array_equal(state.parameters["conv1.weight"].data, 2 * weights["conv1.weight"])
        np.testing.assert_array_equal(state.parameters["bn.mean"].data, weights["bn.mean"])
    module.copy_buffer_to_parameters(every, trainable_only=False)
    np.testing.assert_array_equal(module.get_contiguous_parameters().numpy(), every)
    with pytest.raises(ValueError, match=rf"has {every.size} numbers of float32, expected {trained.size}"):
        module.copy_buffer_to_parameters(every)


def test_parameters_are_read_and_set_by_name():
    state, module = opened(MLP)
    batch = batches(MLP)[0]
    before = module(*batch)
    assert [name for name, _ in state.parameters] == ["fc1.bias", "fc1.weight", "fc2.bias", "fc2.weight"]
    assert len(state.parameters) == 4 and "fc1.weight" in state.parameters and "fc9" not in state.parameters
    kept = state.parameters["fc1.weight"].data
    state.parameters["fc1.weight"].data = np.zeros_like(kept)
    assert not state.parameters["fc1.weight"].data.any() and kept.any() and module(*batch) != before
    state.parameters["fc1.weight"] = kept
    assert module(*batch) == before
    assert repr(state.parameters["fc1.weight"]) == "Parameter(name=fc1.weight, requires_grad=True)"
    with pytest.raises(KeyError, match="no parameter 'fc9'"):
        state.parameters["fc9"]
    with pytest.raises(ValueError, match=r"'fc1.weight' is float32\[12, 6\], and cannot become float32\[6\]"):
        state.parameters["fc1.weight"] = kept[0]


def test_training_resumed_from_a_checkpoint_has_the_same_bits(tmp_path):
    state, module = opened(CNN)
    optimizer = optimizer_of(module)  # AdamW, which has momenta
    train(CNN, module, optimizer, range(3))
    state.properties["step"] = 3
    CheckpointState.save_checkpoint(state, tmp_path / "saved", include_optimizer_state=True)
    losses = train(CNN, module, optimizer, range(3, 6))
    resumed, module = opened(CNN, tmp_path / "saved")
    assert dict(resumed.properties) == {"step": 3}
    assert train(CNN, module, optimizer_of(module), range(3, 6)) == losses
    for name, parameter in state.parameters:
        np.testing.assert_array_equal(parameter.data, resumed.parameters[name].data)


def test_training_goes_on_from_a_checkpoint_that_1_19_2_saved():
    """20 steps of it, then ten of ours: the momenta and the number of updates count."""
    _, module = opened(MLP, CHECKPOINTS / "saved")
    optimizer = Optimizer(folder_of(MLP) / "optimizer_model.onnx", module)
    assert optimizer.get_learning_rate() == float(np.float32(1e-3))  # no file has it
    losses = train(MLP, module, optimizer_of(module), range(20, 30))
    np.testing.assert_allclose(losses, numbers()["resumed"], rtol=CLOSE)


def test_a_nominal_checkpoint_waits_for_its_parameters():
    state, module = opened(MLP, CHECKPOINTS / "nominal")
    optimizer = optimizer_of(module)
    batch = batches(MLP)[0]
    for attempt in (lambda: module(*batch), optimizer.step, module.get_contiguous_parameters):
        with pytest.raises(RuntimeError, match="nominal: load all parameters first, by"):
            attempt()
    with pytest.raises(RuntimeError, match=r"does not hold the parameter .*: load all parameters first"):
        state.parameters["fc1.weight"]
    with pytest.raises(RuntimeError, match="cannot be set alone: load all parameters first"):
        state.parameters["fc1.weight"] = np.zeros((12, 6), np.float32)
    with pytest.raises(ValueError, match="trainable_only=False"):
        module.copy_buffer_to_parameters(np.zeros(module.get_parameters_size(), np.float32))
    _, complete = opened(MLP)
    module.copy_buffer_to_parameters(complete.get_contiguous_parameters(), trainable_only=False)
    update = optimizer_of(complete)
    assert module(*batch) == complete(*batch)
    optimizer.step()
    update.step()
    np.testing.assert_array_equal(
        module.get_contiguous_parameters().numpy(), complete.get_contiguous_parameters().numpy()
    )


@pytest.mark.parametrize("network", NETWORKS)
def test_exported_models_run_in_plain_onnxruntime(network, tmp_path):
    name = variant(f"{network}_mse")
    _, module = opened(name)
    module.export_model_for_inferencing(tmp_path / "model.onnx", ["scores"])
    x, target = batches(name)[0]
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    assert [i.name for i in session.get_inputs()] == ["x"]
    (scores,) = session.run(None, {"x": x})
    assert np.mean((scores - target) ** 2) == pytest.approx(float(module.eval()(x, target)), rel=CLOSE)


def test_names_of_inputs_and_outputs():
    name = variant("mlp_mse")
    _, module = opened(name)
    trained = onnx.load(folder_of(name) / "training_model.onnx").graph
    assert module.input_names() == ["x", "target"] == [i.name for i in trained.input][:2]
    assert module.output_names() == [trained.output[0].name]
    assert module.eval().input_names() == ["x", "target"] and not module.training
    assert module.train().training


def test_session_options_are_used(tmp_path):
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    _, module = opened(MLP, session_options=options)
    assert (tmp_path / "optimized.onnx").exists()
    assert float(module(*batches(MLP)[0])) == pytest.approx(expected(MLP)["losses"][0], rel=CLOSE)


@pytest.mark.parametrize(("warmup", "total"), [(2, 5), (5, 2), (0, 4), (20, 3)])
def test_rates_of_the_scheduler_are_those_of_1_19_2(warmup, total):
    _, module = opened(MLP)
    optimizer = optimizer_of(module)
    scheduler = LinearLRScheduler(optimizer, warmup, total, 0.3)
    found = [optimizer.get_learning_rate()]
    for _ in range(8):
        optimizer.step()
        scheduler.step()
        found.append(optimizer.get_learning_rate())
    np.testing.assert_array_equal(found, numbers()[f"{warmup}-{total}"])


def test_properties(tmp_path):
    state, _ = opened(MLP)
    for name, value in {"a": 1, "b": 0.1, "c": "text", "d": True, "e": np.int32(4)}.items():
        state.properties[name] = value
    expected = {"a": 1, "b": float(np.float32(0.1)), "c": "text", "d": 1, "e": 4}
    assert dict(state.properties) == expected and len(state.properties) == 5 and "a" in state.properties
    CheckpointState.save_checkpoint(state, tmp_path / "file")
    assert dict(CheckpointState.load_checkpoint(tmp_path / "file").properties) == expected
    with pytest.raises(TypeError, match="the property 'f' is a list, expected an int, a float or a str"):
        state.properties["f"] = [1]
    with pytest.raises(KeyError, match="no property 'g'"):
        state.properties["g"]


def generated(folder, text, parameters, **settings):
    """Artifacts of ours, of a model with zeros for parameters; the state and the module."""
    model = onnx.parser.parse_model(text)
    for name, shape in parameters.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(shape, np.float32), name))
    artifacts.generate_artifacts(
        model, requires_grad=list(parameters), loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.SGD, artifact_directory=folder, **settings,
    )  # fmt: skip
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    return state, Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")


def test_strings_go_in_as_well(tmp_path):
    text = """<ir_version: 8, opset_import: ["" : 15]> words (string[1, 4] x) => (float[1, 2] y) {
        numbers = Cast <to = 1> (x)
        y = Gemm (numbers, w, b)
    }"""
    state, module = generated(tmp_path, text, {"w": (4, 2), "b": (2,)})
    words, labels = np.array([["1.0", "2", "3", "4"]]), np.array([1])
    for _ in range(2):
        assert module(words, labels) == pytest.approx(np.log(2))
    x = np.array([[1, 2, 3, 4]], np.float32)
    np.testing.assert_allclose(state.parameters["w"].grad, 2 * x.T @ np.array([[0.5, -0.5]]), rtol=1e-6)
    module.eval()
    assert module(words, labels) == pytest.approx(np.log(2))


def test_several_outputs_come_as_a_tuple(tmp_path):
    text = """<ir_version: 8, opset_import: ["" : 15]> linear (float[n, 3] x) => (float[n, 2] y) {
        h = Relu (x)
        y = Gemm (h, w)
    }"""
    _, module = generated(tmp_path, text, {"w": (3, 2)}, additional_output_names=["y", "h"])
    assert module.output_names()[1:] == ["y", "h"]
    x = np.array([[1, -2, 3], [0, 1, -1]], np.float32)
    for mode in (True, False):
        module.train(mode)
        for n in (2, 1):
            loss, y, h = module(x[:n], np.zeros(n, np.int64))
            assert loss.shape == () and y.shape == (n, 2)
            np.testing.assert_array_equal(h, np.maximum(x[:n], 0))
        values = module(*map(onnxruntime.OrtValue.ortvalue_from_numpy, (x, np.zeros(2, np.int64))))
        assert [v.shape() for v in values] == [[], [2, 2], [2, 3]]


def test_modules_of_one_state_share_its_parameters():
    state, module = opened(MLP)
    again = Module(folder_of(MLP) / "training_model.onnx", state)
    batch = batches(MLP)[0]
    assert again(*batch) == module(*batch)
    state.parameters["fc1.weight"] = np.zeros((12, 6), np.float32)
    assert again(*batch) == module(*batch)


def test_weights_in_a_second_file_stay_in_one(tmp_path):
    checkpoint = read_checkpoint(folder_of(MLP) / "checkpoint")
    write_checkpoint(tmp_path / "checkpoint", checkpoint, large=1)
    state, module = opened(MLP, tmp_path / "checkpoint")
    _, plain = opened(MLP)
    assert train(MLP, module, optimizer_of(module), range(2)) == train(MLP, plain, optimizer_of(plain), range(2))
    CheckpointState.save_checkpoint(state, tmp_path / "saved")
    module.export_model_for_inferencing(tmp_path / "model.onnx", ["scores"])
    assert {"saved.data", "model.onnx.data"} <= {path.name for path in tmp_path.iterdir()}
    onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])


def test_a_model_without_anything_to_train_runs(tmp_path):
    text = """<ir_version: 8, opset_import: ["" : 15]> fixed (float[n, 2] x) => (float[n, 2] y) {
        y = Gemm (x, w)
    }"""
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros((2, 2), np.float32), "w"))
    artifacts.generate_artifacts(
        model, frozen_params=["w"], loss=artifacts.LossType.CrossEntropyLoss, artifact_directory=tmp_path
    )
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state)
    for _ in range(2):
        assert module(np.ones((3, 2), np.float32), np.zeros(3, np.int64)) == pytest.approx(np.log(2))
    assert (module.get_parameters_size(), module.get_parameters_size(False)) == (0, 4)


def test_refusals(tmp_path):
    state, module = opened(MLP)
    x, labels = batches(MLP)[0]
    with pytest.raises(ValueError, match="the call has 1 inputs, expected x, labels"):
        module(x)
    with pytest.raises(ValueError, match=r"x has shape \[8, 4\], expected \['any', 6\]"):
        module(x[:, :4], labels)
    with pytest.raises(TypeError, match="labels holds float32, expected int64"):
        module(x, labels.astype(np.float32))
    with pytest.raises(TypeError, match="state is a str, expected a CheckpointState"):
        Module(folder_of(MLP) / "training_model.onnx", "checkpoint")
    with pytest.raises(ValueError, match="device is 'tpu'"):
        Module(folder_of(MLP) / "training_model.onnx", state, device="tpu")
    with pytest.raises(FileNotFoundError, match=r"nothing.onnx' does not exist"):
        Module(tmp_path / "nothing.onnx", state)
    other = CheckpointState.load_checkpoint(folder_of(variant("gru_mse")) / "checkpoint")
    with pytest.raises(ValueError, match=r"lacks the parameter 'gru.weight', which the checkpoint has to be trained"):
        Module(folder_of(MLP) / "training_model.onnx", other)
    with pytest.raises(ValueError, match=r"eval_model.onnx' has .*expected AdamWOptimizer or SGDOptimizerV2"):
        Optimizer(folder_of(MLP) / "eval_model.onnx", module)
    with pytest.raises(TypeError, match="module is a CheckpointState, expected a Module"):
        Optimizer(folder_of(MLP) / "optimizer_model.onnx", state)
    half = read_checkpoint(folder_of(MLP) / "checkpoint")
    half.parameters = {n: Parameter(p.data.astype(np.float16), True) for n, p in half.parameters.items()}
    with pytest.raises(
        TypeError, match="parameters to train are of float16, expected all of float32 or all of float64"
    ):
        Module(folder_of(MLP) / "training_model.onnx", CheckpointState(half))
    alone = Module(folder_of(MLP) / "training_model.onnx", state).eval()
    with pytest.raises(RuntimeError, match="no evaluation model was given"):
        alone(x, labels)
    with pytest.raises(RuntimeError, match="no evaluation model was given"):
        alone.export_model_for_inferencing(tmp_path / "model.onnx", ["scores"])
    with pytest.raises(ValueError, match="no value 'probabilities'"):
        module.export_model_for_inferencing(tmp_path / "model.onnx", ["probabilities"])
    with pytest.raises(TypeError, match=r"CheckpointState.load_checkpoint makes one"):
        CheckpointState("checkpoint")
