"""A training step normalizes with BatchNormInternal, whose statistics the gradient reads; numbers stay."""

import numpy as np
import onnx
from onnx import numpy_helper

import onnxgrad
from onnxgrad.graph.files import load
from onnxgrad.passes.draft import Draft
from onnxgrad.passes.save_batch_statistics import save_batch_statistics

MODEL = """
<ir_version: 9, opset_import: ["" : 17]>
net (float[n, 3, 4] x) => (float[n, 3, 4] y) {
    a, m2, v2 = BatchNormalization <epsilon = 0.01, training_mode = 1> (x, s1, b1, m, v)
    c = BatchNormalization (a, s2, b2, mean, variance)
    y = Tanh(c)
}
"""


def _model():
    model, random = onnx.parser.parse_model(MODEL), np.random.default_rng(0)
    for name in ("s1", "b1", "s2", "b2", "m", "v", "mean", "variance"):
        array = random.uniform(0.5, 2, 3).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    return model


def test_the_gradient_reads_what_the_node_saves():
    draft = Draft(load(onnxgrad.gradient(_model(), wrt=["s1", "x"]), "test"), "test").run([save_batch_statistics])
    nodes = {node.op_type: node for node in draft.graph}
    internal, gradient = nodes["BatchNormInternal"], nodes["BatchNormalizationGrad"]
    assert list(gradient.inputs[3:5]) == list(internal.outputs[3:5])
    assert "BatchNormalization" in nodes, "the one in inference mode"


def test_numbers_stay():
    feeds = {"x": np.random.default_rng(1).standard_normal((5, 3, 4)).astype(np.float32)}
    feeds["y_grad"] = np.ones_like(feeds["x"])
    before = onnxgrad.gradient(_model(), wrt=["s1", "b1", "x"])
    after = Draft(load(before, "test"), "test").run([save_batch_statistics]).model
    found = [onnxgrad.session(model).run(None, feeds) for model in (before, after)]
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
