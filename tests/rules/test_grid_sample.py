"""GridSample: all modes, paddings and alignments, in 1 to 3 dimensions, against differences and PyTorch."""

import numpy as np
import pytest
from tests.gradients import check_rule, evaluate, model_of_node

import onnxgrad

pytestmark = pytest.mark.slow  # kernels that few models have, and that take long to compile

RNG = np.random.default_rng(0)
MODES = {"linear": "bilinear", "nearest": "nearest", "cubic": "bicubic"}
PADDINGS = ["zeros", "border", "reflection"]


def inputs_of(rank):
    """Places in the image, near its border and far outside."""
    sizes, places = (4, 3, 2)[:rank], (2, 3, 2)[:rank]
    return RNG.standard_normal((2, 2, *sizes)), RNG.standard_normal((2, *places, rank)) * 1.3


@pytest.mark.parametrize("align_corners", [0, 1])
@pytest.mark.parametrize("padding_mode", PADDINGS)
@pytest.mark.parametrize(("mode", "rank"), [("linear", 2), ("nearest", 2), ("cubic", 2), ("linear", 3), ("nearest", 3)])
def test_rule(mode, rank, padding_mode, align_corners):
    wrt = [0] if mode == "nearest" else None
    twice = rank == 2 and (padding_mode == "zeros") == bool(align_corners)
    given = {"mode": mode, "padding_mode": padding_mode, "align_corners": align_corners}
    check_rule("GridSample", *inputs_of(rank), wrt=wrt, twice=twice, **given)


@pytest.mark.parametrize("align_corners", [0, 1])
@pytest.mark.parametrize("padding_mode", PADDINGS)
@pytest.mark.parametrize(("mode", "rank"), [("linear", 2), ("nearest", 2), ("cubic", 2), ("linear", 3), ("nearest", 3)])
def test_against_torch(mode, rank, padding_mode, align_corners):
    """Also at borders and corners, and exactly on elements, where a derivative is a choice."""
    torch = pytest.importorskip("torch")
    X, grid = inputs_of(rank)
    grid[0] = RNG.choice([-2.0, -1.0, -0.75, -0.5, -1 / 3, 0.0, 1 / 3, 0.5, 0.75, 1.0, 1.25, 3.0], grid[0].shape)
    if mode == "nearest":
        grid = RNG.uniform(-2.9, 2.9, grid.shape)
    given = {"mode": mode, "padding_mode": padding_mode, "align_corners": align_corners}
    model, feeds = model_of_node("GridSample", [X, grid], attributes=given)
    x, places = torch.tensor(X, requires_grad=True), torch.tensor(grid, requires_grad=True)
    y = torch.nn.functional.grid_sample(
        x, places, mode=MODES[mode], padding_mode=padding_mode, align_corners=bool(align_corners)
    )
    seed = RNG.standard_normal(y.shape)
    y.backward(torch.tensor(seed))
    wrt = ["in_0"] if mode == "nearest" else ["in_0", "in_1"]
    found = evaluate(onnxgrad.gradient(model, wrt), {**feeds, "out_0_grad": seed})[1:]
    for got, expected in zip(found, (x.grad, places.grad), strict=False):
        np.testing.assert_allclose(got, expected.numpy(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("align_corners", [0, 1])
@pytest.mark.parametrize("padding_mode", PADDINGS)
def test_nearest_of_two_as_near(padding_mode, align_corners):
    """The gradient goes to the element that onnxruntime reads, which rounds before it reflects: Y is linear in X."""
    height, width = 4, 5
    down, across = (np.arange(-6, 13) * 0.5 for _ in range(2))
    down, across = (
        2 * at / (size - 1) - 1 if align_corners else (2 * at + 1) / size - 1
        for at, size in ((down, height), (across, width))
    )
    X, grid = RNG.standard_normal((1, 1, height, width)), np.stack(np.meshgrid(across, down), -1)[None]
    given = {"mode": "nearest", "padding_mode": padding_mode, "align_corners": align_corners}
    model, feeds = model_of_node("GridSample", [X, grid], attributes=given)
    seed = RNG.standard_normal((1, 1, len(down), len(across)))
    Y, dX = evaluate(onnxgrad.gradient(model, "in_0"), {**feeds, "out_0_grad": seed})
    np.testing.assert_allclose((seed * Y).sum(), (dX * X).sum(), rtol=1e-9)


@pytest.mark.parametrize("mode", ["linear", "cubic"])
def test_opset_16(mode):
    """Modes had other names, and onnxruntime has float32 alone."""
    inputs, seed, found = inputs_of(2), RNG.standard_normal((2, 2, 2, 3)).astype(np.float32), []
    for opset, name in ((16, MODES[mode]), (20, mode)):
        model, feeds = model_of_node("GridSample", inputs, opset=opset, attributes={"mode": name}, dtype=np.float32)
        found.append(evaluate(onnxgrad.gradient(model, ["in_0", "in_1"]), {**feeds, "out_0_grad": seed}))
    for old, new in zip(*found, strict=True):
        np.testing.assert_allclose(old, new, rtol=1e-5, atol=1e-6)


def test_float16():
    X, grid = (a.astype(np.float16) for a in inputs_of(2))
    seed = RNG.standard_normal((2, 2, 2, 3)).astype(np.float16)
    found = []
    for dtype in (np.float16, np.float64):
        model, feeds = model_of_node("GridSample", [X, grid], dtype=dtype)
        found.append(evaluate(onnxgrad.gradient(model, ["in_0", "in_1"]), {**feeds, "out_0_grad": seed.astype(dtype)}))
    for half, wide in zip(*found, strict=True):
        assert half.dtype == np.float16
        np.testing.assert_allclose(half, wide, rtol=1e-2, atol=1e-2)


def test_image_of_one_element():
    """An aligned image of one element has no extent to reflect in."""
    for padding_mode in PADDINGS:
        given = {"padding_mode": padding_mode, "align_corners": 1}
        model, feeds = model_of_node(
            "GridSample", [RNG.standard_normal((1, 2, 1, 3)), inputs_of(2)[1][:1]], attributes=given
        )
        for array in evaluate(
            onnxgrad.gradient(model, ["in_0", "in_1"]), {**feeds, "out_0_grad": np.ones((1, 2, 2, 3))}
        ):
            assert np.isfinite(array).all()


def test_no_places():
    X, grid = inputs_of(2)
    model, feeds = model_of_node("GridSample", [X, grid[:, :0]], static=False)
    _, dX, dgrid = evaluate(onnxgrad.gradient(model, ["in_0", "in_1"]), {**feeds, "out_0_grad": np.ones((2, 2, 0, 3))})
    np.testing.assert_array_equal(dX, np.zeros(X.shape))
    assert dgrid.shape == (2, 0, 3, 2)
