"""The ONNX side of an operator: its domain, what it declares, and its schema with shape inference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import onnx
from onnx.defs import OpSchema

from onnxgrad.tensor_types import TypeConstraint

MICROSOFT = "com.microsoft"  # onnxruntime's, and so that of onnxruntime-training's operators
ML = "ai.onnx.ml"  # operators of classical models, as skl2onnx writes them
PREVIEW, PREVIEW_TRAINING = "ai.onnx.preview", "ai.onnx.preview.training"  # what ONNX tries out
OWN = "onnxgrad"  # operators that onnxruntime-training does not have, or has with another contract
OF_ONNXRUNTIME = "onnxgrad.onnxruntime"  # where its additions to ONNX's own are while onnx looks at the others

# Operators of onnxruntime-training that it has put into ONNX's domain.
STRAYS = {"AveragePoolGrad", "MaxPoolGrad", "SparseSoftmaxCrossEntropy", "SparseSoftmaxCrossEntropyGrad"}

Dim: TypeAlias = int | str | None  # a number, a symbol, or unknown
MOST_DIMENSIONS = 64  # NumPy's limit


def is_standard(domain: str) -> bool:
    """Whether it is ONNX's own domain, under either of its names."""
    return domain in ("", "ai.onnx")


@dataclass(frozen=True)
class Input:
    """One positional tensor of an operator."""

    name: str
    constraint: TypeConstraint
    optional: bool


@dataclass(frozen=True)
class Output:
    """One result of an operator; `optional` ones may be left out of a graph."""

    name: str
    constraint: TypeConstraint
    optional: bool


@dataclass(frozen=True)
class Attribute:
    """One compile-time setting of an operator: int, float, str, or a sequence of these."""

    name: str
    kind: type
    is_list: bool
    default: Any


class Declaration(Protocol):
    """What an operator tells onnx of itself; op.Op does."""

    name: str
    domain: str
    version: int
    doc: str
    inputs: list[Input]
    outputs: list[Output]
    attributes: list[Attribute]
    shape_rule: Callable[..., Any]


class Known(NamedTuple):
    """What is known of an input before it is computed: its dimensions and, for shape-like ones, its values."""

    dims: tuple[Dim, ...] | None
    values: tuple[Dim, ...] | None

    @property
    def as_shape(self) -> tuple[Dim, ...] | None:
        """The shape this input spells, as far as it is known."""
        if self.dims is not None and isinstance(self.dims[0], int) and self.dims[0] > MOST_DIMENSIONS:
            raise ValueError(
                f"shape has {self.dims[0]} values, expected at most {MOST_DIMENSIONS} dimensions as in NumPy"
            )
        if self.values is not None:
            return self.values
        if self.dims is not None and isinstance(self.dims[0], int):
            return (None,) * self.dims[0]
        return None

    @property
    def numbers(self) -> tuple[int, ...] | None:
        """The values, if every one of them is a known number."""
        if self.values is None:
            return None
        for value in self.values:  # a plain loop, since every call of an operator comes through here
            if value.__class__ is not int:
                return None
        return self.values  # type: ignore[return-value]


def agree(given: Sequence[Dim], expected: Sequence[Dim]) -> bool:
    """Whether two shapes can be the same: as many dimensions, and no two known numbers that differ."""
    return len(given) == len(expected) and all(
        a == b or not isinstance(a, int) or not isinstance(b, int) for a, b in zip(given, expected, strict=True)
    )


def register(op: Declaration) -> OpSchema:
    """Makes the operator known to onnx: checker, shape inference and version look-up."""
    constraints = {i.constraint.name: i.constraint for i in op.inputs} | {
        o.constraint.name: o.constraint for o in op.outputs
    }
    schema = OpSchema(
        op.name,
        op.domain,
        op.version,
        op.doc,
        inputs=[_formal(i.name, i.constraint.name, i.optional) for i in op.inputs],
        outputs=[_formal(o.name, o.constraint.name, o.optional) for o in op.outputs],
        type_constraints=[(c.name, [f"tensor({t})" for t in c.types], "") for c in constraints.values()],
        attributes=[_attribute(a) for a in op.attributes],
    )
    schema.set_type_and_shape_inference_function(lambda context: _infer(op, context))
    if not onnx.defs.has(op.name, op.domain):  # a schema that another package registered stays
        onnx.defs.register_schema(schema)
    return schema


def _formal(name: str, variable: str, optional: bool) -> OpSchema.FormalParameter:
    option = OpSchema.FormalParameterOption
    return OpSchema.FormalParameter(name, variable, param_option=option.Optional if optional else option.Single)


