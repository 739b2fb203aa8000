"""use_channels_last: convolutions of a training step, and all between them, on images whose channels come last.

cuDNN's kernels for half types want images this way, and transpose them around every call where they come otherwise.
So nodes that know both ways are changed where one of their images is there already, and convolutions always; what
comes in or goes out is transposed once. Then batch normalization takes in the Add and the Relu that follow it, and its
gradient the ReluGrad before it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.builder import Builder
from onnxgrad.graph.new_node import new_node
from onnxgrad.graph.node import is_transpose, only_user, permutation
from onnxgrad.graph.replace import replace_node, take_place
from onnxgrad.graph.tensor import known_dims, rank_of
from onnxgrad.ops.families.windows import pool_axes, pool_settings
from onnxgrad.passes.draft import Draft
from onnxgrad.passes.finish import drop_dead
from onnxgrad.schema import MICROSOFT, OWN, is_standard

FEWEST = 16  # channels that come and go of a convolution which makes it worthwhile
RANK = 4
TO_LAST, TO_FIRST = [0, 2, 3, 1], [0, 3, 1, 2]  # permutations for Transpose
# Numbers at the same place, or of a tensor that is repeated along some axes.
ELEMENTWISE = {
    "Abs", "Add", "And", "Cast", "Ceil", "Clip", "Cos", "Div", "Elu", "Equal", "Erf", "Exp", "Floor", "Gelu",
    "Greater", "GreaterOrEqual", "HardSigmoid", "HardSwish", "Identity", "LeakyRelu", "Less", "LessOrEqual", "Log",
    "Max", "Mean", "Min", "Mish", "Mul", "Neg", "Not", "Or", "Pow", "PRelu", "Reciprocal", "Relu", "Round", "Selu",
    "Sigmoid", "Sign", "Sin", "Softplus", "Softsign", "Sqrt", "Sub", "Sum", "Swish", "Tanh", "Where",
}  # fmt: skip
GRADIENTS = {
    "FastGelu", "FastGeluGrad", "Gelu", "GeluGrad", "HardSwishGrad", "LeakyReluGrad", "QuickGelu", "ReluGrad",
    "SigmoidGrad", "TanhGrad",
}  # fmt: skip
REDUCTIONS = {"ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL2", "ReduceSumSquare"}
HALF_TYPES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
COPIES = {"Cast", "CastLike", "Expand", "Identity", "Reshape"}


def use_channels_last(draft: Draft) -> int:
    """Changes the nodes of the main graph, if one of them gains by it; how many are changed."""
    if not any(_pays(node) for node in draft.graph):
        return 0
    change = _Change(draft.graph)
    for node in list(draft.graph):
        change.visit(node)
    change.finish()
    for node in list(draft.graph):
        if node.op_type == "NhwcBatchNorm":
            _take_in_what_follows(draft.graph, node)
    for node in list(draft.graph):
        if node.op_type == "NhwcBatchNorm":
            _take_in_sample_variance(draft.graph, node)
    for node in list(draft.graph):
        if node.op_type == "NhwcBatchNormGrad":
            _take_in_relu_grad(draft.graph, node)
    draft.graph.opset_imports.setdefault(OWN, 1)
    draft.graph.sort()
    drop_dead(draft)
    return len(change.changed)


def _pays(node: ir.Node) -> bool:
    """Whether cuDNN's kernels for such images are much faster, or, of half numbers, there are no others."""
    if is_max_pool(node) and node.outputs[0].dtype in HALF_TYPES:
        return True
    if not is_conv(node):
        return False
    if node.outputs[0].dtype in HALF_TYPES:
        return True
    dims = known_dims(node.inputs[1])
    many = all(isinstance(d, int) and d >= FEWEST for d in dims[:2])
    return many and node.attributes.get_int("group", 1) == 1


def is_conv(node: ir.Node) -> bool:
    """Whether it is a Conv that this pass changes."""
    return _is_conv(node, "Conv", "")


