"""Which initializers are parameters: by what torch's exporter says, and by use."""

import math

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper, parser

from onnxgrad.graph.files import load
from onnxgrad.passes.draft import Draft
from onnxgrad.passes.find_parameters import find_parameters

RANDOM = np.random.default_rng(0)


def numbers(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float32)


def roles(text: str, **arrays: np.ndarray) -> dict[str, str]:
    """The kinds of the parameters, and "" for all others."""
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> m {text}')
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(a), n) for n, a in arrays.items())
    draft = Draft(load(model, "test"), "test")
    find_parameters(draft)
    return {name: role.kind if role.is_parameter else "" for name, role in draft.roles.items()}


def sines(length: int, width: int) -> np.ndarray:
    angles = np.arange(length)[:, None] / 10000 ** (np.arange(width // 2) / (width // 2))
    return np.concatenate([np.sin(angles), np.cos(angles)], 1).astype(np.float32)


def test_weights_of_layers_are_parameters_and_constants_are_not():
    found = roles(
        """(float[N, 4] x) => (float[N, 3] y) {
            h = MatMul(x, w)  a = Add(h, b)  c = Clip(a, low, high)  s = Mul(c, half)
            n = LayerNormalization(s, scale, shift)  p = Pow(n, three)  g = Gemm(p, w2, b2)  y = Add(g, mask)
        }""",
        w=numbers(4, 8), b=np.zeros(8, np.float32), low=np.float32(0), high=np.float32(6), half=np.float32(0.5),
        scale=np.ones(8, np.float32), shift=np.zeros(8, np.float32), three=np.float32(3), w2=numbers(8, 3),
        b2=numbers(3), mask=np.array([[0, -3.4e38, 0]] * 2, np.float32)[:1].repeat(1, 0),
    )  # fmt: skip
    assert {n: k for n, k in found.items() if k} == {
        "w": "weight", "b": "bias", "scale": "scale", "shift": "bias", "w2": "weight", "b2": "bias", "mask": "bias"
    }  # fmt: skip


def test_masks_and_tables_are_not_parameters():
    ids = "(int64[N, 8] ids) => (float[N, 8, 6] y)"
    found = roles(
        ids + "{ e = Gather(table, ids)  p = Add(e, positions)  q = Mul(p, cosines)  y = Add(q, mask) }",
        table=numbers(50, 6), positions=sines(8, 6), cosines=numbers(8, 6),
        mask=np.where(np.tri(8, 6) > 0, 0, -math.inf).astype(np.float32),
    )  # fmt: skip
    assert {n for n, k in found.items() if k} == {"table"}
    learnt = roles(
        ids + "{ e = Gather(table, ids)  p = Add(e, positions)  q = Mul(p, scale)  y = Add(q, mask) }",
        table=numbers(50, 6), positions=numbers(8, 6), scale=numbers(1, 1, 6),
        mask=np.where(np.tri(8, 6) > 0, 0, -1e9).astype(np.float32),
    )  # fmt: skip
    assert {n for n, k in learnt.items() if k} == {"table", "positions", "scale"}


def test_rotary_frequencies_are_not_parameters():
    found = roles(
        """(float[N, 8, 4] x, int64[1, 1, 8] at) => (float[N, 8, 4] y) {
            f = Cast<to = 1>(at)  a = MatMul(frequencies, f)  t = Transpose<perm = [0, 2, 1]>(a)  c = Cos(t)
            h = MatMul(x, w)  y = Mul(h, c)
        }""",
        frequencies=numbers(1, 4, 1), w=numbers(4, 4),
    )  # fmt: skip
    assert found == {"frequencies": "", "w": "weight"}


@pytest.mark.parametrize("product", ['Einsum <equation = "i,j->ij"> (at, frequencies)', "Mul(column, frequencies)"])
def test_angles_of_positions_that_the_code_counts_are_not_parameters(product):
    found = roles(
        f"""(float[N, 8, 4] x) => (float[N, 8] y) {{
            n = Shape<start = 1, end = 2>(x)  s = Squeeze(n)
            r = Range(start, s, step)  at = Cast<to = 1>(r)  column = Unsqueeze(at, axis)
            a = {product}  c = Cos(a)  h = MatMul(x, w)  m = Mul(h, c)  y = MatMul(m, v)
        }}""",
        frequencies=numbers(4), w=numbers(4, 4), v=numbers(4), start=np.int64(0), step=np.int64(1),
        axis=np.array([1]),
    )  # fmt: skip
    assert {name for name, kind in found.items() if kind} == {"w", "v"}


def test_what_normalizes_an_input_is_not_a_parameter():
    found = roles(
        """(float[N, 3, 8, 8] x) => (float[N, 5, 6, 6] y) {
            a = Sub(x, mean)  b = Div(a, deviation)  c = Conv(b, w)  y = Mul(c, gain)
        }""",
        mean=numbers(1, 3, 1, 1), deviation=numbers(1, 3, 1, 1), w=numbers(5, 3, 3, 3), gain=numbers(1, 5, 1, 1),
    )  # fmt: skip
    assert found == {"mean": "", "deviation": "", "w": "weight", "gain": "scale"}


def test_weights_that_the_model_computes_from_others():
    """Weight normalization: a product of a direction and a length."""
    found = roles(
        """(float[N, 4] x) => (float[N, 3] y) {
            l = ReduceL2<keepdims = 1>(v)  e = Add(l, eps)  d = Div(v, e)  w = Mul(d, g)  y = MatMul(x, w)
        }""",
        v=numbers(4, 3), g=numbers(1, 3), eps=np.float32(1e-6),
    )  # fmt: skip
    assert found == {"v": "weight", "g": "weight", "eps": ""}


def test_scales_of_quantization_are_not_parameters():
    found = roles(
        """(float[N, 4] x) => (float[N, 3] y) {
            q = QuantizeLinear <axis = 1> (w, scales, zeros)  d = DequantizeLinear <axis = 1> (q, scales, zeros)
            v = DequantizeLinear <axis = 0> (integers, scales)  h = MatMul(x, d)  y = Add(h, v)
        }""",
        w=numbers(4, 3), scales=np.full(3, 0.1, np.float32), zeros=np.zeros(3, np.int8),
        integers=np.ones(3, np.int32),
    )  # fmt: skip
    assert {n for n, k in found.items() if k} == {"w"}


def test_states_are_not_parameters_and_statistics_neither():
    found = roles(
        """(float[5, N, 4] x) => (float[5, 1, N, 6] y) { y, h, c = LSTM<hidden_size = 6>(x, w, r, b, , h0, c0) }""",
        w=numbers(1, 24, 4), r=numbers(1, 24, 6), b=numbers(1, 48), h0=numbers(1, 2, 6), c0=numbers(1, 2, 6),
    )  # fmt: skip
    assert found == {"w": "weight", "r": "weight", "b": "bias", "h0": "", "c0": ""}
    found = roles(
        "(float[N, 3, 4] x) => (float[N, 3, 4] y) { y = BatchNormalization(x, s, b, mean, var) }",
        s=numbers(3), b=numbers(3), mean=numbers(3), var=np.ones(3, np.float32),
    )  # fmt: skip
    assert found == {"s": "scale", "b": "bias", "mean": "", "var": ""}


def test_a_formula_of_scalars_has_parameters():
    assert roles("(float[N] x) => (float[N] y) { a = Mul(x, k)  y = Add(a, d) }", k=np.float32(2), d=np.float32(1)) == {
        "k": "weight", "d": "weight"
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["PARAMETER", "BUFFER"])
def test_the_file_says_so(kind):
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> m (float[N, 4] x) => (float[N, 3] y) '
        "{ h = MatMul(x, w)  y = Mul(h, t) }"
    )
    model.graph.initializer.extend(
        [numpy_helper.from_array(numbers(4, 3), "w"), numpy_helper.from_array(numbers(3), "t")]
    )
    told = helper.make_tensor_value_info("t", onnx.TensorProto.FLOAT, [3])
    told.metadata_props.add(key="pkg.torch.export.graph_signature.InputSpec.kind", value=kind)
    model.graph.value_info.append(told)
    draft = Draft(load(model, "test"), "test")
    find_parameters(draft)
    assert draft.roles["t"].is_parameter == (kind == "PARAMETER") and draft.roles["w"].is_parameter


def named(producer: str, text: str, **arrays: np.ndarray) -> dict[str, str]:
    """As roles(), of a file of this producer; names in the text may have a `_` for each `/`."""
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21], producer_name: "{producer}"> m {text}')
    for node in model.graph.node:
        node.name = node.name.replace("__", "/")
        node.input[:] = [name.replace("__", "/") for name in node.input]
    model.graph.initializer.extend(numpy_helper.from_array(a, n.replace("__", "/")) for n, a in arrays.items())
    draft = Draft(load(model, "test"), "test")
    find_parameters(draft)
    return {name: role.why for name, role in draft.roles.items() if role.is_parameter}


