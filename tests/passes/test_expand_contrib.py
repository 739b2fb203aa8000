"""Fused operators of com.microsoft, written with standard ones: what onnxruntime's kernels compute, with gradients."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from tests.checks import raises

import onnxgrad
from onnxgrad import losses, optim
from onnxgrad.passes.expand_contrib import FUSED
from onnxgrad.rules import RULES

RNG = np.random.default_rng(0)
B, S, N, H = 2, 5, 2, 4  # examples, places, heads, their size
D = N * H


def x(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def ints(*numbers):
    return np.array(numbers, np.int32)


def flags(*shape):
    return (RNG.random(shape) > 0.3).astype(np.int32)


def model(op_type, inputs, attributes, outputs=1, ranks=None, static=True, kinds=None):
    """One node; dimensions unknown unless `static`."""
    given = {f"in_{k}": a for k, a in enumerate(inputs) if a is not None}
    infos = [
        helper.make_tensor_value_info(
            name, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape if static else [None] * a.ndim
        )
        for name, a in given.items()
    ]
    names = ["" if a is None else f"in_{k}" for k, a in enumerate(inputs)]
    results = [f"out_{k}" for k in range(outputs)]
    kinds = kinds or [TensorProto.FLOAT] * outputs
    declared = [
        helper.make_tensor_value_info(name, kind, [None] * rank if ranks else None)
        for name, kind, rank in zip(results, kinds, ranks or [None] * outputs, strict=True)
    ]
    node = helper.make_node(op_type, names, results, name="node", domain="com.microsoft", **attributes)
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph([node], "graph", infos, declared)
    return helper.make_model(graph, opset_imports=imports, ir_version=10), given


def session(proto):
    return onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])


def check(op_type, inputs, attributes, expected, twice=False):
    """The results are as expected, and the gradients as differences say, known and unknown shapes."""
    smooth = [f"in_{k}" for k, a in enumerate(inputs) if a is not None and a.dtype == np.float32 and a.size]
    kinds = [helper.np_dtype_to_tensor_dtype(np.dtype(e.dtype)) for e in expected]
    how = {"outputs": len(expected), "ranks": [e.ndim for e in expected], "kinds": kinds}
    of = [f"out_{k}" for k, kind in enumerate(kinds) if kind == TensorProto.FLOAT]
    for static in (True, False):
        proto, feeds = model(op_type, inputs, attributes, static=static, **how)
        made = onnxgrad.gradient(proto, smooth, of)
        assert not any(node.op_type == op_type and node.domain for node in made.graph.node)
        seeds = {f"out_{k}_grad": x(*e.shape) for k, e in enumerate(expected) if f"out_{k}" in of}
        for got, want in zip(onnxgrad.session(made).run(None, {**feeds, **seeds}), expected, strict=False):
            assert got.dtype == want.dtype
            np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
        assert onnxgrad.check_gradient(proto, feeds, smooth, of).worst < 2e-6
        if twice:
            again = onnxgrad.check_gradient(
                onnxgrad.gradient(proto, smooth, of[0]),
                {**feeds, "out_0_grad": seeds["out_0_grad"]},
                "in_*",
                f"{smooth[0]}_grad",
            )
            assert again.worst < 2e-5


W = x(6, 3 * D), x(3 * D)
ATTENTION = {
    "all": ([None], {}),
    "causal": ([None], {"unidirectional": 1}),
    "lengths": ([ints(3, 5)], {}),
    "ends and starts": ([ints(4, 5, 1, 0)], {}),
    "mask": ([flags(B, S)], {"mask_filter_value": -1e5}),
    "padded on the left, causal": ([np.array([[0, 0, 1, 1, 1], [1] * 5], np.int32)], {"unidirectional": 1}),
    "mask of queries and keys": ([flags(B, S, S)], {"scale": 0.3}),
    "cache": ([None, x(2, B, N, 3, H)], {"unidirectional": 1}),
    "cache and mask": ([flags(B, S + 3), x(2, B, N, 3, H)], {}),
    "added": ([None, None, x(1, N, S, S)], {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", ATTENTION)
def test_attention(case):
    further, attributes = ATTENTION[case]
    attributes = {"num_heads": N, **attributes}
    inputs = [x(B, S, 6), *W, *further]
    outputs = 2 if len(further) > 1 and further[1] is not None else 1
    proto, feeds = model("Attention", inputs, attributes, outputs)
    check("Attention", inputs, attributes, session(proto).run(None, feeds), twice=case == "causal")


def test_attention_of_values_of_another_size():
    inputs, attributes = [x(B, S, 6), x(6, 20), x(20)], {"num_heads": N, "qkv_hidden_sizes": [8, 8, 4]}
    proto, feeds = model("Attention", inputs, attributes)
    check("Attention", inputs, attributes, session(proto).run(None, feeds))


@pytest.mark.slow
def test_attention_with_a_square_mask():
    """As Megatron has it, for which onnxruntime has no kernel on the CPU: that of the part which counts."""
    square, past = flags(B, 1, 9, 9), x(2, B, N, 3, H)
    inputs = [x(B, S, 6), *W, np.ascontiguousarray(square[:, 0, 3:8, :8]), past]
    proto, feeds = model("Attention", inputs, {"num_heads": N}, 2)
    inputs[3], expected = square, session(proto).run(None, feeds)
    check("Attention", inputs, {"num_heads": N}, expected)


MULTI_HEAD = {
    "all": ([x(B, S, D), x(B, 7, D), x(B, 7, 6)], {}),
    "bias, mask": ([x(B, S, D), x(B, 7, D), x(B, 7, D), x(3 * D), flags(B, 7)], {}),
    "cache": (
        [*x(3, B, S, D), x(3 * D), None, x(B, N, S, S + 3), *x(2, B, N, 3, H)], {"unidirectional": 1, "scale": 0.2}
    ),
    "keys in heads": ([x(B, S, D), *x(2, B, N, 7, H), x(3 * D)], {}),
    "lengths": ([x(B, S, D), *x(2, B, 7, D), None, ints(3, 7)], {}),
    "mask of queries and keys": ([x(B, S, D), *x(2, B, 7, D), None, flags(B, S, 7)], {}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", MULTI_HEAD)
def test_multi_head_attention(case):
    inputs, attributes = MULTI_HEAD[case]
    attributes = {"num_heads": N, **attributes}
    proto, feeds = model("MultiHeadAttention", inputs, attributes, 3 if case in ("cache", "bias, mask") else 1)
    check("MultiHeadAttention", inputs, attributes, session(proto).run(None, feeds), twice=case == "cache")


@pytest.mark.parametrize("packed", ["all", "keys and values"])
def test_packed_heads(packed):
    """Which have no kernel on the CPU."""
    q, k, v = (x(B, S, N, H) for _ in range(3))
    proto, feeds = model("MultiHeadAttention", [a.reshape(B, S, D) for a in (q, k, v)], {"num_heads": N})
    inputs = [np.stack([q, k, v], 3)] if packed == "all" else [q.reshape(B, S, D), np.stack([k, v], 3)]
    check("MultiHeadAttention", inputs, {"num_heads": N}, session(proto).run(None, feeds))


COS, SIN = x(2, 16, 8)
Q, K, V = x(B, S, 4 * 16), x(B, S, 2 * 16), x(B, S, 2 * 16)
EMPTY, PAST = np.zeros((B, 2, 0, 16), np.float32), x(B, 2, 4, 16)
FIRST = [Q, K, V, EMPTY, EMPTY, ints(4, 4), np.array(5, np.int32)]
STEP = [Q[:, :1], K[:, :1], V[:, :1], PAST, PAST[::-1], ints(4, 4), np.array(5, np.int32)]
PLACES = np.array([[0, 1, 2, 3, 4], [3, 4, 5, 6, 7]])
GROUPED = {
    "without a cache": ([Q, K, V, None, None, *FIRST[5:]], {}),
    "first": (FIRST, {"scale": 0.7}),
    "packed": ([np.concatenate([Q, K, V], 2), None, None, *FIRST[3:]], {}),
    "rotary": ([*FIRST, COS, SIN], {"do_rotary": 1}),
    "rotary, interleaved": ([*FIRST, COS, SIN], {"do_rotary": 1, "rotary_interleaved": 1}),
    "rotary, places": ([*FIRST, COS, SIN, np.stack([PLACES[1]] * 2)], {"do_rotary": 1}),
    "window": (FIRST, {"local_window_size": 2}),
    "softcap": (FIRST, {"softcap": 1.5}),
    "smooth": (FIRST, {"smooth_softmax": 1}),
    "sink": ([*FIRST, None, None, None, None, x(4)], {}),
    "added": ([*FIRST, None, None, None, x(B, 4, S, S)], {}),
    "one after a cache": ([*STEP, COS, SIN], {"do_rotary": 1}),
    "one after caches of two lengths": ([*STEP[:5], ints(2, 4), STEP[6], COS, SIN], {"do_rotary": 1}),
    "several after a cache": (
        [Q[:1, :3], K[:1, :3], V[:1, :3], PAST[:1], PAST[1:], ints(6), np.array(7, np.int32)], {}
    ),
    "not causal": (FIRST, {"causal": 0}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", GROUPED)
def test_group_query_attention(case):
    inputs, attributes = GROUPED[case]
    attributes = {"num_heads": 4, "kv_num_heads": 2, **attributes}
    proto, feeds = model("GroupQueryAttention", inputs, attributes, 3)
    check("GroupQueryAttention", inputs, attributes, session(proto).run(None, feeds), twice=case == "rotary")


def test_group_query_attention_of_padded_examples():
    """An example that ends before its padding does: what its padding sees is no matter, but is a number."""
    inputs = [*FIRST[:5], ints(2, 4), FIRST[6], COS, SIN]
    attributes = {"num_heads": 4, "kv_num_heads": 2, "do_rotary": 1, "local_window_size": 1}
    proto, feeds = model("GroupQueryAttention", inputs, attributes, ranks=[3])
    made = onnxgrad.session(onnxgrad.gradient(proto, "in_0"))
    seed = x(B, S, 64)
    seed[0, 3:] = 0
    got, gradient = made.run(None, {**feeds, "out_0_grad": seed})
    expected = session(proto).run(None, feeds)[0]
    np.testing.assert_allclose(got[0, :3], expected[0, :3], rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(got[1], expected[1], rtol=2e-5, atol=2e-5)
    assert np.isfinite(got).all() and not gradient[0, 3:].any()


@pytest.mark.slow
def test_group_query_attention_normalizes_queries_and_keys():
    """Which has no kernel on the CPU."""
    scales = np.abs(x(2, 16))
    heads = [a.reshape(B, S, -1, 16) for a in (Q, K)]
    normal = [
        (a / np.sqrt(np.mean(a * a, -1, keepdims=True) + 0.1) * w).reshape(B, S, -1)
        for a, w in zip(heads, scales, strict=True)
    ]
    attributes = {"num_heads": 4, "kv_num_heads": 2}
    proto, feeds = model("GroupQueryAttention", [*normal, *FIRST[2:]], attributes, 3)
    inputs = [*FIRST, *[None] * 7, *scales]
    check("GroupQueryAttention", inputs, {**attributes, "qk_norm_epsilon": 0.1}, session(proto).run(None, feeds))


ROTARY = {
    "rows": ([x(B, S, 32), PLACES], {}),
    "rows, interleaved": ([x(B, S, 32), PLACES], {"interleaved": 1}),
    "from a place on": ([x(B, S, 32), np.array([3])], {}),
    "heads": ([x(B, N, S, 16), PLACES], {}),
    "a part of each head": ([x(B, S, 40), PLACES], {"num_heads": 2, "rotary_embedding_dim": 16}),
}


@pytest.mark.parametrize("case", ROTARY)
def test_rotary_embedding(case):
    inputs, attributes = ROTARY[case]
    inputs = [*inputs, COS, SIN]
    proto, feeds = model("RotaryEmbedding", inputs, attributes)
    check("RotaryEmbedding", inputs, attributes, session(proto).run(None, feeds), twice=case == "rows")


IDS = RNG.integers(0, 9, (B, S)).astype(np.int32)
EMBEDDED = {
    "all": ([(IDS > 4).astype(np.int32), x(9, D), x(7, D), x(2, D), x(D), x(D), (IDS > 2).astype(np.int32)], {}),
    "words alone": ([None, x(9, D), x(7, D), None, x(D), x(D)], {"epsilon": 0.1}),
    "places": ([None, x(9, D), x(7, D), None, x(D), x(D), None, PLACES.astype(np.int32) % 7], {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", EMBEDDED)
def test_embed_layer_normalization(case):
    further, attributes = EMBEDDED[case]
    inputs = [IDS, *further]
    kinds = [TensorProto.FLOAT, TensorProto.INT32, TensorProto.FLOAT]
    proto, feeds = model("EmbedLayerNormalization", inputs, attributes, 3, kinds=kinds)
    check("EmbedLayerNormalization", inputs, attributes, session(proto).run(None, feeds))


def test_transpose_matmul():
    inputs, attributes = [x(B, S, D), x(B, S, 3)], {"alpha": 0.4, "transA": 1}
    proto, feeds = model("TransposeMatMul", inputs, attributes)
    check("TransposeMatMul", inputs, attributes, session(proto).run(None, feeds))


NEWER = {
    "Trilu": ("Trilu", [x(2, 3, 4), np.array(1)], {"upper": 0}),
    "Trilu without k": ("Trilu", [x(3, 4)], {}),
    "GridSample": ("GridSample", [x(2, 3, 4, 5), 0.5 * x(2, 3, 4, 2)], {"align_corners": 1}),
    "GridSample, bicubic": (
        "GridSample", [x(2, 3, 4, 5), 0.5 * x(2, 3, 4, 2)], {"mode": "bicubic", "padding_mode": "border"}
    ),
    "CDist": ("CDist", [x(4, 3), x(5, 3)], {}),
    "CDist, euclidean": ("CDist", [x(4, 3), x(5, 3)], {"metric": "euclidean"}),
}  # fmt: skip


@pytest.mark.parametrize("case", NEWER)
def test_operators_that_onnx_has_by_now(case):
    op_type, inputs, attributes = NEWER[case]
    proto, feeds = model(op_type, inputs, attributes)
    check(op_type, inputs, attributes, session(proto).run(None, feeds))


def test_a_distance_of_0_passes_no_gradient():
    """As in PyTorch, though its derivative is infinite."""
    rows = x(2, 3)
    proto, feeds = model("CDist", [rows, rows.copy()], {"metric": "euclidean"}, ranks=[2])
    made = onnxgrad.session(onnxgrad.gradient(proto, ["in_0", "in_1"]))
    found = made.run(["in_0_grad", "in_1_grad"], {**feeds, "out_0_grad": np.eye(2, dtype=np.float32)})
    assert not np.any(found)


@pytest.mark.parametrize("kind", [np.uint8, np.int16])
def test_quantization_passes_gradients_straight_through(kind):
    results = []
    for domain in ("com.microsoft", ""):
        scale, zero = np.float32(0.1), np.array(3, kind)
        nodes = [
            helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], domain=domain),
            helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"], domain=domain),
        ]
        infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [4, 5]) for n in "xy"]
        initializers = [numpy_helper.from_array(np.asarray(a), n) for n, a in (("s", scale), ("z", zero))]
        graph = helper.make_graph(nodes, "g", infos[:1], infos[1:], initializers)
        imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        proto = helper.make_model(graph, opset_imports=imports, ir_version=10)
        made = onnxgrad.session(onnxgrad.gradient(proto, ["x", "s"]))
        numbers = np.linspace(-20, 20, 20, dtype=np.float32).reshape(4, 5)
        results.append(made.run(None, {"x": numbers, "y_grad": numbers}))
    for ours, standard in zip(*results, strict=True):
        np.testing.assert_array_equal(ours, standard)
    assert np.any(results[0][1])


# Those for CUDA alone, beside PyTorch.


def torch_of(function, *arrays):
    return [function(*map(torch.from_numpy, arrays)).numpy()]


def test_bias_add():
    inputs = x(B, S, D), x(D), x(B, S, D)
    check("BiasAdd", inputs, {}, [sum(inputs[1:], inputs[0])])


@pytest.mark.parametrize(("axis", "bias"), [(3, (B, 1, 1, 7)), (-1, (1, 1, S, 7)), (2, (1, 1, S, 7))])
def test_bias_softmax(axis, bias):
    inputs = x(B, N, S, 7), x(*bias)
    expected = torch_of(lambda d, b: (d + b).flatten(axis).softmax(-1).reshape(d.shape), *inputs)
    check("BiasSoftmax", inputs, {"axis": axis, "is_inner_broadcast": int(bias[0] != 1)}, expected)


def test_bias_split_gelu():
    def formula(given, bias):
        left, right = (given + bias).chunk(2, -1)
        return left * torch.nn.functional.gelu(right)

    inputs = x(B, S, D), x(D)
    check("BiasSplitGelu", inputs, {}, torch_of(formula, *inputs))


def test_gemm_fast_gelu():
    inputs = x(B, S, D), x(D, 3), x(3)
    expected = torch_of(lambda a, w, b: torch.nn.functional.gelu(a @ w + b, approximate="tanh"), *inputs)
    check("GemmFastGelu", inputs, {}, expected)


def test_nhwc_conv():
    inputs = x(B, 6, 5, 4), x(6, 3, 3, 2), x(6)

    def formula(images, weights, bias):
        images, weights = images.permute(0, 3, 1, 2), weights.permute(0, 3, 1, 2)
        result = torch.nn.functional.conv2d(images, weights, bias, (2, 1), 1, groups=2)
        return result.permute(0, 2, 3, 1).contiguous()

    check("NhwcConv", inputs, {"group": 2, "pads": [1] * 4, "strides": [2, 1]}, torch_of(formula, *inputs))


def group_norm(images, scale, bias, activation, channels_last):
    images = images.permute(0, 3, 1, 2) if channels_last else images
    result = torch.nn.functional.group_norm(images, 4, scale, bias, 0.1)
    result = torch.nn.functional.silu(result) if activation else result
    return (result.permute(0, 2, 3, 1) if channels_last else result).contiguous()


@pytest.mark.parametrize(("activation", "channels_last"), [(1, 1), (0, 0)])
def test_group_norm(activation, channels_last):
    inputs = x(*((B, 3, 5, 8) if channels_last else (B, 8, 3, 5))), x(8), x(8)
    attributes = {"activation": activation, "channels_last": channels_last, "groups": 4, "epsilon": 0.1}
    check("GroupNorm", inputs, attributes, torch_of(lambda *a: group_norm(*a, activation, channels_last), *inputs))


@pytest.mark.slow
@pytest.mark.parametrize("skip", [(B, 3, 5, 8), (B, 8), (B, 1, 1, 8)])
def test_skip_group_norm(skip):
    inputs = x(B, 3, 5, 8), x(8), x(8), x(*skip), x(8)
    total = inputs[0] + (inputs[3][:, None, None] if len(skip) == 2 else inputs[3]) + inputs[4]
    expected = [*torch_of(lambda *a: group_norm(*a, 1, 1), total, *inputs[1:3]), total]
    check("SkipGroupNorm", inputs, {"activation": 1, "groups": 4, "epsilon": 0.1}, expected)


# What is around them


def test_every_writer_is_of_an_operator_without_a_rule():
    assert not {("com.microsoft", name) for name in FUSED} & RULES.keys()


def test_within_a_branch():
    branch = [
        helper.make_node(
            "Attention", ["x", "w", "b"], [name], domain="com.microsoft", num_heads=N, unidirectional=causal
        )
        for causal, name in enumerate(("all", "causal"))
    ]
    infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [B, S, D]) for n in ("all", "causal")]
    node = helper.make_node(
        "If",
        ["flag"],
        ["y"],
        then_branch=helper.make_graph(branch[:1], "then", [], infos[:1]),
        else_branch=helper.make_graph(branch[1:], "else", [], infos[1:]),
    )
    shapes = {"x": (B, S, 6), "w": (6, 3 * D), "b": (3 * D,)}
    inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in shapes.items()]
    inputs.append(helper.make_tensor_value_info("flag", TensorProto.BOOL, []))
    graph = helper.make_graph([node], "g", inputs, [helper.make_tensor_value_info("y", TensorProto.FLOAT, [B, S, D])])
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    proto = helper.make_model(graph, opset_imports=imports, ir_version=10)
    made = onnxgrad.session(onnxgrad.gradient(proto, ["x", "w"]))
    arrays = {"x": x(B, S, 6), "w": W[0], "b": W[1]}
    seed = x(B, S, D)
    for flag in (True, False):
        attributes = {"num_heads": N, "unidirectional": int(not flag)}
        single, feeds = model("Attention", list(arrays.values()), attributes, ranks=[3])
        expected = onnxgrad.session(onnxgrad.gradient(single, ["in_0", "in_1"])).run(
            None, {**feeds, "out_0_grad": seed}
        )
        got = made.run(None, {**arrays, "flag": np.array(flag), "y_grad": seed})
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
        assert onnxgrad.check_gradient(proto, {**arrays, "flag": np.array(flag)}, ["x", "w"]).worst < 2e-6


def test_it_trains_and_the_file_keeps_its_operators(tmp_path):
    proto, feeds = model("Attention", [x(B, S, 6), *W], {"num_heads": N}, ranks=[3])
    for k in (1, 2):
        proto.graph.initializer.append(numpy_helper.from_array(feeds[f"in_{k}"], f"in_{k}"))
    del proto.graph.input[1:]
    trainer = onnxgrad.Trainer(proto, losses.MSE("out_0"), optim.SGD(0.1))
    batch = {"in_0": feeds["in_0"], "target": x(B, S, D)}
    values = [trainer.step(batch) for _ in range(20)]
    assert values[-1] < 0.9 * values[0]
    trainer.export(tmp_path / "trained.onnx")
    trained = onnx.load(tmp_path / "trained.onnx")
    assert [node.op_type for node in trained.graph.node] == ["Attention"]
    got = session(trained).run(None, {"in_0": feeds["in_0"]})[0]
    assert np.mean((got - batch["target"]) ** 2) < values[-1]


def test_refusals():
    inputs = [x(B, S, 6), *W]
    for given, attributes, text in (
        (
            inputs,
            {"do_rotary": 1},
            "gradient: Attention (node 'node'): it has do_rotary, which there is no gradient for",
        ),
        (
            [*inputs, ints(1, 2, 3)],
            {},
            "gradient: Attention (node 'node'): its mask has 3 elements, expected one or two for each of 2 examples",
        ),
    ):
        proto, _ = model("Attention", given, {"num_heads": N, **attributes}, ranks=[3])
        with raises(ValueError, text):
            onnxgrad.gradient(proto, "in_0")
    proto, _ = model("MultiHeadAttention", [x(B, S, D)] * 3, {"num_heads": N}, 4, ranks=[3, 4, 4, 4])
    with raises(ValueError, "gradient: MultiHeadAttention (node 'node'): onnxgrad cannot expand its output 'out_3'"):
        onnxgrad.gradient(proto, "in_0", "out_0")
