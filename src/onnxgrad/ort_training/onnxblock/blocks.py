"""The blocks: each adds a node, or a few, to the current model and returns the name of what it computes."""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from onnxgrad.ort_training.onnxblock import _graph_utils, model_accessor
from onnxgrad.schema import MICROSOFT, ML

__all__ = [
    "Abs",
    "Add",
    "Block",
    "Cast",
    "Clip",
    "Constant",
    "Div",
    "InputLike",
    "LabelEncoder",
    "Linear",
    "Log",
    "Mul",
    "Neg",
    "PassThrough",
    "Pow",
    "ReduceAllL2",
    "ReduceMean",
    "ReduceSum",
    "SequenceConstruct",
    "Sigmoid",
    "Sub",
]

IMPORTED = {MICROSOFT: 1, ML: 3}  # versions, where the model does not import a domain


class Block(ABC):
    """What can be put on top of a graph, alone or as a part of other blocks.

    A block of your own has a method `build` that takes names of values, changes the model `self.base` or calls other
    blocks, and returns the names of its results. Call the block, not `build`, within `onnxblock.base(model)` or
    `onnxblock.empty_base()`: onnx then checks the model.
    """

    def __init__(self, temp_file_name: str = "temp.onnx") -> None:
        """Takes the name of a temporary file that onnxruntime-training wrote; none is written here."""
        self.base: Any = None  # the onnx.ModelProto to build on, once the block is called

    @abstractmethod
    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Adds the block to `self.base`; returns the names of its results."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Builds the block into the current model, and has onnx check that."""
        output = self._built(*args, **kwargs)
        _graph_utils.check(self.base)
        return output

    def infer_shapes_on_base(self) -> onnx.ModelProto:
        """A copy of the current model in which types and shapes are declared."""
        return _graph_utils.with_shapes(model_accessor.current().model)

    def _built(self, *args: Any, **kwargs: Any) -> Any:
        self.base = model_accessor.current().model
        return self.build(*args, **kwargs)

    def _add_node(
        self,
        op_type: str,
        inputs: list[str],
        output: str = "",
        domain: str | None = None,
        name: str = "",
        **attributes: Any,
    ) -> str:
        """Appends a node with one result; `output` and `name` are parts of names. Attributes of None are left out."""
        result = _graph_utils.generate_graph_name(output or f"{op_type.lower()}_output")
        name = _graph_utils.generate_graph_name(name or op_type)
        if domain is not None and all(opset.domain != domain for opset in self.base.opset_import):
            self.base.opset_import.append(onnx.helper.make_opsetid(domain, IMPORTED[domain]))
        self.base.graph.node.append(onnx.helper.make_node(op_type, inputs, [result], name, domain=domain, **attributes))
        return result

    def _add_initializer(self, token: str, array: np.ndarray) -> str:
        name = _graph_utils.generate_graph_name(token)
        self.base.graph.initializer.append(numpy_helper.from_array(array, name))
        return name

    def _add_number(self, token: str, number: float) -> str:
        return self._add_initializer(token, np.array([number], np.float32))


class _BinaryOp(Block):
    """An operator of two inputs."""

    def __init__(self, op_name: str) -> None:
        super().__init__()
        self._op_name = op_name

    def build(self, input_name1: str, input_name2: str) -> str:
        return self._add_node(self._op_name, [input_name1, input_name2])


class Add(_BinaryOp):
    """Add."""

    def __init__(self) -> None:
        super().__init__("Add")


class Sub(_BinaryOp):
    """Sub."""

    def __init__(self) -> None:
        super().__init__("Sub")


class Mul(_BinaryOp):
    """Mul."""

    def __init__(self) -> None:
        super().__init__("Mul")


class Div(_BinaryOp):
    """Div."""

    def __init__(self) -> None:
        super().__init__("Div")


class Pow(Block):
    """Pow with a constant exponent."""

    def __init__(self, exponent: float) -> None:
        super().__init__()
        self._exponent = exponent

    def build(self, pow_input_name: str) -> str:
        return self._add_node("Pow", [pow_input_name, self._add_number("pow_exponent", self._exponent)])


class _UnaryOp(Block):
    """An operator of one input."""

    def __init__(self, op_name: str, **attributes: Any) -> None:
        super().__init__()
        self._op_name = op_name
        self._attributes = attributes

    def build(self, input_name: str) -> str:
        return self._add_node(self._op_name, [input_name], **self._attributes)


class ReduceMean(_UnaryOp):
    """ReduceMean over all axes."""

    def __init__(self, keepdims: bool = True) -> None:
        super().__init__("ReduceMean", keepdims=keepdims)


class ReduceSum(_UnaryOp):
    """ReduceSum over all axes."""

    def __init__(self, keepdims: bool = True) -> None:
        super().__init__("ReduceSum", keepdims=keepdims)


