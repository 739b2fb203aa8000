"""`python -m bench.sessions`: what a session of stock onnxruntime adds to a direct call, inputs and outputs bound.

The same arrays on both sides, float32, sizes of the operators' benchmark. BroadcastGradientArgs, of a microsecond or
less, also in a chain of 50 nodes, which tells what one more node costs, and in one model for onnxruntime-training and
for the oldest and the newest stock onnxruntime; an Add beside it tells what a session costs before any node of ours.
"""

import csv
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import helper
from rich.console import Console
from rich.table import Table

import onnxgrad
from bench.cases import Case, all_cases, output_types
from bench.measure import FULL, time_sides
from bench.peers import CannotRunError, HereSide
from bench.peers.ort_training_peer import OrtTrainingPeer, StockPeer

RESULTS = Path(__file__).with_name("sessions.csv")
MOST_TIMES, MOST_ADDED_US = 1.15, 10.0  # in a session against directly; what a node may add
CHAIN = 50
ELEMENT_TYPES = {"float32": onnx.TensorProto.FLOAT, "int64": onnx.TensorProto.INT64, "int32": onnx.TensorProto.INT32}


def _session(model: onnx.ModelProto) -> Any:
    options = onnxgrad.register()
    options.intra_op_num_threads = onnxgrad.get_num_threads()
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _model(nodes: list[Any], inputs: dict[str, Any], outputs: dict[str, str]) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "bench",
        [helper.make_tensor_value_info(n, ELEMENT_TYPES[str(a.dtype)], None) for n, a in inputs.items()],
        [helper.make_tensor_value_info(n, ELEMENT_TYPES[dtype], None) for n, dtype in outputs.items()],
    )
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def _bound(session: Any, inputs: dict[str, Any], outputs: dict[str, Any]) -> Any:
    """A call that runs the session on these very arrays."""
    binding = session.io_binding()
    for name, array in inputs.items():
        binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(array))
    for name, array in outputs.items():
        binding.bind_ortvalue_output(name, onnxruntime.OrtValue.ortvalue_from_numpy(array))
    return lambda: session.run_with_iobinding(binding)


def _one_node(case: Case) -> dict[str, Any]:
    """The two sides of a case."""
    given = case.inputs()
    inputs = {name: array for name, array in given.items() if array is not None}
    if case.operator == "broadcast_gradient_args":
        results: Any = case.op(*given.values())
        outputs = {o.name: np.empty_like(r) for o, r in zip(case.op.outputs, results, strict=True)}

        def direct() -> Any:
            return case.op(*given.values())
    else:
        outputs = {t.name: np.empty(t.shape, case.numpy_dtype) for t in output_types(case, given)}

        def direct() -> Any:
            return case.op.into(list(outputs.values()), *given.values(), **case.attributes)

    names = [name if array is not None else "" for name, array in given.items()]
    node = helper.make_node(case.op.name, names, list(outputs), domain=case.op.domain, **case.attributes)
    kinds = {name: str(array.dtype) for name, array in outputs.items()}
    bound = {name: np.full_like(array, 1) for name, array in outputs.items()}
    run = _bound(_session(_model([node], inputs, kinds)), inputs, bound)
    run()
    direct()
    for name, array in outputs.items():
        expected = results[list(outputs).index(name)] if case.operator == "broadcast_gradient_args" else array
        if bound[name].tobytes() != expected.tobytes():
            raise SystemExit(f"{case.work}: {name} differs in the session, nothing to time")
    return {"directly": HereSide(direct), "in a session": HereSide(run)}


def _chain(nodes: int) -> HereSide:
    """So many nodes of BroadcastGradientArgs, each with an output of its own."""
    inputs = {"a": np.array([8, 1, 6]), "b": np.array([8, 7, 1])}
    names = {f"x{k}": "int64" for k in range(nodes)}
    made = [
        helper.make_node("BroadcastGradientArgs", ["a", "b"], [f"x{k}", f"y{k}"], domain="com.microsoft")
        for k in range(nodes)
    ]
    outputs = {name: np.empty(1, np.int64) for name in names}
    return HereSide(_bound(_session(_model(made, inputs, names)), inputs, outputs))


def _smallest_sessions(case: Case) -> list[list[Any]]:
    """A row for each onnxruntime: its Add, the node of the case, whether the latter meets the bar; microseconds."""
    threads = onnxgrad.get_num_threads()
    given = case.inputs()
    expected: Any = case.op(*given.values())
    outputs = [t._replace(shape=e.shape) for t, e in zip(output_types(case, given), expected, strict=True)]
    shape = next(array.shape for array in given.values() if array is not None)
    total = outputs[0]._replace(name="total", shape=shape)
    peers: dict[str, OrtTrainingPeer] = {}
    sides: dict[str, Any] = {}
    for make in (
        lambda: OrtTrainingPeer(threads),
        lambda: StockPeer(threads, oldest=True),
        lambda: StockPeer(threads, oldest=False),
    ):
        try:
            asked = make()
            name = f"{asked.name} {asked.version()}"
            asked.close()
            for operator, results in (("add", [total]), (case.operator, outputs)):
                peer = peers[f"{name} {operator}"] = make()
                sides[f"{name} {operator}"], got = peer.prepare(operator, given, {}, results)
                if operator != "add" and any(g.tobytes() != e.tobytes() for g, e in zip(got, expected, strict=True)):
                    raise SystemExit(f"{case.work} differs in {name}, nothing to time")
        except CannotRunError as reason:
            print(reason)
    times = {name: timing.best_ms * 1e3 for name, timing in time_sides(sides, FULL).items()}
    for peer in peers.values():
        peer.close()
    names = dict.fromkeys(name.rpartition(" ")[0] for name in times)
    limit = next((t for name, t in times.items() if name.endswith(case.operator)), np.inf)
    return [
        [name, times[f"{name} add"], times[f"{name} {case.operator}"], times[f"{name} {case.operator}"] <= limit]
        for name in names
    ]


def main() -> int:
    rows = []
    cases = [c for c in all_cases() if c.dtype in ("float32", "int64")]
    for case in cases:
        times = {name: timing.best_ms for name, timing in time_sides(_one_node(case), FULL).items()}
        direct, inside = times["directly"], times["in a session"]
        rows.append([case.work, direct, inside, inside / direct, inside <= MOST_TIMES * direct])
    chains = time_sides({"short": _chain(1), "long": _chain(CHAIN + 1)}, FULL)
    added = (chains["long"].best_ms - chains["short"].best_ms) / CHAIN * 1e3
    rows.append([f"one more node of {CHAIN}", None, added / 1e3, None, added <= MOST_ADDED_US])
    smallest = _smallest_sessions(next(c for c in cases if c.operator == "broadcast_gradient_args"))

    headers = ("work, float32", "directly ms", "in a session ms", "times", "bar met")
    _show(headers, rows)
    small_headers = ("a session with one node", "Add µs", "BroadcastGradientArgs µs", "not slower than the first")
    _show(small_headers, smallest)
    with RESULTS.open("w", newline="") as file:
        writer = csv.writer(file)
        for header, part in ((headers, rows), (small_headers, smallest)):
            writer.writerow(header)
            writer.writerows(
                [["" if c is None else f"{c:.5g}" if isinstance(c, float) else c for c in row] for row in part]
            )
    return 0


def _show(headers: tuple[str, ...], rows: list[list[Any]]) -> None:
    table = Table(*headers)
    for what, *times, met in rows:
        table.add_row(what, *("–" if c is None else f"{c:.4g}" for c in times), "yes" if met else "[red]no")
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
