"""DFT, in both directions, of real and complex numbers."""

import numpy as np
import pytest
from tests.gradients import check_rule

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("inverse", [0, 1])
@pytest.mark.parametrize("axis", [0, 1, -2])
def test_both_directions(parts, inverse, axis):
    x = RNG.standard_normal((3, 5, 4, parts))
    check_rule("DFT", x, None, np.array(axis), fixed=[2], inverse=inverse)


@pytest.mark.parametrize("length", [3, 8])
@pytest.mark.parametrize("onesided", [0, 1])
def test_other_lengths_and_half_the_frequencies(length, onesided):
    x = RNG.standard_normal((2, 5, 1))
    check_rule("DFT", x, np.array(length), fixed=[1], onesided=onesided)


def test_the_axis_is_an_attribute_before_opset_20():
    check_rule("DFT", RNG.standard_normal((2, 6, 1)), opset=18, axis=1, onesided=1)


@pytest.mark.parametrize("length", [5, 6])
def test_numbers_from_half_their_frequencies(length):
    x = RNG.standard_normal((2, length // 2 + 1, 2))
    check_rule("DFT", x, np.array(length), fixed=[1], inverse=1, onesided=1)
