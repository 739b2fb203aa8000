"""Adapters in files: what is saved is what is loaded, and onnxruntime switches between them."""

import json
import re

import numpy as np
import onnx
import onnxruntime
import pytest
from safetensors.numpy import load_file, save_file
from tests.edit import adapted
from tests.edit.adapted import X, arrays, linear, perturbed, run

import onnxgrad

FLOATING = adapted.floating()


def lora(**settings):
    return onnxgrad.lora(linear(), "first|second", **{"rank": 2, **settings})


@pytest.mark.parametrize("name", FLOATING)
@pytest.mark.parametrize("place", ["folder", "one.safetensors"])
def test_there_and_back(name, place, tmp_path):
    model, x = FLOATING[name]
    found = perturbed(onnxgrad.lora(model, "*", rank=2, alpha=5))
    files = onnxgrad.save_adapter(found, tmp_path / place)
    assert all(file.is_file() for file in files)
    for base in (model, onnxgrad.lora(model, "*", rank=2, alpha=5)):
        assert np.array_equal(run(onnxgrad.load_adapter(base, tmp_path / place), x), run(found, x))


def test_names_and_settings_are_those_of_peft(tmp_path):
    found = perturbed(lora(alpha=3, dropout=0.1))
    onnxgrad.save_adapter(found, tmp_path / "adapter")
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    shapes = {"first": (adapted.INPUTS, 8), "second": (8, 4)}
    assert {n: a.shape for n, a in tensors.items()} == {
        **{f"base_model.model.{n}.lora_A.weight": (2, inputs) for n, (inputs, _) in shapes.items()},
        **{f"base_model.model.{n}.lora_B.weight": (outputs, 2) for n, (_, outputs) in shapes.items()},
    }
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    expected = {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 3,
        "lora_dropout": 0.1,
        "target_modules": ["first", "second"],
    }
    assert {name: settings[name] for name in expected} == expected


def test_a_trainer_saves_what_it_trained(tmp_path):
    trainer = onnxgrad.Trainer(
        onnxgrad.lora(linear(), "first"), onnxgrad.losses.MSE("y"), onnxgrad.optim.SGD(0.02), "second.weight"
    )
    for _ in range(3):
        trainer.step({"x": X, "target": np.ones((5, 4), np.float32)})
    onnxgrad.save_adapter(trainer, tmp_path / "adapter")
    trainer.export(tmp_path / "trained.onnx")
    loaded = onnxgrad.load_adapter(linear(), tmp_path / "adapter")
    assert np.array_equal(run(loaded, X), run(tmp_path / "trained.onnx", X))
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert tensors["base_model.model.second.weight"].shape == (4, 8)  # as PyTorch has it
    with pytest.raises(
        ValueError, match=r"'x.onnx_adapter' can hold adapters alone, and 'second.weight' changed in tra"
    ):
        onnxgrad.save_adapter(trainer, tmp_path / "x.onnx_adapter")


def test_running_statistics_go_along(tmp_path):
    text = "h = MatMul(x, layer__weight) y = BatchNormalization(h, bn__weight, bn__bias, bn__mean, bn__var)"
    ones, zeros = np.ones(8, np.float32), np.zeros(8, np.float32)
    model = adapted.model_of(
        text, layer__weight=adapted.W, bn__weight=ones, bn__bias=zeros, bn__mean=zeros, bn__var=ones
    )
    trainer = onnxgrad.Trainer(onnxgrad.lora(model, "layer"), onnxgrad.losses.MSE("y"), onnxgrad.optim.SGD(0.02))
    trainer.step({"x": X, "target": np.ones((5, 8), np.float32)})
    onnxgrad.save_adapter(trainer, tmp_path / "one.safetensors")
    trainer.export(tmp_path / "trained.onnx")
    loaded = onnxgrad.load_adapter(model, tmp_path / "one.safetensors")
    assert np.allclose(run(loaded, X), run(tmp_path / "trained.onnx", X), atol=1e-6)


def test_another_alpha(tmp_path):
    """Adapters that are there keep their scale: B takes up the difference."""
    found = perturbed(lora(alpha=3))
    onnxgrad.save_adapter(found, tmp_path / "adapter")
    loaded = onnxgrad.load_adapter(lora(alpha=12), tmp_path / "adapter")
    assert np.allclose(run(loaded, X), run(found, X), atol=1e-5)


