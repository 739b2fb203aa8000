"""Arrays of torch and of any other framework on the CPU: in without a copy, out in kind, with the bits of NumPy's."""

import math
import sys
import types

import ml_dtypes
import numpy as np
import pytest
import torch
from tests.checks import DEVICE, FLOATS, raises, same_bits
from tests.gpu import TWINS, to_array, to_tensor
from tests.gru_cases import case

from onnxgrad import (
    broadcast_gradient_args,
    gather_elements_grad,
    gather_grad,
    gru_grad,
    gru_training,
    slice_grad,
)

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="torch's tensors on the CPU are the GPU's in the interpreter")

F32 = np.dtype(np.float32)
ONES = np.ones((2, 3), F32)


def calls(dtype):
    """(operator, positional arguments) of every operator that computes, in one type."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((6, 4)).astype(dtype)
    indices = rng.integers(-5, 5, 6)
    given = case(S=3, N=4, inputs=5, H=6, lengths=True, dtype=dtype.type)
    return [
        (gather_grad, ([5, 4], indices, rows)),
        (gather_elements_grad, (rows, [5, 4], np.repeat(indices[:, None], 4, axis=1))),
        (slice_grad, (rows, [9, 4], [7], [1], [0], [-1])),
        (gru_training, given.forward),
        (gru_grad, given.backward()),
    ]  # fmt: skip


def results(result):
    return result if isinstance(result, tuple) else (result,)


def as_tensors(args):
    return [to_tensor(a) if isinstance(a, np.ndarray) else a for a in args]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_tensors_of_torch_give_tensors_with_the_same_bits(dtype):
    for op, args in calls(dtype):
        expected = results(op(*args))
        actual = results(op(*as_tensors(args)))
        assert all(type(a) is torch.Tensor for a in actual)
        assert all(same_bits(to_array(a), e) for a, e in zip(actual, expected, strict=True)), op


@pytest.mark.parametrize("dtype", TWINS, ids=str)
def test_types_that_numpy_lacks(dtype):
    dY = np.arange(6).astype(dtype)
    dX = slice_grad(to_tensor(dY), [8], [1], [7])
    assert dX.dtype == TWINS[dtype][0]
    assert same_bits(to_array(dX), slice_grad(dY, [8], [1], [7]))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int16, torch.int64, torch.complex128], ids=str)
def test_other_types_of_torch(dtype):
    dY = torch.arange(6).to(dtype)
    dX = slice_grad(dY, [8], [1], [7])
    assert dX.dtype == dtype and torch.equal(dX, torch.nn.functional.pad(dY, (1, 1)))


def test_tensors_and_arrays_and_lists_in_one_call():
    indices = np.array([0, -1])
    expected = gather_grad([4, 3], indices, ONES)
    for shape in ([4, 3], np.array([4, 3]), torch.tensor([4, 3]), torch.tensor([4, 3], dtype=torch.int32)):
        for where in ([0, -1], indices, torch.from_numpy(indices)):
            dX = gather_grad(shape, where, torch.from_numpy(ONES))
            assert type(dX) is torch.Tensor and same_bits(dX.numpy(), expected)


def test_strided_and_expanded_tensors():
    rows = torch.arange(24.0).reshape(4, 6)
    indices = torch.tensor([3, 3, 0, 1, 2, 2])
    for dY in (rows.T, rows.repeat(3, 2)[::2, ::3].T, torch.ones(()).expand(6, 4)):
        dX = gather_grad([4, dY.shape[1]], indices[: dY.shape[0]], dY)
        expected = torch.zeros(4, dY.shape[1]).index_add_(0, indices[: dY.shape[0]], dY)
        assert torch.equal(dX, expected)


def test_tensors_conjugated_or_negated_only_on_paper():
    numbers = torch.arange(1, 7).to(torch.complex64) * (1 + 2j)
    assert torch.equal(slice_grad(numbers.conj(), [8], [1], [7])[1:7], numbers.conj().resolve_conj())
    assert torch.equal(slice_grad(numbers.conj().imag, [8], [1], [7])[1:7], -numbers.imag)


def test_tensors_on_record():
    """They are accepted, and nothing is recorded: that is onnxgrad.torch's business."""
    dY = torch.ones(2, 3, requires_grad=True)
    dX = gather_grad([4, 3], torch.tensor([0, -1]), dY)
    assert not dX.requires_grad
    assert same_bits(dX.numpy(), gather_grad([4, 3], [0, -1], ONES))
    weights = torch.nn.Parameter(torch.ones(2, 3))  # a subclass
    assert type(gather_grad([4, 3], torch.tensor([0, -1]), weights)) is torch.Tensor


def test_into_tensors():
    for op, args in calls(F32):
        expected = results(op(*args))
        out = [torch.full(e.shape, math.nan) for e in expected]
        given = results(op.into(out, *as_tensors(args)))
        for mine, theirs, wanted in zip(out, given, expected, strict=True):
            assert theirs is mine, f"{op.name} gave another tensor"
            assert same_bits(mine.numpy(), wanted)


