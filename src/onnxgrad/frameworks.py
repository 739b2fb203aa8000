"""Arrays of other frameworks: where they live, and how they come in and go back in kind, without copies."""

import importlib
import os
from collections.abc import Iterable
from typing import Any

import ml_dtypes
import numpy as np

from onnxgrad.tensor_types import Array

_PLAIN = frozenset((np.ndarray, list, tuple, int, float, str, bool, type(None), dict))  # the usual case, quickly
_CUDA_DEVICES = (2, 13)  # DLPack's numbers: CUDA, and CUDA's managed memory


def is_foreign(value: Any) -> bool:
    """Whether it is an array, but not NumPy's."""
    return (
        value.__class__ not in _PLAIN
        and hasattr(value, "__dlpack__")
        and not isinstance(value, np.ndarray | np.generic)
    )


def is_on_gpu(value: Any) -> bool:
    """Whether it is an array on a GPU; with Triton's interpreter, torch's tensors on the CPU play that part."""
    if not is_foreign(value):
        return False
    if os.environ.get("TRITON_INTERPRET") == "1" and is_torch(value):
        return True
    return value.__dlpack_device__()[0] in _CUDA_DEVICES


def any_on_gpu(values: Iterable[Any]) -> bool:
    """Whether one of them is."""
    return any(value.__class__ not in _PLAIN and is_on_gpu(value) for value in values)


def is_torch(value: Any) -> bool:
    """Whether it is a tensor of torch, or of a subclass."""
    return any(base.__module__ == "torch" and base.__name__ == "Tensor" for base in type(value).__mro__)


def to_numpy(value: Any) -> Array:
    """The same memory as a NumPy array."""
    if not is_torch(value):
        return np.from_dlpack(value)
    import torch

    tensor = value.detach()
    if tensor.dtype == torch.bfloat16:
        return np.asarray(tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16))
    return np.asarray(tensor.numpy())


def in_kind(array: Any, like: Any) -> Any:
    """A NumPy array or a tensor of torch as an array of the framework that `like` is of."""
    if is_torch(like):
        if not isinstance(array, np.ndarray):
            return array
        import torch

        if array.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)
    if hasattr(like, "__array_namespace__"):
        return like.__array_namespace__().from_dlpack(array)
    return importlib.import_module(type(like).__module__.split(".")[0]).from_dlpack(array)
