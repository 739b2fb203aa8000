"""Devices: where a trainer keeps its arrays and runs its kernels: NumPy and threads, or torch tensors on a GPU."""

import contextlib
import functools
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from onnxgrad.cpu.core.threads import launch
from onnxgrad.runtime.register import require_onnxruntime
from onnxgrad.tensor_types import Array

BYTES = 4  # of a number, usually
STATUS = Path("/proc/self/status")
ALIGNMENT = 64  # bytes: a cache line, and as much as any vector instruction needs


class Device(Protocol):
    """What a trainer needs of a device; arrays are NumPy's on the CPU and torch's on a GPU."""

    name: str
    chunk: int  # elements of a parameter that one task updates
    providers: Sequence[Any]  # of sessions
    precisions: Sequence[str]

    @property
    def own_products(self) -> bool:
        """Whether PermutedMatMul is faster than onnxruntime's MatMul, as it is with AMX, AVX-512 and AVX2."""

    def zeros(self, length: int, dtype: Any) -> Any:
        """A new vector."""

    def from_numpy(self, array: Array) -> Any:
        """A copy on the device."""

    def to_numpy(self, array: Any) -> Array:
        """The array, or a copy of it, in the CPU's memory."""

    def copy(self, target: Any, source: Any) -> None:
        """target[...] = source; the source may be a NumPy array."""

    def staging(self, length: int, dtype: Any) -> Array | None:
        """A vector on the host for `fetch`; None where arrays are on the host anyway."""

    def fetch(self, target: Array, source: Any) -> None:
        """Copies an array of the device into a vector from `staging`."""

    def address(self, array: Any) -> int:
        """The address of its first element."""

    def run(self, kernel: str, chunks: Any, *args: Any) -> None:
        """Runs a function of the device's core/optimizers.py on buffers.Chunks."""

    @property
    def verdict(self) -> Any:
        """What `judge` of cuda/core/optimizers.py has found; a CPU has none."""

    def read_later(self, array: Any) -> Callable[[], Sequence[float]]:
        """Copies an array of few numbers to the host when all before it is done; what is returned waits for that."""

    def writes(self, array: Any) -> int | None:
        """How often torch has written into an array, which kernels of ours do not count in; None if nobody counts."""

    def send(self, array: Any, to: Any = None) -> Any:
        """A batch's array on the device: copied into the array `to`, or into a new one; the host does not wait."""

    def at_work(self) -> contextlib.AbstractContextManager[None]:
        """Around a step: its work is ordered, also with the work before and after it."""

    def peak_memory(self) -> int:
        """Bytes: the most that this process has held so far, or what is taken of a GPU's memory, by whomever."""


