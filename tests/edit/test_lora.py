"""lora(): step 0 computes what the model did, training changes adapters alone, and names choose them."""

import re

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from tests.edit import adapted
from tests.edit.adapted import INPUTS, OUTPUTS, X, arrays, linear, model_of, run

import onnxgrad

FLOATING = adapted.floating()
QUANTIZED = adapted.quantized()


def trainer_of(model, **settings):
    return onnxgrad.Trainer(model, onnxgrad.losses.MSE("y"), onnxgrad.optim.SGD(0.02), **settings)


def batch(model, x):
    return {"x": x, "target": np.ones_like(run(model, x))}


@pytest.mark.parametrize("name", FLOATING)
def test_nothing_changes_before_training(name):
    model, x = FLOATING[name]
    found = onnxgrad.lora(model, "*", rank=2)
    assert np.array_equal(run(found, x), run(model, x))
    assert len(adapted.arrays(found)) > len(adapted.arrays(model))


@pytest.mark.parametrize("name", QUANTIZED)
def test_nothing_changes_before_training_of_quantized_weights(name):
    found = onnxgrad.lora(QUANTIZED[name], "layer")
    assert np.array_equal(run(found, X), run(QUANTIZED[name], X))
    trainer = trainer_of(found)
    assert list(trainer.parameters) == ["layer.lora_A.weight", "layer.lora_B.weight"]
    first = [trainer.step(batch(found, X)) for _ in range(3)]
    assert first[-1] < first[0]


@pytest.mark.parametrize("name", FLOATING)
def test_only_adapters_are_trained(name, tmp_path):
    model, x = FLOATING[name]
    trainer = trainer_of(onnxgrad.lora(model, "*", rank=2, alpha=2))
    losses = [trainer.step(batch(model, x)) for _ in range(4)]
    assert losses[-1] < losses[0]
    trainer.export(tmp_path / "trained.onnx")
    before, after = arrays(model), arrays(onnx.load(tmp_path / "trained.onnx"))
    assert all(np.array_equal(before[n], after[n]) for n in before)
    assert all(".lora_" in name for name in trainer.parameters)


def test_what_an_adapter_computes():
    """Against NumPy: x·W + (x·A)·B · alpha / rank."""
    found = adapted.perturbed(onnxgrad.lora(linear(), "first", rank=3, alpha=12))
    w = arrays(found)
    a, b = w["first.lora_A.weight"], w["first.lora_B.weight"]
    assert a.shape == (INPUTS, 3) and b.shape == (3, 8)
    hidden = np.maximum(X @ w["first.weight"] + X @ a @ b * 4, 0)
    assert np.allclose(run(found, X), hidden @ w["second.weight"], atol=1e-5)


def test_the_first_numbers():
    """As PEFT's: A uniform within 1 / √inputs, B 0; of an embedding A is 0. They depend on the seed alone."""
    large = model_of("y = MatMul(x, layer__weight)", layer__weight=np.zeros((INPUTS, 5000), np.float32))
    a = arrays(onnxgrad.lora(large, "layer", rank=500))["layer.lora_A.weight"]
    bound = INPUTS**-0.5
    assert np.abs(a).max() <= bound and np.allclose(a.std(), bound / 3**0.5, rtol=0.05)
    table = arrays(onnxgrad.lora(FLOATING["Gather"][0], "layer"))
    assert not table["layer.lora_embedding_A"].any() and table["layer.lora_embedding_B"].std() > 0.5
    same, other = (arrays(onnxgrad.lora(linear(), "first", seed=seed))["first.lora_A.weight"] for seed in (3, 4))
    assert np.array_equal(same, arrays(onnxgrad.lora(linear(), "first", seed=3))["first.lora_A.weight"])
    assert not np.array_equal(same, other)


def test_dropout_drops_in_training_alone():
    found = onnxgrad.lora(linear(), "first", dropout=0.5)
    assert np.array_equal(run(found, X), run(linear(), X))
    changed = adapted.perturbed(found)
    trainer = trainer_of(changed)
    data = batch(changed, X)
    assert trainer.step(data) != pytest.approx(trainer.evaluate([data])["loss"], rel=1e-3)
    plain = adapted.perturbed(onnxgrad.lora(linear(), "first"))
    assert trainer_of(plain).step(data) == pytest.approx(trainer_of(plain).evaluate([data])["loss"])


@pytest.mark.parametrize("dtype", [np.float16, "bfloat16"])
def test_half_weights_have_half_adapters(dtype):
    import ml_dtypes

    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    found = onnxgrad.lora(adapted.half(kind), "layer")
    types = {t.name: t.data_type for t in found.graph.initializer}
    assert types["layer.lora_A.weight"] == types["layer.weight"]


def test_a_head_is_trained_with_the_adapters():
    found = onnxgrad.lora(linear(), "first")
    trainer = trainer_of(found, trainable="second.*")
    assert set(trainer.parameters) == {"first.lora_A.weight", "first.lora_B.weight", "second.weight"}
    assert list(trainer_of(found, freeze="*lora_A*").parameters) == ["first.lora_B.weight"]


