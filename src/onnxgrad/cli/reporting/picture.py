"""Arrays that look like images, as PNG files within the page."""

import base64
import struct
import zlib

import numpy as np

from onnxgrad.tensor_types import Array

LARGEST = 96  # pixels of a side: what is larger is averaged
SMALLEST = 8  # of both sides: other matrices are numbers
GREY, RGB = 0, 2  # colour types of PNG


def pixels(array: Array) -> Array | None:
    """The pixels [H, W] or [H, W, 3], 0 to 255, of an array C×H×W, H×W×C or H×W; None if it is no image."""
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
    return _as_bytes(_reduced(array.astype(np.float32)), array.dtype == np.uint8)


def _reduced(array: Array) -> Array:
    """Blocks of pixels averaged, so that both sides are short."""
    factor = -(-max(array.shape[:2]) // LARGEST)
    if factor == 1:
        return array
    height, width = (max(1, side // factor) for side in array.shape[:2])
    cut = array[: height * factor, : width * factor]
    if min(array.shape[:2]) < factor:
        return array[::factor, ::factor]
    blocks = cut.reshape(height, factor, width, factor, *array.shape[2:])
    return blocks.mean((1, 3))


def _as_bytes(array: Array, are_bytes: bool) -> Array:
    """Bytes stay, numbers from 0 to 1 become 0 to 255, and others are stretched to that."""
    array = np.nan_to_num(array)
    low, high = (0.0, 255.0) if are_bytes else (0.0, 1.0)
    if array.min() < low or array.max() > high:
        low, high = float(array.min()), float(array.max())
    return np.round((array - low) * (255 / (high - low or 1.0))).astype(np.uint8)


def png(image: Array) -> bytes:
    """A PNG file of pixels."""
    height, width = image.shape[:2]
    rows = b"".join(b"\0" + row.tobytes() for row in np.ascontiguousarray(image))
    header = struct.pack(">IIBBBBB", width, height, 8, GREY if image.ndim == 2 else RGB, 0, 0, 0)
    chunks = _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(rows, 9)) + _chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def picture(array: Array) -> str | None:
    """An image as the address of a picture in a page; None if the array is no image."""
    found = pixels(array)
    return None if found is None else f"data:image/png;base64,{base64.b64encode(png(found)).decode()}"
