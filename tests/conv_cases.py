"""Convolutions of every kind, as ConvGrad gets them."""

from typing import Any

import numpy as np

from onnxgrad.ops.families.windows import conv_axes

# {name: (shape of X, shape of W, attributes)}; sizes reach past the blocks in which the kernel works
CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "one axis": ((2, 3, 7), (4, 3, 3), {}),
    "two axes": ((2, 3, 5, 4), (2, 3, 3, 2), {"pads": [1, 0, 1, 2]}),
    "three axes": ((1, 2, 4, 3, 4), (2, 2, 2, 1, 3), {"pads": [1, 0, 1, 0, 1, 0]}),
    "four axes": ((1, 2, 3, 4, 3, 4), (2, 2, 2, 2, 1, 3), {"strides": [1, 2, 1, 1], "pads": [0, 1, 0, 1] * 2}),
    "pointwise": ((2, 3, 3, 4), (4, 3, 1, 1), {}),
    "pointwise, large, more channels come out": ((3, 6, 17, 21), (11, 6, 1, 1), {}),
    "pointwise, large, fewer channels come out": ((3, 11, 17, 21), (6, 11, 1, 1), {}),
    "pointwise with stride": ((2, 3, 4, 5), (4, 3, 1, 1), {"strides": [2, 2]}),
    "pointwise with pads": ((2, 3, 14, 15), (4, 3, 1, 1), {"pads": [1, 0, 0, 2]}),
    "stride leaves rows out": ((2, 2, 6, 8), (3, 2, 3, 3), {"strides": [2, 3], "pads": [0, 1, 0, 1]}),
    "stride past the kernel": ((2, 2, 9), (3, 2, 2), {"strides": [4]}),
    "dilations": ((2, 2, 7, 6), (3, 2, 3, 2), {"dilations": [2, 3], "pads": [1, 1, 0, 2]}),
    "strides and dilations": ((1, 2, 9, 8), (2, 2, 3, 2), {"strides": [2, 3], "dilations": [2, 2]}),
    "windows that see nothing": ((2, 2, 1, 1), (3, 2, 3, 3), {"pads": [6, 6, 6, 6]}),
    "groups": ((2, 4, 4, 5), (6, 2, 2, 3), {"group": 2, "pads": [1, 1, 0, 1], "strides": [2, 1]}),
    "large groups": ((3, 12, 9, 20), (22, 6, 3, 3), {"group": 2, "pads": [1, 1, 0, 1], "strides": [2, 1]}),
    "depthwise": ((2, 3, 4, 5), (3, 1, 3, 3), {"group": 3, "pads": [1, 1, 1, 1]}),
    "depthwise, wide lines": (
        (2, 3, 6, 45), (3, 1, 3, 7), {"group": 3, "pads": [1, 3, 1, 3], "strides": [1, 2], "dilations": [1, 3]},
    ),
    "depthwise, twice the channels": ((2, 3, 8), (6, 1, 3), {"group": 3, "dilations": [2]}),
    "depthwise, pads past the kernel": ((2, 2, 3, 3), (2, 1, 2, 2), {"group": 2, "pads": [3, 4, 3, 4]}),
    "VALID": ((2, 2, 5, 4), (2, 2, 3, 2), {"auto_pad": "VALID", "strides": [2, 1]}),
    "SAME_UPPER": ((2, 2, 5, 4), (2, 2, 2, 3), {"auto_pad": "SAME_UPPER"}),
    "SAME_LOWER": ((2, 2, 5, 4), (2, 2, 2, 3), {"auto_pad": "SAME_LOWER"}),
    "SAME_UPPER with stride": ((2, 2, 6, 5), (2, 2, 3, 4), {"auto_pad": "SAME_UPPER", "strides": [2, 3]}),
    "SAME_LOWER with stride": ((2, 2, 6, 5), (2, 2, 3, 4), {"auto_pad": "SAME_LOWER", "strides": [2, 3]}),
    "kernel_shape given": ((1, 2, 20), (2, 1, 15), {"kernel_shape": [15], "strides": [2], "pads": [1, 2], "group": 2}),
    "many small images": ((70, 4, 5, 5), (6, 4, 3, 3), {"pads": [1, 1, 1, 1]}),
    "many channels of dY": ((2, 5, 9, 20), (310, 5, 3, 3), {"pads": [1, 1, 0, 1], "strides": [2, 1]}),
    "many channels of X": ((2, 70, 17, 20), (9, 70, 3, 3), {"pads": [1, 1, 0, 1]}),
}  # fmt: skip


def output_shape(X: tuple[int, ...], W: tuple[int, ...], attributes: dict[str, Any]) -> tuple[int, ...]:
    """The shape of Conv's output."""
    settings = {"auto_pad": "NOTSET", "dilations": None, "pads": None, "strides": None, **attributes}
    return X[0], W[0], *(axis.windows for axis in conv_axes(X[2:], W[2:], settings))


def arrays(
    X: tuple[int, ...], W: tuple[int, ...], attributes: dict[str, Any], dtype: Any = np.float32
) -> tuple[Any, Any, Any]:
    """dY, X and W."""
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal(s).astype(dtype) for s in (output_shape(X, W, attributes), X, W))  # type: ignore[return-value]


def is_right_in_onnx_reference(X, W, attributes):
    """Its ConvTranspose reads groups as if they had one channel each, and its Conv knows up to three axes."""
    group = attributes.get("group", 1)
    return len(X) <= 5 and (group == 1 or W[1] == W[0] // group == 1)
