"""Col2Im with strides, pads and dilations."""

import numpy as np
import pytest
from tests.gradients import check_rule

RNG = np.random.default_rng(0)
BLOCKS = {"": 12, "strides": 4, "pads": 30, "dilations": 8}  # of 2×2 in an image of 4×5


@pytest.mark.parametrize("option", BLOCKS)
def test_blocks_of_every_channel_are_taken_out_again(option):
    settings = {"strides": [2, 2], "pads": [1, 1, 1, 1], "dilations": [2, 1]}
    attributes = {option: settings[option]} if option else {}
    x = RNG.standard_normal((2, 3 * 4, BLOCKS[option]))
    check_rule("Col2Im", x, np.array([4, 5]), np.array([2, 2]), fixed=[1, 2], **attributes)
