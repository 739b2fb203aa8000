"""Conv and ConvTranspose: each is the other's gradient; that of the kernel is a product of unfolded images."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import onnx_ir as ir

from onnxgrad.graph.builder import builder_at_work
from onnxgrad.graph.node import NodeView
from onnxgrad.graph.tensor import Tensor
from onnxgrad.rules import op, vjp

END = 2**31 - 1
MOST_SLICES = 10  # of a kernel gradient; past that, as for 7 × 7, a convolution with a large kernel is faster


@dataclass(frozen=True)
class Windows:
    """How a kernel walks over an image."""

    kernel: Tensor  # the kernel's spatial shape; constant where it is known, as all of these
    strides: list[int]
    dilations: list[int]
    pads: Tensor  # as ONNX has them: all beginnings, then all ends
    group: int = 1

    @property
    def rank(self) -> int:
        """The number of spatial dimensions."""
        return len(self.strides)

    @property
    def known_pads(self) -> list[int] | None:
        """The pads, if they are known."""
        return known(self.pads)

    def attributes(self) -> dict[str, Any]:
        """What Conv and ConvTranspose are told, besides pads."""
        shape = known(self.kernel)
        return {"strides": self.strides, "dilations": self.dilations, "group": self.group, "kernel_shape": shape}


def integers(numbers: Sequence[int]) -> Tensor:
    """A constant vector."""
    return builder_at_work().constant(list(numbers), ir.DataType.INT64)


def known(numbers: Tensor) -> list[int] | None:
    """A vector's numbers, if they are known."""
    constant = numbers.constant
    return None if constant is None else [int(x) for x in constant]


def spatial(x: Tensor) -> Tensor:
    """The spatial part of the shape."""
    return op.Shape(x, start=2)


def extent(kernel: Tensor, dilations: list[int]) -> Tensor:
    """The size of a window, from its first element to its last."""
    return (kernel - 1) * integers(dilations) + 1


def same_pads(image: Tensor, window: Tensor, strides: list[int], auto_pad: str) -> Tensor:
    """The pads with which there is a window for each stride."""
    if max(strides) == 1:
        return halves(window - 1, auto_pad)  # whatever the image's size
    size = spatial(image)
    count = (size + integers([s - 1 for s in strides])) / integers(strides)
    return halves(op.Max((count - 1) * integers(strides) + window - size, 0), auto_pad)


def halves(total: Tensor, auto_pad: str) -> Tensor:
    """Pads of a given sum; SAME_UPPER puts the odd one at the end, everything else at the beginning."""
    smaller = total / 2
    first, last = (smaller, total - smaller) if auto_pad == "SAME_UPPER" else (total - smaller, smaller)
    return op.Concat(first, last, axis=0)


def windows_of(n: NodeView, image: Tensor, kernel: Tensor, *, group: int = 1) -> Windows:
    """Those of Conv or of a pool, by its attributes."""
    rank = image.rank - 2
    strides = n.strides or [1] * rank
    dilations = getattr(n, "dilations", None) or [1] * rank  # which AveragePool has from opset 19 on
    if n.auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        pads = same_pads(image, extent(kernel, dilations), strides, n.auto_pad)
    else:
        pads = integers(n.pads if n.pads and n.auto_pad == "NOTSET" else [0] * (2 * rank))
    return Windows(kernel, strides, dilations, pads, group)


def padded(image: Tensor, windows: Windows) -> Tensor:
    """The image with its pads, which may be negative."""
    numbers, rank = windows.known_pads, windows.rank
    if numbers is None:
        none = integers([0, 0])
        first, last = op.Split(windows.pads, outputs=2, num_outputs=2, axis=0)
        return op.Pad(image, op.Concat(none, first, none, last, axis=0))
    if not any(numbers):
        return image
    return op.Pad(image, [0, 0, *numbers[:rank], 0, 0, *numbers[rank:]])


def collect(image: Tensor, kernel: Tensor, windows: Windows) -> Tensor:
    """The convolution."""
    pads = windows.known_pads
    if pads is None or min(pads) < 0:
        image, pads = padded(image, windows), None
    return op.Conv(image, kernel, pads=pads, **windows.attributes())


