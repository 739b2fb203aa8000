"""The harness for kernels on a GPU, or in Triton's interpreter: NumPy's arrays go in as tensors and come out again."""

import os
import warnings
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import torch
from tests.checks import DEVICE, as_tuple, assert_as_expected, expect, raises, result_dtypes, same_bits
from tests.left_out import leave_out

TORCH_DEVICE = "cuda" if DEVICE == "cuda" else "cpu"
# Types of ml_dtypes that torch has too, and the integers that hold their bits.
TWINS = {
    np.dtype(ml_dtypes.bfloat16): (torch.bfloat16, np.int16),
    np.dtype(ml_dtypes.float8_e4m3fn): (torch.float8_e4m3fn, np.uint8),
    np.dtype(ml_dtypes.float8_e4m3fnuz): (torch.float8_e4m3fnuz, np.uint8),
    np.dtype(ml_dtypes.float8_e5m2): (torch.float8_e5m2, np.uint8),
    np.dtype(ml_dtypes.float8_e5m2fnuz): (torch.float8_e5m2fnuz, np.uint8),
}
NUMPY_TWINS = {twin: dtype for dtype, (twin, _) in TWINS.items()}
# Elements of all inputs and results together; the interpreter takes seconds for some ten thousand.
MOST_ELEMENTS = 20_000 if DEVICE == "interpreter" else None

torch.backends.cudnn.allow_tf32 = False  # the bounds are those of float32


class NoTensorError(Exception):
    """torch has no tensor of this kind."""


def to_tensor(array: np.ndarray) -> torch.Tensor:
    """The same numbers on the device under test, in the same layout as far as torch has it."""
    array = np.asarray(array)
    if not array.dtype.isnative:
        raise NoTensorError("big-endian numbers")
    if array.ndim > 64:
        raise NoTensorError("more than 64 dimensions")
    if not array.flags.aligned or any(s < 0 for s in array.strides):
        array = array.copy()
    twin, bits = TWINS.get(array.dtype, (None, array.dtype))
    try:
        with warnings.catch_warnings():  # no kernel writes to its inputs; check_on_gpu sees to that
            warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
            tensor = torch.from_numpy(array.view(bits))
    except TypeError:
        raise NoTensorError(str(array.dtype)) from None
    return (tensor if twin is None else tensor.view(twin)).to(TORCH_DEVICE)


def to_array(tensor: torch.Tensor) -> np.ndarray:
    """Back again."""
    tensor = tensor.cpu()
    if tensor.dtype in NUMPY_TWINS:
        dtype = NUMPY_TWINS[tensor.dtype]
        return tensor.view(torch.int16 if dtype.itemsize == 2 else torch.uint8).numpy().view(dtype)
    return tensor.numpy()


def poisoned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> torch.Tensor:
    """A tensor of 0xFF bytes."""
    array = np.empty(shape, dtype)
    array.reshape(-1).view(np.uint8).fill(0xFF)
    return to_tensor(array)