def test_tensors_that_forward_makes_are_not_parameters():
    """The exporter on TorchScript writes the state of zeros that a cell starts from as a Constant."""
    body = "{ a = Gemm(x, w, b)  s = MatMul(__cell__Constant_output_0, w)  y = Add(a, s) }"
    text = f"(float[N, 4] x) => (float[N, 4] y) {body}"
    arrays = {"w": numbers(4, 4), "b": numbers(4), "__cell__Constant_output_0": np.zeros((1, 4), np.float32)}
    assert set(named("pytorch", text, **arrays)) == {"w", "b"}
    assert set(named("another", text, **arrays)) == {"w", "b", "/cell/Constant_output_0"}


def test_scalars_of_the_module_are_parameters():
    """A temperature or a gate. Numbers of the code are Constants there, and nodes have the names of modules."""
    body = "{ [__MatMul] h = MatMul(x, w)  [NAME] a = Mul(h, alpha)  [__Div] y = Div(a, __Sqrt_output_0) }"
    text = f"(float[N, 4] x) => (float[N, 3] y) {body}"
    arrays = {"w": numbers(4, 3), "alpha": np.float32(2), "__Sqrt_output_0": np.float32(2)}
    for producer, name, expected in (
        ("pytorch", "__Mul", {"w", "alpha"}),
        ("pytorch", "node_Mul", {"w"}),
        ("another", "__Mul", {"w"}),
    ):
        assert set(named(producer, text.replace("NAME", name), **arrays)) == expected


