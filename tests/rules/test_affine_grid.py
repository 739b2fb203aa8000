"""AffineGrid, in 2 and 3 dimensions, against differences and PyTorch."""

import numpy as np
import pytest
import torch
from tests.gradients import check_rule, evaluate, model_of_node

import onnxgrad

RNG = np.random.default_rng(0)
SIZES = [np.array([2, 3, 4, 5]), np.array([2, 3, 2, 4, 3]), np.array([1, 1, 2, 2])]


@pytest.mark.parametrize("align_corners", [0, 1])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_affine_grid(size, align_corners):
    rank = len(size) - 2
    check_rule("AffineGrid", RNG.standard_normal((size[0], rank, rank + 1)), size, align_corners=align_corners)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("align_corners", [0, 1])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_as_in_torch(size, align_corners, dtype):
    rank = len(size) - 2
    theta = RNG.standard_normal((size[0], rank, rank + 1)).astype(dtype)
    how = {"attributes": {"align_corners": align_corners}, "static": False, "dtype": dtype}
    model, feeds = model_of_node("AffineGrid", [theta, size], **how)
    x = torch.from_numpy(theta.astype(np.float32)).requires_grad_()
    expected = torch.nn.functional.affine_grid(x, size.tolist(), align_corners=bool(align_corners))
    g = RNG.standard_normal(expected.shape).astype(dtype)
    expected.backward(torch.from_numpy(g.astype(np.float32)))
    got, dtheta = evaluate(onnxgrad.gradient(model, "in_0"), {**feeds, "out_0_grad": g})
    assert dtheta.dtype == dtype
    near = {"rtol": 1e-5, "atol": 1e-5} if dtype == np.float32 else {"rtol": 2e-2, "atol": 2e-2}
    np.testing.assert_allclose(got, expected.detach(), **near)
    np.testing.assert_allclose(dtheta, x.grad, **near)
