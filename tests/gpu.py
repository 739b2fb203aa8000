"""The harness for kernels on a GPU, or in Triton's interpreter: NumPy's arrays go in as tensors and come out again."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import torch
from tests.checks import DEVICE, as_tuple, assert_as_expected, expect, raises, result_dtype, same_bits

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
# What check() was asked for and this device cannot show; printed after the tests.
LEFT_OUT: dict[str, int] = {}

torch.backends.cudnn.allow_tf32 = False  # the bounds are those of float32


class NoTensorError(Exception):
    """torch has no tensor of this kind."""


def leave_out(what: str) -> None:
    """Counts a case that cannot run here."""
    LEFT_OUT[what] = LEFT_OUT.get(what, 0) + 1


def to_tensor(array: np.ndarray) -> torch.Tensor:
    """The same numbers on the device under test, in the same layout as far as torch has it."""
    array = np.asarray(array)
    if not array.dtype.isnative or array.ndim > 64:
        raise NoTensorError(f"{array.dtype} with {array.ndim} dimensions")
    if not array.flags.aligned or any(s < 0 for s in array.strides) or not array.flags.writeable:
        array = array.copy()
    if array.dtype in TWINS:
        twin, bits = TWINS[array.dtype]
        return torch.from_numpy(array.view(bits)).view(twin).to(TORCH_DEVICE)
    try:
        tensor = torch.from_numpy(array)
    except TypeError:
        raise NoTensorError(str(array.dtype)) from None
    # A tensor without elements in the way keeps its strides when it moves.
    return tensor.to(TORCH_DEVICE)


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


def tensors_of(op: Any, args: tuple[Any, ...]) -> list[Any]:
    """The arguments, those that belong on the device as tensors of it."""
    moved = []
    for k, value in enumerate(args):
        on_device = k < len(op.inputs) and not op.inputs[k].constraint.on_host and value is not None
        if not on_device:
            moved.append(value)
            continue
        array = value if isinstance(value, (np.ndarray, np.generic)) else np.array(value)
        if op.inputs[k].name == "SL":
            array = array.astype(np.int32)
        moved.append(to_tensor(array))
    return moved


def check_on_gpu(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call, a second one, one into poisoned tensors and a captured one give the same right bits."""
    expected, bounds = expect(op, *args, **kwargs)
    dtype = result_dtype(op, args, kwargs)
    try:
        tensors = tensors_of(op, args)
    except NoTensorError as kind:
        leave_out(f"{op.name}: torch has no tensors of {kind}")
        return op(*args, **kwargs)
    before = [to_array(t).tobytes() for t in tensors if isinstance(t, torch.Tensor)]
    result = op(*tensors, **kwargs)
    results = tuple(None if r is None else to_array(r) for r in as_tuple(result))
    assert_as_expected(op, results, expected, bounds, dtype)
    assert all(r is None or r.device.type == TORCH_DEVICE for r in as_tuple(result))
    # Without anything to check there is no waiting for the GPU; the bits are the same.
    for outcome in (_into(op, tensors, kwargs, expected, dtype), _captured(op, tensors, kwargs)):
        for output, mine, wanted in zip(op.outputs, outcome, results, strict=True):
            assert wanted is None or same_bits(to_array(mine), wanted), f"{output.name} differs from call to call"
    if op.name == "GatherElementsGrad":
        loose = op(*tensors, **kwargs, deterministic=False)
        assert_as_expected(op, (to_array(loose),), expected, bounds, dtype)
    after = [to_array(t).tobytes() for t in tensors if isinstance(t, torch.Tensor)]
    assert before == after, f"{op.name} changed an input"
    if isinstance(result, tuple):
        return results
    return results[0]


def _into(op: Any, tensors: list[Any], kwargs: dict[str, Any], expected: Any, dtype: Any) -> tuple[Any, ...]:
    out = [None if e is None else poisoned(e.shape, dtype) for e in expected]
    return as_tuple(op.into(out, *tensors, **kwargs, check=False))


def _captured(op: Any, tensors: list[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The result of replaying a captured call; on the interpreter, of one more call."""
    if DEVICE != "cuda":
        return as_tuple(op(*tensors, **kwargs))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = as_tuple(op(*tensors, **kwargs))
    for r in results:
        if r is not None:
            r.view(torch.uint8).fill_(0xFF) if r.dim() else None
    graph.replay()
    torch.cuda.synchronize()
    return results


# Sentences that speak of NumPy's arrays and lists: on a GPU there are others, tested in tests/cuda.
ONLY_ON_CPU = ("a NumPy array of", "holds bool values", "indices is a", "fit int", "aligned", "is None", "is object")


def check_refused_on_gpu(
    op: Any, error: type[Exception], text: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> None:
    """The call and `into` raise the sentence of the CPU, and `into` writes nothing it was refused to."""
    if error is MemoryError or any(words in text for words in ONLY_ON_CPU):
        leave_out(f"{op.name}: the sentence is about NumPy's arrays or the host's memory")
        return
    try:
        tensors = tensors_of(op, args)
    except (NoTensorError, ValueError, TypeError):
        leave_out(f"{op.name}: no tensor can be wrong in this way")
        return
    if not any(isinstance(t, torch.Tensor) for t in tensors):
        leave_out(f"{op.name}: no argument is on a device")
        return
    calls: list[Callable[[], Any]] = [lambda: op(*tensors, **kwargs)]
    for call in calls:
        with raises(error, f"{op.name}: {text}"):
            call()
