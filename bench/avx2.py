"""`python -m bench.avx2 MODULE …`: runs a module, bench.training say, as on a processor with AVX2 alone.

NumPy, PyTorch, oneDNN, MKL and Numba use no newer instructions, in this process and in those that it starts.
onnxruntime has no such switch.
"""

import os
import sys

FEATURES = ("64bit", "avx", "avx2", "bmi", "bmi2", "cx16", "f16c", "fma", "lzcnt", "movbe", "popcnt", "sse4.2")
ALONE = {
    "NUMBA_CPU_NAME": "haswell",
    "NUMBA_CPU_FEATURES": ",".join(f"+{name}" for name in FEATURES),
    "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR",
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}


def main() -> None:
    if len(sys.argv) == 1:
        sys.exit("usage: python -m bench.avx2 MODULE …, for instance python -m bench.avx2 bench.training mlp")
    os.execve(sys.executable, [sys.executable, "-m", *sys.argv[1:]], {**os.environ, **ALONE})


if __name__ == "__main__":
    main()
