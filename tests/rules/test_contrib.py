"""Forward operators of com.microsoft: rules, and schemas that change nothing for onnxruntime."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper
from tests.gradients import check_rule, model_of_node

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


@pytest.mark.parametrize(
    ("a", "b", "attributes"),
    [((4,), (4, 5), {}), ((4,), (4,), {"transA": 1}), ((3, 4), (4,), {}), ((2, 3, 4), (5, 4), {"transB": 1}),
     ((3, 4), (2, 4, 5), {"alpha": 2.0})],
)  # fmt: skip
def test_fused_matmul_shapes(a, b, attributes):
    check_rule("FusedMatMul", random(*a), random(*b), domain="com.microsoft", **attributes)


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
