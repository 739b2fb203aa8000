"""FusedElementwise: an operator that only graphs for the CUDA provider have, each node with a program of its own."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from onnxgrad.ops.families.elementwise_program import DTYPES, NAME, by_program, parse_all
from onnxgrad.schema import Input, Known, Output
from onnxgrad.tensor_types import DTYPES as ONNX_DTYPES
from onnxgrad.tensor_types import TypeConstraint

_by_name = {str(dtype): dtype for dtype in ONNX_DTYPES.values()}
ANY = TypeConstraint("T", tuple(name for name, dtype in ONNX_DTYPES.items() if str(dtype) in DTYPES))


class FusedElementwise:
    """The operator of one node, with what runtime/cuda.py asks an op.Op for."""

    name = NAME
    attributes = ()
    chooses_outputs = False

    def __init__(self, text: str) -> None:
        self._programs = parse_all(text)
        lines = [line for program in self._programs for line in program.inputs]
        self.inputs = [Input(line.name, ANY, False) for line in lines]
        self.outputs = [Output(name, ANY, False) for program in self._programs for name in program.results]
        self.input_dtypes = tuple(_by_name[line.dtype] for line in lines)
        self._output_dtypes = [_by_name[p.dtypes[name]] for p in self._programs for name in p.results]
        self._prepared: dict[Any, Any] = {}  # by the shapes of the inputs

    def output_shapes(self, known: Sequence[Known], attributes: Mapping[str, Any]) -> list[tuple[int, ...]]:
        """As the programs say."""
        parts = zip(self._programs, by_program(self._programs, [x.dims for x in known]), strict=True)
        return [shape for program, dims in parts for shape in program.shapes(dims)]

    def output_dtypes(self, dtypes: Sequence[np.dtype[Any]]) -> list[np.dtype[Any]]:
        """As the programs say."""
        return self._output_dtypes

    def kernel_asks_for(self, backend: str, parameter: str) -> bool:
        """Nothing but inputs and outputs."""
        return False

    def kernel(self, backend: str) -> Callable[..., None]:
        """What launches it."""
        return self._launch

    def _launch(self, *tensors: Any, bad: Any) -> None:
        from onnxgrad.cuda.core.fused_elementwise import Prepared

        inputs, outputs = tensors[: len(self.inputs)], tensors[len(self.inputs) :]
        key = tuple(x.shape for x in inputs)
        prepared = self._prepared.get(key)
        if prepared is None:
            prepared = self._prepared[key] = Prepared(self._programs, key)
        prepared(inputs, outputs)

    def named(self, error: Exception) -> Exception:
        """The same error, its sentence opening with the operator's name."""
        error.args = (f"{NAME}: {error.args[0] if error.args else type(error).__name__}",)
        return error
