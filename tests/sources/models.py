"""Models that the tests of data are read for: nothing but their inputs and outputs matters."""

import numpy as np
from onnx import TensorProto, helper, numpy_helper

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def linear(inputs=4, outputs=3, name="x", shape=None):
    """Scores of classes, of so many numbers, which may come in another shape."""
    rng = np.random.default_rng(0)
    shape = ["N", *(shape or (inputs,))]
    nodes = [
        helper.make_node("Flatten", [name], ["flat"]),
        helper.make_node("Gemm", ["flat", "weight", "bias"], ["logits"]),
    ]
    weights = {"weight": rng.standard_normal((inputs, outputs)) / inputs, "bias": np.zeros(outputs)}
    return model(nodes, {name: (FLOAT, shape)}, {"logits": (FLOAT, ["N", outputs])}, weights)


def pooled(channels=3, height=None, width=None, classes=2, is_last=False, dtype=FLOAT):
    """Scores of classes, of the means of an image's channels."""
    sides = [height or "H", width or "W"]
    shape = ["N", *sides, channels] if is_last else ["N", channels, *sides]
    nodes = [
        helper.make_node("Cast", ["image"], ["numbers"], to=FLOAT),
        helper.make_node("ReduceMean", ["numbers", "axes"], ["means"], keepdims=0),
        helper.make_node("MatMul", ["means", "weight"], ["logits"]),
    ]
    axes = np.array([1, 2] if is_last else [2, 3], np.int64)
    weights = {"weight": np.ones((channels, classes)) * np.arange(classes), "axes": axes}
    return model(nodes, {"image": (dtype, shape)}, {"logits": (FLOAT, ["N", classes])}, weights)


def embedded(tokens, outputs, length=None, extra=("attention_mask",), is_next=False):
    """Scores of classes of a text, or of the next token at each place."""
    rng = np.random.default_rng(0)
    names = ["input_ids", *extra]
    nodes, result = [helper.make_node("Gather", ["table", "input_ids"], ["embedded"])], "embedded"
    for name in extra:  # each has a say in the result
        nodes += [
            helper.make_node("Cast", [name], [f"{name}/float"], to=FLOAT),
            helper.make_node("Unsqueeze", [f"{name}/float", "last"], [f"{name}/column"]),
            helper.make_node("Add", [result, f"{name}/column"], [f"{name}/sum"]),
        ]
        result = f"{name}/sum"
    weights = {"table": rng.standard_normal((tokens, 8)), "weight": rng.standard_normal((8, outputs)) / 8}
    weights["last"] = np.array([-1], np.int64)
    if is_next:
        nodes.append(helper.make_node("MatMul", [result, "weight"], ["logits"]))
    else:
        weights["axes"] = np.array([1], np.int64)
        nodes.append(helper.make_node("ReduceMean", [result, "axes"], ["mean"], keepdims=0))
        nodes.append(helper.make_node("MatMul", ["mean", "weight"], ["logits"]))
    shape = ["N", length or "T"]
    out = [*shape, outputs] if is_next else ["N", outputs]
    return model(nodes, dict.fromkeys(names, (INT64, shape)), {"logits": (FLOAT, out)}, weights)


def model(nodes, inputs, outputs, weights):
    arrays = [
        numpy_helper.from_array(a if a.dtype == np.int64 else a.astype(np.float32), name) for name, a in weights.items()
    ]
    values = ([helper.make_tensor_value_info(n, *how) for n, how in vs.items()] for vs in (inputs, outputs))
    graph = helper.make_graph(nodes, "g", *values, arrays)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
