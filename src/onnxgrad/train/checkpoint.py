"""Checkpoints: one safetensors file, either the old one or the new one, whatever happens while it is written."""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from onnxgrad.tensor_types import Array

KIND = "onnxgrad checkpoint 1"


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A path to write to, beside `path`; it takes its place when the block is done and the disk has it all."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield draft
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def write_checkpoint(path: Path, arrays: Mapping[str, Array], facts: Mapping[str, Any]) -> None:
    """Writes arrays and a few facts."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{str(path.parent)!r} does not exist, so no checkpoint can be written there")
    with replaced(path) as draft:
        try:
            save_file(dict(arrays), draft, metadata={"kind": KIND, "facts": json.dumps(facts)})
        except SafetensorError as error:
            raise OSError(f"{str(path)!r} cannot be written: {error}") from None


def read_checkpoint(path: Path) -> tuple[dict[str, Array], dict[str, Any]]:
    """What write_checkpoint wrote."""
    if not path.is_file():
        raise FileNotFoundError(f"{str(path)!r} does not exist, expected a checkpoint of a trainer")
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is not a dict
    except SafetensorError as error:
        raise ValueError(f"{str(path)!r} is not a checkpoint: {error}") from None
    if metadata.get("kind") != KIND:
        raise ValueError(f"{str(path)!r} is not a checkpoint of a trainer")
    return arrays, json.loads(metadata["facts"])


def check_arrays(targets: Mapping[str, Any], arrays: Mapping[str, Array], source: str) -> None:
    """Raises one sentence unless the arrays of a file fit those of a trainer, of whatever library."""
    for name in sorted(targets.keys() ^ arrays.keys()):
        has = "lacks" if name in targets else "has"
        raise ValueError(f"{source!r} {has} {name!r}: it belongs to another model, or to other trainable parameters")
    for name, target in targets.items():
        given, wanted = (f"{a.dtype}{list(a.shape)}".removeprefix("torch.") for a in (arrays[name], target))
        if given != wanted:
            raise ValueError(f"{source!r} has {name!r} as {given}, expected {wanted}")