class Sigmoid(_UnaryOp):
    """Sigmoid."""

    def __init__(self) -> None:
        super().__init__("Sigmoid")


class Log(_UnaryOp):
    """Log."""

    def __init__(self) -> None:
        super().__init__("Log")


class Neg(_UnaryOp):
    """Neg."""

    def __init__(self) -> None:
        super().__init__("Neg")


class Abs(_UnaryOp):
    """Abs."""

    def __init__(self) -> None:
        super().__init__("Abs")


class Constant(Block):
    """A float as an initializer of shape [1]."""

    def __init__(self, value_float: float) -> None:
        super().__init__()
        self._value = value_float

    def build(self) -> str:
        return self._add_number("initializer", self._value)


class SequenceConstruct(Block):
    """SequenceConstruct of any number of tensors."""

    def build(self, *sequence_input_names: str) -> str:
        return self._add_node("SequenceConstruct", list(sequence_input_names))


class ReduceAllL2(Block):
    """ReduceAllL2 of com.microsoft: the norm of all elements of any number of tensors."""

    def build(self, *reduce_node_input_names: str) -> str:
        norm = self._add_node("ReduceAllL2", list(reduce_node_input_names), domain=MICROSOFT)
        info = onnx.helper.make_tensor_value_info(norm, onnx.TensorProto.FLOAT, [1])
        self.base.graph.value_info.append(info)
        return norm


class Clip(Block):
    """Clip between two numbers, either of which may be None."""

    def __init__(self, clip_min: float | None = None, clip_max: float | None = None) -> None:
        super().__init__()
        self._bounds = {"clip_min": clip_min, "clip_max": clip_max}

    def build(self, clip_input_name: str) -> str:
        bounds = ["" if bound is None else self._add_number(token, bound) for token, bound in self._bounds.items()]
        return self._add_node("Clip", [clip_input_name, *bounds])


class PassThrough(Block):
    """Returns the names that it is given."""

    def build(self, *input_names: str) -> tuple[str, ...]:
        return input_names


class InputLike(Block):
    """A new input of the graph, of the type and shape of the value `like`."""

    def __init__(self, like: str) -> None:
        super().__init__()
        self._like = like

    def build(self, input_name: str | None = None) -> str:
        info = onnx.ValueInfoProto()
        info.CopyFrom(_graph_utils.get_value_info_for_name(self.base, self._like))
        info.name = input_name or _graph_utils.generate_graph_name("input")
        self.base.graph.input.append(info)
        return info.name


class LabelEncoder(Block):
    """LabelEncoder of ai.onnx.ml."""

    def __init__(
        self,
        default_float: float = 0.0,
        default_int64: int = -1,
        default_string: str = "_Unused",
        keys_floats: list[float] | None = None,
        keys_int64s: list[int] | None = None,
        keys_strings: list[str] | None = None,
        values_floats: list[float] | None = None,
        values_int64s: list[int] | None = None,
        values_strings: list[str] | None = None,
    ) -> None:
        super().__init__()
        self._attributes: dict[str, Any] = {
            "default_float": default_float,
            "default_int64": default_int64,
            "default_string": default_string,
            "keys_floats": keys_floats,
            "keys_int64s": keys_int64s,
            "keys_strings": keys_strings,
            "values_floats": values_floats,
            "values_int64s": values_int64s,
            "values_strings": values_strings,
        }

    def build(self, label_encoder_input_name: str) -> str:
        inputs = [label_encoder_input_name]
        return self._add_node("LabelEncoder", inputs, "label_encoder.output", domain=ML, **self._attributes)


class Cast(Block):
    """Cast to a type of onnx.TensorProto."""

    def __init__(self, to: int) -> None:
        super().__init__()
        self._to = to

    def build(self, cast_input_name: str) -> str:
        return self._add_node("Cast", [cast_input_name], "cast.output", to=self._to)


class Linear(Block):
    """Gemm with a weight of shape [in_features, out_features] and a bias, both drawn by np.random."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, alpha: float = 1.0, beta: float = 1.0
    ) -> None:
        super().__init__()
        self._shapes: dict[str, tuple[int, ...]] = {"linear.weight": (in_features, out_features)}
        if bias:
            self._shapes["linear.bias"] = (out_features,)
        self._attributes: dict[str, Any] = {"alpha": float(alpha), "beta": float(beta)}

    def build(self, linear_input_name: str) -> str:
        # np.random.seed decides, as it does in onnxruntime-training.
        drawn = {token: np.random.randn(*shape) for token, shape in self._shapes.items()}  # noqa: NPY002
        weights = [self._add_initializer(token, array.astype(np.float32)) for token, array in drawn.items()]
        return self._add_node("Gemm", [linear_input_name, *weights], "linear.output", name="linear", **self._attributes)
