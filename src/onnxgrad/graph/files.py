"""load() and save(): models of any kind come in; files take their name only once they are complete."""

import contextlib
import functools
import glob
import os
import platform
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from onnxgrad.graph import maps
from onnxgrad.graph.validity import objection, one_line

DAY = 24 * 60 * 60  # seconds, after which nobody is still writing a file
OLDEST_WITH_WEIGHTS_APART = 4  # IR version; before it, weights had to be inputs as well
LONG_NAME = "ai.onnx"  # of ONNX's own domain, whose other name is ""
LARGEST = 2**31 - 2**26  # bytes of weights in a file of protobuf, which ends at 2 GB, and room for the graph
# What onnxruntime says of operators, types and versions that it has no kernels for: others may have some.
NO_KERNELS = re.compile(
    r"NOT_IMPLEMENTED|Could not find an implementation|is not a registered function/op|only \*guarantees\* support"
    r"|Unsupported model IR version"
)


def load(model: Any, caller: str) -> ir.Model:
    """A model of any kind, which may be changed; weights in files stay there. Sentences begin with the caller."""
    if isinstance(model, (str, os.PathLike)):
        path = Path(model)
        what, loaded = repr(str(path)), _read(path, caller)
    elif isinstance(model, onnx.ModelProto):
        what, loaded = "the model", _from_proto(model, "the model", caller)
        _own_names(loaded)
    elif isinstance(model, ir.Model):
        what, loaded = "the model", _clone(model)
    else:
        raise TypeError(
            f"{caller}: model is a {type(model).__name__}, expected a path, an onnx.ModelProto or an onnx_ir.Model"
        )
    if not _is_sorted(loaded.graph):
        try:
            loaded.graph.sort()  # as onnxruntime does
        except ValueError:
            raise ValueError(f"{caller}: {what} is not valid: its graph has a cycle") from None
    loaded.graph.name = loaded.graph.name or "graph"  # which onnx wants and onnxruntime does not
    for imports in (loaded.graph.opset_imports, *(f.opset_imports for f in loaded.functions.values())):
        if LONG_NAME in imports:  # which onnx.reference, for one, does not take for the same domain
            imports.setdefault("", imports.pop(LONG_NAME))
    _forget_negative_dimensions(loaded.graph)
    if any(not value.is_graph_input() for value in loaded.graph.initializers.values()):
        loaded.ir_version = max(loaded.ir_version, OLDEST_WITH_WEIGHTS_APART)
    return loaded


def _forget_negative_dimensions(graph: ir.Graph) -> None:
    """Old converters wrote -1 for a dimension of any size."""
    for value in (*graph.inputs, *(v for node in graph.all_nodes() for v in node.outputs)):
        if value.shape is not None and any(isinstance(d, int) and d < 0 for d in value.shape):
            value.shape = ir.Shape([None if isinstance(d, int) and d < 0 else d for d in value.shape])


def _read(path: Path, caller: str) -> ir.Model:
    if path.is_dir():
        raise IsADirectoryError(f"{caller}: {str(path)!r} is a folder, expected an ONNX model")
    if not path.is_file():
        raise FileNotFoundError(f"{caller}: the file {str(path)!r} does not exist, expected an ONNX model")
    if not path.stat().st_size:
        raise ValueError(f"{caller}: the file {str(path)!r} is empty, expected an ONNX model")
    try:
        proto = onnx.load(path, load_external_data=False)
    except Exception as error:  # of protobuf, or whatever reads the format
        raise ValueError(f"{caller}: {str(path)!r} is not an ONNX model ({type(error).__name__})") from None
    loaded = _from_proto(proto, repr(str(path)), caller)
    # With it, weights are found whatever the working directory becomes.
    ir.external_data.set_base_dir(loaded.graph, path.absolute().parent)
    return loaded


def _from_proto(proto: onnx.ModelProto, what: str, caller: str) -> ir.Model:
    names = Counter(tensor.name for tensor in proto.graph.initializer)
    twice = next((name for name, count in names.items() if count > 1), None)
    if twice is not None:  # onnx_ir would take the last
        raise ValueError(f"{caller}: {what} is not valid: the name {twice!r} is given more than once")
    sparse = next(_sparse_tensors(proto.graph), None)
    if sparse is not None:  # onnx_ir would leave initializers out
        raise ValueError(
            f"{caller}: {what} has the sparse tensor {sparse!r}, expected dense ones: give it as an ordinary "
            "initializer, with its zeros"
        )
    try:
        return maps.from_proto(proto)
    except Exception as error:  # of any type, from onnx_ir
        raise ValueError(f"{caller}: {what} is not valid: {objection(proto) or one_line(error)}") from None


def _sparse_tensors(graph: onnx.GraphProto) -> Iterator[str]:
    yield from (tensor.values.name for tensor in graph.sparse_initializer)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("sparse_tensor"):
                yield node.output[0]
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                yield from _sparse_tensors(inner)


