"""Attention in the forms that exporters write: each becomes one node, with the same loss and the same gradients."""

import math
from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from tests.torch_export import export
from torch import nn
from torch.nn import functional

import onnxgrad
from onnxgrad import losses
from onnxgrad.graph.files import load
from onnxgrad.passes.finish import drop_dead
from onnxgrad.passes.fuse_attention import fuse_attention
from onnxgrad.passes.prepare import prepare
from onnxgrad.train.graphs import Selection, evaluation_graph, step_graph

N, S, H, D = 2, 6, 4, 8
WIDTH = H * D
RNG = np.random.default_rng(0)


def steps(model, precision="float32"):
    """A step without and one with fused attention."""
    prepared = prepare(load(model, "Trainer"), "Trainer")
    frozen = ["mask"] if "mask" in prepared.roles else []
    fused = prepared.clone()
    fuse_attention(fused, [n for n, role in prepared.roles.items() if role.is_parameter and n not in frozen])
    drop_dead(fused)
    return [
        step_graph(draft, losses.MSE("y"), Selection(freeze=frozen), precision=precision) for draft in (prepared, fused)
    ]


def run(step, feeds):
    """The loss and the gradients, by name."""
    weights = {v.name: v.const_value.numpy() for v in step.model.graph.inputs if v.const_value is not None}
    proto = ir.to_proto(step.model)
    names = {i.name for i in proto.graph.input}
    session = onnxruntime.InferenceSession(proto.SerializeToString(), onnxgrad.register())
    wanted = [step.loss, *step.gradients.values()]
    given = {name: array for name, array in {**weights, **feeds}.items() if name in names}
    return dict(zip(wanted, session.run(wanted, given), strict=True))


def kinds(step):
    return Counter(node.op_type for node in step.model.graph)


def expect_fused(model, weights, nodes=1, transposes=None, shape=(N, S, WIDTH), more=None):
    """The step on CUDA has so many FlashAttention and no Softmax, and computes what the other one does."""
    plain, fused = steps(model)
    found = kinds(fused)
    assert (found["FlashAttention"], found["FlashAttentionGrad"]) == (nodes, nodes)
    assert not found["Softmax"] and not found["SoftmaxGrad_13"]
    if transposes is not None:
        assert found["Transpose"] == transposes
    x = RNG.standard_normal(shape).astype(np.float32)
    target = RNG.standard_normal((shape[0], S, WIDTH)).astype(np.float32)
    feeds = {"x": x, "target": target, **weights, **(more or {})}
    before, after = run(plain, feeds), run(fused, feeds)
    for name, wanted in before.items():
        np.testing.assert_allclose(after[name], wanted, rtol=1e-4, atol=2e-6, err_msg=name)
    return fused


def initializers(model):
    return {i.name: numpy_helper.to_array(i) for i in model.graph.initializer}


class Attention(nn.Module):
    """Projections, F.scaled_dot_product_attention and a projection."""

    def __init__(self, groups=H, mask=None, **options):
        super().__init__()
        self.groups, self.options = groups, options
        self.q, self.k, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, groups * D), nn.Linear(WIDTH, groups * D)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", mask)

    def forward(self, x):
        def heads(y, count):
            return y.view(y.shape[0], y.shape[1], count, D).transpose(1, 2)

        q, k, v = heads(self.q(x), H), heads(self.k(x), self.groups), heads(self.v(x), self.groups)
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, **self.options)
        return self.out(y.transpose(1, 2).reshape(x.shape))


