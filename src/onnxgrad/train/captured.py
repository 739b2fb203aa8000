"""Captured runs: for each shape of batch a session of its own, whose whole graph is one CUDA graph.

onnxruntime runs a graph node by node, and the host needs longer for that than a GPU for many a node. So a run is
captured once, with all that our own kernels launch, and replayed from then on; nothing waits for it. A CUDA graph reads
and writes the same memory every time: batches are copied into arrays of their own. And its shapes are fixed, so that
what a graph computes from them, on the CPU, is constant.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import onnx_ir as ir

from onnxgrad.runtime.interrupts import run
from onnxgrad.schema import is_standard
from onnxgrad.train.devices import Device

MOST_SHAPES = 4  # that are captured: each takes memory for its activations
# The shapes of what they give depend on numbers, for which the host has to wait.
VALUES_DECIDE = {"NonZero", "Compress", "Unique", "NonMaxSuppression", "If", "Loop", "Scan"}


def can_be_captured(graph: ir.Graph) -> bool:
    """Whether the shapes alone decide what is launched; onnxruntime refuses graphs with nodes on the CPU, too."""
    return not any(is_standard(node.domain) and node.op_type in VALUES_DECIDE for node in graph.all_nodes())


class _Captured(NamedTuple):
    """What belongs to one shape of batch."""

    session: Any
    binding: Any
    batch: dict[str, Any]  # where batches are copied to


class CapturedRuns:
    """Runs of a graph as CUDA graphs."""

    def __init__(
        self,
        open_session: Callable[[Mapping[str, Any]], Any],
        bind: Callable[[Any, Mapping[str, Any]], Any],
        device: Device,
    ) -> None:
        """`open_session` makes one for a batch of these shapes, None if it cannot be captured; `bind` its binding."""
        import onnxruntime
        import torch

        self._open_session, self._bind, self._device, self._torch = open_session, bind, device, torch
        self._options = onnxruntime.RunOptions()
        self._options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        # What kernels of ours allocate while a run is captured belongs to its graph, and to nobody else.
        self._pool = torch.cuda.MemPool()
        self._captured: dict[Any, _Captured] = {}
        self._seen: set[Any] = set()  # shapes of batches that ran node by node
        self.is_possible = True

    def run(self, arrays: Mapping[str, Any]) -> bool:
        """Runs a batch of NumPy arrays and tensors; false if it is to run node by node.

        So does the first batch of any shape but the first: the last batch of an epoch may be the only smaller one.
        """
        key = tuple((name, tuple(a.shape), str(a.dtype)) for name, a in arrays.items())
        found = self._captured.get(key)
        if found is None:
            if not self.is_possible or len(self._captured) == MOST_SHAPES:
                return False
            if self._captured and key not in self._seen:
                self._seen.add(key)
                return False
            found = self._capture(arrays)
            if found is None:
                return False
            self._captured[key] = found
            return True
        for name, array in arrays.items():
            self._device.send(array, found.batch[name])
        run(found.session.run_with_iobinding, found.binding, self._options)
        return True

    def _capture(self, arrays: Mapping[str, Any]) -> _Captured | None:
        session = self._open_session(arrays)
        self.is_possible = session is not None
        if session is None:
            return None
        batch = {name: self._device.send(array) for name, array in arrays.items()}
        binding = self._bind(session, batch)
        with self._torch.cuda.use_mem_pool(self._pool):  # onnxruntime runs it once, captures it, and replays it
            run(session.run_with_iobinding, binding, self._options)
        return _Captured(session, binding, batch)
