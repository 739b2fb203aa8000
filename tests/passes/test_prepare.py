"""Models of older opsets and IR versions, as the ONNX model zoo has them, are trained like new ones."""

import numpy as np
import onnx
import onnxruntime
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper
from tests.checks import raises

import onnxgrad
from onnxgrad import cli
from onnxgrad.train import losses, optim
from onnxgrad.train.trainer import Trainer

CLASSES = 5


def weights():
    rng = np.random.default_rng(0)

    def normal(*shape):
        return (rng.standard_normal(shape) / np.sqrt(max(1, np.prod(shape[1:])))).astype(np.float32)

    return {
        "conv_w": normal(8, 3, 3, 3), "conv_b": normal(8), "bn_scale": 1 + 0.1 * normal(8), "bn_bias": normal(8),
        "bn_mean": normal(8), "bn_var": 1 + 0.1 * np.abs(normal(8)), "squeeze_w": normal(4, 8, 1, 1),
        "wide_w": normal(600, 12, 1, 1), "fc_w": normal(CLASSES, 600), "fc_b": normal(CLASSES),
    }  # fmt: skip


def node(op_type, inputs, outputs, **attributes):
    return helper.make_node(op_type, inputs.split(), outputs.split(), name=f"{op_type}_{outputs}", **attributes)


def convnet(opset, ir_version):
    """What VGG, ResNet, SqueezeNet, ShuffleNet and YOLO files are made of, in the forms that the opset has."""
    old = opset < 13
    arrays = weights()
    constants = {
        "flat": np.array([0, -1]),
        "scales": np.array([1, 1, 2, 2], np.float32),
        "roi": np.zeros(0, np.float32),
    }
    bounds = {
        "ratio": np.float32(0.4),
        "low": np.float32(0),
        "high": np.float32(4),
        "axes": np.array([2, 3]),
        "sizes": np.array([3, 5]),
    }
    if opset == 7:
        grow = [node("Upsample", "l", "u", scales=[1.0, 1.0, 2.0, 2.0], mode="linear")]
    elif opset == 9:
        grow = [node("Upsample", "l scales", "u", mode="linear")]
    else:
        modes = {"mode": "linear", "coordinate_transformation_mode": "asymmetric"}
        grow = [helper.make_node("Resize", ["l", "roi", "scales"], ["u"], **modes)]
    clip = [node("Clip", "u", "k", min=0.0, max=4.0) if opset < 11 else node("Clip", "u low high", "k")]
    split = node("Split", "s", "s1 s2", axis=1, split=[3, 5]) if old else node("Split", "s sizes", "s1 s2", axis=1)
    squeezed = node("Squeeze", "g", "q", axes=[2, 3]) if old else node("Squeeze", "g axes", "q")
    norm = {"spatial": 1} if opset < 9 else {}
    nodes = [
        node("Conv", "x conv_w conv_b", "c", pads=[1, 1, 1, 1]),
        node("BatchNormalization", "c bn_scale bn_bias bn_mean bn_var", "b", epsilon=1e-3, momentum=0.8, **norm),
        node("Relu", "b", "r"),
        node("MaxPool", "r", "p", kernel_shape=[2, 2], strides=[2, 2]),
        node("LRN", "p", "l", size=3, alpha=0.1), *grow, *clip,
        node("Conv", "k squeeze_w", "f1"), node("Sum", "k r", "s"), split,
        node("Concat", "f1 s1 s2", "j", axis=1), node("Conv", "j wide_w", "w"), node("Sigmoid", "w", "a"),
        node("GlobalAveragePool", "a", "g"), squeezed,
        node("Dropout", "q", "d", ratio=0.4) if opset < 12 else node("Dropout", "q ratio", "d"),
        node("Reshape", "d flat", "e"), node("Gemm", "e fc_w fc_b", "h", transB=1),
        node("Softmax", "h", "y") if old else node("Softmax", "h", "y", axis=1),
    ]  # fmt: skip
    read = {name for n in nodes for name in n.input}
    arrays |= {name: a for name, a in (constants | bounds).items() if name in read}
    infos = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, 8, 8])]
    if ir_version < 4:
        infos += [
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
            for n, a in arrays.items()
        ]
    result = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", CLASSES])]
    graph = helper.make_graph(nodes, "net", infos, result, [numpy_helper.from_array(a, n) for n, a in arrays.items()])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir_version)


