"""onnxgrad.session(): any model runs, whatever its kind and wherever its weights are."""

import os

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import numpy_helper, parser
from tests.checks import DEVICE, raises, same_bits
from tests.runtime.nodes import feeds_of, model_of
from tests.runtime.sessions import PROVIDERS

import onnxgrad
from onnxgrad import gather_grad
from onnxgrad.runtime import plan
from onnxgrad.runtime import session as session_module

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="speaks of the CPU alone")
HEADER = '<ir_version: 9, opset_import: ["" : 20]>\n'
# What onnxruntime puts operators of com.microsoft in place of.
BODIES = {
    "FusedGemm": "h = Gemm(x, w, b)\n y = Relu(h)",
    "QuickGelu": "h = MatMul(x, w)\n s = Sigmoid(h)\n y = Mul(h, s)",
    "Gelu": "h = MatMul(x, w)\n a = Add(h, b)\n y = Gelu(a)",
    "FusedMatMul": "t = Transpose <perm = [1, 0]> (x)\n m = MatMul(w, t)\n y = Transpose <perm = [1, 0]> (m)",
}
X = np.random.default_rng(0).standard_normal((2, 4)).astype(np.float32)


def model(body="FusedGemm"):
    text = f"{HEADER} g (float[N, 4] x) => (float[N, 4] y) {{ {BODIES[body]} }}"
    proto = parser.parse_model(text)
    rng = np.random.default_rng(1)
    for name, shape in (("w", (4, 4)), ("b", (4,)))[: 1 + ("b)" in BODIES[body])]:
        proto.graph.initializer.append(numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name))
    return proto


def expected(proto):
    return onnxruntime.InferenceSession(proto.SerializeToString(), providers=PROVIDERS).run(None, {"x": X})[0]


def result(given, *args, **kwargs):
    return onnxgrad.session(given, *args, **kwargs).run(None, {"x": X})[0]


@pytest.mark.parametrize("body", BODIES)
def test_ordinary_models(body):
    proto = model(body)
    assert same_bits(result(proto), expected(proto))
    assert [o.domain for o in proto.opset_import] == [""]  # it is as it was


def test_every_kind_of_model(tmp_path, monkeypatch):
    proto = model()
    onnx.save(proto, tmp_path / "m.onnx")
    for given in (proto, ir.from_proto(proto), tmp_path / "m.onnx", str(tmp_path / "m.onnx")):
        assert same_bits(result(given, providers=PROVIDERS), expected(proto))
    monkeypatch.setattr(session_module, "LARGEST", 10)  # what is too large for protobuf goes through files
    for given in (proto, ir.from_proto(proto)):
        assert same_bits(result(given), expected(proto))


def test_weights_in_a_file_of_their_own(tmp_path, monkeypatch):
    proto = model()
    folder = tmp_path / "models"
    folder.mkdir()
    onnx.save(model(), folder / "m.onnx", save_as_external_data=True, location="w.data", size_threshold=0)
    folder.chmod(0o500)
    options = onnxruntime.SessionOptions()
    monkeypatch.chdir(tmp_path)
    for given in ("models/m.onnx", folder / "m.onnx", ir.load(folder / "m.onnx")):
        for settings in (None, options):
            assert same_bits(result(given, settings), expected(proto))
    folder.chmod(0o700)
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    onnx.save(model("QuickGelu"), "m.onnx", save_as_external_data=True, location="w.data", size_threshold=0)
    session = onnxruntime.InferenceSession("m.onnx", options, providers=PROVIDERS)  # not with the others' weights
    np.testing.assert_allclose(session.run(None, {"x": X})[0], expected(model("QuickGelu")), rtol=1e-6)


def test_options_keep_what_they_have(tmp_path):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.optimized_model_filepath = 1, str(tmp_path / "optimized.onnx")
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(tmp_path))
    session = onnxgrad.session(model(), options)
    assert session.get_session_options().intra_op_num_threads == 1
    assert [n.op_type for n in onnx.load(tmp_path / "optimized.onnx").graph.node] == ["FusedGemm"]
    onnx.save(model(), tmp_path / "m.onnx")
    onnxgrad.session(tmp_path / "m.onnx", options)
    entry = options.get_session_config_entry("session.model_external_initializers_file_folder_path")
    assert entry == str(tmp_path)


def test_options_may_be_registered_twice():
    options = onnxgrad.register(onnxgrad.register())
    args = np.array([40, 64]), np.array([0, 1]), np.ones((2, 64), np.float32)
    proto = model_of(gather_grad, args, {})
    for session in (onnxgrad.session(proto, options), onnxruntime.InferenceSession(proto.SerializeToString(), options)):
        assert session.run(None, feeds_of(gather_grad, args))[0].sum() == 128


def test_an_interrupt_is_raised_again(monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    args = np.array([40, 64]), np.array([0, 1]), np.ones((2, 64), np.float32)
    session = onnxgrad.session(model_of(gather_grad, args, {}))
    monkeypatch.setattr(plan, "make_plan", interrupted)
    with pytest.raises(KeyboardInterrupt):
        session.run(None, feeds_of(gather_grad, args))


def test_what_is_refused(tmp_path):
    with raises(TypeError, "session: model is a dict, expected a path, an onnx.ModelProto or an onnx_ir.Model"):
        onnxgrad.session({})
    path = os.fspath(tmp_path / "no.onnx")
    with raises(FileNotFoundError, f"session: the file {path!r} does not exist, expected an ONNX model"):
        onnxgrad.session(path)