def test_into_tensors_of_bfloat16_and_one_alone():
    dY, indices = torch.ones(2, 3, dtype=torch.bfloat16), torch.tensor([1, 1])
    out = torch.full((4, 3), math.nan, dtype=torch.bfloat16)
    gather_grad.into(out, [4, 3], indices, dY)
    assert out[:, 0].tolist() == [0, 2, 0, 0]


def test_bad_out():
    args = [4, 3], torch.tensor([0, 1]), torch.ones(2, 3)
    with raises(ValueError, "GatherGrad: out for dX is float32[3, 4], expected float32[4, 3]"):
        gather_grad.into(torch.zeros(3, 4), *args)
    with raises(ValueError, "GatherGrad: out for dX is not a writeable C-contiguous array"):
        gather_grad.into(torch.zeros(3, 4).T, *args)
    with raises(ValueError, "SliceGrad: out for dX shares memory with an input"):
        slice_grad.into(args[2], args[2], [2, 3], [0], [2])


def test_broadcast_gradient_args_of_tensors():
    a, b = broadcast_gradient_args(torch.tensor([2, 1, 4]), torch.tensor([3, 1]))
    assert [type(axes) for axes in (a, b)] == [torch.Tensor] * 2
    assert (a.dtype, a.tolist(), b.dtype, b.tolist()) == (torch.int64, [1], torch.int64, [2, 0])
    a, b = broadcast_gradient_args([2, 1, 4], torch.tensor([3, 1]))
    assert (a.tolist(), b.tolist()) == ([1], [2, 0])


class Foreign:
    """An array of some framework that speaks DLPack and the array API, and nothing else."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __array_namespace__(self, api_version=None):
        return types.SimpleNamespace(from_dlpack=lambda array: Foreign(np.from_dlpack(array)))


@pytest.mark.parametrize("dtype", [d for d in FLOATS if d != ml_dtypes.bfloat16], ids=str)
def test_arrays_of_any_framework_come_back_as_such(dtype):
    for op, args in calls(dtype):
        expected = results(op(*args))
        actual = results(op(*[Foreign(a) if isinstance(a, np.ndarray) else a for a in args]))
        assert all(type(a) is Foreign for a in actual)
        assert all(same_bits(a.array, e) for a, e in zip(actual, expected, strict=True)), op


def test_a_framework_without_the_array_api_is_found_by_its_name(monkeypatch):
    module = types.ModuleType("some_framework")
    plain = type("Plain", (Foreign,), {"__module__": "some_framework.arrays", "__array_namespace__": property()})
    module.from_dlpack = lambda array: plain(np.from_dlpack(array))
    monkeypatch.setitem(sys.modules, "some_framework", module)
    dX = gather_grad([4, 3], [0, -1], plain(ONES))
    assert type(dX) is plain and same_bits(dX.array, gather_grad([4, 3], [0, -1], ONES))


def test_the_first_array_that_is_not_numpys_decides():
    dX = gather_grad([4, 3], torch.tensor([0, 1]), Foreign(ONES))
    assert type(dX) is torch.Tensor
    dX = gather_elements_grad(Foreign(ONES), [4, 3], torch.zeros(2, 3, dtype=torch.int64))
    assert type(dX) is Foreign


@pytest.mark.parametrize("make", [np.asarray, torch.from_numpy, Foreign], ids=["numpy", "torch", "any"])
def test_how_to_run_is_accepted_on_the_cpu_and_changes_nothing(make):
    for op, args in calls(F32):
        made = [make(a) if isinstance(a, np.ndarray) else a for a in args]
        expected = [np.from_dlpack(r) for r in results(op(*made))]
        for check in (True, False):
            for deterministic in (True, False):
                given = results(op(*made, check=check, deterministic=deterministic))
                assert all(same_bits(np.from_dlpack(g), e) for g, e in zip(given, expected, strict=True))


def test_without_a_check_the_cpu_checks_all_the_same():
    with raises(IndexError, "GatherGrad: indices[1] is 4, expected -4 to 3"):
        gather_grad([4, 3], [0, 4], ONES, check=False)
    with raises(IndexError, "GatherGrad: indices[1] is 4, expected -4 to 3"):
        gather_grad([4, 3], torch.tensor([0, 4]), torch.from_numpy(ONES), check=False)


@pytest.mark.parametrize("name", ["check", "deterministic"])
@pytest.mark.parametrize("value", [None, 0, 1, "yes", np.True_], ids=repr)
def test_how_to_run_is_yes_or_no(name, value):
    for into in (gather_grad, lambda *a, **k: gather_grad.into(np.empty((4, 3), F32), *a, **k)):
        with raises(TypeError, f"GatherGrad: {name} is {value!r}, expected True or False"):
            into([4, 3], [0, 1], ONES, **{name: value})
    with raises(TypeError, f"BroadcastGradientArgs: {name} is {value!r}, expected True or False"):
        broadcast_gradient_args([1], [2], **{name: value})
