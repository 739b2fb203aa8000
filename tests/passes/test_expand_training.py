"""Operators of onnxruntime-training that are written with others: what 1.19.2 computes, in stock onnxruntime.

Where 1.19.2 has a CPU kernel, its results are in data/old_operators.npz and data/old_graphs.npz (data/make_old_*.py).
Operators that it has for CUDA alone are compared with definitions in NumPy, which stand here.
"""

import functools
import json
import math
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper, parser
from tests.checks import DEVICE, raises
from tests.runtime.sessions import bits_of, carried, needs_provider

import onnxgrad
from onnxgrad.op import OPERATORS
from onnxgrad.passes.expand_training import WRITERS
from onnxgrad.passes.expand_training.registry import NOT_THERE
from onnxgrad.schema import MICROSOFT

DATA = Path(__file__).parents[1] / "data"
ARTIFACTS = Path(__file__).parents[1] / "ort_training" / "artifacts_1_19_2"
RNG = np.random.default_rng(0)
if DEVICE == "cuda":
    import tests.gpu  # noqa: F401, it switches TF32 off

ON_A_GPU = DEVICE == "cuda"
PROVIDERS = [("CUDAExecutionProvider", {"use_tf32": "0"})] * ON_A_GPU + ["CPUExecutionProvider"]
pytestmark = needs_provider
FEW_ROUNDINGS = {"float64": 1e-13, "float32": 1e-5 if ON_A_GPU else 3e-6, "float16": 2e-3, "bfloat16": 2e-2}


def session_of(model, options=None):
    return onnxgrad.session(model, options, PROVIDERS)


def close(ours, theirs):
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    if ours.dtype.kind in "iub":
        assert np.array_equal(ours, theirs)
        return
    most = FEW_ROUNDINGS[ours.dtype.name]
    size = np.abs(theirs.astype(np.float64)).max(initial=1)
    np.testing.assert_allclose(ours.astype(np.float64), theirs.astype(np.float64), rtol=most, atol=most * size)


def index(file):
    return {entry["name"]: entry for entry in json.loads((DATA / f"{file}.json").read_text())["cases"]}


OPERATORS_ALONE, GRAPHS = index("old_operators"), index("old_graphs")
CASES = [
    pytest.param(file, case, id=f"{file}: {name}")
    for file, cases in (("old_operators", OPERATORS_ALONE), ("old_graphs", GRAPHS))
    for name, case in cases.items()
]


@functools.cache
def numbers(file):
    with np.load(DATA / f"{file}.npz") as packed:
        return dict(packed)


def array(file, stored):
    """What is stored, or a list of it for a sequence."""
    if isinstance(stored[0], list):
        return [array(file, each) for each in stored]
    dtype, shape, offset = stored
    return numbers(file)[dtype][offset : offset + math.prod(shape)].reshape(shape)


@pytest.mark.slow
@pytest.mark.parametrize(("file", "case"), CASES)
def test_agrees_with_the_peer(file, case):
    """Operators alone, and the graphs that the builder of 1.19.2 writes for one operator after the other."""
    model = onnx.load_from_string(array(file, case["model"]).tobytes())
    feeds = {name: array(file, stored) for name, stored in case["inputs"].items()}
    results = session_of(model).run(list(case["outputs"]), feeds)
    for ours, stored in zip(results, case["outputs"].values(), strict=True):
        theirs = array(file, stored)
        pairs = [(ours, theirs)] if isinstance(theirs, np.ndarray) else zip(ours, theirs, strict=True)
        for a, b in pairs:
            close(np.asarray(a), b)


# One node, and what stands in for a kernel.


def kind_of(array):
    return helper.np_dtype_to_tensor_dtype(array.dtype)


def info(name, given):
    if isinstance(given, list):
        return helper.make_tensor_sequence_value_info(name, kind_of(given[0]), None)
    return helper.make_tensor_value_info(name, kind_of(given), given.shape)


def node_model(op_type, inputs, outputs, domain=MICROSOFT, opset=18, shapes=None, **attributes):
    """Types of outputs by name; None among the inputs is one left out."""
    node = helper.make_node(
        op_type,
        [k if v is not None else "" for k, v in inputs.items()],
        list(outputs),
        "it",
        domain=domain,
        **attributes,
    )
    results = [helper.make_tensor_value_info(k, t, (shapes or {}).get(k)) for k, t in outputs.items()]
    graph = helper.make_graph([node], "g", [info(k, v) for k, v in inputs.items() if v is not None], results)
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


def run(op_type, inputs, outputs, **more):
    proto = node_model(op_type, inputs, outputs, **more)
    session = session_of(proto)
    given = {k: v for k, v in inputs.items() if v is not None}
    if any(a.dtype == ml_dtypes.bfloat16 for a in given.values() if isinstance(a, np.ndarray)):
        return run_halves(session, list(outputs), given)
    return session.run(list(outputs), given)


def run_halves(session, outputs, given):
    """bfloat16 goes in and out of onnxruntime's Python as OrtValues."""
    binding, kept = session.io_binding(), {name: carried(array) for name, array in given.items()}
    for name, array in given.items():
        value = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(kept[name], kind_of(array))
        binding.bind_ortvalue_input(name, value)
    for name in outputs:
        binding.bind_output(name, "cpu")
    session.run_with_iobinding(binding)
    kinds = {o.name: o.type for o in session.get_outputs()}
    results = zip(outputs, binding.get_outputs(), strict=True)
    return [bits_of(v, np.dtype(ml_dtypes.bfloat16 if "bfloat16" in kinds[n] else bool)) for n, v in results]