def _is_conv(node: ir.Node, kind: str, domain: str) -> bool:
    """Whether it is of that kind, and of images, its pads given as numbers."""
    return (
        node.op_type == kind
        and (node.domain == domain or (not domain and is_standard(node.domain)))
        and rank_of(node.inputs[0]) == rank_of(node.inputs[1]) == RANK
        and node.attributes.get_string("auto_pad", "NOTSET") in ("NOTSET", "VALID")
    )


class _Change:
    """A graph whose nodes are visited in their order; nodes that are changed stay until all are."""

    def __init__(self, graph: ir.Graph) -> None:
        self._graph, self._builder = graph, Builder(graph)
        self._last: dict[ir.Value, ir.Value] = {}  # images whose channels come last, by those whose come first
        self._transposed: set[ir.Value] = set()  # those of them that are there as they were, too
        self._shapes: dict[ir.Value, ir.Value] = {}  # those of images, in the same way
        self.changed: list[ir.Node] = []

    def visit(self, node: ir.Node) -> None:
        """Changes a node if it knows both ways, and an image of it is there already."""
        if is_transpose(node) and permutation(node) == TO_FIRST:
            source = node.inputs[0]
            assert source is not None
            self._last[node.outputs[0]] = source
        elif is_conv(node):
            image, *rest = node.inputs
            if len(rest) > 1 and self._is_zero(rest[1]):
                rest.pop()
            self._put(node, "NhwcConvolution", [self._image(image), *rest], _conv_attributes(node))
        elif _is_conv(node, "ConvGrad", MICROSOFT):
            dY, X, W = node.inputs
            self._put(node, "NhwcConvGrad", [self._image(dY), self._image(X), W], _conv_attributes(node), images=[0])
        elif _has_batch_statistics(node):
            self._visit_batch_norm(node)
        elif _has_given_statistics(node):
            self._visit_affine(node)
        elif is_max_pool(node):
            *images, settings = [*map(self._image, node.inputs), _pool_attributes(node)]
            self._put(node, f"Nhwc{node.op_type}", images, settings)
        elif _repeats_pixels(node):
            pixel, shape = node.inputs
            moved = self._moved_shape(node, shape)
            self._put(node, "Expand", [self._image(pixel), moved], [])
        elif any(v in self._last and rank_of(v) == RANK for v in node.inputs):
            self._visit_follower(node)

    def _visit_batch_norm(self, node: ir.Node) -> None:
        if node.op_type == "BatchNormInternal":
            X, *rest = node.inputs
            kept = [node.attributes[n] for n in ("epsilon", "momentum") if n in node.attributes]
            self._put(node, "NhwcBatchNorm", [self._image(X), *rest], kept, images=[0])
        else:
            dY, X, *rest = node.inputs
            self._put(node, "NhwcBatchNormGrad", [self._image(dY), self._image(X), *rest], [], images=[0])

    def _visit_affine(self, node: ir.Node) -> None:
        """Batch normalization in inference, x · a + b for each channel, which is what comes last."""
        X, scale, B, mean, variance = (v for v in node.inputs if v is not None)
        dtype, epsilon = scale.dtype, node.attributes.get_float("epsilon", 1e-5)
        assert dtype is not None

        def made(kind: str, *inputs: ir.Value, image: bool = False) -> ir.Value:
            return self._added(node, kind, inputs, dtype, known_dims(self._image(X) if image else scale))

        number = ir.tensor(np.array(epsilon, dtype.numpy()))
        spread = made("Add", variance, self._added(node, "Constant", [], dtype, [], value=number))
        a = made("Div", scale, made("Sqrt", spread))
        b = made("Sub", B, made("Mul", mean, a))
        if X.dtype == dtype:
            self._put(node, "Add", [made("Mul", self._image(X), a, image=True), b], [])
            return
        wide = self._added(node, "Cast", [self._image(X)], dtype, known_dims(self._image(X)), to=dtype.value)
        back = [ir.AttrInt64("to", kind.value) for kind in (X.dtype,) if kind is not None]
        self._put(node, "Cast", [made("Add", made("Mul", wide, a, image=True), b, image=True)], back)

    def _visit_follower(self, node: ir.Node) -> None:
        kind, own = node.op_type, node.domain in (MICROSOFT, OWN)
        first = node.inputs[0]
        if (own and kind in GRADIENTS) or (is_standard(node.domain) and kind in ELEMENTWISE):
            self._visit_elementwise(node)
        elif not is_standard(node.domain) or first is None:
            return
        elif kind == "CastLike" and node.inputs[1] in self._last:  # which is asked for its type alone
            node.replace_input_with(1, self._last[node.inputs[1]])
        elif first in self._transposed and kind in ("Transpose", "Shape", "Size"):
            return  # which may as well read what is there
        elif is_transpose(node):
            perm = [TO_FIRST[k] for k in permutation(node)]
            if perm == sorted(perm) and not node.outputs[0].is_graph_output():
                node.outputs[0].replace_all_uses_with(self._last[first])
            else:
                self._put(node, "Transpose", [self._last[first]], [ir.AttrInt64s("perm", perm)], images=[])
        elif kind == "Shape":
            end = node.attributes.get_int("end", RANK)
            axes = TO_FIRST[node.attributes.get_int("start", 0) : end]
            shape = self._added(node, "Shape", [self._last[first]], ir.DataType.INT64, [RANK])
            new = self._put(node, "Gather", [shape, self._constant(node, axes)], [], images=[])
            if axes == TO_FIRST:
                self._shapes[new.outputs[0]] = shape
        elif kind == "Size":
            self._put(node, kind, [self._last[first]], [], images=[])
        elif kind in ("Concat", "Split"):
            axis = node.attributes.get_int("axis", 0) % RANK
            if all(rank_of(v) == RANK for v in (node.inputs if kind == "Concat" else node.outputs)):
                many = node.inputs if kind == "Concat" else node.inputs[:1]
                attributes = [a for a in node.attributes.values() if a.name != "axis"]
                attributes.append(ir.AttrInt64("axis", TO_LAST.index(axis)))
                rest = () if kind == "Concat" else node.inputs[1:]
                self._put(node, kind, [*map(self._image, many), *rest], attributes)
        elif kind == "GlobalAveragePool":
            self._reduce(node, "ReduceMean", [2, 3], True)
        elif kind in REDUCTIONS:
            axes = self._axes(node)
            if axes:
                self._reduce(node, kind, axes, node.attributes.get_int("keepdims", 1) == 1)

    def _visit_elementwise(self, node: ir.Node) -> None:
        """Where an image has the result's shape; others may be repeated along images and have three axes."""
        dims = known_dims(node.outputs[0])
        there = [v for v in node.inputs if v in self._last and known_dims(v) == dims]
        if not there or any(rank_of(v) != RANK for v in node.outputs):
            return
        given = [v for v in node.inputs if v is not None]
        if any(v.shape is None or (rank_of(v) < RANK - 1 and any(d != 1 for d in known_dims(v))) for v in given):
            return
        inputs = [v if v is None or rank_of(v) < RANK - 1 else self._image(v) for v in node.inputs]
        self._put(node, node.op_type, inputs, list(node.attributes.values()), domain=node.domain)

    def _reduce(self, node: ir.Node, kind: str, axes: Sequence[int], keeps: bool) -> None:
        """A reduction, unless it leaves axes whose order is another."""
        left = [TO_LAST.index(k) for k in range(RANK) if k not in [a % RANK for a in axes]]
        first = node.inputs[0]
        if not keeps and left != sorted(left):
            return
        moved = sorted(TO_LAST.index(a % RANK) for a in axes)
        inputs, attributes = [self._image(first)], [ir.AttrInt64("keepdims", int(keeps))]
        newest = self._graph.opset_imports.get("", 0)
        if newest >= (13 if kind == "ReduceSum" else 18):
            inputs.append(self._constant(node, moved))
        else:
            attributes.append(ir.AttrInt64s("axes", moved))
        self._put(node, kind, inputs, attributes, images=[0] if keeps else [])

    def _axes(self, node: ir.Node) -> list[int]:
        """Those that are known; none otherwise."""
        if "axes" in node.attributes:
            return list(node.attributes["axes"].as_ints())
        given = node.inputs[1] if len(node.inputs) > 1 else None
        numbers = None if given is None else self._builder.constant_of(given)
        return [] if numbers is None else [int(n) for n in numbers.reshape(-1)]

    def _moved_shape(self, node: ir.Node, shape: ir.Value | None) -> ir.Value:
        assert shape is not None
        if shape in self._shapes:
            return self._shapes[shape]
        return self._added(node, "Gather", [shape, self._constant(node, TO_LAST)], ir.DataType.INT64, [RANK])

    def _is_zero(self, value: ir.Value | None) -> bool:
        """Whether it is a bias of zeros, as exporters write one for convolutions without."""
        while value is not None and (node := value.producer()) is not None and node.op_type in COPIES:
            value = node.inputs[0]
        numbers = None if value is None else self._builder.constant_of(value)
        return numbers is not None and not numbers.any()

    def _image(self, value: ir.Value | None) -> ir.Value:
        """The same with its channels last; of three axes, the first one goes last."""
        assert value is not None
        if value not in self._last:
            dims = known_dims(value)
            perm = TO_LAST if len(dims) == RANK else [1, 2, 0]
            name = self._builder.fresh_value_name(f"{value.name}_channels_last")
            node = new_node("Transpose", [value], name, {"perm": perm})
            (out,) = node.outputs
            out.type, out.shape = value.type, ir.Shape([dims[k] for k in perm])
            producer = value.producer()
            if producer is None:
                self._graph.insert_before(self._graph[0], node)
            else:
                self._graph.insert_after(producer, node)
            self._last[value] = out
            self._transposed.add(value)
        return self._last[value]

    def _put(
        self,
        node: ir.Node,
        kind: str,
        inputs: Sequence[ir.Value | None],
        attributes: Sequence[ir.Attr],
        images: Sequence[int] | None = None,
        domain: str | None = None,
    ) -> ir.Node:
        """Puts another node before one; `images` are those of its results that have channels, if not all."""
        domain = domain if domain is not None else OWN if kind.startswith("Nhwc") else ""
        count = len(node.outputs)
        new = ir.Node(domain, kind, inputs, attributes, num_outputs=count, name=node.name)
        new.metadata_props.update(node.metadata_props)
        self._graph.insert_before(node, new)
        for k, (made, old) in enumerate(zip(new.outputs, node.outputs, strict=True)):
            if images is not None and k not in images:
                take_place(made, old)
                continue
            made.name = self._builder.fresh_value_name(f"{old.name}_channels_last") if old.name else old.name
            made.type, made.shape = old.type, _moved(old)
            self._last[old] = made
        self.changed.append(node)
        return new

    def _added(
        self, node: ir.Node, kind: str, inputs: Sequence[ir.Value], dtype: ir.DataType, dims: list[int], **given: Any
    ) -> ir.Value:
        new = new_node(kind, inputs, self._builder.fresh_value_name(f"{node.name}_{kind.lower()}"), given)
        (out,) = new.outputs
        out.type, out.shape = ir.TensorType(dtype), ir.Shape(dims)
        self._graph.insert_before(node, new)
        return out

    def _constant(self, node: ir.Node, numbers: list[int]) -> ir.Value:
        tensor = ir.tensor(np.array(numbers, np.int64))
        return self._added(node, "Constant", [], ir.DataType.INT64, [len(numbers)], value=tensor)

    def finish(self) -> None:
        """Removes what was changed; where others use it, there is a Transpose in its place."""
        for node in reversed(self.changed):
            for old in node.outputs:
                if old not in self._last or not (old.uses() or old.is_graph_output()):
                    continue
                made = self._last[old]
                transpose = new_node("Transpose", [made], f"{old.name}_channels_first", {"perm": TO_FIRST})
                self._graph.insert_before(node, transpose)
                take_place(transpose.outputs[0], old)
            self._graph.remove(node, safe=True)


