"""Weights that are stored as integers: what they are trained as, and what exports make of them again."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper, parser
from tests.checks import raises

import onnxgrad
from onnxgrad.train import losses, optim

RNG = np.random.default_rng(0)
K, N = 8, 6
TYPES = {
    "int4": TensorProto.INT4, "uint4": TensorProto.UINT4, "int8": TensorProto.INT8, "uint8": TensorProto.UINT8,
    "int16": TensorProto.INT16, "uint16": TensorProto.UINT16,
}  # fmt: skip
SCHEMES = {
    "per tensor": ((), {}),
    "one scale in a vector": ((1,), {}),
    "per axis": ((N,), {"axis": 1}),
    "the axis before": ((K,), {"axis": -2}),
    "blocked": ((2, N), {"axis": 0, "block_size": 4}),
    "blocked, a rest": ((3, N), {"axis": 0, "block_size": 3}),
}
BATCH = {"x": RNG.standard_normal((5, K)).astype(np.float32), "target": RNG.standard_normal((5, N)).astype(np.float32)}


def limits(kind):
    bits, signed = int(kind.lstrip("uint")), kind[0] == "i"
    return (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)


def initializer(name, kind, array):
    return helper.make_tensor(name, kind, array.shape, array.ravel().tolist())


def stored(kind="int8", shape=(), has_zero_point=True, name="w_quantized", **attributes):
    """y = x · w + b, with the weight as integers, and the bias as integers of 32 bits; and the scale of the weight."""
    low, high = limits(kind)
    # A scale of few digits: what rounds to the even one of two integers is far from another, whoever divides.
    scale = (RNG.integers(8, 16, shape) / 1024 / high).astype(np.float32)
    zero = RNG.integers(low // 4, high // 4 + 1, shape) if has_zero_point else np.zeros(shape, int)
    zeros = [initializer("w_zero_point", TYPES[kind], np.asarray(zero))] if has_zero_point else []
    inputs = [name, "w_scale", *(t.name for t in zeros)]
    nodes = [
        helper.make_node("DequantizeLinear", inputs, ["d"], **attributes),
        helper.make_node("DequantizeLinear", ["b_quantized", "b_scale"], ["b"]),
        helper.make_node("Gemm", ["x", "d", "b"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes, "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", K])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", N])],
        [initializer(name, TYPES[kind], RNG.integers(low, high + 1, (K, N))), *zeros,
         numpy_helper.from_array(scale, "w_scale"),
         numpy_helper.from_array(RNG.integers(-2000, 2000, N).astype(np.int32), "b_quantized"),
         numpy_helper.from_array(np.array(0.001, np.float32), "b_scale")],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def trainer_of(model, rate=0.1, trainable=None):
    return onnxgrad.Trainer(model, losses.MSE("y"), optim.SGD(rate), trainable)


def arrays(path):
    model = path if isinstance(path, onnx.ModelProto) else onnx.load(path)
    return {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}


def run(model, x):
    """As it stands: optimized, onnxruntime rounds what it multiplies with such weights to 8 bits."""
    model = model.SerializeToString() if isinstance(model, onnx.ModelProto) else str(model)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(model, options).run(["y"], {"x": x})[0]


def predictions(trainer, batch):
    found = {}

    def keep(outputs, _batch):
        found["y"] = outputs["y"].copy()
        return 0.0

    trainer.evaluate([batch], {"keep": keep})
    return found["y"]


ONE_OF_EACH = list(zip(SCHEMES, TYPES, strict=True))


@pytest.mark.parametrize(
    ("name", "kind"),
    [*ONE_OF_EACH, *(pytest.param(name, kind, marks=pytest.mark.slow)
                     for name in SCHEMES for kind in TYPES if (name, kind) not in ONE_OF_EACH)],
)  # fmt: skip
def test_a_model_that_is_not_trained_stays_what_it_was(name, kind, tmp_path):
    """All integers come back, and all that the trainer changed is how they are stored."""
    shape, attributes = SCHEMES[name]
    model = stored(kind, shape, has_zero_point=name != "per axis", **attributes)
    trainer = trainer_of(model)
    assert list(trainer.parameters) == ["w", "b"]
    np.testing.assert_allclose(predictions(trainer, BATCH), run(model, BATCH["x"]), rtol=1e-5, atol=1e-6)
    trainer.export(tmp_path / "m.onnx")
    before, after = arrays(model), arrays(tmp_path / "m.onnx")
    assert {n: (a.dtype, a.tobytes()) for n, a in before.items()} == {
        n: (a.dtype, a.tobytes()) for n, a in after.items()
    }


@pytest.mark.parametrize("name", ["per axis", "blocked, a rest"])
def test_training_sees_what_the_export_computes(name, tmp_path):
    shape, attributes = SCHEMES[name]
    model = stored("int8", shape, **attributes)
    trainer = trainer_of(model)
    for _ in range(5):
        trainer.step(BATCH)
    trainer.export(tmp_path / "m.onnx")
    before, after = arrays(model), arrays(tmp_path / "m.onnx")
    changed = {n for n in before if before[n].tobytes() != after[n].tobytes()}
    assert changed == {"w_quantized", "b_quantized"}
    # The bias is not rounded in training, to steps of 0.001 here.
    np.testing.assert_allclose(predictions(trainer, BATCH), run(tmp_path / "m.onnx", BATCH["x"]), atol=0.0006)


@pytest.mark.parametrize(("kind", "per_channel"), [("int8", True), ("uint8", False), ("int4", True), ("int8", False)])
def test_the_gradient_is_that_of_torch(kind, per_channel):
    """torch.fake_quantize_…: straight through, and nothing for what was cut off."""
    model = stored(kind, (N,) if per_channel else (), **({"axis": 1} if per_channel else {}))
    trainer = trainer_of(model, rate=1e-3)
    low, high = limits(kind)
    given = arrays(model)
    trainer.parameters["w"][...] *= np.sqrt(2)  # so that some are cut off
    w = torch.from_numpy(trainer.parameters["w"].copy()).requires_grad_()
    b = torch.from_numpy(trainer.parameters["b"].copy()).requires_grad_()
    scale, zero = torch.from_numpy(given["w_scale"].copy()), given["w_zero_point"].astype(np.int32)
    if per_channel:
        rounded = torch.fake_quantize_per_channel_affine(w, scale, torch.from_numpy(zero), 1, low, high)
    else:
        rounded = torch.fake_quantize_per_tensor_affine(w, float(scale), int(zero), low, high)
    loss = torch.nn.functional.mse_loss(torch.from_numpy(BATCH["x"]) @ rounded + b, torch.from_numpy(BATCH["target"]))
    loss.backward()
    assert 0 < (w.grad == 0).float().mean() < 0.9
    assert trainer.step(BATCH) == pytest.approx(float(loss.detach()), rel=1e-6)
    for name, parameter in (("w", w), ("b", b)):
        np.testing.assert_allclose(trainer.gradients[name], parameter.grad, rtol=1e-6, atol=1e-6)


def test_what_is_rounded_and_cut_off(tmp_path):
    """Half to even, and no further than the type goes."""
    model = stored("int8", has_zero_point=False)
    model.graph.initializer[1].CopyFrom(numpy_helper.from_array(np.array(0.5, np.float32), "w_scale"))
    trainer = trainer_of(model)
    trainer.parameters["w"][0] = [0.25, 0.75, -0.25, 1000, -1000, 0.26]
    trainer.parameters["b"][...] = [0.0005, 0.0015, 3e9, -3e9, 0.00049, 0]
    trainer.export(tmp_path / "m.onnx")
    after = arrays(tmp_path / "m.onnx")
    assert after["w_quantized"][0].tolist() == [0, 2, 0, 127, -128, 1]
    ends = np.iinfo(np.int32)
    assert after["b_quantized"].tolist()[2:] == [ends.max, ends.min, 0, 0]


def test_weights_that_are_inputs_too(tmp_path):
    """As models before IR version 4 have them."""
    model = stored("uint8")
    model.ir_version, model.opset_import[0].version = 3, 13
    for t in model.graph.initializer:
        model.graph.input.append(helper.make_tensor_value_info(t.name, t.data_type, t.dims))
    trainer = trainer_of(model)
    trainer.step(BATCH)
    trainer.export(tmp_path / "m.onnx")
    assert list(trainer.parameters) == ["w", "b"]
    np.testing.assert_allclose(predictions(trainer, BATCH), run(tmp_path / "m.onnx", BATCH["x"]), atol=0.0006)


def test_names_that_are_taken_or_say_nothing():
    model = stored(name="weight_int8")
    assert list(trainer_of(model).parameters) == ["weight_int8", "b"]
    model = stored()
    model.graph.node[2].output[0], model.graph.output[0].name = "w", "w"
    trainer = onnxgrad.Trainer(model, losses.MSE("w"), optim.SGD())
    assert list(trainer.parameters) == ["w_quantized", "b"]


def test_what_fit_says():
    (remark,) = trainer_of(stored("int4")).remarks
    assert remark == (
        "2 weights are stored as int32 and int4: they are trained in floating point, rounded in every step as they "
        "will be stored"
    )


def graph_with(text, **given):
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> m (float[B, 4] x) => (float[B, 3] y) {text}')
    for name, array in given.items():
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(array), name))
    return model


def integers(*shape):
    return RNG.integers(-100, 100, shape).astype(np.int8)


def test_integers_in_a_constant_node(tmp_path):
    """Some exporters keep weights there."""
    model = graph_with("{ d = DequantizeLinear(q, s)  y = MatMul(x, d) }", s=np.float32(0.01))
    value = numpy_helper.from_array(integers(4, 3))
    model.graph.node.insert(0, helper.make_node("Constant", [], ["q"], value=value))
    trainer = trainer_of(model)
    batch = {"x": BATCH["x"][:, :4], "target": BATCH["target"][:, :3]}
    trainer.step(batch)
    trainer.export(tmp_path / "m.onnx")
    assert list(trainer.parameters) == ["q"]
    np.testing.assert_allclose(predictions(trainer, batch), run(tmp_path / "m.onnx", batch["x"]), rtol=1e-4, atol=1e-5)


def test_integers_that_are_moved_before_they_are_dequantized(tmp_path):
    """As onnxruntime's dynamic quantization has embeddings."""
    model = parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 21]>
        m (int64[B] x) => (float[B, 3] y) { g = Gather(table, x)  y = DequantizeLinear(g, s, z) }""")
    given = {"table": integers(7, 3), "s": np.float32(0.01), "z": np.int8(3)}
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(a), n) for n, a in given.items())
    batch = {"x": np.array([1, 1, 4]), "target": BATCH["target"][:3, :3]}
    trainer = trainer_of(model, rate=1.0)
    assert list(trainer.parameters) == ["table"]
    np.testing.assert_allclose(predictions(trainer, batch), run(model, batch["x"]), rtol=1e-6)
    trainer.step(batch)
    trainer.export(tmp_path / "m.onnx")
    after = arrays(tmp_path / "m.onnx")["table"]
    assert [k for k in range(7) if (after[k] != given["table"][k]).any()] == [1, 4]


@pytest.mark.parametrize(
    "text",
    [
        "{ d = DequantizeLinear(q, s)  e = DequantizeLinear(q, t)  f = Add(d, e)  g = MatMul(x, f)  y = Add(g, b) }",
        "{ d = DequantizeLinear(q, s)  e = Cast<to=1>(q)  f = Add(d, e)  g = MatMul(x, f)  y = Add(g, b) }",
    ],
    ids=["two scales", "read by others"],
)
def test_integers_that_stay(text):
    """Which scale should they be stored by?"""
    given = {"q": integers(4, 3), "s": np.float32(0.01), "t": np.float32(0.02), "b": np.zeros(3, np.float32)}
    assert list(trainer_of(graph_with(text, **given)).parameters) == ["b"]


def test_a_model_of_nothing_but_scales():
    model = graph_with("{ q = QuantizeLinear(x, s)  d = DequantizeLinear(q, s)  y = Slice(d, a, b, c) }",
                       s=np.float32(0.01), a=np.array([0]), b=np.array([3]), c=np.array([1]))  # fmt: skip
    with raises(ValueError, "Trainer: 'loss' depends on no parameter; it depends on 's': name some with trainable"):
        trainer_of(model)


def dynamic(per_channel):
    text = """{
        xq, xs, xz = DynamicQuantizeLinear(x)
        p = MatMulInteger(xq, w_quantized, xz, w_zero_point)
        f = Cast<to=1>(p)
        s = Mul(xs, w_scale)
        h = Mul(f, s)
        y = Add(h, b)
    }"""
    each = (3,) if per_channel else ()
    zero = integers(*each) // 10 if per_channel else np.int8(7)
    scale = RNG.uniform(0.01, 0.02, each).astype(np.float32)
    return graph_with(text, w_quantized=integers(4, 3), w_scale=scale, w_zero_point=zero, b=np.ones(3, np.float32))


@pytest.mark.parametrize("per_channel", [False, True])
def test_products_of_integers(per_channel, tmp_path):
    """Dynamic quantization: the scale of the input is measured in every run."""
    model = dynamic(per_channel)
    batch = {"x": BATCH["x"][:, :4], "target": BATCH["target"][:, :3]}
    trainer = trainer_of(model, rate=0.05)
    assert set(trainer.parameters) == {"w", "b"}
    np.testing.assert_allclose(predictions(trainer, batch), run(model, batch["x"]), rtol=1e-5, atol=1e-5)
    found = [trainer.step(batch) for _ in range(30)]
    assert found[-1] < 0.7 * found[0]
    trainer.export(tmp_path / "m.onnx")
    written = onnx.load(tmp_path / "m.onnx")
    assert [n.op_type for n in written.graph.node] == [n.op_type for n in model.graph.node]
    np.testing.assert_allclose(predictions(trainer, batch), run(written, batch["x"]), rtol=1e-4, atol=1e-4)


def test_scales_that_are_trained_go_with_the_bias(tmp_path):
    """Integer kernels take it for granted that a bias has the scale of the products that it is added to."""
    text = """{
        xq = QuantizeLinear(x, x_scale, x_zero)
        xd = DequantizeLinear(xq, x_scale, x_zero)
        wd = DequantizeLinear <axis = 1> (w_quantized, w_scale, w_zero)
        bd = DequantizeLinear(b_quantized, b_scale)
        h = Gemm(xd, wd, bd)
        yq = QuantizeLinear(h, y_scale, y_zero)
        y = DequantizeLinear(yq, y_scale, y_zero)
    }"""
    x_scale, w_scale = np.float32(0.02), np.array([0.01, 0.02, 0.03], np.float32)
    model = graph_with(
        text, x_scale=x_scale, x_zero=np.uint8(128), w_quantized=integers(4, 3), w_scale=w_scale,
        w_zero=np.zeros(3, np.int8), b_quantized=np.array([500, -700, 300], np.int32), b_scale=x_scale * w_scale,
        y_scale=np.float32(0.04), y_zero=np.uint8(120),
    )  # fmt: skip
    model.graph.node[3].attribute.append(helper.make_attribute("axis", 0))
    batch = {"x": BATCH["x"][:, :4], "target": BATCH["target"][:, :3]}
    trainer = trainer_of(model, rate=1e-4, trainable=["*_scale", "w", "b"])
    assert set(trainer.parameters) == {"x_scale", "w_scale", "y_scale", "w", "b"}
    for _ in range(20):
        trainer.step(batch)
    trainer.export(tmp_path / "m.onnx")
    after = arrays(tmp_path / "m.onnx")
    assert not np.array_equal(after["x_scale"], x_scale) and not np.array_equal(after["w_scale"], w_scale)
    np.testing.assert_array_equal(after["b_scale"], after["x_scale"] * after["w_scale"])
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath, options.log_severity_level = str(tmp_path / "optimized.onnx"), 4
    found = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"), options).run(None, {"x": batch["x"]})[0]
    assert "QGemm" in {n.op_type for n in onnx.load(tmp_path / "optimized.onnx").graph.node}
    assert abs(found - predictions(trainer, batch)).max() <= after["y_scale"] * 1.001


def test_scales_alone(tmp_path):
    """The weights stay, but are rounded by other scales: they are other integers."""
    model = stored("int8")
    trainer = trainer_of(model, rate=1e-6, trainable="w_scale")
    trainer.parameters["w_scale"][...] *= 1.5
    trainer.export(tmp_path / "m.onnx")
    before, after = arrays(model), arrays(tmp_path / "m.onnx")
    assert after["w_scale"] == 1.5 * before["w_scale"]
    zero = before["w_zero_point"].astype(int)
    want = np.clip(np.rint((before["w_quantized"].astype(int) - zero) / 1.5) + zero, -128, 127)
    np.testing.assert_array_equal(after["w_quantized"], want)
    np.testing.assert_array_equal(after["b_quantized"], before["b_quantized"])
    np.testing.assert_allclose(predictions(trainer, BATCH), run(tmp_path / "m.onnx", BATCH["x"]), rtol=1e-5, atol=1e-6)


def test_half_precision(tmp_path):
    """A weight that is dequantized to float16 is trained in float32."""
    model = parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 21]>
        m (float16[B, 4] x) => (float[B, 3] y) {
            d = DequantizeLinear(q, s)  h = MatMul(x, d)  y = Cast <to = 1> (h)
        }""")
    given = {"q": integers(4, 3), "s": np.float16(0.0125)}
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(a), n) for n, a in given.items())
    batch = {"x": BATCH["x"][:, :4].astype(np.float16), "target": BATCH["target"][:, :3]}
    trainer = trainer_of(model)
    trainer.export(tmp_path / "same.onnx")
    np.testing.assert_array_equal(arrays(tmp_path / "same.onnx")["q"], given["q"])
    found = [trainer.step(batch) for _ in range(20)]
    trainer.export(tmp_path / "m.onnx")
    assert found[-1] < found[0]
    np.testing.assert_allclose(predictions(trainer, batch), run(tmp_path / "m.onnx", batch["x"]), rtol=1e-2, atol=1e-2)


