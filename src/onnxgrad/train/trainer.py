"""Trainer: trains an ONNX model with a loss and an optimizer, in stock onnxruntime."""

import contextlib
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.cpu.core.memory import give_back
from onnxgrad.graph.files import expect_weights, load, save
from onnxgrad.passes.batch_slice import PLACE, WEIGHTS
from onnxgrad.passes.draft import Draft, without_garbage_collection
from onnxgrad.passes.expand_ml import write_attributes
from onnxgrad.passes.free_batch import fixed_batch
from onnxgrad.passes.prepare import RESTORE, prepare_for_training
from onnxgrad.passes.store_integers import store_integers
from onnxgrad.passes.train_mode import SEED, to_inference_mode
from onnxgrad.train.batch_dimension import with_free_batch
from onnxgrad.train.batches import Batches, LocalBatch, not_finite
from onnxgrad.train.buffers import Buffers, side_by_side
from onnxgrad.train.checkpoint import check_arrays, read_checkpoint, write_checkpoint
from onnxgrad.train.devices import device_of
from onnxgrad.train.distributed.collectives import CHECK_EVERY, Collectives
from onnxgrad.train.distributed.ranks import Ranks, on_every_rank, ranks_of
from onnxgrad.train.distributed.sharding import BatchSlicer
from onnxgrad.train.evaluation import Evaluation, Metric
from onnxgrad.train.fitting import FitOptions, Log, Position, Record, TrainingStoppedError, fit
from onnxgrad.train.graphs import LOSS_SCALE, EvaluationGraph, Selection, evaluation_graph, step_graph
from onnxgrad.train.loss_scale import LossScale
from onnxgrad.train.losses import Loss, Total
from onnxgrad.train.optim import Optimizer
from onnxgrad.train.pending_loss import PendingLoss, StepAhead
from onnxgrad.train.schedules import Constant, Schedule
from onnxgrad.train.session import Session


