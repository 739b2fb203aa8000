"""Peak memory of one call besides its outputs, measured in a process that does nothing else."""

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from bench.cases import Case, Named, all_cases, output_types
from bench.peers import CannotRunError

ROOT = Path(__file__).resolve().parents[1]


def peak_extra_bytes(case: Case) -> int:
    """Runs this file in a fresh process and reads its answer."""
    command = [sys.executable, "-m", "bench.memory", case.name, case.dtype]
    # With this, glibc takes every large array from the system and gives it back at once, so that none hides in memory
    # that an earlier array has left.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no reason given"]
        # Numba's messages go on for many lines after the one that names the error.
        raise CannotRunError(next((line for line in reversed(lines) if "Error: " in line), lines[-1]))
    return int(json.loads(done.stdout)["peak_extra_bytes"])


def _resident(field: str) -> int:
    """VmRSS, the memory held now, or VmHWM, the most held since the mark was reset; in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise CannotRunError(f"the system does not tell {field}")


def _into(case: Case, inputs: Named) -> int:
    """How much one call into outputs that are already there raised the memory held, at its peak."""
    # Filled, not just allocated: the system gives pages only when they are written to.
    outputs = [np.full(t.shape, 1, case.numpy_dtype) for t in output_types(case, inputs)]
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to VmRSS
    before = _resident("VmRSS")
    case.op.into(outputs, *inputs.values(), **case.attributes)
    return _resident("VmHWM") - before


def main() -> None:
    name, dtype = sys.argv[1:]
    case = next(c for c in all_cases() if (c.name, c.dtype) == (name, dtype))
    _into(case, case.small_inputs())  # compiles, starts threads
    print(json.dumps({"peak_extra_bytes": max(0, _into(case, case.inputs()))}))


if __name__ == "__main__":
    main()
