"""Vectors are as long as those of the processor that Numba compiles for."""

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(("features", "size"), [("+avx,+avx2,+fma", "32"), ("+avx,+avx2,+avx512f", "64"), ("", "16")])
def test_another_processor(features, size):
    code = "from onnxgrad.cpu.core.vectors import VECTOR_BYTES; print(VECTOR_BYTES)"
    environment = {**os.environ, "NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": features}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"{size}\n"
