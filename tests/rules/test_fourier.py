"""DFT, in both directions, and STFT, of real and complex numbers."""

import numpy as np
import pytest
import torch
from tests.gradients import check_rule, evaluate, model_of_node

import onnxgrad

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("inverse", [0, 1])
@pytest.mark.parametrize("axis", [0, 1, -2])
def test_both_directions(parts, inverse, axis):
    x = RNG.standard_normal((3, 5, 4, parts))
    check_rule("DFT", x, None, np.array(axis), fixed=[2], inverse=inverse)


@pytest.mark.slow
@pytest.mark.parametrize("length", [3, 8])
@pytest.mark.parametrize("onesided", [0, 1])
def test_other_lengths_and_half_the_frequencies(length, onesided):
    x = RNG.standard_normal((2, 5, 1))
    check_rule("DFT", x, np.array(length), fixed=[1], onesided=onesided)


def test_the_axis_is_an_attribute_before_opset_20():
    check_rule("DFT", RNG.standard_normal((2, 6, 1)), opset=18, axis=1, onesided=1)


@pytest.mark.slow
@pytest.mark.parametrize("length", [5, 6])
def test_numbers_from_half_their_frequencies(length):
    x = RNG.standard_normal((2, length // 2 + 1, 2))
    check_rule("DFT", x, np.array(length), fixed=[1], inverse=1, onesided=1)


@pytest.mark.parametrize(("parts", "onesided"), [(1, 0), (1, 1), (2, 0)])
@pytest.mark.parametrize(("length", "step"), [(4, 2), (5, 3), (3, 4)])
@pytest.mark.parametrize("opset", [17, 21])
def test_stft(length, step, parts, onesided, opset):
    x, window = RNG.standard_normal((2, 11, parts)), RNG.uniform(0.5, 1, length)
    check_rule("STFT", x, np.array(step), window, onesided=onesided, opset=opset)


@pytest.mark.slow
@pytest.mark.parametrize("given", ["window", "frame_length", "both"])
def test_frames_of_stft(given):
    window = None if given == "frame_length" else RNG.uniform(0.5, 1, 4)
    length = None if given == "window" else np.array(4)
    check_rule("STFT", RNG.standard_normal((2, 9, 1)), np.array(2), window, length)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_stft_as_in_torch(dtype):
    x, window = RNG.standard_normal((3, 20)).astype(dtype), RNG.uniform(0.5, 1, 8).astype(dtype)
    signal, weights = (torch.from_numpy(a.astype(np.float32)).requires_grad_() for a in (x, window))
    expected = torch.stft(signal, 8, 3, window=weights, center=False, return_complex=True).transpose(1, 2)
    expected = torch.view_as_real(expected)
    g = RNG.standard_normal(expected.shape).astype(dtype)
    expected.backward(torch.from_numpy(g.astype(np.float32)))
    model, feeds = model_of_node("STFT", [x[..., None], np.array(3), window], dtype=dtype, static=False)
    found = evaluate(onnxgrad.gradient(model, ["in_0", "in_2"]), {**feeds, "out_0_grad": g})
    near = {"rtol": 1e-4, "atol": 1e-4} if dtype == np.float32 else {"rtol": 3e-2, "atol": 3e-2}
    for got, wanted in zip(found, (expected.detach(), signal.grad[..., None], weights.grad), strict=True):
        assert got.dtype == dtype
        np.testing.assert_allclose(got, wanted, **near)
