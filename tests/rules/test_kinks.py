"""Kinks and ties as in PyTorch, in models of both of its exporters: at the kink itself, against torch.autograd."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper
from tests.gradients import daily
from tests.torch_export import export
from torch import nn
from torch.nn import functional

import onnxgrad

# Every kink of the functions below, and ties among neighbours.
X = torch.tensor([
    [-3.0, -2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 3.0, 6.0, 6.0, 3.0, -3.0],
    [0.0] * 13,
    [1.0, 1.0, -1.0, -1.0, 0.0, 0.0, 6.0, 6.0, -1.0, 1.0, 2.0, 2.0, 0.0],
])  # fmt: skip
FUNCTIONS = {
    "relu": functional.relu, "relu6": functional.relu6, "ReLU6": nn.ReLU6(), "hardtanh": functional.hardtanh,
    "Hardtanh": nn.Hardtanh(-2.0, 3.0), "hardswish": functional.hardswish, "hardsigmoid": functional.hardsigmoid,
    "hardshrink": functional.hardshrink, "softshrink": functional.softshrink, "leaky_relu": functional.leaky_relu,
    "elu": functional.elu, "selu": functional.selu, "celu": functional.celu, "abs": torch.abs,
    "threshold": lambda x: functional.threshold(x, 1.0, 5.0),
    "prelu": lambda x: functional.prelu(x, torch.tensor([0.25])),
    "clamp min": lambda x: x.clamp(min=-1.0), "clamp max": lambda x: x.clamp(max=1.0),
    "clamp": lambda x: x.clamp(-1.0, 1.0), "clamp to integers": lambda x: torch.clamp(x, -3, 3),
    "clamp to tensors": lambda x: torch.clamp(x, torch.tensor([-1.0]), torch.tensor([1.0])),
    "maximum": lambda x: torch.maximum(x, torch.ones_like(x)),
    "minimum": lambda x: torch.minimum(x, -torch.ones_like(x)),
    "maximum of two": lambda x: torch.maximum(x, x.flip(-1)),
    "amax": lambda x: x.amax(-1), "amin": lambda x: x.amin(-1), "max of all": lambda x: x.max(),
    "max": lambda x: x.max(-1).values, "min": lambda x: x.min(-1, keepdim=True).values,
    "max with its index": lambda x: (lambda r: r[0] + r[1])(x.max(-1)),
    "max_pool": lambda x: functional.max_pool1d(x[:, None], 3, 2),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
}  # fmt: skip
EXPORTERS = {
    "dynamo": {"dynamo": True, "optimize": False},
    "dynamo, optimized": {"dynamo": True, "optimize": True},
    "torchscript": {"dynamo": False},
    "torchscript, folded": {"dynamo": False, "do_constant_folding": True},
}
NOT_TOLD = {  # what the exporter on TorchScript writes just as something else: docs/guide.md says what we take it for
    "hardtanh": "as clamp", "Hardtanh": "as clamp", "max": "as amax", "min": "as amin",
    "threshold": "not at all",
}  # fmt: skip


class Each(nn.Module):
    """A function of each X of a stack."""

    def __init__(self, functions):
        super().__init__()
        self.functions = functions

    def forward(self, x):
        return tuple(function(x[k]) for k, function in enumerate(self.functions))


@pytest.mark.parametrize("exporter", daily(EXPORTERS, "dynamo", "torchscript"))
def test_gradients_at_the_kinks(exporter, tmp_path):
    untold = NOT_TOLD if exporter.startswith("torchscript") else {}
    functions = {name: function for name, function in FUNCTIONS.items() if name not in untold}
    module, x = Each(list(functions.values())).eval(), torch.stack([X] * len(functions))
    outputs = [f"y{k}" for k in range(len(functions))]
    model = export(module, x, tmp_path / "m.onnx", dynamic=False, output_names=outputs, **EXPORTERS[exporter])
    results = module(x.requires_grad_())
    seeds = [torch.linspace(1, 2, y.numel()).reshape(y.shape) for y in results]
    sum((y * g).sum() for y, g in zip(results, seeds, strict=True)).backward()
    made = onnxgrad.gradient(model, "x", outputs)
    feeds = {f"{name}_grad": g.numpy() for name, g in zip(outputs, seeds, strict=True) if g.ndim}
    for options in (onnxruntime.SessionOptions(), onnxgrad.register()):
        session = onnxruntime.InferenceSession(made.SerializeToString(), options)
        (found,) = session.run(["x_grad"], {"x": x.detach().numpy(), **feeds})
        for name, got, expected in zip(functions, found, x.grad, strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    "nodes, expected",
    [
        ([("Clip", ["x", "0", "6"])], (0, 0)),  # ReLU6, whoever wrote it
        ([("Clip", ["x", "-1", "6"])], (1, 1)),
        ([("Clip", ["x", "0", ""])], (1, 1)),
        ([("Max", ["x", "0"]), ("Min", ["h0", "6"])], (1, 1)),  # a clamp
        ([("Min", ["x", "6"]), ("Max", ["h0", "0"])], (1, 1)),
        ([("Max", ["x", "0"])], (0.5, 1)),  # a maximum
        ([("Max", ["x", "0"]), ("Min", ["h0", "x"])], (0.75, 1)),
    ],
)
def test_where_the_form_alone_tells(nodes, expected):
    """At 0 and at 6, of models without PyTorch's metadata."""
    made = [helper.make_node(op, inputs, [f"h{k}"], name=f"n{k}") for k, (op, inputs) in enumerate(nodes)]
    made[-1].output[0] = "y"
    bounds = [onnx.numpy_helper.from_array(np.float32(b), b) for b in ("0", "6", "-1")]
    info = [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [2]) for n in ("x", "y")]
    graph = helper.make_graph(made, "graph", info[:1], info[1:], bounds)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    session = onnxruntime.InferenceSession(onnxgrad.gradient(model, "x").SerializeToString(), onnxgrad.register())
    (found,) = session.run(["x_grad"], {"x": np.array([0, 6], np.float32), "y_grad": np.ones(2, np.float32)})
    assert tuple(found) == expected