def _own_names(model: ir.Model) -> None:
    """Lets tensors of a proto that is somebody else's have names of their own: onnx_ir would change those in there."""
    for graph in model.graphs():
        for value in graph.initializers.values():
            tensor: Any = value.const_value
            if isinstance(tensor, ir.TensorProtoTensor):
                given = functools.partial(_itself, tensor)
                value.const_value = ir.LazyTensor(given, tensor.dtype, tensor.shape, name=tensor.name)


def as_given(result: ir.Model, given: Any) -> Any:
    """A model of the kind that a caller gave: an onnx_ir.Model, or else a ModelProto.

    A proto does not say in which folder files are, so weights in files are read into it; if they are more than a proto
    can hold, they stay there and it has their whole paths, which a Trainer takes and onnx refuses.
    """
    if isinstance(given, ir.Model):
        return result
    is_large = sum(t.nbytes for t in _tensors(result)) > LARGEST
    for graph in result.graphs():
        for value in graph.initializers.values():
            tensor = value.const_value
            if isinstance(tensor, ir.ExternalTensor) and Path(tensor.path).is_file():
                value.const_value = _whole_path(tensor) if is_large else _in_memory(tensor)
    return maps.to_proto(result)


def _whole_path(tensor: ir.ExternalTensor) -> ir.ExternalTensor:
    where, at = str(Path(tensor.path).absolute()), (tensor.offset, tensor.length)
    return ir.ExternalTensor(where, *at, tensor.dtype, shape=tensor.shape, name=str(tensor.name))


def _in_memory(tensor: ir.ExternalTensor) -> ir.Tensor[Any]:
    return ir.Tensor(tensor.numpy(), dtype=tensor.dtype, name=tensor.name)


def _itself(tensor: Any) -> Any:
    return tensor


def _clone(model: ir.Model) -> ir.Model:
    try:
        return model.clone()
    except RuntimeError:  # its nodes are not in order
        return ir.from_proto(ir.to_proto(model))


def _is_sorted(graph: ir.Graph) -> bool:
    """Whether every node comes after those whose results it uses."""
    seen = set()
    for node in graph:
        producers = (value.producer() for value in node.inputs if value is not None)
        if any(p is not None and p.graph is graph and p not in seen for p in producers):
            return False
        seen.add(node)
    return True


def expect_weights(model: ir.Model, caller: str) -> None:
    """Raises one sentence if a file that holds weights is missing."""
    for tensor in _tensors(model):
        if isinstance(tensor, ir.ExternalTensor) and not Path(tensor.path).is_file():
            way_out = (
                "expected it next to the model"
                if Path(tensor.path).is_absolute()
                else "a model that is loaded does not say in which folder its files are: give its path instead"
            )
            raise FileNotFoundError(
                f"{caller}: the weights {tensor.name!r} are in the file {str(tensor.path)!r}, which does not exist: "
                f"{way_out}"
            )


def given_back(model: ir.Model, given: Any, caller: str) -> Any:
    """A model that was made from one that a user gave: an onnx_ir.Model for such a one, else an onnx.ModelProto.

    If that was a path, weights in files come into the proto, which does not say in which folder they are.
    """
    if isinstance(given, ir.Model):
        return model
    if isinstance(given, (str, os.PathLike)) and weight_files(model):
        expect_weights(model, caller)
        size = sum(t.nbytes for t in _tensors(model))
        if size > LARGEST:
            raise ValueError(
                f"{caller}: the result has {size / 2**30:.1f} GB of weights, more than an onnx.ModelProto holds: give "
                f"{caller} an onnx_ir.Model, of onnx_ir.load(path), whose weights stay in their files"
            )
        ir.external_data.load_to_model(model)
    return maps.to_proto(model)


def save(model: ir.Model, path: Path, source: Path | None) -> list[Path]:
    """Writes a model made from the one in `source`; returns the files that hold it, its own first.

    Weights in files beside `source` stay there if `path` is in the same folder. In any other folder, or without a
    source, all are written to a file beside `path`, one tensor at a time. A model that onnx or onnxruntime refuses is
    not written.
    """
    path = followed(path)
    expect_place(path)
    files = weight_files(model)
    inside = sum(t.nbytes for t in _tensors(model) if not isinstance(t, ir.ExternalTensor))
    stay = inside <= LARGEST and source is not None and (not files or path.parent.samefile(source.parent))
    if stay:  # its draft is beside the files that it names by where they are from its own folder
        with replaced(path) as draft:
            maps.save(model, draft)
            _expect_valid(draft, path)
        return [path, *files]
    data = data_file(path)
    with replaced_together(path) as folder:
        maps.save(model, folder / path.name, external_data=data.name)
        _expect_valid(folder / path.name, path)
        files = [data] if (folder / data.name).exists() else []
    return [path, *files]


