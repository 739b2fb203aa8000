"""What the gradients of pools share: how windows lie over an image, axis by axis."""

from collections.abc import Sequence
from typing import NamedTuple

from onnxgrad.schema import Dim

AUTO_PADS = ("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID")
MOST_AXES = 3  # what onnxruntime's pools have, too


class Settings(NamedTuple):
    """The attributes of a pool, filled in; pads are all beginnings, then all ends."""

    kernel: list[int]
    strides: list[int]
    dilations: list[int]
    pads: list[int]
    auto_pad: str
    ceil_mode: bool

    @property
    def extents(self) -> list[int]:
        """The sizes of a window, from its first element to its last."""
        return [(k - 1) * d + 1 for k, d in zip(self.kernel, self.dilations, strict=True)]


class Axis(NamedTuple):
    """One spatial axis: window o begins at o · stride - before, and ends are within size + after."""

    size: int
    windows: int
    kernel: int
    stride: int
    dilation: int
    before: int
    after: int


ALONE = Axis(1, 1, 1, 1, 1, 0, 0)  # what stands for an axis that is not there


def settings(
    auto_pad: str,
    ceil_mode: int,
    dilations: Sequence[int] | None,
    kernel_shape: Sequence[int] | None,
    pads: Sequence[int] | None,
    strides: Sequence[int] | None,
) -> Settings:
    """The attributes checked; empty lists and None are what ONNX fills in."""
    if not kernel_shape:
        raise ValueError("kernel_shape is missing")
    rank = len(kernel_shape)
    if rank > MOST_AXES:
        raise ValueError(f"kernel_shape is {list(kernel_shape)}, expected at most {MOST_AXES} numbers")
    if auto_pad not in AUTO_PADS:
        raise ValueError(f"auto_pad is {auto_pad!r}, expected one of {', '.join(map(repr, AUTO_PADS))}")
    filled = {
        "kernel_shape": (list(kernel_shape), rank, 1),
        "strides": (list(strides or [1] * rank), rank, 1),
        "dilations": (list(dilations or [1] * rank), rank, 1),
        "pads": (list(pads or [0] * (2 * rank)), 2 * rank, 0),
    }
    for name, (numbers, length, least) in filled.items():
        if len(numbers) != length:
            raise ValueError(f"{name} is {numbers}, expected {length} numbers for kernel_shape {list(kernel_shape)}")
        if min(numbers) < least:
            raise ValueError(f"{name} is {numbers}, expected numbers of at least {least}")
    kernel, strides, dilations, pads = (numbers for numbers, _, _ in filled.values())
    if auto_pad.startswith("SAME") and max(dilations) > 1:
        raise ValueError(f"auto_pad is {auto_pad!r} and dilations are {dilations}, expected pads in their place")
    return Settings(
        kernel, strides, dilations, pads if auto_pad == "NOTSET" else [0] * (2 * rank), auto_pad, bool(ceil_mode)
    )


def axes_of(image: Sequence[int], given: Settings) -> list[Axis]:
    """How the windows lie on an image of that spatial shape."""
    rank, found = len(given.kernel), []
    for a, size in enumerate(image):
        extent, stride = given.extents[a], given.strides[a]
        before, after = given.pads[a], given.pads[rank + a]
        if given.auto_pad.startswith("SAME"):
            total = max((-(-size // stride) - 1) * stride + extent - size, 0)
            smaller = total // 2
            before, after = (smaller, total - smaller) if given.auto_pad == "SAME_UPPER" else (total - smaller, smaller)
        room = size + before + after - extent
        count = room // stride + 1
        if given.ceil_mode and room % stride and count * stride < size + before:  # the last one starts in the image
            count += 1
        found.append(Axis(size, max(count, 0), given.kernel[a], stride, given.dilations[a], before, after))
    return found


def check_windows(dY: tuple[Dim, ...] | None, image: tuple[Dim, ...] | None, name: str, given: Settings) -> None:
    """Refuses a dY that the pool cannot have given for an image."""
    rank = len(given.kernel)
    for what, dims in (("dY", dY), (name, image)):
        if dims is not None and len(dims) != rank + 2:
            raise ValueError(f"{what} has {len(dims)} dimensions, expected {rank + 2} for kernel_shape {given.kernel}")
    if dY is None or image is None:
        return
    expected: list[Dim] = list(image[:2])
    for k, size in enumerate(image[2:]):
        count = axes_of([size] * rank, given)[k].windows if isinstance(size, int) else None
        # Before opset 22, ONNX counts a last window, too, that starts past the image.
        if given.ceil_mode and count is not None and dY[2 + k] == count + 1:
            count += 1
        expected.append(count)
    if any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in zip(dY, expected, strict=True)):
        what = f"{name} {list(image)}" if name == "shape" else f"{name} of shape {list(image)}"
        raise ValueError(f"dY has shape {list(dY)}, expected {expected} for {what}")
