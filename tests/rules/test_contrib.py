"""Forward operators of com.microsoft: rules, and schemas that change nothing for onnxruntime."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, parser
from tests.gradients import check_rule, evaluate, feeds_for_seeds, model_of_node

import onnxgrad
from onnxgrad.op import OPERATORS

RNG = np.random.default_rng(0)
NAMES = ["Gelu", "BiasGelu", "FastGelu", "QuickGelu", "FusedMatMul"]


def random(*shape):
    return RNG.standard_normal(shape)


@pytest.mark.parametrize(
    ("name", "shapes", "attributes"),
    [
        ("Gelu", [(2, 3)], {}),
        ("BiasGelu", [(2, 3, 4), (4,)], {}),
        ("FastGelu", [(2, 3)], {}),
        ("FastGelu", [(2, 3), (3,)], {}),
        ("QuickGelu", [(2, 3)], {}),
        ("QuickGelu", [(2, 3)], {"alpha": 1.0}),
    ],
)
def test_gelu(name, shapes, attributes):
    check_rule(name, *(random(*s) for s in shapes), domain="com.microsoft", **attributes)


@pytest.mark.parametrize("shape", [(3, 3), (2, 3, 3)])
def test_inverse(shape):
    check_rule("Inverse", random(*shape) + 3 * np.eye(3), domain="com.microsoft")


FLAGS = ("transA", "transB", "transBatchA", "transBatchB")


@pytest.mark.parametrize(
    "on",
    [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (1, 0, 0, 1), (0, 1, 1, 0), (1, 1, 1, 1)],
    ids=str,
)
def test_fused_matmul(on):
    given = dict(zip(FLAGS, on, strict=True))
    A = _before(random(2, 2, 3, 4), given["transA"], given["transBatchA"])
    B = _before(random(2, 2, 4, 3), given["transB"], given["transBatchB"])
    check_rule(
        "FusedMatMul", A, B, domain="com.microsoft", alpha=0.5, twice=on in ((0, 0, 0, 0), (1, 0, 0, 1)), **given
    )


def _before(x, trans, trans_batch):
    """What the operator brings into the shape of x."""
    x = np.swapaxes(x, -1, -2) if trans else x
    return np.ascontiguousarray(np.moveaxis(x, -2, 0) if trans_batch else x)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("a", "b", "attributes"),
    [((4,), (4, 5), {}), ((4,), (4,), {"transA": 1}), ((3, 4), (4,), {}), ((2, 3, 4), (5, 4), {"transB": 1}),
     ((3, 4), (2, 4, 5), {"alpha": 2.0})],
)  # fmt: skip
def test_fused_matmul_shapes(a, b, attributes):
    check_rule("FusedMatMul", random(*a), random(*b), domain="com.microsoft", **attributes)


@pytest.mark.parametrize(
    ("activation", "parameters"),
    [("Relu", {}), ("LeakyRelu", {"activation_alpha": 0.1}), ("Elu", {"activation_alpha": 0.5}),
     ("HardSigmoid", {"activation_alpha": 0.3, "activation_beta": 0.4}), ("Softsign", {}), ("Sigmoid", {}),
     ("Selu", {"activation_alpha": 1.5, "activation_gamma": 1.1})],
)  # fmt: skip
def test_fused_gemm(activation, parameters):
    given = {"activation": activation, **parameters}
    check_rule(
        "FusedGemm",
        random(2, 3),
        random(4, 3),
        random(4),
        domain="com.microsoft",
        transB=1,
        alpha=0.5,
        beta=2.0,
        **given,
    )


def test_fused_gemm_without_a_bias():
    check_rule("FusedGemm", random(3, 2), random(3, 4), domain="com.microsoft", transA=1, activation="Tanh")


@pytest.mark.parametrize(
    ("activation", "parameters"),
    [("Relu", []), ("LeakyRelu", [0.2]), ("Clip", [-1.0, 1.5]), ("HardSigmoid", [0.3, 0.4]), ("Tanh", []), (None, [])],
)
def test_fused_conv(activation, parameters):
    given = {} if activation is None else {"activation": activation}
    given |= {"activation_params": parameters} if parameters else {}
    check_rule(
        "FusedConv", random(2, 3, 5, 5), random(4, 3, 3, 3), random(4),
        domain="com.microsoft", pads=[1, 0, 1, 0], strides=[1, 2], twice=activation == "Tanh", **given,
    )  # fmt: skip


@pytest.mark.slow
def test_fused_conv_with_a_residual():
    inputs = random(2, 4, 5), random(4, 2, 3), random(4), random(2, 4, 5)
    given = {"auto_pad": "SAME_UPPER", "group": 2, "kernel_shape": [3], "activation": "Sigmoid"}
    check_rule("FusedConv", *inputs, domain="com.microsoft", **given)


def test_fused_nodes_one_after_the_other():
    """Each is rewritten, also where the gradient of nothing but the first one's weight passes."""
    model = parser.parse_model(
        """<ir_version: 9, opset_import: ["" : 18, "com.microsoft" : 1]> g (float[2, 3] x) => (float[2, 3] y) {
            h = com.microsoft.FusedGemm <activation = "Tanh"> (x, w, b)
            y = com.microsoft.FusedGemm <activation = "Sigmoid"> (h, v, b)
        }"""
    )
    for name, array in zip("wvb", (random(3, 3), random(3, 3), random(3)), strict=True):
        model.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), name))
    assert onnxgrad.check_gradient(model, {"x": np.ones((2, 3), np.float32)}, wrt="w").worst < 1e-6