def normal(*shape, dtype=np.float32):
    return RNG.standard_normal(shape).astype(dtype)


FLOAT, DOUBLE, BOOL = TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.BOOL
FLOATS = (np.float32, np.float64)


@pytest.mark.parametrize("to", [TensorProto.FLOAT16, FLOAT, DOUBLE])
@pytest.mark.parametrize("fused", [0, 1])
def test_mixed_precision_scale(to, fused):
    a, b, s = normal(2, 3), normal(4), np.array([3], np.float32)
    expected = [(x * 3).astype(helper.tensor_dtype_to_np_dtype(to)) for x in (a, b)]
    if fused:
        expected = [np.concatenate([x.ravel() for x in expected])]
    outputs = {f"y{k}": to for k in range(len(expected))}
    found = run("MixedPrecisionScale", {"S": s, "a": a, "b": b}, outputs, to=to, fuse_outputs=fused)
    for ours, theirs in zip(found, expected, strict=True):
        close(ours, theirs)


def test_scales_of_several():
    a, b, c = normal(2, 3), normal(2, 3), normal(2, 3)
    scales = {"scale_0": 0.5, "scale_1": 2.0, "scale_2": -1.0}
    (total,) = run("ScaledSum", {"a": a, "b": b, "c": c}, {"y": FLOAT}, **scales)
    close(total, a * np.float32(0.5) + b * np.float32(2) - c)
    found = run("BatchScale", {"a": a}, {"x": FLOAT, "y": FLOAT, "z": FLOAT}, **scales)
    for ours, factor in zip(found, scales.values(), strict=True):
        close(ours, a * np.float32(factor))


@pytest.mark.parametrize("dtype", [np.float16, *FLOATS])
def test_finite(dtype):
    x = np.array([[1, np.inf], [np.nan, -np.inf], [0, 2]], dtype)
    (found,) = run("IsFinite", {"X": x}, {"Y": BOOL})
    close(found, np.isfinite(x))
    finite, infinite, nan = x[[0, 2], 0], x[:2, 1], x[1:2, 0]
    for inputs, settings, expected in (
        ([finite], {}, True), ([finite, infinite], {}, False), ([nan, finite], {}, False),
        ([nan, finite], {"isinf_only": 1}, True), ([infinite], {"isinf_only": 1}, False),
        ([infinite, finite], {"isnan_only": 1}, True), ([nan], {"isnan_only": 1}, False), ([finite[:0]], {}, True),
    ):  # fmt: skip
        given = {f"x{k}": a for k, a in enumerate(inputs)}
        (found,) = run("IsAllFinite", given, {"y": BOOL}, **settings)
        close(found, np.array(expected))


def test_all():
    for x in (np.array([[True, False]]), np.array([True, True]), np.zeros((0, 2), bool)):
        close(run("All", {"X": x}, {"Y": BOOL})[0], np.array([x.all()]))


def test_what_only_orders_nodes():
    """1.19.2 does it if memory is shared, which a session of one node does not do."""
    x, n = normal(2, 3), np.array([1, 2])
    found = run("PassThrough", {"x": x, "n": n}, {"y": FLOAT, "m": TensorProto.INT64})
    close(found[0], x)
    close(found[1], n)


def test_view():
    x = normal(5, 3)
    shapes = {"a": np.array([2, 3]), "b": np.array([], np.int64), "c": np.array([4, 2, 1])}
    found = run("View", {"x": x, **shapes}, dict.fromkeys("abc", FLOAT) and {f"y{k}": FLOAT for k in range(3)})
    pieces = np.split(x.ravel(), [6, 7])
    for ours, piece, shape in zip(found, pieces, shapes.values(), strict=True):
        close(ours, piece.reshape(shape))


@pytest.mark.parametrize("dtype", [np.float16, *FLOATS])
def test_padding_and_back(dtype):
    rows, indices, dims = normal(3, 4, dtype=dtype), np.array([5, 0, 2]), np.array([2, 3])
    expected = np.zeros((6, 4), dtype)
    expected[indices] = rows
    (padded,) = run("PadAndUnflatten", {"x": rows, "i": indices, "d": dims}, {"y": kind_of(rows)})
    close(padded, expected.reshape(2, 3, 4))
    outputs = {"y": kind_of(rows), "d": TensorProto.INT64}
    found, unflatten = run("FlattenAndUnpad", {"x": padded, "i": indices}, outputs)
    close(found, rows)
    close(unflatten, dims)


