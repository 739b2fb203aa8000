"""insert_quantization(): runs onnxruntime's quantizer, without its output, on data of any kind."""

import contextlib
import io
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from onnxgrad.graph.suggest import suggestion
from onnxgrad.graph.validity import one_line
from onnxgrad.interop import is_foreign, to_numpy
from onnxgrad.tensor_types import Array


def insert_quantization(
    path: Path,
    data: Iterable[Mapping[str, Any]],
    weights: str,
    activations: str,
    per_channel: bool,
    excluded: Collection[str],
) -> onnx.ModelProto:
    """Calibrates the model in a file, and returns it with QuantizeLinear and DequantizeLinear; writes files beside."""
    from onnxruntime import quantization

    proto = onnx.load(path)
    # By its metadata the quantizer knows that there is nothing to fold any more.
    onnx.helper.set_model_props(proto, {"onnx.quant.pre_process": "onnxgrad"})
    onnx.save(proto, path)
    types = {kind.name.removeprefix("Q").lower(): kind for kind in quantization.QuantType}
    reader, result = _Reader(proto.graph, data), path.with_name("quantized.onnx")
    with quiet():
        try:
            quantization.quantize_static(
                str(path), str(result), reader, quant_format=quantization.QuantFormat.QDQ, per_channel=per_channel,
                activation_type=types[activations], weight_type=types[weights], nodes_to_exclude=sorted(excluded),
            )  # fmt: skip
        except Exception as error:  # onnxruntime's errors have no type in common
            if error is reader.error:
                raise
            raise ValueError(f"quantize: onnxruntime cannot quantize the model: {one_line(error)}") from None
    return onnx.load(result)


class _Reader:
    """Batches as onnxruntime's calibration asks for them."""

    def __init__(self, graph: onnx.GraphProto, data: Iterable[Mapping[str, Any]]) -> None:
        weights = {tensor.name for tensor in graph.initializer}
        inputs = [v for v in graph.input if v.name not in weights]
        self._dtypes = {v.name: onnx.helper.tensor_dtype_to_np_dtype(v.type.tensor_type.elem_type) for v in inputs}
        shapes = {v.name: v.type.tensor_type.shape for v in inputs if v.type.tensor_type.HasField("shape")}
        self._dims = {name: [d.dim_value or d.dim_param or "?" for d in shape.dim] for name, shape in shapes.items()}
        self._batches, self._count = iter(data), 0
        self.error: Exception | None = None

    def get_next(self) -> dict[str, Array] | None:
        """The inputs of the next batch; None after the last."""
        try:
            batch = next(self._batches, None)
            if batch is None and not self._count:
                raise ValueError("quantize: data has no batches")
            self._count += 1
            return None if batch is None else self._inputs(batch)
        except Exception as error:
            self.error = error
            raise

    def __iter__(self) -> Iterator[dict[str, Array]]:
        while (batch := self.get_next()) is not None:
            yield batch

    def _inputs(self, batch: Any) -> dict[str, Array]:
        if not isinstance(batch, Mapping):
            raise TypeError(f"quantize: a batch is a {type(batch).__name__}, expected a dict of arrays by input name")
        found = {}
        for name, dtype in self._dtypes.items():
            if name not in batch:
                raise ValueError(f"quantize: a batch lacks {name!r}, an input of the model{suggestion(name, batch)}")
            array = to_numpy(batch[name]) if is_foreign(batch[name]) else np.asarray(batch[name])
            if array.dtype != dtype and not np.can_cast(array.dtype, dtype, "same_kind"):
                raise TypeError(f"quantize: a batch's {name} holds {array.dtype}, expected {dtype}")
            dims = self._dims.get(name, list(array.shape))
            if len(dims) != array.ndim or any(d != n for d, n in zip(dims, array.shape, strict=True) if type(d) is int):
                raise ValueError(f"quantize: a batch's {name} has shape {list(array.shape)}, expected {dims}")
            found[name] = np.ascontiguousarray(array, dtype).reshape(array.shape)
        return found


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Within it nothing is printed or logged, and Python's logging is left as it was."""
    root, level = logging.getLogger(), logging.root.manager.disable
    handlers = list(root.handlers)
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(level)
        root.handlers[:] = handlers  # logging.warning() adds one if there is none
