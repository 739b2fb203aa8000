"""Launching a Triton kernel on the device and the stream of its tensors."""

import struct
from typing import Any

import torch
import triton
import triton.language as tl

# Set by TRITON_INTERPRET=1 before the import: kernels then run in Python, on tensors of the CPU.
INTERPRETED = bool(triton.knobs.runtime.interpret)
CUTS_OFF = tl.constexpr(INTERPRETED)  # the interpreter cuts off the bits that bfloat16 has not
LONGEST_IN_32_BITS = 2**31 - 2**21  # elements; a tile may reach past the end of a tensor
MOST_PROGRAMS = 2**31 - 1  # in the first dimension of a grid, the only one used


MOST_KEPT = 4096
_kept: dict[Any, Any] = {}  # kernels as compiled, by all that Triton looks at before it launches one


def launch(kernel: Any, programs: int, *args: Any, num_warps: int = 4, **options: Any) -> None:
    """Runs `programs` programs of a kernel.

    Triton looks at every argument anew in each launch, for longer than many a kernel runs. So the kernel it chose is
    kept for calls with the same numbers and with tensors of the same types and alignment.
    """
    if programs > MOST_PROGRAMS:
        raise ValueError(f"the tensors are too large for one launch: {programs} programs, at most {MOST_PROGRAMS}")
    if INTERPRETED:
        options.pop("launch_cooperative_grid", None)
        kernel[(programs,)](*args, num_warps=num_warps, **options)
        return
    device = torch._C._cuda_getDevice()  # what torch.cuda.current_device() asks, which takes its time
    plain = [arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in args]
    looks = [arg if arg is given else (arg.dtype, given % 16 == 0) for arg, given in zip(args, plain, strict=True)]
    key = (id(kernel), device, num_warps, *options.values(), *looks)
    compiled = _kept.get(key)
    if compiled is None or _is_watched():
        compiled = kernel[(programs,)](*args, num_warps=num_warps, **options)
        if len(_kept) >= MOST_KEPT:
            _kept.clear()
        _kept[key] = compiled
        return
    stream = torch._C._cuda_getCurrentRawStream(device)
    compiled.run(programs, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *plain)


def _is_watched() -> bool:
    """Whether a profiler wants to hear of every launch, which only Triton's own way tells it."""
    hook = triton.knobs.runtime.launch_enter_hook
    return bool(getattr(hook, "calls", hook))


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up; triton's own takes its time."""
    return -(-a // b)


def power_of_two(number: int) -> int:
    """The smallest one that is not less."""
    return 1 << max(0, number - 1).bit_length()


def counting_type(*lengths: int) -> Any:
    """The integers that count elements of tensors so long: 32 bits if they will do, since 64 take twice the work."""
    return tl.int32 if max(lengths) < LONGEST_IN_32_BITS else tl.int64


def sums_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type sums are kept in: float32 for the half types, so that they round once, at the end."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def bits_of(number: float) -> int:
    """A float64 as an integer of the same bits: Triton hands floats to kernels in 32 bits only."""
    return int(struct.unpack("q", struct.pack("d", number))[0])


@triton.jit
def float_of(bits, KIND: tl.constexpr):
    """Back again, in the type to compute with."""
    return tl.cast(bits, tl.int64).to(tl.float64, bitcast=True).to(KIND)


@triton.jit
def divide(x, y):
    """x / y rounded to nearest, as everywhere else; Triton's own division is off by up to two units in float32."""
    if x.dtype == tl.float32:
        return tl.div_rn(x, y)
    else:  # noqa: RET505 - which Triton compiles only if the type is another
        return x / y


@triton.jit
def to_type(x, KIND: tl.constexpr):
    """x in another type, rounded to nearest even."""
    if CUTS_OFF and tl.bfloat16 == KIND:
        bits = x.to(tl.float32).to(tl.int32, bitcast=True)
        bits = tl.where(x != x, bits | 0x400000, bits + 0x7FFF + ((bits >> 16) & 1))
        return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return x.to(KIND)


@triton.jit
def narrowed(x, KIND: tl.constexpr):
    """A float64 in another type, half types by way of float32."""
    if tl.float64 == KIND:
        return x
    return to_type(x.to(tl.float32), KIND)
