"""Facts about a run that its log begins and ends with: the parameters, versions, the machine, sizes of files."""

import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import onnx_ir as ir

from onnxgrad.cpu.core.threads import get_num_threads
from onnxgrad.graph.files import load, weight_files
from onnxgrad.train.batches import Batches
from onnxgrad.train.trainer import Trainer

PACKAGES = ("onnxruntime", "onnxruntime-gpu", "onnx", "onnx-ir", "numpy", "numba")
ON_A_GPU = ("torch", "triton")
PROCESSOR = Path("/proc/cpuinfo")


def facts_at_start(trainer: Trainer, model: Path, device: str, training: Batches, held_out: Batches | None) -> Any:
    """What the event "start" has besides the options."""
    loaded = load(model, "report")
    return {
        "parameters": {
            name: list(trainer.shapes[name]) for name in in_order_of_use(loaded.graph, list(trainer.shapes))
        },
        "examples": {"training": training.examples, "validation": held_out.examples if held_out is not None else None},
        "model_bytes": bytes_of([model, *weight_files(loaded)]),
        "versions": versions(device),
        "machine": machine(device),
    }


def in_order_of_use(graph: ir.Graph, names: Sequence[str]) -> Sequence[str]:
    """Names of weights as the graph comes to them; as they are if some of them are not in the file itself."""
    used: dict[str, int] = {}
    for number, node in enumerate(graph.all_nodes()):
        for value in node.inputs:
            used.setdefault("" if value is None else str(value.name), number)
    return sorted(names, key=used.__getitem__) if used.keys() >= set(names) else names


def versions(device: str) -> dict[str, str]:
    """Of Python and the packages that compute."""
    from onnxgrad import __version__

    found = {"onnxgrad": __version__, "python": platform.python_version()}
    for name in (*PACKAGES, *(ON_A_GPU if device == "cuda" else ())):
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # there is one onnxruntime for the CPU, and another for GPUs
            continue
    return found


def machine(device: str) -> dict[str, Any]:
    """What the run computes on."""
    found = {
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor(),
        "threads": get_num_threads(),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }
    if device == "cuda":
        import torch

        found["gpu"] = torch.cuda.get_device_name()
    return found


def _processor() -> str:
    lines = PROCESSOR.read_text().splitlines() if PROCESSOR.is_file() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def bytes_of(files: Sequence[Path]) -> int:
    """Of several files together."""
    return sum(path.stat().st_size for path in files)
