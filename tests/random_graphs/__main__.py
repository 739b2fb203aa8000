"""python -m tests.random_graphs --count 1000 --seed 0: random graphs, differentiated and checked, and a table of it."""

import time
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import click
import onnx
import torch
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument
from tests.random_graphs.checks import CHECKS
from tests.random_graphs.growth import REFUSED, nodes_of, open_plain
from tests.random_graphs.shrink import said, shrink
from tests.random_graphs.ways import random_case


class Outcome(NamedTuple):
    """What became of one graph."""

    seed: int
    nodes: int
    operators: Counter[str]
    opset: int
    dtype: str
    checked: list[str]
    failure: str
    shrunk: str
    refused: Counter[str]
    seconds: dict[str, float]


def run_one(seed: int, nodes: int, thorough: bool, shrinks: bool) -> Outcome:
    """Makes a graph and checks it; what fails is shrunk."""
    warnings.simplefilter("error")
    REFUSED.clear()
    torch.set_num_threads(1)
    at, times = time.perf_counter(), {}
    case = random_case(seed, nodes)
    times["generate"] = time.perf_counter() - at
    every = nodes_of(case.model.graph)
    checked, failure, shrunk = [], "", ""
    for name, check in CHECKS.items() if is_opened(case.model) else ():
        if not thorough and name not in ("results", "gradient", "differences"):
            continue
        at = time.perf_counter()
        try:
            checked += [name] if check(case) else []
        except Exception as error:  # whatever went wrong is what is looked for
            failure = f"{name}: {said(error)}"
            if shrinks:
                shrunk = onnx.printer.to_text(shrink(case, check, said(error)).model)
            break
        finally:
            times[name] = time.perf_counter() - at
    opset = next(o.version for o in case.model.opset_import if not o.domain)
    kind = next(iter(case.feeds.values())).dtype.name
    counted = Counter(node.op_type for node in every)
    return Outcome(seed, len(every), counted, opset, kind, checked, failure, shrunk, Counter(REFUSED), times)


def is_opened(model: onnx.ModelProto) -> bool:
    """Not if onnxruntime 1.31 loses what an If reads whose condition it folds; it runs such a model without that."""
    try:
        open_plain(model)
    except InvalidArgument as error:
        if "is not a graph input, initializer, or output of a previous node" not in str(error):
            raise
        open_plain(model, is_optimized=False)
        REFUSED["models of which onnxruntime folds an If wrongly"] += 1
        return False
    return True


def table(found: list[Outcome], seconds: float) -> str:
    """The figures of a run."""
    operators: Counter[str] = Counter()
    checks: Counter[str] = Counter()
    times: Counter[str] = Counter()
    for outcome in found:
        operators += outcome.operators
        checks.update(outcome.checked)
        times.update(outcome.seconds)
    sizes = sorted(o.nodes for o in found)
    failed = [o for o in found if o.failure]
    rows = [
        ("graphs", len(found)), ("wrong", len(failed)),
        ("nodes", f"{sum(sizes)}, {sizes[len(sizes) // 2]} in the middle graph, {sizes[-1]} at most"),
        ("operators", len(operators)), ("opsets", f"{min(o.opset for o in found)} to {max(o.opset for o in found)}"),
        ("float64", sum(o.dtype == "float64" for o in found)),
        *[(f"checked: {name}", f"{checks[name]} in {times[name]:.0f} s") for name in CHECKS],
        ("seconds", f"{seconds:.0f}, {times['generate']:.0f} of all processes to make graphs"),
    ]  # fmt: skip
    lines = [f"{name:24} {value}" for name, value in rows]
    lines += ["", "operators:", "  " + " ".join(f"{name}:{count}" for name, count in sorted(operators.items()))]
    refused: Counter[str] = Counter()
    for outcome in found:
        refused += outcome.refused
    if refused:
        lines += ["", "left out, as onnxruntime does not run it:"]
        lines += [f"  {count:5} × {text}" for text, count in refused.most_common()]
    return "\n".join(lines)


@click.command()
@click.option("--count", default=100, help="How many graphs.")
@click.option("--seed", default=0, help="Of the first; others have the seeds after it.")
@click.option("--nodes", default=50, help="How many nodes the main graph has, at least.")
@click.option("--every", default=1, help="One in so many graphs is trained, saved and differentiated twice, too.")
@click.option("--processes", default=1)
@click.option("--shrink/--no-shrink", "shrinks", default=True, help="Whether what fails is made as small as can be.")
def main(count: int, seed: int, nodes: int, every: int, processes: int, shrinks: bool) -> None:
    """Checks random graphs; ends with 1 if one was wrong."""
    start = time.perf_counter()
    found: list[Outcome] = []
    jobs: list[Any] = [(s, nodes, (s - seed) % every == 0, shrinks) for s in range(seed, seed + count)]
    if processes == 1:
        for job in jobs:
            report(found, run_one(*job))
    else:
        with ProcessPoolExecutor(processes) as pool:
            for outcome in pool.map(run_one, *zip(*jobs, strict=True)):
                report(found, outcome)
    print(table(found, time.perf_counter() - start))
    raise SystemExit(any(o.failure for o in found))


def report(found: list[Outcome], outcome: Outcome) -> None:
    found.append(outcome)
    if outcome.failure:
        print(
            f"seed {outcome.seed}: opset {outcome.opset}, {outcome.dtype}\n{outcome.failure}\n{outcome.shrunk}",
            flush=True,
        )
    if len(found) % 50 == 0:
        print(f"{len(found)} graphs, {sum(bool(o.failure) for o in found)} wrong", flush=True)


if __name__ == "__main__":
    main()
