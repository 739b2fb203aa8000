"""Resize, in each of its modes."""

import numpy as np
import pytest
import torch
from tests.gradients import check_rule, daily
from tests.linear_rules import check_adjoint, check_like_torch

RNG = np.random.default_rng(0)


def x(*shape):
    return RNG.standard_normal(shape)


def scales(*numbers):
    return [None, np.array(numbers, np.float32)]


def sizes(*numbers):
    return [None, None, np.array(numbers, np.int64)]


ROUNDED = 1e-5  # onnx.reference, which computes in float64, has the coefficients of cubic in float32
HOW = "coordinate_transformation_mode"
NEAREST = {
    "twice": (x(1, 2, 3, 4), scales(1, 1, 2, 2), {HOW: "asymmetric", "nearest_mode": "floor"}),
    "whole": (x(1, 2, 3, 4), scales(1, 1, 2, 3), {}),
    "whole-sizes": (x(1, 2, 3, 4), sizes(1, 2, 6, 4), {}),
    "not-repeated": (x(1, 2, 3, 4), scales(1, 1, 3, 2), {HOW: "asymmetric"}),
    "parts": (x(1, 2, 3, 4), scales(1, 1, 1.7, 0.6), {HOW: "asymmetric", "nearest_mode": "ceil"}),
    "sizes": (x(1, 2, 3, 4), sizes(1, 2, 5, 9), {HOW: "align_corners", "nearest_mode": "round_prefer_ceil"}),
    "axes": (x(3, 4, 2), scales(2, 2), {"axes": [1, 0]}),
    "in-proportion": (x(1, 1, 4, 5), sizes(7, 8), {"axes": [2, 3], "keep_aspect_ratio_policy": "not_larger"}),
}
LINEAR = {
    "twice": (x(1, 2, 3, 4), scales(1, 1, 2, 2), {}),
    "align_corners": (x(1, 2, 3, 4), sizes(1, 2, 5, 3), {HOW: "align_corners"}),
    "pytorch_half_pixel": (x(1, 2, 3, 4), sizes(1, 2, 1, 3), {HOW: "pytorch_half_pixel"}),
    "half_pixel_symmetric": (x(1, 2, 3, 4), scales(1, 1, 1.7, 2.3), {HOW: "half_pixel_symmetric"}),
    "antialias": (x(1, 2, 6, 5), scales(1, 1, 0.5, 0.6), {"antialias": 1}),
    "volume": (x(1, 1, 2, 3, 2), scales(1, 1, 2, 1.5, 2), {HOW: "asymmetric"}),
    "in-proportion": (x(1, 1, 4, 5), sizes(7, 8), {"axes": [2, 3], "keep_aspect_ratio_policy": "not_smaller"}),
}
CUBIC = {
    "parts": (x(1, 2, 3, 4), scales(1, 1, 1.5, 2), {}),
    "exclude_outside": (x(1, 2, 4, 4), scales(1, 1, 1.5, 0.8), {"exclude_outside": 1, "cubic_coeff_a": -0.5}),
    "antialias": (x(1, 2, 6, 6), sizes(1, 2, 3, 4), {"antialias": 1, "exclude_outside": 1}),
    "in-proportion": (x(1, 1, 4, 5), sizes(7, 8), {"axes": [2, 3], "keep_aspect_ratio_policy": "not_smaller"}),
}
CASES = {
    f"{mode}-{name}": (data, how, {**attributes, "mode": mode})
    for mode, cases in {"nearest": NEAREST, "linear": LINEAR, "cubic": CUBIC}.items()
    for name, (data, how, attributes) in cases.items()
}


TWICE = ("nearest-twice", "nearest-parts", "linear-antialias", "cubic-parts")


@pytest.mark.parametrize("case", daily(CASES, *TWICE, "nearest-sizes", "linear-align_corners", "cubic-in-proportion"))
def test_modes(case):
    data, how, attributes = CASES[case]
    fixed = [len(how)]
    exact = ROUNDED if attributes["mode"] == "cubic" else 1e-12
    check_adjoint("Resize", data, *how, attributes=attributes, fixed=fixed, exact=exact)
    check_rule("Resize", data, *how, fixed=fixed, twice=case in TWICE, **attributes)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_scales_as_input(mode):
    check_rule("Resize", x(1, 2, 3, 4), *scales(1, 1, 1.5, 2), wrt=[0], mode=mode, twice=False)


@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_crop(mode):
    """What lies outside is a constant, so no gradient comes from there."""
    region = np.array([0.4, 0.6, 1.2, 1.7], np.float32)
    cropped = {HOW: "tf_crop_and_resize", "extrapolation_value": 10.0, "axes": [2, 3], "mode": mode}
    check_rule("Resize", x(1, 1, 4, 5), region, None, np.array([3, 3]), wrt=[0], fixed=[1, 3], twice=False, **cropped)


TORCH = {
    "nearest": ("nearest", {HOW: "asymmetric", "nearest_mode": "floor", "mode": "nearest"}, {}),
    "bilinear": ("linear", {HOW: "pytorch_half_pixel"}, {"align_corners": False}),
    "bilinear-corners": ("linear", {HOW: "align_corners"}, {"align_corners": True}),
    "bicubic": ("cubic", {HOW: "half_pixel"}, {"align_corners": False}),
}


@pytest.mark.parametrize("size", [(6, 8), (5, 3), (2, 9)])
@pytest.mark.parametrize("case", TORCH)
def test_like_torch(case, size):
    mode, attributes, options = TORCH[case]

    def interpolate(a):
        return torch.nn.functional.interpolate(a, size=size, mode=case.removesuffix("-corners"), **options)

    how = {"attributes": {**attributes, "mode": mode}, "fixed": [3], "exact": ROUNDED if mode == "cubic" else 1e-7}
    check_like_torch(interpolate, "Resize", x(1, 2, 3, 4), *sizes(1, 2, *size), **how)


def test_empty_scales_and_regions():
    """Before opset 13 they could not be left out, and exporters of later ones write them, too."""
    nothing = np.zeros(0, np.float32)
    check_rule(
        "Resize", x(1, 2, 2, 3), nothing, nothing, np.array([1, 2, 4, 5]), wrt=[0], fixed=[1, 2, 3], mode="linear"
    )
