"""The machine that figures come from."""

import platform
from pathlib import Path

import onnxgrad


def description() -> str:
    """Its processor and how many cores take part."""
    model = platform.processor() or platform.machine()
    if (cpuinfo := Path("/proc/cpuinfo")).exists():
        names = [x.split(":", 1)[1].strip() for x in cpuinfo.read_text().splitlines() if x.startswith("model name")]
        model = names[0] if names else model
    return f"{model}, {onnxgrad.get_num_threads()} cores"
