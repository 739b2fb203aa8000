"""The loss of single examples, by the formulas of the loss itself, in a session of its own."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.builder import Builder, op
from onnxgrad.passes.append_loss import append_loss
from onnxgrad.runtime.register import require_onnxruntime
from onnxgrad.tensor_types import Array
from onnxgrad.train.losses import Loss

OPSET, IR_VERSION = 21, 10
TINY = 1e-38  # a probability that has a logarithm in float32
Shapes = tuple[tuple[int, ...], ...]


class ExampleLoss:
    """Computes the loss of every example, from predictions and targets that have the examples first.

    A loss may take what is before the Softmax or Sigmoid of a prediction. From the prediction alone that is its
    logarithm, or the logarithm of p / (1 - p); `of_sigmoid` names those that Sigmoid made.
    """

    def __init__(self, parts: Sequence[Loss], of_sigmoid: Sequence[str]) -> None:
        self._parts, self._of_sigmoid = parts, of_sigmoid
        self._sessions: dict[Shapes, Any] = {}

    def __call__(self, outputs: Mapping[str, Array], batch: Mapping[str, Array]) -> Array:
        given = {part.prediction: _wide(outputs[part.prediction]) for part in self._parts}
        shapes = tuple(array.shape[1:] for array in given.values())
        if shapes not in self._sessions:
            self._sessions[shapes] = self._session(given)
        session = self._sessions[shapes]
        kinds = {i.name: np.float32 if i.type == "tensor(float)" else _numpy_type(i.type) for i in session.get_inputs()}
        arrays = {**given, **{part.target: np.asarray(batch[part.target]) for part in self._parts}}
        feeds = {f"{name}_given" if name in given else name: array for name, array in arrays.items()}
        feeds = {name: np.ascontiguousarray(a, kinds[name]) for name, a in feeds.items() if name in kinds}
        count = len(next(iter(given.values())))
        losses = [session.run(None, {n: a[k : k + 1] for n, a in feeds.items()})[0] for k in range(count)]
        return np.array(losses, np.float64).reshape(count)

    def _session(self, given: Mapping[str, Array]) -> Any:
        graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name="loss")
        builder = Builder(graph)
        for name, array in given.items():
            kind = ir.DataType.from_numpy(array.dtype)
            value = ir.Value(name=f"{name}_given", shape=ir.Shape([1, *array.shape[1:]]), type=ir.TensorType(kind))
            graph.inputs.append(value)
            with builder.at_work(f"{name}_before"):
                result = self._activated(name, array)(builder.tensor(value)).value
            result.name = name
            graph.outputs.append(result)
        loss = append_loss(builder, self._parts)
        graph.outputs[:] = [loss]
        model = ir.Model(graph, ir_version=IR_VERSION)
        onnxruntime = require_onnxruntime("report")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 3
        content = ir.to_proto(model).SerializeToString()
        return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])

    def _activated(self, name: str, array: Array) -> Callable[[Any], Any]:
        """Nodes whose result is the prediction, with an activation at the end if there was one in the model."""
        part = next(part for part in self._parts if part.prediction == name)
        axis = getattr(part, "axis", None)
        if "Softmax" in part.activations and axis is not None and is_distribution(array, axis):
            return lambda p: op.Softmax(op.Log(op.Max(p, TINY)), axis=axis)
        if "Sigmoid" in part.activations and name in self._of_sigmoid:
            return lambda p: op.Sigmoid(op.Log(op.Max(p, TINY)) - op.Log(op.Max(1 - p, TINY)))
        return op.Identity  # type: ignore[no-any-return]


def _wide(array: Array) -> Array:
    return array if array.dtype in (np.float32, np.float64) else array.astype(np.float32)


def _numpy_type(described: str) -> Any:
    from onnxgrad.train.batches import NUMPY_TYPES

    return NUMPY_TYPES[described]


def is_distribution(array: Array, axis: int) -> bool:
    """Whether the numbers along an axis are probabilities that add up to 1."""
    if not -array.ndim <= axis < array.ndim or array.size == 0:
        return False
    return bool(array.min() >= 0 and array.max() <= 1 + 1e-3 and np.abs(array.sum(axis) - 1).max() < 1e-3)