def test_a_checkpoint_goes_on(tmp_path):
    """It has the floating-point weights: what rounding hides of them is not lost."""
    model = stored("int4")
    whole, first = trainer_of(model, 0.02), trainer_of(model, 0.02)
    losses_of_whole = [whole.step(BATCH) for _ in range(6)]
    for _ in range(3):
        first.step(BATCH)
    first.save(tmp_path / "state.safetensors")
    second = trainer_of(model, 0.02)
    second.restore(tmp_path / "state.safetensors")
    assert [second.step(BATCH) for _ in range(3)] == losses_of_whole[3:]


def test_a_block_that_is_longer_than_the_axis():
    """onnxruntime's quantizer to 4 bits writes one: its only scale still has an axis."""
    model = parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]> g (float[N, 3] x) => (float[N, 1] y)
            <int8[3, 1] w_quantized = {-100, 50, 127}, float[1, 1] scale = {0.01}> {
            w = DequantizeLinear <axis = 0, block_size = 16> (w_quantized, scale)
            y = MatMul(x, w)
        }"""
    )
    trainer = onnxgrad.Trainer(model, losses.MSE("y"), optim.SGD(lr=0.1))
    x = np.eye(3, dtype=np.float32)
    assert trainer.step({"x": x, "target": np.zeros((3, 1), np.float32)}) == pytest.approx((1 + 0.25 + 1.27**2) / 3)


def test_transposed_activations_that_are_quantized():
    """onnxruntime would quantize them behind the Transpose of the gradient, in a type that it then refuses."""
    model = parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]> g (float[2, 5, 4] x) => (float[2, 5, 5] y)
            <float s = {0.125}, int8 z = {0}> {
            a = MatMul(x, w)  aq = QuantizeLinear(a, s, z)  ad = DequantizeLinear(aq, s, z)
            b = MatMul(x, v)  bq = QuantizeLinear(b, s, z)  bd = DequantizeLinear(bq, s, z)
            t = Transpose <perm = [0, 2, 1]> (bd)  tq = QuantizeLinear(t, s, z)  td = DequantizeLinear(tq, s, z)
            y = MatMul(ad, td)
        }"""
    )
    model.graph.initializer.extend(numpy_helper.from_array(np.eye(4, dtype=np.float32), name) for name in "wv")
    trainer = onnxgrad.Trainer(model, losses.MSE("y"), optim.SGD(lr=0.1))
    x = np.round(RNG.standard_normal((2, 5, 4)) * 8).astype(np.float32) / 8
    assert trainer.step({"x": x, "target": x @ x.transpose(0, 2, 1) + 1}) == pytest.approx(1)
