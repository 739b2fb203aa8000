"""Runs onnxruntime-training 1.19.2 on small cases of every operator and stores what it gives in golden/."""

import itertools
import json
import multiprocessing
import os
import re
import signal
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime
from onnx import helper

# <operator>.npz holds all numbers end to end, one flat array per type; <operator>.json says what they are: for every
# case its attributes and the type, shape and offset of each input and output present. An "invalid" case is one the
# contract refuses; "peer_differs" says that the peer does not. "peer_cannot" names valid cases the peer does not do.
GOLDEN = Path(__file__).parent / "golden"
INT32_MAX, INT64_MAX, INT64_MIN = 2**31 - 1, 2**63 - 1, -(2**63)
FLOATS = ("float16", "float32", "float64")
OUTPUTS = {
    "GatherGrad": ("dX",),
    "GatherElementsGrad": ("dX",),
    "BroadcastGradientArgs": ("a_axes", "b_axes"),
    "SliceGrad": ("dX",),
    "GRUTraining": ("HAll", "HFinal", "ZRH"),
    "GRUGrad": ("dX", "dW", "dR", "dB", "dH0"),
}


@dataclass
class Case:
    """One node to run: its inputs in the schema's order (None if absent) and the outputs to ask for (None: all)."""

    name: str
    inputs: dict[str, Any]
    attributes: dict[str, Any] = field(default_factory=dict)
    outputs: tuple[str, ...] | None = None
    invalid: str | None = None  # why the contract calls this case an error


def run(operator: str, case: Case, domain: str = "com.microsoft") -> list[np.ndarray]:
    """The outputs asked for, as onnxruntime's CPU kernels compute them on one thread (so: the same bits every time)."""
    given = {name: array for name, array in case.inputs.items() if array is not None}
    kinds = {name: helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in given.items()}
    possible = OUTPUTS.get(operator, ("y",))
    outputs = [name if name in (case.outputs or possible) else "" for name in possible]
    names = [name if name in given else "" for name in case.inputs]
    node = helper.make_node(operator, names, outputs, domain=domain, **case.attributes)
    values = [helper.make_tensor_value_info(name, kinds[name], array.shape) for name, array in given.items()]
    T = next((kinds[name] for name in ("dY", "dy", "X", "scores", "a_shape") if name in kinds), None)
    results = [helper.make_tensor_value_info(name, T, None) for name in outputs if name]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph([node], "one", values, results)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"]).run(None, given)


def sentence(message: str) -> str:
    """What onnxruntime says went wrong, without its source paths and signatures."""
    message = message.replace("\n", " ").split("Status Message:")[-1].removeprefix("[ONNXRuntimeError] : ").strip()
    message = re.sub(r"^(\d+ : )?[A-Z_]+ : ", "", message)
    message = re.sub(r"^.* was false\. ?|^\S+\.(cc|h):\d+ \w+ ", "", message)
    return message.split(" Op with name")[0].strip()


def attempt(operator: str, case: Case, domain: str = "com.microsoft") -> list[np.ndarray] | str:
    """The outputs, or why there are none; in a process of its own, because some cases kill it."""
    receiver, sender = multiprocessing.Pipe(duplex=False)

    def child() -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # onnxruntime logs what it also raises
        try:
            sender.send(run(operator, case, domain))
        except Exception as error:
            sender.send(sentence(str(error)))

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        process.join()
        return f"the process dies of {signal.Signals(-process.exitcode).name}"


def ints(values: Any, dtype: Any = np.int64) -> np.ndarray:
    return np.array(values, dtype)


