"""quantize(): by onnxruntime's tools and of weights alone, what it refuses, and training of what it makes."""

import logging
import tempfile

import numpy as np
import onnx
import onnx_ir
import onnxruntime
import pytest
import torch
from onnx import numpy_helper, parser
from tests.checks import raises
from tests.torch_export import export

import onnxgrad
from onnxgrad.train import losses, optim

RNG = np.random.default_rng(0)
NETWORK = """
<ir_version: 8, opset_import: ["" : 17]>
network (float[batch, 3, 8, 8] x) => (float[batch, 5] y)
{
    c = Conv <pads = [1, 1, 1, 1]> (x, conv_weight)
    n = BatchNormalization (c, norm_scale, norm_bias, norm_mean, norm_variance)
    r = Relu(n)
    p = GlobalAveragePool(r)
    f = Flatten(p)
    y = Gemm(f, head_weight, head_bias)
}
"""
X = RNG.standard_normal((64, 3, 8, 8)).astype(np.float32)
DATA = [{"x": X[:32], "target": np.zeros(32)}, {"x": X[32:], "target": np.zeros(32)}]  # a target is left out
INTEGER_KERNELS = {"QLinearConv", "QGemm"}


def network():
    random = np.random.default_rng(1)
    model = parser.parse_model(NETWORK)
    shapes = {"conv_weight": (16, 3, 3, 3), "norm_scale": (16,), "norm_bias": (16,), "norm_mean": (16,),
              "norm_variance": (16,), "head_weight": (16, 5), "head_bias": (5,)}  # fmt: skip
    for name, shape in shapes.items():
        array = random.standard_normal(shape) / np.sqrt(max(1, np.prod(shape[1:])))
        array = 1 + np.abs(array) if "scale" in name or "variance" in name else array
        model.graph.initializer.append(numpy_helper.from_array(array.astype(np.float32), name))
    return model


