"""A loss that is not there yet is a number like any other, and is waited for once."""

import math

import numpy as np
import pytest

from onnxgrad.train.pending_loss import PendingLoss


def test_a_number_that_waits_when_it_is_used():
    asked = []
    loss = PendingLoss(lambda: asked.append(1) or (2.5, 0.5))
    assert not asked
    assert float(loss) == 2.5 and loss.gradient_norm == 0.5
    assert (loss + 1, 1 - loss, loss * loss, 5 / loss, loss**2, -loss) == (3.5, -1.5, 6.25, 2.0, 6.25, -2.5)
    assert loss < 3 and loss >= 2.5 and loss == 2.5 and loss != 2 and loss > 2
    assert f"{loss:.1f}" == "2.5" and str(loss) == "2.5" and round(loss) == 2 and int(loss) == 2 and abs(loss) == 2.5
    assert sum([loss, loss]) == 5 and math.isfinite(loss) and max(loss, 1) == 2.5 and bool(loss)
    assert np.allclose([loss, loss], 2.5) and np.mean([loss]) == 2.5 and hash(loss) == hash(2.5)
    assert asked == [1]


def test_what_went_wrong_is_raised_when_it_is_used():
    def wait():
        raise ArithmeticError("the loss is nan")

    loss = PendingLoss(wait)
    with pytest.raises(ArithmeticError, match="the loss is nan"):
        print(loss)
