"""StepRunner: loss and gradients of a batch, clipping, and the update; on a GPU it does not wait for the result."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from onnxgrad.ops.dropout import batch_seed
from onnxgrad.passes.batch_slice import PLACE, WEIGHTS
from onnxgrad.passes.train_mode import SEED
from onnxgrad.train.batches import LocalBatch, not_finite
from onnxgrad.train.distributed.collectives import CHECK_EVERY
from onnxgrad.train.distributed.ranks import on_every_rank
from onnxgrad.train.distributed.sharding import BatchSlicer
from onnxgrad.train.fitting import TrainingStoppedError
from onnxgrad.train.graphs import LOSS_SCALE, StepGraph
from onnxgrad.train.half_copy import HalfCopy
from onnxgrad.train.pending_loss import PendingLoss, StepAhead
from onnxgrad.train.session import Session
from onnxgrad.train.target_checker import TargetChecker
from onnxgrad.train.training_state import TrainingState


class UpdateOptions(NamedTuple):
    """What happens to gradients."""

    rate: Callable[[int], float]  # the schedule: what multiplies the learning rate, by updates made
    clip_norm: float | None
    clip_value: float | None
    accumulate: int


class StepRunner:
    """Runs the graph of a step on batches, and changes a state by it."""

    def __init__(
        self,
        graph: StepGraph,
        state: TrainingState,
        options: UpdateOptions,
        validate: TargetChecker,
        slicer: BatchSlicer | None,
    ) -> None:
        """`validate` raises if a batch's targets are none; with a slicer, others train on the rest of a batch."""
        self._graph, self._state, self._options, self._slicer = graph, state, options, slicer
        self._device, self._ranks = state.device, state.ranks
        self._ahead: StepAhead | None = None  # a step that a GPU may still be at
        self._is_first = True  # whether none has run yet
        # Sums of several batches or processes, and loss scales, are decided about by the host.
        on_host = options.accumulate > 1 or state.scale is not None or state.collectives is not None
        self._runs_ahead = self._device.name != "cpu" and not on_host
        self._seed = self._device.zeros(1, np.int64)  # of the batch at hand
        self._loss_scale = self._device.zeros(1, np.float32).reshape(())
        self._halves: HalfCopy | None = None
        self._loss = self._device.zeros(1, _type_of_output(graph.model, graph.loss)).reshape(())
        outputs = {graph.loss: self._loss, **{out: state.gradients[n] for n, out in graph.gradients.items()}}
        outputs |= state.following | state.unread
        self.session = Session(graph.model, self._inputs(), outputs, self._device, validate, capture=True)

    def _inputs(self) -> dict[str, Any]:
        """What the session reads beside a batch."""
        graph, state = self._graph, self._state
        inputs = {**state.parameters, **state.statistics, **({SEED: self._seed} if graph.drops else {})}
        inputs |= {LOSS_SCALE: self._loss_scale} if graph.scales else {}
        if graph.narrow:
            kind = next(iter(graph.narrow.values())).dtype
            assert kind is not None
            self._halves = HalfCopy(state.optimizer, kind.numpy(), is_updated=state.collectives is None)
            views = state.buffers.views(self._halves.array)
            inputs |= {str(value.name): views[name] for name, value in graph.narrow.items()}
        if self._slicer is not None:
            given = {WEIGHTS: self._slicer.weights, PLACE: self._slicer.place}
            used = {str(v.name) for v in graph.model.graph.inputs}
            inputs |= {name: array for name, array in given.items() if name in used}
        return inputs

    def run(self, batch: Mapping[str, Any], remarks: list[str]) -> float:
        """Trains on a batch; the loss before the update. The first one may add a remark."""
        state = self._state
        with self._device.at_work():
            if self._graph.drops:
                self._seed[0] = batch_seed(state.seed, state.batches)
            if state.scale is not None:
                self._loss_scale[...] = state.scale.value
            if self._halves is not None:
                self._halves.refresh()
            loss: float = self._run_ahead(batch) if self._runs_ahead else self._run_now(batch)
            if self._is_first:
                self._is_first = False
                self._remark_on_host_nodes(remarks)
        return loss

    def _remark_on_host_nodes(self, remarks: list[str]) -> None:
        """After the first batch on a GPU, which is captured if all nodes run there."""
        if self._device.name != "cpu" and (found := self.session.nodes_on_host(self._graph.model.graph)):
            told = ", ".join(f"{count} × {kind}" for kind, count in found.most_common())
            remarks.append(
                "some nodes run on the CPU, as onnxruntime has no CUDA kernels for them, and their inputs and outputs "
                f"are copied: {told}"
            )

    def _run_now(self, batch: Mapping[str, Any]) -> float:
        state = self._state
        loss = self._loss_and_gradients(batch)
        if not math.isfinite(loss):
            raise self._stopped(f"the loss is {loss}", batch)
        if state.total is None or self._accumulate_gradients():
            if state.collectives is not None:
                state.collectives.reduce_gradients()
            if self.clip(batch):
                self._update()
        for current, following in zip(state.current, state.next, strict=True):
            self._device.copy(current, following)
        state.batches += 1
        return loss

    def _loss_and_gradients(self, batch: Mapping[str, Any]) -> float:
        """Of a batch; with other ranks the loss of the batch and the gradients of this slice."""
        if self._slicer is None:
            self.session.run(batch)
            return self._ranks.sum_losses(float(self._loss))
        local, arrays, error = None, {}, None
        try:
            local = self._slicer.slice_batch(batch, self.session.dims)
            arrays = self.session.checked(local)
        except Exception as problem:  # all ranks raise it, once all know of it
            error = problem
        self._slicer.agree(local, arrays, error)
        try:
            self.session.run_checked(arrays)
        except Exception as problem:
            if self._graph.statistics:  # the others wait for this one, in the middle of the graph
                raise
            error = problem
        return self._ranks.sum_losses(float(self._loss), error)

    def _accumulate_gradients(self) -> bool:
        """Adds up the gradients of a micro-batch; true if it was the last for an update."""
        state, device = self._state, self._device
        chunks, grad = state.optimizer.all_chunks, state.buffers.grad
        if state.waiting == 0:
            device.copy(state.total, grad)
        else:
            device.run("add", chunks, state.total, grad)
        state.waiting += 1
        if state.waiting < self._options.accumulate:
            return False
        state.waiting = 0
        device.copy(grad, state.total)
        device.run("scale", chunks, grad, 1 / self._options.accumulate)
        return True

    def clip(self, batch: Mapping[str, Any]) -> bool:
        """Clips the gradient; false if it is too large for fp16, so that this update is left out."""
        state, device, options = self._state, self._device, self._options
        chunks, grad = state.optimizer.chunks, state.optimizer.grad
        if state.scale is not None:
            device.run("scale", chunks, grad, 1 / state.scale.value)
        device.run("squares", chunks, grad, state.sums)
        state.norm = math.sqrt(float(state.optimizer.of_all_chunks(state.sums).sum()))
        is_finite = math.isfinite(state.norm)
        if state.scale is not None and state.scale.update(is_finite) and not is_finite:
            state.skipped += 1
            return False
        if not is_finite:
            raise self._stopped(f"the norm of the gradient is {state.norm}", batch)
        if options.clip_norm is not None and state.norm > options.clip_norm:
            device.run("scale", chunks, grad, options.clip_norm / (state.norm + 1e-6))
        if options.clip_value is not None:
            device.run("clamp", chunks, grad, options.clip_value)
        return True

    def _update(self) -> None:
        state = self._state
        state.optimizer.step(self._options.rate(state.optimizer.steps))
        if state.collectives is not None:
            state.collectives.all_gather_parameters()
            if state.optimizer.steps % CHECK_EVERY == 0:
                state.expect_no_drift()

    def _run_ahead(self, batch: Mapping[str, Any]) -> Any:
        """A step that the GPU judges by itself: it updates nothing after one whose numbers are not finite."""
        state, device, options = self._state, self._device, self._options
        chunks, grad = state.optimizer.chunks, state.optimizer.grad
        before = (state.optimizer.steps, state.batches)
        self.session.run(batch)
        device.run("squares", chunks, grad, state.sums)
        device.run("judge", chunks, state.sums, self._loss, options.clip_norm)
        if options.clip_norm is not None:
            device.run("clip", chunks, grad)
        if options.clip_value is not None:
            device.run("clamp", chunks, grad, options.clip_value)
        self._update()
        for current, following in zip(state.current, state.next, strict=True):
            device.run("replace", chunks, current, following)
        state.batches += 1
        last, self._ahead = self._ahead, StepAhead(device.read_later(device.verdict), batch, before)
        if last is not None:
            self._judge(last)  # while the GPU is at this step
        return PendingLoss(functools.partial(self._judge, self._ahead))

    def _judge(self, step: StepAhead) -> tuple[float, float]:
        """The loss and the norm of a step, when the GPU is done with it; raises if it was not good."""
        loss, norm, _, is_good = step.verdict()
        if self._ahead is step:
            self._ahead = None
        if is_good:
            self._state.norm = norm
            return loss, norm
        self._ahead = None
        self._device.verdict[-1] = 1
        self._state.optimizer.steps, self._state.batches = step.before
        with self._device.at_work():
            self.session.run(step.batch)  # its gradients again: another batch may have been there since
        what = f"the loss is {loss}" if not math.isfinite(loss) else f"the norm of the gradient is {norm}"
        raise self._stopped(what, step.batch)

    def settle(self) -> None:
        """Waits for the step that a GPU is at, if any; raises if it was not good."""
        if self._ahead is not None:
            self._judge(self._ahead)

    def _stopped(self, why: str, batch: Mapping[str, Any]) -> BaseException:
        """The error to raise, with the cause that comes first: in the batch, in the parameters, or in the gradients."""
        state = self._state
        found = not_finite(batch)
        here = f" of rank {self._ranks.rank}'s slice" if isinstance(batch, LocalBatch) else ""
        causes = [None if found is None else f"the batch's {found}{here}"]
        for what, arrays in (("parameter", state.parameters), ("gradient of", state.gradients)):
            numbers = ((name, self._device.to_numpy(a)) for name, a in arrays.items())
            bad = next((name for name, a in numbers if not np.isfinite(a).all()), None)
            causes.append(None if bad is None else f"the {what} {bad!r} is not finite")
        of_all = self._ranks.all_gather(causes)
        cause = next((f": {found}" for kind in zip(*of_all, strict=True) for found in kind if found is not None), "")
        text = f"step {state.optimizer.steps + 1}: {why}{cause}; the parameters are those before the step"
        return on_every_rank(TrainingStoppedError(text))


def _type_of_output(model: ir.Model, name: str) -> Any:
    return next(v.dtype.numpy() for v in model.graph.outputs if v.name == name and v.dtype is not None)
