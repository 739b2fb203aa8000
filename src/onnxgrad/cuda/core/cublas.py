"""Settings of cuBLAS, whose products torch runs."""

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def sums_in_float32() -> Iterator[None]:
    """cuBLAS may otherwise add up parts of a product in its half type."""
    matmul = torch.backends.cuda.matmul
    names = "allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction"
    before = [getattr(matmul, name) for name in names]
    try:
        for name in names:
            setattr(matmul, name, False)
        yield
    finally:
        for name, allowed in zip(names, before, strict=True):
            setattr(matmul, name, allowed)
