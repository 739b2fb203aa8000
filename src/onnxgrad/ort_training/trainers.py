"""Trainer and artifacts: a Trainer continues from artifacts, and each reads checkpoints of the other."""

import dataclasses
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.ort_training.api.optimizer import GROUP, MOMENTA, Recipe, read_recipe
from onnxgrad.ort_training.checkpoint_file import (
    Checkpoint,
    OptimizerGroup,
    Parameter,
    read_checkpoint,
    write_checkpoint,
)
from onnxgrad.ort_training.graphs import load_evaluation
from onnxgrad.tensor_types import Array
from onnxgrad.train.checkpoint import read_checkpoint as read_own
from onnxgrad.train.checkpoint import write_checkpoint as write_own
from onnxgrad.train.optim import SGD, AdamW, Optimizer
from onnxgrad.train.trainer import Trainer

SLOTS = {"AdamW": ("m", "v"), "Adam": ("m", "v"), "SGD": ()}  # what momentum0 and momentum1 are called in a trainer
KINDS = {"AdamW": "AdamWOptimizer", "Adam": "AdamWOptimizer", "SGD": "SGDOptimizerV2"}


def open_artifacts(
    folder: str | os.PathLike[str],
    prefix: str = "",
    optimizer: Optimizer | None = None,
    lr: float = 1e-3,
    **settings: Any,
) -> Trainer:
    """A Trainer of the model that artifacts are of, with the state of their checkpoint.

    Loss, optimizer and parameters to train are those of the artifacts, so training gives the numbers that a Module
    gives; `lr` is the rate, by default that of a new Optimizer. `optimizer` takes the place of that of the artifacts,
    without its momenta, and `settings` are further ones of Trainer. `prefix` is what the names of the files begin with.
    """
    where = Path(folder)
    checkpoint = where / f"{prefix}checkpoint"
    found = read_checkpoint(checkpoint)
    if found.nominal:
        raise ValueError(f"open_artifacts: {str(checkpoint)!r} is nominal, so there are no parameters to begin with")
    model = load_evaluation(where / f"{prefix}eval_model.onnx")
    for value in list(model.graph.inputs):
        parameter = found.parameters.get(str(value.name))
        if parameter is not None and parameter.data is not None:
            model.graph.inputs.remove(value)
            value.const_value = ir.Tensor(parameter.data, name=value.name)
            model.graph.register_initializer(value)
    # A trainer computes the running variance of a torch model as torch does; onnxruntime-training does not.
    model.producer_name = "onnxruntime-training"
    loss = str(model.graph.outputs[0].name)
    trained = [name for name, p in found.parameters.items() if p.requires_grad]
    if optimizer is not None:  # which begins anew
        return Trainer(model, loss, optimizer, trained, **settings)
    recipe = read_recipe(where / f"{prefix}optimizer_model.onnx")
    settings.setdefault("clip_norm", recipe.max_norm)
    trainer = Trainer(model, loss, _optimizer(recipe, lr), trained, **settings)
    load_checkpoint(trainer, checkpoint)
    return trainer


def _optimizer(recipe: Recipe, lr: float) -> Optimizer:
    if recipe.kind == "SGDOptimizerV2":
        return SGD(lr)
    if not recipe.corrects_bias:
        raise ValueError("open_artifacts: their AdamW corrects no bias, which Trainer's does: pass another optimizer")
    form = "torch" if recipe.decays_first else "huggingface"
    return AdamW(lr, recipe.weight_decay, betas=recipe.betas, eps=recipe.eps, form=form)


def load_checkpoint(trainer: Trainer, checkpoint: str | os.PathLike[str]) -> None:
    """Gives a Trainer the parameters, running statistics and optimizer's state of onnxruntime-training's checkpoint."""
    path = Path(checkpoint)
    found = read_checkpoint(path)
    arrays: dict[str, Array] = {}
    for group, views in (("parameter", trainer.shapes), ("statistics", trainer.statistics)):
        for name, view in views.items():
            parameter = found.parameters.get(name)
            if parameter is None and group == "statistics":  # they are constants of the artifacts
                arrays[f"{group}/{name}"] = np.asarray(view)
                continue
            if parameter is None or parameter.data is None:
                raise ValueError(f"{str(path)!r} lacks the parameter {name!r}: it belongs to another model")
            arrays[f"{group}/{name}"] = parameter.data
    state = found.groups.get(GROUP, OptimizerGroup())
    for slot, momentum in _slots(trainer).items():
        for name, shape in trainer.shapes.items():
            saved = state.momenta.get(name, {}).get(momentum)
            empty = np.zeros(shape, arrays[f"parameter/{name}"].dtype)
            arrays[f"optimizer/{slot}/{name}"] = empty if saved is None else saved
    facts = {
        "steps": state.step, "batches": state.step, "seed": trainer.seed, "waiting": 0,
        "optimizer": trainer.optimizer.name, "place": None,
    }  # fmt: skip
    with _own_file() as own:
        write_own(own, arrays, facts)
        trainer.restore(own)


def save_checkpoint(
    trainer: Trainer, checkpoint: str | os.PathLike[str], like: str | os.PathLike[str] | None = None
) -> None:
    """Writes a Trainer's state as a checkpoint of onnxruntime-training.

    `like` is the checkpoint of the artifacts that will go on with it: the new one has the same parameters, of which
    those that the trainer does not train, and the properties, stay as they are. Without it the parameters are those
    that are trained, and running statistics as frozen ones.
    """
    with _own_file() as own:
        trainer.save(own)
        arrays, facts = read_own(own)
    changed = {name: arrays[f"parameter/{name}"] for name in trainer.shapes}
    statistics = {name: arrays[f"statistics/{name}"] for name in trainer.statistics}
    target = Checkpoint() if like is None else read_checkpoint(Path(like))
    if like is None:
        target.parameters = {n: Parameter(a, True) for n, a in changed.items()}
        target.parameters |= {n: Parameter(a, False) for n, a in statistics.items()}
    else:
        for name, array in (changed | statistics).items():
            if name in target.parameters:
                target.parameters[name] = dataclasses.replace(target.parameters[name], data=array)
            elif name in changed:
                raise ValueError(f"{str(like)!r} lacks the parameter {name!r}, which the trainer trains")
        target.nominal = any(p.data is None for p in target.parameters.values())
    slots = _slots(trainer)
    momenta = {
        name: {m: arrays[f"optimizer/{slot}/{name}"] for slot, m in slots.items()}
        or {MOMENTA["SGDOptimizerV2"][0]: np.zeros_like(changed[name])}
        for name in changed
    }
    target.groups = {GROUP: OptimizerGroup(facts["steps"], trainer.optimizer.lr, momenta)}
    write_checkpoint(Path(checkpoint), target)


def _slots(trainer: Trainer) -> Mapping[str, str]:
    """The arrays of a trainer's optimizer, and their names in a checkpoint."""
    name = trainer.optimizer.name
    if name not in SLOTS or (name == "SGD" and trainer.optimizer.needs("momentum")):
        raise ValueError(
            f"onnxruntime-training has no {name} with the trainer's settings: its checkpoints are of AdamW, or of SGD "
            "without momentum"
        )
    return dict(zip(SLOTS[name], MOMENTA[KINDS[name]], strict=False))


@contextmanager
def _own_file() -> Iterator[Path]:
    """A path for a trainer's own checkpoint, which is gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "trainer.safetensors"
