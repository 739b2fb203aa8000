"""Calls that only exist on a GPU: tensors in the wrong place, bad indices found by kernels, exact sums in any order."""

import math

import numpy as np
import pytest
import torch
from tests.checks import DEVICE, FLOATS, INDICES, assert_close, call, raises, same_bits
from tests.gpu import TORCH_DEVICE, to_array, to_tensor
from tests.gru_cases import GRADIENTS, case

from onnxgrad import gather_elements_grad, gather_grad, gru_grad, gru_training, slice_grad

pytestmark = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU or Triton's interpreter")

F32 = np.dtype(np.float32)
TYPES = "float16, float32, float64 or bfloat16"
SOME = np.array([0, 1])
ONES = np.ones((2, 3), F32)
WHERE = np.zeros((2, 3), np.int64)


def on_device(*arrays):
    """Tensors of these arrays; anything else as it is."""
    return [to_tensor(a) if isinstance(a, np.ndarray) else a for a in arrays]


HOST = "on the host, expected an array on the GPU"


@pytest.mark.parametrize(
    ("op", "text", "args"),
    [
        (gather_grad, f"indices is a ndarray {HOST}", ([4, 3], SOME, to_tensor(ONES))),
        (gather_grad, f"indices is a list {HOST}", ([4, 3], [0, 1], to_tensor(ONES))),
        (gather_grad, f"indices is a int {HOST}", ([4, 3], 0, to_tensor(ONES[0]))),
        (gather_grad, f"dY is a ndarray {HOST}", ([4, 3], to_tensor(SOME), ONES)),
        (gather_grad, f"dY is a list {HOST}", ([4, 3], to_tensor(SOME), ONES.tolist())),
        (gather_grad, f"dY is None, expected an array of {TYPES}", ([4, 3], to_tensor(SOME), None)),
        (gather_grad, "indices is bool, expected int32 or int64", ([4, 3], to_tensor(SOME > 0), to_tensor(ONES))),
        (gather_elements_grad, f"indices is a ndarray {HOST}", (to_tensor(ONES), [4, 3], WHERE)),
        (gather_elements_grad, f"dY is a float32 {HOST}", (np.float32(1), [4], to_tensor(SOME))),
        (gather_elements_grad, f"dY is int64, expected {TYPES}", (to_tensor(WHERE), [4, 3], to_tensor(WHERE))),
    ],
)
def test_what_is_not_on_the_gpu(op, text, args):
    with raises(TypeError, f"{op.name}: {text}"):
        op(*args)


def test_a_gru_whose_inputs_are_apart():
    X, W, R, B, _, Ht0 = on_device(*case(dtype=np.float32).forward)
    with raises(TypeError, f"GRUTraining: W is a ndarray {HOST}"):
        gru_training(X, to_array(W), R)
    with raises(TypeError, f"GRUTraining: SL is a list {HOST}"):
        gru_training(X, W, R, B, [4, 4, 4], Ht0)
    with raises(TypeError, "GRUTraining: B is float64, expected float32 as X is"):
        gru_training(X, W, R, B.to(torch.float64))
    with raises(TypeError, "GRUTraining: SL is int64, expected int32"):
        gru_training(X, W, R, None, to_tensor(np.array([4, 4, 4])))


def test_shapes_come_from_the_host_in_any_kind():
    indices, dY = on_device(SOME, ONES)
    expected = to_array(gather_grad([4, 3], indices, dY))
    for shape in ((4, 3), np.array([4, 3]), torch.tensor([4, 3]), torch.tensor([4, 3], dtype=torch.int32)):
        assert same_bits(to_array(gather_grad(shape, indices, dY)), expected)


