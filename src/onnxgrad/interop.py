"""Arrays of other frameworks: where they live, and their conversion to NumPy and back, without copies."""

import importlib
import os
from typing import Any

import ml_dtypes
import numpy as np

from onnxgrad.tensor_types import Array

_CUDA_DEVICES = (2, 13)  # DLPack's numbers: CUDA, and CUDA's managed memory
NOT_FOREIGN, FOREIGN, TORCH = 0, 1, 2
_kinds: dict[type, int] = dict.fromkeys((np.ndarray, list, tuple, int, float, str, bool, type(None)), NOT_FOREIGN)


def kind_of(value: Any) -> int:
    """TORCH for torch tensors, FOREIGN for other arrays that are not NumPy's, NOT_FOREIGN for everything else."""
    cls = value.__class__
    kind = _kinds.get(cls)
    if kind is None:
        is_torch = any(base.__module__ == "torch" and base.__name__ == "Tensor" for base in cls.__mro__)
        is_array = hasattr(cls, "__dlpack__") and not issubclass(cls, (np.ndarray, np.generic))
        kind = _kinds[cls] = TORCH if is_torch else FOREIGN if is_array else NOT_FOREIGN
    return kind


def is_foreign(value: Any) -> bool:
    """Whether it is an array, but not NumPy's."""
    return kind_of(value) != NOT_FOREIGN


def is_on_gpu(value: Any) -> bool:
    """Whether it is an array on a GPU; with Triton's interpreter torch tensors on the CPU count as such."""
    kind = kind_of(value)
    if kind == TORCH:
        return value.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
    return kind == FOREIGN and value.__dlpack_device__()[0] in _CUDA_DEVICES


def to_numpy(value: Any) -> Array:
    """The same memory as a NumPy array."""
    if kind_of(value) != TORCH:
        return np.from_dlpack(value)
    import torch

    # torch negates and conjugates lazily: the numbers in memory may not be those of the tensor yet.
    tensor = value.detach().resolve_conj().resolve_neg()
    twin = getattr(ml_dtypes, str(tensor.dtype).removeprefix("torch."), None)  # bfloat16 and float8, which NumPy lacks
    if twin is not None:
        return np.asarray(tensor.view(torch.int16 if tensor.itemsize == 2 else torch.uint8).numpy().view(twin))
    return np.asarray(tensor.numpy())


def to_framework(array: Any, like: Any) -> Any:
    """A NumPy array or a torch tensor as an array of the framework of `like`."""
    if kind_of(like) == TORCH:
        if not isinstance(array, np.ndarray):
            return array
        import torch

        if hasattr(ml_dtypes, array.dtype.name):
            bits = array.view(np.int16 if array.itemsize == 2 else np.uint8)
            return torch.from_numpy(bits).view(getattr(torch, array.dtype.name))
        return torch.from_numpy(array)
    if hasattr(like, "__array_namespace__"):
        return like.__array_namespace__().from_dlpack(array)
    return importlib.import_module(type(like).__module__.split(".")[0]).from_dlpack(array)
