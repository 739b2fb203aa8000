"""The losses: each adds an input for the target, unless the graph has a value of its name, and returns a loss."""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx

from onnxgrad.ort_training.onnxblock import _graph_utils, blocks

__all__ = ["BCEWithLogitsLoss", "CrossEntropyLoss", "L1Loss", "MSELoss"]

REDUCTIONS: dict[str, Callable[[], Callable[[str], str]]] = {
    "mean": lambda: blocks.ReduceMean(keepdims=False),
    "sum": lambda: blocks.ReduceSum(keepdims=False),
    "none": lambda: str,  # a name stays as it is
}


def _expect_reduction(reduction: str) -> None:
    if reduction not in REDUCTIONS:
        raise RuntimeError(f"the reduction {reduction!r} of a loss is not known, expected 'mean', 'sum' or 'none'")


class _Loss(blocks.Block):
    """A loss of every element, and how these are reduced."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        _expect_reduction(reduction)
        self._reduce = REDUCTIONS[reduction]()

    def build(self, loss_input_name: str, target_name: str = "target") -> str:
        """Compares `loss_input_name` with `target_name`, which becomes an input unless the graph has it."""
        if not _graph_utils.node_arg_exists(self.base, target_name):
            blocks.InputLike(loss_input_name)(target_name)
        return self._reduce(self._elements(loss_input_name, target_name))

    def _elements(self, prediction: str, target: str) -> str:
        raise NotImplementedError


class MSELoss(_Loss):
    """(prediction - target)²."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__(reduction)
        self._sub, self._square = blocks.Sub(), blocks.Pow(2.0)

    def _elements(self, prediction: str, target: str) -> str:
        return str(self._square(self._sub(prediction, target)))


class L1Loss(_Loss):
    """|prediction - target|."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__(reduction)
        self._sub, self._abs = blocks.Sub(), blocks.Abs()

    def _elements(self, prediction: str, target: str) -> str:
        return str(self._abs(self._sub(prediction, target)))


class BCEWithLogitsLoss(_Loss):
    """Binary cross-entropy of logits: `weight` is multiplied with the loss, `pos_weight` with its part of positives.

    It is target · softplus(-x) + (1 - target) · softplus(x), which stays finite for any logit x; the logarithms of a
    Sigmoid that onnxruntime-training writes are NaN from about 17 on.
    """

    def __init__(self, weight: Any = None, reduction: str = "mean", pos_weight: Any = None) -> None:
        super().__init__(reduction)
        self._weight, self._pos_weight = weight, pos_weight
        self._softplus, self._neg = blocks._UnaryOp("Softplus"), blocks.Neg()
        self._add, self._sub, self._mul = blocks.Add(), blocks.Sub(), blocks.Mul()

    def _elements(self, prediction: str, target: str) -> str:
        dtype = _dtype(self.base, prediction)
        one = self._add_initializer("bceloss.sub_ones", np.ones(1, dtype))
        positives = self._mul(target, self._softplus(self._neg(prediction)))
        if self._pos_weight is not None:
            weight = self._add_initializer("bceloss.pos_weight", np.asarray(self._pos_weight, dtype))
            positives = self._mul(positives, weight)
        negatives = self._mul(self._sub(one, target), self._softplus(prediction))
        loss = str(self._add(positives, negatives))
        if self._weight is None:
            return loss
        return str(self._mul(self._add_initializer("bceloss.weight", np.asarray(self._weight, dtype)), loss))


class CrossEntropyLoss(blocks.Block):
    """Cross-entropy of scores and the numbers of the right classes; `weight` has a factor for each class.

    Classes are axis 1 of the scores, as ONNX has it: scores of shape [N, C, d1, …] go with labels of shape [N, d1, …].
    """

    def __init__(self, weight: Any = None, reduction: str = "mean", ignore_index: int | None = None) -> None:
        super().__init__()
        _expect_reduction(reduction)
        self._weight = weight
        self._attributes: dict[str, Any] = {"reduction": reduction, "ignore_index": ignore_index}

    def build(self, scores_input_name: str, labels_name: str = "labels") -> str:
        """Compares `scores_input_name` with `labels_name`, which becomes an input unless the graph has it."""
        inputs = [scores_input_name, labels_name]
        if self._weight is not None:
            weight = np.asarray(self._weight, _dtype(self.base, scores_input_name))
            inputs.append(self._add_initializer("celoss.weight", weight))
        if not _graph_utils.node_arg_exists(self.base, labels_name):
            self._add_labels(scores_input_name, labels_name)
        loss = self._add_node("SoftmaxCrossEntropyLoss", inputs, "loss", **self._attributes)
        # Its gradient reads them.
        self.base.graph.node[-1].output.append(_graph_utils.generate_graph_name("log_prob"))
        return loss

    def _add_labels(self, scores: str, name: str) -> None:
        labels = onnx.ValueInfoProto()
        labels.CopyFrom(_graph_utils.get_value_info_for_name(self.base, scores))
        labels.name = name
        labels.type.tensor_type.elem_type = onnx.TensorProto.INT64
        if len(labels.type.tensor_type.shape.dim) > 1:
            del labels.type.tensor_type.shape.dim[1]
        self.base.graph.input.append(labels)


def _dtype(model: onnx.ModelProto, name: str) -> np.dtype[Any]:
    kind = _graph_utils.get_value_info_for_name(model, name).type.tensor_type.elem_type
    return onnx.helper.tensor_dtype_to_np_dtype(kind)