def packed(mask):
    bits = np.zeros(-(-mask.size // 32) * 32, np.uint64)
    bits[: mask.size] = mask.ravel()
    return (bits.reshape(-1, 32) << np.arange(32, dtype=np.uint64)).sum(1).astype(np.uint32)


@pytest.mark.parametrize("shape", [(3, 5), (4, 8), (7, 11), ()])
@pytest.mark.parametrize("dtype", FLOATS)
def test_gradient_of_a_dropout_with_bits(shape, dtype):
    dy, mask = normal(*shape, dtype=dtype), RNG.random(shape) > 0.4
    for ratio in (None, np.array(0.25, np.float32)):
        inputs = {"dy": np.asarray(dy), "mask": packed(np.asarray(mask)), "ratio": ratio}
        (dx,) = run("BitmaskDropoutGrad", inputs, {"dx": kind_of(np.asarray(dy))})
        close(dx, np.asarray(np.where(mask, dy / (1 - (0.5 if ratio is None else ratio)), 0), dtype))


@pytest.mark.parametrize("op_type", ["BitmaskDropout", "BiasDropout", "BitmaskBiasDropout"])
@pytest.mark.parametrize("training", [True, False])
def test_dropouts(op_type, training):
    """The numbers drawn are onnxruntime's own; what is made of them is checked."""
    x, bias, residual, ratio = normal(9, 10), normal(10), normal(9, 10), np.array(0.4, np.float32)
    has_bias, has_bits = "Bias" in op_type, "Bitmask" in op_type
    inputs = {"data": x, **({"bias": bias, "residual": residual} if has_bias else {})}
    inputs |= {"ratio": ratio, "training_mode": np.array(training)}
    y, mask = run(op_type, inputs, {"y": FLOAT, "mask": TensorProto.UINT32 if has_bits else BOOL}, seed=5)
    whole = x + bias if has_bias else x
    kept = mask if not has_bits else (mask[:, None] >> np.arange(32, dtype=np.uint32) & 1).ravel()[: x.size] > 0
    kept = kept.reshape(x.shape)
    if has_bits:
        close(mask, packed(kept))
    assert (0.3 < kept.mean() < 0.9) if training else kept.all()
    expected = np.where(kept, whole / np.float32(0.6), 0) if training else whole
    close(y, (expected + residual if has_bias else expected).astype(np.float32))


def softmax(x, axis):
    flat = np.exp(x.reshape(math.prod(x.shape[:axis]), -1))
    return (flat / flat.sum(1, keepdims=True)).reshape(x.shape)


@pytest.mark.parametrize("axis", [1, 2, -1])
def test_softmax_with_dropout(axis):
    x, bias, dy = normal(2, 3, 4), normal(2, 1, 4), normal(2, 3, 4)
    outputs = {"y": FLOAT, "mask": BOOL, "s": FLOAT}
    inputs = {"data": x, "bias": bias, "ratio": np.array(0.3, np.float32)}
    y, mask, s = run("BiasSoftmaxDropout", inputs, outputs, axis=axis, is_inner_broadcast=1)
    close(s, softmax(x + bias, axis % 3))
    close(y, (np.where(mask, s / np.float32(0.7), 0)).astype(np.float32))
    inputs = {"dy": dy, "mask": mask, "s": s, "ratio": np.array(0.3, np.float32)}
    (dx,) = run("SoftmaxDropoutGrad", inputs, {"dx": FLOAT}, axis=axis)
    g = np.where(mask, dy / np.float32(0.7), 0)
    axes = tuple(range(axis % 3, 3))
    close(dx, (s * (g - (s * g).sum(axes, keepdims=True))).astype(np.float32))


def interpolation(before, after, align_corners):
    """The matrix of a linear Resize along one axis."""
    matrix = np.zeros((after, before))
    for k in range(after):
        x = k * (before - 1) / (after - 1) if align_corners else max((k + 0.5) * before / after - 0.5, 0)
        low = min(int(x), before - 1)
        matrix[k, low] += 1 - (x - low)
        matrix[k, min(low + 1, before - 1)] += x - low
    return matrix


@pytest.mark.parametrize("mode", ["half_pixel", "align_corners"])
@pytest.mark.parametrize("by", ["scales", "sizes"])
def test_resize_grad(mode, by, dtype=np.float32):
    """onnxruntime has no Resize of float64 on the CPU."""
    dY, X = normal(2, 3, 6, 8, dtype=dtype), normal(2, 3, 3, 4, dtype=dtype)
    scales = np.array([1, 1, 2, 2], np.float32) if by == "scales" else None
    settings = {"mode": "linear", "coordinate_transformation_mode": mode}
    inputs = {"dY": dY, "X": X, "roi": None, "scales": scales}
    (dX,) = run("ResizeGrad", inputs, {"dX": kind_of(X)}, **settings)
    rows, columns = (interpolation(a, b, mode == "align_corners") for a, b in ((3, 6), (4, 8)))
    close(dX, (rows.T @ dY @ columns).astype(dtype))


@pytest.mark.parametrize(("strides", "pads"), [([1, 1], [0] * 4), ([2, 1], [1, 0, 1, 0])])
def test_conv_transpose_grad(strides, pads, dtype=np.float32):
    """onnxruntime has no Conv of float64 on the CPU."""
    X, W = normal(2, 2, 4, 3, dtype=dtype), normal(2, 3, 3, 2, dtype=dtype)
    size = [
        (n - 1) * s + k - pads[a] - pads[a + 2] for a, (n, s, k) in enumerate(zip((4, 3), strides, (3, 2), strict=True))
    ]
    dY = normal(2, 3, *size, dtype=dtype)
    wide = np.pad(dY, ((0, 0), (0, 0), (pads[0], pads[2]), (pads[1], pads[3])))
    dX, dW = np.zeros(X.shape), np.zeros(W.shape)
    for i, j in np.ndindex(4, 3):
        window = wide[:, :, i * strides[0] : i * strides[0] + 3, j * strides[1] : j * strides[1] + 2]
        dX[:, :, i, j] = np.einsum("ncij,kcij->nk", window, W)
        dW += np.einsum("nk,ncij->kcij", X[:, :, i, j], window)
    outputs = dict.fromkeys(("dX", "dW", "dB"), kind_of(X))
    found = run("ConvTransposeGrad", {"dY": dY, "X": X, "W": W}, outputs, strides=strides, pads=pads)
    for ours, theirs in zip(found, (dX, dW, dY.sum((0, 2, 3))), strict=True):
        close(ours, theirs.astype(dtype))


def lamb(w, g, m1, m2, rate, step, divisor=1.0, alpha=0.9, decay=0.0, bounds=(0, np.inf)):
    alpha, beta, decay, epsilon = (float(np.float32(x)) for x in (alpha, 0.999, decay, 1e-6))  # as attributes are
    g = g / divisor
    m1, m2 = alpha * m1 + (1 - alpha) * g, beta * m2 + (1 - beta) * g * g
    corrections = [np.float32(1 - rate**step).astype(w.dtype) for rate in (alpha, beta)]
    direction = m1 / corrections[0] / (np.sqrt(m2 / corrections[1]) + epsilon) + decay * w
    norms = np.linalg.norm(w), np.linalg.norm(direction)
    ratio = np.clip(norms[0] / norms[1], *bounds) if all(norms) else 1
    return w - rate * ratio * direction, -rate * ratio * direction, m1, m2


@pytest.mark.parametrize("signal", [None, True, False])
@pytest.mark.parametrize("dtype", FLOATS)
def test_lamb(signal, dtype):
    first = [normal(3, 2, dtype=dtype) for _ in range(3)] + [np.abs(normal(3, 2, dtype=dtype))]
    second = [np.zeros(4, dtype), *(normal(4, dtype=dtype) for _ in range(2)), np.abs(normal(4, dtype=dtype))]
    inputs = {
        "signal": None if signal is None else np.array(signal), "scale": np.array(4, dtype),
        "norm": np.array(10, dtype), "R": np.array(0.1, dtype), "step": np.array([3]),
        **{f"a{k}": a for k, a in enumerate(first)}, "none": None, **{f"b{k}": a for k, a in enumerate(second)},
    }  # fmt: skip
    outputs = {"t": TensorProto.INT64} | {
        f"{x}{k}": kind_of(first[0]) for x in "AB" for k in range(5) if (x, k) != ("B", 4)
    }
    outputs = {("" if k == "A4" else k): v for k, v in outputs.items()}
    settings = {"lambda": [0.1, 0.0], "alpha": [0.8, 0.9], "ratio_min": 0.5, "ratio_max": 1.5}
    node = node_model("LambOptimizer", inputs, {k: v for k, v in outputs.items() if k}, **settings)
    node.graph.node[0].output[:] = list(outputs)
    found = session_of(node).run(None, {k: v for k, v in inputs.items() if v is not None})
    if signal is False:
        expected = [np.array([3]), *first, *second]
    else:  # the norm is above 4 · 1, so gradients are divided by 10
        how = {"rate": 0.1, "step": 3, "divisor": 10, "bounds": (0.5, 1.5)}
        expected = [np.array([4]), *lamb(*first, **how, alpha=0.8, decay=0.1), *lamb(*second, **how)]
    for ours, theirs in zip(found, expected, strict=True):
        close(ours, np.asarray(theirs, ours.dtype))


def test_adam_of_mixed_precision():
    """The CPU kernel of 1.19.2 passes these inputs over; its CUDA kernel does not."""
    w, g, m1, m2 = normal(5), normal(5).astype(np.float16), normal(5), np.abs(normal(5))
    for signal in (True, False):
        inputs = {
            "R": np.array(0.1, np.float32), "T": np.array([2]), "w": w, "g": g, "m1": m1, "m2": m2,
            "half": w.astype(np.float16), "scale": np.array(8, np.float32), "norm": np.array(4, np.float32),
            "signal": np.array(signal),
        }  # fmt: skip
        kinds = [TensorProto.INT64, FLOAT, FLOAT, FLOAT, TensorProto.FLOAT16, TensorProto.FLOAT16]
        found = run("AdamOptimizer", inputs, {f"y{k}": kind for k, kind in enumerate(kinds)}, epsilon=1e-3)
        if signal:
            small = g.astype(np.float64) / 8
            a, b = 0.9 * m1 + 0.1 * small, 0.999 * m2 + 0.001 * small**2
            delta = -0.1 * a / (1 - 0.9**2) / (np.sqrt(b / (1 - 0.999**2)) + 1e-3)
            expected = [np.array([3]), a, b, w + delta, delta, w + delta]
        else:
            expected = [np.array([2]), m1, m2, w, g, w]
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=2e-3 if ours.dtype == np.float16 else 1e-4)


def test_packed_activations():
    x = normal(3, 7)
    close(run("GistBinarizeEncoder", {"x": x}, {"y": BOOL})[0], x > 0)
    close(run("GistBinarizeDecoder", {"x": x > 0}, {"y": FLOAT}, to=FLOAT)[0], (x > 0).astype(np.float32))
    (half,) = run("GistPack16Encoder", {"x": x}, {"y": TensorProto.FLOAT16})
    close(half, x.astype(np.float16))
    close(run("GistPack16Decoder", {"x": half}, {"y": FLOAT}, to=FLOAT)[0], half.astype(np.float32))
    (bits,) = run("GistPack1Encoder", {"x": x}, {"y": TensorProto.UINT8})
    close(bits, np.packbits(x > 0))
    close(run("GistPack1Decoder", {"x": bits}, {"y": FLOAT}, to=FLOAT)[0], np.unpackbits(bits).astype(np.float32))


# Types and inputs that the kernels of 1.19.2 do not take, though its schemas do.


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_other_types_of_accumulators(dtype):
    a, b = normal(2, 3).astype(dtype), normal(2, 3).astype(dtype)
    kind = helper.np_dtype_to_tensor_dtype(a.dtype)
    outputs = {"flag": BOOL, "sum": kind}
    for flag in (True, False):
        inputs = {"buffer": a, "value": b, "overwrite": np.array([flag])}
        found, total = run("InPlaceAccumulatorV2", inputs, outputs)
        close(np.asarray(found), np.array([True]))
        close(np.asarray(total), b if flag else a + b)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_types_of_optimizers(dtype):
    tensors = [[normal(*s).astype(dtype) for s in ((2, 3), (4,))] for _ in range(3)]
    second = [np.abs(t) for t in tensors[2]]
    inputs = {"lr": np.array([0.1], np.float32), "step": np.array([2])}
    inputs |= dict(zip(("w", "g", "m1", "m2"), (*tensors, second), strict=True))
    node = node_model("AdamWOptimizer", inputs, {"flag": BOOL}, adam_mode=1, weight_decay=0.1, epsilon=1e-6)
    found = session_of(node).run(["w.updated", "m1.updated", "m2.updated"], inputs)
    for k in range(2):
        w, g, m1, m2 = (t[k].astype(np.float64) for t in (*tensors, second))
        m1, m2 = 0.9 * m1 + 0.1 * g, 0.999 * m2 + 0.001 * g * g
        w = w - 0.1 * np.sqrt(1 - 0.999**2) / (1 - 0.9**2) * m1 / (np.sqrt(m2) + 1e-6)
        for ours, theirs in zip(found, (w - 0.01 * w, m1, m2), strict=True):
            assert ours[k].dtype == dtype
            np.testing.assert_allclose(ours[k], theirs, rtol=1e-2 if dtype == np.float16 else 2e-4, atol=1e-4)


def test_gradients_in_float64():
    dY, Y = normal(2, 3, 4, dtype=np.float64), np.log(softmax(normal(2, 3, 4, dtype=np.float64), 1))
    (dX,) = run("LogSoftmaxGrad", {"dY": dY, "Y": Y}, {"dX": DOUBLE})
    close(dX, dY - np.exp(Y) * dY.sum((1, 2), keepdims=True))
    g, Y = normal(4, 6, dtype=np.float64), normal(4, 6, dtype=np.float64)
    scale, bias, inverse = normal(6, dtype=np.float64) + 3, normal(6, dtype=np.float64), np.full((4, 1), 1.7)
    inputs = {"g": g, "Y": Y, "scale": scale, "bias": bias, "inverse": inverse}
    found = run("InvertibleLayerNormalizationGrad", inputs, dict.fromkeys(("x", "s", "b"), DOUBLE))
    xhat, gs = (Y - bias) / scale, g * scale
    means = gs.mean(1, keepdims=True), (gs * xhat).mean(1, keepdims=True)
    expected = (gs - means[0] - xhat * means[1]) * inverse, (g * xhat).sum(0), g.sum(0)
    for ours, theirs in zip(found, expected, strict=True):
        close(ours, theirs)


@pytest.mark.parametrize("to", [TensorProto.FLOAT16, FLOAT])
def test_losses_of_another_type(to):
    scores, labels = normal(4, 3).astype(np.float16 if to == FLOAT else np.float32), np.array([0, 2, 1, 1])
    outputs, dtype = {"loss": to, "log_prob": to}, helper.tensor_dtype_to_np_dtype(to)
    # The operator is one of ours, unless its results have another type; a node of the others is needed to look at it.
    (loss, log_prob), dY = _losses(scores, labels, outputs, to), np.array(0.5, np.float32)
    wide = scores.astype(np.float64)
    expected = wide - np.log(np.exp(wide).sum(1, keepdims=True))
    np.testing.assert_allclose(log_prob, expected, rtol=2e-3)
    np.testing.assert_allclose(loss, -expected[range(4), labels].mean(), rtol=2e-3)
    inputs = {"dY": dY.astype(np.float32), "lp": expected.astype(np.float32), "labels": labels}
    (gradient,) = run("SoftmaxCrossEntropyLossInternalGrad", inputs, {"d": to}, output_type=to)
    assert gradient.dtype == dtype
    np.testing.assert_allclose(gradient, (np.exp(expected) - np.eye(3)[labels]) / 8, rtol=2e-3, atol=1e-4)


def _losses(scores, labels, outputs, to):
    proto = node_model(
        "SoftmaxCrossEntropyLossInternal", {"s": scores, "l": labels}, outputs, output_type=to, reduction="mean"
    )
    proto.graph.node.append(helper.make_node("Group", ["loss"], ["done"], domain=MICROSOFT))
    return session_of(proto).run(list(outputs), {"s": scores, "l": labels})


def test_a_label_that_is_ignored_may_be_computed():
    lp = np.log(softmax(normal(4, 3), 1))
    labels, ignored = np.array([0, 2, 1, 2]), np.array(2)
    inputs = {"dY": np.array(1, np.float32), "lp": lp, "labels": labels, "w": None, "ignored": ignored}
    (gradient,) = run("SoftmaxCrossEntropyLossInternalGrad", inputs, {"d": FLOAT})
    expected = (np.exp(lp) - np.eye(3)[labels]) * (labels != 2)[:, None] / 2
    close(gradient, expected.astype(np.float32))
    (loss,) = run("NegativeLogLikelihoodLossInternal2", dict(list(inputs.items())[1:]), {"d": FLOAT})
    close(loss, np.asarray(-lp[[0, 2], [0, 1]].mean(), np.float32))


def test_cross_entropy_of_every_sample():
    """1.19.2 has no kernel for reduction none; its schema does."""
    x, label = normal(4, 3), np.eye(3, dtype=np.float32)[[0, 2, 1, 1]]
    lp = np.log(softmax(x, 1))
    loss, found = run("SoftmaxCrossEntropy", {"x": x, "l": label}, {"y": FLOAT, "lp": FLOAT}, reduction="none")
    close(loss, -(lp * label).sum(1))
    close(found, lp)
    g = normal(4)
    inputs = {"g": g, "lp": lp, "l": label}
    close(run("SoftmaxCrossEntropyGrad", inputs, {"d": FLOAT}, reduction="none")[0], (np.exp(lp) - label) * g[:, None])


# Sequences, pools, batches: what depends on the graph around a node.


@pytest.mark.parametrize("clip", [False, True])
def test_sequences_of_known_length_need_no_loop(clip, tmp_path):
    names = [f"{kind}{k}" for kind in ("w", "g", "m", "v") for k in range(2)]
    nodes = "\n".join(f"{kind} = SequenceConstruct({kind}0, {kind}1)" for kind in ("w", "g", "m", "v"))
    proto = parser.parse_model(f"""
    <ir_version: 8, opset_import: ["" : 18, "com.microsoft" : 1]>
    g (float[1] lr, int64[1] step, {", ".join(f"float[3] {n}" for n in names)}) => (bool[1] flag, seq(float[3]) new) {{
        {nodes}
        {"c = com.microsoft.InplaceClipGradNorm <max_norm = 0.5> (g)" if clip else "c = Identity(g)"}
        flag, new = com.microsoft.AdamWOptimizer <adam_mode = 1> (lr, step, w, {"c" if clip else "g"}, m, v)
    }}""")
    feeds = {n: np.abs(normal(3)) for n in names} | {"lr": np.array([0.1], np.float32), "step": np.array([1])}
    options = onnxgrad.register()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    flag, found = session_of(proto, options).run(None, feeds)
    assert flag.tolist() == [True]
    assert not {n.op_type for n in onnx.load(tmp_path / "optimized.onnx").graph.node} & {"Loop", "SequenceAt"}
    norm = np.sqrt(sum((feeds[f"g{k}"] ** 2).sum() for k in range(2)))
    factor = min(0.5 / (norm + 1e-6), 1) if clip else 1
    for k in range(2):
        w, g, m, v = (feeds[f"{kind}{k}"].astype(np.float64) for kind in ("w", "g", "m", "v"))
        m, v = 0.9 * m + 0.1 * g * factor, 0.999 * v + 0.001 * (g * factor) ** 2
        w = w - 0.1 * np.sqrt(1 - 0.999) / 0.1 * m / (np.sqrt(v) + 1e-8)
        np.testing.assert_allclose(found[k], w - 0.001 * w, rtol=1e-4)


def gradient_graph(text, **arrays):
    proto = parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>\n{text}')
    return session_of(proto).run(None, arrays)


def test_max_pool_is_not_asked_for_indices():
    """In a graph as 1.19.2's builder writes it; sizes may be unknown then."""
    x = normal(2, 3, 5, 6)
    text = """g (float[N, 3, H, W] x, float[N, 3, h, w] g) => (float[N, 3, h, w] y, float[N, 3, H, W] dx) {
        y, at = MaxPool <kernel_shape = [3, 2], strides = [2, 2]> (x)
        dx = MaxPoolGrad <kernel_shape = [3, 2], strides = [2, 2]> (g, at)
    }"""
    g = normal(2, 3, 2, 3)
    y, dx = gradient_graph(text, x=x, g=g)
    expected = np.zeros_like(x)
    for n, c, i, j in np.ndindex(g.shape):
        window = x[n, c, 2 * i : 2 * i + 3, 2 * j : 2 * j + 2]
        a, b = np.unravel_index(np.argmax(window), window.shape)
        assert y[n, c, i, j] == window[a, b]
        expected[n, c, 2 * i + a, 2 * j + b] += g[n, c, i, j]
    close(dx, expected)


def test_statistics_of_a_batch_are_found_once():
    x, g = normal(4, 3, 5), normal(4, 3, 5)
    channels = {"s": np.abs(normal(3)), "b": normal(3), "m": normal(3), "v": np.abs(normal(3))}
    text = """g (float[N, 3, 5] x, float[N, 3, 5] g, float[3] s, float[3] b, float[3] m, float[3] v)
        => (float[N, 3, 5] y, float[N, 3, 5] dx, float[3] ds, float[3] db) {
        y, m2, v2, mean, inverse = com.microsoft.BatchNormInternal <epsilon = 0.01, momentum = 0.8> (x, s, b, m, v)
        dx, ds, db = com.microsoft.BatchNormalizationGrad <epsilon = 0.01> (g, x, s, mean, inverse)
    }"""
    y, dx, ds, db, m2, v2 = gradient_graph(text, x=x, g=g, **channels)
    s, b, m, v = (a[:, None] for a in channels.values())
    mean, var = x.mean((0, 2), keepdims=True), x.var((0, 2), keepdims=True)
    inverse = 1 / np.sqrt(var + 0.01)
    xhat = (x - mean) * inverse
    np.testing.assert_allclose(y, xhat * s + b, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(m2, (0.8 * m + 0.2 * mean[0]).ravel(), rtol=1e-5)
    np.testing.assert_allclose(v2, (0.8 * v + 0.2 * var[0]).ravel(), rtol=1e-5)
    np.testing.assert_allclose(db, g.sum((0, 2)), rtol=1e-5)
    np.testing.assert_allclose(ds, (g * xhat).sum((0, 2)), rtol=1e-4, atol=1e-5)
    average = (g.mean((0, 2), keepdims=True), (g * xhat).mean((0, 2), keepdims=True))
    np.testing.assert_allclose(dx, s * inverse * (g - average[0] - xhat * average[1]), rtol=1e-3, atol=1e-5)


def test_graphs_of_opsets_before_13():
    x = normal(2, 3, 4)
    proto = parser.parse_model("""<ir_version: 7, opset_import: ["" : 11, "com.microsoft" : 1]>
    g (float[2, 3, 4] x, float[2, 3, 4] g) => (float[2, 3, 4] y, float[2, 3, 4] dx, float[3, 4] sum) {
        y = Softmax <axis = 1> (x)
        dx = com.microsoft.SoftmaxGrad <axis = 1> (g, y)
        sum = ReduceSum <axes = [0], keepdims = 0> (dx)
    }""")
    g = normal(2, 3, 4)
    y, dx, total = session_of(proto).run(None, {"x": x, "g": g})
    s = softmax(x, 1)
    close(y, s)
    close(dx, s * (g - (s * g).sum((1, 2), keepdims=True)))
    close(total, dx.sum(0))


def test_gradients_pass_through_old_operators():
    proto = parser.parse_model("""<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>
    g (float[3] x, float[1] s) => (float y) {
        scaled = com.microsoft.Scale (x, s)
        y = ReduceSumSquare <keepdims = 0> (scaled)
    }""")
    x, s = normal(3), np.array([3], np.float32)
    gradient = session_of(onnxgrad.gradient(proto, wrt="x")).run(["x_grad"], {"x": x, "s": s})[0]
    np.testing.assert_allclose(gradient, 2 * 9 * x, rtol=1e-6)


def test_gradients_pass_straight_through_fake_quantization():
    proto = parser.parse_model("""<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>
    g (float[4] x, float s, float z) => (float y) {
        rounded, mask = com.microsoft.FakeQuant(x, s, z)
        y = ReduceSumSquare <keepdims = 0> (rounded)
    }""")
    feeds = {"x": np.array([0.12, -0.3, 99, -99], np.float32), "s": np.array(0.1, np.float32), "z": np.float32(100)}
    feeds["z"] = np.asarray(feeds["z"])
    gradient = onnxgrad.gradient(proto, wrt="x")
    assert "FakeQuant" not in {node.op_type for node in gradient.graph.node}
    found = onnxruntime.InferenceSession(gradient.SerializeToString()).run(["x_grad"], feeds)[0]
    np.testing.assert_allclose(found, [0.2, -0.6, 0, 0], atol=1e-6)


def test_every_kind_of_model(tmp_path):
    x = normal(2, 3)
    proto = node_model("ZeroGradient", {"x": x, "s": x}, {"y": FLOAT})
    onnx.save(proto, tmp_path / "m.onnx")
    before = proto.SerializeToString()
    for given in (proto, ir.from_proto(proto), tmp_path / "m.onnx", str(tmp_path / "m.onnx")):
        assert not session_of(given).run(None, {"x": x, "s": x})[0].any()
    assert proto.SerializeToString() == before
    function = parser.parse_model("""<ir_version: 8, opset_import: ["" : 18, "my" : 1, "com.microsoft" : 1]>
    g (float[2, 3] x, float[1] s) => (float[2, 3] y) { y = my.scaled(x, s) }
    <domain: "my", opset_import: ["" : 18, "com.microsoft" : 1]>
    scaled (x, s) => (y) { y = com.microsoft.Scale <scale_down = 1> (x, s) }""")
    s = np.array([2], np.float32)
    close(session_of(function).run(None, {"x": x, "s": s})[0], x / 2)
    (tmp_path / "bad.onnx").write_bytes(b"com.microsoft, but not a model")
    with pytest.raises(Exception, match="INVALID_PROTOBUF"):
        session_of(tmp_path / "bad.onnx")


def test_what_is_refused():
    x = normal(2, 3)

    def refused(text, op_type, inputs, outputs=None, **more):
        with raises(ValueError, f"session: {op_type} (node 'it'): {text}"):
            run(op_type, inputs, outputs or {"y": FLOAT}, **more)

    refused("the input scale is missing", "Scale", {"input": x})
    refused("the attribute to is missing", "MixedPrecisionScale", {"S": x, "a": x})
    refused("it has 3 inputs, expected at most 2", "Scale", {"input": x, "scale": x, "more": x})
    refused("reduction is 'median', expected one of 'none', 'mean', 'sum'", "SoftmaxCrossEntropy",
            {"x": x, "l": x}, reduction="median")  # fmt: skip
    refused("norm_type is 'max', expected 'fro'", "InplaceClipGradNorm", {"g": [x]}, norm_type="max")
    refused(
        "the shape of 'y' is not known: declare it in the model's value_info, where the batch may stay unknown",
        "MaxPoolGrad", {"dY": x, "at": np.zeros((2, 3), np.int64)}, domain="",
    )  # fmt: skip
    inputs = {"lr": x[0, :1], "step": np.array([1]), **{k: [x] for k in "wgmv"}}
    refused(
        "adam_mode is 2, expected 0 (PyTorch's) or 1 (Hugging Face's)",
        "AdamWOptimizer",
        inputs,
        {"y": BOOL},
        adam_mode=2,
    )
    with raises(
        ValueError,
        "session: the model has the operator YieldOp, which onnxgrad does not have: it calls PyTorch in the middle of "
        "a graph, for ORTModule",
    ):
        run("YieldOp", {"x": x}, {"y": FLOAT})
    with raises(
        ValueError,
        "session: Scale (node 'inside') is in a subgraph of If (node 'it'), expected such operators in the main graph "
        "alone",
    ):
        branch = parser.parse_graph("b () => (float[2, 3] r) { [inside] r = com.microsoft.Scale(x, s) }")
        proto = node_model("If", {"c": np.array(True), "x": x, "s": x[0, :1]}, {"y": FLOAT}, domain="")
        del proto.graph.node[0].input[1:]
        proto.graph.node[0].attribute.extend(
            helper.make_attribute(name, branch) for name in ("then_branch", "else_branch")
        )
        session_of(proto)


# Whole graphs.


def folders():
    return [pytest.param(path, id=path.name) for path in sorted(ARTIFACTS.iterdir())]


def stored(folder):
    with np.load(folder / "expected.npz") as packed:
        found = {}
        for key, array in packed.items():
            kind, _, name = key.partition("/")
            if name:
                found.setdefault(kind, {})[name] = array
            else:
                found[kind] = array
    return found


@pytest.mark.parametrize("folder", folders())
def test_artifacts_train_as_in_the_peer(folder):
    """All 50 steps, by sessions of training_model.onnx and optimizer_model.onnx alone."""
    expected = stored(folder)
    training, optimizer = (session_of(folder / f"{kind}_model.onnx") for kind in ("training", "optimizer"))
    parameters, trained = dict(expected["initial"]), list(expected["gradient"])
    buffers = {f"{n}_grad.accumulation.buffer": np.zeros_like(parameters[n]) for n in trained}
    order = [n.name.removesuffix("_grad.accumulation.buffer") for n in training.get_inputs() if n.name in buffers]
    moments = {
        kind: [np.zeros_like(parameters[n]) for n in order] for kind in ("first_order_moments", "second_order_moments")
    }
    batches = len(next(iter(expected["input"].values())))
    losses = []
    for step in range(len(expected["losses"])):
        batch = {name: array[step % batches] for name, array in expected["input"].items()}
        feeds = {**batch, **parameters, **buffers, "lazy_reset_grad": np.array([True])}
        loss, *rest = training.run(None, feeds)
        made = dict(zip([o.name for o in training.get_outputs()][1:], rest, strict=True))
        losses.append(loss)
        gradients = {n: made[f"{n}_grad.accumulation.buffer.updated"] for n in order}
        if step == 0:  # a bias before a BatchNormalization has roundings for a gradient, and nothing else
            largest = max(np.abs(g).max() for g in expected["gradient"].values())
            for name, theirs in expected["gradient"].items():
                np.testing.assert_allclose(gradients[name], theirs, rtol=1e-4, atol=1e-6 * largest)
        parameters |= {n: made[f"{n}.updated"] for n in parameters if f"{n}.updated" in made}
        state = {
            "learning_rate": expected["rate"].reshape(1), "step": np.array([step + 1]),
            "params": [parameters[n] for n in order], "gradients": list(gradients.values()), **moments,
        }  # fmt: skip
        names = [i.name for i in optimizer.get_inputs()]
        results = optimizer.run(None, {n: state[n] for n in names})
        updated = dict(zip([o.name for o in optimizer.get_outputs()], results, strict=True))
        parameters |= dict(zip(order, updated["params.updated"], strict=True))
        moments |= {kind: updated[f"{kind}.updated"] for kind in moments if f"{kind}.updated" in updated}
    np.testing.assert_allclose(losses, expected["losses"], rtol=1e-4 if ON_A_GPU else 1e-5)
    if "evaluated" not in expected:
        return  # 1.19.2 cannot
    evaluation = session_of(folder / "eval_model.onnx")
    for k, theirs in enumerate(expected["evaluated"]):
        feeds = {name: array[k] for name, array in expected["input"].items()} | parameters
        feeds = {i.name: feeds[i.name] for i in evaluation.get_inputs()}
        np.testing.assert_allclose(evaluation.run(None, feeds)[0], theirs, rtol=1e-4)


def test_every_operator_of_the_peer_is_there_or_has_a_reason():
    names = set((DATA / "ort_training_operators.txt").read_text().split())
    assert names == set(names) & (set(OPERATORS) | set(WRITERS) | set(NOT_THERE))
    assert not set(NOT_THERE) & set(WRITERS)
    tested = {name.partition(":")[0] for name in OPERATORS_ALONE} | set(Path(__file__).read_text().split('"'))
    assert set(WRITERS) <= tested
