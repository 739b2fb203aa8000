"""GridSampleGrad against its definition, PyTorch, and its own error sentences."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.checks import FLOATS, Expected, call, check, check_refused, layouts
from tests.expected import reads
from tests.functions.models import check_functions
from tests.node_cases import NodeCase, only
from torch.nn import functional

from onnxgrad.ops.grid_sample import PADDINGS, grid_sample_grad

pytestmark = pytest.mark.slow  # kernels that few models have, and that take long to compile

MODES = {"linear": "bilinear", "nearest": "nearest", "cubic": "bicubic"}
SHAPES = {1: ((2, 3, 7), (5,)), 2: ((2, 5, 4, 6), (3, 4)), 3: ((1, 2, 3, 4, 5), (2, 3, 2))}
KINDS = [("linear", 1), ("linear", 2), ("linear", 3), ("nearest", 2), ("nearest", 3), ("cubic", 1), ("cubic", 2)]


def arrays(shape, places, dtype=np.float32, normalized=1, align_corners=0, seed=0):
    """dY, X and a grid of places in the image, outside and far outside, none of them where a derivative jumps."""
    rng = np.random.default_rng(seed)
    sizes = np.array(shape[:1:-1])
    at = rng.integers(-6, 9, (shape[0], *places, len(sizes))) + rng.uniform(0.1, 0.4, (shape[0], *places, len(sizes)))
    if normalized:
        at = 2 * at / (sizes - 1) - 1 if align_corners else (2 * at + 1) / sizes - 1
    numbers = rng.standard_normal((*shape[:2], *places)), rng.standard_normal(shape), at
    return tuple(a.astype(dtype) for a in numbers)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("align_corners", [0, 1])
@pytest.mark.parametrize("padding_mode", PADDINGS)
@pytest.mark.parametrize(("mode", "axes"), KINDS)
def test_attributes_and_types(mode, axes, padding_mode, align_corners, dtype):
    shape, places = SHAPES[axes]
    given = arrays(shape, places, dtype, align_corners=align_corners)
    check(grid_sample_grad, *given, mode=mode, padding_mode=padding_mode, align_corners=align_corners)


@pytest.mark.parametrize("outputs", [["dX"], ["dgrid"]])
def test_one_of_the_gradients(outputs):
    check(grid_sample_grad, *arrays(*SHAPES[2]), outputs=outputs)


@pytest.mark.parametrize("padding_mode", PADDINGS)
@pytest.mark.parametrize("mode", MODES)
def test_places_counted_in_elements(mode, padding_mode):
    given = arrays(*SHAPES[2], normalized=0)
    check(grid_sample_grad, *given, mode=mode, padding_mode=padding_mode, normalized=0)


@pytest.mark.parametrize("shape", [(1, 1, 9, 9), (3, 40, 8, 9), (1, 23, 5, 6), (20, 3, 4, 4)], ids=str)
def test_many_places_and_channels(shape):
    check(grid_sample_grad, *arrays(shape, (17, 31)))


@pytest.mark.parametrize("layout", layouts(np.zeros((2, 2), np.float32)))
def test_layouts(layout):
    check(grid_sample_grad, *(layouts(a)[layout] for a in arrays(*SHAPES[2])))


@pytest.mark.parametrize(
    ("shape", "places"),
    [((0, 2, 4, 4), (3, 3)), ((2, 0, 4, 4), (3, 3)), ((2, 2, 0, 4), (3, 3)), ((2, 2, 4, 4), (0, 3))],
)
def test_nothing(shape, places):
    dY, X, grid = (
        np.ones((*shape[:2], *places), np.float32),
        np.ones(shape, np.float32),
        np.zeros((shape[0], *places, 2)),
    )
    dX, dgrid = call(grid_sample_grad, dY, X, grid.astype(np.float32))
    defined = grid_sample_grad.definition(dY, X, grid.astype(np.float32))
    assert [a.shape for a in defined if a is not None] == [dX.shape, dgrid.shape]
    assert dX.shape == shape and not dX.any() and dgrid.shape == grid.shape and not dgrid.any()


@pytest.mark.parametrize("padding_mode", PADDINGS)
@pytest.mark.parametrize("mode", MODES)
def test_places_that_are_no_numbers_do_no_harm_elsewhere(mode, padding_mode):
    dY, X, grid = arrays((2, 3, 4, 5), (3, 4))
    bad = grid.copy()
    bad[0, 0, :, 0] = [np.nan, np.inf, -np.inf, 1e30]
    bad[0, 1, 0] = np.nan
    dX, dgrid = call(grid_sample_grad, dY, X, bad, mode=mode, padding_mode=padding_mode)
    good = call(grid_sample_grad, dY, X, grid, mode=mode, padding_mode=padding_mode)
    np.testing.assert_array_equal(dX[1], good[0][1])
    np.testing.assert_array_equal(dgrid[1], good[1][1])
    np.testing.assert_array_equal(dgrid[0, 2], good[1][0, 2])
    if padding_mode == "zeros":  # such places read nothing
        assert not dgrid[0, 0].any() and not dgrid[0, 1, 0].any()
        dY[0, :, 0] = dY[0, :, 1, 0] = 0
        np.testing.assert_array_equal(dX, call(grid_sample_grad, dY, X, bad, mode=mode, padding_mode=padding_mode)[0])


@pytest.mark.parametrize("mode", MODES)
def test_what_has_no_weight_is_left_out(mode):
    dY, X, grid = arrays((1, 3, 4, 5), (2, 2))
    grid[0, 0, 0] = 5  # outside of the image
    dY[0, :, 0, 0], X[0, :, 0, 0] = np.inf, -np.inf
    grid[0, 0, 1] = grid[0, 1] = 0.3  # which does not read the first element
    dX, dgrid = check(grid_sample_grad, dY, X, grid, mode=mode)
    assert np.isfinite(dX).all()
    assert np.isfinite(dgrid).all()


@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("padding_mode", PADDINGS)
@pytest.mark.parametrize(("mode", "axes"), [k for k in KINDS if k[1] > 1])
def test_as_in_torch(mode, axes, padding_mode, align_corners):
    dY, X, grid = (torch.tensor(a) for a in arrays(*SHAPES[axes], np.float64, align_corners=align_corners))
    X.requires_grad, grid.requires_grad = True, True
    functional.grid_sample(X, grid, MODES[mode], padding_mode, align_corners).backward(dY)
    given = (t.detach().numpy() for t in (dY, X, grid))
    found = call(grid_sample_grad, *given, mode=mode, padding_mode=padding_mode, align_corners=int(align_corners))
    for got, t in zip(found, (X, grid), strict=True):
        np.testing.assert_allclose(got, t.grad.numpy(), rtol=1e-10, atol=1e-10)


def test_as_functions():
    """Of one, two and three axes in one model, and of each mode."""
    calls = [(arrays(*SHAPES[axes], np.float32), {"mode": mode}) for mode, axes in KINDS[:5]]
    check_functions(grid_sample_grad, *calls[:1])
    check_functions(grid_sample_grad, *calls)
    check_functions(grid_sample_grad, (arrays(*SHAPES[2], np.float64), {"mode": "cubic", "padding_mode": "reflection"}))
    check_functions(grid_sample_grad, (arrays(*SHAPES[2], np.float16, 0), {"padding_mode": "border", "normalized": 0}))


def test_refused():
    dY, X, grid = arrays(*SHAPES[2])
    refused = [
        ("mode is 'bilinear', expected one of 'nearest', 'linear', 'cubic'", dY, X, grid, {"mode": "bilinear"}),
        ("padding_mode is 'wrap', expected one of 'zeros', 'border', 'reflection'", dY, X, grid,
         {"padding_mode": "wrap"}),
        ("X has shape [2, 5], expected images, channels and 1 to 3 axes", dY, X[:, :, 0, 0], grid, {}),
        ("grid has shape [2, 3, 4, 1], expected 4 dimensions for X of shape [2, 5, 4, 6], the first of them 2 and the "
         "last 2", dY, X, grid[..., :1], {}),
        ("dY has shape [2, 4, 3, 4], expected [2, 5, 3, 4]", dY[:, 1:], X, grid, {}),
    ]  # fmt: skip
    for text, g, image, places, attributes in refused:
        check_refused(grid_sample_grad, ValueError, text, g, image, places, **attributes)


def expected(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Expected:
    dY, X, _ = args
    return reads(op, args, kwargs, 2, int(np.prod(dY.shape[2:])) * 4 ** (X.ndim - 2) + X.shape[1] + 8, max(X.shape))


def node_cases() -> Iterator[NodeCase]:
    """Small calls for every runtime to run."""
    for (mode, axes), dtype in itertools.product([("linear", 2), ("cubic", 2), ("nearest", 3)], FLOATS):

        def make(axes=axes, dtype=dtype):
            return arrays(*SHAPES[axes], dtype)

        parameters = {"type": str(dtype), "mode": f"{mode}_{axes}d"}
        yield NodeCase(grid_sample_grad, parameters, make, {"mode": mode})
    for outputs in (["dX"], ["dgrid"]):
        yield NodeCase(
            grid_sample_grad,
            {"outputs": only(outputs)},
            lambda: arrays(*SHAPES[2]),
            {"padding_mode": "border"},
            outputs,
        )
