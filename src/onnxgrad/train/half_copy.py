"""HalfCopy: all parameters in a half type, as a step in half precision reads them."""

from typing import Any

from onnxgrad.train.optim import OptimizerState


class HalfCopy:
    """A copy of the parameters that updates on a GPU write as well; whatever else changes these is found out."""

    def __init__(self, optimizer: OptimizerState, dtype: Any, *, is_updated: bool) -> None:
        """`is_updated`: whether this process updates all parameters itself."""
        self._optimizer, self._buffers = optimizer, optimizer.buffers
        self.array = self._buffers.device.zeros(self._buffers.length, dtype)
        self._writes: int | None = None  # into the parameters, when they were last cast
        self._is_updated = is_updated
        optimizer.copies = [self.array] if is_updated else []

    def refresh(self) -> None:
        """Casts the parameters, unless only updates can have changed them since the last time."""
        data, device = self._buffers.data, self._buffers.device
        writes = device.writes(data) if self._is_updated and not self._buffers.is_shared else None
        if writes is None or writes != self._writes:
            device.copy(self.array, data)
        self._writes = writes
