"""Element-wise nodes of training steps become few FusedElementwise, which compute the same."""

import collections

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from ml_dtypes import bfloat16
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator
from tests.elementwise_programs import Fused

from onnxgrad.graph.files import load
from onnxgrad.op import reference_ops
from onnxgrad.ops.families.elementwise_program import NAME, parse_all
from onnxgrad.passes.draft import Draft
from onnxgrad.passes.fuse_elementwise import fuse_elementwise
from onnxgrad.passes.fuse_elementwise.groups import MOST_VALUES
from onnxgrad.passes.prepare import prepare
from onnxgrad.passes.train_mode import SEED
from onnxgrad.train import losses
from onnxgrad.train.graphs import step_graph

BLOCK = """
<ir_version: 9, opset_import: ["" : 20]>
block (float[n, 6, 16] x) => (float[n, 6, 3] logits) {
    a = LayerNormalization <axis = -1> (x, s1, b1)
    h0 = MatMul(a, w1)
    h1 = Add(h0, c1)
    h2 = Gelu(h1)
    h3 = MatMul(h2, w2)
    h4 = Add(h3, c2)
    h5 = Dropout(h4)
    r = Add(x, h5)
    g0 = MatMul(r, w3)
    g1 = Sigmoid(g0)
    g2 = Mul(g0, g1)
    g3 = Add(g2, r)
    y = LayerNormalization <axis = -1> (g3, s2, b2)
    logits = MatMul(y, w4)
}
"""
CNN = """
<ir_version: 9, opset_import: ["" : 17]>
cnn (float[n, 3, 8, 8] x) => (float[n, 3] logits) {
    c = Conv <pads = [1, 1, 1, 1]> (x, k1)
    m = BatchNormalization (c, s1, b1, mean, var)
    r = Relu(m)
    d = Conv <pads = [1, 1, 1, 1]> (r, k2)
    t = Add(d, channels)
    e = HardSwish(t)
    p = Add(e, r)
    u = Relu(p)
    q = GlobalAveragePool(u)
    f = Flatten(q)
    logits = MatMul(f, head)
}
"""
SHAPES = {
    "block": {
        "w1": (16, 32), "w2": (32, 16), "w3": (16, 16), "w4": (16, 3), "c1": (32,), "c2": (16,), "s1": (16,),
        "s2": (16,), "b1": (16,), "b2": (16,),
    },
    "cnn": {
        "k1": (8, 3, 3, 3), "k2": (8, 8, 3, 3), "s1": (8,), "b1": (8,), "mean": (8,), "var": (8,), "head": (8, 3),
        "channels": (8, 1, 1),
    },
}  # fmt: skip
BLOCKS = {"recompute": "blocks"}
INPUTS = {
    "block": {"x": np.ones((2, 6, 16), np.float32), "target": np.arange(12).reshape(2, 6) % 3},
    "cnn": {"x": np.ones((4, 3, 8, 8), np.float32), "target": np.arange(4) % 3},
}


def model_of(name):
    model, random = onnx.parser.parse_model({"block": BLOCK, "cnn": CNN}[name]), np.random.default_rng(0)
    for weight, shape in SHAPES[name].items():
        array = random.standard_normal(shape) / 8 if len(shape) > 1 else np.abs(random.standard_normal(shape)) + 0.5
        model.graph.initializer.append(numpy_helper.from_array(array.astype(np.float32), weight))
    return model


def steps(name, **how):
    """The graph of a step for any device, and that for CUDA; and the weights."""
    prepared = prepare(load(model_of(name), "Trainer"), "Trainer")
    weights = {n: v.const_value.numpy() for n, v in prepared.graph.initializers.items()}
    loss = losses.CrossEntropy("logits", axis=-1)
    graphs = [step_graph(prepared.clone(), loss, on_cpu=on_cpu, **how) for on_cpu in (None, False)]
    narrow = {str(v.name): weights[n].astype(v.dtype.numpy()) for n, v in graphs[1].narrow.items()}
    return *(ir.to_proto(graph.model) for graph in graphs), weights | narrow


def outputs(proto, feeds):
    evaluator = ReferenceEvaluator(proto, new_ops=[*reference_ops(), Fused])
    return evaluator.run(None, {i.name: feeds[i.name] for i in proto.graph.input})


