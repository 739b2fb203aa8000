"""The length of the whole gradient, which every update asks for."""

import math
from collections.abc import Mapping

import numpy as np

from onnxgrad.tensor_types import Array
from onnxgrad.train.optim import OptimizerState


class GradientNorm:
    """Called, it gives the length. Gradients that a graph has measured are not gone over once more.

    `norms` are the graph's outputs with their lengths, by parameter; `outputs` is where they go.
    """

    def __init__(self, state: OptimizerState, norms: Mapping[str, str]) -> None:
        buffers = state.buffers
        self._state, self._device = state, buffers.device
        self._lengths: Array = np.zeros(len(norms), buffers.dtype)
        self._unmeasured = buffers.without(state.chunks, norms)
        self._sums = self._device.zeros(len(state.chunks), np.float64)
        self._sums_of_unmeasured = self._sums[: len(self._unmeasured)]
        self.outputs = {name: self._lengths[k : k + 1].reshape(()) for k, name in enumerate(norms.values())}

    def __call__(self) -> float:
        state, device, sums = self._state, self._device, self._sums
        if state.is_sharded:
            device.run("squares", state.chunks, state.grad, sums)
            return math.sqrt(float(state.of_all_chunks(sums).sum()))
        total = device.sum_of_squares(self._unmeasured, state.grad, self._sums_of_unmeasured, self._lengths)
        if not math.isfinite(total) and len(self._lengths):  # finite numbers may be too long for float32
            total = device.sum_of_squares(state.chunks, state.grad, sums, self._lengths[:0])
        return math.sqrt(total)
