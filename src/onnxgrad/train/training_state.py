"""TrainingState: everything that training changes, as arrays on the device; a checkpoint contains it."""

import contextlib
import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrad.train.buffers import Buffers, side_by_side
from onnxgrad.train.checkpoint import check_arrays, read_checkpoint
from onnxgrad.train.devices import Device
from onnxgrad.train.distributed.collectives import Collectives
from onnxgrad.train.distributed.ranks import Ranks, SingleProcess
from onnxgrad.train.graphs import StepGraph
from onnxgrad.train.loss_scale import LossScale
from onnxgrad.train.optim import AVERAGE, Optimizer

COUNTED = ("batches", "waiting", "norm", "skipped", "scale")  # beside the arrays, what a step changes


class TrainingState:
    """Parameters, gradients, statistics, the optimizer's state, and how far training has come."""

    def __init__(
        self,
        step: StepGraph,
        weights: Mapping[str, Any],
        optimizer: Optimizer,
        device: Device,
        ranks: SingleProcess,
        *,
        shard_optimizer: bool,
        rates: Mapping[str, float] | None,
        ema: float | None,
        accumulate: int,
        seed: int,
        scale: LossScale | None,
    ) -> None:
        """`weights` are the model's, by name; `rates` factors of the learning rate, by parameter."""
        shapes = {name: tuple(weights[name].shape.numpy()) for name in step.gradients}
        if not shapes:
            raise ValueError("Trainer: the model has no parameters to train")
        self.device, self.ranks = device, ranks
        self.buffers = Buffers(shapes, step.dtype.numpy(), device, ranks.size)
        self.parameters = self.buffers.views(self.buffers.data)
        for name, array in self.parameters.items():
            device.copy(array, weights[name].numpy().astype(self.buffers.dtype, copy=False))
        self.gradients = self.buffers.views(self.buffers.grad)
        several = ranks if isinstance(ranks, Ranks) else None
        self.optimizer = optimizer.start(self.buffers, several if shard_optimizer else None, rates, ema)
        # The average of all parameters, as the evaluation reads it; where ranks have a shard each, gathered before.
        average = self.optimizer.slots.get(AVERAGE)
        self.average = self.buffers.new() if average is not None and shard_optimizer else average
        self.collectives = None if several is None else Collectives(several, self.buffers, device, self.optimizer)
        pairs = [pair for s in step.statistics for pair in zip(s.current, s.following, strict=True)]
        self.current, self.statistics = side_by_side({now: weights[now].numpy() for now, _ in pairs}, device)
        # What the statistics are after a step.
        self.next, self.following = side_by_side({then: weights[now].numpy() for now, then in pairs}, device)
        self.unread = {
            s.unread: device.from_numpy(weights[s.current[1]].numpy()) for s in step.statistics if s.unread is not None
        }
        # Gradients of several micro-batches are added up here; a single one is used where it is.
        self.total = self.buffers.new() if accumulate > 1 else None
        self.waiting = 0  # micro-batches in it
        self.sums = device.zeros(len(self.optimizer.chunks), np.float64)
        self.seed = seed  # decides what Dropout drops
        self.batches = 0
        self.norm = 0.0  # of the last update's gradient that is known, before clipping
        self.scale = scale
        self.skipped = 0  # updates that fp16 gradients were too large for

    def start(self) -> None:
        """Gives all ranks what the first one has, and the average its first values."""
        if self.collectives is not None:
            self.collectives.broadcast([self.buffers.data, *self.statistics.values()])
        self.optimizer.start_average()

    def averages(self) -> dict[str, Any]:
        """The moving averages of parameters, by name; empty without `ema`."""
        if self.average is None:
            return {}
        if self.collectives is not None and self.collectives.shards_optimizer:
            self.ranks.meet()
            self.collectives.all_gather_slot(self.optimizer.slots[AVERAGE], self.average)
        return self.buffers.views(self.average)

    def expect_no_drift(self) -> None:
        """Raises one sentence that names the first parameter that differs between processes, if any."""
        if self.collectives is not None:
            self.collectives.expect_no_drift({**self.parameters, **self.statistics}, self.optimizer.steps)

    def gradient_norms(self) -> dict[str, float]:
        """Of each parameter's gradient in the last update, before clipping."""
        state, to_numpy = self.optimizer, self.device.to_numpy
        numbers = to_numpy(state.all_chunks.table)[:, 3]
        squares = np.bincount(numbers, to_numpy(state.of_all_chunks(self.sums)), len(self.buffers.slices))
        return {part.name: math.sqrt(found) for part, found in zip(self.buffers.slices, squares, strict=True)}

    @contextlib.contextmanager
    def restoring(self) -> Iterator[None]:
        """All of it is afterwards what it was, to the bit."""
        numbers = {name: copy.copy(getattr(self, name)) for name in COUNTED}
        steps = self.optimizer.steps
        arrays = [self.buffers.data, self.buffers.grad, *self.optimizer.slots.values(), *self.current]
        arrays += [] if self.total is None else [self.total]
        kept = [np.array(self.device.to_numpy(array)) for array in arrays]
        self.waiting = 0
        try:
            yield
        finally:
            for array, before in zip(arrays, kept, strict=True):
                self.device.copy(array, before)
            vars(self).update(numbers)
            self.optimizer.steps = steps

    def facts(self) -> dict[str, Any]:
        """What a checkpoint holds beside arrays."""
        scale = {} if self.scale is None else {"loss_scale": asdict(self.scale)}
        counts = {"steps": self.optimizer.steps, "batches": self.batches, "waiting": self.waiting}
        return {**counts, "seed": self.seed, **scale}

    def use_facts(self, facts: Mapping[str, Any]) -> None:
        """Takes over what facts() returned."""
        self.optimizer.steps, self.batches = facts["steps"], facts["batches"]
        self.waiting, self.seed = facts["waiting"], facts["seed"]
        if self.scale is not None and "loss_scale" in facts:
            self.scale = LossScale(**facts["loss_scale"])

    def arrays(self) -> dict[str, Any]:
        """All arrays that a checkpoint holds; on the first rank, if there are others."""
        slots, total = self.optimizer.slots, self.total if self.waiting else None
        if self.collectives is not None:
            slots = {name: self.collectives.gather_slot(array) for name, array in slots.items()}
            total = None if total is None else self.collectives.summed(total)
        return self._named(slots, total) if self.ranks.is_first else {}

    def room_for_slots(self) -> dict[str, Any]:
        """Where a checkpoint's slots are read to; those of all shards, if ranks have one each."""
        slots = self.optimizer.slots
        return slots if self.collectives is None else {n: self.collectives.room_for(a) for n, a in slots.items()}

    def read(self, path: Path, slots: Mapping[str, Any], expect: Any) -> dict[str, Any]:
        """Fills the arrays from a checkpoint, once all of it is right, and returns its facts, which `expect` judges."""
        arrays, facts = read_checkpoint(path)
        expect(facts)
        targets = self._named(slots, self.total if facts["waiting"] else None)
        check_arrays(targets, arrays, str(path))
        for name, target in targets.items():
            if isinstance(target, np.ndarray):
                target[...] = arrays[name]
            else:
                self.device.copy(target, arrays[name])
        return facts

    def share(self, slots: Mapping[str, Any]) -> None:
        """Gives all ranks what the first one has read."""
        if self.collectives is not None:
            self.collectives.broadcast([self.buffers.data, *self.statistics.values()])
            for name, array in self.optimizer.slots.items():
                self.collectives.scatter_slot(slots[name], array)
            if self.total is not None and not self.ranks.is_first:
                self.total[...] = 0  # the first one has what was waiting

    def _named(self, slots: Mapping[str, Any], total: Any) -> dict[str, Any]:
        groups = {"parameter": self.parameters, "statistics": self.statistics}
        groups |= {f"optimizer/{slot}": self.buffers.views(array) for slot, array in slots.items()}
        if total is not None:
            groups["waiting"] = self.buffers.views(total)
        return {f"{group}/{name}": array for group, views in groups.items() for name, array in views.items()}
