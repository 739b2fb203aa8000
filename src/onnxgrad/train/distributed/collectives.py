"""What ranks do with the arrays of a trainer: gradients added up, parameters and state handed round, drift found.

The gradient of the whole model is one array, and one run of the session gives all of it at once. So it is added up in
one go: each rank gets the sum of its block, and the blocks are put together, of the gradient, or of the parameters
where each rank updates its block alone. Either way the same sums are made in the same order.
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


class Exchange:
    """The arrays of one trainer; `shards_optimizer` if each rank updates its block of the parameters alone."""

    def __init__(self, ranks: Ranks, buffers: Buffers, device: Device, state: OptimizerState) -> None:
        self.ranks, self._buffers, self._device, self._state = ranks, buffers, device, state
        self.shards_optimizer = state.grad is not buffers.grad
        # On a GPU these are the host's, where MPI finds them; on the CPU there is nothing between.
        self._staged: Array | None = device.staging(buffers.length, buffers.dtype)
        here = self.shards_optimizer and self._staged is None
        self._mine: Array = state.grad if here else np.zeros(buffers.block, buffers.dtype)

    def add_up_gradients(self) -> None:
        """The gradients that the optimizer goes by, of all ranks."""
        whole = self._on_host(self._buffers.grad)
        self.ranks.add_up_and_cut(whole, self._mine)
        if not self.shards_optimizer:
            self.ranks.put_together(self._mine, whole)
            self._from_host(self._buffers.grad, whole)
        elif self._staged is not None:
            self._device.copy(self._state.grad, self._mine)

    def hand_round_parameters(self) -> None:
        """After an update of blocks, the parameters of all of them."""
        if self.shards_optimizer:
            whole = self._on_host(self._buffers.data)
            block = self._buffers.block
            self.ranks.put_together(whole[self.ranks.rank * block : (self.ranks.rank + 1) * block], whole)
            self._from_host(self._buffers.data, whole)

    def start_from_first(self, arrays: Iterable[Any]) -> None:
        """Everybody's arrays are those of rank 0."""
        for array in arrays:
            host = array if isinstance(array, np.ndarray) else self._device.to_numpy(array)
            self.ranks.broadcast(host)
            if host is not array:
                self._device.copy(array, host)

    def whole(self, slot: Any) -> Any:
        """All of a slot on rank 0, of which each rank has a block or, if that is how it is, the whole."""
        if not self.shards_optimizer:
            return slot
        found = self.room(slot)
        self.ranks.to_first(self._device.to_numpy(slot), found if self.ranks.is_first else None)
        return found

    def room(self, slot: Any) -> Any:
        """Where rank 0 puts all of a slot, to be handed out."""
        if not self.shards_optimizer:
            return slot
        return np.zeros(self._buffers.length if self.ranks.is_first else 0, self._buffers.dtype)

    def hand_out(self, whole: Any, slot: Any) -> None:
        """The way back from `whole`."""
        if not self.shards_optimizer:
            self.start_from_first([slot])
            return
        mine = np.empty(self._buffers.block, self._buffers.dtype)
        self.ranks.from_first(whole if self.ranks.is_first else None, mine)
        self._device.copy(slot, mine)

    def added_up(self, array: Any) -> Array:
        """The sum over all ranks of an array as long as all parameters, apart from it."""
        found = np.array(self._device.to_numpy(array))
        self.ranks.add_up(found)
        return found

    def expect_no_drift(self, arrays: Mapping[str, Any], steps: int) -> None:
        """Raises one sentence if some array differs between ranks."""
        digests = [zlib.crc32(np.ascontiguousarray(self._device.to_numpy(a)).reshape(-1).data) for a in arrays.values()]
        self.ranks.expect_same_bits(digests, list(arrays), f"after step {steps}")

    def _on_host(self, array: Any) -> Array:
        if self._staged is None:
            return array  # type: ignore[no-any-return]
        self._device.fetch(self._staged, array)
        return self._staged

    def _from_host(self, array: Any, host: Array) -> None:
        if self._staged is not None:
            self._device.copy(array, host)