@pytest.mark.skipif(DEVICE != "cuda", reason="in the interpreter every tensor is on the CPU")
def test_tensors_on_the_wrong_side():
    indices, dY = on_device(SOME, ONES)
    text = "shape is on the GPU, expected on the host: a list, a NumPy array or a tensor of the CPU"
    with raises(TypeError, f"GatherGrad: {text}"):
        gather_grad(torch.tensor([4, 3], device="cuda"), indices, dY)
    with raises(TypeError, f"GatherGrad: indices is a Tensor {HOST}"):
        gather_grad([4, 3], indices.cpu(), dY)
    with raises(TypeError, "GatherGrad: out for dX is a Tensor, expected an array on the GPU"):
        gather_grad.into(torch.empty(4, 3), [4, 3], indices, dY)


@pytest.mark.parametrize(
    ("error", "text", "out"),
    [
        (TypeError, "out for dX is a ndarray, expected an array on the GPU", np.empty((4, 3), F32)),
        (TypeError, "out for dX is a list, expected an array on the GPU", [[[0.0]]]),
        (TypeError, "out for dX is a NoneType, expected an array on the GPU", [None]),
        (ValueError, "out has 2 arrays, expected 1: dX", [np.empty((4, 3), F32)] * 2),
        (ValueError, "out for dX is {float32[3, 4]}, expected {float32[4, 3]}, contiguous", ("float32", (3, 4))),
        (ValueError, "out for dX is {float32[12]}, expected {float32[4, 3]}, contiguous", ("float32", (12,))),
        (ValueError, "out for dX is {float16[4, 3]}, expected {float32[4, 3]}, contiguous", ("float16", (4, 3))),
        (ValueError, "out for dX is {float32[4, 3]}, expected {float32[4, 3]}, contiguous", ("transposed", (4, 3))),
    ],
)  # fmt: skip
def test_bad_out(error, text, out):
    where = to_tensor(ONES).device
    text = text.replace("{", "").replace("}", f" on {where}")
    indices, dY = on_device(SOME, ONES)
    if isinstance(out, tuple):
        kind, shape = out
        out = torch.zeros(shape, dtype=getattr(torch, kind, torch.float32), device=where)
        out = out.T.contiguous().T if kind == "transposed" else out
    with raises(error, f"GatherGrad: {text}"):
        gather_grad.into(out, [4, 3], indices, dY)
    if isinstance(out, torch.Tensor):
        assert not out.any()


def test_into_gives_back_the_tensors_passed_in():
    indices, dY = on_device(SOME, ONES)
    out = torch.full((4, 3), math.nan, device=TORCH_DEVICE)
    assert gather_grad.into(out, [4, 3], indices, dY) is out
    assert same_bits(to_array(out), gather_grad.definition([4, 3], SOME, ONES))


def test_into_writes_only_the_outputs_asked_for():
    backward = case(S=3, N=4, inputs=5, H=6, dtype=np.float32).backward()
    out = [to_tensor(np.full_like(g, np.nan)) for g in gru_grad.definition(*backward)]
    results = gru_grad.into(out, *on_device(*backward), outputs=("dW",))
    assert [r is None for r in results] == [name != "dW" for name in GRADIENTS]
    assert [bool(torch.isnan(o).all()) for o in out] == [name != "dW" for name in GRADIENTS]


def several_bad(shape):
    """Thousands of indices, so that several programs meet bad ones; and the error that names the first of them."""
    indices = np.random.default_rng(0).integers(-50, 50, shape)
    for position, bad in ((17, 50), (1030, -51), (2060, 2**40), (indices.size - 1, -(2**40))):
        indices.flat[position] = bad
    where = [int(i) for i in np.unravel_index(17, shape)]
    return indices, f"indices{where} is 50, expected -50 to 49"


@pytest.mark.parametrize("inner", [1, 3])
def test_of_several_bad_indices_gather_grad_names_the_first(inner):
    indices, text = several_bad((2100,))
    with raises(IndexError, f"GatherGrad: {text}"):
        gather_grad([50, inner], *on_device(indices, np.ones((2100, inner), F32)))


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("axis", [0, 1])
def test_of_several_bad_indices_gather_elements_grad_names_the_first(axis, dtype, deterministic):
    indices, text = several_bad((600, 4) if axis == 0 else (4, 600))
    shape = [50, 4] if axis == 0 else [4, 50]
    dY, where = on_device(np.ones(indices.shape, dtype), indices)
    with raises(IndexError, f"GatherElementsGrad: {text}"):
        gather_elements_grad(dY, shape, where, axis, deterministic=deterministic)