def feeds_of(name, weights):
    random = np.random.default_rng(1)
    given = {n: random.standard_normal(a.shape).astype(a.dtype) if n == "x" else a for n, a in INPUTS[name].items()}
    halves = {f"{n}_{kind.__name__}": a.astype(kind) for n, a in weights.items() for kind in (np.float16, bfloat16)}
    return {**weights, **halves, **given, SEED: np.array([7]), "loss_scale": np.array(8, np.float32)}


def fused(proto):
    return [node for node in proto.graph.node if node.op_type == NAME]


@pytest.mark.parametrize(("name", "count", "how"), [("block", 5, {}), ("cnn", 3, {}), ("block", 5, BLOCKS)], ids=str)
def test_a_step_computes_the_same(name, count, how):
    before, after, weights = steps(name, **how)
    assert len(fused(after)) >= count and not fused(before)
    assert len(after.graph.node) <= len(before.graph.node) - count
    feeds = feeds_of(name, weights)
    for found, expected in zip(outputs(after, feeds), outputs(before, feeds), strict=True):
        assert found.dtype == expected.dtype and found.shape == expected.shape
        assert np.allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision(precision):
    """Casts go into the groups; what Gelu's gradient reads is kept in the half type."""
    before, after, weights = steps("block", precision=precision)
    assert len(after.graph.node) <= len(before.graph.node) - 15
    feeds = feeds_of("block", weights)
    for found, expected in zip(outputs(after, feeds), outputs(before, feeds), strict=True):
        assert found.dtype == expected.dtype
        assert np.allclose(found, expected, rtol=0.05, atol=0.05 * np.abs(expected).max())
    normalizations = [n for n in after.graph.node if n.op_type.startswith("LayerNormalization")]
    assert [list(map(bool, n.output)) for n in normalizations] == [[False, True, True]] * 2  # sums of columns
    written = [parse_all(n.attribute[0].s.decode())[0] for n in fused(after) if b"Gelu " in n.attribute[0].s]
    half = {"bf16": "bfloat16", "fp16": "float16"}[precision]
    assert [[gelu.dtypes[name] for name in gelu.results] for gelu in written] == [
        [half, half]
    ] * 2  # and again, backward


def draft_of(text):
    return Draft(
        ir.from_proto(onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 20, "com.microsoft" : 1]> {text}')),
        "test",
    )


def programs(text):
    """What a graph of nodes with declared types becomes: the operations of each group; and all other nodes."""
    draft = draft_of(text)
    fuse_elementwise(draft, "loss")
    onnx.checker.check_model(ir.to_proto(draft.model))
    texts = [n.attributes["program"].as_string() for n in draft.graph if n.op_type == NAME]
    found = [program for text in texts for program in parse_all(text)]
    others = collections.Counter(n.op_type for n in draft.graph if n.op_type != NAME)
    return [[line.operation for line in program.lines if line.operation] for program in found], others


def test_a_path_through_others_keeps_groups_apart():
    """What the second one would read of the first, it computes again: x is less than a and b."""
    found, others = programs("""
    g (float[n, 9] x, float[9, 9] w) => (float[n, 9] y)
    <float[n, 9] a, float[n, 9] b, float[n, 9] c, float[n, 9] d> {
        a = Exp(x)
        b = Neg(a)
        c = MatMul(b, w)
        d = Add(a, c)
        y = Mul(d, b)
    }""")
    assert found == [["Exp", "Neg"], ["Exp", "Neg", "Add", "Mul"]] and others == {"MatMul": 1}


def test_two_that_read_the_same_are_joined_unless_one_needs_the_other():
    found, others = programs("""
    g (float[n, 9] x, float[9, 9] w) => (float[n, 9] p, float[n, 9] q, float[n, 9] s)
    <float[n, 9] a, float[n, 9] c> {
        c = MatMul(x, w)
        p = Exp(c)
        q = Tanh(c)
        a = MatMul(p, w)
        s = Add(a, c)
    }""")
    assert found == [["Exp", "Tanh"]] and others == {"MatMul": 2, "Add": 1}