def batch(k):
    rng = np.random.default_rng(k)
    return {"x": rng.standard_normal((4, 3, 8, 8)).astype(np.float32), "target": rng.random((4, CLASSES), np.float32)}


def trained(model, steps=3):
    trainable = [name for name in weights() if name not in ("bn_mean", "bn_var")]
    mine = Trainer(model, losses.MSE("y"), optim.SGD(lr=0.5), trainable)
    return mine, [mine.step(batch(k)) for k in range(steps)]


@pytest.mark.parametrize("opset, ir_version", [(7, 3), (9, 3), (9, 4), (11, 3), (13, 7)])
def test_models_of_the_zoo_train_like_new_ones(opset, ir_version, tmp_path):
    expected, losses_of_new = trained(convnet(18, 8))
    model = convnet(opset, ir_version)
    onnx.checker.check_model(model)
    mine, found = trained(model)
    np.testing.assert_allclose(found, losses_of_new, rtol=1e-5)
    for name, array in {**expected.parameters, **expected.statistics}.items():
        mine_now = {**mine.parameters, **mine.statistics}[name]
        np.testing.assert_allclose(mine_now, array, rtol=1e-4, atol=1e-6, err_msg=name)
    path = tmp_path / "trained.onnx"
    mine.export(path)
    written = onnx.load(path)
    onnx.checker.check_model(written)
    assert (written.opset_import[0].version, written.ir_version) == (opset, ir_version)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # about initializers that are inputs
    (y,) = onnxruntime.InferenceSession(path, options).run(None, {"x": batch(9)["x"]})
    loss = expected.evaluate([batch(9)])["loss"]
    np.testing.assert_allclose(np.mean((y - batch(9)["target"]) ** 2), loss, rtol=1e-5)
    assert trained(path, 1)[1][0] < found[0]  # and can be trained again


def test_the_command_line_takes_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    onnx.save(convnet(7, 3), "m.onnx")
    np.savez("data.npz", **{name: np.concatenate([batch(k)[name] for k in range(3)]) for name in batch(0)})
    for command in (
        "train m.onnx --data data.npz --loss mse:y -o trained.onnx --batch-size 4 --quiet",
        "check m.onnx --wrt fc_*", "grad m.onnx --wrt fc_* -o grad.onnx",
    ):  # fmt: skip
        done = CliRunner().invoke(cli.main, command.split())
        assert done.exit_code == 0, done.output


def test_what_onnx_cannot_convert_is_one_sentence():
    model = convnet(7, 3)
    next(n for n in model.graph.node if n.op_type == "BatchNormalization").attribute[-1].i = 0
    with raises(
        ValueError,
        "gradient: the model imports opset 7, rules are written for 18 and newer, and onnx cannot convert it: "
        "Attribute spatial must have value 1",
    ):
        onnxgrad.gradient(model)


def test_layer_normalization_before_onnx_had_it():
    """onnxruntime's optimizer writes it into files of any opset."""
    info = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", [2, 4]), ("s", [4]), ("y", [2, 4]))
    ]
    results = []
    for opset in (14, 17):
        graph = helper.make_graph([helper.make_node("LayerNormalization", ["x", "s"], ["y"])], "g", info[:2], info[2:])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
        made = onnxgrad.session(onnxgrad.gradient(model, "x"))
        arrays = np.random.default_rng(0).standard_normal((3, 2, 4)).astype(np.float32)
        results.append(made.run(["x_grad"], {"x": arrays[0], "s": arrays[1, 0], "y_grad": arrays[2]})[0])
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_numbers_that_were_attributes_have_the_type_of_the_data(dtype):
    """onnx's converter makes inputs in float32 of them."""
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    info = [helper.make_tensor_value_info(n, kind, s) for n, s in (("x", [3]), ("y", [5]))]
    nodes = [node("Clip", "x", "c", min=-0.5, max=0.5), node("Pad", "c", "y", pads=[1, 1], value=2.5)]
    model = helper.make_model(
        helper.make_graph(nodes, "g", info[:1], info[1:]), opset_imports=[helper.make_opsetid("", 9)], ir_version=4
    )
    feeds = {"x": np.array([-1, 0.25, 2], dtype), "y_grad": np.arange(5).astype(dtype)}
    y, x_grad = onnxgrad.session(onnxgrad.gradient(model, "x")).run(None, feeds)
    assert y.tolist() == [2.5, -0.5, 0.25, 0.5, 2.5] and y.dtype == x_grad.dtype == dtype
    assert x_grad.tolist() == [0, 2, 0]


