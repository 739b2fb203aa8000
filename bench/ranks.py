"""`python -m bench.ranks`: training by 1, 2 and 4 processes on this machine, into bench/ranks.csv and docs/scale.md.

One model, one global batch, the cores shared evenly. Each number of ranks runs with the optimizer's state in each of
them and shared among them; once more over TCP, where the system counts the bytes that are sent. What one process takes
for parts of the batch, and a bare all-reduce, feed the cost model (bench/scale.py), whose predictions stand beside.
"""

import argparse
import csv
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from bench.quiet import NOTICEABLE, Neighbours
from bench.scale import NETWORKS, Costs, stops_paying, strong_table, weak_table

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "bench" / "ranks.csv", ROOT / "docs" / "scale.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
WIDTHS = (512, 2048, 2048, 2048, 64)
BATCH, STEPS, WARM, PIECES = 256, 12, 3, 16
RANKS = (1, 2, 4)
OVER_TCP = {"MPIR_CVAR_NOLOCAL": "1", "UCX_TLS": "tcp,self"}  # MPICH without shared memory
FIELDS = ["ranks", "threads", "sharded", "step_ms", "communication_ms", "bytes_sent", "lower_bound", "peak_mb"]


def model() -> onnx.ModelProto:
    """Layers of WIDTHS, with Relu between."""
    rng, nodes, initializers, last = np.random.default_rng(0), [], [], "x"
    for k, (a, b) in enumerate(itertools.pairwise(WIDTHS)):
        initializers.append(numpy_helper.from_array((rng.standard_normal((b, a)) / a**0.5).astype(np.float32), f"w{k}"))
        nodes.append(helper.make_node("Gemm", [last, f"w{k}"], [f"h{k}"], transB=1))
        last = f"h{k}"
        if b != WIDTHS[-1]:
            nodes.append(helper.make_node("Relu", [last], [f"r{k}"]))
            last = f"r{k}"
    inputs = [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["N", WIDTHS[0]])]
    outputs = [helper.make_tensor_value_info(last, onnx.TensorProto.FLOAT, ["N", WIDTHS[-1]])]
    graph = helper.make_graph(nodes, "layers", inputs, outputs, initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def parameters() -> int:
    """How many numbers are trained."""
    return sum(a * b for a, b in itertools.pairwise(WIDTHS))


def rank_main(shard: bool, examples: int) -> None:
    """One process: its times of a step and of communication, and its memory, printed by rank 0."""
    from onnxgrad import get_num_threads
    from onnxgrad.train import losses, optim
    from onnxgrad.train.distributed.ranks import Ranks
    from onnxgrad.train.trainer import Trainer

    communicator = None
    if any(name in os.environ for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK")):
        from mpi4py import MPI

        communicator = MPI.COMM_WORLD
    spent = [0.0]
    for name in ("all_gather_numbers", "reduce_scatter", "all_gather_shards", "all_gather_rows"):
        setattr(Ranks, name, _timed(getattr(Ranks, name), spent))
    last = f"h{len(WIDTHS) - 2}"
    how = {"communicator": communicator, "shard_optimizer": shard}
    trainer = Trainer(model(), losses.MSE(last), optim.AdamW(), **how)
    rng = np.random.default_rng(1)
    x = rng.standard_normal((examples, WIDTHS[0])).astype(np.float32)
    batch = {"x": x, "target": x[:, : WIDTHS[-1]].copy()}
    steps, communication, bytes_before = [], [], 0
    for k in range(WARM + STEPS):
        if k == WARM:
            bytes_before = _bytes_over_loopback()
        before, start = spent[0], time.perf_counter()
        trainer.step(batch)
        steps.append(time.perf_counter() - start)
        communication.append(spent[0] - before)
    sent = (_bytes_over_loopback() - bytes_before) / STEPS
    update = time.perf_counter()
    trainer._state.step()
    update = time.perf_counter() - update
    mine = {
        "step": statistics.median(steps[WARM:]), "communication": statistics.median(communication[WARM:]),
        "sent": sent, "peak": _peak(), "threads": get_num_threads(), "update": update,
    }  # fmt: skip
    gathered = [mine] if communicator is None else communicator.allgather(mine)
    if communicator is None or communicator.rank == 0:
        print(json.dumps(gathered))


def _timed(method: Any, spent: list[float]) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            spent[0] += time.perf_counter() - start

    return run


def _bytes_over_loopback() -> int:
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[0])


def _peak() -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def bare_all_reduce() -> None:
    """Seconds of a reduce-scatter and an all-gather of the gradient, in one piece and in PIECES, printed by rank 0."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    found = []
    for pieces in (1, PIECES):
        length = parameters() // (pieces * world.size) * world.size
        arrays = [np.ones(length, np.float32) for _ in range(pieces)]
        mine = np.empty(length // world.size, np.float32)
        times = []
        for _ in range(WARM + STEPS):
            world.Barrier()
            start = time.perf_counter()
            for array in arrays:
                world.Reduce_scatter_block(array, mine)
                world.Allgather(mine, array)
            times.append(time.perf_counter() - start)
        found.append(statistics.median(times[WARM:]))
    if world.rank == 0:
        print(json.dumps(found))


def launch(ranks: int, *given: str, environment: dict[str, str] | None = None) -> Any:
    """Runs this module by so many processes and reads what it printed."""
    launcher = [str(Path(sys.executable).with_name("mpiexec")), "-n", str(ranks)] if ranks > 1 else []
    command = [*launcher, sys.executable, "-m", "bench.ranks", *given]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **(environment or {})}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def measured() -> tuple[list[dict[str, Any]], Costs, dict[int, float], dict[int, list[float]]]:
    """A row for each run, what one process takes, and seconds by number of ranks: predicted, and of bare sums."""
    rows = []
    size = 4 * parameters()
    for ranks in RANKS:
        for shard in (False, True) if ranks > 1 else (False,):
            given = ["--rank", *(["--shard"] if shard else [])]
            found = launch(ranks, *given)
            over_tcp = launch(ranks, *given, environment=OVER_TCP) if ranks > 1 else [{"sent": 0}]
            rows.append({
                "ranks": ranks, "threads": found[0]["threads"], "sharded": shard,
                "step_ms": 1e3 * statistics.median(f["step"] for f in found),
                "communication_ms": 1e3 * statistics.median(f["communication"] for f in found) if ranks > 1 else 0.0,
                "bytes_sent": over_tcp[0]["sent"] / ranks,  # the loopback counts those of all ranks
                "lower_bound": 2 * (ranks - 1) / ranks * size,
                "peak_mb": max(f["peak"] for f in found),
            })  # fmt: skip
            print({k: round(v, 1) if isinstance(v, float) else v for k, v in rows[-1].items()}, flush=True)
    cores = len(os.sched_getaffinity(0))
    alone = {n: launch(1, "--rank", "--examples", str(n), environment={"ONNXGRAD_BENCH_THREADS": "1"})[0]
             for n in (BATCH, BATCH // 4)}  # fmt: skip
    per_example = (alone[BATCH]["step"] - alone[BATCH // 4]["step"]) / (BATCH - BATCH // 4)
    update = alone[BATCH]["update"]
    fixed = max(0.0, alone[BATCH]["step"] - per_example * BATCH - update)
    costs = Costs(fixed, per_example, update, size)
    predicted, bare = {}, {}
    for ranks in RANKS[1:]:
        bare[ranks] = launch(ranks, "--bare")
        # Each rank computes on one core; where there are fewer cores than ranks they wait for each other.
        wait = max(1.0, ranks / cores)
        predicted[ranks] = costs.compute(BATCH / ranks) * wait + bare[ranks][0]
    return rows, costs, predicted, bare


def page(
    rows: list[dict[str, Any]], costs: Costs, predicted: dict[int, float], bare: dict[int, list[float]],
    neighbours: float,
) -> str:  # fmt: skip
    """The measured part of docs/scale.md."""
    cores = len(os.sched_getaffinity(0))
    lines = [
        f"{parameters() / 1e6:.1f} million parameters in float32 ({4 * parameters() / 1e6:.0f} MB), AdamW, batches of "
        f"{BATCH}, {cores} cores; medians of {STEPS} steps.", "",
        "| ranks | threads each | state | step ms | in communication | MB sent by each | lower bound MB | peak MB |",
        "|---:|---:|---|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    for row in rows:
        share = row["communication_ms"] / row["step_ms"]
        lines.append(
            f"| {row['ranks']} | {row['threads']} | {'shared' if row['sharded'] else 'whole'} | {row['step_ms']:.0f} | "
            f"{share:.0%} | {row['bytes_sent'] / 1e6:.0f} | {row['lower_bound'] / 1e6:.0f} | {row['peak_mb']:.0f} |"
        )
    if neighbours > NOTICEABLE:
        lines += ["", f"**Others used {neighbours:.0%} of the machine meanwhile, so these figures are rough.**"]
    lines += [
        "",
        "The model against these runs:",
        "",
        "| ranks | predicted ms | measured ms | off by |",
        "|---:|---:|---:|---:|",
    ]
    for ranks, seconds in predicted.items():
        found = next(r["step_ms"] for r in rows if r["ranks"] == ranks and not r["sharded"])
        lines.append(f"| {ranks} | {1e3 * seconds:.0f} | {found:.0f} | {1e3 * seconds / found - 1:+.0%} |")
    told = ", ".join(f"{1e3 * one:.0f} ms and {1e3 * many:.0f} ms by {n} ranks" for n, (one, many) in bare.items())
    lines += ["", f"An all-reduce of the gradient alone, in one call and in {PIECES}, takes {told}."]
    each = BATCH // 4
    lines += [
        "", f"One core takes {1e3 * costs.fixed:.0f} ms for a step, {1e3 * costs.per_example:.2f} ms more for each "
        f"example, and {1e3 * costs.update:.0f} ms for the update.", "",
        f"### {each} examples for each machine", "", "Share of the time that is not spent on communication:", "",
        weak_table(costs, each), "",
        "### One batch cut over more and more machines", "", f"{4 * BATCH} examples, times as fast as one machine:", "",
        strong_table(costs, 4 * BATCH), "",
        "Twice as many machines are less than 1.5 times as fast from here on: "
        + ", ".join(f"{stops_paying(costs, 4 * BATCH, n)} at {n.name}" for n in NETWORKS) + ".",
    ]  # fmt: skip
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", action="store_true")
    parser.add_argument("--shard", action="store_true")
    parser.add_argument("--bare", action="store_true")
    parser.add_argument("--examples", type=int, default=BATCH)
    given = parser.parse_args()
    if given.bare:
        bare_all_reduce()
    elif given.rank:
        if "ONNXGRAD_BENCH_THREADS" in os.environ:
            import onnxgrad

            onnxgrad.set_num_threads(int(os.environ["ONNXGRAD_BENCH_THREADS"]))
        rank_main(given.shard, given.examples)
    else:
        neighbours = Neighbours()
        rows, costs, predicted, bare = measured()
        with RESULTS.open("w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS)
            writer.writeheader()
            writer.writerows({k: f"{v:.5g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows)
        text = PAGE.read_text()
        head, rest = text.split(BEGIN)
        tail = rest.split(END)[1]
        PAGE.write_text(f"{head}{BEGIN}\n{page(rows, costs, predicted, bare, neighbours.share())}\n{END}{tail}")


if __name__ == "__main__":
    main()
