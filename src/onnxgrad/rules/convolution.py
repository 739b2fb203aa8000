"""Conv and ConvTranspose: each is the other's gradient; ConvGrad is that of the kernel, and most often of the image."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from onnxgrad.graph.builder import builder_at_work
from onnxgrad.graph.node import NodeView
from onnxgrad.graph.tensor import Tensor
from onnxgrad.rules import op, vjp
from onnxgrad.schema import MICROSOFT


@dataclass(frozen=True)
class Windows:
    """How the windows of a kernel lie over an image."""

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


def gradients(image: Tensor, g: Tensor, kernel: Tensor, windows: Windows) -> tuple[Tensor, ...]:
    """The gradients of the image, the kernel and the bias: one node for those that are wanted.

    The first is of no use where the pads are not known: it is that of the padded image.
    """
    pads = windows.known_pads
    if pads is None or min(pads) < 0:
        image, pads = padded(image, windows), [0] * (2 * windows.rank)
    found: tuple[Tensor, ...] = op.ConvGrad(g, image, kernel, outputs=3, pads=pads, **windows.attributes())
    return found


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


def _conv_grad(g: Tensor, n: NodeView, X: Tensor, W: Tensor) -> tuple[Tensor, ...]:
    """dX, dW and dB, for a node that has the attributes of Conv."""
    rank = X.rank - 2
    # All of them, since the ONNX function of ConvGrad hands them on, and onnx.reference knows no defaults there.
    attributes = {
        "auto_pad": n.auto_pad,
        "dilations": n.dilations or [1] * rank,
        "group": n.group,
        "kernel_shape": n.kernel_shape,
        "pads": n.pads or [0] * (2 * rank),
        "strides": n.strides or [1] * rank,
    }
    found: tuple[Tensor, ...] = op.ConvGrad(g, X, W, outputs=3, **attributes)
    return found


def _image(g: Tensor, n: NodeView) -> Tensor:
    # In small groups there is nothing to multiply, and onnxruntime's own operator is as good, save for single channels
    # and half types: before opset 22 there is none for bfloat16.
    is_depthwise = n.W.shape is not None and n.W.shape[:2] == (n.group, 1) and n.W.rank <= 4
    if n.group == 1 or is_depthwise or n.W.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
        return _conv_grad(g, n, n.X, n.W)[0]
    return spread(g, n.W, _conv_windows(n), n.X)


vjp(
    "Conv",
    X=_image,
    W=lambda g, n: _conv_grad(g, n, n.X, n.W)[1],
    B=lambda g, n: _conv_grad(g, n, n.X, n.W)[2],
)
vjp(
    "ConvTranspose",
    X=lambda g, n: collect(g, n.W, _transposed_windows(n)),
    W=lambda g, n: gradients(g, n.X, n.W, _transposed_windows(n))[1],
    B=_bias,
)


def _twice_gradient(g: Tensor | None, n: NodeView) -> Tensor | None:
    """All outputs are linear in dY; dX and dW are so as Conv's output is in W and in X."""
    windows, (dX, dW, dB) = _conv_windows(n), (n.grad(k) for k in range(3))
    parts = [
        collect(image, kernel, windows)
        for image, kernel in ((dX, n.W), (n.X, dW))
        if image is not None and kernel is not None
    ]
    if dB is not None:
        column = op.Unsqueeze(dB, [*range(1, n.X.rank - 1)])
        parts.append(op.Expand(column, op.Shape(n.dY)))
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _twice_image(g: Tensor | None, n: NodeView) -> Tensor | None:
    dW = n.grad(1)
    return None if dW is None else _conv_grad(n.dY, n, n.X, dW)[0]


def _twice_kernel(g: Tensor | None, n: NodeView) -> Tensor | None:
    dX = n.grad(0)
    return None if dX is None else _conv_grad(n.dY, n, dX, n.W)[1]


vjp("ConvGrad", domain=MICROSOFT, outputs=("dX", "dW", "dB"), dY=_twice_gradient, X=_twice_image, W=_twice_kernel)