def _has_batch_statistics(node: ir.Node) -> bool:
    """Whether it is batch normalization in training, or its gradient from statistics that were saved."""
    if node.domain != MICROSOFT or rank_of(node.inputs[0]) != RANK:
        return False
    if node.op_type == "BatchNormInternal":
        return node.attributes.get_int("training_mode", 1) == 1
    return node.op_type == "BatchNormalizationGrad" and len(node.inputs) == 5 and None not in node.inputs


def _has_given_statistics(node: ir.Node) -> bool:
    """Whether it is batch normalization in inference, of statistics of the parameters' type."""
    return (
        node.op_type == "BatchNormalization"
        and is_standard(node.domain)
        and rank_of(node.inputs[0]) == RANK
        and node.attributes.get_int("training_mode", 0) == 0
        and len({v.dtype for v in node.inputs[1:] if v is not None} - {None}) == 1
    )


def is_max_pool(node: ir.Node) -> bool:
    """Whether it is one of images without indices, or its gradient, whose windows all begin within the image."""
    is_pool = is_standard(node.domain) and node.op_type == "MaxPool"
    if not is_pool and (node.domain != OWN or node.op_type != "MaxPoolGrad"):
        return False
    ends = node.inputs[0], node.outputs[0]
    image, windows = ends if is_pool else ends[::-1]
    return (
        rank_of(image) == RANK
        and not any(v.uses() or v.is_graph_output() for v in node.outputs[1:])
        and node.attributes.get_string("auto_pad", "NOTSET") in ("NOTSET", "VALID")
        and (node.attributes.get_int("ceil_mode", 0) == 0 or _begins_within(node, image, windows))
    )


