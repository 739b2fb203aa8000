"""Projections to queries, keys and values as one product: when they are joined, and that steps compute the same."""

from collections import Counter

import numpy as np
import pytest
import torch
from onnx import numpy_helper, parser
from tests.passes.test_pack_attention import WIDTH, D, H, N, S, expect_same, not_fused, steps  # noqa: F401
from tests.torch_export import export
from torch import nn
from torch.nn import functional

from onnxgrad import losses
from onnxgrad.graph.files import load
from onnxgrad.passes.prepare import prepare
from onnxgrad.train.graphs import Selection, step_graph


class Attention(nn.Module):
    """Three projections, of one value or of two."""

    def __init__(self, bias=True, groups=H, of_two=False):
        super().__init__()
        self.groups, self.of_two = groups, of_two
        self.q = nn.Linear(WIDTH, WIDTH, bias)
        self.k, self.v = nn.Linear(WIDTH, groups * D, bias), nn.Linear(WIDTH, groups * D, bias)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        def heads(y, count):
            return y.view(y.shape[0], y.shape[1], count, D).transpose(1, 2)

        other = torch.sin(x) if self.of_two else x
        parts = heads(self.q(x), H), heads(self.k(other), self.groups), heads(self.v(other), self.groups)
        y = functional.scaled_dot_product_attention(*parts, **({} if self.groups == H else {"enable_gqa": True}))
        return self.out(y.transpose(1, 2).reshape(x.shape))


def exported(tmp_path, dynamo=False, **how):
    torch.manual_seed(0)
    return export(Attention(**how), torch.randn(N, S, WIDTH), tmp_path / "model.onnx", dynamo=dynamo)


def kinds(step):
    return Counter(node.op_type for node in step.model.graph)


@pytest.mark.parametrize("dynamo", [pytest.param(True, marks=pytest.mark.slow), False])
@pytest.mark.parametrize("bias", [True, False])
def test_joined(bias, dynamo, tmp_path):
    expect_same(exported(tmp_path, dynamo, bias=bias), "NS3HD")


@pytest.mark.parametrize(
    "how", [{"of_two": True}, pytest.param({"groups": 2, "dynamo": True}, marks=pytest.mark.slow)], ids=str
)
def test_projections_that_differ_stay_apart(how, tmp_path):
    _, step = steps(exported(tmp_path, **how))
    found = kinds(step)
    assert not found["PackedAttention"] and found["FlashAttention"] == 1 and not found["Split"]


def test_what_is_trained_stays_apart_from_what_is_not(tmp_path):
    prepared = prepare(load(exported(tmp_path), "test"), "test")
    step = step_graph(prepared, losses.MSE("y"), Selection(freeze=["k.*"]), on_cpu=False)
    assert kinds(step)["FlashAttention"] == 1 and not any(name.startswith("k.") for name in step.gradients)


def test_weights_are_cast_before_they_are_put_together(tmp_path):
    prepared = prepare(load(exported(tmp_path), "test"), "test")
    step = step_graph(prepared, losses.MSE("y"), on_cpu=False, precision="bf16")
    assert len(step.narrow) == 8
    for node in step.model.graph:
        if node.op_type == "Concat" and node.outputs[0].dtype.is_floating_point():
            assert {v.dtype.name for v in node.inputs} == {"BFLOAT16"}


GEMMS = """<ir_version: 10, opset_import: ["" : 21]> model (float[10, 8] x) => (float[2, 5, 8] y)
<float c = {0.5}, int64[4] heads = {2, 5, 2, 4}, int64[3] whole = {2, 5, 8}> {
    q0 = Gemm(x, wq, bq) k0 = Gemm(x, wk, bk) v0 = Gemm(x, wv, bv)
    q1 = Reshape(q0, heads) k1 = Reshape(k0, heads) v1 = Reshape(v0, heads)
    q = Transpose<perm = [0, 2, 1, 3]>(q1) k = Transpose<perm = [0, 2, 3, 1]>(k1) v = Transpose<perm = [0, 2, 1, 3]>(v1)
    s = MatMul(q, k) t = Mul(s, c) p = Softmax<axis = -1>(t) a = MatMul(p, v)
    o = Transpose<perm = [0, 2, 1, 3]>(a) y = Reshape(o, whole)
}"""


@pytest.mark.parametrize(
    ("bias", "attention"), [((8,), "Packed"), ((1, 8), "Flash"), ((1,), "Flash"), ((10, 8), "Flash")]
)
def test_a_bias_that_gemm_broadcasts_stays_apart(bias, attention):
    model, rng = parser.parse_model(GEMMS), np.random.default_rng(0)
    for name in "qkv":
        for array, weight in ((rng.standard_normal((8, 8)), f"w{name}"), (rng.standard_normal(bias), f"b{name}")):
            model.graph.initializer.append(numpy_helper.from_array(array.astype(np.float32), weight))
    step = step_graph(prepare(load(model, "test"), "test"), losses.MSE("y"), on_cpu=False)
    assert kinds(step)[f"{attention}Attention"] == 1
