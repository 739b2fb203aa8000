"""Arrays that look like images, as PNG files within the page."""

import base64
import struct
import zlib
from collections.abc import Mapping

import numpy as np

from onnxgrad.tensor_types import Array

LARGEST = 96  # pixels of a side: what is larger is averaged
SMALLEST = 8  # of both sides: other matrices are numbers
Bounds = tuple[float, float]  # of numbers that become black and white
GREY, RGB = 0, 2  # colour types of PNG


def pixels(array: Array, bounds: Bounds | None = None) -> Array | None:
    """The pixels [H, W] or [H, W, 3], 0 to 255, of an array C×H×W, H×W×C or H×W; None if it is no image.

    Bytes stay, numbers from 0 to 1 become 0 to 255, and others are stretched to that, or from `bounds`.
    """
    if array.dtype.kind not in "fiub" and array.dtype.name != "bfloat16":
        return None
    if array.ndim == 3 and array.shape[0] in (1, 3, 4) and array.shape[-1] not in (3, 4):
        array = np.moveaxis(array, 0, -1)
    if array.ndim == 3 and array.shape[-1] in (1, 3, 4):
        array = array[..., 0] if array.shape[-1] == 1 else array[..., :3]
    elif array.ndim != 2:
        return None
    if min(array.shape[:2]) < SMALLEST:
        return None
    kind, found = array.dtype, np.nan_to_num(_reduced(array.astype(np.float32)))
    return _as_bytes(found, bounds or ((0.0, 255.0) if kind == np.uint8 else _bounds(found)))


def _reduced(array: Array) -> Array:
    """Blocks of pixels averaged, so that both sides are short."""
    factor = -(-max(array.shape[:2]) // LARGEST)
    if factor == 1:
        return array
    height, width = (max(1, side // factor) for side in array.shape[:2])
    cut = array[: height * factor, : width * factor]
    if min(array.shape[:2]) < factor:
        return array[::factor, ::factor]
    found: Array = cut.reshape(height, factor, width, factor, *array.shape[2:]).mean((1, 3))
    return found


def _bounds(array: Array) -> Bounds:
    low, high = float(array.min()), float(array.max())
    return (0.0, 1.0) if low >= 0 and high <= 1 else (low, high)


def _as_bytes(array: Array, bounds: Bounds) -> Array:
    low, high = bounds
    scaled = (array.astype(np.float64) - low) * (255 / (high - low or 1.0))
    return np.round(scaled).clip(0, 255).astype(np.uint8)


def png(image: Array) -> bytes:
    """A PNG file of pixels."""
    height, width = image.shape[:2]
    rows = b"".join(b"\0" + row.tobytes() for row in np.ascontiguousarray(image))
    header = struct.pack(">IIBBBBB", width, height, 8, GREY if image.ndim == 2 else RGB, 0, 0, 0)
    chunks = _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(rows, 9)) + _chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def pictures(arrays: Mapping[str, Array]) -> dict[str, str]:
    """Those of some arrays that are images, all with the same scale."""
    whole = np.concatenate([np.asarray(a, np.float32).reshape(-1) for a in arrays.values()])
    bounds = _bounds(np.nan_to_num(whole))
    return {name: found for name, array in arrays.items() if (found := picture(array, bounds)) is not None}


def picture(array: Array, bounds: Bounds | None = None) -> str | None:
    """An image as the address of a picture in a page; None if the array is no image."""
    found = pixels(array, bounds)
    return None if found is None else f"data:image/png;base64,{base64.b64encode(png(found)).decode()}"
