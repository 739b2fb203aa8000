"""TensorSession: an onnxruntime session that reads torch tensors in place, and returns tensors."""

import contextlib
import functools
from collections.abc import Mapping
from typing import Any

import onnx_ir as ir
import torch

from onnxgrad.graph.validity import one_line
from onnxgrad.runtime.interrupts import run
from onnxgrad.runtime.register import require_onnxruntime
from onnxgrad.train.devices import Device, device_of
from onnxgrad.train.session import is_of_onnxruntime, ort_value, own_options, without_large_weights

CALLER = "onnxgrad.torch"
KINDS = {
    torch.float32: ir.DataType.FLOAT, torch.float64: ir.DataType.DOUBLE, torch.float16: ir.DataType.FLOAT16,
    torch.bfloat16: ir.DataType.BFLOAT16, torch.bool: ir.DataType.BOOL, torch.uint8: ir.DataType.UINT8,
    torch.int8: ir.DataType.INT8, torch.int16: ir.DataType.INT16, torch.int32: ir.DataType.INT32,
    torch.int64: ir.DataType.INT64, torch.uint16: ir.DataType.UINT16, torch.uint32: ir.DataType.UINT32,
    torch.uint64: ir.DataType.UINT64,
}  # fmt: skip
DTYPES = {kind: dtype for dtype, kind in KINDS.items()}


@functools.cache
def place_of(device: torch.device) -> Device:
    """What onnxruntime needs of a device; all sessions for one GPU are on one stream."""
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"{CALLER}: tensors are on the device {str(device)!r}, expected 'cpu' or 'cuda'")
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        return device_of(device.type, caller=CALLER)


class TensorSession:
    """Called with tensors by name, all on one device, it returns new ones; several threads may call it at once."""

    def __init__(self, model: ir.Model, device: torch.device) -> None:
        onnxruntime = require_onnxruntime(CALLER)
        self._place = place_of(device)
        proto, weights = without_large_weights(model)
        values = {name: ort_value(array) for name, array in weights.items()}
        options = own_options(quiet=True)
        options.add_external_initializers(list(values), list(values.values()))
        self._weights = weights, values  # onnxruntime has their addresses
        arguments = proto.SerializeToString(), options
        try:
            self._session = run(onnxruntime.InferenceSession, *arguments, providers=list(self._place.providers))
        except Exception as error:
            if not is_of_onnxruntime(error):
                raise
            raise RuntimeError(f"{CALLER}: onnxruntime refuses the graph to be run: {one_line(error)}") from error
        self.inputs = [i.name for i in self._session.get_inputs()]
        places = zip(self._session.get_outputs(), self._session.get_output_memory_infos(), strict=True)
        # Shapes are computed on the host, even for a GPU, and are read there.
        self._outputs = {o.name: "cpu" if place.name == "Cpu" else device.type for o, place in places}
        self._index = device.index or 0

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Runs with what the session reads of some tensors."""
        read = {name: tensors[name].detach().contiguous() for name in self.inputs}
        with self._place.at_work():
            binding = self._session.io_binding()
            for name, tensor in read.items():
                where = tensor.device.type, tensor.device.index or 0
                binding.bind_input(name, *where, KINDS[tensor.dtype].value, tuple(tensor.shape), tensor.data_ptr())
            for name, kind in self._outputs.items():
                binding.bind_output(name, kind, self._index if kind != "cpu" else 0)
            run(self._session.run_with_iobinding, binding)
            if self._place.name != "cpu":  # what a node on the CPU gave is on its way to the GPU, by another stream
                binding.synchronize_outputs()
            found = binding.get_outputs()
        return {name: _tensor(value) for name, value in zip(self._outputs, found, strict=True)}


def _tensor(value: Any) -> torch.Tensor:
    """An OrtValue as a tensor, which keeps its memory."""
    tensor: torch.Tensor = torch.utils.dlpack.from_dlpack(value._ortvalue.to_dlpack())  # as onnxruntime 1.25 has it
    return tensor.view(torch.bool) if value.element_type() == ir.DataType.BOOL else tensor
