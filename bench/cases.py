"""The work that is timed: real shapes, and in which types."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from bench.peers import Array, OutputType
from onnxgrad import op
from onnxgrad.schema import Known

INTO, FLOOR, MEMORY = "onnxgrad into", "floor", "memory"
DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float64": np.dtype(np.float64),
}
Named = dict[str, Array | None]


@dataclass(frozen=True)
class Case:
    """One row of the table: an operator on inputs of one type."""

    name: str
    work: str
    operator: str
    dtype: str
    inputs: Callable[[], Named]
    small_inputs: Callable[[], Named]  # of the same types and ranks: compiles what the case needs
    attributes: dict[str, Any] = field(default_factory=dict)
    reduction_length: int = 1  # how many numbers add up to one, at most: what rounding errors grow with
    has_floor: bool = False
    memory_of: str | None = None  # the input in multiples of which peak memory is told, where it is measured

    @property
    def group(self) -> str:
        return self.name.split("/")[0]

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        return DTYPES.get(self.dtype, np.dtype(np.int64))

    @property
    def op(self) -> "op.Op[..., Any]":
        return next(o for o in op.OPERATORS.values() if o.function_name == self.operator)


def output_types(case: Case, inputs: Named) -> list[OutputType]:
    """The operator's outputs, from the operator's own shape rule."""
    known = [
        None if array is None else Known(array.shape, tuple(array.tolist()) if declared.constraint.on_host else None)
        for declared, array in zip(case.op.inputs, inputs.values(), strict=True)
    ]
    defaults = {attribute.name: attribute.default for attribute in case.op.attributes}
    shapes = case.op.shape_rule(*known, **{**defaults, **case.attributes})
    names = [output.name for output in case.op.outputs]
    shapes = [shapes] if len(names) == 1 else shapes
    return [OutputType(name, tuple(dims), case.dtype) for name, dims in zip(names, shapes, strict=True)]


def _numbers(rng: np.random.Generator, dims: tuple[int, ...], dtype: str, scale: float = 1.0) -> Array:
    drawn = rng.standard_normal(dims, np.float64 if dtype == "float64" else np.float32)
    return (drawn * drawn.dtype.type(scale)).astype(DTYPES[dtype], copy=False)


def _zipf(rng: np.random.Generator, size: int, count: int) -> Array:
    """Indices as words of a text: the k-th commonest 1/k as often as the first, common ones anywhere."""
    weights = 1 / np.arange(1, size + 1)
    return rng.permutation(size)[rng.choice(size, count, p=weights / weights.sum())]


def _gather(dims: tuple[int, ...], count: int, axis: int, zipf: bool, dtype: str) -> Named:
    rng = np.random.default_rng(1)
    indices = _zipf(rng, dims[axis], count) if zipf else rng.integers(0, dims[axis], count)
    dY = _numbers(rng, (*dims[:axis], count, *dims[axis + 1 :]), dtype)
    return {"shape": np.array(dims, np.int64), "indices": indices.astype(np.int64), "dY": dY}


def _gather_elements(dims: tuple[int, ...], count: int, axis: int, dtype: str) -> Named:
    rng = np.random.default_rng(2)
    read = (*dims[:axis], count, *dims[axis + 1 :])
    return {
        "dY": _numbers(rng, read, dtype),
        "shape": np.array(dims, np.int64),
        "indices": rng.integers(0, dims[axis], read),
    }


def _slice(dims: tuple[int, int], which: str, dtype: str) -> Named:
    rows, columns = dims
    read, starts, ends, axes, steps = {
        "half the rows": ((rows // 2, columns), [rows // 4], [rows // 4 + rows // 2], [0], [1]),
        "every 2nd column": ((rows, columns // 2), [0], [columns], [1], [2]),
        "reversed": (dims, [-1, -1], [-rows - 1, -columns - 1], [0, 1], [-1, -1]),
    }[which]
    inputs: Named = {"dY": _numbers(np.random.default_rng(3), read, dtype), "shape": np.array(dims, np.int64)}
    for name, values in (("starts", starts), ("ends", ends), ("axes", axes), ("steps", steps)):
        inputs[name] = np.array(values, np.int64)
    return inputs


def _gru(sizes: tuple[int, int, int, int], dtype: str) -> Named:
    S, N, inputs, H = sizes
    rng = np.random.default_rng(4)
    scale = H**-0.5  # keeps the gates in their lively range
    return {
        "X": _numbers(rng, (S, N, inputs), dtype),
        "W": _numbers(rng, (1, 3 * H, inputs), dtype, scale),
        "R": _numbers(rng, (1, 3 * H, H), dtype, scale),
        "B": _numbers(rng, (1, 6 * H), dtype, scale),
        "SL": None,
        "Ht0": _numbers(rng, (1, N, H), dtype),
    }


def _gru_grad(sizes: tuple[int, int, int, int], linear_before_reset: int, dtype: str) -> Named:
    S, N, _, H = sizes
    inputs = _gru(sizes, dtype)
    training = op.OPERATORS["GRUTraining"]
    exact = {k: None if v is None else v.astype(np.float64) for k, v in inputs.items()}
    HAll, _, ZRH = training.definition(**exact, linear_before_reset=linear_before_reset)
    rng = np.random.default_rng(5)
    return {
        **inputs,
        "HAll": HAll.astype(DTYPES[dtype]),
        "ZRH": ZRH.astype(DTYPES[dtype]),
        "dHAll": _numbers(rng, (S, 1, N, H), dtype),
        "dHFinal": _numbers(rng, (1, N, H), dtype),
    }


def _gather_cases(dtype: str) -> list[Case]:
    found = []
    for name, dims, count, axis, zipf in (
        ("embedding", (30522, 768), 4096, 0, True),
        ("axis1", (64, 512, 768), 256, 1, False),
    ):
        make = partial(_gather, axis=axis, zipf=zipf, dtype=dtype)
        found.append(
            Case(
                name=f"gather/{name}",
                work=f"GatherGrad {list(dims)}, {count} {'zipf ' if zipf else ''}indices, axis {axis}",
                operator="gather_grad",
                dtype=dtype,
                inputs=partial(make, dims, count),
                small_inputs=partial(make, tuple(min(d, 256) for d in dims), 128),
                attributes={"axis": axis},
                reduction_length=count if zipf else 16,
                has_floor=True,
                memory_of="dY",
            )
        )
    return found


def _gather_elements_cases(dtype: str) -> list[Case]:
    return [
        Case(
            name=f"gather_elements/axis{axis}",
            work=f"GatherElementsGrad {list(dims)}, axis {axis}, 1000 {what}",
            operator="gather_elements_grad",
            dtype=dtype,
            inputs=partial(_gather_elements, dims, 1000, axis, dtype),
            small_inputs=partial(_gather_elements, (300, 300), 200, axis, dtype),
            attributes={"axis": axis},
            reduction_length=16,
            memory_of="dY",
        )
        for dims, axis, what in (((2000, 1000), 0, "rows"), ((1000, 2000), 1, "columns"))
    ]


def _slice_cases(dtype: str) -> list[Case]:
    return [
        Case(
            name=f"slice/{which.replace(' ', '_')}",
            work=f"SliceGrad [4096, 4096], {which}",
            operator="slice_grad",
            dtype=dtype,
            inputs=partial(_slice, (4096, 4096), which, dtype),
            small_inputs=partial(_slice, (512, 512), which, dtype),
            reduction_length=0,
            memory_of="dY",
        )
        for which in ("half the rows", "every 2nd column", "reversed")
    ]


def _gru_cases(dtype: str) -> list[Case]:
    found = []
    for sizes in ((64, 32, 128, 256), (128, 64, 256, 512)):
        if dtype != "float32" and sizes[0] != 64:
            continue
        spelled = " ".join(letter + str(size) for letter, size in zip("SNIH", sizes, strict=True))
        for linear in (0, 1):
            attributes = {"hidden_size": sizes[3], "linear_before_reset": linear}
            small = (4, 8, 32, sizes[3])
            found.append(
                Case(
                    name=f"gru/grad_{spelled.replace(' ', '')}_lbr{linear}",
                    work=f"GRUGrad {spelled}, linear_before_reset {linear}",
                    operator="gru_grad",
                    dtype=dtype,
                    inputs=partial(_gru_grad, sizes, linear, dtype),
                    small_inputs=partial(_gru_grad, small, linear, dtype),
                    attributes=attributes,
                    reduction_length=sizes[0] * sizes[1],
                    memory_of="ZRH",
                )
            )
            found.append(
                Case(
                    name=f"gru/training_{spelled.replace(' ', '')}_lbr{linear}",
                    work=f"GRUTraining {spelled}, linear_before_reset {linear}",
                    operator="gru_training",
                    dtype=dtype,
                    inputs=partial(_gru, sizes, dtype),
                    small_inputs=partial(_gru, small, dtype),
                    attributes=attributes,
                    reduction_length=sizes[2] + sizes[3],
                )
            )
    return found


def _normalization(dims: tuple[int, int], centred: bool, dtype: str) -> Named:
    rng = np.random.default_rng(6)
    inputs: Named = {name: _numbers(rng, dims, dtype) for name in ("Y_grad", "X")}
    inputs["scale"] = _numbers(rng, dims[1:], dtype)
    x = inputs["X"].astype(np.float64)  # type: ignore[union-attr]
    mean = x.mean(1, keepdims=True)
    inv = 1 / np.sqrt(np.mean((x - mean * centred) ** 2, 1, keepdims=True) + 1e-5)
    statistics = {"mean": mean, "inv_std_var": inv} if centred else {"inv_std_var": inv}
    return inputs | {name: array.astype(np.float32) for name, array in statistics.items()}


def _normalization_cases(dtype: str) -> list[Case]:
    dims = (4096, 1024)
    return [
        Case(
            name=f"normalization/{name}",
            work=f"{operator} {list(dims)}",
            operator=f"{name}_normalization_grad",
            dtype=dtype,
            inputs=partial(_normalization, dims, centred, dtype),
            small_inputs=partial(_normalization, (64, 256), centred, dtype),
            attributes={"axis": -1},
            reduction_length=dims[0],
            memory_of="Y_grad",
        )
        for name, operator, centred in (
            ("layer", "LayerNormalizationGrad", True),
            ("simplified_layer", "SimplifiedLayerNormalizationGrad", False),
        )
    ]


def _images(dims: tuple[int, ...], measured: bool, dtype: str) -> Named:
    rng = np.random.default_rng(8)
    dY, X, scale = (_numbers(rng, shape, dtype) for shape in (dims, dims, dims[1:2]))
    inputs: Named = {"dY": dY, "X": X, "scale": scale, "mean": None, "inv_std": None}
    if not measured:
        over, x = tuple(k for k in range(len(dims)) if k != 1), X.astype(np.float64)
        statistics = x.mean(over), 1 / np.sqrt(x.var(over) + 1e-5)
        inputs |= {name: a.astype(DTYPES[dtype]) for name, a in zip(("mean", "inv_std"), statistics, strict=True)}
    return inputs


def _batch_normalization_cases(dtype: str) -> list[Case]:
    """Layers of MobileNets; without statistics, as our rule writes it, and with them, as onnxruntime-training did."""
    shapes = ((4, 64, 56, 56), (4, 32, 112, 112), (8, 256, 14, 14), (4, 1280, 7, 7))
    return [
        Case(
            name=f"batch_normalization/{'x'.join(map(str, dims))}{'' if measured else '_given'}",
            work=f"BatchNormalizationGrad {list(dims)}{'' if measured else ', statistics given'}",
            operator="batch_normalization_grad",
            dtype=dtype,
            inputs=partial(_images, dims, measured, dtype),
            small_inputs=partial(_images, (2, 8, *dims[2:]), measured, dtype),
            attributes={"epsilon": 1e-5},
            reduction_length=dims[0] * dims[2] * dims[3],
            memory_of="dY",
        )
        for dims in (shapes if dtype == "float32" else shapes[:1])
        for measured in (True, False)
    ]


def _matrices(A: tuple[int, ...], B: tuple[int, ...], columns: int, dtype: str) -> Named:
    rng = np.random.default_rng(7)
    bias = _numbers(rng, (columns,), dtype) if columns else None
    return {"A": _numbers(rng, A, dtype), "B": _numbers(rng, B, dtype), "bias": bias}


def _matrix_cases(dtype: str) -> list[Case]:
    """The products of a layer of a transformer: a linear layer, its weights' gradient, the scores of attention."""
    heads = {"permA": [0, 2, 1, 3], "permB": [0, 2, 3, 1], "alpha": 0.125}
    layouts: dict[str, tuple[str, tuple[int, ...], tuple[int, ...], int, dict[str, Any], int]] = {
        "linear": ("[2048, 256] · [256, 1024] + bias", (2048, 256), (256, 1024), 1024, {}, 256),
        "weights": ("[2048, 256]ᵀ · [2048, 1024]", (2048, 256), (2048, 1024), 0, {"permA": [1, 0]}, 2048),
        "scores": ("[16, 128, 4, 64], 64 heads", (16, 128, 4, 64), (16, 128, 4, 64), 0, heads, 64),
    }
    return [
        Case(
            name=f"matrix/{name}",
            work=f"PermutedMatMul {work}",
            operator="permuted_mat_mul",
            dtype=dtype,
            inputs=partial(_matrices, A, B, columns, dtype),
            small_inputs=partial(_matrices, A, B, columns, dtype),
            attributes=attributes,
            reduction_length=depth,
        )
        for name, (work, A, B, columns, attributes, depth) in layouts.items()
    ]


def _broadcast_cases() -> list[Case]:
    def inputs() -> Named:
        return {"a_shape": np.array([8, 1, 6, 1, 4, 3], np.int64), "b_shape": np.array([8, 7, 1, 5, 4, 1], np.int64)}

    return [
        Case(
            name="broadcast/rank6",
            work="BroadcastGradientArgs, rank 6",
            operator="broadcast_gradient_args",
            dtype="int64",
            inputs=inputs,
            small_inputs=inputs,
            reduction_length=0,
        )
    ]


GROUPS = ("gather", "gather_elements", "slice", "gru", "normalization", "batch_normalization", "matrix", "broadcast")


def all_cases() -> list[Case]:
    """Every case, group by group, type by type."""
    found = _broadcast_cases()
    for dtype in DTYPES:
        for cases in (_gather_cases, _gather_elements_cases, _slice_cases, _gru_cases, _normalization_cases):
            found += cases(dtype)
        found += _batch_normalization_cases(dtype)
    found += _matrix_cases("float32")
    return sorted(found, key=lambda case: GROUPS.index(case.group))
