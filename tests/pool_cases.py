"""Pools with every attribute, for tests of their gradients."""

from typing import Any

import numpy as np

from onnxgrad.ops.families.windows import pool_axes, pool_settings

DEFAULTS = {"auto_pad": "NOTSET", "ceil_mode": 0, "dilations": None, "pads": None, "strides": None}
POOLS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "one axis": ((2, 2, 6), {"kernel_shape": [2]}),
    "two axes": ((2, 2, 5, 4), {"kernel_shape": [2, 3]}),
    "three axes": ((1, 2, 4, 3, 4), {"kernel_shape": [2, 1, 3], "strides": [2, 1, 1]}),
    "three axes and pads": ((1, 2, 4, 5, 4),
                            {"kernel_shape": [2, 3, 3], "strides": [1, 2, 2], "pads": [1, 1, 0, 0, 1, 1]}),
    "strides": ((2, 2, 6, 8), {"kernel_shape": [2, 3], "strides": [2, 3]}),
    "stride past the kernel": ((2, 2, 8), {"kernel_shape": [2], "strides": [3]}),
    "pads": ((2, 2, 5, 4), {"kernel_shape": [3, 3], "pads": [1, 0, 1, 2], "strides": [2, 1]}),
    "ceil_mode": ((2, 2, 6, 6), {"kernel_shape": [3, 2], "strides": [2, 2], "ceil_mode": 1}),
    "ceil_mode and pads": ((1, 2, 6, 8), {"kernel_shape": [3, 3], "strides": [2, 3], "ceil_mode": 1, "pads": [1] * 4}),
    "dilations": ((2, 2, 7, 6), {"kernel_shape": [3, 2], "dilations": [2, 3], "pads": [1, 0, 2, 1]}),
    "VALID": ((2, 2, 5, 6), {"kernel_shape": [2, 3], "strides": [2, 2], "auto_pad": "VALID"}),
    "SAME_UPPER": ((2, 2, 5, 6), {"kernel_shape": [3, 3], "strides": [2, 1], "auto_pad": "SAME_UPPER"}),
    "SAME_LOWER": ((2, 2, 5, 6), {"kernel_shape": [2, 3], "strides": [1, 2], "auto_pad": "SAME_LOWER"}),
    "halves of a large image": ((2, 3, 28, 30), {"kernel_shape": [2, 2], "strides": [2, 2]}),
    "all of an image": ((2, 5, 4, 3), {"kernel_shape": [4, 3]}),
    "many planes": ((40, 16, 6, 6), {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1] * 4}),
}  # fmt: skip


def windows(shape: tuple[int, ...], **attributes: Any) -> tuple[int, ...]:
    """The shape of the pool's result."""
    attributes.pop("count_include_pad", None)
    axes = pool_axes(shape[2:], pool_settings(**{**DEFAULTS, **attributes}))
    return *shape[:2], *(axis.windows for axis in axes)


def numbers(shape: tuple[int, ...], dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)
