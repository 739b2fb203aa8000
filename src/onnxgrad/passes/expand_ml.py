"""expand_ml: operators of ai.onnx.ml, as scikit-learn's models have them, become standard ones with initializers.

So their weights, which are attributes, can be trained. write_attributes() puts trained numbers back into the original
nodes: an exported model has the operators that it came with.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.builder import Builder, op
from onnxgrad.graph.cast import in_type
from onnxgrad.graph.maps import MAP_TYPE
from onnxgrad.graph.replace import replace_node, take_place
from onnxgrad.graph.tensor import Tensor, is_float
from onnxgrad.passes.draft import Draft
from onnxgrad.passes.infer import infer
from onnxgrad.rules.ml import TREES
from onnxgrad.schema import ML, is_standard
from onnxgrad.tensor_types import Array

OF_TREES = (
    "trees are constant between their thresholds and have no gradient: train them where they came from; what is after "
    "them can be trained here"
)
FLOAT = ir.DataType.FLOAT  # that all of them compute in
LABELS = ("classlabels_ints", "classlabels_int64s", "classlabels_strings")


def drop_zip_maps(draft: Draft) -> None:
    """The tensor that a ZipMap makes maps of is the output in its place: there is no gradient of a map."""
    for value in draft.graph.inputs:
        if MAP_TYPE in value.meta:
            raise ValueError(
                f"{draft.caller}: the input {value.name!r} is a map, expected a tensor: encode it before the model"
            )
    for node in list(draft.graph):
        if node.domain == ML and node.op_type == "ZipMap":
            node.outputs[0].type = None
            replace_node(node, ir.Node("", "Identity", [node.inputs[0]], num_outputs=1, name=node.name))


def expand_ml(draft: Draft) -> None:
    """Writes standard operators in place of those that have a writer here; others stay."""
    _declare_types(draft.graph)
    nodes = {node: name for node, name in _named(draft.graph) if node.op_type in WRITERS}
    while nodes:
        infer(draft)
        # A node is written once what makes its inputs is, so that their types are known.
        ready = [n for n in nodes if all(v and v.dtype and v.producer() not in nodes for v in n.inputs)]
        if not ready:
            break
        builder = Builder(draft.graph)
        for node in ready:
            _write(builder, node, nodes.pop(node), draft.caller)
        draft.graph.sort()
    _expect_more_than_trees(draft)


def _declare_types(graph: ir.Graph) -> None:
    """Of what trees give: onnx does not infer them."""
    for node in graph:
        if node.domain != ML or node.op_type not in TREES or node.outputs[-1].dtype is not None:
            continue
        x, scores = node.inputs[0], node.outputs[-1]
        assert x is not None
        scores.dtype = (node.op_type == "TreeEnsemble" and x.dtype) or ir.DataType.FLOAT
        labels = next((node.attributes[a].value for a in LABELS if a in node.attributes), ())
        columns = node.attributes.get_int("n_targets", len(labels)) or f"{node.name}_columns"
        scores.shape = ir.Shape([x.shape[0] if x.shape is not None else f"{node.name}_rows", columns])


def write_attributes(graph: ir.Graph, arrays: Mapping[str, Array]) -> set[str]:
    """Puts numbers into the attributes that expand_ml made initializers of, under the names these have; which."""
    written = set()
    for node, name in _named(graph):
        for attribute in list(node.attributes.values()):
            full_name = f"{name}.{attribute.name}"
            if full_name in arrays:
                numbers = arrays[full_name].ravel()
                if numbers.size * 2 == len(attribute.as_floats()):  # the second of two rows that are opposites
                    numbers = np.concatenate([-numbers, numbers])
                node.attributes[attribute.name] = ir.AttrFloat32s(attribute.name, numbers.tolist())
                written.add(full_name)
    return written


def _named(graph: ir.Graph) -> Iterator[tuple[ir.Node, str]]:
    """The nodes of ai.onnx.ml and a name for each, the same in the original model and in one that is prepared."""
    taken: set[str] = set()
    for k, node in enumerate(n for n in graph if n.domain == ML and n.op_type != "ZipMap"):
        name = node.name if node.name and node.name not in taken else f"{node.op_type}_{k}"
        taken.add(name)
        yield node, name


def _expect_more_than_trees(draft: Draft) -> None:
    trees = [n for n in draft.graph if n.domain == ML and n.op_type in TREES]
    if trees and not any(map(is_float, draft.graph.initializers.values())):
        raise ValueError(f"{draft.caller}: {trees[0].op_type} (node {trees[0].name!r}): {OF_TREES}")


def _write(builder: Builder, node: ir.Node, name: str, caller: str) -> None:
    with builder.at_work(name):
        try:
            results = WRITERS[node.op_type](_Node(builder, node, name))
        except _CannotError as error:
            raise ValueError(f"{caller}: {node.op_type} (node {node.name!r}) {error}") from None
    for old, new in zip(node.outputs, results, strict=False):
        take_place(builder.apart(new).value, old)
    builder.graph.remove(node, safe=True)


class _CannotError(Exception):
    """The end of a sentence that begins with the node."""


class _Node:
    """A node that is about to be written with standard operators."""

    def __init__(self, builder: Builder, node: ir.Node, name: str) -> None:
        self.builder, self.node, self.name = builder, node, name
        value = node.inputs[0]
        assert value is not None
        self.input = builder.tensor(value)

    @property
    def x(self) -> Tensor:
        """The input as the operators compute with it."""
        return in_type(self.input, FLOAT)

    @property
    def rows(self) -> Tensor:
        """The input, a single example as a row."""
        return op.Unsqueeze(self.x, [0]) if self.input.shape is not None and len(self.input.shape) == 1 else self.x

    def text(self, attribute: str, default: str) -> str:
        return self.node.attributes.get_string(attribute, default)

    def floats(self, attribute: str) -> Array:
        return np.array(self.node.attributes.get_floats(attribute, []), np.float32)

    def ints(self, attribute: str) -> list[int]:
        return list(self.node.attributes.get_ints(attribute, []))

    def weight(self, attribute: str, numbers: Array) -> Tensor:
        """An initializer that stands for an attribute."""
        return self._initializer(f"{self.name}.{attribute}", ir.Tensor(np.ascontiguousarray(numbers, np.float32)))

    def constant(self, numbers: Any) -> Tensor:
        return self.builder.constant(np.asarray(numbers, np.float32), FLOAT)

    def labels_of(self, classes: Tensor) -> Tensor:
        """The labels of class numbers."""
        attribute = next((self.node.attributes[a] for a in LABELS if a in self.node.attributes), None)
        if attribute is None:
            return classes
        if attribute.type == ir.AttributeType.INTS:
            labels = self.builder.constant(np.array(attribute.as_ints(), np.int64), ir.DataType.INT64)
        else:
            texts = [text.encode() for text in attribute.as_strings()]
            tensor = ir.StringTensor(texts, shape=ir.Shape([len(texts)]))
            labels = self._initializer(f"{self.name}.{attribute.name}", tensor)
        return op.Gather(labels, classes, axis=0)  # type: ignore[no-any-return]

    def _initializer(self, name: str, tensor: Any) -> Tensor:
        value = ir.Value(name=self.builder.fresh_value_name(name), type=ir.TensorType(tensor.dtype))
        value.shape, value.const_value, tensor.name = ir.Shape(tensor.shape.numpy()), tensor, value.name
        self.builder.graph.register_initializer(value)
        return self.builder.tensor(value)

    def transformed(self, scores: Tensor) -> Tensor:
        """After the attribute post_transform."""
        how = self.text("post_transform", "NONE")
        if how == "NONE":
            return scores
        if how not in ("LOGISTIC", "SOFTMAX"):
            raise _CannotError(f"has the post_transform {how}, expected NONE, LOGISTIC or SOFTMAX to train it")
        made: Tensor = op.Sigmoid(scores) if how == "LOGISTIC" else op.Softmax(scores, axis=-1)
        return made


def _linear_regressor(n: _Node) -> list[Tensor]:
    targets = n.node.attributes.get_int("targets", 1)
    scores = _product(n, n.rows, n.floats("coefficients").reshape(targets, -1), n.floats("intercepts"))
    # onnxruntime transforms several scores of a row only.
    return [n.transformed(scores) if targets > 1 else scores]


def _product(n: _Node, x: Tensor, coefficients: Array, intercepts: Array) -> Tensor:
    weights = n.weight("coefficients", coefficients)
    bias = n.weight("intercepts", intercepts) if intercepts.size else None
    return op.Gemm(x, weights, bias, transB=1)  # type: ignore[no-any-return]


def _linear_classifier(n: _Node) -> list[Tensor]:
    intercepts = n.floats("intercepts")
    coefficients = n.floats("coefficients").reshape(len(intercepts), -1)
    how = n.text("post_transform", "NONE")
    if len(intercepts) == 1:
        score = _product(n, n.rows, coefficients, intercepts)
        labels = n.labels_of(op.Cast(op.Squeeze(score > 0, [1]), to=ir.DataType.INT64.value))
        if how == "LOGISTIC":
            return [labels, _of_two_classes(score)]
        return [labels, op.Concat(1 - score, score, axis=1)]
    opposites = [np.array_equal(a[0], -a[1]) for a in (coefficients, intercepts[:, None]) if len(a) == 2]
    if len(opposites) == 2 and all(opposites) and how in ("NONE", "LOGISTIC"):
        # Two classes have one row of weights in scikit-learn, and here: training moves them as it would there.
        score = _product(n, n.rows, coefficients[1:], intercepts[1:])
        scores = op.Concat(-score, score, axis=1)
        return [_best(n, scores), _of_two_classes(score) if how == "LOGISTIC" else scores]
    scores = _product(n, n.rows, coefficients, intercepts)
    return [_best(n, scores), n.transformed(scores)]


def _of_two_classes(score: Tensor) -> Tensor:
    """Sigmoid of -z and z, as Softmax of -z/2 and z/2: a cross entropy sees what is before it."""
    return op.Softmax(op.Concat(score * -0.5, score * 0.5, axis=1), axis=1)  # type: ignore[no-any-return]


def _best(n: _Node, scores: Tensor) -> Tensor:
    return n.labels_of(op.ArgMax(scores, axis=1, keepdims=0))


def _scaler(n: _Node) -> list[Tensor]:
    x = n.x
    for attribute, change in (("offset", "Sub"), ("scale", "Mul")):
        if len(n.floats(attribute)):
            x = n.builder.binary(change, x, n.weight(attribute, n.floats(attribute)))
    return [x]


def _normalizer(n: _Node) -> list[Tensor]:
    norm = n.text("norm", "MAX")
    source = n.input.value.producer()
    if norm == "L1" and source is not None and source.op_type == "Softmax" and is_standard(source.domain):
        return [n.x]  # which adds up to 1 already
    x = n.x
    reduce = {"MAX": op.ReduceMax, "L1": op.ReduceL1, "L2": op.ReduceL2}[norm]
    size = reduce(x, [-1], keepdims=1)
    return [x / op.Where(size.equals(0), 1.0, size)]


def _imputer(n: _Node) -> list[Tensor]:
    kind = "float" if n.input.is_float else "int64"
    values = n.node.attributes.get(f"imputed_value_{kind}s")
    replaced = n.node.attributes.get(f"replaced_value_{kind}")
    if values is None:
        raise _CannotError(f"has no imputed_value_{kind}s for its input, which holds {n.input.dtype.name.lower()}")
    missing = 0 if replaced is None else replaced.value
    is_missing = op.IsNaN(n.input) if np.isnan(missing) else n.input.equals(missing)
    numbers = n.builder.constant(np.array(values.value, n.input.dtype.numpy()), n.input.dtype)
    return [op.Where(is_missing, numbers, n.input)]


def _array_feature_extractor(n: _Node) -> list[Tensor]:
    assert n.node.inputs[1] is not None
    found = op.Gather(n.input, op.Reshape(n.builder.tensor(n.node.inputs[1]), [-1]), axis=-1)
    return [op.Unsqueeze(found, [0]) if found.shape is not None and len(found.shape) == 1 else found]


def _feature_vectorizer(n: _Node) -> list[Tensor]:
    return [op.Concat(*(in_type(n.builder.tensor(v), FLOAT) for v in n.node.inputs if v is not None), axis=-1)]


def _svm_regressor(n: _Node) -> list[Tensor]:
    if n.node.attributes.get_int("one_class", 0):
        raise _CannotError("is of one class and gives a sign, which has no gradient")
    x = n.rows
    supports = n.node.attributes.get_int("n_supports", 0)
    features = _kernel(n, x, n.floats("support_vectors").reshape(supports, -1)) if supports else x
    weights = n.weight("coefficients", n.floats("coefficients").reshape(1, -1))
    return [op.Gemm(features, weights, n.weight("rho", n.floats("rho")), transB=1)]


def _kernel(n: _Node, x: Tensor, supports: Array) -> Tensor:
    """The similarity of examples to support vectors, which stay as they are."""
    gamma, offset, degree = (float(k) for k in (*n.floats("kernel_params"), 0.0, 0.0, 0.0)[:3])
    how = n.text("kernel_type", "LINEAR")
    vectors = n.constant(supports)
    if how == "RBF":
        difference = op.Unsqueeze(x, [1]) - vectors
        return op.Exp(op.ReduceSum(difference * difference, [-1], keepdims=0) * -gamma)  # type: ignore[no-any-return]
    product: Tensor = op.Gemm(x, vectors, None, transB=1)
    if how == "LINEAR":
        return product
    scaled = product * gamma + offset
    return scaled**degree if how == "POLY" else op.Tanh(scaled)


def _svm_classifier(n: _Node) -> list[Tensor]:
    counts, rho = n.ints("vectors_per_class"), n.floats("rho")
    if not counts or n.text("post_transform", "NONE") != "NONE":
        raise _CannotError("has no support vectors or a post_transform, expected support vectors and NONE to train it")
    classes, total = len(counts), sum(counts)
    pairs = list(combinations(range(classes), 2))
    kernel = _kernel(n, n.rows, n.floats("support_vectors").reshape(total, -1))
    weights = _weights_of_pairs(n, counts, pairs)
    scores: Tensor = op.Gemm(kernel, weights, n.weight("rho", rho))
    if len(n.floats("prob_a")):
        if classes > 2:
            raise _CannotError(
                f"couples the probabilities of {classes} classes by an iteration that has no gradient: convert the "
                "model without probabilities, SVC(probability=False), and train its scores"
            )
        # Platt's: of the second class.
        score = scores * n.weight("prob_a", n.floats("prob_a")) + n.weight("prob_b", n.floats("prob_b"))
        chances = _of_two_classes(score)
        return [_best(n, chances), chances]
    first, second = np.zeros((len(pairs), classes), np.float32), np.zeros((len(pairs), classes), np.float32)
    for row, (i, j) in enumerate(pairs):
        first[row, i] = second[row, j] = 1
    wins = op.CastLike(scores > 0, scores)
    votes = op.Gemm(wins, first) + op.Gemm(1 - wins, second)
    return [_best(n, votes), op.Concat(-scores, scores, axis=1) if classes == 2 else scores]


def _weights_of_pairs(n: _Node, counts: Sequence[int], pairs: Sequence[tuple[int, int]]) -> Tensor:
    """What each support vector counts for in each pair of classes: nothing if it is of neither."""
    total = sum(counts)
    class_of = np.repeat(np.arange(len(counts)), counts)
    row = np.full((total, len(pairs)), -1)
    for pair, (i, j) in enumerate(pairs):
        row[class_of == i, pair] = j - 1
        row[class_of == j, pair] = i
    at = np.maximum(row, 0) * total + np.arange(total)[:, None]
    flat = n.weight("coefficients", n.floats("coefficients"))
    return op.Gather(flat, at, axis=0) * n.constant(row >= 0)  # type: ignore[no-any-return]


WRITERS: dict[str, Callable[[_Node], list[Tensor]]] = {
    "LinearRegressor": _linear_regressor,
    "LinearClassifier": _linear_classifier,
    "Scaler": _scaler,
    "Normalizer": _normalizer,
    "Imputer": _imputer,
    "ArrayFeatureExtractor": _array_feature_extractor,
    "FeatureVectorizer": _feature_vectorizer,
    "SVMRegressor": _svm_regressor,
    "SVMClassifier": _svm_classifier,
}
