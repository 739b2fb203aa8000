"""Parameters into a checkpoint, and from a checkpoint into a model."""

import os
from collections.abc import Sequence
from pathlib import Path

import onnx
from onnx import numpy_helper

from onnxgrad.ort_training.checkpoint_file import Checkpoint, Parameter, read_checkpoint, write_checkpoint


def save_checkpoint(
    parameters: tuple[Sequence[onnx.TensorProto], Sequence[onnx.TensorProto]],
    path_to_checkpoint: str | os.PathLike[str],
    nominal_checkpoint: bool = False,
) -> None:
    """Writes parameters, first those that are trained, then those that are frozen, to a checkpoint.

    A nominal checkpoint has their names, types and shapes only.
    """
    if parameters is None:
        raise RuntimeError(
            "save_checkpoint: parameters is None, expected those that are trained and those that are not"
        )
    trainable, frozen = parameters
    found = {}
    for tensors, requires_grad in ((trainable, True), (frozen, False)):
        for tensor in tensors:
            data = numpy_helper.to_array(tensor)
            shape = tuple(tensor.dims)
            found[tensor.name] = Parameter(None if nominal_checkpoint else data, requires_grad, shape, data.dtype)
    write_checkpoint(Path(path_to_checkpoint), Checkpoint(found, nominal=nominal_checkpoint))


def load_checkpoint_to_model(path_to_checkpoint: str | os.PathLike[str], model: onnx.ModelProto) -> None:
    """Gives the model's initializers the values that parameters of their names have in the checkpoint."""
    checkpoint = read_checkpoint(Path(path_to_checkpoint))
    if checkpoint.nominal:
        raise RuntimeError(
            f"load_checkpoint_to_model: {os.fspath(path_to_checkpoint)!r} is a nominal checkpoint, which has no values"
        )
    for tensor in model.graph.initializer:
        parameter = checkpoint.parameters.get(tensor.name)
        if parameter is not None and parameter.data is not None:
            tensor.CopyFrom(numpy_helper.from_array(parameter.data, tensor.name))
