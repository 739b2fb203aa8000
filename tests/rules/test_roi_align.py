"""RoiAlign: both modes, fixed and adaptive numbers of places, regions that leave the image or have no extent."""

import math

import numpy as np
import pytest
from onnx.reference.op_run import OpRun
from tests.gradients import check_rule, evaluate, model_of_node

import onnxgrad

pytestmark = pytest.mark.slow  # kernels that few models have, and that take long to compile

RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 3, 6, 7))
ROIS = np.array(
    [[0.1, 0.2, 4.3, 4.1], [1.2, 2.1, 9.3, 5.4], [-2.3, -1.6, 3.1, 3.3], [3.1, 3.2, 3.4, 3.5], [9.1, 9.2, 20.3, 22.4]]
)
IMAGES = np.array([0, 1, 1, 0, 1])
SIZES = {"output_height": 2, "output_width": 3, "spatial_scale": 0.875}


@pytest.mark.parametrize("coordinate_transformation_mode", ["half_pixel", "output_half_pixel"])
@pytest.mark.parametrize("sampling_ratio", [0, 2])
@pytest.mark.parametrize("mode", ["avg", "max"])
def test_rule(mode, sampling_ratio, coordinate_transformation_mode):
    given = {"mode": mode, "sampling_ratio": sampling_ratio}
    given["coordinate_transformation_mode"] = coordinate_transformation_mode
    twice = sampling_ratio == 2 and coordinate_transformation_mode == "half_pixel"
    check_rule("RoiAlign", X, ROIS, IMAGES, twice=twice, **SIZES, **given)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["avg", "max"])
def test_opset_10(mode):
    check_rule("RoiAlign", X, ROIS, IMAGES, opset=10, twice=False, mode=mode, **SIZES)


def test_region_turned_inside_out():
    """It has no places in its bins, and passes nothing on."""
    rois = np.array([[5.0, 4.0, 2.0, 1.0], [0.5, 0.5, 3.0, 3.0]])
    for mode in ("avg", "max"):
        model, feeds = model_of_node("RoiAlign", [X, rois, IMAGES[:2]], attributes={"mode": mode, **SIZES})
        seed = RNG.standard_normal((2, 3, 2, 3))
        _, dX, drois = evaluate(onnxgrad.gradient(model, ["in_0", "in_1"]), {**feeds, "out_0_grad": seed})
        assert not dX[0].any()
        assert dX[1].any()
        assert not drois[0].any()
        assert drois[1].all()


@pytest.mark.parametrize("mode", ["avg", "max"])
def test_no_regions(mode):
    inputs = [X, ROIS[:0], IMAGES[:0]]
    model, feeds = model_of_node("RoiAlign", inputs, attributes={"mode": mode, **SIZES}, static=False)
    _, dX, drois = evaluate(onnxgrad.gradient(model, ["in_0", "in_1"]), {**feeds, "out_0_grad": np.ones((0, 3, 2, 3))})
    np.testing.assert_array_equal(dX, np.zeros(X.shape))
    assert drois.shape == (0, 4)


def test_float16():
    seed, found = RNG.standard_normal((5, 3, 2, 3)), []
    rois = np.array(ROIS, np.float16)
    for dtype in (np.float16, np.float64):
        inputs = [X.astype(np.float16), rois, IMAGES]
        model, feeds = model_of_node("RoiAlign", inputs, attributes={"sampling_ratio": 2, **SIZES}, dtype=dtype)
        once = onnxgrad.gradient(model, ["in_0", "in_1"])
        found.append(evaluate(once, {**feeds, "out_0_grad": seed.astype(np.float16).astype(dtype)}))
    for half, wide in zip(*found, strict=True):
        assert half.dtype == np.float16
        np.testing.assert_allclose(half, wide, rtol=1e-2, atol=1e-2)


class MaxRoiPool(OpRun):
    """The largest element of each bin; onnx.reference has none."""

    op_domain = ""

    def _run(self, X, rois, pooled_shape=None, spatial_scale=1.0):
        Y = np.zeros((len(rois), X.shape[1], *pooled_shape), X.dtype)
        for r, roi in enumerate(rois):
            left, top, right, bottom = (math.floor(x * spatial_scale + 0.5) for x in roi[1:])
            for at in np.ndindex(*pooled_shape):
                edges = []
                for k, (start, end) in enumerate([(top, bottom), (left, right)]):
                    step, length = max(end - start + 1, 1) / pooled_shape[k], X.shape[2 + k]
                    edges += [math.floor(at[k] * step) + start, math.ceil((at[k] + 1) * step) + start]
                    edges[-2:] = np.clip(edges[-2:], 0, length)
                part = X[int(roi[0]), :, edges[0] : edges[1], edges[2] : edges[3]]
                Y[r, :, *at] = part.max((1, 2)) if part.size else 0
        return (Y,)


@pytest.mark.parametrize(("pooled_shape", "spatial_scale"), [((2, 3), 1.0), ((3, 2), 0.5)])
def test_max_roi_pool(pooled_shape, spatial_scale):
    """Regions of whole elements, of which some leave the image, or have no more than one."""
    rois = np.array([[0, 0, 0, 7, 7], [1, 1.4, 2.6, 6.2, 7], [1, 5, 5, 30, 20], [0, 3, 3, 3, 3], [0, -4, 1, 2, 3]])
    how = {"attributes": {"pooled_shape": pooled_shape, "spatial_scale": spatial_scale}}
    for static in (True, False):
        model, feeds = model_of_node("MaxRoiPool", [X, rois], dtype=np.float32, static=static, **how)
        session = onnxgrad.session(onnxgrad.gradient(model, "in_0"))
        seed = np.ones((5, 3, *pooled_shape), np.float32)
        Y, _ = session.run(None, {**feeds, "out_0_grad": seed})
        np.testing.assert_array_equal(Y, MaxRoiPool.eval(*feeds.values(), **how["attributes"]))
        assert onnxgrad.check_gradient(model, feeds, "in_0", new_ops=[MaxRoiPool]).worst < 2e-6
