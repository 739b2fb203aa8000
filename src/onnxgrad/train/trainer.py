"""Trainer: trains an ONNX model with a loss and an optimizer, in stock onnxruntime."""

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.cpu.core.memory import give_back
from onnxgrad.graph.files import expect_weights, load, save
from onnxgrad.graph.head import without_word
from onnxgrad.ops.dropout import batch_seed
from onnxgrad.passes.batch_slice import PLACE, WEIGHTS
from onnxgrad.passes.draft import Draft, without_garbage_collection
from onnxgrad.passes.expand_ml import write_attributes
from onnxgrad.passes.free_batch import fixed_batch
from onnxgrad.passes.prepare import RESTORE, prepare_for_training
from onnxgrad.passes.store_integers import store_integers
from onnxgrad.passes.train_mode import SEED, to_inference_mode
from onnxgrad.tensor_types import Array
from onnxgrad.train.batch_dimension import with_free_batch
from onnxgrad.train.batches import Batches, LocalBatch, not_finite
from onnxgrad.train.buffers import Buffers, side_by_side
from onnxgrad.train.callbacks import Callback, Callbacks
from onnxgrad.train.checkpoint import check_arrays, read_checkpoint, write_checkpoint
from onnxgrad.train.devices import device_of
from onnxgrad.train.distributed.collectives import CHECK_EVERY, Collectives
from onnxgrad.train.distributed.ranks import Ranks, on_every_rank, ranks_of
from onnxgrad.train.distributed.sharding import BatchSlicer
from onnxgrad.train.evaluation import Evaluation, Metric
from onnxgrad.train.find_lr import LearningRates, epoch_of, expect_range, find_lr
from onnxgrad.train.fitting import FitOptions, Log, Position, Record, TrainingStoppedError, fit
from onnxgrad.train.frozen_weights import read_weights
from onnxgrad.train.graphs import LOSS_SCALE, EvaluationGraph, Selection, StepGraph, evaluation_graph, step_graph
from onnxgrad.train.layers import depths, factors
from onnxgrad.train.loss_scale import LossScale
from onnxgrad.train.losses import Loss, Total
from onnxgrad.train.optim import AVERAGE, Optimizer
from onnxgrad.train.pending_loss import PendingLoss, StepAhead
from onnxgrad.train.schedules import Constant, Schedule
from onnxgrad.train.session import Session


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
    NumPy on the CPU, of torch on a GPU. `averages` are those of `ema`. `remarks` are sentences about how this model is
    trained, which fit() prints before it starts. Weights of half types are trained in float32, and exported in their
    own type.
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
        if accumulate < 1:
            raise ValueError(f"Trainer: accumulate is {accumulate}, expected at least 1")
        for name, limit in (("clip_norm", clip_norm), ("clip_value", clip_value)):
            if limit is not None and not limit > 0:
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
        self.precision = precision
        self._scale = LossScale() if precision == "fp16" else None
        self.skipped = 0  # updates that fp16 gradients were too large for
        self._source = Path(model).absolute() if isinstance(model, (str, Path)) else model
        self.optimizer, self.schedule = optimizer, schedule or Constant()
        self._clip_norm, self._clip_value, self.accumulate = clip_norm, clip_value, accumulate
        self.seed, self._batches = seed, 0
        self.ema, self._layer_decay = ema, layer_decay
        self._norm = 0.0  # of the last update's gradient that is known, before clipping
        self._ahead: StepAhead | None = None  # a step that a GPU may still be at
        self._said = 0  # remarks that fit() has printed
        self._evaluation: Any = None
        self._position: Position | None = None  # of a fit() at work, or of one that a checkpoint was saved by
        self._callbacks: Callbacks | None = None  # of a fit() at work
        self._callback_states: dict[str, Any] = {}  # of one that a checkpoint was saved by
        self._slicer = BatchSlicer(ranks, loss) if isinstance(ranks, Ranks) else None
        use_amx = all(ranks.all_gather(self._device.has_amx))
        group = ranks.group if isinstance(ranks, Ranks) else None
        with without_garbage_collection():
            prepared = prepare_for_training(self._load(), "Trainer")
            self.optimizer = _for_head(optimizer, prepared)
            self._fixed = fixed_batch(prepared.graph)  # the only size of batches that the sessions take, if any
            self._may_be_freed = self._fixed is not None
            self._freed_from: int | None = None  # the size of batches that the file has
            # Nobody wants to train on single examples. Others may want just the size that the model has: it is faster.
            if self._fixed == 1 or self._slicer is not None:
                prepared = self._freed(prepared)
            weights = {name: value.const_value for name, value in prepared.graph.initializers.items()}
            self._how = (
                loss,
                Selection(trainable, freeze, freeze_statistics),
                group,
                use_amx,
                device == "cpu",
                precision,
                recompute,
            )
            layers = None if layer_decay is None else depths(prepared.graph)
            evaluated = self._make_graphs(prepared)
            self.remarks: list[str] = prepared.remarks
            rates = None if layers is None else self._rates_of(layers)
            self._make_arrays(weights, shard_optimizer, rates)
            self._make_sessions(evaluated, loss)
        if self._collectives is not None:
            self._collectives.ranks.expect_same(self._facts())
            self._collectives.broadcast([self._buffers.data, *self.statistics.values()])
        self._state.start_average()
        give_back()  # the graphs and weights that all this was made from

    def _make_graphs(self, prepared: Draft) -> EvaluationGraph:
        """Makes the graph of a step, and that of an evaluation."""
        inference = prepared.clone()
        self._step = step_graph(prepared, *self._how)
        loss, _, _, _, on_cpu, _, _ = self._how
        evaluated = evaluation_graph(inference, loss, self._step, on_cpu)
        read_weights(self._step.model, evaluated.model)
        return evaluated

    def _freed(self, prepared: Draft) -> Draft:
        """The model for batches of any size, if examples do not depend on their batch; its last remark says so."""
        if self._fixed is None:
            return prepared
        size, self._may_be_freed = self._fixed, False
        freed = with_free_batch(prepared, size)
        if freed is None:
            prepared.remarks.append(
                f"the model was exported for batches of {size}, and depends on that: batches of other sizes are refused"
            )
            return prepared
        self._fixed, self._freed_from = None, size
        freed.remarks.append(
            f"the model was exported for batches of {size}, but nothing in it depends on that: it takes any size"
        )
        return freed

    def skips(self, batch: Any) -> bool:
        """Whether fit() and evaluate() leave a batch out: a last one that is smaller than all that the model takes.

        If the model was exported for batches of another size, its first dimension is freed, if possible.
        """
        if self._fixed is None or not isinstance(batch, Mapping):
            return False
        dims = self._step_session.dims
        fixed = [np.shape(array) for n, array in batch.items() if list(dims.get(n, ())[:1]) == [self._fixed]]
        if self._may_be_freed and any(shape[:1] != (self._fixed,) for shape in fixed):
            self._free_batch()
        return self._fixed is not None and any(0 < (*shape, self._fixed)[0] < self._fixed for shape in fixed)

    def _free_batch(self) -> None:
        """Makes all graphs and sessions anew, for batches of any size, if that is possible."""
        with without_garbage_collection():
            prepared = self._freed(prepare_for_training(self._load(), "Trainer"))
            self.remarks.append(prepared.remarks[-1])
            if self._fixed is None:
                self._make_sessions(self._make_graphs(prepared), self._how[0])
        give_back()

    def expect_sizes(self, *given: Any) -> list[Batches]:
        """Raises one sentence if the model does not take the size of some Batches; returns those to be cut."""
        found = [b for b in given if isinstance(b, Batches) and not b.is_changed]
        if self._may_be_freed and any({b.size, b.last} != {self._fixed} for b in found):
            self._free_batch()
        if self._fixed is None:
            return []
        for batches in found:
            if batches.size != self._fixed or batches.examples < batches.size:
                raise ValueError(
                    f"fit: the model takes batches of {self._fixed} only, not {min(batches.size, batches.examples)}: "
                    f"give it Batches of {self._fixed} (--batch-size), or export it with a free first dimension"
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
                f"takes batches of {self._fixed} only"
            )
            batches.drop_last = True
        try:
            yield
        finally:
            for batches in cut:
                batches.drop_last = False

    def plain_graphs(self) -> tuple[StepGraph, EvaluationGraph]:
        """The graphs of a step and an evaluation as they are for any device, with none of ours in particular."""
        with without_garbage_collection():
            prepared = prepare_for_training(self._load(), "Trainer")
            if self._freed_from is not None:
                prepared = with_free_batch(prepared, self._freed_from) or prepared
            inference = prepared.clone()
            loss, selection, *_ = self._how
            step = step_graph(prepared, loss, selection)
            return step, evaluation_graph(inference, loss, step)

    @property
    def clipping(self) -> tuple[float | None, float | None]:
        """The bounds of the gradient's norm and of its numbers."""
        return self._clip_norm, self._clip_value

    @property
    def source_path(self) -> Path | None:
        """The file of the model, if it came from one."""
        return self._source if isinstance(self._source, Path) else None

    def numbers_of(self, name: str) -> dict[str, Any]:
        """The optimizer's settings for a parameter."""
        return self._state.numbers_of[name]

    def optimizer_arrays(self) -> dict[str, dict[str, Any]]:
        """What the optimizer keeps for every parameter, by slot and parameter."""
        return {slot: self._buffers.views(array) for slot, array in self._state.slots.items()}

    def _load(self) -> ir.Model:
        """The original model."""
        model = load(self._source, "Trainer")
        expect_weights(model, "Trainer")
        return model

    def _rates_of(self, layers: Mapping[str, int]) -> dict[str, float]:
        """The factor of the learning rate of each parameter, and a remark about them."""
        assert self._layer_decay is not None
        found = factors(layers, self._step.gradients, self._layer_decay)
        first = min(found, key=lambda name: found[name])
        last = max(reversed(found), key=lambda name: found[name])
        self.remarks.append(
            f"layer decay: {len(set(found.values()))} layers; {first!r} has {found[first]:.3g} of the learning rate, "
            f"{last!r} has {found[last]:.3g} of it"
        )
        return found

    def _facts(self) -> list[tuple[str, Any]]:
        """What has to be the same on all ranks."""
        names = ("optimizer", "schedule", "seed", "ema", "_layer_decay", "_clip_norm", "_clip_value", "accumulate",
                 "precision")  # fmt: skip
        parameters = [(f"the parameter {p.name!r}", p.shape) for p in self._buffers.slices]
        nodes = [(f"the node {node.name!r}", node.op_type) for node in self._step.model.graph]
        shards = ("shard_optimizer", self._collectives is not None and self._collectives.shards_optimizer)
        return [*((name.lstrip("_"), getattr(self, name)) for name in names), shards, *parameters, *nodes]

    def _make_arrays(
        self, weights: Mapping[str, Any], shard_optimizer: bool, rates: Mapping[str, float] | None
    ) -> None:
        shapes = {name: tuple(weights[name].shape.numpy()) for name in self._step.gradients}
        if not shapes:
            raise ValueError("Trainer: the model has no parameters to train")
        self._buffers = Buffers(shapes, self._step.dtype.numpy(), self._device, self.ranks.size)
        self.parameters = self._buffers.views(self._buffers.data)
        for name, array in self.parameters.items():
            self._device.copy(array, weights[name].numpy().astype(self._buffers.dtype, copy=False))
        self.gradients = self._buffers.views(self._buffers.grad)
        ranks = self.ranks if isinstance(self.ranks, Ranks) else None
        self._state = self.optimizer.start(self._buffers, ranks if shard_optimizer else None, rates, self.ema)
        # The average of all parameters, as the evaluation reads it; where ranks have a shard each, gathered before.
        average = self._state.slots.get(AVERAGE)
        self._average = self._buffers.new() if average is not None and shard_optimizer else average
        self._collectives = None if ranks is None else Collectives(ranks, self._buffers, self._device, self._state)
        pairs = [pair for s in self._step.statistics for pair in zip(s.current, s.following, strict=True)]
        self._current, self.statistics = side_by_side({now: weights[now].numpy() for now, _ in pairs}, self._device)
        # What the statistics are after a step.
        self._next, self._following = side_by_side({then: weights[now].numpy() for now, then in pairs}, self._device)
        self._unread = {
            s.unread: self._device.from_numpy(weights[s.current[1]].numpy())
            for s in self._step.statistics
            if s.unread is not None
        }
        # Gradients of several micro-batches are added up here; a single one is used where it is.
        self._total = self._buffers.new() if self.accumulate > 1 else None
        self._waiting = 0  # micro-batches in it
        self._sums = self._device.zeros(len(self._state.chunks), np.float64)

    def _make_sessions(self, evaluated: EvaluationGraph, loss: Total | str) -> None:
        step, gradients = self._step, self.gradients
        self._seed = self._device.zeros(1, np.int64)  # of the batch at hand
        changed = {**self.parameters, **self.statistics}
        self._loss_scale = self._device.zeros(1, np.float32).reshape(())
        inputs = {**changed, **({SEED: self._seed} if step.drops else {})}
        inputs |= {LOSS_SCALE: self._loss_scale} if step.scales else {}
        self._narrow: Any = None  # all parameters in a half type, as they are at the beginning of a step
        if step.narrow:
            kind = next(iter(step.narrow.values())).dtype
            assert kind is not None
            self._narrow = self._device.zeros(self._buffers.length, kind.numpy())
            views = self._buffers.views(self._narrow)
            inputs |= {str(value.name): views[name] for name, value in step.narrow.items()}
        if self._slicer is not None:
            given = {WEIGHTS: self._slicer.weights, PLACE: self._slicer.place}
            used = {str(v.name) for v in step.model.graph.inputs}
            inputs |= {name: array for name, array in given.items() if name in used}
        self._loss = self._device.zeros(1, _type_of_output(step.model, step.loss)).reshape(())
        outputs = {step.loss: self._loss, **{out: gradients[n] for n, out in step.gradients.items()}}
        outputs |= self._following | self._unread
        shapes = {str(v.name): None if v.shape is None else list(v.shape) for v in evaluated.model.graph.outputs}
        parts = () if isinstance(loss, str) else loss.parts
        predicted = [(part, shapes[part.prediction]) for part in parts]
        validate = functools.partial(_expect_classes, predicted)
        self._step_session = Session(step.model, inputs, outputs, self._device, validate, capture=True)
        self._is_first = True  # whether it has not run yet
        used = {str(v.name) for v in evaluated.model.graph.inputs}
        evaluated_with = changed if self._average is None else {**changed, **self._buffers.views(self._average)}
        inputs = {name: array for name, array in evaluated_with.items() if name in used}
        open_session = functools.partial(Session, evaluated.model, inputs, {}, self._device, validate)
        targets = [] if isinstance(loss, str) else [part.target for part in loss.parts]
        if self._evaluation is not None:
            self._evaluation.use(evaluated, open_session)
            return
        self._evaluation = Evaluation(evaluated, open_session, self._device, targets, self.ranks, self.skips)

    @property
    def steps(self) -> int:
        """Updates made."""
        return self._state.steps

    @property
    def averages(self) -> dict[str, Any]:
        """The moving averages of `ema`, by name; empty without it."""
        self._settle()
        if self._average is None:
            return {}
        if self._collectives is not None and self._collectives.shards_optimizer:
            self.ranks.meet()
            self._collectives.all_gather_slot(self._state.slots[AVERAGE], self._average)
        return self._buffers.views(self._average)

    @property
    def peak_memory(self) -> int:
        """Bytes: the most that this process has held so far; on a GPU, what is taken of its memory, by whomever."""
        return self._device.peak_memory()

    @property
    def gradient_norm(self) -> float:
        """Of the last update's gradient, before clipping."""
        self._settle()
        return self._norm

    def gradient_norms(self) -> dict[str, float]:
        """Returns the norm of each parameter's gradient in the last update, before clipping; all ranks must call it."""
        self._settle()
        state, to_numpy = self._state, self._device.to_numpy
        numbers = to_numpy(state.all_chunks.table)[:, 3]
        squares = np.bincount(numbers, to_numpy(state.of_all_chunks(self._sums)), len(self._buffers.slices))
        return {part.name: math.sqrt(found) for part, found in zip(self._buffers.slices, squares, strict=True)}

    def step(self, batch: Mapping[str, Any]) -> float:
        """Runs a batch and, after `accumulate` batches, updates the parameters; returns the loss before the update.

        On a GPU it may return before the step has finished: the loss behaves like a number, and waits when it is used.
        A loss or gradient that is not finite raises an error then, or in the next step; the parameters are those before
        the step.
        """
        self.skips(batch)
        with self.ranks.together(), self._device.at_work():
            if self._step.drops:
                self._seed[0] = batch_seed(self.seed, self._batches)
            if self._scale is not None:
                self._loss_scale[...] = self._scale.value
            if self._narrow is not None:
                self._device.copy(self._narrow, self._buffers.data)
            # Sums of several batches or processes, and loss scales, are decided about by the host.
            is_ahead = self._device.name != "cpu" and not any((self.accumulate > 1, self._scale, self._collectives))
            loss: float = self._step_ahead(batch) if is_ahead else self._step_now(batch)
            if self._is_first:
                self._is_first = False
                self._remark_on_host_nodes()
        return loss

    def _step_now(self, batch: Mapping[str, Any]) -> float:
        loss = self._run(batch)
        if not math.isfinite(loss):
            raise self._stopped(f"the loss is {loss}", batch)
        if self._total is None or self._accumulate_gradients():
            if self._collectives is not None:
                self._collectives.reduce_gradients()
            if self._clip(batch):
                self._update()
        for current, following in zip(self._current, self._next, strict=True):
            self._device.copy(current, following)
        self._batches += 1
        return loss

    def _remark_on_host_nodes(self) -> None:
        """After the first batch on a GPU, which is captured if all nodes run there."""
        if self._device.name != "cpu" and (found := self._step_session.nodes_on_host(self._step.model.graph)):
            told = ", ".join(f"{count} × {kind}" for kind, count in found.most_common())
            self.remarks.append(
                "some nodes run on the CPU, as onnxruntime has no CUDA kernels for them, and their inputs and outputs "
                f"are copied: {told}"
            )

    def unsaid_remarks(self) -> list[str]:
        """Those that fit() has not printed yet."""
        unsaid, self._said = self.remarks[self._said :], len(self.remarks)
        return unsaid

    def _step_ahead(self, batch: Mapping[str, Any]) -> Any:
        """A step that the GPU judges by itself: it updates nothing after one whose numbers are not finite."""
        before, device, chunks, grad = (self.steps, self._batches), self._device, self._state.chunks, self._state.grad
        self._step_session.run(batch)
        device.run("squares", chunks, grad, self._sums)
        device.run("judge", chunks, self._sums, self._loss, self._clip_norm)
        if self._clip_norm is not None:
            device.run("clip", chunks, grad)
        if self._clip_value is not None:
            device.run("clamp", chunks, grad, self._clip_value)
        self._update()
        for current, following in zip(self._current, self._next, strict=True):
            device.run("replace", chunks, current, following)
        self._batches += 1
        last, self._ahead = self._ahead, StepAhead(device.read_later(device.verdict), batch, before)
        if last is not None:
            self._look_at(last)  # while the GPU is at this step
        return PendingLoss(functools.partial(self._look_at, self._ahead))

    def _look_at(self, step: StepAhead) -> tuple[float, float]:
        """The loss and the norm of a step, when the GPU is done with it; raises if it was not good."""
        loss, norm, _, is_good = step.verdict()
        if self._ahead is step:
            self._ahead = None
        if is_good:
            self._norm = norm
            return loss, norm
        self._ahead = None
        self._device.verdict[-1] = 1
        self._state.steps, self._batches = step.before
        with self._device.at_work():
            self._step_session.run(step.batch)  # its gradients again: another batch may have been there since
        what = f"the loss is {loss}" if not math.isfinite(loss) else f"the norm of the gradient is {norm}"
        raise self._stopped(what, step.batch)

    def _settle(self) -> None:
        """Waits for the step that a GPU is at, if any; raises if it was not good."""
        if self._ahead is not None:
            self._look_at(self._ahead)

    def _update(self) -> None:
        self._state.step(self.schedule(self._state.steps))
        if self._collectives is not None:
            self._collectives.all_gather_parameters()
            if self.steps % CHECK_EVERY == 0:
                self.expect_no_drift()

    def _run(self, batch: Mapping[str, Any]) -> float:
        """Loss and gradients of a batch; with other ranks the loss of the batch and the gradients of this slice."""
        if self._slicer is None:
            self._step_session.run(batch)
            return self.ranks.sum_losses(float(self._loss))
        session = self._step_session
        local, arrays, error = None, {}, None
        try:
            local = self._slicer.slice_batch(batch, session.dims)
            arrays = session.checked(local)
        except Exception as problem:  # all ranks raise it, once all know of it
            error = problem
        self._slicer.agree(local, arrays, error)
        try:
            session.run_checked(arrays)
        except Exception as problem:
            if self._step.statistics:  # the others wait for this one, in the middle of the graph
                raise
            error = problem
        return self.ranks.sum_losses(float(self._loss), error)

    def expect_no_drift(self) -> None:
        """Raises one sentence that names the first parameter that differs between processes, if any."""
        if self._collectives is not None:
            self._collectives.expect_no_drift({**self.parameters, **self.statistics}, self.steps)

    def _accumulate_gradients(self) -> bool:
        """Adds up the gradients of a micro-batch; true if it was the last for an update."""
        assert self._total is not None
        chunks, grad = self._state.all_chunks, self._buffers.grad
        if self._waiting == 0:
            self._device.copy(self._total, grad)
        else:
            self._device.run("add", chunks, self._total, grad)
        self._waiting += 1
        if self._waiting < self.accumulate:
            return False
        self._waiting = 0
        self._device.copy(grad, self._total)
        self._device.run("scale", chunks, grad, 1 / self.accumulate)
        return True

    def _clip(self, batch: Mapping[str, Any]) -> bool:
        """Clips the gradient; false if it is too large for fp16, so that this update is left out."""
        chunks, grad = self._state.chunks, self._state.grad
        if self._scale is not None:
            self._device.run("scale", chunks, grad, 1 / self._scale.value)
        self._device.run("squares", chunks, grad, self._sums)
        self._norm = math.sqrt(float(self._state.of_all_chunks(self._sums).sum()))
        is_finite = math.isfinite(self._norm)
        if self._scale is not None and self._scale.update(is_finite) and not is_finite:
            self.skipped += 1
            return False
        if not is_finite:
            raise self._stopped(f"the norm of the gradient is {self._norm}", batch)
        if self._clip_norm is not None and self._norm > self._clip_norm:
            self._device.run("scale", chunks, grad, self._clip_norm / (self._norm + 1e-6))
        if self._clip_value is not None:
            self._device.run("clamp", chunks, grad, self._clip_value)
        return True

    def _stopped(self, why: str, batch: Mapping[str, Any]) -> BaseException:
        """The error to raise, with the cause that comes first: in the batch, in the parameters, or in the gradients."""
        found = not_finite(batch)
        here = f" of rank {self.ranks.rank}'s slice" if isinstance(batch, LocalBatch) else ""
        causes = [None if found is None else f"the batch's {found}{here}"]
        for what, arrays in (("parameter", self.parameters), ("gradient of", self.gradients)):
            numbers = ((name, self._device.to_numpy(a)) for name, a in arrays.items())
            bad = next((name for name, a in numbers if not np.isfinite(a).all()), None)
            causes.append(None if bad is None else f"the {what} {bad!r} is not finite")
        of_all = self.ranks.all_gather(causes)
        cause = next((f": {found}" for kind in zip(*of_all, strict=True) for found in kind if found is not None), "")
        text = f"step {self.steps + 1}: {why}{cause}; the parameters are those before the step"
        return on_every_rank(TrainingStoppedError(text))

    def evaluate(
        self, batches: Iterable[Mapping[str, Any]], metrics: Mapping[str, Metric] | None = None
    ) -> dict[str, Any]:
        """Returns the mean loss over batches in inference mode, as "loss", and the results of metrics.

        A metric is one of onnxgrad.metrics, computed over all batches together, or a function of the outputs and the
        batch, both dicts of arrays. The result of a function is the mean of its values, weighted by the number of
        examples, as for the loss.
        """
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
        self._settle()
        names = ("schedule", "_batches", "_norm", "_waiting", "skipped", "_scale")
        state, numbers = self._state, {name: copy.copy(getattr(self, name)) for name in names}
        steps, epoch = state.steps, epoch_of(batches)
        arrays = [self._buffers.data, self._buffers.grad, *state.slots.values(), *self._current]
        arrays += [] if self._total is None else [self._total]
        kept = [np.array(self._device.to_numpy(array)) for array in arrays]
        self._waiting = 0
        try:
            yield
        finally:
            with contextlib.suppress(TrainingStoppedError):
                self._settle()
            for array, before in zip(arrays, kept, strict=True):
                self._device.copy(array, before)
            vars(self).update(numbers)
            state.steps = steps
            if epoch is not None:
                batches.epoch = epoch

    def save(self, path: str | Path) -> None:
        """Writes weights, statistics, optimizer state and the position of fit() into one safetensors file.

        The file at `path` is replaced atomically, when the new one is completely on the disk.
        """
        self._settle()
        facts = {
            "steps": self._state.steps, "batches": self._batches, "seed": self.seed, "waiting": self._waiting,
            "optimizer": self.optimizer.name, "ema": self.ema is not None,
            "place": None if self._position is None else asdict(self._position),
            "callbacks": self._callback_states if self._callbacks is None else self._callbacks.states(),
            **({} if self._scale is None else {"loss_scale": asdict(self._scale)}),
        }  # fmt: skip
        with self.ranks.together():
            self.ranks.meet()
            arrays = self._arrays(self._waiting)
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
        self._settle()
        with self.ranks.together():
            slots = self._state.slots
            room = slots if self._collectives is None else {n: self._collectives.room_for(a) for n, a in slots.items()}
            facts = self.ranks.on_first(lambda: self._read(Path(path), room))
            self._state.steps, self._batches = facts["steps"], facts["batches"]
            self.seed, self._waiting = facts["seed"], facts["waiting"]
            self._position = None if facts["place"] is None else Position(**facts["place"])
            self._callback_states = facts.get("callbacks", {})
            if self._scale is not None and "loss_scale" in facts:
                self._scale = LossScale(**facts["loss_scale"])
            if self._collectives is not None:
                self._collectives.broadcast([self._buffers.data, *self.statistics.values()])
                for name, array in slots.items():
                    self._collectives.scatter_slot(room[name], array)
                if self._total is not None and not self.ranks.is_first:
                    self._total[...] = 0  # the first one has what was waiting

    def _read(self, path: Path, slots: Mapping[str, Any]) -> dict[str, Any]:
        arrays, facts = read_checkpoint(path)
        if facts["optimizer"] != self.optimizer.name:
            raise ValueError(
                f"{str(path)!r} was written with the optimizer {facts['optimizer']}, not {self.optimizer.name}"
            )
        if facts.get("ema", False) != (self.ema is not None):
            has, way = ("has no", "leave out ema") if self.ema is not None else ("has a", "set ema to its decay")
            raise ValueError(f"{str(path)!r} {has} moving average of the parameters: {way}, or start anew")
        if facts["waiting"] >= self.accumulate:
            raise ValueError(f"{str(path)!r} was saved between micro-batches: set accumulate to the number that it had")
        targets = self._named(slots, self._total if facts["waiting"] else None)
        check_arrays(targets, arrays, str(path))
        for name, target in targets.items():
            if isinstance(target, np.ndarray):
                target[...] = arrays[name]
            else:
                self._device.copy(target, arrays[name])
        return facts

    def _arrays(self, waiting: int) -> dict[str, Any]:
        """All that a checkpoint holds; on the first rank, if there are others."""
        slots, total = self._state.slots, self._total if waiting else None
        if self._collectives is not None:
            slots = {name: self._collectives.gather_slot(array) for name, array in slots.items()}
            total = None if total is None else self._collectives.summed(total)
        return self._named(slots, total) if self.ranks.is_first else {}

    def _named(self, slots: Mapping[str, Any], total: Any) -> dict[str, Any]:
        groups = {"parameter": self.parameters, "statistics": self.statistics}
        groups |= {f"optimizer/{slot}": self._buffers.views(array) for slot, array in slots.items()}
        if total is not None:
            groups["waiting"] = self._buffers.views(total)
        return {f"{group}/{name}": array for group, views in groups.items() for name, array in views.items()}

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
        self._settle()
        with self.ranks.together():
            trained = self.averages or self.parameters
            found: list[Path] = self.ranks.on_first(lambda: writer(self._restored(), self._changed(trained)))
        return found

    def _restored(self) -> ir.Model:
        """The original model, each of its weights an initializer under the name that its author knows."""
        return Draft(self._load(), "Trainer").run(RESTORE).model  # type: ignore[no-any-return]

    def _changed(self, trained: Mapping[str, Any]) -> dict[str, Array]:
        return {name: self._device.to_numpy(a) for name, a in (*trained.items(), *self.statistics.items())}