@contextlib.contextmanager
def replaced_together(path: Path) -> Iterator[Path]:
    """A folder to write `path` and others to by their names; all take their places beside it when the block is done.

    `path` comes last: whoever finds it finds the others. It replaces a link, which onnx does not read weights from.
    """
    folder = _draft(path)
    try:
        with errors_about(path, folder):
            folder.mkdir()
            usual = folder.stat().st_mode & 0o666
            yield folder
        for written in sorted(folder.iterdir(), key=lambda file: file.name == path.name):
            _set_mode(written, path.with_name(written.name), usual)
            written.replace(path.with_name(written.name))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A path to write to, beside `path`; it takes its place when the block is done and the disk has it all.

    Of a symbolic link the file that it points to is replaced.
    """
    path = followed(path)
    draft = _draft(path)
    try:
        with errors_about(path, draft):
            draft.touch()
            usual = draft.stat().st_mode
            yield draft
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        _set_mode(draft, path, usual)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


@contextlib.contextmanager
def errors_about(path: Path, draft: Path | None = None) -> Iterator[None]:
    """Errors of the system name the file that is wanted, not the draft or nothing."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and (
            error.filename is None or (draft is not None and str(draft) in str(error.filename))
        ):
            error.filename = str(path)
        raise


def _set_mode(draft: Path, path: Path, usual: int) -> None:
    """Gives a file the mode it would have if it were written in place: safetensors writes for the owner alone."""
    with contextlib.suppress(FileNotFoundError):
        usual = path.stat().st_mode
    if draft.is_file() and (draft.stat().st_mode ^ usual) & 0o777:
        draft.chmod(usual & 0o777)


def followed(path: Path) -> Path:
    """The file that a symbolic link points to; any other path as it is."""
    return path.resolve() if path.is_symlink() else path


def _expect_no_device(path: Path, caller: str | None = None) -> None:
    """Raises one sentence if a file would take the place of something like /dev/null."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        sentence = f"{str(path)!r} is a device or a pipe, expected the name of a file to write"
        raise ValueError(_said_by(caller, sentence))


def _draft(path: Path) -> Path:
    """What this process writes before it takes the name `path`; removes what others left that were killed."""
    _expect_no_device(path)
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
        if not _is_stale(left):
            continue
        with contextlib.suppress(OSError):  # somebody else removes it, or nobody may
            shutil.rmtree(left) if left.is_dir() else left.unlink()
    return path.with_name(f".{path.name}.{platform.node()}.{os.getpid()}.part")


def _is_stale(draft: Path) -> bool:
    """Whether the process that wrote it, perhaps on another machine, has ended."""
    machine, _, process = draft.name.removesuffix(".part").rpartition(".")
    try:
        if os.name == "posix" and machine.endswith(f".{platform.node()}") and process.isdecimal():
            os.kill(int(process), 0)
        return time.time() - draft.stat().st_mtime > DAY
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # somebody else's process, a draft that is gone
        return False


def weight_files(model: ir.Model) -> list[Path]:
    """The files that hold weights of a model, apart from its own."""
    return list(dict.fromkeys(Path(t.path) for t in _tensors(model) if isinstance(t, ir.ExternalTensor)))


def data_file(path: Path) -> Path:
    """Where the weights of a model at `path` go if they are not in its own file."""
    return path.with_name(f"{path.name}.data")


def _expect_valid(draft: Path, path: Path) -> None:
    """Raises one sentence if onnx, or onnxruntime where it is installed, refuses the file."""
    found = objection(draft)
    if found is not None:
        raise _refused(path, "onnx", found)
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
            raise _refused(path, "onnxruntime", one_line(error)) from None


def _refused(path: Path, who: str, reason: str) -> RuntimeError:
    return RuntimeError(f"{str(path)!r} is not written, because {who} refuses the model that it would hold: {reason}")


def expect_folder(path: Path, caller: str | None = None) -> None:
    """Raises one sentence if there is no folder for what is to be at the path."""
    if not path.parent.is_dir():
        sentence = f"the folder {str(path.parent)!r} to write {path.name!r} into does not exist"
        raise FileNotFoundError(_said_by(caller, sentence))


def expect_place(path: Path, caller: str | None = None) -> None:
    """Raises one sentence if no file can be at the path, or where a symbolic link there points to."""
    _expect_no_device(path, caller)
    expect_folder(followed(path), caller)
    if path.is_dir():
        sentence = f"{str(path)!r} is a folder, expected the name of a file to write"
        raise IsADirectoryError(_said_by(caller, sentence))


def _said_by(caller: str | None, sentence: str) -> str:
    return f"{caller}: {sentence}" if caller else sentence


def _tensors(model: ir.Model) -> Iterator[Any]:
    for graph in model.graphs():
        for value in graph.initializers.values():
            if value.const_value is not None:
                yield value.const_value
