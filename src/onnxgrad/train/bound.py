"""A session whose weights and gradients are arrays of ours: bound once, read and written in place."""

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from onnxgrad.runtime.register import register
from onnxgrad.tensor_types import Array
from onnxgrad.threads import get_num_threads
from onnxgrad.train.batches import BatchChecker


class BoundSession:
    """A session on the CPU; `run` takes the inputs that are not bound and gives the outputs that are not."""

    def __init__(self, model: ir.Model, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> None:
        import onnxruntime

        options = register()
        options.intra_op_num_threads = get_num_threads()
        proto: Any = ir.to_proto(model)
        self._session = onnxruntime.InferenceSession(
            proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        self._kept = [inputs, outputs]  # onnxruntime has their addresses
        self._binding = self._session.io_binding()
        for name, array in inputs.items():
            self._binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        for name, array in outputs.items():
            self._binding.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        self._free = [o.name for o in self._session.get_outputs() if o.name not in outputs]
        self._check = BatchChecker([i for i in self._session.get_inputs() if i.name not in inputs])

    def run(self, batch: Mapping[str, Any]) -> dict[str, Array]:
        """One run. The bound outputs are where they are bound to."""
        arrays = self._check(batch)
        for name, array in arrays.items():
            self._binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        for name in self._free:
            self._binding.bind_output(name, "cpu")
        self._session.run_with_iobinding(self._binding)
        values = self._binding.get_outputs()
        names = [*self._kept[1], *self._free]  # in the order they were bound
        return {name: value.numpy() for name, value in zip(names, values, strict=True) if name in self._free}
