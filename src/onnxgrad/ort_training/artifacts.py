"""generate_artifacts(): writes the files for onnxruntime-training's Module and Optimizer."""

import contextlib
import os
from enum import Enum
from pathlib import Path
from typing import Any

import onnx

from onnxgrad.graph.files import LARGEST, data_file, expect_place, replaced_together
from onnxgrad.ort_training import onnxblock
from onnxgrad.ort_training.onnxblock.model_accessor import ModelAccessor, registered
from onnxgrad.schema import is_standard


class LossType(Enum):
    """The losses that have a number."""

    MSELoss = 1
    CrossEntropyLoss = 2
    BCEWithLogitsLoss = 3
    L1Loss = 4


class OptimType(Enum):
    """The optimizers that have a number."""

    AdamW = 1
    SGD = 2


def generate_artifacts(
    model: onnx.ModelProto | str | os.PathLike[str],
    requires_grad: list[str] | None = None,
    frozen_params: list[str] | None = None,
    loss: LossType | onnxblock.Block | None = None,
    optimizer: OptimType | onnxblock.Block | None = None,
    artifact_directory: str | bytes | os.PathLike[str] | None = None,
    prefix: str = "",
    ort_format: bool = False,
    custom_op_library: str | bytes | os.PathLike[str] | None = None,
    additional_output_names: list[str] | None = None,
    nominal_checkpoint: bool = False,
    loss_input_names: list[str] | None = None,
) -> None:
    """Writes what a model is trained with by `onnxgrad.ort_training.api`, or by onnxruntime-training 1.19.2 anywhere.

    training_model.onnx has the model, the loss and the gradients, eval_model.onnx the model and the loss, checkpoint
    the parameters, optimizer_model.onnx the update. All are written, or none is.

    - `model`: The model, or its path; weights in files beside it are read.
    - `requires_grad`: Names of the initializers and inputs that get a gradient.
    - `frozen_params`: Names of initializers that are parameters, yet stay as they are. All others are constants of
      the models.
    - `loss`: A loss, or a block that makes one of the model's outputs; None if the model's first output is the loss.
    - `optimizer`: An optimizer, or a block for it; None for no optimizer_model.onnx.
    - `artifact_directory`: The folder to write to; the working directory by default.
    - `prefix`: What the names of all files begin with.
    - `ort_format`: Not supported: stock onnxruntime does not load the ORT format for training.
    - `custom_op_library`: A library with operators of the model, for onnxruntime.
    - `additional_output_names`: Values that are outputs of the training and the eval model besides the loss.
    - `nominal_checkpoint`: Also write nominal_checkpoint, which has the names and types of parameters only.
    - `loss_input_names`: The values that are given to the loss; all outputs of the model by default.
    """
    if ort_format:
        raise NotImplementedError(
            "generate_artifacts: ort_format=True is not supported, because stock onnxruntime no longer trains from "
            ".ort files; the .onnx files that are written without it train everywhere"
        )
    if both := sorted({*(requires_grad or ())} & {*(frozen_params or ())}):
        raise RuntimeError(f"generate_artifacts: {both} are named in both requires_grad and frozen_params")
    objective = _Objective(_loss_block(loss), loss_input_names, additional_output_names)
    update = _optimizer_block(optimizer)
    for names, value in ((requires_grad, True), (frozen_params, False)):
        for name in names or ():
            objective.requires_grad(name, value)
    folder = Path.cwd() if artifact_directory is None else Path(os.fsdecode(artifact_directory))
    prefix = prefix or ""  # None, from people's command lines
    place = folder / f"{prefix}training_model.onnx"
    expect_place(place)

    with contextlib.ExitStack() as stack:
        if custom_op_library is not None:
            stack.enter_context(onnxblock.custom_op_library(os.fsdecode(custom_op_library)))
        base = stack.enter_context(_base(model))
        objective(*[output.name for output in base.model.graph.output])
    training_model, eval_model = objective.to_model_proto()
    models = {"training_model": training_model, "eval_model": eval_model}
    if update is not None:
        opset = next((o.version for o in eval_model.opset_import if is_standard(o.domain)), None)
        with onnxblock.empty_base(opset) as base:
            update(objective.parameters())
            models["optimizer_model"] = base.model

    with replaced_together(place) as draft:
        for name, made in models.items():
            _save(made, draft / f"{prefix}{name}.onnx")
        onnxblock.save_checkpoint(objective.parameters(), draft / f"{prefix}checkpoint")
        if nominal_checkpoint:
            onnxblock.save_checkpoint(objective.parameters(), draft / f"{prefix}nominal_checkpoint", True)
        for written in draft.iterdir():
            expect_place(folder / written.name)


class _Objective(onnxblock.TrainingBlock):
    """The loss, and values that are outputs beside it."""

    def __init__(self, loss: onnxblock.Block, inputs: list[str] | None, more: list[str] | None) -> None:
        super().__init__()
        if more is not None and not isinstance(more, (list, tuple)):
            raise RuntimeError(
                f"generate_artifacts: additional_output_names is a {type(more).__name__}, expected a list of names"
            )
        self._loss, self._inputs, self._more = loss, inputs, more or []

    def build(self, *outputs: str) -> tuple[str, ...]:
        loss = self._loss(*(self._inputs or outputs))
        return tuple(dict.fromkeys((*([loss] if isinstance(loss, str) else loss), *self._more)))


def _loss_block(loss: Any) -> onnxblock.Block:
    if loss is None:
        return onnxblock.blocks.PassThrough()
    if isinstance(loss, LossType):
        return getattr(onnxblock.loss, loss.name)()  # type: ignore[no-any-return]
    if isinstance(loss, onnxblock.Block):
        return loss
    raise RuntimeError(
        f"generate_artifacts: loss is a {type(loss).__name__}, expected a LossType or an onnxblock.Block"
    )


def _optimizer_block(optimizer: Any) -> onnxblock.Block | None:
    if isinstance(optimizer, OptimType):
        return getattr(onnxblock.optim, optimizer.name)()  # type: ignore[no-any-return]
    if optimizer is None or isinstance(optimizer, onnxblock.Block):
        return optimizer
    raise TypeError(
        f"generate_artifacts: optimizer is a {type(optimizer).__name__}, expected an OptimType or an onnxblock.Block"
    )


def _base(model: Any) -> contextlib.AbstractContextManager[ModelAccessor]:
    """Blocks build on a copy of the model, or on what is read from its file."""
    if isinstance(model, onnx.ModelProto):
        return onnxblock.base(model)
    if isinstance(model, (str, os.PathLike)):
        return registered(ModelAccessor(onnx.load(model, load_external_data=False), model))
    raise RuntimeError(f"generate_artifacts: model is a {type(model).__name__}, expected a path or an onnx.ModelProto")


def _save(model: onnx.ModelProto, path: Path) -> None:
    """Writes a model; constants that are too much for one file go into a second."""
    apart = sum(len(tensor.raw_data) for tensor in model.graph.initializer) > LARGEST
    onnx.save_model(model, path, save_as_external_data=apart, location=data_file(path).name if apart else None)