def _export(model: ir.Model, arrays: dict[str, Array], path: Path) -> list[Path]:
    tensors: dict[str, Any] = {name: v.const_value for name, v in model.graph.initializers.items()}
    apart = any(isinstance(t, ir.ExternalTensor) for t in tensors.values())
    written = write_attributes(model.graph, arrays) | store_integers(model.graph, arrays)
    for name in arrays.keys() - written:
        kind = tensors[name].dtype
        values = arrays[name].astype(kind.numpy(), copy=False)
        model.graph.initializers[name].const_value = ir.Tensor(values, dtype=kind, name=name)
    to_inference_mode(model)
    return save(model, path, None if apart else path)


def _for_head(optimizer: Optimizer, prepared: Draft) -> Optimizer:
    """The optimizer, whose groups name the parameters of a new head instead of calling them `head`."""
    known = prepared.graph.initializers
    groups = {n: s for pattern, s in optimizer.groups.items() for n in without_word(prepared.model, pattern, known)}
    return optimizer if groups.keys() == optimizer.groups.keys() else replace(optimizer, groups=groups)


def _are_names(given: Any) -> bool:
    return isinstance(given, Sequence) and all(isinstance(name, str) for name in given)


def _type_of_output(model: ir.Model, name: str) -> Any:
    return next(v.dtype.numpy() for v in model.graph.outputs if v.name == name and v.dtype is not None)


def _expect_classes(predicted: Sequence[tuple[Loss, Sequence[Any] | None]], batch: Mapping[str, Any]) -> None:
    """Raises if a target of a batch is not a class; with the shape of each loss's prediction."""
    for part, shape in predicted:
        target = batch.get(part.target)
        wrong = part.wrong_class(target, shape) if isinstance(target, np.ndarray) else None
        if wrong is not None:
            assert target is not None
            at, expected = wrong
            raise ValueError(
                f"the batch's {part.target} has the class {target[at]} at {list(at)}, expected {expected}; "
                f"{type(part).__name__}(…, ignore_index={target[at]}) leaves it out"
            )