class Cpu:
    """The CPU, with all threads that onnxgrad.set_num_threads allows."""

    name = "cpu"
    chunk = 1 << 15
    providers: Sequence[Any] = ("CPUExecutionProvider",)
    precisions: Sequence[str] = ("float32", "bf16")  # processors compute no faster in fp16

    @property
    def own_products(self) -> bool:
        from onnxgrad.cpu.core.levels import has_feature  # imported here because it loads Numba

        return has_feature("avx2") and has_feature("fma")

    def zeros(self, length: int, dtype: Any) -> Array:
        itemsize = np.dtype(dtype).itemsize
        room = np.zeros(length + ALIGNMENT // itemsize, dtype)
        skipped = (-room.ctypes.data % ALIGNMENT) // itemsize
        return room[skipped : skipped + length]

    def from_numpy(self, array: Array) -> Array:
        return np.array(array)

    def to_numpy(self, array: Array) -> Array:
        return array

    def copy(self, target: Array, source: Array) -> None:
        target[...] = source

    def staging(self, length: int, dtype: Any) -> Array | None:
        return None

    def fetch(self, target: Array, source: Array) -> None:
        target[...] = source

    def address(self, array: Array) -> int:
        return array.ctypes.data

    @functools.cached_property
    def _kernels(self) -> Any:
        from onnxgrad.cpu.core import optimizers

        return optimizers

    def run(self, kernel: str, chunks: Any, *args: Any) -> None:
        launch(getattr(self._kernels, kernel), chunks.table, *args, bytes_touched=4 * BYTES * chunks.elements)

    verdict = None

    def read_later(self, array: Array) -> Callable[[], Sequence[float]]:
        found: list[float] = array.tolist()
        return lambda: found

    def writes(self, array: Array) -> int | None:
        return None

    def send(self, array: Any, to: Any = None) -> Any:
        return array

    def at_work(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def peak_memory(self) -> int:
        if STATUS.is_file():  # Linux, whose ru_maxrss begins with that of the process which started this one
            return 1024 * int(STATUS.read_text().partition("VmHWM:")[2].split()[0])
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024


class Cuda:
    """A GPU, by torch and the CUDA provider of onnxruntime-gpu, both on one stream: nothing waits for the host.

    Products and convolutions of float32 use TF32 unless torch.backends.cudnn.allow_tf32 is False, as cuDNN's GRU does.
    """

    name = "cuda"
    chunk = 1 << 12  # as cuda/core/optimizers.py has it
    own_products = False
    precisions: Sequence[str] = ("float32", "bf16", "fp16")

    def __init__(self, local_rank: int | None = None, caller: str = "Trainer") -> None:
        try:
            import torch
        except ImportError as error:
            raise ImportError(f"{caller}: device 'cuda' needs torch: pip install 'onnxgrad[cuda]' ({error})") from None
        if not torch.cuda.is_available():
            raise RuntimeError(f"{caller}: device is 'cuda', but torch finds no GPU: use the device 'cpu'")
        onnxruntime = require_onnxruntime(caller)
        if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
            raise RuntimeError(
                f"{caller}: device is 'cuda', but this onnxruntime has no CUDA provider: install onnxruntime-gpu in "
                "place of onnxruntime"
            )
        if local_rank is not None:
            torch.cuda.set_device(local_rank % torch.cuda.device_count())
        if hasattr(onnxruntime, "preload_dlls"):
            onnxruntime.preload_dlls()  # the CUDA libraries that torch brought
        self._torch, self._where, self._stream = torch, "cuda", torch.cuda.Stream()
        settings = {
            "user_compute_stream": str(self._stream.cuda_stream),
            "use_tf32": str(int(torch.backends.cudnn.allow_tf32)),
            "arena_extend_strategy": "kSameAsRequested",  # by powers of two, BERT-base takes 5127 MB instead of 4487
        }
        if (number := torch.cuda.current_device()) != 0:  # which onnxruntime 1.31 warns about, if it is named
            settings["device_id"] = str(number)
        self.providers: Sequence[Any] = (("CUDAExecutionProvider", settings), "CPUExecutionProvider")
        self.verdict = torch.ones(4, dtype=torch.float64, device=self._where)  # of cuda/core/optimizers.py

    def _kind(self, dtype: Any) -> Any:
        return getattr(self._torch, np.dtype(dtype).name)

    def zeros(self, length: int, dtype: Any) -> Any:
        return self._torch.zeros(length, dtype=self._kind(dtype), device=self._where)

    def from_numpy(self, array: Array) -> Any:
        return as_tensor(np.array(array), self._torch).to(self._where, copy=True)

    def to_numpy(self, array: Any) -> Array:
        found: Array = array.detach().cpu().numpy()
        return found

    def copy(self, target: Any, source: Any) -> None:
        if isinstance(source, np.ndarray):
            source = as_tensor(source, self._torch)
        target.copy_(source)

    def send(self, array: Any, to: Any = None) -> Any:
        source = as_tensor(array, self._torch)
        if not source.is_cuda:  # pinned memory, which is not used for anything else before it is copied
            source = source.pin_memory()
        to = self._torch.empty_like(source, device=self._where) if to is None else to
        return to.copy_(source, non_blocking=True)

    def read_later(self, array: Any) -> Callable[[], list[float]]:
        found, done = self._torch.empty(array.shape, dtype=array.dtype, pin_memory=True), self._torch.cuda.Event()
        found.copy_(array, non_blocking=True)
        done.record()

        def wait() -> list[float]:
            done.synchronize()
            numbers: list[float] = found.tolist()
            return numbers

        return wait

    def writes(self, array: Any) -> int | None:
        return None if array.is_inference() else int(array._version)

    def staging(self, length: int, dtype: Any) -> Array | None:
        pinned: Array = self._torch.zeros(length, dtype=self._kind(dtype), pin_memory=True).numpy()
        return pinned

    def fetch(self, target: Array, source: Any) -> None:
        self._torch.from_numpy(target).copy_(source)

    def address(self, array: Any) -> int:
        return int(array.data_ptr())

    def run(self, kernel: str, chunks: Any, *args: Any) -> None:
        from onnxgrad.cuda.core import optimizers

        getattr(optimizers, kernel)(chunks.table, self.verdict, *args)

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        outside, products = self._torch.cuda.current_stream(), self._torch.backends.cuda.matmul
        before = products.fp32_precision
        products.allow_tf32 = self._torch.backends.cudnn.allow_tf32
        self._stream.wait_stream(outside)
        try:
            with self._torch.cuda.stream(self._stream):
                yield
        finally:
            products.allow_tf32 = before == "tf32"
            outside.wait_stream(self._stream)

    def peak_memory(self) -> int:
        free, total = self._torch.cuda.mem_get_info()  # onnxruntime and torch give nothing back that they took
        return int(total - free)


def device_of(name: str, local_rank: int | None = None, caller: str = "Trainer") -> Device:
    """The device of that name; of several GPUs the one for the process of that number on its machine."""
    if name == "cpu":
        return Cpu()
    if name == "cuda":
        return Cuda(local_rank, caller)
    raise ValueError(f"{caller}: device is {name!r}, expected 'cpu' or 'cuda'")


def as_tensor(array: Any, torch: Any) -> Any:
    """A NumPy array as a tensor of the CPU, or a tensor as it is."""
    if not isinstance(array, np.ndarray):
        return array
    if array.dtype.isbuiltin == 1:
        return torch.from_numpy(array if array.flags.writeable else np.array(array))
    return torch.from_numpy(np.array(array).view(np.int16)).view(getattr(torch, str(array.dtype)))