def test_a_number_that_is_an_attribute_of_its_name():
    model = onnx.parser.parse_model("""<ir_version: 5, opset_import: ["" : 10]>
    g (float[1, 3] x, float[1, 3] w) => (float[1, 4] y) <float[1, 3] w = {1, 2, 3}> {
        p = Mul (x, w)
        y = Pad <pads = [0, 0, 0, 1], value = 0.5> (p)
    }""")
    trainer = Trainer(model, losses.MSE("y"), optim.SGD(lr=0.1))
    assert trainer.step({"x": np.ones((1, 3), np.float32), "target": np.zeros((1, 4), np.float32)}) == (14 + 0.25) / 4


def test_a_weight_that_is_all_of_a_branch():
    """As torch's exporter writes an empty bag of embeddings."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
        g (float[2] x, bool c) => (float[2] y) <float[2] k = {2, 3}> {
            r = If (c) <
                then_branch = a () => (float[2] w) <float[2] w = {5, 7}> { },
                else_branch = b () => (float[2] k2) { k2 = Mul(k, k) }
            >
            y = Mul(x, r)
        }""")
    onnx.checker.check_model(model)
    trainer = Trainer(model, losses.MSE("y"), optim.SGD(lr=0.1), trainable=["w", "k"])
    x = np.array([1, 2], np.float32)
    loss = trainer.step({"x": x, "c": np.array(True), "target": np.zeros(2, np.float32)})
    assert loss == np.mean((x * [5, 7]) ** 2)
    np.testing.assert_allclose(trainer.gradients["w"], x**2 * [5, 7])


def test_dimensions_that_onnx_converter_gives_one_name():
    """They are different ones: the gradient would be taken for one that fits both."""
    text = """<ir_version: 5, opset_import: ["" : 10]>
    g (float[N] x) => (float[A] a, float[B] b) <
        int64[1] end = {1000}, int64[1] start = {-1000}, int64[1] axis = {0}, int64[1] back = {-1}, int64[1] two = {-2}
    > {
        a = Slice (x, end, start, axis, back)
        c = Slice (x, end, start, axis, two)
        b, d = Split <axis = 0, split = [1, 1]> (c)
    }"""
    model = onnx.parser.parse_model(text)
    made = onnxgrad.gradient(model, "x", ["a", "b"])
    feeds = {"x": np.arange(3), "a_grad": np.array([1, 2, 3]), "b_grad": np.array([10])}
    session = onnxruntime.InferenceSession(made.SerializeToString())
    found = session.run(["x_grad"], {n: a.astype(np.float32) for n, a in feeds.items()})[0]
    assert found.tolist() == [3, 2, 11]


@pytest.mark.parametrize("opset", [10, 22])
def test_eye_like_of_an_input_whose_type_onnx_does_not_know(opset):
    """onnx 1.23 infers its type, and the process dies; before opset 11 it knows nothing of Compress, either."""
    model = onnx.parser.parse_model(f"""<ir_version: 7, opset_import: ["" : {opset}, "com.microsoft" : 1]>
    m (float[3, 3] x) => (float y) <bool[3] chosen = {{1, 1, 1}}> {{
        unknown = {"Compress <axis = 0> (x, chosen)" if opset == 10 else "com.microsoft.Inverse(x)"}
        eye = EyeLike <dtype = 1> (unknown)
        kept = MatMul(x, eye)
        squares = Mul(kept, kept)
        y = ReduceSum <keepdims = 0> (squares)
    }}""")
    x = np.eye(3, dtype=np.float32) * 2 + 1
    _, gradient = onnxgrad.session(onnxgrad.gradient(model, "x")).run(None, {"x": x})
    np.testing.assert_allclose(gradient, 2 * x)


