"""`python -m bench.sessions`: what a session of stock onnxruntime adds to a direct call, inputs and outputs bound.

The same arrays on both sides, float32, sizes of the operators' benchmark. BroadcastGradientArgs also beside the same
session in onnxruntime-training, and in a chain of 50 nodes, which tells what one more node costs.
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
from bench.peers.ort_training_peer import OrtTrainingPeer

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


def main() -> int:
    rows = []
    for case in [c for c in all_cases() if c.dtype in ("float32", "int64")]:
        sides = _one_node(case)
        peer = OrtTrainingPeer(onnxgrad.get_num_threads())
        is_tiny = case.operator == "broadcast_gradient_args"
        if is_tiny:
            try:
                given = case.inputs()
                expected: Any = case.op(*given.values())
                types = [t._replace(shape=e.shape) for t, e in zip(output_types(case, given), expected, strict=True)]
                sides["onnxruntime-training"], _ = peer.prepare(case.operator, given, case.attributes, types)
            except CannotRunError as reason:
                print(reason)
        times = {name: timing.best_ms for name, timing in time_sides(sides, FULL).items()}
        peer.close()
        direct, inside = times["directly"], times["in a session"]
        limit = times.get("onnxruntime-training", MOST_TIMES * direct)
        rows.append([case.work, direct, inside, inside / direct, times.get("onnxruntime-training"), inside <= limit])
    chains = time_sides({"short": _chain(1), "long": _chain(CHAIN + 1)}, FULL)
    added = (chains["long"].best_ms - chains["short"].best_ms) / CHAIN * 1e3
    rows.append([f"one more node of {CHAIN}", None, added / 1e3, None, None, added <= MOST_ADDED_US])

    table = Table("work, float32", "directly ms", "in a session ms", "times", "onnxruntime-training ms", "bar met")
    for work, direct, inside, times_direct, peer_ms, met in rows:
        cells = (direct, inside, times_direct, peer_ms)
        table.add_row(work, *("–" if c is None else f"{c:.4g}" for c in cells), "yes" if met else "[red]no")
    Console().print(table)
    with RESULTS.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["work", "directly_ms", "in_session_ms", "times", "onnxruntime_training_ms", "bar_met"])
        writer.writerows(
            [["" if c is None else f"{c:.5g}" if isinstance(c, float) else c for c in row] for row in rows]
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
