"""ForwardBlock and TrainingBlock: blocks that make a whole model of what they build on."""

from abc import abstractmethod
from typing import Any

import onnx

from onnxgrad.graph.suggest import suggestion
from onnxgrad.ort_training.gradient_graph import build_gradient_graph
from onnxgrad.ort_training.onnxblock import _graph_utils, blocks

Parameters = tuple[list[onnx.TensorProto], list[onnx.TensorProto]]


class ForwardBlock(blocks.Block):
    """A block whose results become the outputs of the model."""

    _model: onnx.ModelProto | None = None

    @abstractmethod
    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Adds the block to `self.base`; returns the names of the model's outputs."""

    def to_model_proto(self) -> onnx.ModelProto:
        """The model."""
        if self._model is None:
            raise RuntimeError(f"{type(self).__name__} has no model yet: call it first, within onnxblock.base(model)")
        return self._model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Builds the block into the current model, whose outputs are its results then."""
        output = self._built(*args, **kwargs)
        self._model = self.infer_shapes_on_base()
        _graph_utils.register_graph_outputs(self._model, output)
        self.base.CopyFrom(self._model)
        return output


class TrainingBlock(blocks.Block):
    """A block whose first result is a loss: it adds the gradients of the parameters that `requires_grad` names.

    The others become outputs of the model, too.
    """

    def __init__(self) -> None:
        super().__init__()
        self._requires_grad: set[str] = set()
        self._frozen_params: set[str] = set()
        self._parameters: Parameters | None = None
        self._models: tuple[onnx.ModelProto, onnx.ModelProto] | None = None

    @abstractmethod
    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Adds the block to `self.base`; returns the name of the loss, or a tuple that begins with it."""

    def requires_grad(self, argument_name: str, value: bool = True) -> None:
        """Says that an initializer or an input gets a gradient, or, if not `value`, that it is a frozen parameter.

        All other initializers stay in the models as constants.
        """
        wanted, other = self._requires_grad, self._frozen_params
        if not value:
            wanted, other = other, wanted
        wanted.add(argument_name)
        other.discard(argument_name)

    def parameters(self) -> Parameters:
        """The initializers that are trained, and those that are frozen, in the model's order."""
        if self._parameters is None:
            raise RuntimeError(
                f"{type(self).__name__} has no parameters yet: call it first, within onnxblock.base(model)"
            )
        return self._parameters

    def to_model_proto(self) -> tuple[onnx.ModelProto, onnx.ModelProto]:
        """The training model and the eval model; parameters are inputs of both."""
        if self._models is None:
            raise RuntimeError(f"{type(self).__name__} has no models yet: call it first, within onnxblock.base(model)")
        return self._models

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Builds the block and the gradients into the current model, which is the training model then."""
        output = self._built(*args, **kwargs)
        outputs = [output] if isinstance(output, str) else list(output)
        model = self.infer_shapes_on_base()
        _graph_utils.register_graph_outputs(model, outputs)
        self._expect_known(model)
        trained, frozen = (
            [tensor for tensor in model.graph.initializer if tensor.name in names]
            for names in (self._requires_grad, self._frozen_params)
        )
        self._parameters = trained, frozen
        self._models = build_gradient_graph(model, self._requires_grad, self._frozen_params, outputs)
        self.base.CopyFrom(self._models[0])
        return output

    def _expect_known(self, model: onnx.ModelProto) -> None:
        known = [value.name for value in (*model.graph.initializer, *model.graph.input)]
        missing = min(self._requires_grad.difference(known), default=None)
        if missing is not None:
            raise RuntimeError(
                f"requires_grad: the model has no initializer or input {missing!r}{suggestion(missing, known)}"
            )