def _begins_within(node: ir.Node, image: ir.Value | None, windows: ir.Value | None) -> bool:
    """Whether there are no more windows than begin in the image: before opset 22, ONNX counts one more."""
    sizes, given = known_dims(image)[2:], node.attributes
    lists = [given.get_ints(name) for name in ("dilations", "kernel_shape", "pads", "strides")]
    axes = pool_axes(sizes, pool_settings("NOTSET", 1, *lists)) if all(isinstance(n, int) for n in sizes) else []
    return [axis.windows for axis in axes] == known_dims(windows)[2:]


def _repeats_pixels(node: ir.Node) -> bool:
    """Whether it gives all pixels of an image what one had, as the gradient of a mean does."""
    return (
        node.op_type == "Expand"
        and is_standard(node.domain)
        and rank_of(node.outputs[0]) == RANK
        and known_dims(node.inputs[0])[2:] == [1, 1]
        and all(user.op_type in ELEMENTWISE | GRADIENTS | {"Split"} for user, _ in node.outputs[0].uses())
    )


def _pool_attributes(node: ir.Node) -> list[ir.Attr]:
    names = ("ceil_mode", "dilations", "kernel_shape", "pads", "strides")
    return [node.attributes[name] for name in names if name in node.attributes]


def _conv_attributes(node: ir.Node) -> list[ir.Attr]:
    """All of them written out: ONNX functions hand them on."""
    filled = {"dilations": [1, 1], "pads": [0, 0, 0, 0], "strides": [1, 1]}
    lists = [ir.AttrInt64s(name, list(node.attributes.get_ints(name, default))) for name, default in filled.items()]
    return [*lists, ir.AttrInt64("group", node.attributes.get_int("group", 1))]


