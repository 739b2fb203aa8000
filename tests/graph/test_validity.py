"""What onnxruntime has against a model, in one line that says what to do."""

import numpy as np
import onnx
from tests.checks import raises

import onnxgrad


def test_types_without_kernels():
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
    m (double[2, 1, 4, 4] x) => (double[2, 1, 2, 2] y) { [first] y = Conv(x, w) }""")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((1, 1, 3, 3)), "w"))
    text = (
        "Trainer: onnxruntime refuses the graph to be run: it has no kernel for the types (Conv, node 'first'): export "
        "the model in float32"
    )
    with raises(RuntimeError, text):
        onnxgrad.Trainer(model, onnxgrad.losses.MSE("y"), onnxgrad.optim.SGD(lr=0.1))
