"""The model that blocks build on: base() and empty_base() set it for the time of a `with`."""

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import onnx

from onnxgrad.schema import MICROSOFT

NEWEST_OPSET = 21  # that onnxruntime-training 1.19.2 can load


class ModelAccessor:
    """Holds the model that blocks change."""

    def __init__(self, model: onnx.ModelProto, model_path: str | os.PathLike[str] | None = None) -> None:
        self.model = model
        self._path = model_path

    @property
    def has_path(self) -> bool:
        """Whether the model was read from a file."""
        return self._path is not None

    @property
    def path(self) -> str:
        """The file that the model was read from."""
        if self._path is None:
            raise RuntimeError("the model has no path: onnxblock.base was given none")
        return os.fspath(self._path)


ACCESSOR: ContextVar[ModelAccessor | None] = ContextVar("accessor", default=None)


def current() -> ModelAccessor:
    """What holds the model within base() or empty_base()."""
    accessor = ACCESSOR.get()
    if accessor is None:
        raise RuntimeError(
            "a block builds on a model: call it within `with onnxblock.base(model):`, or within "
            "`with onnxblock.empty_base():` if it begins one"
        )
    return accessor


@contextmanager
def base(model: onnx.ModelProto, model_path: str | os.PathLike[str] | None = None) -> Iterator[ModelAccessor]:
    """Within it blocks build on a copy of the model, which is the `model` of what the `with` gives.

    Weights that are in files are read from the folder of `model_path`.
    """
    if model is None:
        raise RuntimeError("onnxblock.base: model is None; onnxblock.empty_base() begins a new model")
    with registered(ModelAccessor(copy.deepcopy(model), model_path)) as accessor:
        yield accessor


@contextmanager
def empty_base(opset_version: int | None = None) -> Iterator[ModelAccessor]:
    """Within it blocks build a new model, of the newest opset that onnxruntime-training 1.19.2 knows by default."""
    opset = opset_version or min(onnx.defs.onnx_opset_version(), NEWEST_OPSET)
    opsets = [onnx.helper.make_opsetid(MICROSOFT, 1), onnx.helper.make_opsetid("", opset)]
    # Not onnx's own newest version, which older runtimes refuse.
    version = onnx.helper.find_min_ir_version_for(opsets[1:], ignore_unknown=True)
    graph = onnx.GraphProto(name="graph")
    model = onnx.ModelProto(ir_version=version, producer_name="onnxgrad", opset_import=opsets, graph=graph)
    with registered(ModelAccessor(model)) as accessor:
        yield accessor


@contextmanager
def registered(accessor: ModelAccessor) -> Iterator[ModelAccessor]:
    """Within it blocks change the accessor's own model."""
    if ACCESSOR.get() is not None:
        raise RuntimeError("blocks build on one model at a time: end the `with` of the other first")
    _read_weights(accessor)
    before = ACCESSOR.set(accessor)
    try:
        yield accessor
    finally:
        ACCESSOR.reset(before)


@contextmanager
def custom_op_library(custom_op_library_path: str | os.PathLike[str]) -> Iterator[Path]:
    """Checks that a library of operators is there. Gradients are written without it; sessions need it."""
    path = Path(custom_op_library_path)
    if not path.exists():
        raise RuntimeError(f"the library of custom operators {str(path)!r} does not exist")
    yield path


def _read_weights(accessor: ModelAccessor) -> None:
    """Brings weights that are in files into the model: blocks and checkpoints read them."""
    folder = Path(accessor.path).parent if accessor.has_path else Path()
    for tensor in accessor.model.graph.initializer:
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            continue
        location = next((entry.value for entry in tensor.external_data if entry.key == "location"), "")
        if not (folder / location).is_file():
            raise FileNotFoundError(
                f"the weights {tensor.name!r} are in the file {str(folder / location)!r}, which does not exist: "
                "give the path of the model, or load it with its weights"
            )
    onnx.load_external_data_for_model(accessor.model, str(folder))
