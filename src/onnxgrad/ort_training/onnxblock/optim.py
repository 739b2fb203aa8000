"""The optimizers: models of one node that update all parameters, which onnxruntime calls by the names of its inputs."""

from collections.abc import Sequence
from typing import Any

import onnx

from onnxgrad.ort_training.onnxblock import blocks
from onnxgrad.ort_training.onnxblock.onnxblock import ForwardBlock
from onnxgrad.schema import MICROSOFT

__all__ = ["SGD", "AdamW", "ClipGradNorm"]


class ClipGradNorm(blocks.Block):
    """Scales all gradients such that the norm of them together is at most `max_norm`."""

    def __init__(self, max_norm: float) -> None:
        super().__init__()
        self._max_norm = float(max_norm)

    def build(self, gradients_name: str) -> str:
        clipped = self._add_node(
            "InplaceClipGradNorm",
            [gradients_name],
            "clip_grad_norm_output",
            domain=MICROSOFT,
            max_norm=self._max_norm,
        )
        info = onnx.helper.make_tensor_sequence_value_info(clipped, onnx.TensorProto.FLOAT, None)
        self.base.graph.value_info.append(info)
        return clipped


class SGDOptimizer(blocks.Block):
    """SGDOptimizerV2 of com.microsoft."""

    def build(self, learning_rate_name: str, params_name: str, gradients_name: str) -> str:
        inputs = [learning_rate_name, params_name, gradients_name]
        return self._add_node("SGDOptimizerV2", inputs, "update_completed", domain=MICROSOFT)


class AdamWOptimizer(blocks.Block):
    """AdamWOptimizer of com.microsoft, in the mode that decays weights after the update."""

    def __init__(
        self,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__()
        self._attributes: dict[str, Any] = {
            "alpha": float(betas[0]),
            "beta": float(betas[1]),
            "epsilon": float(eps),
            "weight_decay": float(weight_decay),
            "correct_bias": int(bias_correction),
            "adam_mode": 1,
        }

    def build(
        self,
        learning_rate_name: str,
        step_name: str,
        parameter_sequence_name: str,
        gradient_sequence_name: str,
        first_order_moment_sequence_name: str,
        second_order_moment_sequence_name: str,
    ) -> str:
        inputs = [
            learning_rate_name,
            step_name,
            parameter_sequence_name,
            gradient_sequence_name,
            first_order_moment_sequence_name,
            second_order_moment_sequence_name,
        ]
        return self._add_node("AdamWOptimizer", inputs, "adamw.updated_flag", domain=MICROSOFT, **self._attributes)


class _Optimizer(ForwardBlock):
    """The inputs that onnxruntime gives to every optimizer, and the output that says whether it has updated."""

    moments: tuple[str, ...]

    def __init__(self, clip_grad: blocks.Block | None) -> None:
        super().__init__()
        self._clip_grad = clip_grad

    def build(self, parameters: tuple[Sequence[onnx.TensorProto], Sequence[onnx.TensorProto]]) -> str:
        """Updates the first of the two: those that are trained, as `TrainingBlock.parameters()` has them."""
        trained, _ = parameters
        if not trained:
            raise RuntimeError("the optimizer has nothing to update: no parameter requires a gradient")
        inputs = self.base.graph.input
        inputs.append(onnx.helper.make_tensor_value_info("learning_rate", onnx.TensorProto.FLOAT, [1]))
        inputs.append(onnx.helper.make_tensor_value_info("step", onnx.TensorProto.INT64, [1]))
        for name in ("params", "gradients", *self.moments):
            inputs.append(onnx.helper.make_tensor_sequence_value_info(name, trained[0].data_type, None))
        gradients = "gradients" if self._clip_grad is None else self._clip_grad("gradients")
        updated = self._update(gradients)
        self.base.graph.output.append(onnx.helper.make_tensor_value_info(updated, onnx.TensorProto.BOOL, [1]))
        return updated

    def _update(self, gradients: str) -> str:
        raise NotImplementedError


class AdamW(_Optimizer):
    """AdamW; `clip_grad` is a block such as ClipGradNorm."""

    moments = ("first_order_moments", "second_order_moments")

    def __init__(
        self,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        clip_grad: Any = None,
    ) -> None:
        super().__init__(clip_grad)
        self._adamw = AdamWOptimizer(bias_correction, betas, eps, weight_decay)

    def _update(self, gradients: str) -> str:
        return str(self._adamw("learning_rate", "step", "params", gradients, *self.moments))


class SGD(_Optimizer):
    """SGD; `clip_grad` is a block such as ClipGradNorm."""

    moments = ("first_order_moments",)  # which onnxruntime gives and SGD does not read

    def __init__(self, clip_grad: Any = None) -> None:
        super().__init__(clip_grad)
        self._sgd = SGDOptimizer()

    def _update(self, gradients: str) -> str:
        return str(self._sgd("learning_rate", "params", gradients))
