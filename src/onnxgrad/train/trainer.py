"""Trainer: trains an ONNX model with a loss and an optimizer, in stock onnxruntime."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.cpu.core.memory import give_back
from onnxgrad.graph.files import save
from onnxgrad.graph.head import without_word
from onnxgrad.graph.tensor import dims_of
from onnxgrad.passes.draft import Draft, without_garbage_collection
from onnxgrad.passes.put_back import put_back
from onnxgrad.tensor_types import Array
from onnxgrad.train.batches import Batches
from onnxgrad.train.callbacks import Callback, Callbacks
from onnxgrad.train.checkpoint import write_checkpoint
from onnxgrad.train.devices import device_of
from onnxgrad.train.distributed.ranks import Ranks, ranks_of
from onnxgrad.train.distributed.sharding import BatchSlicer
from onnxgrad.train.evaluation import Evaluation, Metric, expect_evaluable
from onnxgrad.train.find_lr import LearningRates, epoch_of, expect_range, find_lr
from onnxgrad.train.fitting import FitOptions, Log, Position, Record, TrainingStoppedError, fit
from onnxgrad.train.graphs import EvaluationGraph, Selection, StepGraph
from onnxgrad.train.layers import depths, factors
from onnxgrad.train.loss_scale import LossScale
from onnxgrad.train.losses import Total
from onnxgrad.train.optim import Optimizer
from onnxgrad.train.schedules import Constant, Schedule
from onnxgrad.train.session import Session
from onnxgrad.train.step_runner import StepRunner, UpdateOptions
from onnxgrad.train.target_checker import TargetChecker
from onnxgrad.train.trained_model import StepOptions, TrainedModel
from onnxgrad.train.training_state import TrainingState


class Trainer:
    """Trains a model in onnxruntime, and exports it.

    - `model`: a path, an onnx.ModelProto or an onnx_ir.Model; it is not changed.
    - `loss`: one of onnxgrad.losses, a sum of them, or the name of a value of the model that is the loss.
    - `optimizer`: one of onnxgrad.optim.
    - `trainable`: names or patterns of the weights to train; by default all parameters, as `onnxgrad inspect` shows
      them. "head" stands for the weights that replace_head() made.
    - `freeze`: names or patterns of parameters to keep unchanged. A BatchNormalization whose statistics match
      normalizes with them; with `freeze_statistics` so does one whose weights are not trained.
    - `device`: "cpu", or "cuda", where everything stays on the GPU.
    - `precision`: "float32"; "bf16" for matrix products in bfloat16 (on a GPU also convolutions), faster on GPUs and on
      processors with AVX512-BF16; "fp16" for GPUs, with a loss scale: an update whose gradients overflow is skipped and
      counted in `skipped`. Parameters, optimizer state, norms, softmax, sums and losses stay float32, and so does
      evaluate().
    - `recompute`: saves memory by computing values again in the backward pass. With True, a Loop or Scan of n steps
      keeps about √n of its states; with "blocks", or patterns of the names of nodes or scopes, the rest of the model is
      recomputed too. The losses stay the same.
    - `schedule`: one of onnxgrad.schedules, or any function from the number of updates to a factor of the learning
      rate.
    - `clip_norm`, `clip_value`: the maximum norm of the whole gradient, and the maximum absolute value of its elements.
    - `accumulate`: the number of batches whose gradients are averaged for one update.
    - `seed`: of the choices of Dropout.
    - `ema`: the decay, such as 0.999, of a moving average of the parameters, which evaluate() and export() use.
    - `layer_decay`: a factor that multiplies the learning rate once for each layer between a parameter and the end of
      the model, so that the first layers change the least.
    - `communicator`: of mpi4py, or a process group of torch.distributed. Its processes train together, each on a slice
      of every batch, with the results of a single process. All call every method, and only the first writes and prints.
    - `shard_optimizer`: each process keeps and updates only its shard of the optimizer state.

    `parameters`, `gradients` and `statistics` (running means and variances) are the arrays of the trainer by name: of
    NumPy on the CPU, of torch on a GPU; `shapes` are those of the parameters. `averages` are those of `ema`. `remarks`
    are sentences about how this model is trained, which fit() prints before it starts. Weights of half types are
    trained in float32, and exported in their own type.
    """

    def __init__(
        self,
        model: Any,
        loss: Total | str,
        optimizer: Optimizer,
        trainable: str | Sequence[str] | None = None,
        *,
        freeze: str | Sequence[str] = (),
        freeze_statistics: bool = False,
        device: str = "cpu",
        precision: str = "float32",
        recompute: bool | str | Sequence[str] = False,
        schedule: Schedule | None = None,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        accumulate: int = 1,
        seed: int = 0,
        ema: float | None = None,
        layer_decay: float | None = None,
        communicator: Any = None,
        shard_optimizer: bool = False,
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"Trainer: optimizer is a {type(optimizer).__name__}, expected one of onnxgrad.optim")
        if not isinstance(loss, (str, Total)):
            is_class = isinstance(loss, type)
            what = f"the class {loss.__name__}" if is_class else f"a {type(loss).__name__}"
            example = f"{loss.__name__ if is_class and issubclass(loss, Total) else 'MSE'}(…)"
            raise TypeError(
                f"Trainer: loss is {what}, expected one of onnxgrad.losses with an output's name, as {example}, or the "
                "name of a value that is the loss"
            )
        if schedule is not None and (isinstance(schedule, type) or not callable(schedule)):
            raise TypeError(
                f"Trainer: schedule is {schedule!r}, expected one of onnxgrad.schedules or a function of the number of "
                "updates"
            )
        if not isinstance(seed, (int, np.integer)):
            raise TypeError(f"Trainer: seed is {seed!r}, expected a whole number")
        if not isinstance(accumulate, (int, np.integer)) or accumulate < 1:
            raise ValueError(f"Trainer: accumulate is {accumulate!r}, expected a whole number of at least 1")
        for name, limit in (("clip_norm", clip_norm), ("clip_value", clip_value)):
            if limit is not None and not (isinstance(limit, (int, float, np.number)) and limit > 0):
                raise ValueError(f"Trainer: {name} is {limit!r}, expected a number above 0")
        if ema is not None and not 0 < ema < 1:
            raise ValueError(f"Trainer: ema is {ema!r}, expected a decay above 0 and under 1, such as 0.999")
        if layer_decay is not None and not 0 < layer_decay <= 1:
            raise ValueError(f"Trainer: layer_decay is {layer_decay!r}, expected a factor above 0 and at most 1")
        if not isinstance(recompute, bool) and not _are_names(recompute):
            raise TypeError(f"Trainer: recompute is {recompute!r}, expected True, 'blocks' or patterns of names")
        if shard_optimizer and communicator is None:
            raise ValueError("Trainer: shard_optimizer needs a communicator, whose processes shard the state")
        self.ranks = ranks = ranks_of(communicator)
        self._device = device_of(device, ranks.local_rank() if isinstance(ranks, Ranks) else None)
        if precision not in self._device.precisions:
            expected = " or ".join(map(repr, self._device.precisions))
            raise ValueError(f"Trainer: precision is {precision!r}, expected {expected} on the device {device!r}")
        self.precision, self.accumulate, self.ema = precision, accumulate, ema
        self.clipping = clip_norm, clip_value  # the bounds of the gradient's norm and of its numbers
        self.schedule = schedule or Constant()
        self._layer_decay = layer_decay
        self._said = 0  # remarks that fit() has printed
        self._evaluation: Any = None
        self._position: Position | None = None  # of a fit() at work, or of one that a checkpoint was saved by
        self._callbacks: Callbacks | None = None  # of a fit() at work
        self._callback_states: dict[str, Any] = {}  # of one that a checkpoint was saved by
        self._slicer = BatchSlicer(ranks, loss) if isinstance(ranks, Ranks) else None
        selection = Selection(trainable, freeze, freeze_statistics)
        group = ranks.group if isinstance(ranks, Ranks) else None
        own_products, on_cpu = all(ranks.all_gather(self._device.own_products)), device == "cpu"
        options = StepOptions(loss, selection, group, own_products, on_cpu, precision, recompute)
        self._model = TrainedModel(model, options)
        with without_garbage_collection():
            prepared = self._model.prepare(splits_batches=self._slicer is not None)
            self.optimizer = _for_head(optimizer, prepared)
            weights = {name: value.const_value for name, value in prepared.graph.initializers.items()}
            layers = None if layer_decay is None else depths(prepared.graph)
            self._model.make_graphs(prepared)
            self.remarks = self._model.remarks
            self._state = TrainingState(
                self._model.step, weights, self.optimizer, self._device, ranks, shard_optimizer=shard_optimizer,
                rates=None if layers is None else self._rates_of(layers), ema=ema, accumulate=accumulate, seed=seed,
                scale=LossScale() if precision == "fp16" else None,
            )  # fmt: skip
            self._open_sessions()
        if isinstance(ranks, Ranks):
            ranks.expect_same(self._facts(shard_optimizer))
        self._state.start()
        give_back()  # the graphs and weights that all this was made from

    def _open_sessions(self) -> None:
        """Of the step, at once; of the evaluation, when it is needed."""
        state, evaluated, loss = self._state, self._model.evaluation, self._model.options.loss
        shapes = {str(v.name): dims_of(v) for v in evaluated.model.graph.outputs}
        parts = () if isinstance(loss, str) else loss.parts
        validate = TargetChecker([(part, shapes[part.prediction]) for part in parts])
        options = UpdateOptions(self._rate, *self.clipping, self.accumulate)
        self._runner = StepRunner(self._model.step, state, options, validate, self._slicer)
        averages = {} if state.average is None else state.buffers.views(state.average)
        used = {str(v.name) for v in evaluated.model.graph.inputs}
        changed = {**state.parameters, **state.statistics, **averages}
        inputs = {name: array for name, array in changed.items() if name in used}
        open_session = functools.partial(Session, evaluated.model, inputs, {}, self._device, validate)
        if self._evaluation is not None:
            self._evaluation.use(evaluated, open_session)
            return
        targets = [part.target for part in parts]
        self._evaluation = Evaluation(evaluated, open_session, self._device, targets, self.ranks, self.skips)

    def _rate(self, steps: int) -> float:
        """The factor of the learning rate; find_lr() changes the schedule."""
        return self.schedule(steps)

    def _rates_of(self, layers: Mapping[str, int]) -> dict[str, float]:
        """The factor of the learning rate of each parameter, and a remark about them."""
        assert self._layer_decay is not None
        found = factors(layers, self._model.step.gradients, self._layer_decay)
        first = min(found, key=lambda name: found[name])
        last = max(reversed(found), key=lambda name: found[name])
        self.remarks.append(
            f"layer decay: {len(set(found.values()))} layers; {first!r} has {found[first]:.3g} of the learning rate, "
            f"{last!r} has {found[last]:.3g} of it"
        )
        return found

    def _facts(self, shard_optimizer: bool) -> list[tuple[str, Any]]:
        """What has to be the same on all ranks."""
        names = ("optimizer", "schedule", "seed", "ema", "accumulate", "precision")
        clip_norm, clip_value = self.clipping
        given = {
            **{name: getattr(self, name) for name in names}, "layer_decay": self._layer_decay, "clip_norm": clip_norm,
            "clip_value": clip_value, "shard_optimizer": shard_optimizer,
        }  # fmt: skip
        parameters = [(f"the parameter {p.name!r}", p.shape) for p in self._state.buffers.slices]
        nodes = [(f"the node {node.name!r}", node.op_type) for node in self._model.step.model.graph]
        return [*given.items(), *parameters, *nodes]

    def skips(self, batch: Any) -> bool:
        """Whether fit() and evaluate() leave a batch out: a last one that is smaller than all that the model takes.

        If the model was exported for batches of another size, its first dimension is freed, if possible.
        """
        size = self._model.fixed
        if size is None or not isinstance(batch, Mapping):
            return False
        dims = self._runner.session.dims
        fixed = [np.shape(array) for n, array in batch.items() if list(dims.get(n, ())[:1]) == [size]]
        if self._model.may_be_freed and any(shape[:1] != (size,) for shape in fixed):
            self._free_batch()
        return self._model.fixed is not None and any(0 < (*shape, size)[0] < size for shape in fixed)

    def _free_batch(self) -> None:
        """Makes all graphs and sessions anew, for batches of any size, if that is possible."""
        self._runner.settle()
        if self._model.free_batch():
            self._open_sessions()

    def expect_sizes(self, *given: Any) -> list[Batches]:
        """Raises one sentence if the model does not take the size of some Batches; returns those to be cut."""
        found = [b for b in given if isinstance(b, Batches) and not b.is_changed]
        if self._model.may_be_freed and any({b.size, b.last} != {self._model.fixed} for b in found):
            self._free_batch()
        size = self._model.fixed
        if size is None:
            return []
        for batches in found:
            if batches.size != size or batches.examples < batches.size:
                raise ValueError(
                    f"fit: the model takes batches of {size} only, not {min(batches.size, batches.examples)}: "
                    f"give it Batches of {size} (--batch-size), or export it with a free first dimension"
                )
        return [b for b in found if b.last != b.size]

    @contextlib.contextmanager
    def _whole_batches(self, *given: Any) -> Iterator[None]:
        """Within it Batches yield only batches that the model takes."""
        cut = self.expect_sizes(*given)
        for batches in cut:
            what = "training" if batches is given[0] else "validation"
            self.remarks.append(
                f"{what} leaves out the last {batches.last} of {batches.examples} examples in every epoch: the model "
                f"takes batches of {self._model.fixed} only"
            )
            batches.drop_last = True
        try:
            yield
        finally:
            for batches in cut:
                batches.drop_last = False

    def plain_graphs(self) -> tuple[StepGraph, EvaluationGraph]:
        """The graphs of a step and an evaluation as they are for any device, with none of ours in particular."""
        return self._model.plain_graphs()

    @property
    def source_path(self) -> Path | None:
        """The file of the model, if it came from one."""
        return self._model.path

    def numbers_of(self, name: str) -> dict[str, Any]:
        """The optimizer's settings for a parameter."""
        return self._state.optimizer.numbers_of[name]

    def optimizer_arrays(self) -> dict[str, dict[str, Any]]:
        """The optimizer's arrays, by slot and parameter."""
        return {slot: self._state.buffers.views(array) for slot, array in self._state.optimizer.slots.items()}

    @property
    def parameters(self) -> dict[str, Any]:
        """The trained parameters by name: the trainer's own arrays, to read and write.

        After the first use, each step in half precision on a GPU casts all of them, since they may have been changed.
        """
        self._state.buffers.is_shared = True
        return self._state.parameters

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the trained parameters, by name."""
        return {part.name: part.shape for part in self._state.buffers.slices}

    @property
    def gradients(self) -> dict[str, Any]:
        """The gradients of the last step, by parameter."""
        return self._state.gradients

    @property
    def statistics(self) -> dict[str, Any]:
        """Running means and variances, by name."""
        return self._state.statistics

    @property
    def seed(self) -> int:
        """The seed that determines the choices of Dropout."""
        return self._state.seed

    @property
    def steps(self) -> int:
        """The number of updates so far."""
        return self._state.optimizer.steps

    @property
    def skipped(self) -> int:
        """The number of updates skipped because fp16 gradients overflowed."""
        return self._state.skipped

    @property
    def averages(self) -> dict[str, Any]:
        """The moving averages of `ema`, by name; empty without it."""
        self._runner.settle()
        return self._state.averages()

    @property
    def peak_memory(self) -> int:
        """The peak memory of this process in bytes; on a GPU, the memory in use by all processes."""
        return self._device.peak_memory()

    @property
    def gradient_norm(self) -> float:
        """The norm of the last update's gradient, before clipping."""
        self._runner.settle()
        return self._state.norm

    def gradient_norms(self) -> dict[str, float]:
        """Returns the norm of each parameter's gradient in the last update, before clipping; all ranks must call it."""
        self._runner.settle()
        return self._state.gradient_norms()

    def unsaid_remarks(self) -> list[str]:
        """The remarks that fit() has not printed yet."""
        unsaid, self._said = self.remarks[self._said :], len(self.remarks)
        return unsaid

    def step(self, batch: Mapping[str, Any]) -> float:
        """Runs a batch and, after `accumulate` batches, updates the parameters; returns the loss before the update.

        On a GPU it may return before the step has finished: the loss behaves like a number, and waits when it is used.
        A loss or gradient that is not finite raises an error then, or in the next step; the parameters are those before
        the step.
        """
        self.skips(batch)
        with self.ranks.together():
            return self._runner.run(batch, self.remarks)

    def expect_no_drift(self) -> None:
        """Raises one sentence that names the first parameter that differs between processes, if any."""
        self._state.expect_no_drift()

    def evaluate(
        self, batches: Iterable[Mapping[str, Any]], metrics: Mapping[str, Metric] | None = None
    ) -> dict[str, Any]:
        """Returns the mean loss over batches in inference mode, as "loss", and the results of metrics.

        A metric is one of onnxgrad.metrics, computed over all batches together, or a function of the outputs and the
        batch, both dicts of arrays. The result of a function is the mean of its values, weighted by the number of
        examples, as for the loss.
        """
        expect_evaluable("evaluate", batches, metrics)
        with self.ranks.together():
            _ = self.averages  # gathered
        found: dict[str, Any] = self._evaluation(batches, metrics or {})
        return found

    def fit(
        self,
        batches: Iterable[Mapping[str, Any]],
        epochs: int = 1,
        *,
        validation: Iterable[Mapping[str, Any]] | None = None,
        metrics: Mapping[str, Metric] | None = None,
        quiet: bool = False,
        checkpoint: str | Path | None = None,
        save_every: int | None = None,
        log: Log | None = None,
        callbacks: Iterable[Callback] = (),
    ) -> list[Record]:
        """Trains for `epochs` epochs, with a progress bar unless `quiet`; returns a record for each epoch.

        - `batches`: any iterable of dicts of arrays by input name, iterated once per epoch.
        - `validation`, `metrics`: evaluated after every epoch, as evaluate() does.
        - `checkpoint`: a file to write after every epoch, and with `save_every` also after that many updates.
        - `log`: a function called with a dict for every update (event "step", epoch, step, loss, lr, gradient_norm,
          seconds) and for every epoch (event "epoch", epoch, step, loss, seconds, validation, peak_memory).
        - `callbacks`: of onnxgrad.callbacks; they may end training early.

        Ctrl-C and SIGTERM end training after the current step: the state is saved in `checkpoint`, or in
        onnxgrad-stopped.safetensors, and the KeyboardInterrupt names the file. If the loss is not finite, the last
        valid state is saved in the same way. A trainer that restores the file continues with the next batch of the
        epoch.
        """
        where = None if checkpoint is None else Path(checkpoint)
        log = log if self.ranks.is_first or getattr(log, "on_every_rank", False) else None
        together = Callbacks(callbacks, self.ranks)
        options = FitOptions(batches, epochs, validation, metrics, where, save_every, log, together)
        self.ranks.on_first(options.expect_place)
        with self._whole_batches(batches, validation):
            if validation is not None:
                self._evaluation.open()  # a graph that onnxruntime refuses raises before the first epoch, not after it
            self._position, self._callbacks = self._position or Position(), together
            try:
                with self.ranks.together():
                    return fit(self, options, self._position, self._callback_states, quiet)
            finally:
                self._position, self._callbacks, self._callback_states = None, None, {}

    def find_lr(
        self, batches: Iterable[Mapping[str, Any]], *, lowest: float = 1e-7, highest: float = 10.0, steps: int = 100
    ) -> LearningRates:
        """Tries `steps` learning rates from `lowest` to `highest`, one update each, and restores the trainer.

        Returns the rates, the loss at each of them, and as `suggestion` the rate at which the loss falls fastest. It
        stops before `highest` when the loss has grown to four times its minimum. Rates of groups change in proportion.
        """
        expect_range(lowest, highest, steps, self.optimizer.lr)
        with self.ranks.together(), self._whole_batches(batches), self._restoring(batches):
            return find_lr(self, batches, lowest, highest, steps)

    @contextlib.contextmanager
    def _restoring(self, batches: Any) -> Iterator[None]:
        """All that training changes is afterwards what it was, to the bit."""
        self._runner.settle()
        schedule, epoch = self.schedule, epoch_of(batches)
        try:
            with self._state.restoring():
                try:
                    yield
                finally:
                    with contextlib.suppress(TrainingStoppedError):
                        self._runner.settle()
        finally:
            self.schedule = schedule
            if epoch is not None:
                batches.epoch = epoch

    def save(self, path: str | Path) -> None:
        """Writes weights, statistics, optimizer state and the position of fit() into one safetensors file.

        The file at `path` is replaced atomically, when the new one is completely on the disk.
        """
        self._runner.settle()
        facts = {
            **self._state.facts(), "optimizer": self.optimizer.name, "ema": self.ema is not None,
            "place": None if self._position is None else asdict(self._position),
            "callbacks": self._callback_states if self._callbacks is None else self._callbacks.states(),
        }  # fmt: skip
        with self.ranks.together():
            self.ranks.meet()
            arrays = self._state.arrays()
            self.ranks.on_first(lambda: write_checkpoint(Path(path), self._on_host(arrays), facts))

    def _on_host(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        return {n: self.on_host(a) for n, a in arrays.items()}

    def on_host(self, array: Any) -> Array:
        """One of the trainer's arrays as NumPy's."""
        return array if isinstance(array, np.ndarray) else self._device.to_numpy(array)

    def restore(self, path: str | Path) -> None:
        """Restores the state of a file: training continues with the same numbers as an uninterrupted run.

        The number of processes may differ from that of the run that saved it.
        """
        self._runner.settle()
        expect = functools.partial(self._expect_facts, str(path))
        with self.ranks.together():
            slots = self._state.room_for_slots()
            facts = self.ranks.on_first(lambda: self._state.read(Path(path), slots, expect))
            self._position = None if facts["place"] is None else Position(**facts["place"])
            self._callback_states = facts.get("callbacks", {})
            self._state.use_facts(facts)
            self._state.share(slots)

    def _expect_facts(self, path: str, facts: Mapping[str, Any]) -> None:
        """Raises one sentence if a checkpoint is that of another training."""
        if facts["optimizer"] != self.optimizer.name:
            raise ValueError(f"{path!r} was written with the optimizer {facts['optimizer']}, not {self.optimizer.name}")
        if facts.get("ema", False) != (self.ema is not None):
            has, way = ("has no", "leave out ema") if self.ema is not None else ("has a", "set ema to its decay")
            raise ValueError(f"{path!r} {has} moving average of the parameters: {way}, or start anew")
        if facts["waiting"] >= self.accumulate:
            raise ValueError(f"{path!r} was saved between micro-batches: set accumulate to the number that it had")

    @classmethod
    def load(
        cls, path: str | Path, model: Any, loss: Total | str, optimizer: Optimizer, *args: Any, **kwargs: Any
    ) -> "Trainer":
        """Returns a trainer with the state of a file; model, loss and the rest are as for the trainer that saved it."""
        trainer = cls(model, loss, optimizer, *args, **kwargs)
        trainer.restore(path)
        return trainer

    def export(self, path: str | Path) -> list[Path]:
        """Writes the original model, in inference mode, with the trained weights; returns the written files.

        With `ema` the weights are their averages. External weights, and weights that are too large for the file of the
        model, go into a file next to it. Dropout stays, inactive, so that the model can be trained again. An existing
        file is replaced only after onnx and onnxruntime have accepted the new one.
        """
        return self.write(lambda model, arrays: _export(model, arrays, Path(path)))

    def write(self, writer: Callable[[ir.Model, dict[str, Array]], list[Path]]) -> list[Path]:
        """Has a function write files; it is given the original model and what training changed of it, by name."""
        self._runner.settle()
        with self.ranks.together():
            trained = self.averages or self._state.parameters
            found: list[Path] = self.ranks.on_first(lambda: writer(self._model.restored(), self._changed(trained)))
        return found

    def _changed(self, trained: Mapping[str, Any]) -> dict[str, Array]:
        return {name: self._device.to_numpy(a) for name, a in (*trained.items(), *self.statistics.items())}


def _export(model: ir.Model, arrays: dict[str, Array], path: Path) -> list[Path]:
    apart = any(isinstance(v.const_value, ir.ExternalTensor) for v in model.graph.initializers.values())
    put_back(model, arrays)
    return save(model, path, None if apart else path)


def _for_head(optimizer: Optimizer, prepared: Draft) -> Optimizer:
    """The optimizer, whose groups name the parameters of a new head instead of calling them `head`."""
    known = prepared.graph.initializers
    groups = {n: s for pattern, s in optimizer.groups.items() for n in without_word(prepared.model, pattern, known)}
    return optimizer if groups.keys() == optimizer.groups.keys() else replace(optimizer, groups=groups)


def _are_names(given: Any) -> bool:
    return isinstance(given, Sequence) and all(isinstance(name, str) for name in given)
