"""How a kernel walks over an image: pads, strides and dilations of each axis, by the attributes of Conv."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from onnxgrad.schema import Dim

AUTO_PADS = ("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID")


@dataclass(frozen=True)
class Axis:
    """One spatial axis, its sizes known; `first` is the pad before the image, `count` the number of windows."""

    size: int
    kernel: int
    stride: int
    dilation: int
    first: int
    count: int

    @property
    def reach(self) -> int:
        """Where the last window ends, counted from the first pad."""
        return (self.count - 1) * self.stride + (self.kernel - 1) * self.dilation + 1 if self.count else 0

    def seen_by(self, k: int) -> slice:
        """What the k-th element of the kernel sees of the padded axis."""
        start = k * self.dilation
        return slice(start, start + (self.count - 1) * self.stride + 1 if self.count else start, self.stride)

    def reads(self, k: int) -> tuple[int, int, int]:
        """(first, end, start): windows first … end - 1 see something of the image, at start + stride · window."""
        start = k * self.dilation - self.first
        first = min(self.count, max(0, -(start // self.stride)))
        end = max(first, min(self.count, -(-(self.size - start) // self.stride)))
        return first, end, start


def walk(sizes: Sequence[Dim], kernel: Sequence[Dim], attributes: dict[str, Any]) -> list[Any]:
    """An Axis for each, its `count` None where a size is not known; raises where attributes make no sense."""
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
    axes = zip(sizes, kernel, strides, dilations, pads[:rank], pads[rank:], strict=True)
    return [_axis(auto_pad, *axis) for axis in axes]


def _positive(name: str, numbers: Sequence[int] | None, rank: int) -> list[int]:
    given = list(numbers) if numbers else [1] * rank
    if len(given) != rank or min(given) < 1:
        raise ValueError(f"{name} is {given}, expected {rank} positive numbers")
    return given


def _axis(auto_pad: str, size: Dim, kernel: Dim, stride: int, dilation: int, first: int, last: int) -> Any:
    if not isinstance(size, int) or not isinstance(kernel, int):
        return Axis(size, kernel, stride, dilation, first, None)  # type: ignore[arg-type]
    window = (kernel - 1) * dilation + 1
    if auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        count = -(-size // stride)
        total = max(0, (count - 1) * stride + window - size)
        first = total // 2 if auto_pad == "SAME_UPPER" else total - total // 2
        return Axis(size, kernel, stride, dilation, first, count)
    return Axis(size, kernel, stride, dilation, first, max(0, (size + first + last - window) // stride + 1))