def test_all_weights_of_a_frozen_script_are_constants():
    text = "(float[N, 4] x) => (float[N, 3] y) { y = Gemm(x, __Constant_output_0, __Constant_1_output_0) }"
    arrays = {"__Constant_output_0": numbers(4, 3), "__Constant_1_output_0": numbers(3)}
    assert set(named("pytorch", text, **arrays)) == {"/Constant_output_0", "/Constant_1_output_0"}


def test_the_bins_of_a_distribution_are_not_parameters():
    """A detector takes the mean of its distances with a convolution by 0, 1, 2 …, frozen, which no file says."""
    found = roles(
        "(float[N, 3, 8, 8] x) => (float[N, 1, 8, 8] y) "
        "{ h = Conv(x, w)  p = Softmax <axis = 1> (h)  y = Conv(p, bins) }",
        w=numbers(16, 3, 1, 1), bins=np.arange(16, dtype=np.float32).reshape(1, 16, 1, 1),
    )  # fmt: skip
    assert found == {"w": "weight", "bins": ""}


def test_a_matrix_of_counts_is_a_parameter():
    """As somebody writes a first example."""
    found = roles(
        "(float[N, 4] x) => (float[N, 3] y) { h = MatMul(x, w)  y = Add(h, b) }",
        w=np.arange(12, dtype=np.float32).reshape(4, 3), b=numbers(3),
    )  # fmt: skip
    assert found == {"w": "weight", "b": "bias"}


def test_exponents_are_no_parameters():
    """As skl2onnx writes GaussianNB: of a negative difference, a power has no gradient by its exponent."""
    found = roles(
        "(float[N, 2] x) => (float[N, 2] y) { d = Sub(x, mean)  p = Pow(d, two)  y = Mul(p, scale) }",
        mean=numbers(2), two=np.array([2], np.float32), scale=numbers(2),
    )  # fmt: skip
    assert {name for name, kind in found.items() if kind} == {"mean", "scale"}


@pytest.mark.parametrize("loop", ["Loop", "Scan"])
def test_weights_that_steps_are_given_as_states_or_slices(loop):
    """As tf2onnx and jax2onnx write recurrent layers."""
    inputs = "float[N, 4] h, float[4, 4] u, float[4, 4] z"
    results = "float[N, 4] n, float[4, 4] w_out, float[4, 4] z"
    body = "t = MatMul(h, u)  a = MatMul(t, z)  w_out = Identity(u)"
    node = (
        f"""y, w_last, v_last = Loop(steps, , h0, w, v) <body = b (int64 i, bool c, {inputs}) => (bool d, {results}) {{
            d = Identity(c) {body} n = Tanh(a) }}>"""
        if loop == "Loop"
        else f"""y, w_last, v_last = Scan(h0, w, v, x, slices) <num_scan_inputs = 2,
            body = b ({inputs}, float[N, 4] xt, float[4] s) => ({results}) {{ {body} e = Add(a, s) n = Add(e, xt) }}>"""
    )
    found = roles(
        f"(float[S, N, 4] x) => (float[N, 4] y) {{ {node} }}", h0=np.zeros((3, 4), np.float32), w=numbers(4, 4),
        v=numbers(4, 4), **({"steps": np.int64(2)} if loop == "Loop" else {"slices": numbers(5, 4)}),
    )  # fmt: skip
    parameters = {"w": "weight", "v": "weight"} | ({} if loop == "Loop" else {"slices": "bias"})
    assert {n: k for n, k in found.items() if k} == parameters
