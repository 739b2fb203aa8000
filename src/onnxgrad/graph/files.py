"""load() and save(): models of any kind come in; files take their name only once they are complete."""

import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

LARGEST = 2**31 - 2**26  # bytes of weights in a file of protobuf, which ends at 2 GB, and room for the graph
# What onnxruntime says of operators, types and versions that it has no kernels for: others may have some.
NO_KERNELS = re.compile(
    r"NOT_IMPLEMENTED|Could not find an implementation|is not a registered function/op|only \*guarantees\* support"
    r"|Unsupported model IR version"
)


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
    source, all are written to a file beside `path`, one tensor at a time. A model that onnx or onnxruntime refuses is
    not written.
    """
    expect_place(path)
    files = weight_files(model)
    inside = sum(t.nbytes for t in _tensors(model) if not isinstance(t, ir.ExternalTensor))
    stay = inside <= LARGEST and source is not None and (not files or path.parent.samefile(source.parent))
    data = None if stay else data_file(path).name
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        # A model names its files by where they are from its own folder: beside those that stay it is tried out.
        draft = path.parent / f"{Path(folder).name}.onnx" if stay and files else Path(folder) / path.name
        try:
            ir.save(model, draft, external_data=data)
            _expect_valid(draft, path)
            # The model last: whoever finds it finds its weights.
            if data is not None and (Path(folder) / data).exists():
                os.replace(Path(folder) / data, path.parent / data)  # noqa: PTH105
                files = [path.parent / data]
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    return [path, *files]


def weight_files(model: ir.Model) -> list[Path]:
    """The files that hold weights of a model, apart from its own."""
    return list(dict.fromkeys(Path(t.path) for t in _tensors(model) if isinstance(t, ir.ExternalTensor)))


def data_file(path: Path) -> Path:
    """Where the weights of a model at `path` go if they are not in its own file."""
    return path.with_name(f"{path.name}.data")


def _expect_valid(draft: Path, path: Path) -> None:
    """Raises one sentence if onnx, or onnxruntime where it is installed, refuses the file."""
    try:
        onnx.checker.check_model(str(draft))
    except Exception as error:  # of the checker, or of what it calls
        raise _refused(path, "onnx", error) from None
    try:
        import onnxruntime
    except ImportError:
        return
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.disable_prepacking", "1")  # weights are not copied
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    try:
        onnxruntime.InferenceSession(str(draft), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors have no type in common
        if not NO_KERNELS.search(str(error)):
            raise _refused(path, "onnxruntime", error) from None


def _refused(path: Path, who: str, error: Exception) -> RuntimeError:
    reason = str(error).strip().splitlines()[0]
    return RuntimeError(f"{str(path)!r} is not written, because {who} refuses the model that it would hold: {reason}")


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
