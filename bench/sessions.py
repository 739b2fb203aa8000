"""`python -m bench.sessions`: what a session of stock onnxruntime adds to a direct call, inputs and outputs bound.

The same arrays on both sides, float32, sizes of the operators' benchmark. BroadcastGradientArgs, of a microsecond or
less, also in a chain of 50 nodes, which tells what one more node costs, and in one model for onnxruntime-training and
for the oldest and the newest stock onnxruntime; an Add beside it tells what a session costs before any node of ours.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import helper

import onnxgrad
from bench import machine, report, results
from bench.cases import Case, all_cases, output_types
from bench.measure import FULL, QUICK, Effort, Timing, time_sides
from bench.peers import CannotRunError, HereSide
from bench.peers.ort_training_peer import OrtTrainingPeer, StockPeer
from bench.quiet import Neighbours
from bench.results import Row, new_row

DIRECTLY, INSIDE = "directly", "in a session"
CHAIN = 50
ADD, NODE = "Add in a session of one node", "BroadcastGradientArgs in a session of one node"
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
    return {DIRECTLY: HereSide(direct), INSIDE: HereSide(run)}


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


def _smallest_sessions(case: Case, effort: Effort) -> list[Row]:
    """For each onnxruntime: a session with an Add, and one with the node of the case."""
    threads = onnxgrad.get_num_threads()
    given = case.inputs()
    expected: Any = case.op(*given.values())
    outputs = [t._replace(shape=e.shape) for t, e in zip(output_types(case, given), expected, strict=True)]
    shape = next(array.shape for array in given.values() if array is not None)
    total = outputs[0]._replace(name="total", shape=shape)
    peers: list[OrtTrainingPeer] = []
    rows: dict[str, Row] = {}
    sides: dict[str, Any] = {}
    for make in (
        lambda: OrtTrainingPeer(threads),
        lambda: StockPeer(threads, oldest=True),
        lambda: StockPeer(threads, oldest=False),
    ):
        try:
            for work, operator, wanted in ((ADD, "add", [total]), (NODE, case.operator, outputs)):
                peers.append(peer := make())
                name = f"{peer.name} {peer.version()}"
                sides[work + name], got = peer.prepare(operator, given, {}, wanted)
                if operator != "add" and any(g.tobytes() != e.tobytes() for g, e in zip(got, expected, strict=True)):
                    raise SystemExit(f"{case.work} differs in {name}, nothing to time")
                rows[work + name] = new_row(work, work, "int64", name, machine.versions("onnxruntime"))
        except CannotRunError as reason:
            print(reason)
    for key, timing in time_sides(sides, effort).items():
        rows[key].set_timing(timing)
    for peer in peers:
        peer.close()
    return list(rows.values())


def measured(effort: Effort) -> list[Row]:
    rows = []
    versions, neighbours = machine.versions("onnxruntime"), Neighbours()
    cases = [c for c in all_cases() if c.dtype in ("float32", "int64")]
    for case in cases:
        for side, timing in time_sides(_one_node(case), effort).items():
            rows.append(new_row(case.name, case.work, case.dtype, side, versions))
            rows[-1].set_timing(timing)
    chains = time_sides({"short": _chain(1), "long": _chain(CHAIN + 1)}, effort)
    rows.append(new_row("chain", f"one more node of {CHAIN}", "int64", INSIDE, versions))
    rows[-1].median_ms, rows[-1].best_ms = (_added(chains, name) for name in ("median_ms", "best_ms"))
    rows += _smallest_sessions(next(c for c in cases if c.operator == "broadcast_gradient_args"), effort)
    if note := neighbours.note():
        for row in rows:
            row.note = note
    return rows


def _added(chains: dict[str, Timing], name: str) -> float:
    """Milliseconds that one more node adds."""
    return float(getattr(chains["long"], name) - getattr(chains["short"], name)) / CHAIN


def tables(rows: Sequence[Row]) -> str:
    """A section for each kind of processor."""
    told = "The median, and the 10th to 90th percentile; where marked, the best of 21 runs."
    return report.sections(rows, "Sessions on", "sessions", _tables, lambda found: told)


def _tables(rows: Sequence[Row]) -> str:
    beside = [r for r in rows if r.side in (DIRECTLY, INSIDE)]
    versions = list(dict.fromkeys(r.side for r in rows if r.side not in (DIRECTLY, INSIDE)))
    lines = []
    for sides in report.by_case(r for r in rows if r.side in versions):
        work = next(iter(sides.values())).work
        lines.append([work, *(_figure(sides.get(version), 1e3) for version in versions)])
    first = report.markdown_table(["work, float32, ms", DIRECTLY, INSIDE, "times"], _lines(beside))
    return f"{first}\n\n{report.markdown_table(['µs', *versions], lines)}"


def _lines(rows: Sequence[Row]) -> report.Lines:
    lines = []
    for sides in report.by_case(rows):
        direct, inside = sides.get(DIRECTLY), sides[INSIDE]
        many = report.ratio(inside, direct)
        if many is None and direct is not None and inside.best_ms is not None and direct.best_ms is not None:
            many = inside.best_ms / direct.best_ms
        told = report.NOTHING if many is None else report.times(many)
        lines.append([inside.work, _figure(direct), _figure(inside), told])
    return lines


def _figure(row: Row | None, unit: float = 1.0) -> str:
    """The median with its range; the best where there is no median."""
    if row is None or row.best_ms is None:
        return report.NOTHING
    if row.median_ms is None:
        return f"best {report.milliseconds(row.best_ms * unit)}"
    return report.median(row, unit)


def main() -> int:
    from bench import pages  # which imports this module for its tables

    parser = argparse.ArgumentParser(prog="python -m bench.sessions", description="What a session adds.")
    parser.add_argument("--quick", action="store_true", help="a short look: nothing is written")
    options = parser.parse_args()
    rows = measured(QUICK if options.quick else FULL)
    beside = [r for r in rows if r.side in (DIRECTLY, INSIDE)]
    report.terminal().print(report.terminal_table("", ["work, float32, ms", DIRECTLY, INSIDE, "times"], _lines(beside)))
    if not options.quick:
        results.update(results.SESSIONS, rows, lambda row: True, lambda row: 0)
        pages.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
