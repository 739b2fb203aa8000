"""What every operator's call has in common: how arguments are bound, and which arrays can take its results."""

import numpy as np
import pytest
from tests.checks import FLOATS, raises

from onnxgrad import gather_grad, gru_training

F32 = np.dtype(np.float32)
ONES = np.ones((2, 3), F32)


@pytest.mark.parametrize(
    ("out", "error", "text"),
    [
        (np.ones((4, 2), F32), ValueError, "out for dX is float32[4, 2], expected float32[4, 3]"),
        (np.ones((4, 3)), ValueError, "out for dX is float64[4, 3], expected float32[4, 3]"),
        (np.ones((3, 4), F32).T, ValueError, "out for dX is not a writeable C-contiguous array"),
        (np.broadcast_to(F32.type(1), (4, 3)), ValueError, "out for dX is not a writeable C-contiguous array"),
        ((np.ones((4, 3), F32),) * 2, ValueError, "out has 2 arrays, expected 1: dX"),
        ((None,), ValueError, "out has no array for dX"),
    ],
)
def test_bad_out(out, error, text):
    with raises(error, f"GatherGrad: {text}"):
        gather_grad.into(out, [4, 3], [0, 1], ONES)


def test_out_may_not_be_an_input():
    buffer = np.ones((6, 3), F32)
    with raises(ValueError, "GatherGrad: out for dX shares memory with an input"):
        gather_grad.into(buffer[:4], [4, 3], [0, 1], buffer[3:5])
    assert (buffer == 1).all()


@pytest.mark.parametrize("out", [[[1.0, 2.0]], 5, "x"])
def test_out_that_is_no_array(out):
    with pytest.raises((TypeError, ValueError), match=r"^GatherGrad: out"):
        gather_grad.into(out, [4, 3], [0, 1], ONES)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_an_unaligned_out_is_written_or_refused(dtype):
    shape, indices, dY = [4, 40], [0, 1, 3, 3, -1, 1, -4], np.arange(280).reshape(7, 40).astype(dtype)
    buffer = bytearray(4 * 40 * dtype.itemsize + 1)
    out = np.ndarray((4, 40), dtype, buffer, offset=1)
    try:
        gather_grad.into(out, shape, indices, dY)
    except ValueError as error:
        assert str(error).startswith("GatherGrad: out for dX")
        return
    assert out.tobytes() == gather_grad(shape, indices, dY).tobytes()


def test_two_results_may_not_share_memory():
    """S = 1: HAll and HFinal have as many elements, so one buffer could be passed for both."""
    X, W, R = np.ones((1, 2, 3), F32), np.ones((1, 12, 3), F32), np.ones((1, 12, 4), F32)
    buffer = np.empty((1, 2, 4), F32)
    with raises(ValueError, "GRUTraining: out for HFinal shares memory with HAll"):
        gru_training.into([buffer[None], buffer, np.empty((1, 1, 2, 12), F32)], X, W, R)


def test_subclasses_of_arrays_are_read_as_plain_ones():
    masked = np.ma.masked_array(ONES, mask=[[1, 0, 0], [0, 0, 1]])
    dX = gather_grad([4, 3], np.ma.masked_array([0, 1]), masked)
    assert type(dX) is np.ndarray and dX.sum() == 6


def test_the_operator_shows_what_it_is():
    assert repr(gather_grad) == "<operator com.microsoft::GatherGrad>"
    assert gather_grad.__name__ == "gather_grad" and "Gradient of Gather" in gather_grad.__doc__


def test_attributes_are_given_by_name():
    X, W, R = np.ones((1, 2, 3), F32), np.ones((1, 12, 3), F32), np.ones((1, 12, 4), F32)
    with raises(TypeError, "GRUTraining: takes at most 6 arguments (X, W, R, B, SL, Ht0), got 7"):
        gru_training.definition(X, W, R, None, None, None, 4)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_scalars_of_every_type_are_arrays_without_dimensions(dtype):
    dX = gather_grad([3], 1, dtype.type(1.5))
    assert dX.dtype == dtype and dX.astype(float).tolist() == [0, 1.5, 0]