def _take_in_what_follows(graph: ir.Graph, norm: ir.Node) -> None:
    """The Add of another image, and Relu."""
    inputs, activation, gone = list(norm.inputs), "", [norm]
    after = only_user(norm)
    if after is not None and after.op_type == "Add" and is_standard(after.domain):
        mine = norm.outputs[0]
        other = after.inputs[1] if after.inputs[0] is mine else after.inputs[0]
        if (
            other is not None
            and other is not mine
            and other.dtype == mine.dtype
            and known_dims(other) == known_dims(mine)
        ):
            inputs.append(other)
            gone.append(after)
            after = only_user(after)
    if after is not None and after.op_type == "Relu" and is_standard(after.domain):
        activation = after.op_type
        gone.append(after)
    if gone == [norm]:
        return
    attributes = [*norm.attributes.values(), *([ir.AttrString("activation", activation)] if activation else [])]
    new = ir.Node(OWN, norm.op_type, inputs, attributes, num_outputs=len(norm.outputs), name=norm.name)
    new.metadata_props.update(norm.metadata_props)
    graph.insert_before(gone[-1], new)
    for made, old in zip(new.outputs[1:], norm.outputs[1:], strict=True):
        take_place(made, old)
    take_place(new.outputs[0], gone[-1].outputs[0])
    for node in reversed(gone):
        graph.remove(node, safe=True)