@pytest.mark.parametrize("index", INDICES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("inner", [1, 7, 300])
def test_without_a_check_gather_grad_ignores_bad_indices(inner, dtype, index):
    rng = np.random.default_rng(0)
    indices = rng.integers(-9, 9, 40).astype(index)
    dY = rng.integers(-4, 5, (40, inner)).astype(dtype)  # small integers: every order gives the same sums
    bad = rng.permutation(40)[:10]
    indices[bad] = np.resize([9, -10, np.iinfo(index).max, np.iinfo(index).min], 10)
    good = np.delete(np.arange(40), bad)
    expected = gather_grad.definition([9, inner], indices[good], dY[good])
    assert same_bits(call(gather_grad, [9, inner], indices, dY, check=False) + dtype.type(0), expected + dtype.type(0))


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("index", INDICES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("axis", [0, 1])
def test_without_a_check_gather_elements_grad_ignores_bad_indices(axis, dtype, index, deterministic):
    rng = np.random.default_rng(0)
    indices = rng.integers(-9, 9, (8, 8)).astype(index)
    dY = rng.integers(-4, 5, (8, 8)).astype(dtype)
    bad = np.unravel_index(rng.permutation(64)[:12], (8, 8))
    indices[bad] = np.resize([9, -10, np.iinfo(index).max, np.iinfo(index).min], 12)
    harmless, zeroed = indices.copy(), dY.copy()
    harmless[bad], zeroed[bad] = 0, 0
    shape = [9, 9]
    expected = gather_elements_grad.definition(zeroed, shape, harmless, axis)
    actual = call(gather_elements_grad, dY, shape, indices, axis, check=False, deterministic=deterministic)
    assert same_bits(actual + dtype.type(0), expected + dtype.type(0))


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_lengths_out_of_range(direction):
    given = case(S=3, N=4, inputs=5, H=6, direction=direction, dtype=np.float32)
    wild, clamped = (np.array(v, np.int32) for v in ([2, 9, -4, 3], [2, 3, 0, 3]))
    text = "SL[1] is 9, expected 0 to 3, the number of steps"
    arguments = given._replace(SL=wild).forward
    with raises(ValueError, f"GRUTraining: {text}"):
        gru_training(*on_device(*arguments), direction=direction)
    expected = call(gru_training, *given._replace(SL=clamped).forward, direction=direction)
    for actual, wanted in zip(call(gru_training, *arguments, direction=direction, check=False), expected, strict=True):
        assert same_bits(actual, wanted)
    backward = given._replace(SL=clamped).backward(direction=direction)
    bad = [wild if k == 4 else a for k, a in enumerate(backward)]
    with raises(ValueError, f"GRUGrad: {text}"):
        gru_grad(*on_device(*bad), direction=direction)
    for actual, wanted in zip(
        call(gru_grad, *bad, direction=direction, check=False),
        call(gru_grad, *backward, direction=direction),
        strict=True,
    ):
        assert same_bits(actual, wanted)


# What follows is about GatherElementsGrad's exact sums: `sums` adds up lines of terms, all of a line in one element.


def sums(lines, axis, **how):
    """The sum of every row of `lines`, by GatherElementsGrad along this axis."""
    terms = np.ascontiguousarray(lines.T if axis == 0 else lines)
    shape = list(terms.shape)
    shape[axis] = 3
    dX = call(gather_elements_grad, terms, shape, np.full(terms.shape, 1), axis, **how)
    assert not np.take(dX, [0, 2], axis).astype(np.float64).any()
    return np.take(dX, 1, axis)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", [d for d in FLOATS if d.itemsize < 8], ids=str)
def test_infinities_and_nan(dtype, axis):
    inf, nan = math.inf, math.nan
    lines = np.array(
        [[1, inf, 2], [1, -inf, 2], [inf, -inf, 1], [inf, inf, 0], [nan, 1, 1], [nan, inf, 1], [1, 2, -5], [0, 0, 0]]
    ).astype(dtype)
    expected = np.array([inf, -inf, nan, inf, nan, nan, -2, 0])
    np.testing.assert_array_equal(sums(lines, axis).astype(np.float64), expected)
    # Lines that share a program, and are without such numbers, are summed exactly all the same.
    small = np.resize(np.array([3, 1e-4, -1e-4], dtype), (8, 9))
    small[0, 4] = inf
    actual = sums(small, axis).astype(np.float64)
    assert actual[0] == inf
    np.testing.assert_array_equal(actual[1:], 9)


def assert_rounded_once(actual, lines):
    """Half a unit in the last place of float32, or half its smallest number, away from the exact sum at most."""
    exact = np.array([math.fsum(line) for line in lines.astype(np.float64)])
    once = float(np.finfo(np.float32).eps) / 2
    # Before that the sum is rounded to float64, where a tie may be lost or made.
    assert_close(actual, exact, once * (1 + 2.0**-20) * np.abs(exact) + 2.0**-150, "sum")


@pytest.mark.parametrize("axis", [0, 1])
def test_terms_of_any_size_add_up_exactly(axis):
    rng = np.random.default_rng(0)
    lines = (rng.standard_normal((6, 40)) * 10.0 ** rng.integers(-44, 38, (6, 40))).astype(F32)
    lines[0, :2], lines[0, 2:] = (1e30, 1e-30), 0
    lines[1] = np.resize(np.array([1e30, 1e-30, -1e30], F32), 40)  # cancels but for the smallest
    lines[2] = rng.integers(1, 2**23, 40).astype(np.uint32).view(F32)  # subnormal numbers
    lines[3] = np.resize(np.array([3e38, 1e-45, 3e38, -3e38, -3e38, 0], F32), 40)  # more than float32 holds, on the way
    assert_rounded_once(sums(lines, axis), lines)


def test_terms_that_cancel():
    rng = np.random.default_rng(1)
    half = (rng.standard_normal((5, 30)) * 2.0 ** rng.integers(-60, 60, (5, 30))).astype(F32)
    rest = rng.standard_normal((5, 1)).astype(F32) * F32.type(1e-20)
    lines = rng.permuted(np.concatenate([half, -half, rest], axis=1), axis=1)
    assert same_bits(sums(lines, 1), rest[:, 0])


def test_a_sum_beyond_the_type_is_infinite():
    for dtype, large in ((F32, 3e38), (np.dtype(np.float16), 6e4), (FLOATS[3], 3e38)):
        assert sums(np.full((1, 3), large, dtype), 1)[0] == math.inf
        assert sums(np.full((1, 3), -large, dtype), 1)[0] == -math.inf


@pytest.mark.parametrize("dtype", [d for d in FLOATS if d.itemsize < 8], ids=str)
@pytest.mark.parametrize("axis", [0, 1])
def test_the_order_of_terms_changes_no_bit(axis, dtype):
    rng = np.random.default_rng(0)
    lines = (rng.standard_normal((4, 200)) * 2.0 ** rng.integers(-8, 9, (4, 200))).astype(dtype)
    first = sums(lines, axis)
    for _ in range(3):
        assert same_bits(sums(rng.permuted(lines, axis=1), axis), first)


def test_the_order_of_terms_and_indices_changes_no_bit():
    """Terms stay with their indices, and both are shuffled along the axis."""
    rng = np.random.default_rng(0)
    dY = (rng.standard_normal((300, 3)) * 2.0 ** rng.integers(-30, 31, (300, 3))).astype(F32)
    indices = rng.integers(-7, 7, (300, 3))
    first = call(gather_elements_grad, dY, [7, 3], indices)
    order = rng.permutation(300)
    assert same_bits(call(gather_elements_grad, dY[order], [7, 3], indices[order]), first)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("inner", [1, 3])
def test_one_row_named_thousands_of_times(inner, dtype):
    """In integers, so that the sum is known whatever its order."""
    rng = np.random.default_rng(0)
    count = 2100
    indices = np.full(count, 2)
    indices[[0, 1000, -1]] = [0, 4, -5]  # runs of other rows before and after the long one
    dY = rng.integers(-3, 4, (count, inner)).astype(dtype)
    expected = np.zeros((5, inner))
    np.add.at(expected, indices, dY.astype(np.float64))
    np.testing.assert_array_equal(call(gather_grad, [5, inner], indices, dY).astype(np.float64), expected)


def test_a_gradient_that_is_conjugated_only_on_paper():
    """torch negates and conjugates lazily: the numbers in memory are then not those of the tensor."""
    numbers = torch.arange(1, 7, device=TORCH_DEVICE).to(torch.complex64) * (1 + 2j)
    dX = slice_grad(numbers.conj(), [8], [1], [7])
    assert torch.equal(dX[1:7], numbers.conj().resolve_conj())
    lazily = torch._neg_view(to_tensor(ONES))
    assert torch.equal(gather_grad([2, 3], to_tensor(SOME), lazily), -to_tensor(ONES))


def test_gradients_may_be_on_record():
    dY = to_tensor(ONES).requires_grad_()
    dX = gather_grad([4, 3], to_tensor(SOME), dY)
    assert not dX.requires_grad
    assert same_bits(to_array(dX), gather_grad.definition([4, 3], SOME, ONES))


def test_results_may_not_share_memory():
    dY = to_tensor(ONES)
    with raises(ValueError, "SliceGrad: out for dX shares memory with an input"):
        slice_grad.into(dY, dY, [2, 3], [0], [2])
    X, W, R, *_ = on_device(*case(dtype=np.float32).forward)
    HAll, HFinal, ZRH = gru_training(X, W, R)
    with raises(ValueError, "GRUTraining: out for HFinal shares memory with HAll"):
        gru_training.into((HAll, HAll.view(-1)[: HFinal.numel()].view(HFinal.shape), ZRH), X, W, R)


def test_what_was_checked_before_stands_for_nothing_else():
    indices, dY = on_device(SOME, ONES)
    gather_grad([4, 3], indices, dY)
    with raises(TypeError, "GatherGrad: shape holds float64 values, expected integers"):
        gather_grad([4.0, 3.0], indices, dY)


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
@pytest.mark.parametrize("kind", ["cupy", "jax"])
def test_arrays_of_other_frameworks_come_back_as_such(kind):
    framework = pytest.importorskip(kind)
    to_kind = framework.numpy.asarray if kind == "jax" else framework.asarray
    indices, dY = np.array([[0, -4], [1, 0]]), np.arange(12, dtype=F32).reshape(2, 2, 3)
    given = case(dtype=np.float32)
    HAll, _, ZRH = gru_training(*on_device(*given.forward))
    back = given.backward()
    calls = [
        (gather_grad, ([4, 3], indices, dY)),
        (gather_elements_grad, (dY[0], [2, 5], np.array([[0, 4, 4], [1, -5, 2]]), 1)),
        (slice_grad, (dY, [2, 2, 8], [1], [7], [2], [2])),
        (gru_training, given.forward),
        (gru_grad, (*back[:6], to_array(HAll), to_array(ZRH), *back[8:])),
    ]
    for op, args in calls:
        expected = op(*on_device(*args))
        result = op(*[to_kind(a) if isinstance(a, np.ndarray) else a for a in args])
        several = isinstance(expected, tuple)
        for mine, wanted in zip(result if several else [result], expected if several else [expected], strict=True):
            assert type(mine) is type(to_kind(dY)), op.name
            assert same_bits(np.asarray(mine.get() if kind == "cupy" else mine), to_array(wanted)), op.name
    with raises(IndexError, "GatherGrad: indices[0, 1] is -5, expected -4 to 3"):
        gather_grad([4, 3], to_kind(indices - 1), to_kind(dY))