def run(model, feeds, folder=None):
    """What onnxruntime computes; optimized, if there is a folder, and then also the operators that it does so by."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    if folder is None:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    else:
        options.optimized_model_filepath = str(folder / "optimized.onnx")
    model = model.SerializeToString() if isinstance(model, onnx.ModelProto) else str(model)
    result = onnxruntime.InferenceSession(model, options).run(None, feeds)[0]
    nodes = [] if folder is None else onnx.load(options.optimized_model_filepath).graph.node
    return result, {node.op_type for node in nodes}


def types(model):
    return {t.name: onnx.TensorProto.DataType.Name(t.data_type) for t in model.graph.initializer}


@pytest.mark.parametrize(
    ("settings", "far"),
    [({}, 0.02), ({"weights": "uint8", "per_channel": False}, 0.02), ({"activations": "int8"}, 0.02)],
    ids=["default", "uint8", "int8"],
)
def test_integer_kernels_run_it(settings, far, tmp_path):
    model = network()
    quantized = onnxgrad.quantize(model, DATA, **settings)
    onnx.checker.check_model(quantized, full_check=True)
    (found, kernels), (want, _) = run(quantized, {"x": X}, tmp_path), run(model, {"x": X})
    assert kernels >= INTEGER_KERNELS
    assert abs(found - want).max() < far * abs(want).max()
    kind = settings.get("weights", "int8").upper()
    found = types(quantized)
    assert {found["conv_weight_quantized"], found["head_weight_quantized"]} == {kind}
    assert found["head_bias_quantized"] == found["norm_bias_quantized"] == "INT32"
    assert {o.domain for o in quantized.opset_import} == {""} and not quantized.metadata_props
    scales = {t.name: t.dims for t in quantized.graph.initializer if t.name.endswith("weight_scale")}
    assert list(map(len, scales.values())) == [int(settings.get("per_channel", True))] * 2


@pytest.mark.parametrize(
    ("weights", "activations", "far"), [("int4", "uint8", 0.3), ("int8", "int16", 0.02), ("uint4", "uint16", 0.3)]
)
def test_types_that_need_a_newer_opset(weights, activations, far):
    model = network()
    quantized = onnxgrad.quantize(model, DATA, weights, activations)
    onnx.checker.check_model(quantized, full_check=True)
    (found, _), (want, _) = run(quantized, {"x": X}), run(model, {"x": X})
    assert abs(found - want).max() < far * abs(want).max()
    assert types(quantized)["conv_weight_quantized"] == weights.upper()
    assert types(quantized)["y_zero_point"] == activations.upper()


@pytest.mark.parametrize(
    ("weights", "settings", "far"),
    [
        ("int8", {}, 0.01), ("uint8", {"per_channel": False}, 0.02), ("int4", {"block_size": 16}, 0.15),
        ("uint4", {"block_size": 16}, 0.15),
    ],
)  # fmt: skip
def test_weights_alone(weights, settings, far):
    """No data is needed; the scales of 4 bits are those of blocks."""
    model = network()
    quantized = onnxgrad.quantize(model, weights=weights, activations=None, **settings)
    onnx.checker.check_model(quantized, full_check=True)
    (found, _), (want, _) = run(quantized, {"x": X}), run(model, {"x": X})
    assert abs(found - want).max() < far * abs(want).max()
    kinds = types(quantized)
    assert kinds["conv_weight_quantized"] == kinds["head_weight_quantized"] == weights.upper()
    assert [node.op_type for node in quantized.graph.node].count("DequantizeLinear") == 2
    assert "QuantizeLinear" not in {node.op_type for node in quantized.graph.node}
    (head,) = (n for n in quantized.graph.node if n.name == "head_weight_DequantizeLinear")
    given = {a.name: a.i for a in head.attribute}
    assert given == ({"axis": 0, "block_size": 16} if "4" in weights else {} if settings else {"axis": 1})


def test_nothing_is_changed_printed_or_left(capfd, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model, handlers, level = network(), list(logging.root.handlers), logging.root.manager.disable
    loaded = onnx_ir.from_proto(model)
    before, before_loaded = model.SerializeToString(), onnx_ir.to_proto(loaded).SerializeToString()
    assert isinstance(onnxgrad.quantize(loaded, DATA), onnx_ir.Model)
    onnxgrad.quantize(model, DATA)
    assert model.SerializeToString() == before and onnx_ir.to_proto(loaded).SerializeToString() == before_loaded
    assert capfd.readouterr() == ("", "") and not list(tmp_path.iterdir())
    assert logging.root.handlers == handlers and logging.root.manager.disable == level


@pytest.mark.parametrize("pattern", ["head_*", "head_weight", "Gemm*"])
def test_what_is_left_out(pattern, tmp_path):
    quantized = onnxgrad.quantize(network(), DATA, exclude=pattern)
    kinds = types(quantized)
    assert kinds["head_weight"] == "FLOAT" and kinds["conv_weight_quantized"] == "INT8"
    quantized = onnxgrad.quantize(network(), activations=None, exclude=[pattern])
    assert types(quantized)["head_weight"] == "FLOAT" and types(quantized)["conv_weight_quantized"] == "INT8"


def test_what_is_refused():
    model = network()
    cases = [
        (ValueError, "quantize: weights is 'int3', expected one of 'int8', 'uint8', 'int4', 'uint4'", (DATA, "int3")),
        (
            ValueError,
            "quantize: activations is 'int4', expected None or one of 'uint8', 'int8', 'uint16', 'int16'",
            (DATA, "int8", "int4"),
        ),
        (
            ValueError,
            "quantize: data is missing: activations are calibrated on it; activations=None quantizes weights alone",
            (),
        ),
        (ValueError, "quantize: data has no batches", ([],)),
        (TypeError, "quantize: a batch is a ndarray, expected a dict of arrays by input name", (X,)),
        (
            ValueError,
            "quantize: a batch lacks 'x', an input of the model; did you mean 'X'?",
            ([{"X": X}],),
        ),
        (TypeError, "quantize: a batch's x holds complex64, expected float32", ([{"x": X.astype(np.complex64)}],)),
        (
            ValueError,
            "quantize: onnxruntime cannot quantize the model: ONNXRuntime quantization doesn't support data "
            "format:activation_type=QuantType.QInt8, weight_type=QuantType.QUInt8",
            (DATA, "uint8", "int8"),
        ),
    ]
    for kind, sentence, arguments in cases:
        with raises(kind, sentence):
            onnxgrad.quantize(model, *arguments)
    with raises(ValueError, "quantize: block_size is 0, expected a number of weights"):
        onnxgrad.quantize(model, activations=None, block_size=0)
    with raises(
        ValueError,
        "quantize: exclude names 'haed_weight', which is neither a node nor a weight; did you mean 'head_weight'?",
    ):
        onnxgrad.quantize(model, DATA, exclude="haed_weight")
    with raises(ValueError, "quantize: the model is quantized already: a Trainer trains it as it is"):
        onnxgrad.quantize(onnxgrad.quantize(model, DATA), DATA)
    with raises(ValueError, "quantize: a batch's x has shape [64, 2, 8, 8], expected ['batch', 3, 8, 8]"):
        onnxgrad.quantize(model, [{"x": X[:, :2]}])
    plain = parser.parse_model('<ir_version: 10, opset_import: ["" : 21]> m (float[N] x) => (float[N] y) {y = Erf(x)}')
    with raises(ValueError, "quantize: the model has no product or convolution whose weights can be quantized"):
        onnxgrad.quantize(plain, activations=None)
    with raises(ValueError, "quantize: the model has nothing that onnxruntime quantizes"):
        onnxgrad.quantize(plain, [{"x": X[0, 0, 0]}])


def test_tensors_of_torch_calibrate():
    given = onnxgrad.quantize(network(), [{"x": torch.from_numpy(X)}])
    assert given.SerializeToString() == onnxgrad.quantize(network(), [{"x": X}]).SerializeToString()


def test_weights_that_are_zero_or_float16():
    """Any scale will do for zeros, and none is too small for its type."""
    text = '<ir_version: 10, opset_import: ["" : 21]> m (float16[N, 64] x) => (float16[N, 4] y) { y = MatMul(x, w) }'
    for w in (np.zeros((64, 4)), RNG.standard_normal((64, 4)), np.full((64, 4), 1e-7)):
        model = parser.parse_model(text)
        model.graph.initializer.append(numpy_helper.from_array(w.astype(np.float16), "w"))
        for kind in ("int8", "uint4"):
            quantized = onnxgrad.quantize(model, weights=kind, activations=None)
            x = RNG.standard_normal((3, 64)).astype(np.float16)
            far = abs(run(quantized, {"x": x})[0] - x.astype(np.float32) @ w.astype(np.float16)).max()
            assert far < (2 if "4" in kind else 0.1) * max(w.max(), 1e-3)


class Mlp(torch.nn.Module):
    """A transformer's MLP: x + down(gelu(up(norm(x))))."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = torch.nn.LayerNorm(32), torch.nn.Linear(32, 128), torch.nn.Linear(128, 32)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weights", "activations"), [("int8", None), ("int4", None), ("int8", "uint8"), ("int4", "int8")]
)
def test_training_recovers_what_rounding_lost(weights, activations, tmp_path):
    """Of an MLP of a transformer, taught by itself before it was quantized."""
    torch.manual_seed(0)
    module = Mlp()
    model = export(module.eval(), torch.randn(2, 5, 32), tmp_path / "m.onnx")
    x = torch.randn(256, 5, 32)
    batch = {"x": x.numpy(), "target": module(x).detach().numpy()}
    quantized = onnxgrad.quantize(model, [batch], weights, activations)
    trainer = onnxgrad.Trainer(quantized, losses.MSE("y"), optim.Adam(1e-3))
    assert set(trainer.parameters) == {name for name, _ in module.named_parameters()}
    before = trainer.evaluate([batch])["loss"]
    schedule = onnxgrad.schedules.Cosine(150)
    trainer = onnxgrad.Trainer(quantized, losses.MSE("y"), optim.Adam(1e-3), schedule=schedule)
    for _ in range(150):
        trainer.step(batch)
    after = trainer.evaluate([batch])["loss"]
    assert after < (0.7 if weights == "int4" else 1) * before  # of 8 bits, little was lost
    trainer.export(tmp_path / "trained.onnx")
    found, _ = run(tmp_path / "trained.onnx", {"x": batch["x"]})
    assert np.mean((found - batch["target"]) ** 2) == pytest.approx(after, rel=0.1)