def _attribute(attribute: Attribute) -> OpSchema.Attribute:
    kinds = OpSchema.AttrType
    kind = {
        (int, False): kinds.INT,
        (float, False): kinds.FLOAT,
        (str, False): kinds.STRING,
        (int, True): kinds.INTS,
        (float, True): kinds.FLOATS,
        (str, True): kinds.STRINGS,
    }[attribute.kind, attribute.is_list]
    if attribute.default is None:
        return OpSchema.Attribute(attribute.name, kind, required=False)
    return OpSchema.Attribute(attribute.name, onnx.helper.make_attribute(attribute.name, attribute.default))


def _infer(op: Declaration, context: Any) -> None:
    """Types and shapes of the outputs, as far as the inputs tell."""
    known: list[Known | None] = []
    element_types: dict[str, int] = {}
    for position, declared in enumerate(op.inputs):
        if position >= context.get_num_inputs() or not context.has_input(position):
            known.append(None)
            continue
        inferred_type = context.get_input_type(position)
        if inferred_type is None:  # the output of an unknown operator
            known.append(Known(None, None))
            continue
        tensor = inferred_type.tensor_type
        element_types[declared.constraint.name] = tensor.elem_type
        dims = tuple(_dim(d) for d in tensor.shape.dim) if tensor.HasField("shape") else None
        values = _known_values(context, position) if declared.constraint.on_host else None
        known.append(Known(dims, values))
    attributes = {a.name: _attribute_value(a, context) for a in op.attributes}
    try:
        for declared, entry in zip(op.inputs, known, strict=True):
            _check_host_input(declared, entry)
        rule = op.shape_rule(*known, **attributes)
    except ValueError as error:
        raise ValueError(f"{op.name}: {error}") from None
    shapes = [rule] if len(op.outputs) == 1 else rule
    for position, (output, shape) in enumerate(zip(op.outputs, shapes, strict=True)):
        element_type = element_types.get(output.constraint.name) or _only_type(output.constraint)
        if position >= context.get_num_outputs() or element_type is None:
            continue
        inferred = onnx.TypeProto()
        inferred.tensor_type.elem_type = element_type
        if shape is not None:
            inferred.tensor_type.shape.CopyFrom(_shape_proto(shape))
        context.set_output_type(position, inferred)


def _only_type(constraint: TypeConstraint) -> int | None:
    """What a type variable stands for in any case, if it has no choice."""
    return onnx.helper.np_dtype_to_tensor_dtype(constraint.dtypes[0]) if len(constraint.types) == 1 else None


def _check_host_input(declared: Input, known: Known | None) -> None:
    """What a call checks when it makes an array of a shape-like input."""
    if known is None or not declared.constraint.on_host:
        return
    ranks = (0, 1) if declared.constraint.single else (1,)
    if known.dims is not None and len(known.dims) not in ranks:
        raise ValueError(f"{declared.name} has shape {list(known.dims)}, expected one dimension")
    if declared.constraint.name == "I" and any(isinstance(v, int) and v < 0 for v in known.values or ()):
        raise ValueError(f"{declared.name} is {list(known.values or ())}, expected no negative dimension")


def _known_values(context: Any, position: int) -> tuple[Dim, ...] | None:
    """A constant's numbers, or the symbols that onnx carried here from a Shape operator."""
    constant = context.get_input_data(position)
    if constant is not None:
        return tuple(onnx.numpy_helper.to_array(constant).ravel().tolist())
    symbolic = context.get_symbolic_input(position)
    return None if symbolic is None else tuple(_dim(d) for d in symbolic.dim)


def _dim(dim: onnx.TensorShapeProto.Dimension) -> Dim:
    if dim.HasField("dim_value"):
        return int(dim.dim_value)
    return dim.dim_param or None


def _shape_proto(shape: Sequence[Dim]) -> onnx.TensorShapeProto:
    proto = onnx.TensorShapeProto()
    for dim in shape:
        entry = proto.dim.add()
        if isinstance(dim, str):
            entry.dim_param = dim
        elif dim is not None:
            entry.dim_value = dim
    return proto


def _attribute_value(attribute: Attribute, context: Any) -> Any:
    proto = context.get_attribute(attribute.name)
    if proto is None:
        return attribute.default
    value = onnx.helper.get_attribute_value(proto)
    if attribute.kind is str:
        return [v.decode() for v in value] if attribute.is_list else value.decode()
    return value
