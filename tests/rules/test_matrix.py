"""MatMul, Gemm, Einsum and Det."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from tests.gradients import check_rule, evaluate, model_of_node
from tests.linear_rules import check_like_torch

import onnxgrad

RNG = np.random.default_rng(0)


def random(*shape):
    return RNG.standard_normal(shape)


MATMULS = [
    ((3, 4), (4, 5)), ((4,), (4,)), ((4,), (4, 5)), ((3, 4), (4,)), ((2, 3, 4), (4, 5)), ((2, 3, 4), (4,)),
    ((4,), (2, 4, 5)), ((2, 3, 4), (2, 4, 5)), ((2, 1, 3, 4), (5, 4, 2)), ((3, 4), (2, 4, 5)), ((1, 3, 4), (2, 4, 5)),
]  # fmt: skip


@pytest.mark.parametrize(("a", "b"), MATMULS)
def test_matmul(a, b):
    check_rule("MatMul", random(*a), random(*b))


def test_matmul_with_weights():
    """The product of all rows at once: no matrix for each batch, no sum over batches."""
    model, feeds = model_of_node("MatMul", [random(2, 3, 4, 5), random(5, 6)], static=False)
    once = onnxgrad.gradient(model, "in_1")
    assert [n.op_type for n in once.graph.node] == ["MatMul", "Flatten", "Flatten", "Gemm"]
    assert onnxgrad.check_gradient(model, feeds, "in_1").worst < 1e-8


@pytest.mark.parametrize("transA", [0, 1])
@pytest.mark.parametrize("transB", [0, 1])
def test_gemm(transA, transB):
    A, B = random(*((4, 3) if transA else (3, 4))), random(*((5, 4) if transB else (4, 5)))
    check_rule("Gemm", A, B, random(5), alpha=0.5, beta=2.0, transA=transA, transB=transB)


@pytest.mark.parametrize("c", [None, (), (3, 1), (3, 5)], ids=str)
def test_gemm_with_any_c(c):
    check_rule("Gemm", random(3, 4), random(4, 5), *([] if c is None else [random(*c)]), beta=2.0, twice=False)


EINSUMS = {
    "ij,jk->ik": [(3, 2), (2, 5)],
    "bhid,bhjd->bhij": [(1, 2, 3, 4), (1, 2, 5, 4)],
    " b i , b j -> b ": [(2, 3), (2, 4)],
    "...ij,...jk->...ik": [(2, 3, 4), (2, 4, 2)],
    "...i,i->...": [(2, 3, 4), (4,)],
    "i...->...i": [(2, 3)],
    "...,->...": [(2, 3), ()],
    "...ii->...i": [(2, 3, 3)],
    "ij->": [(2, 3)],
    "ij->j": [(2, 3)],
    "ba": [(2, 3)],
    "ab,cd": [(2, 3), (4, 2)],
    "bA,Ab": [(2, 3), (3, 2)],
    "i->i": [(3,)],
    "ii->i": [(3, 3)],
    "ii": [(3, 3)],
    "iji->j": [(3, 2, 3)],
    "iii->i": [(2, 2, 2)],
    "iijj->ij": [(2, 2, 3, 3)],
    "ii,ij->j": [(2, 2), (2, 3)],
    "a,b,c->cab": [(2,), (3,), (4,)],
    "ij,jk,kl->il": [(2, 3), (3, 4), (4, 2)],
}


@pytest.mark.parametrize("equation", EINSUMS)
def test_einsum(equation):
    check_rule("Einsum", *(random(*s) for s in EINSUMS[equation]), equation=equation)


def test_einsum_with_broadcast_ellipsis():
    check_rule("Einsum", random(2, 3, 4), random(1, 4, 2), equation="...ij,...jk->...ik")
    check_rule("Einsum", random(1, 3, 4), random(2, 4, 2), equation="...ij,...jk")


@pytest.mark.parametrize(
    ("equation", "shapes"), [("ij,jk->ik", [(3, 1), (4, 5)]), ("ij,jk->ik", [(3, 4), (1, 5)]), ("i,i->", [(1,), (3,)])]
)
def test_einsum_with_letters_of_size_1(equation, shapes):
    model, feeds = model_of_node("Einsum", [random(*s) for s in shapes], attributes={"equation": equation})
    assert onnxgrad.check_gradient(model, feeds, list(feeds)).worst < 1e-8


@pytest.mark.parametrize("equation", ["ij,jk->ik", "bhid,bhjd->bhij", "...ii->...i", "iji->j", "a,b,c->cab", "ij->"])
def test_einsum_as_pytorch(equation):
    inputs = [random(*s) for s in EINSUMS[equation]]
    model, feeds = model_of_node("Einsum", inputs, attributes={"equation": equation})
    tensors = [torch.tensor(x, requires_grad=True) for x in inputs]
    result = torch.einsum(equation, *tensors)
    seed = torch.ones_like(result)
    result.backward(seed)
    once = onnxgrad.gradient(model, list(feeds))
    there = {i.name for i in once.graph.input}
    found = evaluate(once, {**feeds, **({"out_0_grad": seed.numpy()} if "out_0_grad" in there else {})})[1:]
    for got, x in zip(found, tensors, strict=True):
        np.testing.assert_allclose(got, x.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("shape", [(1, 1), (2, 2), (3, 3), (2, 1, 3, 3), (0, 2, 2)])
def test_det(shape):
    check_rule("Det", random(*shape))


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_det_of_singular_matrices(rank):
    """The adjugate is zero from rank n - 2 down, and so is the gradient; the second derivative is not."""
    check_rule("Det", np.stack([random(3, rank) @ random(rank, 3), random(3, 3)]))


def test_det_as_in_torch():
    check_like_torch(torch.linalg.det, "Det", random(2, 6, 6))


def test_det_in_float16():
    x = random(2, 3, 3).astype(np.float16)
    for static in (True, False):
        model, feeds = model_of_node("Det", [x], dtype=np.float16, static=static)
        got = evaluate(onnxgrad.gradient(model, "in_0"), {**feeds, "out_0_grad": np.ones(2, np.float16)})[1]
        assert got.dtype == np.float16
        wide = x.astype(np.float64)
        expected = np.linalg.det(wide)[:, None, None] * np.linalg.inv(wide).swapaxes(1, 2)
        np.testing.assert_allclose(got, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("A", "B", "attributes"),
    [
        ((2, 3), (3, 4), {"alpha": 0.5}),
        ((3, 2), (4, 3), {"permA": [1, 0], "permB": [1, 0], "permY": [1, 0]}),
        ((2, 3, 2, 4), (2, 3, 5, 4), {"permB": [0, 1, 3, 2], "permY": [0, 2, 1, 3]}),
        ((2, 1, 3, 4), (3, 4, 2), {"alpha": 2.0}),
        ((3, 2, 4), (2, 4), {"permA": [1, 0, 2], "permB": [1, 0]}),
    ],
)
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
def test_permuted_mat_mul(A, B, attributes, has_bias):
    columns = B[attributes["permB"][-1] if "permB" in attributes else -1]
    bias = [RNG.standard_normal(columns)] if has_bias else []
    inputs = RNG.standard_normal(A), RNG.standard_normal(B), *bias
    check_rule("PermutedMatMul", *inputs, domain="onnxgrad", **attributes)


def test_a_vector_times_what_a_transpose_made():
    """onnxruntime would fuse the Transpose into the product of the gradient, and read the vector wrongly."""
    text = """<ir_version: 8, opset_import: ["" : 18]>
    g (float[3] a, float[2,3] b) => (float[2] y) { t = Transpose <perm = [1,0]> (b) y = MatMul (a, t) }"""
    made = onnxgrad.gradient(onnx.parser.parse_model(text), "a")
    a, b, g = (np.arange(n, dtype=np.float32) for n in (3, 6, 2))
    feeds = {"a": a, "b": b.reshape(2, 3), "y_grad": g}
    session = onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(["a_grad"], feeds)[0], g @ feeds["b"])
