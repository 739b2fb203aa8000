"""onnxruntime.InferenceSession opens graphs of onnxruntime-training, once open_old_graphs() is called."""

import numpy as np
import onnx
import onnxruntime
import pytest
from tests.ort_training.golden import expected, folder_of

from onnxgrad.ort_training.sessions import open_old_graphs


class Kind(onnxruntime.InferenceSession):
    """One of its own, so that other tests have onnxruntime as it is."""


open_old_graphs(Kind)
open_old_graphs(Kind)  # once more changes nothing
NAME = "mlp_ce_adamw"


def feeds():
    known, rest = expected(NAME), {}
    model = onnx.load(folder_of(NAME) / "training_model.onnx")
    for value in model.graph.input:
        if f"input/{value.name}" in known:
            rest[value.name] = known[f"input/{value.name}"][0]
        elif f"initial/{value.name}" in known:
            rest[value.name] = known[f"initial/{value.name}"]
        else:
            dims = [d.dim_value for d in value.type.tensor_type.shape.dim]
            rest[value.name] = np.ones(dims, onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type))
    return rest


def test_a_training_model():
    path = folder_of(NAME) / "training_model.onnx"
    for given in (str(path), path, path.read_bytes()):
        session = Kind(given, providers=["CPUExecutionProvider"])
        loss = session.run([session.get_outputs()[0].name], feeds())[0]
        np.testing.assert_allclose(loss, expected(NAME)["losses"][0], rtol=1e-5)


def test_other_models_and_what_is_no_model_are_left_to_onnxruntime(tmp_path):
    plain = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 15]> g (float[2] x) => (float[2] y) { y = Relu(x) }'
    )
    session = Kind(plain.SerializeToString(), onnxruntime.SessionOptions())
    assert session.run(None, {"x": np.array([-1, 1], np.float32)})[0].tolist() == [0, 1]
    (tmp_path / "m.onnx").write_bytes(b"nonsense")
    for given in (tmp_path / "m.onnx", str(tmp_path / "away.onnx"), b"nonsense"):
        with pytest.raises(Exception, match="ONNXRuntimeError"):
            Kind(given)