class Trainer:
    """Trains a model in onnxruntime, and exports it.

    `model` is a path, an onnx.ModelProto or an onnx_ir.Model, which is not changed. `loss` is one of onnxgrad.losses or
    a sum of such, or the name of a value that is the loss. `trainable` names what to train, patterns allowed; by
    default all parameters, as `onnxgrad inspect` shows them. `freeze` names some to leave as they are. Each
    BatchNormalization whose statistics match `freeze` normalizes with them instead of measuring the batch, and so does,
    with `freeze_statistics`, one whose weights are not trained. `device` is "cpu" or "cuda", where everything stays on
    the GPU. A schedule multiplies the learning rate. `clip_norm` bounds the norm of the whole gradient, `clip_value`
    each of its numbers; `accumulate` micro-batches are averaged for one update. `seed` decides what Dropout drops.

    With the `precision` "bf16" products are computed in bfloat16, which is faster on GPUs and on processors that have
    AVX512-BF16; on a GPU, convolutions too. "fp16" is for GPUs: where gradients are too large for float16, an update is
    left out, `skipped` counts it, and the loss scale is halved. Parameters, the optimizer's state, norms, softmax, sums
    and losses are float32 in any case, and evaluate() is float32 all through.

    With `recompute`, a Loop or Scan of n steps keeps about √n of its states, not all, and computes each step once more.
    If it is "blocks", or patterns of the names of nodes or scopes, so does the rest of the model: what these compute is
    computed again for the gradients, instead of being kept until then. The losses stay the same.

    With a `communicator`, of mpi4py or a process group of torch.distributed, its processes train together, on a slice
    of every batch each: all are given the same batches, and do what one process alone would do. With `shard_optimizer`
    each keeps and updates its shard of the optimizer's state. Every method is called by all of them, and only the first
    process writes and prints.

    `parameters`, `gradients` and `statistics` (running means and variances) are the trainer's own arrays, by name:
    NumPy's on the CPU, torch's on a GPU.
    `remarks` are sentences about how this model is trained, which fit() prints before it starts.
    Weights of half types are trained in float32, and exported in their own type again.
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
        self._clip_norm, self._clip_value, self._accumulate = clip_norm, clip_value, accumulate
        self.seed, self._batches = seed, 0
        self._norm = 0.0  # of the last update's gradient that is known, before clipping
        self._ahead: StepAhead | None = None  # a step that a GPU may still be at
        self._said = 0  # remarks that fit() has printed
        self._evaluation: Any = None
        self._position: Position | None = None  # of a fit() at work, or of one that a checkpoint was saved by
        self._slicer = BatchSlicer(ranks, loss) if isinstance(ranks, Ranks) else None
        use_amx = all(ranks.all_gather(self._device.has_amx))
        group = ranks.group if isinstance(ranks, Ranks) else None
        with without_garbage_collection():
            prepared = prepare_for_training(self._load(), "Trainer")
            self._fixed = fixed_batch(prepared.graph)  # the only size of batches that the sessions take, if any
            self._may_be_freed = self._fixed is not None
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
            evaluated = self._make_graphs(prepared)
            self.remarks: list[str] = prepared.remarks
            self._make_arrays(weights, shard_optimizer)
            self._make_sessions(evaluated, loss)
        if self._collectives is not None:
            self._collectives.ranks.expect_same(self._facts())
            self._collectives.broadcast([self._buffers.data, *self.statistics.values()])
        give_back()  # the graphs and weights that all this was made from

    def _make_graphs(self, prepared: Draft) -> EvaluationGraph:
        """Makes the graph of a step, and that of an evaluation."""
        inference = prepared.clone()
        self._step = step_graph(prepared, *self._how)
        loss, _, _, _, on_cpu, _, _ = self._how
        return evaluation_graph(inference, loss, self._step, on_cpu)

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
        self._fixed = None
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

    def _load(self) -> ir.Model:
        """The original model."""
        model = load(self._source, "Trainer")
        expect_weights(model, "Trainer")
        return model

    def _facts(self) -> list[tuple[str, Any]]:
        """What has to be the same on all ranks."""
        names = ("optimizer", "schedule", "seed", "_clip_norm", "_clip_value", "_accumulate", "precision")
        parameters = [(f"the parameter {p.name!r}", p.shape) for p in self._buffers.slices]
        nodes = [(f"the node {node.name!r}", node.op_type) for node in self._step.model.graph]
        shards = ("shard_optimizer", self._collectives is not None and self._collectives.shards_optimizer)
        return [*((name.lstrip("_"), getattr(self, name)) for name in names), shards, *parameters, *nodes]

    def _make_arrays(self, weights: Mapping[str, Any], shard_optimizer: bool) -> None:
        shapes = {name: tuple(weights[name].shape.numpy()) for name in self._step.gradients}
        if not shapes:
            raise ValueError("Trainer: the model has no parameters to train")
        self._buffers = Buffers(shapes, self._step.dtype.numpy(), self._device, self.ranks.size)
        self.parameters = self._buffers.views(self._buffers.data)
        for name, array in self.parameters.items():
            self._device.copy(array, weights[name].numpy().astype(self._buffers.dtype, copy=False))
        self.gradients = self._buffers.views(self._buffers.grad)
        ranks = self.ranks if isinstance(self.ranks, Ranks) else None
        self._state = self.optimizer.start(self._buffers, ranks if shard_optimizer else None)
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
        self._total = self._buffers.new() if self._accumulate > 1 else None
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
        inputs = {name: array for name, array in changed.items() if name in used}
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
    def peak_memory(self) -> int:
        """Bytes: the most that this process has held so far; on a GPU, what is taken of its memory, by whomever."""
        return self._device.peak_memory()

    @property
    def gradient_norm(self) -> float:
        """Of the last update's gradient, before clipping."""
        self._settle()
        return self._norm

    def step(self, batch: Mapping[str, Any]) -> float:
        """Runs a batch and, after `accumulate` of them, updates the parameters; returns the loss before the update.

        On a GPU it may return before the step is done: the loss is a number that waits when it is used. A loss or a
        gradient that is not finite raises then, or in the next step; the parameters are those before it.
        """
        self.skips(batch)
        with self.ranks.together(), self._device.at_work():
            if self._step.drops:
                seeds = np.random.SeedSequence([self.seed, self._batches])
                self._seed[0] = int(seeds.generate_state(1, np.uint64)[0] >> 1)
            if self._scale is not None:
                self._loss_scale[...] = self._scale.value
            if self._narrow is not None:
                self._device.copy(self._narrow, self._buffers.data)
            # Sums of several batches or processes, and loss scales, are decided about by the host.
            is_ahead = self._device.name != "cpu" and not any((self._accumulate > 1, self._scale, self._collectives))
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
        if self._waiting < self._accumulate:
            return False
        self._waiting = 0
        self._device.copy(grad, self._total)
        self._device.run("scale", chunks, grad, 1 / self._accumulate)
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
    ) -> dict[str, float]:
        """The mean loss over batches, in inference mode, as "loss", and the means of metrics, under their names.

        A metric is one of onnxgrad.metrics or a function of the model's outputs and the batch, both dicts of arrays.
        Batches are weighted by their numbers of examples.
        """
        self._settle()
        found: dict[str, float] = self._evaluation(batches, metrics or {})
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
    ) -> list[Record]:
        """Trains for `epochs` epochs, with a progress bar unless `quiet`; returns a record for each epoch.

        `batches` is anything that yields dicts of arrays, by the names of the inputs, once per epoch. After every epoch
        `validation` is evaluated, with `metrics`, as evaluate() does.

        `checkpoint` is written after every epoch, and after every `save_every` updates. Ctrl-C and SIGTERM end training
        when the current step is done: the state is saved, in `checkpoint` or in onnxgrad-stopped.safetensors, and the
        KeyboardInterrupt says where. So is the last good state when the loss is not finite. A trainer that restores
        such a file continues with the next batch of the epoch. `log` is called with a dict for every update (event
        "step", epoch, step, loss, lr, gradient_norm, seconds) and for every epoch (event "epoch", epoch, step, loss,
        seconds, validation, peak_memory).
        """
        where = None if checkpoint is None else Path(checkpoint)
        log = log if self.ranks.is_first or getattr(log, "on_every_rank", False) else None
        options = FitOptions(batches, epochs, validation, metrics, where, save_every, log)
        self.ranks.on_first(options.expect_place)
        with self._whole_batches(batches, validation):
            if validation is not None:
                self._evaluation.open()  # a graph that onnxruntime refuses raises before the first epoch, not after it
            self._position = self._position or Position()
            try:
                with self.ranks.together():
                    return fit(self, options, self._position, quiet)
            finally:
                self._position = None

    def save(self, path: str | Path) -> None:
        """Writes weights, statistics, the optimizer's state and the position of fit(), as one safetensors file.

        The file at `path` is replaced at once, when all of the new one is on the disk.
        """
        self._settle()
        facts = {
            "steps": self._state.steps, "batches": self._batches, "seed": self.seed, "waiting": self._waiting,
            "optimizer": self.optimizer.name, "place": None if self._position is None else asdict(self._position),
            **({} if self._scale is None else {"loss_scale": asdict(self._scale)}),
        }  # fmt: skip
        with self.ranks.together():
            self.ranks.meet()
            arrays = self._arrays(self._waiting)
            self.ranks.on_first(lambda: write_checkpoint(Path(path), self._on_host(arrays), facts))

    def _on_host(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        return {n: a if isinstance(a, np.ndarray) else self._device.to_numpy(a) for n, a in arrays.items()}

    def restore(self, path: str | Path) -> None:
        """Restores the state of a file: training continues with the same numbers as if it had not stopped.

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
        if facts["waiting"] >= self._accumulate:
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
        """A trainer with the state of a file; model, loss and the rest as for the trainer that saved it."""
        trainer = cls(model, loss, optimizer, *args, **kwargs)
        trainer.restore(path)
        return trainer

    def export(self, path: str | Path) -> list[Path]:
        """Writes the original model, in inference mode, with the trained weights; returns the files that were written.

        Weights that came in files of their own, or that are too large for the model's file, go into a file beside it.
        Dropout stays, inactive, so that the model can be trained again. A file is there, or replaced, only once onnx
        and onnxruntime have accepted the new one.
        """
        self._settle()
        with self.ranks.together():
            found: list[Path] = self.ranks.on_first(lambda: self._export(Path(path)))
        return found

    def _export(self, path: Path) -> list[Path]:
        model = Draft(self._load(), "Trainer").run(RESTORE).model
        tensors: dict[str, Any] = {name: v.const_value for name, v in model.graph.initializers.items()}
        apart = any(isinstance(t, ir.ExternalTensor) for t in tensors.values())
        arrays = {name: self._device.to_numpy(a) for name, a in (*self.parameters.items(), *self.statistics.items())}
        written = write_attributes(model.graph, arrays) | store_integers(model.graph, arrays)
        for name in arrays.keys() - written:
            kind = tensors[name].dtype
            values = arrays[name].astype(kind.numpy(), copy=False)
            model.graph.initializers[name].const_value = ir.Tensor(values, dtype=kind, name=name)
        to_inference_mode(model)
        return save(model, path, None if apart else path)


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