def tensors_of(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments, those that belong on the device as tensors of it."""
    on_device = {i.name for i in op.inputs if not i.constraint.on_host}

    def moved(name: str, value: Any) -> Any:
        if name not in on_device or value is None:
            return value
        if isinstance(value, (np.ndarray, np.generic)):
            return to_tensor(value)
        array = np.array(value)
        return to_tensor(array.astype(np.int32) if name == "SL" else array)

    names = [i.name for i in op.inputs]
    by_position = [moved(names[k] if k < len(names) else "", value) for k, value in enumerate(args)]
    return by_position, {name: moved(name, value) for name, value in kwargs.items()}


def arrays_of(result: Any) -> Any:
    """A result, or several of them, as NumPy's."""
    if isinstance(result, tuple):
        return tuple(None if r is None else to_array(r) for r in result)
    return to_array(result)


# cuDNN chooses its algorithm by the sizes, and some algorithms round transformed numbers as well. On an H200, TF32 off,
# one case of ConvGrad was 1.8 times as far off as a plain sum may be.
TRANSFORMED = {"ConvGrad": 2}


# A GPU makes infinities and NaN without a word; NumPy, which the interpreter computes with, warns of them.
@np.errstate(all="ignore")
def call_on_gpu(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One call, and what it gives."""
    tensors, named = tensors_of(op, args, kwargs)
    return arrays_of(op(*tensors, **named))


@np.errstate(all="ignore")
def check_on_gpu(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call, one into poisoned tensors and a captured one give the same right bits."""
    expected, bounds = expect(op, *args, **kwargs)
    dtypes = result_dtypes(op, args, kwargs)
    elements = sum(np.size(a) for a in (*args, *kwargs.values(), *expected) if isinstance(a, (np.ndarray, np.generic)))
    if MOST_ELEMENTS is not None and elements > MOST_ELEMENTS:
        leave_out(f"{op.name}: larger than the interpreter does in reasonable time")
        return _in_type(expected, dtypes)
    try:
        tensors, named = tensors_of(op, args, kwargs)
    except NoTensorError as kind:
        leave_out(f"{op.name}: torch has no tensors of {kind}")
        return _in_type(expected, dtypes)
    inputs = [t for t in (*tensors, *named.values()) if isinstance(t, torch.Tensor)]
    before = [to_array(t).tobytes() for t in inputs]
    result = op(*tensors, **named)
    results = as_tuple(arrays_of(result))
    factor = TRANSFORMED.get(op.name, 1) if DEVICE == "cuda" else 1
    assert_as_expected(op, results, expected, tuple(None if b is None else factor * b for b in bounds), dtypes)
    assert all(r is None or r.device.type == TORCH_DEVICE for r in as_tuple(result))
    # Without anything to check there is no waiting for the GPU; the bits are the same.
    out = [None if e is None else poisoned(e.shape, d) for e, d in zip(expected, dtypes, strict=True)]
    outcomes = [as_tuple(op.into(out, *tensors, **named, check=False))]
    if DEVICE == "cuda" and "PYTORCH_NO_CUDA_MEMORY_CACHING" not in os.environ:  # where nothing can be captured
        outcomes.append(_captured(op, tensors, named))
    for outcome in outcomes:
        for output, mine, wanted in zip(op.outputs, outcome, results, strict=True):
            assert wanted is None or same_bits(to_array(mine), wanted), f"{output.name} differs from call to call"
    if op.name == "GatherElementsGrad":
        loose = op(*tensors, **named, deterministic=False)
        assert_as_expected(op, (to_array(loose),), expected, bounds, dtypes)
    assert before == [to_array(t).tobytes() for t in inputs], f"{op.name} changed an input"
    return results if isinstance(result, tuple) else results[0]


def _in_type(expected: tuple[Any, ...], dtypes: list[np.dtype[Any]]) -> Any:
    results = tuple(None if e is None else e.astype(d) for e, d in zip(expected, dtypes, strict=True))
    return results if len(results) > 1 else results[0]


def _captured(op: Any, tensors: list[Any], named: dict[str, Any]) -> tuple[Any, ...]:
    """The result of replaying a captured call."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = as_tuple(op(*tensors, **named))
    for r in results:
        if r is not None:
            r.view(torch.uint8).fill_(0xFF) if r.dim() else None
    graph.replay()
    torch.cuda.synchronize()
    return results


# Sentences that speak of NumPy's arrays and lists: on a GPU there are others, tested in tests/cuda/test_calls.py.
ONLY_ON_CPU = ("a NumPy array of", "indices holds bool values", "SL holds values")


def check_refused_on_gpu(
    op: Any, error: type[Exception], text: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> None:
    """The call and `into` raise the sentence of the CPU; `into` writes nothing if no kernel had to find it out."""
    if error is MemoryError or any(words in text for words in ONLY_ON_CPU):
        leave_out(f"{op.name}: the sentence is about NumPy's arrays or the host's memory")
        return
    try:
        tensors, named = tensors_of(op, args, kwargs)
    except (NoTensorError, ValueError, TypeError):
        leave_out(f"{op.name}: no tensor can be wrong in this way")
        return
    if not any(isinstance(t, torch.Tensor) for t in (*tensors, *named.values())):
        leave_out(f"{op.name}: no argument is on a device")
        return
    given = as_tuple(np.full(1, np.nan, np.float32) if out is None else out)
    outs = tuple(None if o is None else to_tensor(o) for o in given)
    before = [None if o is None else to_array(o).tobytes() for o in outs]
    calls: list[Callable[[], Any]] = [lambda: op(*tensors, **named), lambda: op.into(outs, *tensors, **named)]
    for call in calls:
        with raises(error, f"{op.name}: {text}"):
            call()
    if error is IndexError or text.startswith("SL["):
        return
    for tensor, content in zip(outs, before, strict=True):
        assert tensor is None or to_array(tensor).tobytes() == content, f"{op.name} wrote though it refused the call"
