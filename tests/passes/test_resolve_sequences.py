"""Sequences of known length: gradients pass through what is read from them."""

import numpy as np
import onnx
import pytest
import torch
from tests.torch_export import export

import onnxgrad
from onnxgrad.graph.files import load
from onnxgrad.passes.prepare import prepare
from onnxgrad.passes.resolve_sequences import MAKE_SEQUENCES, READ_SEQUENCES
from onnxgrad.train import losses, optim

RNG = np.random.default_rng(0)
HEAD = '<ir_version: 10, opset_import: ["" : 21]> graph (float[batch, 6] x) => (float[batch, k] y)'
CASES = {
    "the same size": """s = SplitToSequence<axis=-1>(x, size)  a = SequenceAt(s, zero)  b = SequenceAt(s, one)
                        c = Mul(a, b)  y = Tanh(c)""",
    "the last smaller": "s = SplitToSequence<axis=1>(x, four)  a = SequenceAt(s, minus)  y = Mul(a, a)",
    "sizes": """s = SplitToSequence<axis=1>(x, sizes)  a = SequenceAt(s, zero)  b = SequenceAt(s, one)
                c = Mul(a, b)  d = SequenceAt(s, minus)  y = Mul(c, d)""",
    "all of it": "s = SplitToSequence<axis=1>(x, six)  a = SequenceAt(s, zero)  y = Mul(a, a)",
    "one by one": """s = SplitToSequence<axis=1, keepdims=0>(x)  n = SequenceLength(s)  f = Cast<to=1>(n)
                     a = SequenceAt(s, one)  b = Unsqueeze(a, axes)  c = Mul(b, b)  y = Mul(c, f)""",
    "stacked": """a = Mul(x, x)  s = SequenceConstruct(x, a)  t = ConcatFromSequence<axis=1, new_axis=1>(s)
                  y = ReduceProd<keepdims=0>(t, axes)""",
    "joined": """e = SequenceEmpty()  s = SequenceInsert(e, x)  a = Mul(x, x)  t = SequenceInsert(s, a, zero)
                 u = SequenceInsert(t, x)  i = Identity(u)  v = SequenceErase(i, one)  w = SequenceErase(v)
                 z = SequenceInsert(w, x)  j = ConcatFromSequence<axis=-1>(z)  y = Mul(j, j)""",
    "a length that another decides": """s = SplitToSequence<axis=1>(x, size)  n = SequenceLength(s)
                 t = SplitToSequence<axis=1>(x, n)  m = SequenceLength(t)  l = Sub(m, one)
                 a = SequenceAt(t, l)  y = Mul(a, a)""",
    "counted from the end": """e = SequenceEmpty()  s = SequenceInsert(e, x)  a = Mul(x, x)
                 t = SequenceInsert(s, a, minus)  u = SequenceErase(t, minus)
                 b = SequenceAt(u, minus)  y = Mul(b, x)""",
    "the output": "s = SplitToSequence<axis=-1>(x, size)  y = SequenceAt(s, zero)",
}  # fmt: skip


def model_of(body):
    model = onnx.parser.parse_model(f"{HEAD} {{ {body} }}")
    constants = {"zero": 0, "one": 1, "minus": -1, "four": 4, "six": 6, "size": 3, "sizes": [2, 2, 2], "axes": [1]}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(np.int64(c), n) for n, c in constants.items())
    return model


@pytest.mark.parametrize("body", CASES.values(), ids=CASES)
def test_gradients_pass(body):
    model = model_of(body)
    x = RNG.standard_normal((3, 6)).astype(np.float32)
    assert onnxgrad.check_gradient(model, {"x": x}, wrt="x").worst < 1e-6
    prepared = prepare(load(model, "test"), "test").graph
    assert not {node.op_type for node in prepared} & ((MAKE_SEQUENCES | READ_SEQUENCES) - {"Identity"})
    assert next(iter(prepared.outputs)).name == "y"


def test_chunk_of_torch_with_a_dynamic_batch_trains_as_in_pytorch(tmp_path):
    class Gated(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, 6)

        def forward(self, x):
            a, b = self.linear(x).chunk(2, -1)
            return a * torch.sigmoid(b)

    network, path = Gated(), tmp_path / "m.onnx"
    model = export(network, torch.randn(3, 4), path)
    assert "SplitToSequence" in {node.op_type for node in model.graph.node}
    trainer = onnxgrad.Trainer(path, losses.MSE("y"), optim.SGD(lr=0.1))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for k in range(5):
        x, target = torch.randn(2 + k, 4), torch.randn(2 + k, 3)
        loss = torch.nn.functional.mse_loss(network(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found = trainer.step({"x": x.numpy(), "target": target.numpy()})
        np.testing.assert_allclose(found, loss.item(), rtol=1e-5)
    for name, parameter in network.named_parameters():
        np.testing.assert_allclose(trainer.parameters[name], parameter.detach(), rtol=1e-5, atol=1e-6)
