"""Gradients of sequences and optionals whose lengths are known only when the model runs, against differences."""

import numpy as np
import onnx
import onnxruntime
import pytest
from tests.gradients import check_model, parsed

import onnxgrad

RNG = np.random.default_rng(5)
HEAD = "g (float[T,3] x, float[3] w, int64 size, int64 k) => (float[N,M] y)"
CASES = {
    "one of many": """s = SplitToSequence(x, size)  a = SequenceAt(s, k)  b = SequenceAt(s, minus)
        c = Mul(a, w)  y = Mul(c, b)""",
    "one by one": """s = SplitToSequence<keepdims = 0>(x)  a = SequenceAt(s, k)  b = SequenceAt(s, minus)
        c = Mul(a, b)  y = Mul(x, c)""",
    "along columns": "s = SplitToSequence<axis = 1>(x, size)  a = SequenceAt(s, zero)  y = Mul(a, a)",
    "joined again": "s = SplitToSequence(x, size)  j = ConcatFromSequence<axis = 0>(s)  y = Mul(j, w)",
    "joined along another axis": """f = Mul(x, w)  s = SplitToSequence<keepdims = 0>(f)
        j = ConcatFromSequence<axis = -1>(s)  i = Unsqueeze(j, zeros)  y = Mul(i, i)""",
    "stacked": """s = SplitToSequence<keepdims = 0>(x)  a = Mul(x, x)  r = ReduceSum<keepdims = 0>(a, zeros)
        t = SequenceInsert(s, r)  y = ConcatFromSequence<axis = 1, new_axis = 1>(t)""",
    "inserted": """s = SplitToSequence(x, size)  a = Mul(x, w)  t = SequenceInsert(s, a, k)  b = SequenceAt(t, k)
        u = SequenceInsert(t, b, minus)  j = ConcatFromSequence<axis = 0>(u)  y = Mul(j, j)""",
    "erased": """s = SplitToSequence(x, size)  t = SequenceErase(s, k)  u = SequenceInsert(t, x)
        v = SequenceErase(u, minus)  e = SequenceInsert(v, x, zero)  f = SequenceErase(e)  a = SequenceInsert(f, x)
        j = ConcatFromSequence<axis = 0>(a)  y = Mul(j, j)""",
    "used twice": """s = SplitToSequence(x, size)  j = ConcatFromSequence<axis = 0>(s)  t = SequenceErase(s, k)
        i = ConcatFromSequence<axis = 0>(t)  a = Mul(j, j)  b = Mul(i, w)  c = ReduceSum(b)  d = Mul(a, c)
        e = SequenceAt(s, k)  h = ReduceSum(e)  y = Mul(d, h)""",
    "made of some": """a = Mul(x, w)  s = SequenceConstruct(x, a, x)  b = SequenceAt(s, k)  y = Mul(b, a)""",
    "an optional": """a = Mul(x, w)  o = Optional(a)  i = Identity(o)  b = OptionalGetElement(i)  y = Mul(b, x)""",
    "an optional sequence": """s = SplitToSequence(x, size)  o = Optional(s)  t = OptionalGetElement(o)
        a = SequenceAt(t, k)  y = Mul(a, a)""",
    "an element that is there already": "a = OptionalGetElement(x)  y = Mul(a, a)",
    "mapped": """s = SplitToSequence(x, size)  t = SequenceMap <body = f (float[P,3] e) => (float[P,3] r) {
            m = Mul(e, w)  r = Sin(m)
        }> (s)  j = ConcatFromSequence<axis = 0>(t)  y = Mul(j, j)""",
    "mapped with another": """s = SplitToSequence(x, size)  a = Mul(x, x)  u = SplitToSequence(a, size)
        t = SequenceMap <body = f (float[P,3] e, float[P,3] d, float[T,3] z) => (float[Q,3] r) {
            m = Mul(e, d)  c = ReduceSum(z)  r = Mul(m, c)
        }> (s, u, x)  y = ConcatFromSequence<axis = 0>(t)""",
}  # fmt: skip


def case(body):
    constants = """zero = Constant<value = int64 {0}>()  minus = Constant<value = int64 {-1}>()
        zeros = Constant<value_ints: ints = [0]>()"""
    return parsed(f"{HEAD} {{ {constants} {body} }}")


@pytest.mark.parametrize("k", [1, -2])
@pytest.mark.parametrize("body", CASES.values(), ids=CASES)
def test_gradients_pass(body, k):
    wrt = ["x", "w"] if "w)" in body else ["x"]
    feeds = {"x": RNG.standard_normal((4, 3)), "w": RNG.standard_normal(3), "size": np.array(2), "k": np.array(k)}
    if "axis = 1>(x" in body:
        feeds["size"] = np.array(3)
    check_model(case(body), feeds, wrt)


@pytest.mark.parametrize(
    "left, right",
    [((3, 4), (4, 5)), ((4,), (4, 5)), ((3, 4), (4,)), ((4,), (4,)), ((2, 1, 3, 4), (6, 4, 5)), ((4,), (6, 4, 5))],
    ids=str,
)
def test_products_of_matrices_of_unknown_ranks(left, right):
    """The two tensors of the sequence differ in their ranks."""
    model = parsed(f"""g (float{list(left)} a, float{list(right)} b, int64 first, int64 last) => (float y) {{
        s = SequenceConstruct(a, b)
        u = SequenceAt(s, first)
        v = SequenceAt(s, last)
        p = MatMul(u, v)
        q = Mul(p, p)
        y = ReduceSum<keepdims = 0>(q)
    }}""")
    feeds = {
        "a": RNG.standard_normal(left),
        "b": RNG.standard_normal(right),
        "first": np.array(0),
        "last": np.array(-1),
    }
    check_model(model, feeds, ["a", "b"])


def test_inputs_and_outputs_that_are_sequences():
    model = parsed("""g (seq(float[N,3]) s, float[3] w, int64 k) => (seq(float[N,3]) t) {
        a = SequenceAt(s, k)
        b = Mul(a, w)
        zero = Constant<value = int64 {0}>()
        rest = SequenceErase(s, zero)
        t = SequenceInsert(rest, b)
    }""")
    made = onnxgrad.gradient(model, ["s", "w"])
    onnx.checker.check_model(made, full_check=True)
    session = onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    s, g = ([RNG.standard_normal((n, 3)).astype(np.float32) for n in sizes] for sizes in ((2, 1, 4), (1, 4, 2)))
    w = RNG.standard_normal(3).astype(np.float32)
    *_, s_grad, w_grad = session.run(None, {"s": s, "w": w, "k": np.array(0), "t_grad": g})
    for got, expected in zip(s_grad, [g[2] * w, g[0], g[1]], strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6)
    np.testing.assert_allclose(w_grad, (g[2] * s[0]).sum(0), rtol=1e-5)
    made = onnxgrad.gradient(parsed("""g (seq(float[N,3]) s, int64 k) => (float y) {
        a = SequenceAt(s, k)
        y = ReduceSum<keepdims = 0>(a)
    }"""), "s")  # fmt: skip
    session = onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    _, found = session.run(None, {"s": s, "k": np.array(1)})
    for k, (got, x) in enumerate(zip(found, s, strict=True)):
        np.testing.assert_array_equal(got, np.full_like(x, k == 1))
