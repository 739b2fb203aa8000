"""RoiAlignGrad against its definition, stock onnxruntime's RoiAlign, and its own error sentences."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import helper
from tests.checks import FLOATS, INDICES, Expected, call, check, check_refused, layouts, raises
from tests.expected import reads
from tests.functions.models import check_functions, model_of
from tests.node_cases import NodeCase, only

from onnxgrad.ops.roi_align import TRANSFORMATIONS, roi_align_grad

pytestmark = pytest.mark.slow  # kernels that few models have, and that take long to compile

BINS = {"output_height": 2, "output_width": 3}
# Inside the image, beyond its end, from before its beginning on, without extent, elsewhere, and inside out.
REGIONS = np.array(
    [
        [0.3, 0.2, 4.3, 4.1], [1.2, 2.1, 9.3, 5.4], [-2.3, -1.6, 3.1, 3.3], [3.1, 3.2, 3.4, 3.5],
        [9.1, 9.2, 20.3, 22.4], [5.1, 4.2, 2.3, 1.1],
    ]
)  # fmt: skip


def arrays(shape=(2, 5, 6, 7), dtype=np.float32, regions=REGIONS, index=np.int64, bins=(2, 3)):
    rng = np.random.default_rng(0)
    images = np.arange(len(regions)) * 7 % 3 % max(1, shape[0])
    dY, X = rng.standard_normal((len(regions), shape[1], *bins)), rng.standard_normal(shape)
    return *(np.asarray(a).astype(dtype) for a in (dY, X, regions)), images.astype(index)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("spatial_scale", [1.0, 0.875])
@pytest.mark.parametrize("sampling_ratio", [0, 1, 3])
@pytest.mark.parametrize("transformation", TRANSFORMATIONS)
def test_attributes_and_types(transformation, sampling_ratio, spatial_scale, dtype):
    given = {"coordinate_transformation_mode": transformation, "sampling_ratio": sampling_ratio, **BINS}
    check(roi_align_grad, *arrays(dtype=dtype), spatial_scale=spatial_scale, **given)


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_types_of_indices(index):
    check(roi_align_grad, *arrays(index=index), **BINS)


@pytest.mark.parametrize("outputs", [["dX"], ["drois"]])
def test_one_of_the_gradients(outputs):
    check(roi_align_grad, *arrays(), outputs=outputs, **BINS)


@pytest.mark.parametrize("shape", [(1, 1, 9, 9), (3, 40, 8, 9), (1, 70, 5, 6), (2, 3, 1, 1), (20, 3, 4, 4)], ids=str)
def test_shapes(shape):
    check(roi_align_grad, *arrays(shape, bins=(3, 2)), output_height=3, output_width=2, sampling_ratio=2)


@pytest.mark.parametrize("layout", layouts(np.zeros((2, 2), np.float32)))
def test_layouts(layout):
    dY, X, rois, images = arrays()
    check(roi_align_grad, *(layouts(a)[layout] for a in (dY, X, rois)), images, **BINS)


@pytest.mark.parametrize("shape", [(0, 2, 4, 4), (2, 0, 4, 4), (2, 2, 0, 4), (2**40, 2, 0, 0)])
def test_nothing(shape):
    given = arrays(shape)
    dX, drois = call(roi_align_grad, *given, **BINS)
    assert dX.shape == shape and not dX.any() and not drois.any()


def test_no_regions():
    given = arrays(regions=REGIONS[:0])
    dX, drois = call(roi_align_grad, *given, **BINS)
    assert not dX.any() and drois.shape == (0, 4)


@pytest.mark.parametrize("sampling_ratio", [0, 2])
def test_bad_regions_do_no_harm_to_others(sampling_ratio):
    """What is not a number, or far away or very large, and regions of images that do not exist."""
    dY, X, rois, _ = arrays()
    given = {"sampling_ratio": sampling_ratio, **BINS}
    bad = rois.copy()
    bad[1], bad[2], bad[3] = np.nan, [-np.inf, 0, np.inf, 3], [-1e30, -1e30, 1e30, 1e30]
    elsewhere = np.array([0, 1, 1, 0, 5, -1])
    dX, drois = call(roi_align_grad, dY, X, bad, elsewhere, **given)
    alone = call(roi_align_grad, dY[:1], X, rois[:1], elsewhere[:1], **given)
    np.testing.assert_array_equal(drois[0], alone[1][0])
    assert not drois[4:].any()
    assert np.isfinite(dX).all()


@pytest.mark.parametrize("region", [[np.inf, 0, 3, 3], [0, -np.inf, 3, 3], [3e38, 0, 3e38, 3], [np.nan, 0, 2, 2]])
@pytest.mark.parametrize("transformation", TRANSFORMATIONS)
def test_the_definition_takes_bad_regions_too(transformation, region):
    dY, X, _, images = (a[:1] for a in arrays())
    with np.errstate(all="ignore"):
        found = roi_align_grad.definition(
            dY, X, np.array([region], X.dtype), images, coordinate_transformation_mode=transformation, **BINS
        )
    assert not any(a.any() for a in found if a is not None)


@pytest.mark.parametrize("transformation", TRANSFORMATIONS)
@pytest.mark.parametrize("sampling_ratio", [0, 2])
def test_as_onnxruntime_reads(transformation, sampling_ratio):
    """RoiAlign is linear in the image: dX is what it multiplies with."""
    dY, X, rois, images = arrays(regions=REGIONS[:5])
    given = {"coordinate_transformation_mode": transformation, "sampling_ratio": sampling_ratio, **BINS}
    node = helper.make_node("RoiAlign", ["X", "rois", "images"], ["Y"], **given)
    feeds = {"X": X, "rois": rois, "images": images}
    model = model_of([node], feeds, opset=18).SerializeToString()
    (Y,) = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, feeds)
    dX = call(roi_align_grad, dY, X, rois, images, outputs=["dX"], **given)[0]
    np.testing.assert_allclose((Y * dY).sum(dtype=np.float64), (dX * X).sum(dtype=np.float64), rtol=1e-4, atol=1e-5)


def test_more_places_than_memory():
    with raises(MemoryError, "RoiAlignGrad: there was not enough memory to run it"):
        roi_align_grad(*arrays(), **BINS, sampling_ratio=2**44)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_as_functions(dtype):
    calls = [(arrays(dtype=dtype), {"sampling_ratio": ratio, **BINS}) for ratio in (0, 2)]
    for some in (calls[:1], calls[1:], calls):
        check_functions(roi_align_grad, *some)


def test_refused():
    dY, X, rois, images = arrays()
    refused = [
        ("coordinate_transformation_mode is 'align', expected one of 'half_pixel', 'output_half_pixel'",
         dY, X, rois, images, {"coordinate_transformation_mode": "align", **BINS}),
        ("output_height is 0, expected at least 1", dY, X, rois, images, {"output_height": 0}),
        ("what a region reads would have shape [4611686018427387904, 3, 2, 3], too large for any memory",
         dY, X, rois, images, {**BINS, "sampling_ratio": 2**62}),
        ("X has shape [5, 6, 7], expected four dimensions", dY, X[0], rois, images, BINS),
        ("rois has shape [6, 3], expected four numbers for each region", dY, X, rois[:, :3], images, BINS),
        ("batch_indices has shape [5], expected [6]", dY, X, rois, images[:5], BINS),
        ("dY has shape [6, 5, 2, 3], expected [6, 5, 1, 1]", dY, X, rois, images, {}),
    ]  # fmt: skip
    for text, *given, attributes in refused:
        check_refused(roi_align_grad, ValueError, text, *given, **attributes)


def expected(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Expected:
    dY, _, rois, _ = args
    return reads(op, args, kwargs, 4, dY[:1].size * 16 + len(rois), len(rois))


def node_cases() -> Iterator[NodeCase]:
    """Small calls for every runtime to run."""
    for dtype, index in itertools.product(FLOATS, INDICES):

        def make(dtype=dtype, index=index):
            return arrays(dtype=dtype, index=index)

        yield NodeCase(roi_align_grad, {"type": str(dtype), "index": str(index)}, make, {"sampling_ratio": 2, **BINS})
    for outputs in (["dX"], ["drois"]):
        yield NodeCase(roi_align_grad, {"outputs": only(outputs)}, arrays, BINS, outputs)
