"""open_session(): a session of stock onnxruntime for any model, with the operators of onnxgrad."""

import functools
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx

from onnxgrad.runtime import interrupts
from onnxgrad.runtime.register import register, require_onnxruntime
from onnxgrad.schema import MICROSOFT

# Serialized messages are joined by writing one after the other: this adds an import to a model, whatever else is in it.
IMPORT = onnx.ModelProto(opset_import=[onnx.helper.make_opsetid(MICROSOFT, 1)]).SerializeToString()
FOLDER = "session.model_external_initializers_file_folder_path"  # onnxruntime's name of the setting
LARGEST = 2**31 - 2**26  # bytes of weights in a message of protobuf, which ends at 2 GB, and room for the graph


def open_session(model: Any, options: Any = None, providers: Sequence[Any] | None = None) -> Any:
    """A session for a model of any kind, which is not changed."""
    if isinstance(model, (str, os.PathLike)):
        path = Path(model)
        if not path.is_file():
            raise FileNotFoundError(f"session: the file {str(path)!r} does not exist, expected an ONNX model")
        if options is None:
            options = register()
            options.add_session_config_entry(FOLDER, str(path.absolute().parent))
            return _open(path.read_bytes() + IMPORT, options, providers)
        model = onnx.load(path)  # with weights: in options of others, which make more sessions, the folder would stay
    options = register(options)
    if isinstance(model, onnx.ModelProto) and sum(len(t.raw_data) for t in model.graph.initializer) <= LARGEST:
        return _open(model.SerializeToString() + IMPORT, options, providers)
    import onnx_ir as ir  # imported here because it takes its time

    model = ir.from_proto(model) if isinstance(model, onnx.ModelProto) else model
    if not isinstance(model, ir.Model):
        raise TypeError(
            f"session: model is a {type(model).__name__}, expected a path, an onnx.ModelProto or an onnx_ir.Model"
        )
    model = model.clone()
    model.opset_imports.setdefault(MICROSOFT, 1)
    tensors = [v.const_value for graph in model.graphs() for v in graph.initializers.values()]
    if sum(t.nbytes for t in tensors if t is not None) <= LARGEST:
        return _open(ir.to_proto(ir.external_data.load_to_model(model)).SerializeToString(), options, providers)
    with tempfile.TemporaryDirectory() as folder:  # onnxruntime has read, or mapped, the files when it is done
        ir.save(model, Path(folder) / "model.onnx", external_data="model.onnx.data")
        return _open(Path(folder) / "model.onnx", options, providers)


def _open(model: bytes | Path, options: Any, providers: Sequence[Any] | None) -> Any:
    return interrupts.run(_session_class(), model, options, providers=providers)


@functools.cache
def _session_class() -> Any:
    require_onnxruntime("onnxgrad.session")
    import onnxruntime

    class Session(onnxruntime.InferenceSession):  # type: ignore[misc]
        """Raises again what a signal's handler has raised while onnxruntime called Python."""

        def run(self, *args: Any, **kwargs: Any) -> Any:
            return interrupts.run(super().run, *args, **kwargs)

        def run_with_ort_values(self, *args: Any, **kwargs: Any) -> Any:
            return interrupts.run(super().run_with_ort_values, *args, **kwargs)

        def run_with_iobinding(self, *args: Any, **kwargs: Any) -> Any:
            return interrupts.run(super().run_with_iobinding, *args, **kwargs)

    return Session