def spread(g: Tensor, kernel: Tensor, windows: Windows, image: Tensor) -> Tensor:
    """The convolution's transpose: adds what each window gets into zeros of the image's spatial shape."""
    how, rank = windows.attributes(), windows.rank
    pads, size = windows.known_pads, known(spatial(image))
    if pads is not None and max(windows.strides) == 1:
        return op.ConvTranspose(g, kernel, pads=pads, **how)
    count, window = known(spatial(g)), known(extent(windows.kernel, windows.dilations))
    if pads is not None and size is not None and count is not None and window is not None:
        # The stride may leave some of the image's last elements out, and a pool's last window may reach past the pads.
        over = [
            (o - 1) * s + w - p - i
            for o, s, w, p, i in zip(count, windows.strides, window, pads[:rank], size, strict=True)
        ]
        ends, missing = [max(x, 0) for x in over], [max(-x, 0) for x in over]
        return op.ConvTranspose(g, kernel, pads=[*pads[:rank], *ends], output_padding=missing, **how)
    missing = [s - 1 for s in windows.strides]
    axes = [*range(2, 2 + rank)]
    if pads is not None:
        whole = op.ConvTranspose(g, kernel, pads=[*pads[:rank], *[0] * rank], output_padding=missing, **how)
        return op.Slice(whole, [0] * rank, spatial(image), axes)
    whole = op.ConvTranspose(g, kernel, output_padding=missing, **how)
    first = op.Slice(windows.pads, [0], [rank], [0])
    return op.Slice(whole, first, first + spatial(image), axes)


def kernel_gradient(image: Tensor, g: Tensor, kernel: Tensor, windows: Windows) -> Tensor:
    """The sum over images and windows of the product of each element of `g` with its window."""
    shape = known(windows.kernel)
    image = padded(image, windows)
    if shape is None or sum(shape) - len(shape) > MOST_SLICES:
        return _by_convolution(image, g, kernel, windows)
    return _by_slices(image, g, kernel, windows, shape)


def _by_convolution(image: Tensor, g: Tensor, kernel: Tensor, windows: Windows) -> Tensor:
    """Channels are images and images channels: `g` is the kernel, strides are dilations and the other way round."""
    rank, group = windows.rank, windows.group
    axes = [*range(2, 2 + rank)]
    rows = _in_groups(image, windows, [2, 1, 0])  # [C / group, group, N, …]
    rows = op.Reshape(rows, op.Concat(op.Shape(rows, end=1), [-1], spatial(image), axis=0))
    found = op.Conv(
        rows,
        op.Transpose(g, perm=[1, 0, *axes]),
        strides=windows.dilations,
        dilations=windows.strides,
        group=group,
    )
    # What the stride left out of the image may be enough for another element.
    found = op.Slice(found, [0] * rank, windows.kernel, axes)
    return op.Transpose(found, perm=[1, 0, *axes])


def _by_slices(image: Tensor, g: Tensor, kernel: Tensor, windows: Windows, shape: list[int]) -> Tensor:
    """One matrix product for each element of the kernel's first axis; the other axes become channels by slicing."""
    rank = windows.rank
    together = _is_large(image, g, kernel)
    # With all images in one product, what is added up never exists for each image: [group, C / group, N, …].
    channel = 1 if together else 2
    order = [1, 2, 0] if together else [0, 1, 2]
    unfolded, first = _in_groups(image, windows, order), 3
    g = _in_groups(g, windows, order)
    g = op.Reshape(g, [0] * (channel + 1) + [-1])
    for axis in reversed(range(1, rank)):
        parts = _steps(unfolded, first + axis, shape[axis], windows.strides[axis], windows.dilations[axis])
        unfolded = op.Concat(*parts, axis=channel) if len(parts) > 1 else parts[0]
    products = [
        op.MatMul(g, op.Transpose(op.Reshape(part, [0] * (channel + 1) + [-1]), perm=_last_two_swapped(channel + 2)))
        for part in _steps(unfolded, first, shape[0], windows.strides[0], windows.dilations[0])
    ]
    found = op.Concat(*products, axis=channel + 1) if len(products) > 1 else products[0]
    if not together:
        found = op.ReduceSum(found, [0], keepdims=0)
    if prod(shape) == 1:
        return op.Reshape(found, op.Shape(kernel))
    # [group, M / group, kernel · C / group] to [M, C / group, kernel]
    found = op.Reshape(found, op.Concat(op.Shape(kernel, end=1), [*shape, -1], axis=0))
    found = op.Transpose(found, perm=[0, rank + 1, *range(1, rank + 1)])
    return op.Reshape(found, op.Shape(kernel)) if found.shape != kernel.shape else found


