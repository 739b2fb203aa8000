"""DepthwiseConv in training: which nodes become one, and that steps compute the same."""

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from onnxgrad.graph.files import load
from onnxgrad.passes.prepare import prepare
from onnxgrad.train import losses, optim
from onnxgrad.train.graphs import Selection, evaluation_graph, step_graph
from onnxgrad.train.trainer import Trainer


def network() -> onnx.ModelProto:
    random = np.random.default_rng(0)
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> m (float[N, 4, 9, 8] x) => (float[N, 4, 5, 4] y) {'
        "a = Conv<group = 4, pads = [1, 1, 1, 1]>(x, first, bias)  b = Tanh(a)  c = Conv(b, mixed)"
        "y = Conv<group = 4, strides = [2, 2], pads = [1, 1, 1, 1]>(c, last) }"
    )
    for name, shape in {"first": (4, 1, 3, 3), "bias": (4,), "mixed": (4, 4, 1, 1), "last": (4, 1, 3, 3)}.items():
        model.graph.initializer.append(numpy_helper.from_array(random.standard_normal(shape, np.float32), name))
    return model


@pytest.mark.parametrize("on_cpu", [True, False])
def test_steps_and_evaluations_have_it_where_weights_change(on_cpu):
    prepared = prepare(load(network(), "test"), "test")
    inference = prepared.clone()
    step = step_graph(prepared, losses.MSE("y"), Selection(freeze="first"), on_cpu=on_cpu)
    evaluated = evaluation_graph(inference, losses.MSE("y"), step, on_cpu=on_cpu)
    for model in (step.model, evaluated.model):
        names = [node.op_type for node in model.graph if node.op_type in ("Conv", "DepthwiseConv")]
        assert names == ["Conv", "Conv", "DepthwiseConv" if on_cpu else "Conv"]


def test_losses_are_those_of_conv(monkeypatch):
    random = np.random.default_rng(1)
    batch = {
        "x": random.standard_normal((3, 4, 9, 8), np.float32),
        "target": random.standard_normal((3, 4, 5, 4), np.float32),
    }

    def curve() -> list[float]:
        trainer = Trainer(network(), losses.MSE("y"), optim.SGD(lr=0.01))
        return [trainer.step(batch) for _ in range(4)] + [trainer.evaluate([batch])["loss"]]

    ours = curve()
    monkeypatch.setattr("onnxgrad.train.graphs.use_depthwise_conv", lambda draft: None)
    np.testing.assert_allclose(ours, curve(), rtol=1e-5)
