"""cuDNN by way of torch: deterministic, in the precision of matrix products, on an image with its pads written out."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from onnxgrad.ops.families.windows import Axis


def padded(X: torch.Tensor, axes: Sequence[Axis]) -> tuple[torch.Tensor, list[int]]:
    """An image and what torch pads it with: both ends alike; where they differ, zeros are written."""
    around = [(a.before, max(0, a.reach - a.before - a.size)) for a in axes]
    if all(first == last for first, last in around):
        return X, [first for first, _ in around]
    return torch.nn.functional.pad(X, [n for pair in reversed(around) for n in pair]), [0] * len(axes)


def uses_tf32() -> bool:
    """Whether products of float32 may: as torch.backends.cuda.matmul says."""
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


@contextlib.contextmanager
def deterministic_cudnn(benchmark: bool = False) -> Iterator[None]:
    """cuDNN's deterministic kernels, in the precision of matrix products; with `benchmark`, the fastest of these."""
    cudnn: Any = torch.backends.cudnn
    before = cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.conv.fp32_precision
    try:
        cudnn.enabled, cudnn.benchmark, cudnn.deterministic = True, benchmark, True
        cudnn.conv.fp32_precision = "tf32" if uses_tf32() else "ieee"
        yield
    finally:
        cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.conv.fp32_precision = before