def test_what_stays():
    """Small values, shapes, integers alone, and values of unknown shape."""
    found, others = programs("""
    g (float[3, 5] x, int64[n] k, float[n, 9] z, float[9] v) => (float[3, 5] y, int64[n] m, float[n, 9] u)
    <float[3, 5] a, int64[n] b, float t> {
        a = Exp(x)
        y = Neg(a)
        b = Neg(k)
        m = Add(b, k)
        t = Exp(z)
        u = Neg(t)
    }""")
    assert found == [] and sum(others.values()) == 6


def test_constants_powers_and_bounds_are_part_of_the_program():
    found, others = programs("""
    g (float[n, 9] x, float[n, 9] z, bool[n, 1] flags) => (float[n, 9] y)
    <float three, float[1] half, float low, float[n, 9] a, float[n, 9] b, float[n, 9] c, float[n, 9] d, float[n, 9] e,
    float[n, 9] f> {
        three = Constant <value_float = 3.0> ()
        half = Constant <value = float[1] {0.5}> ()
        low = Constant <value_float = -1.0> ()
        a = Pow(x, three)
        b = Mul(a, half)
        c = Clip(b, low)
        d = Max(c, z, x)
        e = LeakyRelu <alpha = 0.25> (d)
        f = Gelu <approximate = "tanh"> (e)
        y = Where(flags, f, half)
    }""")
    operations = ["Mul", "Mul", "Constant", "Mul", "Constant", "Max", "Max", "Max", "Constant", "LeakyRelu", "FastGelu"]
    assert found == [[*operations, "Where"]] and others == {"Constant": 3}


def test_a_group_has_so_many_values_at_most():
    count = 2 * MOST_VALUES
    inputs = ", ".join(f"float[n, 9] x{k}" for k in range(count))
    types = ", ".join(f"float[n, 9] s{k}" for k in range(1, count - 1))
    sums = "\n".join(f"s{k} = Add({f's{k - 1}' if k > 1 else 'x0'}, x{k})" for k in range(1, count))
    found, others = programs(f"g ({inputs}) => (float[n, 9] s{count - 1}) <{types}> {{ {sums} }}")
    assert len(found) == 3 and max(len(operations) for operations in found) < MOST_VALUES and not others


def test_parts_of_an_activation_are_computed_again():
    """Its gradient reads x, and nothing of what the activation computes of it; that Shape does not count."""
    found, others = programs("""
    g (float[n, 9] x, float[9, 9] w) => (float[n, 9] y, int64[2] size)
    <float one, float[n, 9] a, float[n, 9] b, float[n, 9] c, float[n, 9] d, float[n, 9] e, float[n, 9] f> {
        one = Constant <value_float = 1.0> ()
        a = Tanh(x)
        b = Add(a, one)
        c = Mul(b, x)
        size = Shape(c)
        d = MatMul(c, w)
        e = com.microsoft.TanhGrad(d, a)
        f = Mul(d, b)
        y = Add(e, f)
    }""")
    assert [sorted(operations) for operations in found] == [
        ["Add", "Constant", "Mul", "Tanh"],
        ["Add", "Add", "Constant", "Mul", "Tanh", "TanhGrad"],
    ]
    assert others == {"MatMul": 1, "Constant": 1, "Shape": 1}


FORWARD_AND_BACKWARD = """
g (float[n, 9] x, float[9, 9] w, float[9, 9] v, int64[2] flat) => (float loss, float[9, 9] dw, float[9, 9] dv)
<float[n, 9] p, float[n, 9] a, float[m, 9] r, float[n, 9] s, float[m, 9] y, float[m, 9] dy, float[n, 9] da,
float[n, 9] dp> {
    p = MatMul(x, w)
    a = Gelu(p)
    r = Reshape(a, flat)
    s = LOSS_READS
    y = MatMul(s, v)
    loss = ReduceSum <keepdims = 0> (y)
    dy = Expand(loss, flat)
    da = MatMul(dy, v)
    dp = com.microsoft.GeluGrad(da, p)
    dw = Gemm <transA = 1> (x, dp)
    dv = Gemm <transA = 1> (GRADIENT_READS, dy)
}"""


