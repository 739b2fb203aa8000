"""Small calls of every operator, of every type and with every pattern of optional inputs, for any runtime to run."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from tests import conv_cases, gru_cases, lstm_cases, rnn_cases
from tests.checks import FLOATS, INDICES
from tests.pool_cases import POOLS, numbers, windows

from onnxgrad import (
    broadcast_gradient_args,
    gather_elements_grad,
    gather_grad,
    gru_grad,
    gru_training,
    lstm_grad,
    lstm_training,
    rnn_grad,
    slice_grad,
)
from onnxgrad.ops.activation import leaky_relu_grad, relu_grad, sigmoid_grad, tanh_grad
from onnxgrad.ops.all_reduce import all_reduce_sum
from onnxgrad.ops.average_pool import average_pool_grad
from onnxgrad.ops.conv import conv_grad
from onnxgrad.ops.dropout import dropout_grad, seeded_dropout
from onnxgrad.ops.gelu import (
    bias_fast_gelu_grad_dx,
    bias_gelu_grad_dx,
    fast_gelu_grad,
    gelu_grad,
    quick_gelu_grad,
)
from onnxgrad.ops.layer_normalization import layer_normalization_grad, simplified_layer_normalization_grad
from onnxgrad.ops.matrix import permuted_mat_mul
from onnxgrad.ops.max_pool import max_pool_grad
from onnxgrad.ops.softmax import log_softmax_grad_13, softmax_grad_13
from onnxgrad.ops.softmax_cross_entropy_loss import (
    softmax_cross_entropy_loss_grad,
    softmax_cross_entropy_loss_internal,
)
from onnxgrad.runtime.custom_op import ELEMENT_TYPES
from onnxgrad.tensor_types import DTYPES


@dataclass(frozen=True)
class NodeCase:
    """A node and what it is run with."""

    op: Any
    parameters: dict[str, str]  # what tells it from the operator's other cases; together they are its name
    make_inputs: Callable[[], Sequence[Any]]  # None for one that is absent
    attributes: dict[str, Any] = field(default_factory=dict)
    outputs: Sequence[str] | None = None  # those that the node has, if not all

    def __repr__(self) -> str:
        return "_".join([self.op.function_name, *filter(None, self.parameters.values())])


def _gather_grad() -> Iterator[NodeCase]:
    shape = (5, 33, 7)
    for axis, dtype, index, shape_type in itertools.product((0, 1, -1), FLOATS, INDICES, INDICES):

        def make(axis=axis, dtype=dtype, index=index, shape_type=shape_type):
            rng = np.random.default_rng(0)
            indices = rng.integers(-shape[axis], shape[axis], (4, 3)).astype(index)
            dims = shape[: axis % 3] + indices.shape + shape[axis % 3 + 1 :]
            return np.array(shape, shape_type), indices, rng.standard_normal(dims).astype(dtype)

        parameters = {"type": str(dtype), "axis": _axis(axis), "index": f"{index}_indices"}
        yield NodeCase(gather_grad, {**parameters, "shape_type": f"{shape_type}_shape"}, make, {"axis": axis})


def _gather_elements_grad() -> Iterator[NodeCase]:
    for axis, dtype, index in itertools.product((0, 1, -1), FLOATS, INDICES):

        def make(dtype=dtype, index=index):
            rng = np.random.default_rng(0)
            indices = rng.integers(-4, 4, (4, 4, 4)).astype(index)
            return rng.standard_normal(indices.shape).astype(dtype), np.array([5, 4, 6]), indices

        parameters = {"type": str(dtype), "axis": _axis(axis), "index": f"{index}_indices"}
        yield NodeCase(gather_elements_grad, parameters, make, {"axis": axis})


def _axis(axis: int) -> str:
    return f"axis_{axis}" if axis >= 0 else "last_axis"


def _broadcast_gradient_args() -> Iterator[NodeCase]:
    for a, b in (([2, 3], [3]), ([], [4]), ([1, 5, 1], [7, 1, 1, 2]), ([3], [3])):
        shapes = "_and_".join("x".join(map(str, shape)) or "scalar" for shape in (a, b))
        for outputs in (None, ["a_axes"], ["b_axes"]):

            def make(a=a, b=b):
                return np.array(a, np.int64), np.array(b, np.int64)

            parameters = {"shapes": shapes, "outputs": _only(outputs)}
            yield NodeCase(broadcast_gradient_args, parameters, make, outputs=outputs)


def _slice_grad() -> Iterator[NodeCase]:
    for name, index, present in itertools.product(ELEMENT_TYPES, INDICES, ((), ("axes",), ("axes", "steps"))):

        def make(dtype=DTYPES[name], index=index, present=present):
            dY = (np.arange(12) % 5).astype(dtype).reshape(2, 6)
            backwards = "steps" in present
            numbers = ([3, 6], [0, -1], [2, -99], [0, -1], [1, -1]) if backwards else ([3, 8], [0, 2], [2, 8], [0, 1])
            shape, *others = (np.array(n, index) for n in numbers)
            return dY, shape.astype(np.int64), *others[: 2 + len(present)]

        absent = [n for n in ("axes", "steps") if n not in present]
        yield NodeCase(slice_grad, {"type": name, "index": f"{index}_starts", "absent": _without(absent)}, make)


def _gru() -> Iterator[NodeCase]:
    grid = itertools.product(FLOATS, (0, 1), gru_cases.DIRECTIONS, (False, True))
    for dtype, linear_before_reset, direction, lengths in grid:
        sizes = {"S": 4, "N": 3, "inputs": 5, "H": 6, "direction": direction, "lengths": lengths}
        attributes = {"linear_before_reset": linear_before_reset, "direction": direction, "hidden_size": 6}
        parameters = {
            "type": str(dtype),
            "linear": f"linear_before_reset_{linear_before_reset}",
            "direction": direction,
            "absent": _without([] if lengths else ["SL"]),
        }
        yield from _both_of_gru(parameters, attributes, dtype, sizes)
    patterns = [m for n in (1, 2) for m in itertools.combinations(gru_cases.OPTIONALS, n)]
    for dtype, missing in itertools.product(FLOATS, patterns):
        parameters = {"type": str(dtype), "absent": _without(["SL", *missing])}
        both = _both_of_gru(parameters, {}, dtype, {}, missing)
        yield from (case for case in both if all(m in [i.name for i in case.op.inputs] for m in missing))
    for count in (1, 2):
        for outputs in itertools.combinations(gru_cases.GRADIENTS, count):
            yield from _some_of_gru(gru_grad, outputs)
    yield from _some_of_gru(gru_training, ("HAll", "ZRH"))
    every_attribute = {
        "direction": "bidirectional",
        "activations": ["HardSigmoid", "ScaledTanh", "sigmoid", "LeakyRelu"],
        "activation_alpha": [0.25, 1.5, 0.125],
        "activation_beta": [0.5, 0.75],
        "clip": 0.5,
        "linear_before_reset": 1,
    }
    parameters = {"type": "float32", "attributes": "every_attribute"}
    yield from _both_of_gru(parameters, every_attribute, np.dtype(np.float32), {"direction": "bidirectional"})


def _both_of_gru(
    parameters: dict[str, str],
    attributes: dict[str, Any],
    dtype: np.dtype[Any],
    sizes: dict[str, Any],
    missing: Sequence[str] = (),
) -> Iterator[NodeCase]:
    def given() -> gru_cases.Case:
        return gru_cases.case(**sizes, dtype=dtype.type).without(*missing)

    yield NodeCase(gru_training, parameters, lambda: given().forward, attributes)
    yield NodeCase(gru_grad, parameters, lambda: given().backward(**attributes), attributes)


def _some_of_gru(op: Any, outputs: Sequence[str]) -> Iterator[NodeCase]:
    for case in _both_of_gru({"type": "float32", "outputs": _only(outputs)}, {}, np.dtype(np.float32), {}):
        if case.op is op:
            yield NodeCase(op, case.parameters, case.make_inputs, outputs=outputs)


def _softmax_grads() -> Iterator[NodeCase]:
    for op, axis, dtype in itertools.product((softmax_grad_13, log_softmax_grad_13), (0, -1), FLOATS):

        def make(op=op, axis=axis, dtype=dtype):
            rng = np.random.default_rng(0)
            x = rng.standard_normal((4, 20))
            log = x - np.log(np.exp(x).sum(axis, keepdims=True))
            y = log if op is log_softmax_grad_13 else np.exp(log)
            return rng.standard_normal(x.shape).astype(dtype), y.astype(dtype)

        yield NodeCase(op, {"type": str(dtype), "axis": _axis(axis)}, make, {"axis": axis})


def _layer_normalization_grads() -> Iterator[NodeCase]:
    statistics = [np.dtype(np.float32), np.dtype(np.float64)]
    for dtype, statistic, axis, centred in itertools.product(FLOATS, statistics, (1, -1), (True, False)):

        def make(dtype=dtype, statistic=statistic, axis=axis, centred=centred):
            rng = np.random.default_rng(0)
            Y_grad, X = rng.standard_normal((2, 4, 3, 20))
            of_rows = [rng.uniform(0.5, 1.5, (*X.shape[:axis], *(1,) * len(X.shape[axis:]))) for _ in range(2)]
            arrays = [a.astype(dtype) for a in (Y_grad, X, rng.standard_normal(X.shape[axis:]))]
            return *arrays, *(a.astype(np.float32).astype(statistic) for a in of_rows[: 1 + centred])

        parameters = {"type": str(dtype), "axis": _axis(axis), "statistics": f"{statistic}_statistics"}
        op = layer_normalization_grad if centred else simplified_layer_normalization_grad
        yield NodeCase(op, parameters, make, {"axis": axis})
        if dtype == statistic and axis == -1:
            for output in op.output_names:
                yield NodeCase(op, {**parameters, "outputs": _only([output])}, make, outputs=[output])


def _loss_grad() -> Iterator[NodeCase]:
    for dtype, index, weighted in itertools.product(FLOATS, INDICES, (False, True)):
        for reduction, shape in (("mean", (4, 5)), ("none", (2, 5, 3))):

            def make(dtype=dtype, index=index, weighted=weighted, reduction=reduction, shape=shape):
                rng = np.random.default_rng(0)
                x = rng.standard_normal(shape)
                label = rng.integers(-1, 5, (shape[0], *shape[2:])).astype(index)
                dY = np.asarray(rng.standard_normal(label.shape if reduction == "none" else ()), dtype)
                weight = rng.uniform(0.5, 2, 5).astype(dtype) if weighted else None
                return dY, (x - np.log(np.exp(x).sum(1, keepdims=True))).astype(dtype), label, weight

            parameters = {"type": str(dtype), "index": f"{index}_label", "reduction": reduction}
            parameters["absent"] = _without([] if weighted else ["weight"])
            yield NodeCase(softmax_cross_entropy_loss_grad, parameters, make, {"reduction": reduction})


def _loss() -> Iterator[NodeCase]:
    for dtype, index, weighted, ignored in itertools.product(FLOATS, INDICES, (False, True), (None, 1)):
        for reduction, shape in (("mean", (4, 5)), ("none", (2, 5, 3))):

            def make(dtype=dtype, index=index, weighted=weighted, ignored=ignored, shape=shape):
                rng = np.random.default_rng(0)
                labels = rng.integers(-1 if ignored is None else 0, 5, (shape[0], *shape[2:])).astype(index)
                weights = rng.uniform(0.5, 2, 5).astype(dtype) if weighted else None
                return rng.standard_normal(shape).astype(dtype), labels, weights, ignored and np.array(ignored)

            absent = [*([] if weighted else ["weights"]), *([] if ignored else ["ignore_index"])]
            parameters = {"type": str(dtype), "index": f"{index}_labels", "reduction": reduction}
            parameters["absent"] = _without(absent)
            yield NodeCase(softmax_cross_entropy_loss_internal, parameters, make, {"reduction": reduction})
            if dtype == np.float32 and weighted:
                parameters = {**parameters, "outputs": _only(["output"])}
                how = {"reduction": reduction}
                yield NodeCase(softmax_cross_entropy_loss_internal, parameters, make, how, outputs=["output"])


def _pool_grads() -> Iterator[NodeCase]:
    def made(pool: str, dtype: np.dtype[Any]) -> tuple[Any, Any]:
        shape, attributes = POOLS[pool]
        return numbers(windows(shape, **attributes), dtype), numbers(shape, dtype, 1)

    def parameters(pool: str, dtype: np.dtype[Any]) -> dict[str, str]:
        return {"type": str(dtype), "pool": pool.replace(" ", "_")}

    for dtype in FLOATS:
        for pool in ("strides", "halves of a large image"):  # where onnx.reference tells right Indices
            make = partial(made, pool, dtype)
            yield NodeCase(max_pool_grad, parameters(pool, dtype), make, POOLS[pool][1])
        for pool, count in itertools.product(("three axes and pads", "ceil_mode and pads", "dilations"), (0, 1)):
            more = {"counted": "with_pads" if count else ""}
            attributes = {**POOLS[pool][1], "count_include_pad": count}

            def spread(pool=pool, dtype=dtype):
                return made(pool, dtype)[0], np.array(POOLS[pool][0])

            yield NodeCase(average_pool_grad, parameters(pool, dtype) | more, spread, attributes)


def _conv_grad() -> Iterator[NodeCase]:
    names = ("two axes", "groups", "depthwise", "SAME_UPPER with stride", "strides and dilations", "three axes")
    for dtype, name in itertools.product(FLOATS, names):
        X, _, given = conv_cases.CASES[name]
        rank = len(X) - 2
        lists = {"strides": [1] * rank, "dilations": [1] * rank, "pads": [0] * 2 * rank}

        def make(dtype=dtype, case=conv_cases.CASES[name]):
            return conv_cases.arrays(*case, dtype)

        parameters = {"type": str(dtype), "convolution": name.replace(" ", "_")}
        yield NodeCase(conv_grad, parameters, make, {"group": 1, **lists, **given})
    for outputs in (["dX"], ["dW"], ["dB"], ["dW", "dB"]):
        case = conv_cases.CASES["two axes"]
        attributes = {"group": 1, "strides": [1, 1], "dilations": [1, 1], **case[2]}
        parameters = {"type": "float32", "outputs": _only(outputs)}
        yield NodeCase(conv_grad, parameters, lambda case=case: conv_cases.arrays(*case), attributes, outputs)


def _permuted_mat_mul() -> Iterator[NodeCase]:
    heads = {"permA": [0, 2, 1, 3], "permB": [0, 2, 3, 1], "permY": [0, 2, 1, 3], "alpha": 0.125}
    layouts: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "rows": ((2, 3, 33), (33, 40), {}),
        "columns": ((70, 35), (70, 20), {"permA": [1, 0]}),
        "heads": ((2, 9, 3, 16), (2, 7, 3, 16), heads),
        "turned": ((2, 9, 3, 16), (2, 7, 3, 16), {**heads, "permY": [0, 3, 1, 2]}),
    }
    for (name, (A, B, attributes)), dtype, has_bias in itertools.product(layouts.items(), FLOATS, (False, True)):

        def make(A=A, B=B, attributes=attributes, dtype=dtype, has_bias=has_bias):
            rng = np.random.default_rng(0)
            columns = B[attributes["permB"][-1] if "permB" in attributes else -1]
            bias = rng.standard_normal(columns).astype(dtype) if has_bias else None
            return rng.standard_normal(A).astype(dtype), rng.standard_normal(B).astype(dtype), bias

        parameters = {"type": str(dtype), "layout": name, "absent": _without([] if has_bias else ["bias"])}
        yield NodeCase(permuted_mat_mul, parameters, make, attributes)


def _seeded_dropout() -> Iterator[NodeCase]:
    for dtype, ratio in itertools.product(FLOATS, (0.0, 0.25)):

        def make(dtype=dtype):
            return np.random.default_rng(0).standard_normal((3, 40)).astype(dtype), np.array([11])

        parameters = {"type": str(dtype), "ratio": f"ratio_{ratio}"}
        yield NodeCase(seeded_dropout, parameters, make, {"ratio": ratio})


def _activation_grads() -> Iterator[NodeCase]:
    gelus = (gelu_grad, fast_gelu_grad, quick_gelu_grad, bias_gelu_grad_dx, bias_fast_gelu_grad_dx)
    for op, dtype in itertools.product((relu_grad, leaky_relu_grad, sigmoid_grad, tanh_grad, *gelus), FLOATS):

        def make(op=op, dtype=dtype):
            rng = np.random.default_rng(0)
            shapes = [(3, 40), (3, 40), (40,)][: len(op.inputs)]
            return [rng.standard_normal(shape).astype(dtype) for shape in shapes]

        attributes = {"alpha": 0.75} if op.attributes else {}
        yield NodeCase(op, {"type": str(dtype)}, make, attributes)


def _dropout_grad() -> Iterator[NodeCase]:
    for dtype, ratio_type, training in itertools.product(FLOATS, (None, *FLOATS), (None, True, False)):

        def make(dtype=dtype, ratio_type=ratio_type, training=training):
            rng = np.random.default_rng(0)
            dy, mask = rng.standard_normal((3, 40)).astype(dtype), rng.random((3, 40)) < 0.75
            return dy, mask, ratio_type and np.array(0.25, ratio_type), None if training is None else np.array(training)

        parameters = {
            "type": str(dtype),
            "ratio": f"{ratio_type}_ratio" if ratio_type else "without_ratio",
            "training": "without_training_mode" if training is None else "training" if training else "inference",
        }
        yield NodeCase(dropout_grad, parameters, make)


def _all_reduce_sum() -> Iterator[NodeCase]:
    for dtype in (np.dtype(np.float32), np.dtype(np.float64)):

        def make(dtype=dtype):
            return (np.random.default_rng(0).standard_normal((3, 40)).astype(dtype),)

        yield NodeCase(all_reduce_sum, {"type": str(dtype)}, make, {"group": 0})


def _lstm_and_rnn() -> Iterator[NodeCase]:
    for dtype, direction, bare in itertools.product(FLOATS, gru_cases.DIRECTIONS, (False, True)):
        sizes = {"S": 4, "N": 3, "inputs": 5, "H": 6, "direction": direction, "lengths": not bare, "dtype": dtype.type}
        attributes = {"direction": direction, "hidden_size": 6, "clip": 0.5}

        def lstm(sizes=sizes, bare=bare):
            return lstm_cases.case(**sizes).without(*(lstm_cases.OPTIONALS if bare else ()))

        def rnn(sizes=sizes, bare=bare):
            return rnn_cases.case(**sizes).without(*(rnn_cases.OPTIONALS if bare else ()))

        parameters = {"type": str(dtype), "direction": direction, "absent": _without(["optionals"] if bare else [])}
        forgetful = {**attributes, "input_forget": int(bare)}
        yield NodeCase(lstm_training, parameters, lambda lstm=lstm: lstm().forward, forgetful)
        yield NodeCase(lstm_grad, parameters, lambda lstm=lstm, kw=forgetful: lstm().backward(**kw), forgetful)
        how = {"direction": direction, "clip": 0.5}
        yield NodeCase(rnn_grad, parameters, lambda rnn=rnn, how=how: rnn().backward(**how), attributes)


def _without(names: Sequence[str]) -> str:
    return "_".join(["without", *names]) if names else ""


def _only(outputs: Sequence[str] | None) -> str:
    return "_".join(["only", *outputs]) if outputs else ""


CASES = [
    *_gather_grad(),
    *_gather_elements_grad(),
    *_broadcast_gradient_args(),
    *_slice_grad(),
    *_conv_grad(),
    *_permuted_mat_mul(),
    *_softmax_grads(),
    *_layer_normalization_grads(),
    *_loss(),
    *_loss_grad(),
    *_pool_grads(),
    *_seeded_dropout(),
    *_all_reduce_sum(),
    *_activation_grads(),
    *_dropout_grad(),
    *_gru(),
    *_lstm_and_rnn(),
]


def cases_of(*ops: Any) -> list[NodeCase]:
    """All cases of some operators."""
    return [case for case in CASES if case.op in ops]
