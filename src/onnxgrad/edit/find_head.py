"""find_head(): the last product or convolution before a value, whose number of results a new head changes."""

from collections.abc import Mapping
from typing import NamedTuple

import onnx_ir as ir

from onnxgrad.edit.class_axis import constants
from onnxgrad.graph.node import named
from onnxgrad.graph.quantization import OF_INTEGERS
from onnxgrad.graph.suggest import listed
from onnxgrad.graph.tensor import dims_of
from onnxgrad.passes.draft import Draft
from onnxgrad.passes.find_parameters import role_at
from onnxgrad.rules.ml import TREES
from onnxgrad.schema import MICROSOFT, ML, is_standard

CONVOLUTIONS = {"Conv": 0, "FusedConv": 0, "ConvTranspose": 1}  # by the weight's axis of what they compute
WEIGHT_WITHIN = "MatMulNBits"  # of com.microsoft: the weight is in pieces


class Head(NamedTuple):
    """A node with weights, and where in them and in its result the classes are."""

    node: ir.Node
    data: ir.Value  # what it multiplies
    at: int  # the input that is the weight
    bias_at: int | None  # the input that is a bias, if the operator has one
    weight: tuple[int, ...]  # shape
    weight_axis: int
    axis: int  # in the result

    @property
    def classes(self) -> int:
        """How many there are."""
        return self.weight[self.weight_axis]

    @property
    def bias(self) -> ir.Value | None:
        """The bias that the node itself has."""
        at = self.bias_at
        return None if at is None or at >= len(self.node.inputs) else self.node.inputs[at]


def find_head(draft: Draft, known: Mapping[str, ir.Value], value: ir.Value) -> Head:
    """Raises one sentence if there is none, or more than one."""
    found = _products_before(value, known, constants(draft.graph))
    if not found:
        maker = value.producer()
        by = "" if maker is None else f", which {named(maker)} computes"
        raise ValueError(
            f"{draft.caller}: no product or convolution with weights is before {value.name!r}{by}, so that there is no "
            "head to replace: onnxgrad.join() appends one"
        )
    if len(found) > 1 and not any(n.op_type in OF_INTEGERS for n in found):
        raise ValueError(
            f"{draft.caller}: {value.name!r} has {len(found)} heads, {listed(str(n.outputs[0].name) for n in found)}: "
            "name the result of the one to replace with `output`"
        )
    node = next((n for n in found if n.op_type in OF_INTEGERS), next(iter(found)))
    return _head(draft, known, node, found[node])


def _products_before(
    value: ir.Value, known: Mapping[str, ir.Value], constant: set[ir.Value]
) -> dict[ir.Node, int]:  # fmt: skip
    """The nodes with weights that are met first on the ways back from a value, and which input the weight is."""
    found: dict[ir.Node, int] = {}
    seen: set[ir.Node] = set()
    waiting = [value]
    while waiting:
        node = waiting.pop().producer()
        if node is None or node in seen:
            continue
        seen.add(node)
        at = _weight_at(node, constant)
        if at is not None:
            found[node] = at
            continue
        of_integers = node.op_type in ("QuantizeLinear", "DequantizeLinear", "Cast") or node.op_type[:7] == "QLinear"
        read = node.inputs[:1] if of_integers else node.inputs
        waiting += [v for v in read if v is not None and v not in constant and (of_integers or _is_float(v, known))]
    return found


def _weight_at(node: ir.Node, constant: set[ir.Value]) -> int | None:
    if node.op_type in OF_INTEGERS or node.domain == ML or (node.op_type, node.domain) == (WEIGHT_WITHIN, MICROSOFT):
        return 1
    roles = ((k, role_at(node, k)) for k, v in enumerate(node.inputs) if v in constant)
    return next((k for k, role in roles if role == "weight"), None)


def _is_float(value: ir.Value, known: Mapping[str, ir.Value]) -> bool:
    dtype = known[str(value.name)].dtype if str(value.name) in known else value.dtype
    return dtype is None or dtype.is_floating_point()


def _head(draft: Draft, known: Mapping[str, ir.Value], node: ir.Node, at: int) -> Head:
    kind = node.op_type
    if kind in TREES and node.domain == ML:
        raise ValueError(
            f"{draft.caller}: {named(node)} has no weights with a gradient: train trees with the library that made "
            "them; onnxgrad.cut() and onnxgrad.join() append a head to the part before them"
        )
    if kind in OF_INTEGERS:
        raise ValueError(
            f"{draft.caller}: {named(node)} multiplies integers, whose weights cannot be trained: replace the head of "
            "the model before it is quantized, or of one with QuantizeLinear and DequantizeLinear"
        )
    weight_axis = _weight_axis(node, at)
    if weight_axis is None:
        raise ValueError(
            f"{draft.caller}: the last weights are those of {named(node)}, expected MatMul, Gemm or a convolution: "
            "append a head with onnxgrad.join()"
        )
    data, weight = node.inputs[1 - at], node.inputs[at]
    assert data is not None and weight is not None
    if kind == WEIGHT_WITHIN:
        shape: tuple[int, ...] = (node.attributes["K"].as_int(), node.attributes["N"].as_int())
    else:
        dims = dims_of(known[str(weight.name)])
        if dims is None or len(dims) < 2 or not all(isinstance(d, int) for d in dims):
            raise ValueError(f"{draft.caller}: {named(node)} has a weight of the shape {dims}, expected a matrix")
        shape = tuple(int(d) for d in dims if isinstance(d, int))
    if kind not in CONVOLUTIONS and len(shape) != 2:
        raise ValueError(f"{draft.caller}: {named(node)} has a weight of the shape {list(shape)}, expected a matrix")
    bias_at = {"Gemm": 2, "FusedGemm": 2, "Conv": 2, "FusedConv": 2, "ConvTranspose": 2, WEIGHT_WITHIN: 5}.get(kind)
    if kind in CONVOLUTIONS:
        return Head(node, data, at, bias_at, shape, weight_axis, 1)
    rank = 2 if "Gemm" in kind else len(dims_of(known[str(node.outputs[0].name)]) or ())
    if not rank:
        raise ValueError(f"{draft.caller}: {named(node)} has a result whose number of dimensions is not known")
    return Head(node, data, at, bias_at, shape, weight_axis, rank - 1 if at == 1 else rank - 2)


def _weight_axis(node: ir.Node, at: int) -> int | None:
    """The axis of the weight along which the classes are; None if the node is no head."""
    kind = node.op_type
    if not is_standard(node.domain) and node.domain != MICROSOFT:
        return None
    if kind in CONVOLUTIONS:
        return CONVOLUTIONS[kind]
    if kind in ("MatMul", "FusedMatMul"):
        is_turned = node.attributes.get_int("transB" if at == 1 else "transA", 0)
        return int(not is_turned) if at == 1 else int(bool(is_turned))
    if kind in ("Gemm", "FusedGemm") and at == 1:
        return int(not node.attributes.get_int("transB", 0))
    return 1 if kind == WEIGHT_WITHIN else None
