"""Collectives over the arrays of a trainer: gradients reduced, parameters and state gathered, drift found.

The gradient of the whole model is one array, and one run of the session computes all of it. So it is reduced in one go:
a reduce-scatter gives each rank the sum of its shard, and an all-gather the shards of the others: of the gradient, or
of the parameters where each rank updates its shard alone. Either way the same sums are made in the same order.
"""

import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from onnxgrad.tensor_types import Array
from onnxgrad.train.buffers import Buffers
from onnxgrad.train.devices import Device
from onnxgrad.train.distributed.ranks import Ranks
from onnxgrad.train.optim import OptimizerState

CHECK_EVERY = 100  # updates; a digest of 100 million parameters takes 0.1 s or so


class Collectives:
    """The arrays of one trainer; `shards_optimizer` if each rank updates its shard of the parameters alone."""

    def __init__(self, ranks: Ranks, buffers: Buffers, device: Device, state: OptimizerState) -> None:
        self.ranks, self._buffers, self._device, self._state = ranks, buffers, device, state
        self.shards_optimizer = state.grad is not buffers.grad
        # MPI and gloo read the host's memory: from a GPU arrays are copied to this one. NCCL reads them where they are.
        self._staged: Array | None = None if ranks.reads_gpu else device.staging(buffers.length, buffers.dtype)
        zeros = device.zeros if self._staged is None else np.zeros
        in_place = self.shards_optimizer and self._staged is None
        self._shard: Any = state.grad if in_place else zeros(buffers.shard, buffers.dtype)

    def reduce_gradients(self) -> None:
        """Sums over all ranks the gradients that this rank's optimizer needs."""
        whole = self._to_host(self._buffers.grad)
        self.ranks.reduce_scatter(whole, self._shard)
        if not self.shards_optimizer:
            self.ranks.all_gather_shards(self._shard, whole)
            self._from_host(self._buffers.grad, whole)
        elif self._staged is not None:
            self._device.copy(self._state.grad, self._shard)

    def all_gather_parameters(self) -> None:
        """After an update of shards, gives every rank the parameters of all shards."""
        if self.shards_optimizer:
            whole = self._to_host(self._buffers.data)
            shard = self._buffers.shard
            self.ranks.all_gather_shards(whole[self.ranks.rank * shard : (self.ranks.rank + 1) * shard], whole)
            self._from_host(self._buffers.data, whole)

    def broadcast(self, arrays: Iterable[Any]) -> None:
        """Gives every rank the arrays of rank 0."""
        for array in arrays:
            is_readable = self.ranks.reads_gpu or isinstance(array, np.ndarray)
            host = array if is_readable else self._device.to_numpy(array)
            self.ranks.broadcast(host)
            if host is not array:
                self._device.copy(array, host)

    def gather_slot(self, slot: Any) -> Any:
        """On rank 0 all of an optimizer's slot, whether ranks have a shard or the whole of it."""
        if not self.shards_optimizer:
            return slot
        whole = self.room_for(slot)
        self.ranks.gather(self._device.to_numpy(slot), whole if self.ranks.is_first else None)
        return whole

    def all_gather_slot(self, slot: Any, whole: Any) -> None:
        """Fills `whole` on all ranks with the shards that they have of an optimizer's slot."""
        host = self._to_host(whole)
        shard = self._device.to_numpy(slot) if self._staged is not None else slot
        self.ranks.all_gather_shards(shard, host)
        self._from_host(whole, host)

    def room_for(self, slot: Any) -> Any:
        """Memory on rank 0 for all of a slot."""
        if not self.shards_optimizer:
            return slot
        return np.zeros(self._buffers.length if self.ranks.is_first else 0, self._buffers.dtype)

    def scatter_slot(self, whole: Any, slot: Any) -> None:
        """Reverses `gather_slot`."""
        if not self.shards_optimizer:
            self.broadcast([slot])
            return
        shard = np.empty(self._buffers.shard, self._buffers.dtype)
        self.ranks.scatter(whole if self.ranks.is_first else None, shard)
        self._device.copy(slot, shard)

    def summed(self, array: Any) -> Array:
        """A new array: the sum over all ranks of one as long as all parameters."""
        total = np.array(self._device.to_numpy(array))
        self.ranks.all_reduce(total)
        return total

    def expect_no_drift(self, arrays: Mapping[str, Any], steps: int) -> None:
        """Raises one sentence if some array differs between ranks."""
        digests = [zlib.crc32(np.ascontiguousarray(self._device.to_numpy(a)).reshape(-1).data) for a in arrays.values()]
        self.ranks.expect_same_bits(digests, list(arrays), f"after step {steps}")

    def _to_host(self, array: Any) -> Any:
        if self._staged is None:
            return array
        self._device.fetch(self._staged, array)
        return self._staged

    def _from_host(self, array: Any, host: Array) -> None:
        if self._staged is not None:
            self._device.copy(array, host)
