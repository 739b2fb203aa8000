"""The kernels of a step are known before it runs, whatever a batch is made of."""

import numpy as np
from onnx import parser
from onnxruntime import OrtValue

import onnxgrad
from onnxgrad.train.first_run import kernels_of

MODEL = """<ir_version: 10, opset_import: ["" : 21]> network (float[N, 4] x) => (float[N, 3] y)
<float[4, 3] w = {1, -2, 0.5, 1, 3, -1, 2, 0.25, 1, -1, 2, 3}> { a = MatMul(x, w) y = Tanh(a) }"""


def test_batches_of_arrays_and_of_ort_values():
    trainer = onnxgrad.Trainer(parser.parse_model(MODEL), onnxgrad.losses.MSE("y"), onnxgrad.optim.SGD(lr=0.1))
    batch = {"x": np.ones((2, 4), np.float32), "target": np.ones((2, 3), np.float32)}
    values = {name: OrtValue.ortvalue_from_numpy(array) for name, array in batch.items()}
    graph = trainer._model.step.model.graph
    found = kernels_of(graph, batch)
    assert any("tanh" in kernel.name.lower() for kernel in found)
    assert [(k.name, k.types) for k in kernels_of(graph, values)] == [(k.name, k.types) for k in found]
