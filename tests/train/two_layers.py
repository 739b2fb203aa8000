"""A model of two layers and batches for it, in a file of their own: processes that tests start need no PyTorch then."""

import itertools

import numpy as np
import onnx
from onnx import helper, numpy_helper

SIZES = (6, 16, 3)


def weights():
    rng = np.random.default_rng(0)
    found = {}
    for k, (a, b) in enumerate(itertools.pairwise(SIZES)):
        found[f"fc{k}.weight"] = (rng.standard_normal((b, a)) / np.sqrt(a)).astype(np.float32)
        found[f"fc{k}.bias"] = (rng.standard_normal(b) * 0.1).astype(np.float32)
    return found


def mlp(dropout=None):
    """Two layers; with Dropout between them if a ratio is given."""
    nodes = [helper.make_node("Gemm", ["x", "fc0.weight", "fc0.bias"], ["h"], name="/fc0", transB=1)]
    nodes.append(helper.make_node("Tanh", ["h"], ["a"], name="/tanh"))
    initializers = [numpy_helper.from_array(a, name) for name, a in weights().items()]
    last = "a"
    if dropout is not None:
        initializers.append(numpy_helper.from_array(np.float32(dropout), "ratio"))
        nodes.append(helper.make_node("Dropout", ["a", "ratio"], ["d"], name="/dropout", seed=1))
        last = "d"
    nodes.append(helper.make_node("Gemm", [last, "fc1.weight", "fc1.bias"], ["logits"], name="/fc1", transB=1))
    inputs = [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["N", SIZES[0]])]
    outputs = [helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, ["N", SIZES[-1]])]
    graph = helper.make_graph(nodes, "mlp", inputs, outputs, initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9, producer_name="me")
    helper.set_model_props(model, {"author": "me"})
    return model


def batch(k, size=8):
    rng = np.random.default_rng(50 + k)
    x = rng.standard_normal((size, SIZES[0])).astype(np.float32)
    return {"x": x, "target": (x[:, 0] > 0).astype(np.int64) + (x[:, 1] > 0.5)}
