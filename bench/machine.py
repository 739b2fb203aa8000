"""The machine that figures come from."""

import os
import platform
import re
from importlib import metadata
from pathlib import Path

import onnxgrad
from bench.avx2 import ALONE

# The widest instructions that kernels here and there make use of, widest first: the system's name and a reader's.
INSTRUCTIONS = {"amx_tile": "AMX", "avx512f": "AVX-512", "avx2": "AVX2"}
AVX2_ALONE = "AVX2 alone"  # as bench/avx2.py makes a processor that has more


def _told(field: str) -> str:
    """The first such line of /proc/cpuinfo, "" where there is none."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(field)), "")


def description() -> str:
    """Its processor and how many cores take part."""
    model = _told("model name") or platform.processor() or platform.machine()
    return f"{model}, {onnxgrad.get_num_threads()} cores"


def processor() -> str:
    """The kind of its processor, whose figures have tables of their own: "Intel Xeon, AMX"."""
    model = _told("model name") or platform.machine()
    if ALONE.items() <= os.environ.items():
        return f"{kind(model, [])}, {AVX2_ALONE}"
    return kind(model, _told("flags").split())


def kind(model: str, flags: list[str]) -> str:
    """Maker and family, which are the first words of the model's name, and the widest instructions."""
    family = " ".join(re.sub(r"\((R|TM)\)", "", model).split()[:2])
    return ", ".join([family, *[name for flag, name in INSTRUCTIONS.items() if flag in flags][:1]])


def versions(*packages: str) -> str:
    """Of onnxgrad, of these packages and of Python."""
    told = [f"{'PyTorch' if name == 'torch' else name} {metadata.version(name)}" for name in packages]
    return ", ".join([f"onnxgrad {onnxgrad.__version__}", *told, f"Python {platform.python_version()}"])