def test_settings_of_some_layers(tmp_path):
    """rank_pattern is in the shapes, alpha_pattern and use_rslora in the scale."""
    found = perturbed(lora(alpha=4))
    onnxgrad.save_adapter(found, tmp_path / "adapter")
    config = tmp_path / "adapter" / "adapter_config.json"
    settings = json.loads(config.read_text())
    config.write_text(json.dumps({**settings, "alpha_pattern": {"second": 8}, "use_rslora": True}))
    w = arrays(found)
    delta = {n: w[f"{n}.lora_A.weight"] @ w[f"{n}.lora_B.weight"] for n in ("first", "second")}
    first = w["first.weight"] + delta["first"] * 4 / 2**0.5
    expected = np.maximum(X @ first, 0) @ (w["second.weight"] + delta["second"] * 8 / 2**0.5)
    loaded = onnxgrad.load_adapter(linear(), tmp_path / "adapter")
    assert np.allclose(run(loaded, X), expected, atol=1e-4)
    onnxgrad.save_adapter(loaded, tmp_path / "again")
    again = json.loads((tmp_path / "again" / "adapter_config.json").read_text())
    assert len(again["alpha_pattern"]) == 1
    assert np.allclose(run(onnxgrad.load_adapter(linear(), tmp_path / "again"), X), expected, atol=1e-4)


def test_names_with_something_in_front(tmp_path):
    onnxgrad.save_adapter(found := perturbed(lora()), tmp_path / "one.safetensors")
    tensors = load_file(tmp_path / "one.safetensors")
    renamed = {n.replace("base_model.model.", "base_model.model.wrapper."): a for n, a in tensors.items()}
    (tmp_path / "other").mkdir()
    save_file(renamed, tmp_path / "other" / "adapter_model.safetensors")
    (tmp_path / "other" / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 16}')
    assert np.array_equal(run(onnxgrad.load_adapter(linear(), tmp_path / "other"), X), run(found, X))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_onnxruntime_switches_adapters(dtype, tmp_path):
    """One session of stock onnxruntime, two adapters, and none."""
    model = linear() if dtype is np.float32 else adapted.half(dtype)
    targets, x = "first|second" if dtype is np.float32 else "layer", X.astype(dtype)
    base = onnxgrad.lora(model, targets, as_inputs=True)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # it would warn that weights can be given with every run
    session = onnxruntime.InferenceSession(base.SerializeToString(), options)
    assert [i.name for i in session.get_inputs()] == ["x"]
    plain = session.run(None, {"x": x})[0]
    for seed in (1, 2):
        changed = perturbed(onnxgrad.lora(model, targets, seed=seed), 0.1 * seed)
        onnxgrad.save_adapter(changed, tmp_path / "x.onnx_adapter")
        adapter = onnxruntime.LoraAdapter()
        adapter.Load(str(tmp_path / "x.onnx_adapter"))
        how = onnxruntime.RunOptions()
        how.add_active_adapter(adapter)
        assert np.allclose(session.run(None, {"x": x}, how)[0], run(changed, x), atol=1e-3)
    assert np.array_equal(session.run(None, {"x": x})[0], plain) and np.allclose(plain, run(model, x))


def test_models_whose_adapters_are_inputs_are_trained_and_merged(tmp_path):
    trainer = onnxgrad.Trainer(lora(as_inputs=True), onnxgrad.losses.MSE("y"), onnxgrad.optim.SGD(0.02))
    trainer.step({"x": X, "target": np.ones((5, 4), np.float32)})
    trainer.export(tmp_path / "trained.onnx")
    inputs = [i.name for i in onnx.load(tmp_path / "trained.onnx").graph.input]
    assert inputs[1:] == [f"{n}.lora_{p}.weight" for n in ("first", "second") for p in "AB"]
    merged = onnxgrad.merge_lora(tmp_path / "trained.onnx")
    assert [i.name for i in merged.graph.input] == ["x"]
    assert np.allclose(run(merged, X), run(tmp_path / "trained.onnx", X), atol=1e-5)
    onnxgrad.save_adapter(perturbed(lora()), tmp_path / "adapter")
    loaded = onnxgrad.load_adapter(linear(), tmp_path / "adapter", as_inputs=True)
    assert [i.name for i in loaded.graph.input] == inputs