def test_fused_in_float16():
    for name, shapes in (("FusedGemm", [(2, 3), (3, 4), (4,)]), ("FusedConv", [(2, 3, 5), (4, 3, 3), (4,)])):
        inputs = [random(*s) for s in shapes]
        how = {"domain": "com.microsoft", "attributes": {"activation": "Sigmoid"}}
        results = []
        for dtype in (np.float16, np.float64):
            model, feeds = model_of_node(name, inputs, dtype=dtype, **how)
            once = onnxgrad.gradient(model, ["in_0", "in_1", "in_2"])
            seeds = feeds_for_seeds(once, model, feeds)
            seeds = {k: v.astype(dtype) for k, v in seeds.items()}
            results.append(evaluate(once, {**feeds, **seeds}))
        for half, wide in zip(*results, strict=True):
            np.testing.assert_allclose(half, wide, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("kind", ["perceptron", "convolutions", "transformer"])
def test_optimized_file(kind, tmp_path):
    """The gradient of the file that onnxruntime's optimizer writes is that of the model it was given."""
    model = parser.parse_model(NETWORKS[kind])
    fused = {"perceptron": {"FusedGemm"}, "convolutions": {"FusedConv"}, "transformer": {"BiasGelu", "FusedMatMul"}}
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    feeds = {i.name: _feed(i) for i in model.graph.input}
    onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    optimized = onnx.load(options.optimized_model_filepath)
    assert {n.op_type for n in optimized.graph.node if n.domain == "com.microsoft"} == fused[kind]
    found = [evaluate(onnxgrad.gradient(m, list(feeds), "y"), feeds) for m in (model, optimized)]
    for got, expected in zip(*found[::-1], strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def _feed(info):
    dims = [d.dim_value or 2 for d in info.type.tensor_type.shape.dim]
    return (random(*dims) * 0.5).astype(np.float32)


HEADER = '<ir_version: 10, opset_import: ["" : 17]>'
NETWORKS = {
    "perceptron": HEADER
    + """
        perceptron (float[N, 4] x, float[4, 8] w1, float[8] b1, float[8, 3] w2, float[3] b2) => (float y) {
            a = Gemm(x, w1, b1)
            b = Relu(a)
            c = Gemm(b, w2, b2)
            d = LeakyRelu<alpha = 0.1>(c)
            y = ReduceSum<keepdims = 0>(d)
        }""",
    "convolutions": HEADER
    + """
        convolutions (float[N, 3, 6, 6] x, float[4, 3, 3, 3] w1, float[4] b1, float[4, 4, 3, 3] w2, float[4] b2)
            => (float y) {
            low = Constant<value_float = -0.5>()
            high = Constant<value_float = 0.5>()
            a = Conv<pads = [1, 1, 1, 1]>(x, w1, b1)
            b = Relu(a)
            c = Conv<strides = [2, 2]>(b, w2, b2)
            d = Clip(c, low, high)
            y = ReduceSum<keepdims = 0>(d)
        }""",
    "transformer": HEADER
    + """
        transformer (float[N, 5, 4] x, float[4, 4] q, float[4, 4] k, float[4, 8] w, float[8] b) => (float y) {
            scale = Constant<value_float = 0.5>()
            queries = MatMul(x, q)
            keys = MatMul(x, k)
            transposed = Transpose<perm = [0, 2, 1]>(keys)
            products = MatMul(queries, transposed)
            scores = Mul(products, scale)
            weights = Softmax<axis = -1>(scores)
            mixed = MatMul(weights, x)
            wide = MatMul(mixed, w)
            a = Add(wide, b)
            root = Constant<value_float = 1.4142135>()
            one = Constant<value_float = 1.0>()
            half = Constant<value_float = 0.5>()
            divided = Div(a, root)
            erf = Erf(divided)
            more = Add(erf, one)
            product = Mul(a, more)
            gelu = Mul(product, half)
            y = ReduceSum<keepdims = 0>(gelu)
        }""",
}


@pytest.mark.parametrize("name", NAMES)
def test_shape_inference(name):
    shapes = {"BiasGelu": [(2, 3), (3,)], "FusedMatMul": [(2, 3), (3, 4)]}.get(name, [(2, 3)])
    model, _ = model_of_node(name, [random(*s) for s in shapes], domain="com.microsoft", dtype=np.float32)
    dims = [d.dim_value for d in model.graph.output[0].type.tensor_type.shape.dim]
    assert dims == ([2, 4] if name == "FusedMatMul" else [2, 3])
    onnx.checker.check_model(model, full_check=True)


@pytest.mark.parametrize("name", NAMES)
def test_onnxruntime_keeps_its_kernels(name):
    assert name not in OPERATORS
    shapes = {"BiasGelu": [(2, 3), (3,)], "FusedMatMul": [(2, 3), (3, 4)]}.get(name, [(2, 3)])
    model, feeds = model_of_node(name, [random(*s) for s in shapes], domain="com.microsoft", dtype=np.float32)
    results = []
    for options in (onnxruntime.SessionOptions(), onnxgrad.register()):
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        results.append(session.run(None, feeds)[0])
    np.testing.assert_array_equal(*results)


def test_gradient_models_import_com_microsoft():
    """With our kernels registered, onnxruntime puts its own operators only into models that import their domain."""
    nodes = [helper.make_node("Sigmoid", ["x"], ["s"]), helper.make_node("Mul", ["x", "s"], ["y"])]
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [2, 3]) for n in "xy")
    graph = helper.make_graph(nodes, "graph", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    once = onnxgrad.gradient(model, "x")
    onnxruntime.InferenceSession(once.SerializeToString(), onnxgrad.register(), providers=["CPUExecutionProvider"])
