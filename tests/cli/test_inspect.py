"""onnxgrad inspect: what it tells about a model."""

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import numpy_helper, parser

from onnxgrad.cli import main


def inspected(model: onnx.ModelProto, tmp_path, *options: str) -> str:
    onnx.save(model, tmp_path / "m.onnx")
    result = CliRunner().invoke(main, ["inspect", str(tmp_path / "m.onnx"), *options])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize(("batch", "sentence"), [("N", "batches: of any size"), ("4", "batches: x has 4 examples")])
def test_it_tells_what_training_does(tmp_path, batch, sentence):
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21, "other" : 1]> m '
        f"(float[{batch}, 3, 8] x) => (float[{batch}, 5, 8] y) {{"
        "a = Sub(x, mean)  b = Conv(a, w)  c = BatchNormalization(b, s, t, m, v)  d = Dropout(c)  e = Mul(d, half)"
        "f = other.Unknown(e)  y = Add(e, f) }"
    )
    shapes = {"mean": (1, 3, 1), "w": (5, 3, 1), "s": (5,), "t": (5,), "m": (5,), "v": (5,), "half": ()}
    for name, shape in shapes.items():
        model.graph.initializer.append(numpy_helper.from_array(np.full(shape, 0.5, np.float32), name))
    told = inspected(model, tmp_path)
    rows = {line.split()[0]: line for line in told.splitlines() if line.strip()}
    assert " yes " in rows["w"] and " yes " in rows["s"] and " no " in rows["m"] and " no " in rows["mean"]
    assert "half" not in rows and "scalar" in inspected(model, tmp_path, "--all")
    assert "trained by default: 25 numbers in 3 initializers" in told
    assert sentence in told and "Dropout: 1 nodes" in told and "BatchNormalization: 1 nodes" in told
    assert "gradients: no rule for other.Unknown (1)" in told


def test_a_file_that_is_none(tmp_path):
    (tmp_path / "m.onnx").write_text("no")
    result = CliRunner().invoke(main, ["inspect", str(tmp_path / "m.onnx")])
    assert result.exit_code == 2 and "is not an ONNX model" in result.output
