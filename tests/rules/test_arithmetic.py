"""Operators of numbers, element by element."""

import numpy as np
import pytest
from tests.gradients import check_rule

RNG = np.random.default_rng(0)
SMALL = RNG.uniform(-0.8, 0.8, (3, 4))
POSITIVE = RNG.uniform(0.5, 2.0, (3, 4))
ANY = RNG.standard_normal((3, 4)) + np.where(RNG.random((3, 4)) < 0.5, -0.2, 0.2)
ELEMENTWISE = {
    "Neg": ANY, "Abs": ANY, "Reciprocal": POSITIVE, "Sqrt": POSITIVE, "Exp": ANY, "Log": POSITIVE, "Erf": ANY,
    "Sin": ANY, "Cos": ANY, "Tan": SMALL, "Asin": SMALL, "Acos": SMALL, "Atan": ANY, "Sinh": ANY, "Cosh": ANY,
    "Tanh": ANY, "Asinh": ANY, "Acosh": POSITIVE + 1, "Atanh": SMALL,
}  # fmt: skip


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise(name):
    check_rule(name, ELEMENTWISE[name])


@pytest.mark.parametrize(
    "shapes", [((3, 4), (3, 4)), ((3, 4), (4,)), ((2, 1, 4), (3, 1)), ((), (2, 3)), ((1, 1), (2,))]
)
@pytest.mark.parametrize("name", ["Add", "Sub", "Mul", "Div", "Sum", "Mean", "Max", "Min", "Pow"])
def test_broadcasting(name, shapes):
    rng = np.random.default_rng(1)
    check_rule(name, *(rng.uniform(0.5, 2.0, s) for s in shapes))
