"""replace_head(): new last layers in models that nobody here wrote, and what training makes of them."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from click.testing import CliRunner
from onnxruntime import quantization
from tests.checks import raises
from tests.models.architectures import models, timm, transformers
from tests.torch_export import export
from torch import nn

import onnxgrad
from onnxgrad import losses, optim
from onnxgrad.cli import main

KERAS = Path(__file__).parents[1] / "data" / "keras"


def run(model, feeds, names=None):
    data = model.SerializeToString() if isinstance(model, onnx.ModelProto) else str(model)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    return onnxruntime.InferenceSession(data, options).run(names, feeds)


def head_of(model):
    noted = next(p.value for p in model.metadata_props if p.key == "onnxgrad.head")
    shapes = {t.name: list(t.dims) for t in model.graph.initializer}
    return {name: shapes[name] for name in eval(noted)}


def data_of_head(model):
    """What the head's product reads."""
    weight = next(iter(head_of(model)))
    return next(name for n in model.graph.node if weight in n.input for name in n.input if name != weight)


def dims(value):
    return [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]


class Logits(nn.Module):
    """A module of transformers, of tokens."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x).logits


SMALL = {"vocab_size": 50, "max_position_embeddings": 16}
BERT = {**SMALL, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
DISTILBERT = {**SMALL, "dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 32}
MODULES = {
    "mlp": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.ReLU(), nn.Linear(16, 10)), 8, "3"),
    "resnet18": (lambda: models.resnet18(num_classes=10), 32, "fc"),
    "mobilenet_v3_small": (lambda: models.mobilenet_v3_small(num_classes=10), 32, "classifier.3"),
    "squeezenet": (lambda: models.squeezenet1_1(num_classes=10), 32, "classifier.1"),
    "vit": (lambda: models.VisionTransformer(16, 8, 1, 2, 16, 32, num_classes=10), 16, "heads.head"),
    "convnext": (lambda: timm.create_model("test_convnext", num_classes=10), 32, "head.fc"),
    "bert": (
        lambda: Logits(transformers.BertForSequenceClassification(transformers.BertConfig(**BERT, num_labels=3))), 0,
        "module.classifier",
    ),
    "distilbert": (
        lambda: Logits(
            transformers.DistilBertForSequenceClassification(transformers.DistilBertConfig(**DISTILBERT, num_labels=1))
        ), 0, "module.classifier",
    ),
}  # fmt: skip
WAYS = [
    ("mlp", False), ("resnet18", False), ("mobilenet_v3_small", True), ("squeezenet", True), ("vit", True),
    ("vit", False), ("convnext", False), ("bert", True), ("bert", False), ("distilbert", False),
]  # fmt: skip


@pytest.mark.parametrize(
    "name, dynamo", [pytest.param(*way, marks=[] if way[0] == "mlp" else [pytest.mark.slow]) for way in WAYS]
)
def test_of_modules_of_pytorch(name, dynamo, tmp_path):
    make, size, layer = MODULES[name]
    torch.manual_seed(0)
    module = make().eval()
    x = torch.randn(4, 3, size, size) if size else torch.randint(1, 50, (4, 8))
    export(module, x, tmp_path / "model.onnx", dynamo=dynamo)
    new = onnxgrad.replace_head(tmp_path / "model.onnx", classes=2)
    onnx.checker.check_model(new, full_check=True)
    weight = next(iter(head_of(new).values()))
    assert list(head_of(new)) == [f"{layer}.weight", f"{layer}.bias"] and 2 in weight
    assert dims(new.graph.output[0]) == ["batch", 2]
    # The trunk is what it was, bit for bit.
    feeds, inner = {"x": x.numpy()}, data_of_head(new)
    before = run(onnxgrad.cut(tmp_path / "model.onnx", inner), feeds)[0]
    assert np.array_equal(run(onnxgrad.cut(new, inner), feeds)[0], before)
    # And the result is that of PyTorch's module with such a layer.
    arrays = {t.name: onnx.numpy_helper.to_array(t) for t in new.graph.initializer}
    torch_layer = module.get_submodule(layer)
    shape = (2, *torch_layer.weight.shape[1:])
    given = arrays[f"{layer}.weight"]
    given = given if given.shape == shape else given.T
    torch_layer.weight, torch_layer.bias = (
        nn.Parameter(torch.tensor(a.copy())) for a in (given, arrays[f"{layer}.bias"])
    )
    if name == "squeezenet":
        module.num_classes = 2
    expected = module(x).detach().numpy()
    np.testing.assert_allclose(run(new, feeds)[0], expected, rtol=1e-4, atol=1e-5)
    # Training the head alone lowers the loss, and moves nothing else.
    trainer = onnxgrad.Trainer(
        new, losses.CrossEntropy("y"), optim.AdamW(lr=1e-2), trainable="head", freeze_statistics=True
    )
    assert set(trainer.parameters) == set(head_of(new))
    batch = {"x": x.numpy(), "target": np.array([0, 1, 0, 1])}
    found = [float(trainer.step(batch)) for _ in range(8)]
    assert found[-1] < found[0]
    trainer.export(tmp_path / "trained.onnx")
    trained = run(onnxgrad.cut(tmp_path / "trained.onnx", inner), feeds)[0]
    assert np.array_equal(trained, before)
    # Everything may be trained, under the names of the module.
    everything = onnxgrad.Trainer(new, losses.CrossEntropy("y"), optim.AdamW())
    missing = {n for n, _ in module.named_parameters()} ^ set(everything.parameters)
    assert missing <= {"class_token"}  # which the older exporter folds, with or without a new head


TWO_LAYERS = """
<ir_version: 8, opset_import: ["" : 17]>
classifier (float[n, 4] x) => (float[n, 3] y) {
    a = MatMul(x, w1)
    h = Tanh(a)
    m = MatMul(h, w2)
    s = Add(m, b2)
    y = Softmax(s)
}
"""


def text_model(text=TWO_LAYERS, weights=None, **more):
    model = onnx.parser.parse_model(text)
    rng = np.random.default_rng(0)
    for name, shape in (weights or {"w1": (4, 8), "w2": (8, 3), "b2": (3,)} | more).items():
        array = rng.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


X = {"x": np.random.default_rng(1).standard_normal((5, 4)).astype(np.float32)}


def test_the_kind_of_model_that_comes_back():
    given = text_model()
    as_ir = onnxgrad.replace_head(ir.from_proto(given), 7)
    assert isinstance(as_ir, ir.Model) and as_ir.graph.initializers["w2"].shape == (8, 7)
    proto = onnxgrad.replace_head(given, 7)
    assert isinstance(proto, onnx.ModelProto) and run(proto, X)[0].shape == (5, 7)
    assert given == text_model()


def test_new_weights_are_those_of_torchs_linear():
    new = onnxgrad.replace_head(text_model(), 5000)
    arrays = {t.name: onnx.numpy_helper.to_array(t) for t in new.graph.initializer}
    for name in ("w2", "b2"):
        assert np.abs(arrays[name]).max() <= 1 / np.sqrt(8) and np.abs(arrays[name]).max() > 0.99 / np.sqrt(8)
        assert abs(arrays[name].mean()) < 0.02 and arrays[name].dtype == np.float32


def test_the_seed_decides_about_the_weights():
    of = [onnxgrad.replace_head(text_model(), 7, seed=seed).SerializeToString() for seed in (0, 0, 1)]
    assert of[0] == of[1] != of[2]


def test_weights_in_a_file_of_their_own(tmp_path, monkeypatch):
    path = tmp_path / "model.onnx"
    model = text_model(weights={"w1": (4, 2048), "w2": (2048, 3), "b2": (3,)})
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    monkeypatch.chdir(tmp_path.parent)
    new = onnxgrad.replace_head(path, 7)  # stands for itself
    assert run(new, X)[0].shape == (5, 7)
    as_ir = onnxgrad.replace_head(ir.load(path), 7)
    assert isinstance(as_ir.graph.initializers["w1"].const_value, ir.ExternalTensor)
    onnxgrad.Trainer(new, losses.NLL("y"), optim.SGD(), trainable="head")


def test_a_weight_that_is_shared_stays_where_it_is():
    text = """
    <ir_version: 8, opset_import: ["" : 17]>
    tied (int64[n, 5] x) => (float[n, 5, 9] y) { e = Gather(table, x) t = Transpose(table) y = MatMul(e, t) }
    """
    new = onnxgrad.replace_head(text_model(text, {"table": (9, 4)}), 2)
    assert head_of(new) == {"head.weight": [4, 2]} and [t.name for t in new.graph.initializer] == [
        "table",
        "head.weight",
    ]
    assert dims(new.graph.output[0]) == ["n", 5, 2]


@pytest.mark.parametrize("name", ["mlp", "cnn", "cnn_keras2", "lstm", "attention"])
def test_of_keras(name):
    new = onnxgrad.replace_head(KERAS / f"{name}.onnx", 5)
    x = np.load(KERAS / f"{name}.npz")["x"]
    names = [i.name for i in new.graph.input]
    assert run(new, {names[0]: x})[0].shape[-1] == 5
    onnxgrad.Trainer(new, losses.MSE("y"), optim.SGD(), trainable="head")


@pytest.mark.slow
def test_of_scikit_learn(tmp_path):
    script = Path(__file__).parents[1] / "models" / "sklearn_models.py"
    subprocess.run([sys.executable, str(script), str(tmp_path)], check=True)
    x = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)
    # The labels are those of the old classes.
    for name in ("MLPClassifier", "MLPClassifier of texts", "LogisticRegression", "StandardScaler of texts", "PCA"):
        new = onnxgrad.replace_head(tmp_path / f"{name}.onnx", 5)
        (found,) = run(new, {"X": x})
        assert found.shape == (6, 5) and np.allclose(found.sum(1), 1, atol=1e-5)
    assert run(onnxgrad.replace_head(tmp_path / "MLPRegressor.onnx", 2), {"X": x})[0].shape == (6, 2)
    with raises(
        ValueError,
        "replace_head: the number of classes in 'probabilities' cannot change, since Concat (node 'Concat') appends "
        "others to them; to end the model before that: output='out_activations_result'",
    ):
        onnxgrad.replace_head(tmp_path / "MLPClassifier of two.onnx", 3)
    new = onnxgrad.replace_head(tmp_path / "MLPClassifier of two.onnx", 3, output="out_activations_result")
    assert [o.name for o in new.graph.output] == ["out_activations_result"] and run(new, {"X": x})[0].shape == (6, 3)
    with raises(
        ValueError,
        "replace_head: TreeEnsembleClassifier (node 'TreeEnsembleClassifier') has no weights with a gradient: train "
        "trees with the library that made them; onnxgrad.cut() and onnxgrad.join() append a head to the part before "
        "them",
    ):
        onnxgrad.replace_head(tmp_path / "RandomForest.onnx", 2)


OLD = """
<ir_version: 4, opset_import: ["" : 9]>
old (float[n, 3, 8, 8] x) => (float[n, 6] y) {
    c = Conv<kernel_shape = [3, 3]>(x, w, b)
    r = Relu(c)
    p = GlobalAveragePool(r)
    f = Reshape(p, shape)
    y = Softmax(f)
}
"""


def test_of_an_old_opset_whose_reshape_states_the_number_of_classes():
    model = text_model(OLD, {"w": (6, 3, 3, 3), "b": (6,)})
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([-1, 6]), "shape"))
    new = onnxgrad.replace_head(model, 4)
    assert new.opset_import[0].version == 9 and dims(new.graph.output[0]) == ["n", 4]
    x = np.random.default_rng(0).standard_normal((2, 3, 8, 8)).astype(np.float32)
    assert run(new, {"x": x})[0].shape == (2, 4)
    trainer = onnxgrad.Trainer(new, losses.NLL("y"), optim.SGD(lr=0.1), trainable="head")
    assert set(trainer.parameters) == {"w", "b"}  # also after the conversion of the opset


def test_numbers_for_each_class_other_than_a_bias():
    for node in ("y = Mul(s, scale)", "y = Add(s, scale)"):
        model = text_model(TWO_LAYERS.replace("y = Softmax(s)", node), scale=(3,))
        kind = node[4:7]
        with raises(
            ValueError,
            f"replace_head: the number of classes in 'y' cannot change, since {kind} (node '{kind}_4') takes 'scale', "
            "which has numbers for each of 3; to end the model before that: output='s'",
        ):
            onnxgrad.replace_head(model, 2)


def test_a_shape_that_is_computed_with_the_number_of_classes_in_it():
    text = """
    <ir_version: 8, opset_import: ["" : 17]>
    m (float[n, 4] x) => (float[n, 1, 3] y) {
        a = MatMul(x, w)
        s = Shape<start = 0, end = 1>(x)
        rest = Constant<value_ints = [1, 3]>()
        shape = Concat<axis = 0>(s, rest)
        y = Reshape(a, shape)
    }
    """
    new = onnxgrad.replace_head(text_model(text, {"w": (4, 3)}), 2)
    assert run(new, X)[0].shape == (5, 1, 2)


SQUEEZED = """
<ir_version: 8, opset_import: ["" : 17]>
m (float[n, 4] x) => (float[n] y) {
    a = Gemm(x, w, b)
    axes = Constant<value_ints = [1]>()
    s = Squeeze(a, axes)
    y = Sigmoid(s)
}
"""


def test_one_number_that_is_squeezed_becomes_several():
    model = text_model(SQUEEZED, {"w": (4, 1), "b": (1,)})
    assert run(onnxgrad.replace_head(model, 1), X)[0].shape == (5,)
    new = onnxgrad.replace_head(model, 3)
    assert run(new, X)[0].shape == (5, 3) and dims(new.graph.output[0]) == ["n", 3]


@pytest.mark.slow
@pytest.mark.parametrize("dynamo", [True, False])
def test_a_segmentation_keeps_its_size(dynamo, tmp_path):
    module = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(), nn.Conv2d(4, 21, 1), nn.Upsample(scale_factor=2.0))
    x = torch.randn(2, 3, 8, 8)
    new = onnxgrad.replace_head(export(module.eval(), x, tmp_path / "model.onnx", dynamo=dynamo), 5)
    assert run(new, {"x": x.numpy()})[0].shape == (2, 5, 8, 8)


TWO_OUTPUTS = """
<ir_version: 8, opset_import: ["" : 17]>
m (float[n, 4] x) => (float[n, 3] logits, float[n, 3] p, int64[n, 1] best, float[n, 2] other) {
    h = Relu(x)
    logits = MatMul(h, w)
    p = Softmax(logits)
    best = ArgMax<axis = 1>(p)
    other = MatMul(h, v)
}
"""


def test_several_outputs():
    model = text_model(TWO_OUTPUTS, {"w": (4, 3), "v": (4, 2)})
    with raises(
        ValueError, "replace_head: name the output whose head to replace with `output`: 'logits', 'p', 'other'"
    ):
        onnxgrad.replace_head(model, 7)
    shapes = [a.shape for a in run(onnxgrad.replace_head(model, 7, output="logits"), X)]
    assert shapes == [(5, 7), (5, 7), (5, 1), (5, 2)]
    shapes = [a.shape for a in run(onnxgrad.replace_head(model, 7, output="other"), X)]
    assert shapes == [(5, 3), (5, 3), (5, 1), (5, 7)]
    with raises(
        ValueError, "replace_head: output names 'logit', which no node of the model computes; did you mean 'logits'?"
    ):
        onnxgrad.replace_head(model, 7, output="logit")
    with raises(
        ValueError,
        "replace_head: the output 'best' holds int64, expected scores, which floating-point numbers are: 'logits', "
        "'p', 'other'",
    ):
        onnxgrad.replace_head(model, 7, output="best")


def test_a_value_inside_becomes_the_output():
    new = onnxgrad.replace_head(text_model(), 7, output="s")
    assert [o.name for o in new.graph.output] == ["s"] and run(new, X)[0].shape == (5, 7)


def test_outputs_that_are_more_than_a_vector():
    text = """
    <ir_version: 8, opset_import: ["" : 17]>
    m (float[n, 4] x) => (float[n, 8, 2] y) {
        a = MatMul(x, w) shape = Constant<value_ints = [-1, 8, 2]>() r = Reshape(a, shape) y = Sigmoid(r)
    }
    """
    model = text_model(text, {"w": (4, 16)})
    new = onnxgrad.replace_head(model, shape=[-1, 17, 2])
    assert run(new, X)[0].shape == (5, 17, 2) and dims(new.graph.output[0]) == ["n", 17, 2]
    assert run(onnxgrad.replace_head(text_model(), shape=[-1, 17, 2]), X)[0].shape == (5, 17, 2)
    with raises(
        ValueError,
        "replace_head: the number of classes in 'y' cannot change, since Reshape (node 'Reshape_2') makes [?, 8, 2] of "
        "[n, 16]: `shape` says what the result should be; to end the model before that: output='a'",
    ):
        onnxgrad.replace_head(model, 3)


LAYERS = """
head (float[n, 8] x, float[8, 6] w, float[6] b, float[6, 2] w2) => (float[n, 2] scores) {
    p = MatMul(x, w)
    q = Add(p, b)
    r = Relu(q)
    scores = MatMul(r, w2)
}
"""


def test_layers_of_ones_own(tmp_path):
    new = onnxgrad.replace_head(text_model(), layers=LAYERS)
    onnx.checker.check_model(new, full_check=True)
    assert head_of(new) == {"w": [8, 6], "b": [6], "w2": [6, 2]}
    arrays = {t.name: onnx.numpy_helper.to_array(t) for t in new.graph.initializer}
    assert not arrays["b"].any() and 0 < np.abs(arrays["w"]).max() <= 1 / np.sqrt(8)
    hidden = run(onnxgrad.cut(text_model(), "h"), X)[0]
    expected = np.maximum(hidden @ arrays["w"], 0) @ arrays["w2"]
    np.testing.assert_allclose(run(new, X)[0], expected, rtol=1e-5, atol=1e-6)
    trainer = onnxgrad.Trainer(new, losses.CrossEntropy("scores"), optim.AdamW(lr=0.05), trainable="head")
    batch = {**X, "target": np.array([0, 1, 0, 1, 1])}
    found = [float(trainer.step(batch)) for _ in range(20)]
    assert found[-1] < found[0]
    onnx.save(new, tmp_path / "head.onnx")
    again = onnxgrad.replace_head(tmp_path / "head.onnx", 4)
    assert list(head_of(again)) == ["w2"]


def test_layers_that_do_not_fit():
    with raises(
        ValueError,
        "replace_head: layers: 'h' of the first model is float[n, 8], 'x' of the second takes float[n, 9]: expected "
        "the same shape",
    ):
        onnxgrad.replace_head(text_model(), layers=LAYERS.replace("8", "9"))
    with raises(
        ValueError,
        "replace_head: layers have an input 'w2' of the shape ['n', 2], expected sizes: inputs but the first become "
        "new weights",
    ):
        onnxgrad.replace_head(text_model(), layers=LAYERS.replace("6, 2", "n, 2"))
    with pytest.raises(ValueError, match=r"replace_head: layers are not ONNX text: .*Expected character"):
        onnxgrad.replace_head(text_model(), layers=LAYERS.replace("{", "{{"))


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quantized")
    onnx.save(text_model(TWO_LAYERS.replace("17", "21").replace("version: 8", "version: 10")), folder / "plain.onnx")

    class Samples(quantization.CalibrationDataReader):
        def __init__(self):
            self.left = [X, X]

        def get_next(self):
            return self.left.pop() if self.left else None

    for name, how in (("qdq", quantization.QuantFormat.QDQ), ("integers", quantization.QuantFormat.QOperator)):
        quantization.quantize_static(folder / "plain.onnx", folder / f"{name}.onnx", Samples(), quant_format=how)
    return folder


def test_a_quantized_head_becomes_one_of_floating_point_numbers(quantized):
    new = onnxgrad.replace_head(quantized / "qdq.onnx", 7)
    assert head_of(new) == {"w2": [8, 7], "b2": [7]}
    assert run(new, X)[0].shape == (5, 7)
    kinds = [n.op_type for n in new.graph.node]
    assert kinds[-3:] == ["MatMul", "Add", "Softmax"] and "DequantizeLinear" in kinds
    with pytest.raises(ValueError, match="multiplies integers, whose weights cannot be trained: replace the head of"):
        onnxgrad.replace_head(quantized / "integers.onnx", 7)


def test_models_without_a_head():
    text = '<ir_version: 8, opset_import: ["" : 17]> m (float[n, 4] x) => (float[n, 4] y) { h = Relu(x) y = Tanh(h) }'
    with raises(
        ValueError,
        "replace_head: no product or convolution with weights is before 'y', which Tanh (node 'Tanh_1') computes, so "
        "that there is no head to replace: onnxgrad.join() appends one",
    ):
        onnxgrad.replace_head(onnx.parser.parse_model(text), 2)
    residual = TWO_LAYERS.replace("y = Softmax(s)", "y = Add(s, h)").replace("[n, 3] y", "[n, 8] y")
    model = text_model(residual, {"w1": (4, 8), "w2": (8, 8), "b2": (8,)})
    with raises(
        ValueError, "replace_head: 'y' has 2 heads, 'a', 'm': name the result of the one to replace with `output`"
    ):
        onnxgrad.replace_head(model, 2)
    assert run(onnxgrad.replace_head(model, 2, output="m"), X)[0].shape == (5, 2)
    residual = TWO_LAYERS.replace("y = Softmax(s)", "y = Add(s, x)").replace("[n, 3] y", "[n, 4] y")
    with raises(
        ValueError,
        "replace_head: the number of classes in 'y' cannot change, since Add (node 'Add_4') takes 'x', which has "
        "numbers for each of 4; to end the model before that: output='s'",
    ):
        onnxgrad.replace_head(text_model(residual, {"w1": (4, 8), "w2": (8, 4), "b2": (4,)}), 2)


@pytest.mark.parametrize(
    "arguments, text",
    [
        ({}, "expected one of classes, shape and layers"),
        ({"classes": 2, "shape": [-1, 2]}, "expected one of classes, shape and layers"),
        ({"classes": 0}, "classes is 0, expected a number of at least 1"),
        ({"classes": 2.5}, "classes is 2.5, expected a number of at least 1"),
        ({"shape": [17, 2]}, "shape is [17, 2], expected -1 for the examples and sizes for the others, [-1, 17, 2]"),
    ],
)
def test_wrong_arguments(arguments, text):
    with raises(ValueError, f"replace_head: {text}"):
        onnxgrad.replace_head(text_model(), **arguments)


def test_the_head_may_have_settings_of_its_own():
    new = onnxgrad.replace_head(text_model(), 2, output="s")
    optimizer = optim.SGD(lr=0.0, groups={"head": {"lr": 0.1}})
    trainer = onnxgrad.Trainer(new, losses.CrossEntropy("s"), optimizer)
    before = {name: array.copy() for name, array in trainer.parameters.items()}
    trainer.step({**X, "target": np.array([0, 1, 0, 1, 1])})
    moved = {name for name, array in trainer.parameters.items() if not np.array_equal(array, before[name])}
    assert moved == {"w2", "b2"}
    frozen = onnxgrad.Trainer(new, losses.CrossEntropy("s"), optim.SGD(), freeze="head")
    assert list(frozen.parameters) == ["w1"]
    gradient = onnxgrad.gradient(new, wrt="head", of="s")
    assert [o.name for o in gradient.graph.output] == ["s", "w2_grad", "b2_grad"]


def command(*arguments):
    return CliRunner().invoke(main, [str(a) for a in arguments])


@pytest.mark.slow
def test_on_the_command_line(tmp_path):
    onnx.save(text_model(TWO_LAYERS.replace("y = Softmax(s)", "y = Identity(s)")), tmp_path / "model.onnx")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 4)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x, target=(x[:, 0] > 0).astype(np.int64))

    def train(name, *more):
        return command(
            "train", tmp_path / "model.onnx", "--data", tmp_path / "data.npz", "--loss", "cross-entropy:y",
            "--new-head", 2, "--trainable", "head", "--lr", "0.05", "-o", tmp_path / name, *more,
        )  # fmt: skip

    whole = train("whole.onnx", "--epochs", 2)
    assert whole.exit_code == 0, whole.output
    assert "new head: w2 [8, 2], b2 [2]" in whole.output
    assert train("half.onnx", "--epochs", 1).exit_code == 0
    resumed = train("half.onnx", "--epochs", 2, "--resume", tmp_path / "half.safetensors")
    assert resumed.exit_code == 0, resumed.output
    assert (tmp_path / "half.onnx").read_bytes() == (tmp_path / "whole.onnx").read_bytes()
    old = {t.name: onnx.numpy_helper.to_array(t) for t in text_model().graph.initializer}
    new = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(tmp_path / "whole.onnx").graph.initializer}
    assert np.array_equal(old["w1"], new["w1"]) and new["w2"].shape == (8, 2)
    shown = command("inspect", tmp_path / "whole.onnx")
    assert "head: w2, b2; `--trainable head` trains it alone" in shown.output
    refused = train("other.onnx", "--resume", tmp_path / "half.safetensors", "--new-head", 3)
    assert refused.exit_code == 2 and "expected float32[8, 3]" in refused.output


def test_layers_with_a_gradient():
    """ONNX's Gradient still names the value that it starts from, which is called as in the model now."""
    old = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> g (float[N, 2] x) => (float[N, 1] y) '
        "<float[2, 2] w = {1, 2, 3, 4}, float[2, 1] v = {1, 1}> { h = MatMul(x, w) y = MatMul(h, v) }"
    )
    layers = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21, "ai.onnx.preview.training" : 1]> '
        "l (float[N, 2] f) => (float[N, 2] d) { s = Mul(f, f) "
        'd = ai.onnx.preview.training.Gradient <xs = ["f"], y = "s"> (f) }'
    )
    x = np.array([[1, -2]], np.float32)
    (d,) = onnxgrad.session(onnxgrad.replace_head(old, layers=layers)).run(None, {"x": x})
    np.testing.assert_allclose(d, 2 * x @ np.array([[1, 2], [3, 4]]), rtol=1e-6)