def test_a_branch_reads_what_onnx_converter_replaces():
    """It writes such a LogSoftmax with other operators, and cannot put their result where a subgraph reads it."""
    text = """<ir_version: 5, opset_import: ["" : 9]>
    g (float[2,3,4] x, bool c) => (float[2,3,4] y) {
        p = LogSoftmax <axis = 1> (x)
        y = If (c) <
            then_branch = yes () => (float[2,3,4] u) { u = Tanh (p) },
            else_branch = no () => (float[2,3,4] w) { w = Neg (p) }
        >
    }"""
    x = np.random.default_rng(0).standard_normal((2, 3, 4))
    checked = onnxgrad.check_gradient(onnx.parser.parse_model(text), {"x": x, "c": np.array(True)}, "x")
    assert checked.worst < 1e-6, checked


BRANCHES = """
<ir_version: 10, opset_import: ["" : 21]>
branches (float[N, 3] x, bool big) => (float[N, 3] y) {
    w = Constant <value = float[3] {1, 2, 3}>()
    h = Mul(x, w)
    y = If (big) <
        then_branch = more () => (float[N, 3] a) { v = Constant <value = float[3] {3, 2, 1}>() a = Mul(h, v) },
        else_branch = less () => (float[N, 3] a) { v = Constant <value = float[3] {0.5, 0.1, 0.2}>() a = Add(h, v) }
    >
}"""


def test_weights_that_branches_keep_as_constants_are_trained(tmp_path):
    """As spox writes them; two branches have one of the same name."""
    trainer = Trainer(onnx.parser.parse_model(BRANCHES), losses.MSE("y"), optim.SGD(lr=0.1))
    assert list(trainer.parameters) == ["w", "v_", "v__"]
    x, target = np.array([[1, -2, 0.5]], np.float32), np.zeros((1, 3), np.float32)
    first = [float(trainer.step({"x": x, "big": np.array(big), "target": target})) for big in (True, False)]
    again = [
        float(trainer.evaluate([{"x": x, "big": np.array(big), "target": target}])["loss"]) for big in (True, False)
    ]
    assert all(a < f for a, f in zip(again, first, strict=True))
    trainer.export(tmp_path / "trained.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "trained.onnx")
    for big, loss in zip((True, False), again, strict=True):
        (y,) = session.run(None, {"x": x, "big": np.array(big)})
        np.testing.assert_allclose(np.mean(y**2), loss, rtol=1e-6)


@pytest.mark.parametrize(
    ("inside", "declared"), [(False, ("N", 4)), (False, ("N",)), (False, (7, 2)), (True, ("N", 4)), (True, ("N",))]
)
def test_values_that_are_declared_with_another_shape(inside, declared):
    """skl2onnx's PLSRegression is one; onnxruntime warns."""
    model = onnx.parser.parse_model(
        """<ir_version: 9, opset_import: ["" : 18]> g (float[N, 4] x) => (float[N, 2] y) { y = MatMul(x, w) }"""
    )
    model.graph.initializer.append(numpy_helper.from_array(np.ones((4, 2), np.float32), "w"))
    wrong = helper.make_tensor_value_info("y", TensorProto.FLOAT, declared)
    if inside:
        model.graph.node[0].output[0] = wrong.name = "a"
        model.graph.node.append(helper.make_node("Relu", ["a"], ["y"]))
        model.graph.value_info.append(wrong)
    else:
        model.graph.output[0].CopyFrom(wrong)
    trainer = Trainer(model, losses.MSE("y"), optim.SGD(lr=0.1))
    assert trainer.step({"x": np.ones((3, 4), np.float32), "target": np.zeros((3, 2), np.float32)}) == 16