def _in_groups(x: Tensor, windows: Windows, order: list[int]) -> Tensor:
    """[N, C, …] as [N, group, C / group, …], these three in another order."""
    channels = x.shape[1] if x.shape is not None else None
    groups = [windows.group, channels // windows.group if isinstance(channels, int) else -1]
    sizes = known(spatial(x))
    if sizes is not None:
        x = op.Reshape(x, [0, *groups, *sizes])
    else:
        x = op.Reshape(x, op.Concat(op.Shape(x, end=1), groups, spatial(x), axis=0))
    return x if order == [0, 1, 2] else op.Transpose(x, perm=[*order, *range(3, 3 + windows.rank)])


def _last_two_swapped(rank: int) -> list[int]:
    return [*range(rank - 2), rank - 1, rank - 2]


def _steps(x: Tensor, axis: int, size: int, stride: int, dilation: int) -> list[Tensor]:
    """What the first, the second … element of a kernel sees along an axis."""
    if size == 1 and stride == 1:
        return [x]
    window = (size - 1) * dilation
    # An end counted from the axis' end holds for every size.
    return [op.Slice(x, [k * dilation], [k * dilation - window or END], [axis], [stride]) for k in range(size)]


def _is_large(image: Tensor, g: Tensor, kernel: Tensor) -> bool:
    """Whether a kernel gradient for each image would be more to move than the image and its gradient."""
    sizes = [x.shape[1:] if x.shape is not None else (None,) for x in (image, g)]
    known_sizes = [prod(s) if all(isinstance(d, int) for d in s) else None for s in sizes]  # type: ignore[arg-type]
    if kernel.static_shape is None or None in known_sizes:
        return True
    return prod(kernel.static_shape) > sum(known_sizes)  # type: ignore[arg-type]


def _kernel_shape(n: NodeView) -> Tensor:
    return integers(n.kernel_shape) if n.kernel_shape else spatial(n.W)


def _conv_windows(n: NodeView) -> Windows:
    return windows_of(n, n.X, _kernel_shape(n), group=n.group)


def _transposed_windows(n: NodeView) -> Windows:
    """The windows on the output. The pads are such that there is one for each element of the input."""
    rank = n.X.rank - 2
    strides, dilations = n.strides or [1] * rank, n.dilations or [1] * rank
    kernel, output_padding = _kernel_shape(n), integers(n.output_padding or [0] * rank)
    window = extent(kernel, dilations)
    if n.output_shape:
        size = integers(n.output_shape[-rank:])
        whole = (spatial(n.X) - 1) * integers(strides) + window
        first = op.Slice(halves(op.Max(whole + output_padding - size, 0), n.auto_pad), [0], [rank], [0])
        pads = op.Concat(first, whole - first - size, axis=0)
        return Windows(kernel, strides, dilations, _without_small_cuts(pads, strides), n.group)
    if n.auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        pads = halves(op.Max(window + output_padding - integers(strides), 0), n.auto_pad)
    else:
        pads = integers(n.pads if n.pads and n.auto_pad == "NOTSET" else [0] * (2 * rank))
    if any(n.output_padding or []):
        pads = pads - op.Concat(integers([0] * rank), output_padding, axis=0)
    return Windows(kernel, strides, dilations, _without_small_cuts(pads, strides), n.group)


def _without_small_cuts(pads: Tensor, strides: list[int]) -> Tensor:
    """Negative ends that cut less than a stride need no cutting: no window starts there."""
    numbers = known(pads)
    if numbers is None:
        return pads
    rank = len(strides)
    ends = [0 if -s < e < 0 else e for e, s in zip(numbers[rank:], strides, strict=True)]
    return integers([*numbers[:rank], *ends])


def _bias(g: Tensor, n: NodeView) -> Tensor:
    return op.ReduceSum(g, [0, *range(2, n.X.rank)], keepdims=0)


vjp(
    "Conv",
    X=lambda g, n: spread(g, n.W, _conv_windows(n), n.X),
    W=lambda g, n: kernel_gradient(n.X, g, n.W, _conv_windows(n)),
    B=_bias,
)
vjp(
    "ConvTranspose",
    X=lambda g, n: collect(g, n.W, _transposed_windows(n)),
    W=lambda g, n: kernel_gradient(g, n.X, n.W, _transposed_windows(n)),
    B=_bias,
)