class Written(Attention):
    """The same by products, as many models write it."""

    def forward(self, x):
        q, k, v = (p(x).view(x.shape[0], x.shape[1], H, D).permute(0, 2, 1, 3) for p in (self.q, self.k, self.v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(D)
        if self.mask is not None:
            scores = scores.masked_fill(self.mask, self.options["low"])
        y = torch.softmax(scores, -1) @ v
        return self.out(y.permute(0, 2, 1, 3).reshape(x.shape))


AFTER = torch.ones(S, S).triu(1).bool()
SEEN = torch.tensor(RNG.random((S, S)) < 0.7) | torch.eye(S).bool()
MODULES = {
    "plain": Attention,
    "causal": lambda: Attention(is_causal=True),
    "scaled": lambda: Attention(scale=0.3),
    "truth values": lambda: Attention(mask=SEEN),
    "numbers": lambda: Attention(mask=torch.randn(H, S, S)),
    "written": Written,
    "written, masked": lambda: Written(mask=AFTER, low=-math.inf),
    "written, masked by a low number": lambda: Written(mask=AFTER, low=torch.finfo(torch.float32).min),
}


# The new exporter takes its time.
@pytest.mark.parametrize("way", [*(pytest.param(w, marks=pytest.mark.slow) for w in ("dynamo", "optimized")), "legacy"])
@pytest.mark.parametrize("name", MODULES)
def test_exported(name, way, tmp_path):
    torch.manual_seed(0)
    how = {"dynamo": way != "legacy", **({"optimize": True} if way == "optimized" else {})}
    model = export(MODULES[name](), torch.randn(N, S, WIDTH), tmp_path / "model.onnx", **how)
    fused = expect_fused(model, initializers(model))
    (node,) = (n for n in fused.model.graph if n.op_type == "FlashAttention")
    if way != "legacy":
        assert "namespace" in node.metadata_props or "pkg.torch.onnx.name_scopes" in node.metadata_props
    if name in ("plain", "scaled", "written"):
        assert len(node.inputs) == 3
    if name == "causal" or "written, masked" in name:
        assert node.attributes["is_causal"].as_int() == 1 and len(node.inputs) == 3
    assert math.isclose(node.attributes["scale"].as_float(), 0.3 if name == "scaled" else D**-0.5, rel_tol=1e-6)


def test_in_mixed_precision_only_masks_and_statistics_are_float32(tmp_path):
    model = export(MODULES["numbers"](), torch.randn(N, S, WIDTH), tmp_path / "model.onnx", dynamo=False)
    _, fused = steps(model, "bf16")
    (forward,) = (n for n in fused.model.graph if n.op_type == "FlashAttention")
    (backward,) = (n for n in fused.model.graph if n.op_type == "FlashAttentionGrad")
    half, single = ir.DataType.BFLOAT16, ir.DataType.FLOAT
    assert [v.dtype for v in (*forward.inputs, *forward.outputs)] == [half] * 3 + [single, half, single]
    assert [v.dtype for v in backward.inputs] == [half] * 4 + [single, half, single]
    assert {user.op_type for user, _ in forward.outputs[0].uses()} <= {"Reshape", "FlashAttentionGrad", "Shape"}


@pytest.mark.parametrize("batch_first", [True, False])
def test_multihead_attention(batch_first, tmp_path):
    """nn.MultiheadAttention has batch and heads as one axis on the way."""

    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, H, batch_first=batch_first)

        def forward(self, x):
            return self.attention(x, x, x, need_weights=False)[0]

    module = Module().train()
    model = export(module, torch.randn(N, S, WIDTH), tmp_path / "model.onnx", dynamo=False, dynamic=False)
    expect_fused(model, initializers(model))


def attention_of(nodes, inputs, more=(), outputs=("y",)):
    """A model of x and weights around nodes that make y of Q, K and V, [batch, heads, length, numbers]."""
    rng = np.random.default_rng(3)
    weights = {f"W{n}": (rng.standard_normal((WIDTH, WIDTH)) / 6).astype(np.float32) for n in "QKV"}
    head = [
        node
        for n in "QKV"
        for node in (
            helper.make_node("MatMul", ["x", f"W{n}"], [f"p{n}"]),
            helper.make_node("Reshape", [f"p{n}", "heads"], [f"h{n}"]),
            helper.make_node("Transpose", [f"h{n}"], [n], perm=[0, 2, 1, 3]),
        )
    ]
    tail = [
        helper.make_node("Transpose", ["Y"], ["t"], perm=[0, 2, 1, 3]),
        helper.make_node("Reshape", ["t", "width"], ["y"]),
    ]
    constants = {"heads": np.array([0, 0, H, D]), "width": np.array([0, 0, WIDTH]), **weights, **dict(more)}
    graph = helper.make_graph(
        [*head, helper.make_node("Transpose", ["K"], ["Kt"], perm=[0, 1, 3, 2]), *nodes, *tail],
        "attention",
        [
            helper.make_tensor_value_info(n, kind, shape)
            for n, (kind, shape) in {"x": (1, ["N", S, WIDTH]), **inputs}.items()
        ],
        [onnx.ValueInfoProto(name=n) for n in outputs],
        initializer=[numpy_helper.from_array(a, n) for n, a in constants.items()],
    )
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=9)


