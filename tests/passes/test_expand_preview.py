"""FlexAttention and the optimizers of ONNX's preview domains, beside onnx.reference, with gradients."""

import numpy as np
import onnx
import pytest
from onnx import helper, parser
from onnx.reference import ReferenceEvaluator

import onnxgrad

RNG = np.random.default_rng(0)
HEADER = '<ir_version: 13, opset_import: ["" : 26, "ai.onnx.preview" : 1]>'
FLEX = """
flex (float[B, 4, L, 8] q, float[B, 2, S, 8] k, float[B, 2, S, 6] v, float[1, 4, L, S] bias) => (float[B, 4, L, 6] y) {
    double = Constant <value_float = 2.0>()
    factor = Mul(bias, double)
    y = ai.onnx.preview.FlexAttention <%s
        score_mod = added (float[B, 4, L, S] scores) => (float[B, 4, L, S] out) <float[1] cap = {3}> {
            a = Add(scores, factor)
            b = Div(a, cap)
            c = Tanh(b)
            out = Mul(c, cap)
        },
        prob_mod = scaled (float[B, 4, L, S] p) => (float[B, 4, L, S] out) { a = Mul(p, p) out = Mul(a, factor) }
    > (q, k, v)
}"""


def expected(q, k, v, bias, scale):
    """In NumPy."""
    k, v = (np.repeat(x, 2, axis=1) for x in (k, v))
    scores = q @ k.swapaxes(2, 3) * scale
    scores = np.tanh((scores + 2 * bias) / 3) * 3
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return (weights**2 * 2 * bias) @ v


@pytest.mark.parametrize("scale", [None, 0.7])
def test_flex_attention(scale):
    """Subgraphs with initializers, which read a value of the graph around them; queries share heads of keys."""
    model = parser.parse_model(HEADER + FLEX % ("" if scale is None else f"scale = {scale},"))
    shapes = {"q": (2, 4, 3, 8), "k": (2, 2, 5, 8), "v": (2, 2, 5, 6), "bias": (1, 4, 3, 5)}
    feeds = {n: RNG.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    made = onnxgrad.gradient(model, list(feeds))
    seed = RNG.standard_normal((2, 4, 3, 6)).astype(np.float32)
    result = onnxgrad.session(made).run(["y"], {**feeds, "y_grad": seed})[0]
    np.testing.assert_allclose(result, expected(*feeds.values(), scale or 8**-0.5), rtol=1e-4, atol=1e-5)
    assert onnxgrad.check_gradient(model, feeds, list(feeds)).worst < 2e-6
    again = onnxgrad.check_gradient(made, {**feeds, "y_grad": seed}, list(feeds), "q_grad")
    assert again.worst < 2e-5


OPTIMIZERS = {
    "Adagrad": (3, {"decay_factor": 0.1, "epsilon": 0.01, "norm_coefficient": 0.1}),
    "Adam": (4, {"alpha": 0.95, "beta": 0.85, "epsilon": 0.1, "norm_coefficient": 0.1, "norm_coefficient_post": 0.2}),
    "Momentum": (3, {"alpha": 0.95, "beta": 0.5, "mode": "standard", "norm_coefficient": 0.1}),
    "Momentum, nesterov": (3, {"alpha": 0.95, "beta": 0.5, "mode": "nesterov", "norm_coefficient": 0.1}),
}


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("case", OPTIMIZERS)
def test_optimizers(case, steps):
    """Of two tensors at once."""
    kinds, attributes = OPTIMIZERS[case]
    shapes = [(2,), (2, 3)] * kinds
    names = [f"in_{k}" for k in range(2 * kinds)]
    feeds = dict(zip(names, (RNG.uniform(0.5, 2, s).astype(np.float32) for s in shapes), strict=True))
    feeds = {"R": np.array(0.1, np.float32), "T": np.array(steps), **feeds}
    results = [f"out_{k}" for k in range(2 * kinds - 2)]
    domain = "ai.onnx.preview.training"
    node = helper.make_node(case.partition(",")[0], list(feeds), results, domain=domain, **attributes)
    infos = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in feeds.items()
    ]
    outputs = [helper.make_tensor_value_info(n, 1, s) for n, s in zip(results, shapes, strict=False)]
    imports = [helper.make_opsetid("", 21), helper.make_opsetid(domain, 1)]
    graph = helper.make_graph([node], "g", infos, outputs)
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    onnx.checker.check_model(model)
    made = onnxgrad.session(onnxgrad.gradient(model, ["R", *names], results))
    seeds = {f"{n}_grad": np.ones(s, np.float32) for n, s in zip(results, shapes, strict=False)}
    found = made.run(results, {**feeds, **seeds})
    for got, want in zip(found, ReferenceEvaluator(model).run(None, feeds), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)
    assert onnxgrad.check_gradient(model, feeds, ["R", *names], results).worst < 2e-6