def saved(path, config=None, **tensors):
    path.mkdir(exist_ok=True)
    save_file({n.replace("__", "."): a for n, a in tensors.items()}, path / "adapter_model.safetensors")
    if config is not None:
        (path / "adapter_config.json").write_text(config)
    return path


A, B = np.ones((2, adapted.INPUTS), np.float32), np.ones((8, 2), np.float32)
PAIR = {"first__lora_A__weight": A, "first__lora_B__weight": B}
CONFIG = '{"peft_type": "LORA", "lora_alpha": 16}'


@pytest.mark.parametrize(
    "config, tensors, text",
    [
        (CONFIG, {}, "holds no adapter, such as 'encoder.query.lora_A.weight'"),
        (CONFIG, {"first__lora_A__weight": A}, "has only lora_A of 'first'"),
        (CONFIG, {"frist__lora_A__weight": A, "frist__lora_B__weight": B}, "not a layer of the model; did you mean"),
        (CONFIG, {"second__lora_A__weight": A, "second__lora_B__weight": B}, "has A of 'second' in the shape [6, 2]"),
        (None, PAIR, "does not say its alpha: adapter_config.json be"),
        ("{", {"first__lora_A__weight": A}, "is not JSON"),
        ('{"peft_type": "IA3"}', {"first__lora_A__weight": A}, "is IA3, expected LORA"),
        ('{"use_dora": true}', {"first__lora_A__weight": A}, "was trained with use_dora, which adds more"),
        (CONFIG, {"first__lora_magnitude_vector__weight": A}, "expected lora_A and lora_B alone: merge it in PEFT"),
        (CONFIG, {**PAIR, "head__weight": B}, "has 'head.weight', which "),
        (CONFIG, {**PAIR, "second__weight": A}, "in the shape [6, 2], ex"),
    ],
)  # fmt: skip
def test_files_that_do_not_fit(config, tensors, text, tmp_path):
    path = saved(tmp_path / "adapter", config, **tensors)
    with pytest.raises(ValueError, match=f"load_adapter: .*{re.escape(text)}"):
        onnxgrad.load_adapter(linear(), path)


def test_files_that_are_none(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"load_adapter: '.*none' does not exist, expected a PEFT folder or a .safetensors file"
    ):
        onnxgrad.load_adapter(linear(), tmp_path / "none")
    (tmp_path / "adapter_model.bin").write_bytes(b"pickle")
    with pytest.raises(
        ValueError, match=r"is a pickle of PyTorch, expected adapter_model.safetensors: save it by PEFT"
    ):
        onnxgrad.load_adapter(linear(), tmp_path)
    (tmp_path / "x.safetensors").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"load_adapter: '.*x.safetensors' is not a safetensors file"):
        onnxgrad.load_adapter(linear(), tmp_path / "x.safetensors")


def test_other_layers_than_there_are(tmp_path):
    onnxgrad.save_adapter(onnxgrad.lora(linear(), "first"), tmp_path / "adapter")
    with pytest.raises(
        ValueError, match=r"the model has adapters already, beside other layers than .*: 'second'; load it"
    ):
        onnxgrad.load_adapter(lora(), tmp_path / "adapter")


def test_places_that_are_none(tmp_path):
    with pytest.raises(
        ValueError, match=r"save_adapter: 'x.bin' ends with '.bin', expected .safetensors, .onnx_adapter"
    ):
        onnxgrad.save_adapter(lora(), tmp_path / "x.bin")
    with pytest.raises(ValueError, match=r"save_adapter: the model has no adapters, expected one that onnxgrad.lora"):
        onnxgrad.save_adapter(linear(), tmp_path / "x")
    for place in ("none/x", "none/x.safetensors", "none/x.onnx_adapter"):
        with pytest.raises(FileNotFoundError, match=r"the folder '.*none' to write 'x.* into does not exist"):
            onnxgrad.save_adapter(lora(), tmp_path / place)