@pytest.mark.parametrize("opset", [6, 9, 13])
@pytest.mark.parametrize("dropout", [0, 0.2])
def test_old_opsets(opset, dropout):
    model = onnxgrad.lora(linear(opset), "first", dropout=dropout)
    assert np.allclose(run(model, X), run(linear(opset), X))
    trainer_of(model).step(batch(model, X))


def test_kinds_of_models(tmp_path):
    path = tmp_path / "model.onnx"
    onnx.save(linear(), path, save_as_external_data=True, size_threshold=0, location="weights")
    for given in (path, str(path), ir.load(path), linear()):
        found = onnxgrad.lora(given, "first")
        assert isinstance(found, ir.Model if isinstance(given, ir.Model) else onnx.ModelProto)
        assert "first.lora_A.weight" in trainer_of(found).parameters
    onnx.save(onnxgrad.lora(path, "first"), tmp_path / "elsewhere.onnx")
    assert np.array_equal(run(tmp_path / "elsewhere.onnx", X), run(linear(), X))


def test_a_weight_that_is_used_twice_has_one_adapter():
    square = adapted.weights(INPUTS, INPUTS)
    model = model_of("h = MatMul(x, layer__weight) y = MatMul(h, layer__weight)", layer__weight=square)
    found = adapted.perturbed(onnxgrad.lora(model, "layer"))
    assert sum(".lora_A" in name for name in arrays(found)) == 1
    assert np.allclose(run(onnxgrad.merge_lora(found), X), run(found, X), atol=1e-4)


def test_a_list_of_patterns_with_alternatives():
    """As `onnxgrad train --lora 'first|nothing' --lora second` gives it."""
    found = arrays(onnxgrad.lora(linear(), ["first|nothing", "second"], rank=1))
    assert {name.split(".")[0] for name in found if "lora_A" in name} == {"first", "second"}
    with pytest.raises(ValueError, match=re.escape("lora: no layer is named 'third' or 'fourth'")):
        onnxgrad.lora(linear(), ["first", "third|fourth"])


def test_a_table_that_is_also_the_last_layer():
    table = adapted.weights(9, 5)
    text = "h = Gather(table__weight, x) t = Transpose(table__weight) y = MatMul(h, t)"
    found = adapted.perturbed(onnxgrad.lora(model_of(text, table__weight=table), "table.weight"))
    names = {n for n in arrays(found) if "lora_A" in n or "embedding_A" in n}
    assert names == {"table.lora_embedding_A", "table.linear.lora_A.weight"}
    merged, x = onnxgrad.merge_lora(found), np.array([1, 8, 1])
    assert np.allclose(run(merged, x), run(found, x), atol=1e-4)
    assert len(merged.graph.initializer) == 2  # two weights now


@pytest.mark.parametrize(
    "targets, text",
    [
        ("*query*|*value*", "no layer is named '*query*' or '*value*'; there are 'first', 'second'"),
        ("frist", "no layer is named 'frist'; did you mean 'first'? Names are 'first', 'second'."),
        (["first", "third"], "no layer is named 'third'"),
        ([], "targets is empty, expected names or patterns such as 'first', 'second'"),
    ],
)  # fmt: skip
def test_names_that_name_nothing(targets, text):
    with pytest.raises(ValueError, match=re.escape(f"lora: {text}")):
        onnxgrad.lora(linear(), targets)


@pytest.mark.parametrize(
    "settings, text",
    [
        ({"rank": 0}, "rank is 0, expected a whole number of at least 1"),
        ({"alpha": -1}, "alpha is -1, expected a number above 0"),
        ({"dropout": 1}, "dropout is 1, expected a number of at least 0 and under 1"),
    ],
)
def test_wrong_settings(settings, text):
    with pytest.raises(ValueError, match=text):
        onnxgrad.lora(linear(), "first", **settings)


def test_layers_that_can_have_none():
    groups, _ = FLOATING["Conv in groups, dilated"]
    with pytest.raises(ValueError, match="'layer', which 'layer' names, can have no adapter: its convolution has 2 gr"):
        onnxgrad.lora(groups, "layer", rank=3)
    stack = model_of("y = MatMul(x, layer__weight)", layer__weight=adapted.weights(2, INPUTS, OUTPUTS))
    with pytest.raises(ValueError, match="it has 3 dimensions, expected 2"):
        onnxgrad.lora(stack, "layer")
    with pytest.raises(ValueError, match="the model has no weight of a product, a convolution or an embedding"):
        onnxgrad.lora(model_of("y = Relu(x)"))
    integers = model_of(
        "q, s, z = DynamicQuantizeLinear(x) p = MatMulInteger(q, layer__weight, z) c = Cast<to = 1>(p) y = Mul(c, s)",
        layer__weight=np.ones((INPUTS, 4), np.int8),
    )
    with pytest.raises(
        ValueError, match="'layer' can have none: MatMulInteger rounds what it multiplies, and passes no"
    ):
        onnxgrad.lora(integers, "*q_proj")


def test_no_adapters_on_adapters():
    with pytest.raises(ValueError, match="lora: the model has adapters already: train these"):
        onnxgrad.lora(onnxgrad.lora(linear(), "first"), "second")