@pytest.mark.parametrize("gradient_reads", ["a", "r"])
@pytest.mark.parametrize("loss_reads", ["Reshape(a, flat)", "Reshape(x, flat)"])
def test_activations_are_given_again_to_gradients_of_weights(loss_reads, gradient_reads):
    """By the group of their own gradient, to views of them, too: nothing is kept of them between the passes."""
    draft = draft_of(FORWARD_AND_BACKWARD.replace("LOSS_READS", loss_reads).replace("GRADIENT_READS", gradient_reads))
    before = ir.to_proto(draft.model)
    fuse_elementwise(draft, "loss")
    after = ir.to_proto(draft.model)
    onnx.checker.check_model(after)
    made_by = {name: node for node in after.graph.node for name in node.output}
    activation = made_by[made_by["dv"].input[0]]
    if gradient_reads == "r":
        assert activation.op_type == "Reshape"
        activation = made_by[activation.input[0]]
    is_of_forward = loss_reads == "Reshape(a, flat)"  # else it is computed in the backward pass alone
    assert (b"GeluGrad" in activation.attribute[0].s) and sum(n.op_type == NAME for n in after.graph.node) == 1
    assert sum(n.op_type == "Gelu" for n in after.graph.node) == is_of_forward
    random = np.random.default_rng(0)
    feeds = {n: random.standard_normal((9, 9)).astype(np.float32) for n in ("x", "w", "v")} | {"flat": np.array([9, 9])}
    for found, expected in zip(outputs(after, feeds), outputs(before, feeds), strict=True):
        assert np.allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_tensors_are_moved_in_the_half_type():
    """What is cast after a Reshape or Transpose is cast before it, and the other way round."""
    draft = draft_of("""
    g (float[n, 4, 9] x, float[9, 9] w, int64[2] flat, bfloat16[9, 9] v) => (float[n, 4, 9] y)
    <float[n, 4, 9] a, float[m, 9] b, bfloat16[m, 9] c, bfloat16[m, 9] d, float[m, 9] e, float[n, 4, 9] f, int64[3] s> {
        a = Exp(x)
        b = Reshape(a, flat)
        c = Cast <to = 16> (b)
        d = MatMul(c, v)
        e = Cast <to = 1> (d)
        s = Shape(x)
        f = Reshape(e, s)
        y = Add(f, x)
    }""")
    fuse_elementwise(draft, "loss")
    onnx.checker.check_model(ir.to_proto(draft.model))
    assert [n.op_type for n in draft.graph if n.op_type != "Shape"] == [NAME, "Reshape", "MatMul", "Reshape", NAME]
    assert all(v.dtype == ir.DataType.BFLOAT16 for n in draft.graph if n.op_type == "Reshape" for v in n.outputs)
    random = np.random.default_rng(0)
    w = random.standard_normal((9, 9)).astype(np.float32)
    x = random.standard_normal((2, 4, 9)).astype(np.float32)
    feeds = {"x": x, "w": w, "flat": np.array([8, 9]), "v": w.astype(ml_dtypes.bfloat16)}
    (found,) = outputs(ir.to_proto(draft.model), feeds)
    assert np.allclose(found, x + (np.exp(x).reshape(8, 9) @ w).reshape(2, 4, 9), rtol=0.05, atol=0.1)


def test_casts_of_gradients_are_one_launch():
    _, after, _ = steps("block", precision="bf16")
    written = {o.name for o in after.graph.output}
    (casts,) = [n for n in fused(after) if set(n.output) <= written]
    programs = parse_all(casts.attribute[0].s.decode())
    assert len(programs) == len(casts.output) > 4
    assert {program.text() for program in programs} == {"v0 bfloat16\nv1 float32 Cast v0\nreturn v1"}


def test_an_activation_alone_is_fused_in_half_types():
    for kind, expected in (("float", []), ("bfloat16", [["Gelu"]])):
        text = f"g ({kind}[n, 9] x, {kind}[9, 9] w) => ({kind}[n, 9] y) <{kind}[n, 9] a, {kind}[n, 9] b> {{"
        found, _ = programs(f"{text} a = MatMul(x, w) b = Gelu(a) y = MatMul(b, w) }}")
        assert found == expected
