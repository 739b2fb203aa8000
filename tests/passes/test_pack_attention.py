"""Attention to parts of one product: what is packed, which Transposes are left, and that steps compute the same."""

from collections import Counter

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import numpy_helper
from tests.torch_export import export
from torch import nn
from torch.nn import functional

import onnxgrad
from onnxgrad import add_functions, losses
from onnxgrad.graph.files import load
from onnxgrad.passes.prepare import prepare
from onnxgrad.train import graphs
from onnxgrad.train.graphs import step_graph

N, S, H, D = 2, 6, 4, 8
WIDTH = H * D


class Packed(nn.Module):
    """One product for queries, keys and values, taken apart in one of the ways that models have."""

    def __init__(self, way, causal=False):
        super().__init__()
        self.way, self.causal = way, causal
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def parts(self, y):
        count, length, _ = y.shape
        if self.way == "split":  # GPT-2
            return [p.view(count, length, H, D).transpose(1, 2) for p in y.split(WIDTH, dim=2)]
        if self.way == "unbind":  # timm
            return y.reshape(count, length, 3, H, D).permute(2, 0, 3, 1, 4).unbind(0)
        if self.way == "chunk of heads":  # GPT-NeoX
            return [p.transpose(1, 2) for p in y.view(count, length, H, 3 * D).chunk(3, dim=-1)]
        if self.way == "slices":
            return [y[..., k * WIDTH : (k + 1) * WIDTH].view(count, length, H, D).transpose(1, 2) for k in range(3)]
        raise ValueError(self.way)

    def forward(self, x):
        q, k, v = self.parts(self.qkv(x))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(x.shape))


class Torch(nn.Module):
    """nn.MultiheadAttention between norms, which computes with the length first."""

    def __init__(self):
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, H, batch_first=True)

    def forward(self, x):
        y = self.before(x)
        return self.after(x + self.attention(y, y, y, need_weights=False)[0])


class Apart(Packed):
    """Keys are not where they are looked for."""

    def parts(self, y):
        q, k, v = super().parts(y)
        return q, v, k


LAYOUTS = {"split": "NS3HD", "unbind": "NS3HD", "chunk of heads": "NSH3D", "slices": "NS3HD"}


@pytest.fixture(autouse=True)
def not_fused(monkeypatch):
    monkeypatch.setattr(graphs, "fuse_elementwise", lambda *_: None)  # into what has no function


def steps(model):
    """A step for any device, and one for CUDA."""
    return [
        step_graph(prepare(load(model, "test"), "test"), losses.MSE("y"), on_cpu=on_cpu) for on_cpu in (None, False)
    ]


def run(step, feeds):
    """The loss and the gradients, by name, in stock onnxruntime."""
    proto = add_functions(ir.to_proto(step.model))
    session = onnxruntime.InferenceSession(proto.SerializeToString(), onnxgrad.register())
    names = {i.name for i in session.get_inputs()}
    given = {name: array for name, array in feeds.items() if name in names}
    wanted = [step.loss, *step.gradients.values()]
    return dict(zip(wanted, session.run(wanted, given), strict=True))


def expect_same(model, layout):
    plain, packed = steps(model)
    found = Counter(node.op_type for node in packed.model.graph)
    assert found["PackedAttention"] == found["PackedAttentionGrad"] == 1
    for node in packed.model.graph:
        if node.op_type.startswith("PackedAttention"):
            assert node.attributes["layout"].as_string() == layout
    transposed = [n for n in packed.model.graph if n.op_type == "Transpose" and len(n.inputs[0].shape) > 2]
    assert not transposed
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal((N, S, WIDTH)).astype(np.float32) for name in ("x", "target")}
    feeds |= {i.name: numpy_helper.to_array(i) for i in model.graph.initializer}
    before, after = run(plain, feeds), run(packed, feeds)
    for name, wanted in before.items():
        np.testing.assert_allclose(after[name], wanted, rtol=1e-4, atol=2e-6, err_msg=name)


# The new exporter takes its time.
@pytest.mark.slow
@pytest.mark.parametrize("way", LAYOUTS)
def test_packed(way, tmp_path):
    torch.manual_seed(0)
    model = export(Packed(way), torch.randn(N, S, WIDTH), tmp_path / "model.onnx")
    expect_same(model, LAYOUTS[way])


@pytest.mark.parametrize("way", ["split", "unbind", "slices"])
def test_packed_of_the_older_exporter(way, tmp_path):
    torch.manual_seed(0)
    model = export(Packed(way), torch.randn(N, S, WIDTH), tmp_path / "model.onnx", dynamo=False)
    expect_same(model, LAYOUTS[way])


@pytest.mark.parametrize("dynamic", [pytest.param(True, marks=pytest.mark.slow), False])
def test_rows_in_another_order_are_not_transposed(dynamic, tmp_path):
    torch.manual_seed(0)
    model = export(Torch().train(), torch.randn(N, S, WIDTH), tmp_path / "model.onnx", dynamo=dynamic, dynamic=dynamic)
    expect_same(model, "NS3HD")


def test_parts_in_another_order_are_left(tmp_path):
    model = export(Apart("split"), torch.randn(N, S, WIDTH), tmp_path / "model.onnx", dynamo=False)
    _, step = steps(model)
    found = Counter(node.op_type for node in step.model.graph)
    assert not found["PackedAttention"] and found["FlashAttention"] == 1


def test_causal(tmp_path):
    model = export(Packed("split", True), torch.randn(N, S, WIDTH), tmp_path / "model.onnx", dynamo=False)
    expect_same(model, "NS3HD")
