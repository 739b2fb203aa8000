"""export_step(): a training step as plain ONNX files, which any onnxruntime runs without onnxgrad."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common
from safetensors.numpy import save as serialize

from onnxgrad.functions.dropout import batch_seed
from onnxgrad.graph.builder import Builder, op
from onnxgrad.graph.files import expect_place, replaced_together, save, weight_files
from onnxgrad.graph.tensor import Tensor
from onnxgrad.graph.weights_at import weights_at
from onnxgrad.passes.draft import Draft
from onnxgrad.passes.drop_identities import drop_identities
from onnxgrad.passes.finish import add_own_functions, drop_dead
from onnxgrad.passes.fold_shapes import fold_shapes
from onnxgrad.passes.infer import infer
from onnxgrad.passes.prepare import cast_to_known_types
from onnxgrad.passes.train_mode import SEED
from onnxgrad.schema import is_standard
from onnxgrad.tensor_types import Array
from onnxgrad.train.graphs import EvaluationGraph, StepGraph
from onnxgrad.train.losses import Total
from onnxgrad.train.optim import Optimizer
from onnxgrad.train.schedules import Constant, Schedule
from onnxgrad.train.trainer import Trainer
from onnxgrad.train.update_graph import Now, can_be_written, clipped, updated

KIND = "onnxgrad step 1"
UPDATES, LEARNING_RATE = "updates", "learning_rate"


class StepFiles(NamedTuple):
    """The files of a training step, side by side."""

    step: Path  # inputs: batch, learning rate, state; outputs: loss, state after the update
    evaluation: Path  # inputs: batch, parameters, statistics; outputs: loss, predictions
    model: Path  # the model itself, in inference mode, whose weights can be written over in place
    initial: Path  # the state to begin with, a safetensors file
    description: Path  # JSON that says which output feeds which input


def export_step(
    model: Any,
    path: str | Path,
    loss: Total | str | None = None,
    optimizer: Optimizer | None = None,
    trainable: Any = None,
    **settings: Any,
) -> StepFiles:
    """Writes a training step as plain ONNX: any onnxruntime runs it, on phones, in browsers, in any language.

    - `model`: a Trainer, whose settings and current state the files get, or a model as a Trainer takes it, with `loss`,
      `optimizer`, `trainable` and other `settings` of the Trainer.
    - `path`: the file of the step. The others are written next to it: `step.onnx`, `step.eval.onnx`, `step.model.onnx`,
      `step.safetensors` and `step.json`.

    The inputs of the step are the batch, the learning rate and the state: parameters, running statistics, the arrays of
    the optimizer, and the number of updates. Its outputs are the loss and the state after the update, which is the
    input of the next step. Dropout, clipping and the schedule are nodes of the graph. The losses are those of the
    Trainer.
    """
    path = Path(path)
    expect_place(path)
    names = files_of(path)
    trainer = _trainer_of(model, loss, optimizer, trainable, settings)
    source = trainer.source_path
    if source is not None and any(file.resolve() == source.resolve() for file in names):
        raise ValueError(f"export_step: {str(source)!r} is the model itself, expected the name of another file")
    step, evaluation = trainer.plain_graphs()
    state = _State(trainer, step)
    state.write()
    with replaced_together(path) as folder:
        files = {
            "step": _saved(_standard(step.model), folder / names.step.name),
            "evaluation": _saved(_standard(evaluation.model), folder / names.evaluation.name),
            "model": trainer.export(folder / names.model.name),
        }
        apart = {which: [file.name for file in written[1:]] for which, written in files.items() if written[1:]}
        (folder / names.initial.name).write_bytes(serialize(state.initial, {"kind": KIND}))
        description = _description(names, trainer, step, evaluation, state, weights_at(folder / names.model.name))
        description |= {"external_data": apart} if apart else {}
        (folder / names.description.name).write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")
    return names


def _trainer_of(model: Any, loss: Any, optimizer: Any, trainable: Any, settings: Mapping[str, Any]) -> Trainer:
    if not isinstance(model, Trainer):
        if loss is None or optimizer is None:
            raise TypeError("export_step: a model needs a loss and an optimizer; only a Trainer brings its own")
        trainer = Trainer(model, loss, optimizer, trainable, **settings)
    elif loss is not None or optimizer is not None or trainable is not None or settings:
        raise TypeError("export_step: a Trainer has its own loss, optimizer and settings: pass none with it")
    else:
        trainer = model
    for what, is_other in (
        ("accumulate", trainer.accumulate != 1),
        ("precision", trainer.precision != "float32"),
        ("communicator", trainer.ranks.size != 1),
        ("ema", trainer.ema is not None),
    ):
        if is_other:
            raise ValueError(f"export_step: a step as a file has no {what}: make the trainer without it")
    if not can_be_written(trainer.optimizer):
        raise ValueError(
            f"export_step: {trainer.optimizer.name} has no form for graphs, expected an optimizer of onnxgrad.optim"
        )
    if not isinstance(trainer.schedule, Schedule):
        raise ValueError(
            "export_step: the schedule is a function of Python, which a graph cannot call: leave it out, and give each "
            f"step its {LEARNING_RATE}, or take one of onnxgrad.schedules"
        )
    return trainer


def files_of(path: Path) -> StepFiles:
    """The files of a step at a path."""
    return StepFiles(path, *(path.with_suffix(s) for s in (".eval.onnx", ".model.onnx", ".safetensors", ".json")))


def _standard(model: ir.Model) -> ir.Model:
    """Our operators written out by standard ones, with no functions left."""
    draft = Draft(model, "export_step")
    draft.run(
        [add_own_functions, _inline, drop_dead, infer, cast_to_known_types, fold_shapes, drop_identities, drop_dead]
    )
    used = {"" if is_standard(node.domain) else node.domain for node in draft.graph.all_nodes()}
    for domain in [d for d in draft.graph.opset_imports if d and d not in used]:
        del draft.graph.opset_imports[domain]
    return draft.model  # type: ignore[no-any-return]


def _saved(model: ir.Model, path: Path) -> list[Path]:
    """Weights that came in files of their own go into one beside the model."""
    return save(model, path, None if weight_files(model) else path)


def _inline(draft: Draft) -> None:
    draft.model = common.InlinePass()(draft.model).model


class _State:
    """What a step reads and writes: inputs, the outputs that are their next values, and the values to begin with."""

    def __init__(self, trainer: Trainer, step: StepGraph) -> None:
        self._trainer, self._step, self._graph = trainer, step, step.model.graph
        self.builder = Builder(self._graph)
        self._inputs = {str(v.name): v for v in self._graph.inputs}
        self.following: dict[str, str] = {}  # outputs, by input
        self.kinds: dict[str, str] = {}  # of the inputs
        self.initial: dict[str, Array] = {}
        self.learning_rate = ""

    def write(self) -> None:
        """Adds the update to the graph."""
        kept = {self._step.loss}
        for s in self._step.statistics:
            for now, then in zip(s.current, s.following, strict=True):
                self._keep("statistic", now, then, self._trainer.statistics[now])
                kept.add(then)
        gradients = {n: self._output(out) for n, out in self._step.gradients.items()}
        for value in [v for v in self._graph.outputs if v.name not in kept]:
            self._graph.outputs.remove(value)
        with self.builder.at_work("update"):
            count = self._counter()
            self._draw_seed(count)
            self._update(gradients, count)

    def _output(self, name: str) -> Tensor:
        return self.builder.tensor(next(v for v in self._graph.outputs if v.name == name))

    def _counter(self) -> Tensor:
        """The number of updates made, an input; its successor is an output."""
        given = self._new_input(UPDATES, ir.DataType.INT64, [])
        array = np.array(self._trainer.steps, np.int64)
        self._keep("counter", str(given.value.name), self._new_output(given + 1, given), array)
        return given

    def _draw_seed(self, count: Tensor) -> None:
        """What Dropout drops follows from the number of the batch, as in the trainer."""
        seed = self._inputs.get(SEED)
        if seed is None:
            return
        made = op.Reshape(batch_seed(op, self._trainer.seed, count), [1])
        seed.replace_all_uses_with(made.value)
        self._graph.inputs.remove(seed)
        self._graph.sort()

    def _update(self, gradients: Mapping[str, Tensor], count: Tensor) -> None:
        trainer, optimizer = self._trainer, self._trainer.optimizer
        rate = self._new_input(LEARNING_RATE, ir.DataType.FLOAT, [])
        self.learning_rate = str(rate.value.name)
        done = op.Cast(count, to=ir.DataType.DOUBLE)
        base = op.Cast(rate, to=ir.DataType.DOUBLE)
        if trainer.schedule != Constant():
            base = base * trainer.schedule.factor_at(done)
        limited = clipped(list(gradients.values()), *trainer.clipping)
        arrays = trainer.optimizer_arrays()
        for name, g in zip(gradients, limited, strict=True):
            p = self.builder.tensor(self._inputs[name])
            slots = {slot: self._new_input(f"{name}.{slot}", p.dtype, p.value.shape) for slot in arrays}
            numbers = trainer.numbers_of(name)
            scaled = base * (numbers["lr"] / optimizer.lr) if optimizer.lr else base
            hyper = [
                op.CastLike(x, p) if isinstance(x, Tensor) else x for x in optimizer.hyper(numbers, scaled, done + 1)
            ]
            after, slots_after = updated(optimizer, Now(p, g, slots, hyper, numbers, count.equals(0)))
            self._keep("parameter", name, self._new_output(after, p), trainer.parameters[name])
            for slot, given in slots.items():
                then = self._new_output(slots_after[slot], given)
                self._keep(slot, str(given.value.name), then, arrays[slot][name])

    def _new_input(self, name: str, dtype: ir.DataType, shape: Any) -> Tensor:
        value = ir.Value(name=self.builder.fresh_value_name(name), type=ir.TensorType(dtype), shape=ir.Shape(shape))
        self._graph.inputs.append(value)
        return self.builder.tensor(value)

    def _new_output(self, tensor: Tensor, given: Tensor) -> str:
        """An output for the next value of an input."""
        value = self.builder.apart(tensor).value  # the update may leave a slot as it is
        value.name = self.builder.fresh_value_name(f"{given.value.name}_next")
        value.type, value.shape = given.value.type, given.value.shape
        self._graph.outputs.append(value)
        return str(value.name)

    def _keep(self, kind: str, name: str, following: str, array: Any) -> None:
        self.following[name], self.kinds[name] = following, kind
        self.initial[name] = np.array(self._trainer.on_host(array))


def _description(
    names: StepFiles,
    trainer: Trainer,
    step: StepGraph,
    evaluation: EvaluationGraph,
    state: _State,
    places: Mapping[str, Any],
) -> dict[str, Any]:
    """What a program has to know to run the files."""
    inputs = {str(v.name): v for v in step.model.graph.inputs}
    batch = [v for n, v in inputs.items() if n not in state.following and n != state.learning_rate]
    entries = []
    for name, following in state.following.items():
        value = inputs[name]
        entry = {"input": name, "output": following, "kind": state.kinds[name], **_described(value)}
        place = places.get(name)
        if place is not None and place[1].length == state.initial[name].nbytes:
            file, where = place
            entry["in_model"] = {"file": file, "offset": where.offset, "bytes": where.length}
        entries.append(entry)
    return {
        "kind": KIND,
        "files": {field: getattr(names, field).name for field in StepFiles._fields if field != "description"},
        "batch": [{"input": str(v.name), **_described(v)} for v in batch],
        "learning_rate": {"input": state.learning_rate, "default": trainer.optimizer.lr},
        "loss": step.loss,
        "state": entries,
        "evaluation": {
            "loss": evaluation.loss,
            "predictions": evaluation.predictions,
            "state": [str(v.name) for v in evaluation.model.graph.inputs if v.name in state.following],
        },
    }


def _described(value: ir.Value) -> dict[str, Any]:
    assert value.dtype is not None
    shape = [] if value.shape is None else [d if isinstance(d, int) else str(d.value or "?") for d in value.shape]
    return {"type": value.dtype.numpy().name, "shape": shape}
