"""Lines of an image with zeros around them: what a tap of a kernel reads for all windows is one run of memory."""

from onnxgrad.cpu.core.halves import load, store, zero
from onnxgrad.cpu.core.jit import native
from onnxgrad.tensor_types import Array


@native
def lay_out(
    source: Array, at: int, target: Array, start: int, size: int, pad: int, phase: int, stride: int, length: int
) -> None:
    """Every `stride`-th element of a line of `size`, from `phase` on, with zeros for the pads: `length` in all."""
    # Element j stands at j · stride + phase - pad of the line.
    first = min(length, max(0, -((phase - pad) // stride)))
    end = max(first, min(length, -((phase - pad - size) // stride)))
    zero(target, start, start + first)
    base = at + phase - pad
    if stride == 1:
        for j in range(first, end):
            store(target, start + j, load(source, base + j))
    else:
        for j in range(first, end):
            store(target, start + j, load(source, base + j * stride))
    zero(target, start + end, start + length)
