"""Peak memory of building and training a network, measured in a process that does nothing else."""

import ctypes
import json
import subprocess
import sys
from pathlib import Path

from bench.peers import CannotRunError
from bench.training_steps import step_of

ROOT = Path(__file__).resolve().parents[1]
STEPS = 5


def peak_bytes(side: str, interpreter: Path, folder: Path, case: str, threads: int) -> int:
    """Runs this file in a fresh process and reads its answer; `folder` has the case's models and batches."""
    command = [interpreter, "-m", "bench.training_memory", side, folder, case, str(threads)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CannotRunError((done.stderr.strip().splitlines() or ["no reason given"])[-1])
    return int(json.loads(done.stdout.splitlines()[-1])["peak_bytes"])


def _resident(field: str) -> int:
    """VmRSS, the memory held now, or VmHWM, the most held since the mark was reset; in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise CannotRunError(f"the system does not tell {field}")


def main() -> None:
    side, folder, case, threads = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    step_of(side, folder, case, "small", threads)()  # loads libraries, compiles, starts threads
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to VmRSS
    before = _resident("VmRSS")
    step = step_of(side, folder, case, "full", threads)
    for _ in range(STEPS):
        step()
    print(json.dumps({"peak_bytes": max(0, _resident("VmHWM") - before)}))


if __name__ == "__main__":
    main()