def written(*middle, softmax="s", product=("MatMul", ["Q", "Kt"], "p", {})):
    """Nodes from Q, K and V to Y."""
    kind, inputs, output, attributes = product
    domain = "com.microsoft" if kind == "FusedMatMul" else ""
    return [
        helper.make_node(kind, inputs, [output], domain=domain, **attributes),
        *(helper.make_node(k, i, o, **({"axis": 0} if k == "Concat" else {})) for k, i, o in middle),
        helper.make_node("Softmax", [softmax], ["a"], axis=-1),
        helper.make_node("MatMul", ["a", "V"], ["Y"]),
    ]


PADDING = {"mask": (TensorProto.FLOAT, ["N", 1, 1, S])}
SEEN_KEYS = {"seen": (TensorProto.BOOL, ["N", 1, 1, S])}
NUMBERS = {"c": np.float32(0.4), "low": np.float32(-1e9), "infinite": np.float32(-np.inf), "zero": np.float32(0)}
FORMS = {
    "scaled after": (written(("Mul", ["c", "p"], ["s"])), {}, {"scale": 0.4}),
    "divided": (written(("Div", ["p", "c"], ["s"])), {}, {"scale": 2.5}),
    "padding": (written(("Mul", ["p", "c"], ["m"]), ("Add", ["mask", "m"], ["s"])), PADDING, {"scale": 0.4}),
    "two masks": (written(("Add", ["p", "mask"], ["m"]), ("Add", ["m", "mask"], ["s"])), PADDING, {}),
    "hidden": (written(("Where", ["seen", "p", "low"], ["s"])), SEEN_KEYS, {}),
    "hidden, infinite": (written(("Where", ["seen", "p", "infinite"], ["s"])), SEEN_KEYS, {}),
    "both": (
        written(("Where", ["seen", "p", "infinite"], ["w"]), ("Add", ["w", "mask"], ["s"])),
        {**PADDING, **SEEN_KEYS},
        {},
    ),
    "fused product": (
        written(softmax="p", product=("FusedMatMul", ["Q", "K"], "p", {"alpha": 0.25, "transB": 1})),
        {},
        {"scale": 0.25},
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms(form):
    nodes, inputs, expected = FORMS[form]
    model = attention_of(nodes, inputs, NUMBERS.items())
    mask = np.where(np.arange(S) < S - 2, 0, -1e4).astype(np.float32) * np.ones((N, 1, 1, 1), np.float32)
    fused = expect_fused(model, initializers(model), transposes=None, more={"mask": mask, "seen": mask == 0})
    (node,) = (n for n in fused.model.graph if n.op_type == "FlashAttention")
    assert math.isclose(node.attributes["scale"].as_float(), expected.get("scale", 1.0), rel_tol=1e-6)
    if form == "hidden, infinite":
        assert node.inputs[3].dtype == ir.DataType.BOOL


BLIND = {
    "replaced": ([("Where", ["seen", "p", "low"], ["s"])], SEEN_KEYS),
    "replaced twice": ([("Where", ["tri", "p", "low"], ["w"]), ("Where", ["seen", "w", "low"], ["s"])], SEEN_KEYS),
    "added, causal": ([("Add", ["p", "after"], ["w"]), ("Add", ["w", "mask"], ["s"])], PADDING),
}


@pytest.mark.parametrize("form", BLIND)
def test_queries_that_low_numbers_leave_no_key(form):
    """They see all keys for which the number is the same, and scores that it replaces get no gradient."""
    nodes, inputs = BLIND[form]
    after = np.where(np.tri(S, dtype=bool), 0, -1e9).astype(np.float32)
    more = {**NUMBERS, "tri": np.tri(S, dtype=bool), "after": after}
    model = attention_of(written(*nodes), inputs, more.items())
    seen = np.arange(S) >= np.array([2, S]).reshape(N, 1, 1, 1)  # padding on the left, and nothing else
    mask = np.where(seen, 0, -1e9).astype(np.float32)
    expect_fused(model, initializers(model), more={"mask": mask, "seen": seen})


def test_a_small_constant_beside_a_causal_mask():
    after = np.where(np.tri(S, dtype=bool), 0, -1e9).astype(np.float32)
    more = {"after": after, "bias": RNG.standard_normal((H, 1, S)).astype(np.float32)}
    model = attention_of(written(("Add", ["p", "bias"], ["w"]), ("Add", ["w", "after"], ["s"])), {}, more.items())
    prepared = prepare(load(model, "Trainer"), "Trainer")
    assert fuse_attention(prepared, [name for name in prepared.roles if name.startswith("W")]) == 1
    (node,) = (n for n in prepared.graph if n.op_type == "FlashAttention")
    assert "is_causal" in node.attributes


OTHERS = {
    "along the queries": [*written(softmax="p")[:1], helper.make_node("Softmax", ["p"], ["a"], axis=-2),
                          helper.make_node("MatMul", ["a", "V"], ["Y"])],
    "scaled behind the mask": written(("Add", ["p", "bias"], ["m"]), ("Mul", ["m", "c"], ["s"])),
    "a mask that is trained": written(("Add", ["p", "bias"], ["s"])),
    "replaced by no low number": written(("Where", ["seen", "p", "zero"], ["s"])),
}  # fmt: skip


@pytest.mark.parametrize("form", OTHERS)
def test_what_only_looks_like_it(form):
    bias = np.random.default_rng(4).standard_normal((H, S, S)).astype(np.float32)
    inputs = SEEN_KEYS if "seen" in str(OTHERS[form]) else {}
    model = attention_of(OTHERS[form], inputs, {**NUMBERS, "bias": bias}.items())
    prepared = prepare(load(model, "Trainer"), "Trainer")
    assert fuse_attention(prepared) == 0


def test_scores_that_are_an_output_stay():
    model = attention_of(written(softmax="p"), {}, outputs=("y", "a"))
    assert fuse_attention(prepare(load(model, "Trainer"), "Trainer")) == 0


def test_dropped_attention_stays(tmp_path):
    module = Attention(dropout_p=0.5).train()
    model = export(module, torch.randn(N, S, WIDTH), tmp_path / "model.onnx", dynamo=False)
    step = step_graph(prepare(load(model, "Trainer"), "Trainer"), losses.MSE("y"), on_cpu=False)
    assert not kinds(step)["FlashAttention"]


class Together(nn.Module):
    """Queries, keys and values cut from one product, as timm has them."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4).unbind(0)
        return (torch.softmax(q @ k.transpose(-1, -2) * 0.3, -1) @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("way", [pytest.param("dynamo", marks=pytest.mark.slow), "legacy"])
def test_cut_from_one_product(way, tmp_path):
    model = export(Together(), torch.randn(N, S, WIDTH), tmp_path / "model.onnx", dynamo=way == "dynamo")
    step = step_graph(prepare(load(model, "Trainer"), "Trainer"), losses.MSE("y"), on_cpu=False)
    assert kinds(step)["PackedAttention"] == 1 and not kinds(step)["Transpose"]


def test_patterns_of_names_find_the_new_node():
    model = attention_of(written(softmax="p"), {})
    for node in model.graph.node:
        node.name = f"/layer/{node.output[0]}"
    prepared = prepare(load(model, "Trainer"), "Trainer")
    step = step_graph(prepared, losses.MSE("y"), on_cpu=False, recompute="/layer/a")
    names = [n.name for n in step.model.graph if n.op_type == "PackedAttention"]
    assert names[0] == "/layer/a" and len(names) == 2


BATCH = [("Shape", ["x"], ["shape"]), ("Slice", ["shape", "0", "1", "0"], ["batch"])]
WHOLE = [*BATCH, ("Concat", ["batch", "1", "S", "S"], ["whole"])]
CHOSEN = {  # what makes truth values of a batch, the shape of the mask that is left, and whether it is causal
    "the same for all": ([*WHOLE, ("Expand", ["tri", "whole"], ["chosen"])], None, True),
    "nothing hidden for all": ([*WHOLE, ("Expand", ["all", "whole"], ["chosen"])], None, False),
    "not for all the same": (
        [
            *BATCH, ("Expand", ["1", "batch"], ["ones"]), ("CumSum", ["ones", "first"], ["number"]),
            ("Concat", ["batch", "1", "1", "1"], ["column"]), ("Reshape", ["number", "column"], ["numbers"]),
            ("Less", ["numbers", "3"], ["few"]),
            ("Or", ["few", "tri"], ["chosen"]),
        ],
        ["N", 1, S, S], False,
    ),
    "only broadcast": (
        [*WHOLE, ("And", ["all", "seen"], ["both"]), ("Expand", ["both", "whole"], ["chosen"])], ["N", 1, 1, S], False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", CHOSEN)
def test_masks_that_follow_from_the_size_of_the_batch(way):
    nodes, left, is_causal = CHOSEN[way]
    numbers = {str(n): np.array([n]) for n in (0, 1, 3)}
    truth = {"tri": np.tri(S, dtype=bool), "all": np.ones((S, 1), bool)}
    others = {"S": np.array([S]), "first": np.array(0)}
    middle = [*nodes, ("Where", ["chosen", "zero", "low"], ["mask"]), ("Add", ["p", "mask"], ["s"])]
    inputs = SEEN_KEYS if "seen" in str(nodes) else {}
    model = attention_of(written(*middle), inputs, {**NUMBERS, **numbers, **truth, **others}.items())
    fused = expect_fused(model, initializers(model), more={"seen": RNG.random((N, 1, 1, S)) < 0.8})
    (node,) = (n for n in fused.model.graph if n.op_type == "FlashAttention")
    assert ("is_causal" in node.attributes) == is_causal
    assert (None if len(node.inputs) == 3 else [str(d) for d in node.inputs[3].shape]) == (
        left and [str(d) for d in left]
    )


def test_a_scale_that_is_trained_stays_a_number_of_its_own():
    """In a step, and in what evaluates it: there it changes, too."""
    model = attention_of(written(("Mul", ["p", "c"], ["s"])), {}, NUMBERS.items())
    prepared = prepare(load(model, "Trainer"), "Trainer")
    step = step_graph(prepared.clone(), losses.MSE("y"), Selection(trainable=["W*", "c"]), on_cpu=False)
    evaluated = evaluation_graph(prepared, losses.MSE("y"), step, on_cpu=False)
    assert "c" in step.gradients and "c" in {v.name for v in evaluated.model.graph.inputs}
    assert not kinds(step)["FlashAttention"] and not kinds(evaluated)["FlashAttention"]


def test_evaluation_has_it_too():
    model = attention_of(written(("Mul", ["p", "c"], ["s"])), {}, NUMBERS.items())
    prepared = prepare(load(model, "Trainer"), "Trainer")
    step = step_graph(prepared.clone(), losses.MSE("y"), on_cpu=False)
    assert kinds(evaluation_graph(prepared, losses.MSE("y"), step, on_cpu=False))["FlashAttention"] == 1


def test_a_scale_of_two_types_is_a_sentence():
    """As a converter to float16 left it: not a number to compute, but what is wrong with the model."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
    m (float[2, 2, 3, 4] x) => (float[2, 2, 3, 4] y) <float16[1] half = {1}, float[1] single = {1}> {
        s = Div(half, single)  q = MatMul(x, w)  t = Transpose<perm = [0, 1, 3, 2]>(q)  k = Mul(t, s)
        scores = MatMul(q, k)  p = Softmax(scores)  y = MatMul(p, q)
    }""")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.eye(4, dtype=np.float32), "w"))
    with pytest.raises(ValueError, match="inconsistent type"):
        onnxgrad.Trainer(model, losses.MSE("y"), onnxgrad.optim.SGD(lr=0.1))
