"""onnxgrad quantize: what it writes, shows and refuses; the result is trained by onnxgrad train."""

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import numpy_helper, parser

from onnxgrad.cli import main

RNG = np.random.default_rng(0)


@pytest.fixture
def folder(tmp_path):
    model = parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 21]>
        m (float[batch, 16] x) => (float[batch, 3] y) { h = Gemm(x, w, b)  r = Relu(h)  y = MatMul(r, v) }""")
    for name, shape in {"w": (16, 32), "b": (32,), "v": (32, 3)}.items():
        array = RNG.standard_normal(shape).astype(np.float32) / 4
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    onnx.save(model, tmp_path / "m.onnx")
    x = RNG.standard_normal((100, 16)).astype(np.float32)
    np.savez(tmp_path / "train.npz", x=x, target=RNG.integers(0, 3, 100), other=x)
    return tmp_path


def run(folder, *arguments, command="quantize", code=0):
    given = [str(folder / a) if a.endswith((".onnx", ".npz")) else a for a in arguments]
    result = CliRunner().invoke(main, [command, *given])
    assert result.exit_code == code, result.output
    return result.output


def kinds(path):
    return {t.name: onnx.TensorProto.DataType.Name(t.data_type) for t in onnx.load(path).graph.initializer}


def test_before_and_after(folder):
    loss = ("--loss", "cross-entropy:y")
    told = run(folder, "m.onnx", "--data", "train.npz", *loss, "--metric", "accuracy", "-o", "q.onnx")
    heading, *rows = [line.split() for line in told.splitlines() if len(line.split()) > 1]
    assert heading == ["model", "size", "loss", "accuracy"]
    (name, *_, before, right), (other, *_, after, still) = rows
    assert (name, other) == (str(folder / "m.onnx"), str(folder / "q.onnx"))
    assert float(after) == pytest.approx(float(before), rel=0.05) and abs(float(right) - float(still)) < 0.1
    assert kinds(folder / "q.onnx")["w_quantized"] == "INT8"
    run(folder, "q.onnx", "--data", "train.npz", *loss, "-o", "t.onnx", command="train")
    assert kinds(folder / "t.onnx") == kinds(folder / "q.onnx")


def test_its_options(folder):
    told = run(folder, "m.onnx", "--activations", "none", "--weights", "int4", "--exclude", "v", "-o", "q.onnx")
    assert len(told.split()) == 9  # sizes alone
    found = kinds(folder / "q.onnx")
    assert (found["w_quantized"], found["v"]) == ("INT4", "FLOAT")
    run(
        folder, "m.onnx", "--data", "train.npz", "--per-tensor", "--weights", "uint8", "--examples", "40",
        "--batch-size", "20", "-o", "q.onnx",
    )  # fmt: skip
    (scale,) = (t for t in onnx.load(folder / "q.onnx").graph.initializer if t.name == "w_scale")
    assert not scale.dims and kinds(folder / "q.onnx")["w_quantized"] == "UINT8"


def test_batches_of_the_only_size(folder):
    """The last one, which is smaller, is left out."""
    model = onnx.load(folder / "m.onnx")
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 8
    onnx.save(model, folder / "m.onnx")
    run(folder, "m.onnx", "--data", "train.npz", "--loss", "cross-entropy:y", "-o", "q.onnx")
    assert kinds(folder / "q.onnx")["w_quantized"] == "INT8"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["m.onnx", "-o", "q.onnx"],
            "--data is missing: activations are calibrated on examples; --activations none quantizes weights alone",
        ),
        (
            ["m.onnx", "--data", "train.npz", "--metric", "accuracy", "-o", "q.onnx"],
            "--metric needs a --loss, whose target it compares with",
        ),
        (
            ["m.onnx", "--activations", "none", "--loss", "mse:y", "-o", "q.onnx"],
            "--loss needs examples: name a file with --val",
        ),
        (
            ["m.onnx", "--data", "train.npz", "--exclude", "u", "-o", "q.onnx"],
            "quantize: exclude names 'u', which is neither a node nor a weight",
        ),
        (["m.onnx", "--data", "train.npz", "-o", "m.onnx"], "is the model itself: name another file, or add"),
    ],
)
def test_what_it_refuses(folder, arguments, sentence):
    before = (folder / "m.onnx").read_bytes()
    assert sentence in run(folder, *arguments, code=2)
    assert not (folder / "q.onnx").exists() and (folder / "m.onnx").read_bytes() == before
