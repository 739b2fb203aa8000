"""launch_matmul(): a product by the fastest kernel that the processor and the type have."""

from onnxgrad.cpu.core.matmul.amx import has_amx
from onnxgrad.cpu.core.matmul.bf16_matmul import matmul_of_bf16
from onnxgrad.cpu.core.matmul.matmul import matmul_by_amx, matmul_by_vectors
from onnxgrad.cpu.core.matmul.microkernel import gemm_address, gemm_of_pairs_address
from onnxgrad.cpu.core.threads import get_num_threads, launch
from onnxgrad.tensor_types import Array


def launch_matmul(
    a: Array,
    b: Array,
    c: Array,
    bias: Array,
    starts: Array,
    steps: tuple[int, ...],
    sizes: tuple[int, int, int],
    alpha: float = 1.0,
    is_rounded: bool = False,
) -> None:
    """c = alpha · a · b + bias, as matmul.py describes it, with a and b rounded to bfloat16 maybe."""
    work = len(starts) * sizes[0] * sizes[1] * sizes[2] // 16  # counted as bytes that many threads might go over
    kernel, gemm = matmul_by_vectors, gemm_address(c.dtype)
    if is_rounded:
        kernel, gemm = matmul_of_bf16, gemm_of_pairs_address()
    elif c.itemsize == 4 and has_amx():
        kernel = matmul_by_amx
    launch(kernel, a, b, c, bias, starts, steps, sizes, alpha, get_num_threads(), gemm, bytes_touched=work)
