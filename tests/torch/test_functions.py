"""onnxgrad.torch: results against torch's own functions, gradients against finite differences, and what it refuses."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from tests.checks import raises
from tests.gpu import TORCH_DEVICE
from tests.gru_cases import DIRECTIONS, case, torch_gru
from torch.autograd import gradcheck, gradgradcheck

import onnxgrad.torch as ours

INTEGERS = (torch.int32, torch.int64)


def numbers(*shape, grad=True, dtype=torch.float64):
    """Random numbers on the device under test, the same every time."""
    values = np.random.default_rng(0).standard_normal(shape)
    return torch.tensor(values, dtype=dtype, device=TORCH_DEVICE, requires_grad=grad)


def some_indices(size, *shape, dtype=torch.int64):
    """About half of them negative, some of them repeated."""
    values = np.random.default_rng(1).integers(-size, size, shape)
    return torch.tensor(values, dtype=dtype, device=TORCH_DEVICE)


def check_gradients(function, data, nondet_tol=0.0):
    """Once and twice differentiated, against finite differences; a second call may differ by `nondet_tol`."""
    assert gradcheck(function, data, nondet_tol=nondet_tol)
    assert gradgradcheck(function, data, nondet_tol=nondet_tol)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (0,)], ids=str)
def test_gather(shape, axis, dtype):
    data = numbers(3, 4, 2)
    indices = some_indices(data.shape[axis], *shape, dtype=dtype)
    places = torch.where(indices < 0, indices + data.shape[axis], indices).long()
    expected = np.take(data.detach().cpu().numpy(), places.cpu().numpy(), axis)
    assert torch.equal(ours.gather(data, indices, axis).cpu(), torch.from_numpy(np.asarray(expected)))
    check_gradients(lambda x: ours.gather(x, indices, axis), data)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_gather_elements(axis, dtype):
    data = numbers(3, 4, 2)
    shape = [2, 3, 2]
    shape[axis] = 6
    indices = some_indices(data.shape[axis], *shape, dtype=dtype)
    places = torch.where(indices < 0, indices + data.shape[axis], indices).long()
    assert torch.equal(ours.gather_elements(data, indices, axis), data.gather(axis, places))
    # Unless torch is told to be deterministic, atomic additions come in any order on a GPU.
    check_gradients(lambda x: ours.gather_elements(x, indices, axis), data, nondet_tol=1e-12)


SLICES = [
    (([1], [3], None, None), np.s_[1:3]),
    (([0, -1], [9, -9], [1, 2], [2, -1]), np.s_[:, ::2, ::-1]),
    (([-1], [-(2**31)], [0], [-2]), np.s_[::-2]),
    (([2], [1], [0], [1]), np.s_[2:1]),
    (([], [], None, None), np.s_[:]),
    (([1, 0], [2**31 - 1, 2**63 - 1], [], []), np.s_[1:, :]),
]


@pytest.mark.parametrize(("where", "plain"), SLICES, ids=str)
def test_slice(where, plain):
    data = numbers(3, 4, 5)
    expected = data.detach().cpu().numpy()[plain]
    assert torch.equal(ours.slice(data, *where).cpu(), torch.from_numpy(expected.copy()))
    check_gradients(lambda x: ours.slice(x, *where), data)


def test_a_slice_shares_no_memory():
    data = numbers(3, 4, grad=False)
    assert ours.slice(data, [], []).data_ptr() != data.data_ptr()


def test_numbers_of_a_slice_may_be_of_any_integer_type():
    data = numbers(5, 3)
    expected = data[1:3]
    for given in (np.array([1]), np.array([3], np.int32)), (torch.tensor([1]), torch.tensor([3])), ((1,), range(3, 4)):
        assert torch.equal(ours.slice(data, *given), expected)


def test_complex_numbers_are_sliced_too():
    data = torch.randn(4, dtype=torch.complex128, device=TORCH_DEVICE, requires_grad=True)
    check_gradients(lambda x: ours.slice(x, [3], [-9], [0], [-2]).conj(), data)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_gradients_have_the_type_of_the_data(dtype):
    data = numbers(5, 3, dtype=dtype)
    indices = torch.tensor([4, 0, -1], device=TORCH_DEVICE)
    expected = torch.tensor([1, 0, 0, 0, 2], dtype=dtype, device=TORCH_DEVICE)[:, None].expand(5, 3)
    (gradient,) = torch.autograd.grad(ours.gather(data, indices).sum(), data)
    assert gradient.dtype == dtype and torch.equal(gradient, expected)
    (gradient,) = torch.autograd.grad(ours.gather_elements(data, indices[:, None].expand(3, 3)).sum(), data)
    assert gradient.dtype == dtype and torch.equal(gradient, expected)
    (gradient,) = torch.autograd.grad(ours.slice(data, [4], [5]).sum(), data)
    assert gradient.dtype == dtype and gradient.sum() == 3 and (gradient[4] == 1).all()


def test_torchs_switch_for_determinism():
    data, indices = numbers(5, 3), some_indices(5, 7, 3)
    before = torch.are_deterministic_algorithms_enabled()
    try:
        for wanted in (True, False):
            torch.use_deterministic_algorithms(wanted)
            (gradient,) = torch.autograd.grad(ours.gather_elements(data, indices).sum(), data)
            assert gradient.sum().item() == 21
    finally:
        torch.use_deterministic_algorithms(before)


def gru_inputs(direction, lengths, dtype=torch.float64):
    """X, W, R, B, SL and Ht0 as tensors, all but the lengths on record."""
    given = case(S=3, N=3, inputs=2, H=2, direction=direction, lengths=lengths)
    return [
        None if a is None
        else torch.tensor(a, device=TORCH_DEVICE) if a.dtype == np.int32
        else torch.tensor(a, dtype=dtype, device=TORCH_DEVICE, requires_grad=True)
        for a in given.forward
    ]  # fmt: skip


@pytest.mark.parametrize("lengths", [False, True], ids=["whole", "lengths"])
@pytest.mark.parametrize("linear_before_reset", [0, 1])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_gru(direction, linear_before_reset, lengths):
    X, W, R, B, SL, Ht0 = gru_inputs(direction, lengths)
    attributes = {"direction": direction, "linear_before_reset": linear_before_reset}
    expected = torch_gru(X, W, R, B, SL, Ht0, **attributes)
    for actual, wanted in zip(ours.gru(X, W, R, B, SL, Ht0, **attributes), expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12)
    assert gradcheck(
        lambda X, W, R, B, Ht0: ours.gru(X, W, R, B, SL, Ht0, **attributes), (X, W, R, B, Ht0), nondet_tol=0.0
    )


def test_a_gru_without_its_optional_inputs():
    X, W, R, *_ = gru_inputs("forward", lengths=False)
    assert gradcheck(ours.gru, (X, W, R))


def test_a_gru_with_other_activations_and_a_clip():
    X, W, R, B, SL, Ht0 = gru_inputs("forward", lengths=True)
    attributes = {"activations": ["HardSigmoid", "Softsign"], "activation_alpha": [0.3], "clip": 5.0}
    assert gradcheck(lambda X, W, R: ours.gru(X, W, R, B, SL, Ht0, **attributes), (X, W, R))


def test_a_gru_gives_only_the_gradients_asked_for():
    X, W, R, B, _, Ht0 = gru_inputs("forward", lengths=False)
    everything = torch.autograd.grad(ours.gru(X, W, R, B, None, Ht0)[0].sum(), (X, W, R, B, Ht0))
    for k, alone in enumerate((X, W, R, B, Ht0)):
        others = [t if t is alone else t.detach() for t in (X, W, R, B, Ht0)]
        states, last = ours.gru(*others[:4], None, others[4])
        (gradient,) = torch.autograd.grad(states.sum(), alone, retain_graph=True)
        assert torch.equal(gradient, everything[k])
        (gradient,) = torch.autograd.grad(last.sum(), alone)
        assert gradient.shape == alone.shape


def test_a_gru_is_differentiated_once():
    X, W, R, *_ = gru_inputs("forward", lengths=False)
    (gradient,) = torch.autograd.grad(ours.gru(X, W, R)[0].square().sum(), X, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


DATA = numbers(4, 3)


def integers(*values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype, device=TORCH_DEVICE)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int16, torch.float32], ids=str)
def test_indices_of_other_types(dtype):
    name = str(dtype).removeprefix("torch.")
    with raises(TypeError, f"indices is {name}, expected int32 or int64"):
        ours.gather(DATA, integers(0, 1, dtype=dtype))
    with raises(TypeError, f"indices is {name}, expected int32 or int64"):
        ours.gather_elements(DATA, integers([0, 1, 1], dtype=dtype))


@pytest.mark.parametrize("axis", [2, -3])
def test_an_axis_there_is_not(axis):
    with raises(ValueError, f"axis is {axis}, expected -2 to 1 for 2 dimensions"):
        ours.gather(DATA, integers(0, 1), axis)
    with raises(ValueError, f"axis is {axis}, expected -2 to 1 for 2 dimensions"):
        ours.gather_elements(DATA, integers([0, 1, 1]), axis)


@pytest.mark.skipif(TORCH_DEVICE == "cuda", reason="torch's own kernels stop the GPU's process")
@pytest.mark.parametrize("bad", [4, -5])
def test_indices_out_of_range_are_torchs_to_refuse(bad):
    with pytest.raises(IndexError, match="index out of range in self"):
        ours.gather(DATA, integers(0, bad))
    with pytest.raises(RuntimeError, match="is out of bounds for dimension 0 with size 4"):
        ours.gather_elements(DATA, integers([0, bad, 1]))


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("ends has 2 values, expected 1 as starts has", ([0], [1, 2])),
        ("axes names 2, expected -2 to 1 for shape [4, 3]", ([0], [2], [2])),
        ("axes is [0, -2], expected no axis twice", ([0, 0], [2, 1], [0, -2])),
        ("steps is [0], expected no 0", ([0], [2], None, [0])),
        ("starts has 3 values, expected at most 2 for shape [4, 3]", ([0] * 3, [1] * 3)),
    ],
)
def test_bad_slices(text, where):
    with raises(ValueError, text):
        ours.slice(DATA, *where)


def test_numbers_of_a_slice_that_are_not_integers():
    with raises(TypeError, "'float' object cannot be interpreted as an integer"):
        ours.slice(DATA, [0.5], [2])


def test_bad_grus():
    X, W, R, *_ = gru_inputs("forward", lengths=False)
    with raises(ValueError, "GRUTraining: R has shape [1, 6, 1], expected [1, 3, 1]"):
        ours.gru(X, W, R[..., :1])
    with raises(ValueError, "GRUTraining: SL[1] is 4, expected 0 to 3, the number of steps"):
        ours.gru(X, W, R, None, integers(3, 4, 0, dtype=torch.int32))


def test_without_torch_a_sentence_says_what_to_install():
    code = "import sys; sys.modules['torch'] = None; import onnxgrad.torch"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ImportError: onnxgrad.torch needs torch: pip install 'onnxgrad[torch]'" in done.stderr
