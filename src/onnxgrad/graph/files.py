"""load() and save(): models of any kind come in; files take their name only once they are complete."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

LARGEST = 2**31 - 2**26  # bytes of weights in a file of protobuf, which ends at 2 GB, and room for the graph


def load(model: Any, caller: str) -> ir.Model:
    """A model of any kind, which may be changed; weights in files stay there. Sentences begin with the caller."""
    if isinstance(model, ir.Model):
        return model.clone()
    if isinstance(model, onnx.ModelProto):
        return ir.from_proto(model)
    if not isinstance(model, (str, os.PathLike)):
        raise TypeError(
            f"{caller}: model is a {type(model).__name__}, expected a path, an onnx.ModelProto or an onnx_ir.Model"
        )
    path = Path(model)
    if not path.is_file():
        raise FileNotFoundError(f"{caller}: the file {str(path)!r} does not exist, expected an ONNX model")
    try:
        return ir.load(path.absolute())  # its weights are found whatever the working directory becomes
    except Exception as error:  # of protobuf, or whatever reads the format
        raise ValueError(f"{caller}: {str(path)!r} is not an ONNX model ({type(error).__name__})") from None


def expect_weights(model: ir.Model, caller: str) -> None:
    """Raises one sentence if a file that holds weights is missing."""
    for tensor in _tensors(model):
        if isinstance(tensor, ir.ExternalTensor) and not Path(tensor.path).is_file():
            way_out = (
                "it belongs beside the model"
                if Path(tensor.path).is_absolute()
                else "a model that is loaded does not say in which folder its files are: give its path instead"
            )
            raise FileNotFoundError(
                f"{caller}: the weights {tensor.name!r} are in the file {str(tensor.path)!r}, which does not exist: "
                f"{way_out}"
            )


def save(model: ir.Model, path: Path, source: Path | None) -> list[Path]:
    """Writes a model made from the one in `source`; returns the files that hold it, its own first.

    Weights in files beside `source` stay there if `path` is in the same folder. In any other folder, or without a
    source, all are written to a file beside `path`, one tensor at a time.
    """
    expect_place(path)
    files = list(dict.fromkeys(Path(t.path) for t in _tensors(model) if isinstance(t, ir.ExternalTensor)))
    inside = sum(t.nbytes for t in _tensors(model) if not isinstance(t, ir.ExternalTensor))
    stay = inside <= LARGEST and source is not None and (not files or path.parent.samefile(source.parent))
    data = None if stay else f"{path.name}.data"
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        ir.save(model, Path(folder) / path.name, external_data=data)
        # The model last: whoever finds it finds its weights.
        for name in (data, path.name):
            if name is not None and (Path(folder) / name).exists():
                os.replace(Path(folder) / name, path.parent / name)  # noqa: PTH105
    if data is None:
        return [path, *files]
    return [path, path.parent / data] if (path.parent / data).exists() else [path]


def expect_place(path: Path) -> None:
    """Raises one sentence if no file can be at the path."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"the folder {str(path.parent)!r} to write {path.name!r} into does not exist")
    if path.is_dir():
        raise IsADirectoryError(f"{str(path)!r} is a folder, expected the name of a file to write")


def _tensors(model: ir.Model) -> Iterator[Any]:
    for graph in model.graphs():
        for value in graph.initializers.values():
            if value.const_value is not None:
                yield value.const_value
