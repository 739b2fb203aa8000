"""The axis of the classes in values computed from the result of a head, and the constants that contain their number."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.builder import Builder, evaluate
from onnxgrad.graph.node import captured, named, values_read
from onnxgrad.graph.replace import take_place
from onnxgrad.graph.tensor import Dim, dims_of
from onnxgrad.passes.draft import Draft
from onnxgrad.schema import MICROSOFT, is_standard

SAME_SHAPE = {
    "Abs", "Cast", "Ceil", "Celu", "Clip", "CumSum", "Dropout", "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid",
    "HardSwish", "Hardmax", "Identity", "IsInf", "IsNaN", "LeakyRelu", "Log", "LogSoftmax", "LpNormalization", "Mish",
    "Neg", "Not", "QuickGelu", "Reciprocal", "Relu", "Round", "Selu", "Shrink", "Sigmoid", "Sign", "Softmax",
    "Softplus", "Softsign", "Sqrt", "Swish", "Tanh", "ThresholdedRelu",
}  # fmt: skip
BROADCAST = {
    "Add", "And", "Div", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max", "Mean", "Min", "Mod",
    "Mul", "Or", "PRelu", "Pow", "Sub", "Sum", "Where", "Xor",
}  # fmt: skip
CHANNELS_SECOND = {"AveragePool", "GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool", "LpPool", "MaxPool", "Upsample"}
REDUCTIONS = {f"Reduce{name}" for name in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum",
                                           "SumSquare")}  # fmt: skip
NUMBERED = {"ArgMax", "ArgMin", "TopK"}  # the numbers of classes
NUMBERS_STAY = {"Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"}  # of those
CLASS_NUMBER = -1  # in place of an axis: what a value holds are numbers of classes
WHOLE = -2  # in place of an axis: the result has the shape that was asked for
SIZES = 3  # an input of Resize


class Lost(NamedTuple):
    """Why a value cannot be, and the last one before it that can."""

    why: str
    before: str


class CannotError(ValueError):
    """What a node does with the classes holds for the old number of them alone."""


class ClassAxis:
    """Follows the classes from the head's result on; `edits` then makes the graph one of another number of classes."""

    def __init__(
        self,
        draft: Draft,
        known: Mapping[str, ir.Value],
        new: int,
        shape: Sequence[int] | None,
        add_bias: Callable[[ir.Node, int], None] | None,
    ) -> None:
        """`add_bias` is told the node that adds one number for each class, and which of its inputs these are."""
        self._graph, self._known, self._new, self._old = draft.graph, known, new, 0
        self._add_bias, self._builder, self._constant = add_bias, Builder(draft.graph), constants(draft.graph)
        self.shape = shape  # that a Reshape on the way gives the result
        self.at: dict[ir.Value, int] = {}
        self.lost: dict[ir.Value, Lost] = {}  # values that cannot be, and why
        self.edits: list[Callable[[], None]] = []
        self._longer: set[ir.Value] = set()  # by an axis that a Squeeze removed, as long as there was one class

    def follow(self, result: ir.Value, axis: int, old: int) -> None:
        """From the head's result, whose classes are along an axis, through all nodes."""
        self._old = old
        self.at[result] = axis
        for node in self._graph:
            read = values_read(node)
            lost = next((self.lost[v] for v in read if v in self.lost), None)
            if lost is not None:
                self.lost |= dict.fromkeys(node.outputs, lost)
            elif any(v in self.at for v in read):
                self._try(node)

    def _try(self, node: ir.Node) -> None:
        before = len(self.edits)
        try:
            axis = self._through(node)
        except CannotError as error:
            del self.edits[before:]
            first = next(v for v in self.at if v in node.inputs or v in captured(node))
            self.lost |= dict.fromkeys(node.outputs, Lost(f"{named(node)} {error}", str(first.name)))
            return
        if axis is not None:
            self.at |= dict.fromkeys(node.outputs, axis)

    def shape_of(self, value: ir.Value) -> ir.Shape | None:
        """What is known of a value's shape now."""
        axis, declared = self.at[value], dims_of(value)
        if axis == WHOLE and self.shape is not None:
            batch = None if not declared else declared[0]
            return ir.Shape(batch if d == -1 and k == 0 else None if d == -1 else d for k, d in enumerate(self.shape))
        if declared is None or axis < 0 or value in self._longer:
            return None
        return ir.Shape(self._new if k == axis else d for k, d in enumerate(declared))

    def _through(self, node: ir.Node) -> int | None:
        """The axis of the classes in what a node computes; None if there is none any more."""
        k, value = next(((k, v) for k, v in enumerate(node.inputs) if v in self.at), (0, None))
        if value is None:
            raise CannotError("reads them in a subgraph")
        axis, kind = self.at[value], node.op_type
        if not is_standard(node.domain) and (node.domain != MICROSOFT or kind not in SAME_SHAPE):
            raise CannotError(f"is an operator of {node.domain!r}")
        if axis == CLASS_NUMBER:
            return _with_numbers(kind)
        if value in self._longer:
            self._longer.update(node.outputs)
        if kind in SAME_SHAPE and k == 0:
            return axis
        if kind in BROADCAST:
            return self._broadcast(node, value, axis)
        if axis == WHOLE or value in self._longer:
            raise CannotError("goes on with a result whose shape is another now")
        method = getattr(self, f"_{kind.lower()}", None)
        if kind in CHANNELS_SECOND and axis == 1:
            return axis
        if kind in REDUCTIONS or kind in NUMBERED:
            return self._reduce(node, axis)
        if kind in ("Shape", "Size"):
            return None
        if method is None or (k != 0 and kind != "Concat"):
            raise CannotError("is not known to let their number change")
        found: int | None = method(node, axis)
        return found

    def _dims(self, value: ir.Value | None) -> tuple[Dim, ...]:
        found = dims_of(self._known[str(value.name)]) if value is not None and str(value.name) in self._known else None
        if found is None:
            raise CannotError(
                f"has {'' if value is None else value.name!r}, the number of whose dimensions is not known"
            )
        return found

    def _broadcast(self, node: ir.Node, value: ir.Value, axis: int) -> int:
        others = [(k, v) for k, v in enumerate(node.inputs) if v is not None and v not in self.at]
        if axis == WHOLE or value in self._longer:
            if any(d != 1 for _, v in others for d in self._dims(v)):
                raise CannotError("goes on with a result whose shape is another now")
            return axis
        from_end = len(self._dims(value)) - axis
        followed = [v for v in node.inputs if v is not None and v in self.at]
        if any(self.at[v] < 0 or len(self._dims(v)) - self.at[v] != from_end for v in followed):
            raise CannotError("combines them along different axes")
        for k, other in others:
            dims = self._dims(other)
            if self._add_bias is not None and node.op_type == "Add" and self._is_bias(other, from_end):
                self._add_bias(node, k)
                self._add_bias = None  # there is one
            elif len(dims) >= from_end and dims[-from_end] != 1:
                raise CannotError(f"takes {other.name!r}, which has numbers for each of {self._old}")
        return max(len(self._dims(v)) for v in node.inputs if v is not None) - from_end

    def _is_bias(self, value: ir.Value, from_end: int) -> bool:
        """Whether it is weights, one number for each class."""
        dims, dtype = self._dims(value), self._known[str(value.name)].dtype
        is_weight = value in self._constant and dtype is not None and dtype.is_floating_point()
        is_long = [d for d in dims if d != 1] == [self._old] * (self._old != 1)
        return is_weight and is_long and len(dims) >= from_end and dims[-from_end] == self._old

    def _transpose(self, node: ir.Node, axis: int) -> int:
        rank = len(self._dims(node.inputs[0]))
        return list(node.attributes.get_ints("perm", range(rank)[::-1])).index(axis)

    def _numbers(self, value: ir.Value) -> np.ndarray[Any, Any] | None:
        """What a value is that nodes compute from constants, as exporters write axes and shapes."""
        found, node = self._builder.constant_of(value), value.producer()
        if found is not None or node is None or value not in self._constant or len(node.outputs) > 1:
            return found
        inputs = [None if v is None else self._numbers(v) for v in node.inputs]
        if any(v is not None and a is None for v, a in zip(node.inputs, inputs, strict=True)):
            return None
        return evaluate(node, inputs, self._builder.opsets)[0]  # type: ignore[no-any-return]

    def _axes(self, node: ir.Node, at: int = 1) -> list[int] | None:
        """Axes that an attribute or, in later opsets, an input names; None without."""
        if "axes" in node.attributes:
            return list(node.attributes["axes"].as_ints())
        given = node.inputs[at] if len(node.inputs) > at else None
        if given is None:
            return None
        numbers = self._numbers(given)
        if numbers is None:
            raise CannotError("computes its axes")
        return [int(a) for a in numbers.ravel()]

    def _squeeze(self, node: ir.Node, axis: int) -> int | None:
        before, named = self._dims(node.inputs[0]), self._axes(node)
        if named is None:
            named = [k for k, d in enumerate(before) if d == 1]
        axes = [a % len(before) for a in named]
        if axis in axes:
            return self._keep_axis(node, axis, others=len(axes) > 1) if self._new != 1 else None
        return axis - sum(a < axis for a in axes)

    def _keep_axis(self, node: ir.Node, axis: int, others: bool) -> int:
        """Leaves out a node that removes the axis, which was of length 1."""
        if others:
            raise CannotError("removes their axis, of length 1, with others")
        self._bypass(node)
        self._longer.update(node.outputs)
        return axis

    def _bypass(self, node: ir.Node) -> None:
        """What it reads goes where its result went."""

        def edit() -> None:
            source, (result,) = node.inputs[0], node.outputs
            assert source is not None
            if not result.is_graph_output():
                result.replace_all_uses_with(source)
                return
            if source.is_graph_output():  # which keeps its own name
                node.op_type, node.domain = "Identity", ""
                node.attributes.clear()
                node.resize_inputs(1)
                return
            take_place(source, result)
            if result in self._longer:
                self._longer.add(source)

        self.edits.append(edit)

    def _unsqueeze(self, node: ir.Node, axis: int) -> int:
        named = self._axes(node) or []
        rank = len(self._dims(node.inputs[0])) + len(named)
        new = {a % rank for a in named}
        return [a for a in range(rank) if a not in new][axis]

    def _flatten(self, node: ir.Node, axis: int) -> int:
        before = self._dims(node.inputs[0])
        at = node.attributes.get_int("axis", 1) % (len(before) + 1)
        beside = before[:at] if axis < at else before[at:]
        return self._alone(beside, 0 if axis < at else 1)

    def _alone(self, dims: Sequence[Dim], axis: int) -> int:
        """The axis that several become, of which that of the classes is the only long one."""
        if [d for d in dims if d != 1] not in ([self._old], []):
            raise CannotError(f"mixes them with others: {self._old} of {in_words(dims)}")
        return axis

    def _reshape(self, node: ir.Node, axis: int) -> int | None:
        if self.shape is not None:
            self._reshape_to(node, self.shape)
            return WHOLE
        before, after = self._dims(node.inputs[0]), self._dims(node.outputs[0])
        others = [d for k, d in enumerate(before) if k != axis]
        if self._old == 1 and len(after) == len(others) and all(
            a == b or not (isinstance(a, int) and isinstance(b, int)) for a, b in zip(others, after, strict=True)
        ):  # fmt: skip
            return self._keep_axis(node, axis, others=False) if self._new != 1 else None
        places = [k for k, d in enumerate(after) if d == self._old]
        if axis == len(before) - 1 and len(after) - 1 in places:
            places = [len(after) - 1]
        elif axis in places and list(before[: axis + 1]) == list(after[: axis + 1]):
            places = [axis]
        if len(places) != 1:
            raise CannotError(f"makes {in_words(after)} of {in_words(before)}: `shape` says what the result should be")
        self._restate(node, 1, places[0])
        return places[0]

    def _reshape_to(self, node: ir.Node, shape: Sequence[int]) -> None:
        target = self._builder.constant(np.array(shape), ir.DataType.INT64).value

        def edit() -> None:
            node.attributes.pop("allowzero", None)
            node.replace_input_with(1, target)
            node.outputs[0].shape = None

        self.edits.append(edit)

    def _restate(self, node: ir.Node, at: int, k: int) -> None:
        """Where a shape that a node is given states the number of classes as its k-th, states the new one."""
        value = node.inputs[at]
        found = None if value is None else self._statement(node, at, value, k)
        if found is None:
            return  # it is computed from the shape of what has the classes
        reader, place, numbers, index = found
        stated = int(numbers.reshape(-1)[index])
        if stated in (-1, 0):
            return
        if stated != self._old:
            raise CannotError(f"states {stated} where {self._old} are")
        changed = numbers.copy()
        changed.reshape(-1)[index] = self._new
        constant = self._builder.constant(changed, ir.DataType.from_numpy(changed.dtype)).value
        self.edits.append(lambda: reader.replace_input_with(place, constant))

    def _statement(
        self, reader: ir.Node, place: int, value: ir.Value, k: int
    ) -> tuple[ir.Node, int, np.ndarray[Any, Any], int] | None:
        """The constant that states the k-th number of a shape: its reader, and where the number is in it."""
        node, numbers = value.producer(), self._numbers(value)
        if numbers is not None:
            return reader, place, numbers, k
        if node is None or not is_standard(node.domain):
            return None
        if node.op_type == "Concat":
            for i, part in enumerate(node.inputs):
                assert part is not None
                (length,) = self._dims(part)
                if not isinstance(length, int):
                    return None
                if k < length:
                    return self._statement(node, i, part, k)
                k -= length
        source = node.inputs[0] if node.inputs else None
        if source is not None and (node.op_type in ("Cast", "Identity") or (node.op_type == "Unsqueeze" and k == 0)):
            return self._statement(node, 0, source, k)
        return None

    def _expand(self, node: ir.Node, axis: int) -> int:
        axis += len(self._dims(node.outputs[0])) - len(self._dims(node.inputs[0]))
        if self._old != 1:
            value = node.inputs[1]
            found = None if value is None else self._statement(node, 1, value, axis)
            if found is None or int(found[2].reshape(-1)[found[3]]) != 1:
                self._restate(node, 1, axis)
        return axis

    def _resize(self, node: ir.Node, axis: int) -> int:
        if len(node.inputs) > SIZES and node.inputs[SIZES] is not None and "axes" not in node.attributes:
            self._restate(node, SIZES, axis)
        return axis

    def _reduce(self, node: ir.Node, axis: int) -> int | None:
        rank = len(self._dims(node.inputs[0]))
        if node.op_type in NUMBERED:
            axes: list[int] | None = [node.attributes.get_int("axis", -1 if node.op_type == "TopK" else 0) % rank]
        else:
            named = self._axes(node)
            axes = None if named is None else [a % rank for a in named]
        if axes is None or axis in axes:
            if node.op_type == "TopK":
                self._expect_top(node)
                self.at[node.outputs[1]] = CLASS_NUMBER
                return None
            return CLASS_NUMBER if node.op_type in NUMBERED else None
        stays = node.op_type == "TopK" or node.attributes.get_int("keepdims", 1) == 1
        return axis if stays else axis - sum(a < axis for a in axes)

    def _expect_top(self, node: ir.Node) -> None:
        value = node.inputs[1] if len(node.inputs) > 1 else None
        count = self._numbers(value) if value is not None else None
        if count is None or int(count.item()) > self._new:
            raise CannotError(f"finds the first of {self._old}")

    def _gather(self, node: ir.Node, axis: int) -> int:
        rank = len(self._dims(node.inputs[0]))
        at = node.attributes.get_int("axis", 0) % rank
        if at == axis:
            raise CannotError("picks some of them")
        return axis if axis < at else axis - 1 + len(self._dims(node.inputs[1]))

    def _slice(self, node: ir.Node, axis: int) -> int:
        rank = len(self._dims(node.inputs[0]))
        starts = node.attributes.get_ints("starts", ())
        axes = self._axes(node, at=3)
        if axes is None:
            axes = list(range(len(starts) or int(self._dims(node.inputs[1])[0] or rank)))
        if axis in [a % rank for a in axes]:
            raise CannotError("picks some of them")
        return axis

    def _split(self, node: ir.Node, axis: int) -> int:
        if node.attributes.get_int("axis", 0) % len(self._dims(node.inputs[0])) == axis:
            raise CannotError("splits them")
        return axis

    def _concat(self, node: ir.Node, axis: int) -> int:
        rank = len(self._dims(node.outputs[0]))
        if node.attributes["axis"].as_int() % rank == axis:
            raise CannotError("appends others to them")
        if any(v is not None and self.at.get(v) != axis for v in node.inputs):
            raise CannotError(f"concatenates them with others that have {self._old}, too")
        return axis

    def _quantizelinear(self, node: ir.Node, axis: int) -> int:
        """Leaves out both halves of a quantization: its scale was measured on the old head."""
        readers = [use.node for use in node.outputs[0].uses()]
        if node.outputs[0].is_graph_output() or any(n.op_type != "DequantizeLinear" for n in readers):
            raise CannotError("has a scale that was measured on the old ones")
        self._bypass(node)
        return axis

    def _dequantizelinear(self, node: ir.Node, axis: int) -> int:
        self._bypass(node)
        return axis


def _with_numbers(kind: str) -> int | None:
    if kind in NUMBERS_STAY:
        return CLASS_NUMBER
    if kind in BROADCAST or kind in ("Shape", "Size"):
        return None
    raise CannotError("looks up what the old ones are called")


def in_words(dims: Sequence[Dim]) -> str:
    """Dimensions, for messages."""
    return f"[{', '.join('?' if d is None or str(d).startswith('unk__') else str(d) for d in dims)}]"


def constants(graph: ir.Graph) -> set[ir.Value]:
    """Initializers, and what nodes compute from such alone."""
    found = {v for v in graph.initializers.values() if not v.is_graph_input()}
    for node in graph:
        if all(v is None or v in found for v in (*node.inputs, *captured(node))):
            found.update(node.outputs)
    return found