def _take_in_sample_variance(graph: ir.Graph, norm: ir.Node) -> None:
    """What passes/sample_variance.py writes: v + (v - before · momentum) / (n - 1), of its running variance v."""
    variance, before = norm.outputs[2], norm.inputs[4]
    users = {user.op_type: user for user, _ in variance.uses()}
    add, subtract = users.get("Add"), users.get("Sub")
    if len(variance.uses()) != 2 or add is None or subtract is None or subtract.inputs[0] is not variance:
        return
    divide, scaled = only_user(subtract), subtract.inputs[1].producer() if subtract.inputs[1] is not None else None
    if scaled is None or scaled.op_type != "Mul" or scaled.inputs[0] is not before or divide is None:
        return
    if divide.op_type != "Div" or only_user(divide) is not add:
        return
    norm.attributes["sample_variance"] = ir.AttrInt64("sample_variance", 1)
    graph.outputs[:] = [v for v in graph.outputs if v is not variance]
    corrected = add.outputs[0]
    add.replace_input_with(0, None)
    add.replace_input_with(1, None)
    take_place(variance, corrected)


def _take_in_relu_grad(graph: ir.Graph, gradient: ir.Node) -> None:
    """What ReluGrad gives comes out, too, as the gradient of what was added."""
    passed, mean = gradient.inputs[0], gradient.inputs[3]
    assert passed is not None and mean is not None
    before, norm = passed.producer(), mean.producer()
    if before is None or before.op_type != "ReluGrad" or passed.is_graph_output() or norm is None:
        return
    if (
        norm.op_type != "NhwcBatchNorm"
        or norm.outputs[0] is not before.inputs[1]
        or "activation" not in norm.attributes
    ):
        return
    dY, Y = before.inputs
    assert dY is not None
    if len(norm.inputs) > 5:
        inputs = [dY, *gradient.inputs[1:], Y]
        add = dY.producer()
        if add is not None and add.op_type == "Add" and is_standard(add.domain) and only_user(add) is before:
            first, second = add.inputs
            if known_dims(first) == known_dims(second) == known_dims(dY):  # the two ways back of a residual
                inputs = [first, *gradient.inputs[1:], Y, None, second]
    else:
        inputs = [dY, *gradient.inputs[1:], None, norm.inputs[2]]
    new = ir.Node(OWN, gradient.op_type, inputs, [], num_outputs=4, name=gradient.name)
    new.metadata_props.update(gradient.metadata_props)
    replace_node(gradient, new)
    take_place(new.outputs[3], passed)


def _moved(value: ir.Value) -> ir.Shape | None:
    if value.shape is None:
        return None
    dims = known_dims(value)
    return ir.Shape([dims[k] for k in TO_LAST])
