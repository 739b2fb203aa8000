"""How windows lie over an image, axis by axis, by the attributes of convolutions and pools."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from onnxgrad.arguments import check_size
from onnxgrad.schema import Dim

AUTO_PADS = ("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID")
MOST_AXES = 3  # of a pool; onnxruntime's pools have no more, either
LARGEST = 2**31 - 1  # of a stride, dilation or pad, so that sums and products of two fit into 64 bits


class Axis(NamedTuple):
    """One spatial axis: window o begins at o · stride - before, and ends are within size + after."""

    size: int
    windows: int
    kernel: int
    stride: int
    dilation: int
    before: int
    after: int

    @property
    def reach(self) -> int:
        """Where the last window ends, counted from the first pad."""
        return (self.windows - 1) * self.stride + (self.kernel - 1) * self.dilation + 1 if self.windows else 0

    def seen_by(self, k: int) -> slice:
        """What the k-th element of the kernel sees of the padded axis."""
        start = k * self.dilation
        return slice(start, start + (self.windows - 1) * self.stride + 1 if self.windows else start, self.stride)

    def reads(self, k: int) -> tuple[int, int, int]:
        """(first, end, start): windows first … end - 1 see something of the image, at start + stride · window."""
        start = k * self.dilation - self.before
        first = min(self.windows, max(0, -(start // self.stride)))
        end = max(first, min(self.windows, -(-(self.size - start) // self.stride)))
        return first, end, start


ALONE = Axis(1, 1, 1, 1, 1, 0, 0)  # stands for an axis that is not there


def same_pads(auto_pad: str, size: int, extent: int, stride: int) -> tuple[int, int]:
    """The pads before and after an image for SAME_UPPER and SAME_LOWER: there is a window for each stride."""
    total = max((-(-size // stride) - 1) * stride + extent - size, 0)
    smaller = total // 2
    return (smaller, total - smaller) if auto_pad == "SAME_UPPER" else (total - smaller, smaller)


def _axis(
    auto_pad: str, size: int, kernel: int, stride: int, dilation: int, before: int, after: int, ceil_mode: bool = False
) -> Axis:
    extent = (kernel - 1) * dilation + 1
    if auto_pad.startswith("SAME"):
        return Axis(size, -(-size // stride), kernel, stride, dilation, *same_pads(auto_pad, size, extent, stride))
    room = size + before + after - extent
    windows = room // stride + 1
    if ceil_mode and room % stride and windows * stride < size + before:  # the last one starts in the image
        windows += 1
    return Axis(size, max(windows, 0), kernel, stride, dilation, before, after)


def conv_axes(sizes: Sequence[Dim], kernel: Sequence[Dim], attributes: dict[str, Any]) -> list[Any]:
    """An Axis for each, its `windows` None where a size is not known; raises where attributes make no sense."""
    rank = len(sizes)
    strides, dilations = (_positive(name, attributes[name], rank) for name in ("strides", "dilations"))
    auto_pad, pads = attributes["auto_pad"], attributes["pads"]
    if auto_pad not in AUTO_PADS:
        raise ValueError(f"auto_pad is {auto_pad!r}, expected one of {', '.join(AUTO_PADS)}")
    pads = list(pads) if pads and auto_pad == "NOTSET" else [0] * (2 * rank)
    if len(pads) != 2 * rank:
        raise ValueError(f"pads is {pads}, expected {2 * rank} numbers")
    if min(pads) < 0:
        raise ValueError(f"pads is {pads}, expected no negative number")
    _check_largest("pads", pads)
    found: list[Any] = []
    for a, (size, taps) in enumerate(zip(sizes, kernel, strict=True)):
        others = strides[a], dilations[a], pads[a], pads[rank + a]
        is_known = isinstance(size, int) and isinstance(taps, int)
        found.append(_axis(auto_pad, size, taps, *others) if is_known else Axis(size, None, taps, *others))  # type: ignore[arg-type]
    return found


def _positive(name: str, numbers: Sequence[int] | None, rank: int) -> list[int]:
    given = list(numbers) if numbers else [1] * rank
    if len(given) != rank or min(given) < 1:
        raise ValueError(f"{name} is {given}, expected {rank} positive numbers")
    _check_largest(name, given)
    return given


def _check_largest(name: str, numbers: Sequence[int]) -> None:
    if max(numbers) > LARGEST:
        raise ValueError(f"{name} is {list(numbers)}, expected numbers of at most {LARGEST}")


class PoolSettings(NamedTuple):
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


def pool_settings(
    auto_pad: str,
    ceil_mode: int,
    dilations: Sequence[int] | None,
    kernel_shape: Sequence[int] | None,
    pads: Sequence[int] | None,
    strides: Sequence[int] | None,
) -> PoolSettings:
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
        _check_largest(name, numbers)
    check_size("a window", filled["kernel_shape"][0])
    kernel, strides, dilations, pads = (numbers for numbers, _, _ in filled.values())
    if auto_pad.startswith("SAME") and max(dilations) > 1:
        raise ValueError(f"auto_pad is {auto_pad!r} and dilations are {dilations}, expected pads instead of auto_pad")
    return PoolSettings(
        kernel, strides, dilations, pads if auto_pad == "NOTSET" else [0] * (2 * rank), auto_pad, bool(ceil_mode)
    )


def pool_axes(image: Sequence[int], given: PoolSettings) -> list[Axis]:
    """How the windows lie on an image of that spatial shape."""
    rank = len(given.kernel)
    pads = zip(given.pads[:rank], given.pads[rank:], strict=True)
    axes = zip(image, given.kernel, given.strides, given.dilations, pads, strict=True)
    return [_axis(given.auto_pad, n, k, s, d, *both, given.ceil_mode) for n, k, s, d, both in axes]


def check_windows(dY: tuple[Dim, ...] | None, image: tuple[Dim, ...] | None, name: str, given: PoolSettings) -> None:
    """Refuses a dY that the pool cannot have given for an image."""
    rank = len(given.kernel)
    for what, dims in (("dY", dY), (name, image)):
        if dims is not None and len(dims) != rank + 2:
            raise ValueError(f"{what} has {len(dims)} dimensions, expected {rank + 2} for kernel_shape {given.kernel}")
    if dY is None or image is None:
        return
    expected: list[Dim] = list(image[:2])
    for k, size in enumerate(image[2:]):
        count = pool_axes([size] * rank, given)[k].windows if isinstance(size, int) else None
        # Before opset 22, ONNX counts a last window, too, that starts past the image.
        if given.ceil_mode and count is not None and dY[2 + k] == count + 1:
            count += 1
        expected.append(count)
    if any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in zip(dY, expected, strict=True)):
        what = f"{name} {list(image)}" if name == "shape" else f"{name} of shape {list(image)}"
        raise ValueError(f"dY has shape {list(dY)}, expected {expected} for {what}")
