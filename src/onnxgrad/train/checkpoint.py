"""Checkpoints: one safetensors file; if writing fails, the old one is still there."""

import contextlib
import json
import zlib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from onnxgrad.graph.files import expect_place, replaced
from onnxgrad.tensor_types import Array
from onnxgrad.train.fitting import Position
from onnxgrad.train.loss_scale import LossScale

KIND, KIND_WITHOUT_CHECKSUMS = "onnxgrad checkpoint 2", "onnxgrad checkpoint 1"
LATER_FACTS = {"ema": bool, "callbacks": dict}  # which files of earlier versions lack
FACTS = "facts"  # their name among the checksums; those of arrays have a slash


def write_checkpoint(path: Path, arrays: Mapping[str, Array], facts: Mapping[str, Any]) -> None:
    """Writes arrays and a few facts, with a checksum of each."""
    expect_place(path)
    text = json.dumps(facts)
    sums = {name: _checksum(array) for name, array in arrays.items()}
    metadata = {"kind": KIND, "facts": text, "checksums": json.dumps({**sums, FACTS: zlib.crc32(text.encode())})}
    try:
        with replaced(path) as draft:
            save_file(dict(arrays), draft, metadata=metadata)
    except (SafetensorError, OSError) as error:
        raise OSError(f"{str(path)!r} cannot be written: {error}") from None


def read_checkpoint(path: Path) -> tuple[dict[str, Array], dict[str, Any]]:
    """What write_checkpoint wrote; raises one sentence if a bit of it has changed."""
    if not path.is_file():
        raise FileNotFoundError(f"{str(path)!r} does not exist, expected a checkpoint of a trainer")
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is not a dict
    except Exception as error:  # of safetensors, of the system, or of NumPy, which does not have all types
        raise ValueError(f"{str(path)!r} is not a checkpoint: {error}") from None
    if metadata.get("kind") not in (KIND, KIND_WITHOUT_CHECKSUMS):
        raise ValueError(f"{str(path)!r} is not a checkpoint of a trainer")
    text = metadata.get("facts", "")
    if metadata["kind"] == KIND:
        found = {name: _checksum(array) for name, array in arrays.items()} | {FACTS: zlib.crc32(text.encode())}
        saved = _parsed(metadata.get("checksums", ""))
        for name in sorted(found.keys() | saved.keys()):
            if found.get(name) != saved.get(name):
                raise ValueError(f"{str(path)!r} is damaged: {name!r} is not as it was saved; use another checkpoint")
    return arrays, _checked_facts(_parsed(text), str(path))


def _checksum(array: Array) -> int:
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _parsed(text: str) -> dict[str, Any]:
    """A dict written as JSON; an empty one if it is not."""
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(text)
        if isinstance(found, dict):
            return found
    return {}


def _checked_facts(facts: dict[str, Any], source: str) -> dict[str, Any]:
    """Raises one sentence unless they are such as a trainer writes."""
    expected: dict[str, Any] = {"steps": int, "batches": int, "seed": int, "waiting": int, "optimizer": str}
    given = {name: value for name, value in facts.items() if name not in ("place", "loss_scale")}
    expected |= {name: kind for name, kind in LATER_FACTS.items() if name in facts}
    place = facts.get("place")
    if "loss_scale" in facts:  # in fp16
        scale = facts["loss_scale"]
        expected |= {f"loss_scale/{f.name}": f.type for f in fields(LossScale)}
        given |= {f"loss_scale/{name}": value for name, value in scale.items()} if isinstance(scale, dict) else {}
    if place is not None:  # within a fit()
        expected |= {f"place/{f.name}": f.type for f in fields(Position)}
        given |= {f"place/{name}": value for name, value in place.items()} if isinstance(place, dict) else {}
    for name in sorted(expected.keys() | given.keys()):
        kind, value = expected.get(name), given.get(name)
        fits = type(value) is kind or (kind is float and type(value) is int)
        if not fits or (isinstance(value, int) and kind is int and name != "seed" and value < 0):
            raise ValueError(f"{source!r} is damaged: {name!r} is {value!r}; use another checkpoint")
    return facts


def check_arrays(targets: Mapping[str, Any], arrays: Mapping[str, Array], source: str) -> None:
    """Raises one sentence unless the arrays of a file fit those of a trainer, of whatever library."""
    for name in sorted(targets.keys() ^ arrays.keys()):
        has = "lacks" if name in targets else "has"
        raise ValueError(f"{source!r} {has} {name!r}: it belongs to another model, or to other trainable parameters")
    for name, target in targets.items():
        given, wanted = (f"{a.dtype}{list(a.shape)}".removeprefix("torch.") for a in (arrays[name], target))
        if given != wanted:
            raise ValueError(f"{source!r} has {name!r} as {given}, expected {wanted}")
