"""What right calls of each operator are like: its attributes, and inputs of any number of shapes that fit them.

A function that has the name of an operator's own draws its calls; several of one kind share one. An operator without
such a function is called with the small cases of its tests.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from tests.fuzz.draw import Draw
from tests.node_cases import all_cases

from onnxgrad.ops.families.activations import ACTIVATIONS
from onnxgrad.ops.families.windows import AUTO_PADS, conv_axes, pool_axes, pool_settings
from onnxgrad.ops.slice import slice_ranges

Arrays = list[Any]


class Drawn(NamedTuple):
    """Calls that a model of one node could make: same attributes, types and absent inputs, other shapes."""

    attributes: dict[str, Any]
    make_inputs: Callable[[], Arrays]


CHOOSING = {"slice_grad", "batch_normalization_grad"}  # operators whose other inputs depend on what is absent
FAMILIES: dict[str, Callable[[Any, Draw], Drawn]] = {}


def of(*names: str) -> Callable[[Any], Any]:
    """Declares who draws the calls of operators."""

    def declare(function: Any) -> Any:
        FAMILIES.update(dict.fromkeys(names, function))
        return function

    return declare


def draw_calls(op: Any, d: Draw) -> Drawn:
    """Right calls of an operator."""
    drawn = FAMILIES.get(op.function_name, _of_its_tests)(op, d)
    chosen = op.function_name in CHOOSING
    absent = [k for k, entry in enumerate(op.inputs) if entry.optional and not chosen and d.chance(0.35)]

    def make_inputs() -> Arrays:
        inputs = drawn.make_inputs()
        inputs += [None] * (len(op.inputs) - len(inputs))
        return [None if k in absent else array for k, array in enumerate(inputs)]

    return Drawn(drawn.attributes, make_inputs)


def _of_its_tests(op: Any, d: Draw) -> Drawn:
    case = d.one([c for c in all_cases() if c.op is op])
    return Drawn(dict(case.attributes), lambda: list(case.make_inputs()))


@of("broadcast_gradient_args")
def _two_shapes(op: Any, d: Draw) -> Drawn:
    def make() -> Arrays:
        whole = d.shape(d.number(0, 6))
        return [
            np.array([1 if d.chance(0.3) else n for n in whole[d.number(0, len(whole) + 1) :]], np.int64)
            for _ in range(2)
        ]

    return Drawn({}, make)


@of("gather_grad")
def _gather(op: Any, d: Draw) -> Drawn:
    types, rank, ranks = d.types(op), d.number(1, 5), d.number(0, 3)
    axis = d.number(-rank, rank)

    def make() -> Arrays:
        dims, taken = d.shape(rank), d.shape(ranks)
        at = axis % rank
        rest = math.prod(dims[:at] + dims[at + 1 :])
        while math.prod(taken) * rest > d.limit * 4:
            taken = d.shape(ranks, max(1, rest))
        indices = d.whole(-dims[at], dims[at], taken, types["Tind"]) if dims[at] else np.zeros(taken, types["Tind"])
        dY = d.values((*dims[:at], *taken, *dims[at + 1 :]), types["T"])
        return [np.array(dims, np.int64), indices, dY]

    return Drawn({"axis": axis}, make)


@of("gather_elements_grad")
def _gather_elements(op: Any, d: Draw) -> Drawn:
    types, rank = d.types(op), d.number(1, 5)
    axis = d.number(-rank, rank)

    def make() -> Arrays:
        dims = d.shape(rank)
        taken = [d.number(0, n + 1) if d.chance(0.3) else n for n in dims]
        taken[axis] = d.size(max(1, d.limit // max(1, math.prod(taken[: axis % rank] + taken[axis % rank + 1 :]))))
        indices = d.whole(-dims[axis], dims[axis], taken, types["Tind"])
        return [d.values(taken, types["T"]), np.array(dims, np.int64), indices]

    return Drawn({"axis": axis}, make)


@of("slice_grad")
def _slice(op: Any, d: Draw) -> Drawn:
    types, rank = d.types(op), d.number(1, 5)
    count, with_axes, with_steps = d.number(0, rank + 1), d.chance(0.7), d.chance(0.7)

    def make() -> Arrays:
        dims = d.shape(rank)
        axes = [int(a) for a in d.rng.permutation(rank)[:count]] if with_axes else list(range(count))
        starts = [d.number(-dims[a], dims[a] + 1) for a in axes]
        ends = [2**31 - 1 if d.chance(0.2) else d.number(-dims[a], dims[a] + 1) for a in axes]
        steps = [d.one((1, 1, 1, 2, 3, -1, -2, -7)) if with_steps else 1 for _ in axes]
        shape = [taken.length for taken in slice_ranges(dims, starts, ends, axes or None, steps)]
        axes = [a - rank if d.chance(0.3) else a for a in axes]
        given = starts, ends, axes if with_axes else None, steps if with_steps else None
        lists = [None if x is None else np.array(x, types["Tind"]) for x in given]
        return [d.values(shape, types["T"]), np.array(dims, np.int64), *lists]

    return Drawn({}, make)


@of("relu_grad", "leaky_relu_grad", "sigmoid_grad", "tanh_grad", "hard_swish_grad", "gelu_grad", "fast_gelu_grad",
    "quick_gelu_grad", "softmax_grad_13", "log_softmax_grad_13")  # fmt: skip
def _two_alike(op: Any, d: Draw) -> Drawn:
    dtype, rank, settings = d.types(op)["T"], d.number(1, 5), {}
    if "alpha" in {a.name for a in op.attributes} and d.chance(0.5):
        settings["alpha"] = float(d.rng.standard_normal())
    if "axis" in {a.name for a in op.attributes}:
        settings["axis"] = d.number(-rank, rank)

    def make() -> Arrays:
        shape = d.shape(rank)
        return [d.values(shape, dtype), d.values(shape, dtype, 3.0)]

    return Drawn(settings, make)


@of("bias_gelu_grad_dx", "bias_fast_gelu_grad_dx", "bias_gelu_grad_dX", "bias_fast_gelu_grad_dX")
def _with_bias(op: Any, d: Draw) -> Drawn:
    dtype, rank = d.types(op)["T"], d.number(1, 5)

    def make() -> Arrays:
        shape = d.shape(rank)
        return [d.values(shape, dtype), d.values(shape, dtype), d.values(shape[-1:], dtype)]

    return Drawn({}, make)


@of("all_reduce_sum")
def _one(op: Any, d: Draw) -> Drawn:
    dtype, rank = d.types(op)["T"], d.number(0, 5)
    return Drawn({}, lambda: [d.values(d.shape(rank), dtype)])


@of("seeded_dropout")
def _seeded_dropout(op: Any, d: Draw) -> Drawn:
    dtype, rank = d.types(op)["T"], d.number(0, 5)
    ratio = d.one((0.0, 0.1, 0.5, 0.999))
    return Drawn({"ratio": ratio}, lambda: [d.values(d.shape(rank), dtype), d.whole(-(2**63), 2**63 - 1, (), np.int64)])


@of("dropout_grad")
def _dropout(op: Any, d: Draw) -> Drawn:
    types, rank = d.types(op), d.number(0, 5)

    def make() -> Arrays:
        shape = d.shape(rank)
        flag, ratio = np.array(d.chance(0.7)), np.array(d.one((0.0, 0.25, 0.5)), types["T1"])
        return [d.values(shape, types["T"]), d.values(shape, np.dtype(bool)), ratio, flag]

    return Drawn({}, make)


ACTIVATION_NAMES = (*sorted(ACTIVATIONS), "Sigmoid", "Tanh", "Relu")


def _recurrent(op: Any, d: Draw, functions: int) -> tuple[int, dict[str, Any], Any, Callable[[], Any]]:
    direction = d.one(("forward", "reverse", "bidirectional"))
    D, settings = 2 if direction == "bidirectional" else 1, {"direction": direction}
    names = {a.name for a in op.attributes}
    for name in ("linear_before_reset", "input_forget"):
        if name in names:
            settings[name] = d.number(0, 2)
    if d.chance(0.25):
        settings["activations"] = [str(d.one(ACTIVATION_NAMES)) for _ in range(functions * D)]
    if d.chance(0.2):
        settings["clip"] = d.one((0.1, 3.0))

    def sizes() -> tuple[int, int, int, int]:
        S, N, inputs, H = d.shape(4, 2)
        return min(S, 33), N, min(inputs, 300), min(H, 130)

    return D, settings, d.types(op), sizes


def _lengths(d: Draw, S: int, N: int) -> np.ndarray:
    return d.whole(0, S + 1, (N,), np.dtype(np.int32))


@of("gru_training", "gru_grad")
def _gru(op: Any, d: Draw) -> Drawn:
    D, settings, types, sizes = _recurrent(op, d, 2)
    dtype = types["T"]

    def make() -> Arrays:
        S, N, inputs, H = sizes()
        shapes: Arrays = [(S, N, inputs), (D, 3 * H, inputs), (D, 3 * H, H), (D, 6 * H), None, (D, N, H)]
        if op.function_name == "gru_grad":
            shapes += [(S, D, N, H), (S, D, N, 3 * H), (S, D, N, H), (D, N, H)]
        return [_lengths(d, S, N) if s is None else d.values(s, dtype, 0.5) for s in shapes]

    return Drawn(settings, make)


@of("lstm_training", "lstm_grad")
def _lstm(op: Any, d: Draw) -> Drawn:
    D, settings, types, sizes = _recurrent(op, d, 3)
    dtype = types["T"]

    def make() -> Arrays:
        S, N, inputs, H = sizes()
        first, last = [(S, N, inputs), (D, 4 * H, inputs), (D, 4 * H, H)], [(D, 8 * H), (D, 3 * H)]
        state, every = (D, N, H), (S, D, N, H)
        if op.function_name == "lstm_training":
            shapes: Arrays = [*first, last[0], None, state, state, last[1]]
        else:
            shapes = [*first, None, state, state, every, every, (S, D, N, 4 * H), every, state, state, *last]
        return [_lengths(d, S, N) if s is None else d.values(s, dtype, 0.5) for s in shapes]

    return Drawn(settings, make)


@of("rnn_grad")
def _rnn(op: Any, d: Draw) -> Drawn:
    D, settings, types, sizes = _recurrent(op, d, 1)
    dtype = types["T"]

    def make() -> Arrays:
        S, N, inputs, H = sizes()
        state, every = (D, N, H), (S, D, N, H)
        shapes: Arrays = [(S, N, inputs), (D, H, inputs), (D, H, H), (D, 2 * H), None, state, every, every, state]
        return [_lengths(d, S, N) if s is None else d.values(s, dtype, 0.5) for s in shapes]

    return Drawn(settings, make)


@of("flash_attention", "flash_attention_grad")
def _attention(op: Any, d: Draw) -> Drawn:
    types, settings = d.types(op), {"scale": d.one((1.0, 0.125, -0.5)), "is_causal": d.number(0, 2)}
    mask_type, mask_rank = d.one((np.float32, np.bool_)), d.number(0, 5)

    def make() -> Arrays:
        dtype = types["T"]
        N, S, groups, D = d.shape(4, 2)
        T, times = d.size(300), d.one((1, 1, 2, 3))
        S, groups, D = min(S, 300), min(max(groups, 1), 16), min(D, 256)
        H = groups * times
        whole = [1 if d.chance(0.3) else n for n in (N, H, S, T)]
        mask = d.values(whole[4 - mask_rank :], np.dtype(mask_type))
        q, k = (N, S, H, D), (N, T, groups, D)
        given = [d.values(s, dtype) for s in (q, k, k)]
        if op.function_name == "flash_attention":
            return [*given, mask]
        statistics = np.abs(d.values((2, N, H, S), np.dtype(np.float32)))
        return [d.values(q, dtype), *given, mask, d.values(q, dtype), statistics]

    return Drawn(settings, make)


def _windows(d: Draw, rank: int, with_auto_pad: bool) -> tuple[list[int], dict[str, Any]]:
    kernel = [d.one((1, 1, 2, 3, 3, 4, 5, 7)) for _ in range(rank)]
    settings: dict[str, Any] = {}
    if d.chance(0.5):
        settings["strides"] = [d.one((1, 1, 2, 2, 3, 4, 9)) for _ in range(rank)]
    if with_auto_pad and d.chance(0.3):
        settings["auto_pad"] = str(d.one(AUTO_PADS))
    if d.chance(0.3) and not settings.get("auto_pad", "").startswith("SAME"):
        settings["dilations"] = [d.one((1, 1, 2, 3, 5)) for _ in range(rank)]
    if d.chance(0.6):
        settings["pads"] = [d.one((0, 1, 1, 2, 3, 6)) for _ in range(2 * rank)]
    return kernel, settings


@of("max_pool_grad", "average_pool_grad")
def _pool(op: Any, d: Draw) -> Drawn:
    dtype, rank = d.types(op)["T"], d.one((1, 2, 2, 2, 3))
    kernel, settings = _windows(d, rank, True)
    settings |= {"kernel_shape": kernel, "ceil_mode": d.number(0, 2)}
    if op.function_name == "average_pool_grad":
        settings["count_include_pad"] = d.number(0, 2)
    filled = {n: settings.get(n) for n in ("dilations", "kernel_shape", "pads", "strides")}
    given = pool_settings(settings.get("auto_pad", "NOTSET"), settings["ceil_mode"], **filled)

    def make() -> Arrays:
        dims = d.shape(rank + 2)
        windows = [axis.windows for axis in pool_axes(dims[2:], given)]
        if settings["ceil_mode"] and d.chance(0.2):
            windows = [n + d.number(0, 2) for n in windows]
        dY = d.values((*dims[:2], *windows), dtype)
        return [dY, np.array(dims, np.int64) if op.inputs[1].name == "shape" else d.values(dims, dtype)]

    return Drawn(settings, make)


@of("conv_grad", "depthwise_conv")
def _conv(op: Any, d: Draw) -> Drawn:
    is_gradient = op.function_name == "conv_grad"
    dtype, rank = d.types(op)["T"], d.one((1, 2, 2, 2, 2, 3) if is_gradient else (1, 2, 2))
    kernel, settings = _windows(d, rank, is_gradient)
    group = d.one((1, 1, 1, 2, 3, 4, 8, 16, 17, 32))
    depthwise = not is_gradient or (group > 1 and d.chance(0.5))
    per_group, channels = (1, 1) if depthwise else (d.size(20, 1), d.size(20, 1))
    settings["group"] = group
    if is_gradient and d.chance(0.3):
        settings["kernel_shape"] = kernel
    filled = {"auto_pad": "NOTSET", "dilations": None, "pads": None, "strides": None} | settings

    def make() -> Arrays:
        M, C = group * per_group, group * channels
        N = d.one((0, 1, 1, 2, 3, 5)) if d.has_empty else d.one((1, 1, 2, 3, 9))
        sizes = d.shape(rank, N * max(M, C))
        windows = [axis.windows for axis in conv_axes(sizes, kernel, filled)]
        X, W = d.values((N, C, *sizes), dtype), d.values((M, channels, *kernel), dtype)
        return [d.values((N, M, *windows), dtype), X, W] if is_gradient else [X, W, d.values((M,), dtype)]

    return Drawn(settings, make)


@of("batch_normalization_grad", "batch_norm_internal")
def _batch_normalization(op: Any, d: Draw) -> Drawn:
    types, rank = d.types(op), d.number(1, 6)
    settings: dict[str, Any] = {}
    if op.function_name == "batch_norm_internal":
        settings |= {"momentum": d.one((0.9, 0.0, 1.0)), "training_mode": d.number(0, 2)}
    with_statistics = settings["training_mode"] == 0 if settings else d.chance(0.5)
    # Without it, rounding alone decides what equal numbers, whose variance is 0, are divided by.
    settings["epsilon"] = d.one((1e-5, 0.0, 0.5)) if with_statistics else d.one((1e-5, 0.5))

    def make() -> Arrays:
        shape = d.shape(rank)
        C = shape[1:2] or (1,)
        X, scale = d.values(shape, types["T"]), d.values(C, types["T1"])
        mean, spread = d.values(C, types["T2"]), d.positive(C, types["T2"])
        if op.function_name == "batch_norm_internal":
            return [X, scale, d.values(C, types["T1"]), mean, spread]
        return [d.values(shape, types["T"]), X, scale, *((mean, spread) if with_statistics else (None, None))]

    return Drawn(settings, make)


@of("layer_normalization_grad", "simplified_layer_normalization_grad")
def _layer_normalization(op: Any, d: Draw) -> Drawn:
    types, rank = d.types(op), d.number(1, 5)
    axis = d.number(-rank, rank)

    def make() -> Arrays:
        shape, first = d.shape(rank), axis % rank
        rows = (*shape[:first], *[1] * (rank - first))
        X = [d.values(shape, types["T"]) for _ in range(2)]
        mean = [d.values(rows, types["U"])] if op.function_name == "layer_normalization_grad" else []
        return [*X, d.values(shape[first:], types["T"]), *mean, d.positive(rows, types["U"])]

    return Drawn({"axis": axis}, make)


@of("grid_sample_grad")
def _grid_sample(op: Any, d: Draw) -> Drawn:
    dtype, axes = d.types(op)["T"], d.one((1, 2, 2, 2, 3))
    settings = {
        "align_corners": d.number(0, 2),
        "mode": str(d.one(("nearest", "linear", "cubic"))),
        "padding_mode": str(d.one(("zeros", "border", "reflection"))),
        "normalized": d.number(0, 2),
    }

    def make() -> Arrays:
        N, C, *sizes = d.shape(axes + 2)
        places = d.shape(axes, max(1, N * C) * 4**axes)
        scale = 1.0 if settings["normalized"] else 10.0
        grid = d.values((N, *places, axes), dtype, scale)
        return [d.values((N, C, *places), dtype), d.values((N, C, *sizes), dtype), grid]

    return Drawn(settings, make)


@of("roi_align_grad")
def _roi_align(op: Any, d: Draw) -> Drawn:
    types = d.types(op)
    settings = {
        "coordinate_transformation_mode": str(d.one(("half_pixel", "output_half_pixel"))),
        "output_height": d.number(1, 6),
        "output_width": d.number(1, 6),
        "sampling_ratio": d.number(0, 4),
        "spatial_scale": d.one((1.0, 0.5, 2.0)),
    }

    def make() -> Arrays:
        N, C, H, W = d.shape(4, 4)
        R = d.size(20)
        bins = settings["output_height"], settings["output_width"]
        corners, extents = d.values((R, 2), types["T"], 3.0), d.positive((R, 2), types["T"])
        rois = np.concatenate([corners, extents * types["T"].type(8)], 1)
        if N == 0:
            R, rois = 0, rois[:0]
        return [
            d.values((R, C, *bins), types["T"]), d.values((N, C, H, W), types["T"]), rois.astype(types["T"]),
            d.whole(0, N, (R,), types["Tind"]),
        ]  # fmt: skip

    return Drawn(settings, make)


@of("softmax_cross_entropy_loss_internal", "softmax_cross_entropy_loss_grad")
def _cross_entropy(op: Any, d: Draw) -> Drawn:
    types, rank = d.types(op), d.number(2, 5)
    ignored = d.one((-1, -100, 0, 2))
    settings: dict[str, Any] = {"reduction": str(d.one(("none", "mean", "sum")))}
    is_gradient = op.function_name.endswith("_grad")
    if is_gradient:
        settings["ignore_index"] = ignored

    def make() -> Arrays:
        shape = d.shape(rank)
        samples, classes = (shape[0], *shape[2:]), shape[1]
        scores, weights = d.values(shape, types["T"]), d.positive((classes,), types["T"])
        labels = d.whole(0, classes, samples, types["Tind"])
        if d.chance(0.3) or not classes:
            labels[d.rng.random(samples) < (0.2 if classes else 2)] = ignored
        if not is_gradient:
            return [scores, labels, weights, np.array(ignored, np.int64)]
        dY = d.values(samples if settings["reduction"] == "none" else (), types["T"])
        return [dY, scores, labels, weights]

    return Drawn(settings, make)


@of("linear_cross_entropy")
def _linear_cross_entropy(op: Any, d: Draw) -> Drawn:
    types, rank, transposed = d.types(op), d.number(2, 5), d.number(0, 2)
    settings = {
        "transW": transposed,
        "reduction": str(d.one(("mean", "sum"))),
        "precision": str(d.one(("float32", "float32", "bfloat16"))),
    }

    def make() -> Arrays:
        shape = d.shape(rank, 2)
        depth, classes = min(shape[-1], 200), min(d.size(500), 500)
        shape = (*shape[:-1], depth)
        labels = d.whole(0, classes, shape[:-1], types["Tind"])
        if d.chance(0.3) or not classes:
            labels[d.rng.random(shape[:-1]) < (0.2 if classes else 2)] = -1
        W = d.values((classes, depth) if transposed else (depth, classes), types["T1"])
        numbers = d.values((classes,), types["T1"]), d.positive((classes,), types["T1"]), d.positive((), types["T1"])
        return [d.values(shape, types["T"]), W, labels, *numbers]

    return Drawn(settings, make)


@of("permuted_mat_mul")
def _permuted_matmul(op: Any, d: Draw) -> Drawn:
    dtype, rank_a, rank_b = d.types(op)["T"], d.number(2, 5), d.number(2, 5)
    rank = max(rank_a, rank_b)
    perms = {
        f"perm{n}": [int(a) for a in d.rng.permutation(r)]
        for n, r in (("A", rank_a), ("B", rank_b), ("Y", rank))
        if d.chance(0.6)
    }
    settings = {**perms, "precision": str(d.one(("float32", "float32", "bfloat16")))}
    if d.chance(0.3):
        settings["alpha"] = d.one((0.0, -2.0, 0.5))

    def make() -> Arrays:
        M, K, N = (d.size(600) for _ in range(3))
        batches = d.shape(rank - 2, max(1, M * K, K * N, M * N))

        def unpermuted(name: str, matrix: tuple[int, int], count: int) -> np.ndarray:
            dims = [1 if d.chance(0.2) else n for n in batches[rank - 2 - count :]] + list(matrix)
            perm = perms.get(f"perm{name}", range(len(dims)))
            shape = [0] * len(dims)
            for k, axis in enumerate(perm):
                shape[axis] = dims[k]
            return d.values(shape, dtype)

        return [unpermuted("A", (M, K), rank_a - 2), unpermuted("B", (K, N), rank_b - 2), d.values((N,), dtype)]

    return Drawn(settings, make)
