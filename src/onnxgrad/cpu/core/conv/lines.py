"""Lines of an image with zeros around them: what a tap of a kernel reads for all windows is one run of memory.

Every `stride`-th element of a line, from `phase` on, is a line of its own: its element j stands at j · stride + phase -
pad of the image's.
"""

from onnxgrad.cpu.core.halves import load, store
from onnxgrad.cpu.core.jit import inlined
from onnxgrad.tensor_types import Array


@inlined
def inside(size: int, pad: int, phase: int, stride: int, length: int) -> tuple[int, int]:
    """From where to where such a line of `length` elements is in the image; the others are pads."""
    first = min(length, max(0, -((phase - pad) // stride)))
    return first, max(first, min(length, -((phase - pad - size) // stride)))


@inlined
def copy_line(source: Array, base: int, target: Array, start: int, first: int, end: int, stride: int) -> None:
    """What is in the image, where `base` is the position of element 0."""
    if stride == 1:
        for j in range(first, end):
            store(target, start + j, load(source, base + j))
    else:
        for j in range(first, end):
            store(target, start + j, load(source, base + j * stride))