def floats(name: str, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    """Numbers in [-1, 1) that depend on the name alone, so that a new case leaves the others as they were."""
    return np.random.default_rng(zlib.crc32(name.encode())).uniform(-1, 1, shape).astype(dtype)


def some_indices(name: str, size: int, *shape: int, dtype: Any = np.int64) -> np.ndarray:
    return np.random.default_rng(zlib.crc32(name.encode())).integers(-size, size, shape).astype(dtype)


def gather_case(
    name: str, shape: Any, indices: Any, axis: int | None = 0, dY: Any = None, T: Any = "f4", invalid: str | None = None
) -> Case:
    # Plain tuples and lists are int64; what must be int32 comes as an array.
    shape, indices = (np.asarray(a, getattr(a, "dtype", np.int64)) for a in (shape, indices))
    where = (axis or 0) % max(len(shape), 1)
    dY = floats(name, *shape[:where], *indices.shape, *shape[where + 1 :], dtype=T) if dY is None else dY
    attributes = {} if axis is None else {"axis": axis}
    return Case(name, {"shape": shape, "indices": indices, "dY": dY}, attributes, invalid=invalid)


def gather_cases() -> Iterator[Case]:
    case = gather_case
    for T, Tind in itertools.product(FLOATS, ("int32", "int64")):
        yield case(f"{T}-{Tind}", (5, 4), ints([0, 3, 3, -1, 4, -5, 3], Tind), T=T)
        yield case(f"{T}-{Tind}-axis 1 of 3", (2, 4, 3), ints([[0, 3], [-1, -4], [1, 1]], Tind), 1, T=T)
    for axis in range(-3, 3):
        yield case(f"axis {axis}", (3, 4, 5), some_indices(f"axis {axis}", (3, 4, 5)[axis], 2, 3), axis)
        yield case(f"axis {axis} scalar index", (3, 4, 5), ints(-2), axis)
    yield case("no axis given", (4, 3), [2, 0, 2], None)
    yield case("scalar index into a vector", (4,), ints(3))
    yield case("indices of rank 4", (4, 2), some_indices("rank 4", 4, 2, 1, 3, 2))
    yield case("data of rank 5", (2, 3, 1, 4, 2), some_indices("data of rank 5", 4, 3), 3)
    yield case("axis of one", (3, 1), [0, -1, 0], 1)
    for T in FLOATS:
        yield case(f"{T} 300 times the same row", (3, 2), ints([1] * 300), T=T)
        yield case(f"{T} last row under both names", (4, 3), ints([3, -1] * 20), T=T)
    yield case("500 random rows", (7, 3), some_indices("500 random rows", 7, 500))
    for shape, axis, indices in (((4, 3), 0, (0,)), ((4, 3), 1, (0, 2)), ((4, 3), 0, (2, 0)), ((0, 3), 0, (0,))):
        yield case(f"empty indices {indices} for {shape} axis {axis}", shape, np.zeros(indices, np.int64), axis)
    yield case("rows of nothing", (4, 0), [0, -1, 2])
    yield case("no batches", (0, 4), [0, -1, 2], 1)
    yield case("index too large", (4, 3), [0, 4], invalid="an index is out of range")
    yield case("index too small", (4, 3), [0, -5], invalid="an index is out of range")
    yield case("axis too large", (4, 3), [0], 2, invalid="the axis is out of range")
    yield case("empty shape", (), [0], dY=floats("", 1), invalid="shape is empty")
    yield case("negative dimension", (-4, 3), [0], invalid="a dimension is negative")
    for name, dims in {"too long": (5, 3), "too short": (1, 3), "too wide": (2, 4), "transposed": (3, 2)}.items():
        yield case(f"dY {name}", (4, 3), [0, 1], dY=floats(name, *dims), invalid=f"dY is {name}")
    yield case("bfloat16", (4, 3), [0, 1, 1], T=ml_dtypes.bfloat16)
    yield case("int32 shape", ints((4, 3), np.int32), [0, 1, 1])


def gather_elements_cases() -> Iterator[Case]:
    def case(name: str, shape: Any, indices: Any, axis: int | None = 0, dY: Any = None, T: Any = "f4", **more: Any):
        dY = floats(name, *np.shape(indices), dtype=T) if dY is None else dY
        case = gather_case(name, shape, indices, axis, dY, **more)
        case.inputs = {n: case.inputs[n] for n in ("dY", "shape", "indices")}
        return case

    for T, Tind in itertools.product(FLOATS, ("int32", "int64")):
        yield case(f"{T}-{Tind}", (4, 3), ints([[0, 3], [-1, 0], [3, 0], [0, -4], [1, 1]], Tind), T=T)
        yield case(f"{T}-{Tind}-axis 1 of 3", (2, 4, 3), some_indices(f"{T}-{Tind}", 4, 2, 6, 2, dtype=Tind), 1, T=T)
    for axis in range(-3, 3):
        size, name = (3, 4, 5)[axis], f"axis {axis}"
        larger = [9 if k == axis % 3 else d for k, d in enumerate((2, 3, 3))]
        yield case(f"{name} full", (3, 4, 5), some_indices(name, size, 3, 4, 5), axis)
        yield case(f"{name} longer, others smaller", (3, 4, 5), some_indices(name, size, *larger), axis)
        yield case(f"{name} one element", (3, 4, 5), some_indices(name, size, 1, 1, 1), axis)
    yield case("no axis given", (4, 3), [[2, 0, -1], [1, -4, 2]], None)
    yield case("vector", (4,), [3, 0, -1, 3, 3, 1])
    yield case("rank 5", (2, 3, 1, 4, 2), some_indices("rank 5", 4, 2, 2, 1, 6, 1), 3)
    for T in FLOATS:
        yield case(f"{T} 300 times the same element", (3, 2), np.ones((300, 2), np.int64), T=T)
    yield case("500 random along the last axis", (2, 7), some_indices("500 random", 7, 2, 500), 1)
    for shape, axis, dims in (((4, 3), 0, (0, 3)), ((4, 3), 0, (2, 0)), ((4, 3), -1, (0, 0)), ((0, 3), 0, (0, 3))):
        yield case(f"empty indices {dims} for {shape} axis {axis}", shape, np.zeros(dims, np.int64), axis)
    yield case("index too large", (4, 3), [[0, 4]], invalid="an index is out of range")
    yield case("index too small", (4, 3), [[0, -5]], invalid="an index is out of range")
    yield case("index into nothing", (0, 2), [[0, 0]], invalid="an index is out of range")
    yield case("axis too large", (4, 3), [[0, 1]], 2, invalid="the axis is out of range")
    yield case("larger beside the axis", (2, 2), [[0, 1, 1]], invalid="indices are larger than shape beside the axis")
    yield case("other rank", (4, 3), [0, 1], invalid="indices have another rank than shape")
    yield case("dY of other shape", (4, 3), [[0, 1, 2]], dY=floats("", 3, 1), invalid="dY is not shaped as indices")
    yield case("bfloat16", (4, 3), [[0, 1], [1, 1]], T=ml_dtypes.bfloat16)


def broadcast_cases() -> Iterator[Case]:
    def case(a: Any, b: Any, note: str = "", **more: Any) -> Case:
        return Case(f"{list(a)} {list(b)}{note}", {"a_shape": ints(a), "b_shape": ints(b)}, **more)

    pairs = [
        ((2, 16, 16, 16), (1, 1, 16, 16)), ((2, 9, 9, 9), (9, 9)), ((2, 3), (2, 3)), ((2, 3), (3,)), ((2, 3), (1,)),
        ((2, 3), ()), ((), ()), ((1,), (1,)), ((1,), ()), ((1, 1), (1, 1, 1)), ((5,), (1, 1, 1)), ((5, 1), (1, 6)),
        ((2, 1, 3), (1, 4, 1)), ((1, 4, 1), (2, 1, 1)), ((3, 1, 5, 1), (4, 1, 6)), ((1, 1, 1), (2, 3, 4)), ((7,), (7,)),
        ((0,), (0,)), ((0,), (1,)), ((0, 3), (1, 3)), ((0, 3), (0, 1)), ((2, 0, 3), (3,)), ((2, 1, 3), (0, 1)),
        ((0,), ()), ((0, 0), (1, 1)), ((1, 0), (0, 1)), ((1, 1, 0), (1, 3, 2, 1)), ((4, 1, 2, 1, 3, 1), (2, 5, 1, 6)),
        ((2**40, 1), (1, 2**40)),
    ]  # fmt: skip
    for a, b in pairs:
        yield case(a, b)
        if a != b:
            yield case(b, a)
    yield case((2, 1, 3), (1, 4, 1), " only a_axes", outputs=("a_axes",))
    yield case((2, 1, 3), (1, 4, 1), " only b_axes", outputs=("b_axes",))
    for a, b in (((2,), (3,)), ((0,), (2,)), ((2, 4, 2), (0,)), ((3, 3), (1, 4, 4, 1)), ((2, 3), (2, 1, 2))):
        yield case(a, b, invalid="the shapes do not broadcast")


def slice_cases() -> Iterator[Case]:
    def case(
        name: str, shape: Any, *spec: Any, T: Any = "f4", Tind: Any = "int64", dY: Any = None, **more: Any
    ) -> Case:
        slicing = dict(itertools.zip_longest(("starts", "ends", "axes", "steps"), spec))
        slicing = {n: None if v is None else ints(v, Tind) for n, v in slicing.items()}
        if dY is None:  # stock Slice says what shape its gradient has
            sliced = attempt("Slice", Case("", {"dY": np.zeros(shape, np.float32), **slicing}), domain="")
            assert not isinstance(sliced, str), f"{name}: {sliced}"
            dY = floats(name, *sliced[0].shape)
        return Case(name, {"dY": dY.astype(T), "shape": ints(shape), **slicing}, **more)

    specs = {
        "first axes": ((3, 4), (1, 1), (3, 3)),
        "vector": ((5,), (1,), (4,)),
        "one of two axes": ((3, 4), (1,), (2,)),
        "last axis": ((3, 4), (1,), (3,), (1,)),
        "negative axis, start and end": ((3, 4), (-3,), (-1,), (-1,)),
        "axes out of order": ((3, 4, 2), (1, 0), (4, 2), (1, 0)),
        "axes out of order, negative": ((3, 4, 2), (0, 1, -2), (1, 3, -1), (-1, 0, -2)),
        "no starts at all": ((3, 4), (), ()),
        "everything empty": ((3, 4), (), (), (), ()),
        "step 2 without axes": ((3, 5), (0, 1), (3, 5), None, (2, 2)),
        "step 3 on the last axis": ((3, 8), (1,), (8,), (1,), (3,)),
        "step past the end": ((3, 4), (1,), (4,), (1,), (100,)),
        "end INT32_MAX": ((3, 5), (1,), (INT32_MAX,), (1,), (2,)),
        "clamped": ((3, 4), (-100,), (100,), (1,)),
        "step -1 on the first axis": ((3, 4), (-1,), (-9,), (0,), (-1,)),
        "step -1 to INT32_MAX": ((3, 4), (-1,), (INT32_MAX,), (0,), (-1,)),
        "step -1 clamped": ((3, 4), (100,), (-100,), (0,), (-1,)),
        "step -1 to 0": ((4, 3), (-1,), (0,), (0,), (-1,)),
        "step -2 in the middle": ((2, 5, 2), (-1,), (-9,), (1,), (-2,)),
        "step -3 and 2": ((7, 6), (-2, 1), (-9, 6), (0, 1), (-3, 2)),
        "two negative steps": ((4, 3, 2), (2, -1), (-9, -9), (0, 1), (-2, -1)),
        "rank 5": ((2, 3, 2, 2, 3), (1, 0, -1, 0, 1), (2, 2, 2, 9, 3)),
        "rank 9": ((2,) * 8 + (3,), (1,) * 9, (2,) * 8 + (3,)),
        "empty slice": ((3, 4), (2,), (2,), (1,)),
        "empty slice, start past the end": ((3, 4), (9,), (20,), (0,)),
        "empty slice, step -1": ((3, 4), (0,), (2,), (0,), (-1,)),
        "empty slice, step -1 on the last axis": ((3, 4), (0,), (2,), (1,), (-1,)),
        "dimension of 0": ((3, 0), (0,), (2,), (1,)),
        "dimension of 0, step -1": ((0, 4), (-1,), (-9,), (0,), (-1,)),
    }
    for name, spec in specs.items():
        yield case(f"{name} float32-int64", *spec)
        yield case(f"{name} float64-int32", *spec, T="f8", Tind="int32")
    yield case("float32-int32", *specs["step 3 on the last axis"], Tind="int32")
    yield case("float64-int64", *specs["step 3 on the last axis"], T="f8")
    yield case("end INT64_MAX", (3, 5), (1,), (INT64_MAX,), (1,), (2,))
    yield case("step -1 to INT64_MAX", (3, 4), (-1,), (INT64_MAX,), (0,), (-1,))
    yield case("step -1 to INT64_MIN", (3, 4), (-1,), (INT64_MIN,), (0,), (-1,))
    yield case("step INT64_MAX", (3, 4), (1,), (4,), (1,), (INT64_MAX,))
    yield case("step INT64_MIN", (3, 4), (2,), (-9,), (0,), (INT64_MIN,))
    yield case(
        "repeated axes", (3, 4), (0, 1), (4, 3), (1, -1), dY=floats("", 3, 2), invalid="axes names an axis twice"
    )
    yield case("step 0", (3, 4), (0,), (2,), (1,), (0,), dY=floats("", 3, 2), invalid="a step is 0")
    yield case("axis too large", (3, 4), (0,), (2,), (2,), dY=floats("", 3, 2), invalid="an axis is out of range")
    yield case("more starts than axes", (3,), (0, 0), (3, 3), dY=floats("", 3), invalid="there are too many starts")
    yield case("one end too many", (3, 4), (0,), (2, 2), (1,), dY=floats("", 3, 2), invalid="ends has one too many")
    yield case("rank 0", (), (), (), dY=floats(""), invalid="shape is empty")
    for name, dims in {"too large": (3, 4), "transposed": (2, 3)}.items():
        yield case(f"dY {name}", (3, 4), (0,), (2,), (1,), dY=floats(name, *dims), invalid=f"dY is {name}")
    yield case("step -1 on the last axis", (3, 4), (-1,), (-9,), (1,), (-1,))
    yield case("empty axes mean the first ones", (3, 4), (1,), (3,), (), dY=floats("", 2, 4))
    for T in (np.float16, ml_dtypes.bfloat16, *"bhilBHILFD?"):
        yield case(f"{np.dtype(T)}", *specs["last axis"], T=T)


LOWER = ["sigmoid", "tanh"]
GRU_CHANGES: dict[str, dict[str, Any]] = {  # attributes and inputs of which the peer's GRU takes few
    "activations not given": {"activations": None},
    "forward spelled out": {"direction": "forward"},
    "Sigmoid and Tanh capitalised": {"activations": ["Sigmoid", "Tanh"]},
    "Relu": {"activations": ["relu", "tanh"]},
    "hidden_size not given": {"hidden_size": None},
    "reverse": {"direction": "reverse"},
    "bidirectional": {"direction": "bidirectional", "activations": LOWER * 2},
    "clip": {"clip": 0.5},
    "SL": {"replace": {"SL": ints([3, 1], np.int32)}},
    "float64": {"dtype": np.float64},
    "float16": {"dtype": np.float16},
    "bfloat16": {"dtype": ml_dtypes.bfloat16},
    "S of 0": {"size": (0, 2, 3, 4)},
    "N of 0": {"size": (3, 0, 3, 4)},
    "I of 0": {"size": (3, 2, 0, 4)},
    "unknown activation": {"activations": ["sigmoid", "sine"], "invalid": "an activation is unknown"},
    "hidden_size differs": {"hidden_size": 5, "invalid": "hidden_size is not R's"},
    "W of other width": {"replace": {"W": floats("", 1, 12, 2)}, "invalid": "W does not fit X"},
    "B too short": {"replace": {"B": floats("", 1, 12)}, "invalid": "B is too short"},
    "Ht0 of other rows": {"replace": {"Ht0": floats("", 1, 3, 4)}, "invalid": "Ht0 does not fit X"},
}


def gru_cases(grad: bool) -> Iterator[Case]:
    def case(
        name: str, size: Any = (3, 2, 3, 4), absent: Any = (), scale: float = 0.5, dtype: Any = np.float32,
        replace: Any = None, outputs: Any = None, invalid: Any = None, **attributes: Any,
    ) -> Case:  # fmt: skip
        S, N, width, H = size
        D = 2 if attributes.get("direction") == "bidirectional" else 1
        shapes: dict[str, Any] = {"X": (S, N, width), "W": (D, 3 * H, width), "R": (D, 3 * H, H)}
        shapes |= {"B": (D, 6 * H), "SL": None, "Ht0": (D, N, H)}
        attributes = {"hidden_size": H, "activations": LOWER} | attributes
        attributes = {n: v for n, v in attributes.items() if v is not None}

        def filled(shapes: dict[str, Any]) -> dict[str, Any]:
            arrays = {n: None if s is None or n in absent else floats(f"{name} {n}", *s) for n, s in shapes.items()}
            arrays |= {n: a * np.float32(scale) for n, a in arrays.items() if n in ("W", "R", "B") and a is not None}
            return {n: None if a is None else a.astype(dtype) for n, a in arrays.items()} | (replace or {})

        if not grad:
            return Case(name, filled(shapes), attributes, outputs, invalid)
        states, gates = (S, D, N, H), (S, D, N, 3 * H)
        inputs = filled(shapes | {"HAll": states, "ZRH": gates, "dHAll": states, "dHFinal": (D, N, H)})
        # The peer's own forward pass, where it can do one.
        forward = attempt("GRUTraining", Case(name, {n: inputs[n] for n in shapes}, attributes))
        if not isinstance(forward, str):
            inputs |= {"HAll": forward[0], "ZRH": forward[2]}
        return Case(name, inputs, attributes, outputs, invalid)

    for lbr, *present in itertools.product((0, 1), *[(True, False)] * (4 if grad else 2)):
        absent = [n for n, there in zip(("B", "Ht0", "dHAll", "dHFinal"), present, strict=False) if not there]
        label = f"linear_before_reset {lbr}" + (f" without {', '.join(absent)}" if absent else "")
        yield case(label, absent=absent, linear_before_reset=lbr)
    for lbr, size in itertools.product((0, 1), ((1, 1, 1, 1), (1, 3, 2, 5), (2, 1, 5, 3), (6, 3, 1, 2), (4, 7, 6, 8))):
        yield case(f"linear_before_reset {lbr}, S N I H {size}", size, linear_before_reset=lbr)
    for lbr in (0, 1):
        yield case(f"linear_before_reset {lbr}, saturated", (1, 3, 2, 4), scale=8, linear_before_reset=lbr)
    for name, change in GRU_CHANGES.items():
        yield case(name, **change)
    if not grad:
        yield case("HFinal not asked for", outputs=("HAll", "ZRH"))
        return
    yield case("dHAll of other rows", replace={"dHAll": floats("", 3, 1, 1, 4)}, invalid="dHAll does not fit X")
    for asked in itertools.chain.from_iterable(itertools.combinations(OUTPUTS["GRUGrad"], k) for k in range(1, 5)):
        yield case(f"only {', '.join(asked)}", outputs=asked)


def write(operator: str, cases: Iterator[Case]) -> tuple[int, dict[str, str], dict[str, str]]:
    """Runs and stores the cases; gives how many ran, what the peer could not do, and where it breaks the contract."""
    packed: dict[str, list[np.ndarray]] = {}
    index: list[dict[str, Any]] = []
    cannot: dict[str, str] = {}
    differs: dict[str, str] = {}

    def store(array: np.ndarray) -> list[Any]:
        parts = packed.setdefault(array.dtype.name, [])
        parts.append(array.ravel())
        return [array.dtype.name, list(array.shape), sum(part.size for part in parts[:-1])]

    for case in cases:
        result = attempt(operator, case)
        refused, died = isinstance(result, str), isinstance(result, str) and result.startswith("the process dies")
        entry: dict[str, Any] = {"name": case.name, "attributes": case.attributes}
        if case.invalid:
            entry["invalid"] = case.invalid
            if died or not refused:
                differs[case.name] = entry["peer_differs"] = f"{result if died else 'runs'}, although {case.invalid}"
        elif refused:
            cannot[case.name] = result
            continue
        entry["inputs"] = {n: store(a) for n, a in case.inputs.items() if a is not None}
        if not case.invalid:
            entry["outputs"] = {n: store(a) for n, a in zip(case.outputs or OUTPUTS[operator], result, strict=True)}
        index.append(entry)
    assert len({entry["name"] for entry in index}) == len(index), f"{operator}: two cases of one name"
    np.savez_compressed(GOLDEN / f"{operator}.npz", **{name: np.concatenate(parts) for name, parts in packed.items()})
    lines = ",\n".join(json.dumps(entry) for entry in index)
    peer = f"onnxruntime-training {onnxruntime.__version__}"
    (GOLDEN / f"{operator}.json").write_text(
        f'{{"peer": {json.dumps(peer)}, "cases": [\n{lines}\n], "peer_cannot": {json.dumps(cannot, indent=1)}}}\n'
    )
    return len(index), cannot, differs


def main() -> None:
    GOLDEN.mkdir(exist_ok=True)
    gru = gru_cases(grad=False), gru_cases(grad=True)
    makers = gather_cases(), gather_elements_cases(), broadcast_cases(), slice_cases(), *gru
    reports = {operator: write(operator, cases) for operator, cases in zip(OUTPUTS, makers, strict=True)}
    for operator, (count, _, _) in reports.items():
        size = sum(path.stat().st_size for path in GOLDEN.glob(f"{operator}.*"))
        print(f"{operator:22} {count:4} cases {size / 1024:6.1f} KiB")
    for title, which in (("Could not run", 1), ("Breaks the contract", 2)):
        print(f"\n{title}:")
        for operator, report in reports.items():
            for name, reason in report[which].items():
                print(f"{operator:22} {name:44} {reason}")


if __name__ == "__main__":
    main()
