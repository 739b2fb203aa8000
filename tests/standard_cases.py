"""ONNX's own node tests, differentiated: each case's gradient beside central differences, and a table of all.

`python -m tests.standard_cases` runs all of them and writes docs/standard-cases.md; names or parts of names after it
run only those and say what came out.
"""

import functools
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import TensorProto

import onnxgrad
from onnxgrad.autodiff.check import evaluator
from onnxgrad.autodiff.float64 import in_float64
from onnxgrad.rules.engine import NoRuleError

TABLE = Path(__file__).parent.parent / "docs" / "standard-cases.md"
FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)
EXACT = 1e-5  # relative; some of ONNX's inputs are badly scaled
JITTERS = (1e-3, 1e-1)  # inputs of the cases are often whole numbers, where kinks, ties and the ends of domains are

RIGHT = "right"
NOTHING = "no gradient"  # integers, comparisons, steps, samples: by nature
NO_RULE = "no rule"
CANNOT_CHECK = "cannot check"  # runs in float64 neither in onnxruntime nor in onnx.reference
WRONG = "wrong"
OUTCOMES = (RIGHT, NOTHING, NO_RULE, CANNOT_CHECK, WRONG)

# Whole families that are no functions of tensors of numbers.
NATURE = {
    "integers, texts or images": lambda case: not case.smooth_inputs or not case.smooth_outputs,
    "sequences or optionals": lambda case: any(
        not v.type.HasField("tensor_type") for v in (*case.model.graph.input, *case.model.graph.output)
    ),
    "casts from integers or numbers of 8 bits": lambda case: (
        case.operator in ("Cast", "CastLike") and case.model.graph.input[0].name not in case.smooth_inputs
    ),
}


class Case(NamedTuple):
    """One test of ONNX: a model of a node, or of the nodes that a function operator stands for."""

    name: str
    operator: str
    expanded: bool
    model: onnx.ModelProto
    feeds: dict[str, Any]

    @property
    def smooth_inputs(self) -> list[str]:
        return [i.name for i in self.model.graph.input if i.type.tensor_type.elem_type in FLOATS]

    @property
    def smooth_outputs(self) -> list[str]:
        return [o.name for o in self.model.graph.output if o.type.tensor_type.elem_type in FLOATS]


class Outcome(NamedTuple):
    """What came of one case."""

    kind: str
    why: str = ""


@functools.cache
def all_cases() -> dict[str, Case]:
    """Every case of the installed onnx by its name, in the order of names."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnx.backend.test.case.node import collect_testcases

        collected = {case.name: case for case in collect_testcases(None)}
    found = {}
    for name, case in sorted(collected.items()):
        base = name.partition("_expanded")[0]
        expanded = base != name and base in collected
        nodes = (collected[base] if expanded else case).model.graph.node
        inputs, _ = case.data_sets[0]
        arrays = [onnx.numpy_helper.to_array(x) if isinstance(x, TensorProto) else x for x in inputs]
        feeds = dict(zip([i.name for i in case.model.graph.input], arrays, strict=True))
        found[name] = Case(name, nodes[0].op_type, expanded, case.model, feeds)
    return found


def outcome_of(case: Case) -> Outcome:
    """Differentiates with respect to every input of floating point that has a gradient, and checks it."""
    for why, holds in NATURE.items():
        if holds(case):
            return Outcome(NOTHING, why)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        if (trouble := _trouble_running(case)) is not None:
            return Outcome(CANNOT_CHECK, trouble)
        for feeds in _trials(case):
            outcome = _outcome_with(case, feeds)
            if outcome.kind != WRONG:
                break
        return outcome


def _outcome_with(case: Case, feeds: dict[str, Any]) -> Outcome:
    try:
        error = _error(case, feeds)
    except NoRuleError as missing:
        return Outcome(NO_RULE, str(missing))
    except Exception as broken:  # of any type: a table of all cases goes on
        if "depends on nothing that" in str(broken) or "have no gradient" in str(broken):
            return Outcome(NOTHING, "no input that matters is smooth")
        if "the number of dimensions of" in str(broken):  # it differs between the branches of an If
            return Outcome(NO_RULE, str(broken))
        return Outcome(WRONG, f"{type(broken).__name__}: {broken}")
    return Outcome(RIGHT) if error < EXACT else Outcome(WRONG, f"error {error:.1e}")


def _trouble_running(case: Case) -> str | None:
    """Why the case does not run in float64; what it draws at random, check_gradient draws once."""
    try:
        wide = in_float64(case.model)
        run = evaluator(wide)
        feeds = {n: a.astype(np.float64) if n in case.smooth_inputs else np.asarray(a) for n, a in case.feeds.items()}
        results = run(feeds)
    except Exception as error:  # of any type, from two runtimes
        return f"{type(error).__name__}: {error}"
    has_numbers = any(
        np.size(case.feeds[n]) for n in case.smooth_inputs
    )  # or the gradient has none: its shape is checked
    if has_numbers and any(a.size and not np.isfinite(a).any() for a in results):
        return "nothing in the result is finite"
    return None


def _error(case: Case, feeds: dict[str, Any]) -> float:
    outputs = case.smooth_outputs
    try:
        return onnxgrad.check_gradient(case.model, feeds, "*", outputs).worst
    except NoRuleError as missing:
        if len(outputs) == 1 or "for the gradient of its output" not in str(missing):
            raise
        # Statistics and other things that nobody differentiates.
        return onnxgrad.check_gradient(case.model, feeds, "*", outputs[0]).worst


def _trials(case: Case) -> Iterator[dict[str, Any]]:
    """The inputs of the case; moved away from zero, which keeps what is positive so; spread evenly, in their order."""
    rng = np.random.default_rng(0)
    smooth = {n: np.asarray(case.feeds[n]).astype(np.float64) for n in case.smooth_inputs}
    yield {**case.feeds, **{n: np.where(np.isnan(x), 1, x) for n, x in smooth.items()}}
    smooth = {n: np.where(np.isfinite(x), x, 1) for n, x in smooth.items()}
    for size in JITTERS:
        moved = {n: x + size * np.where(x < 0, -1, 1) * rng.uniform(0.5, 1.5, x.shape) for n, x in smooth.items()}
        yield {**case.feeds, **moved}
    yield {**case.feeds, **{n: x.ravel().argsort().argsort().reshape(x.shape) * 1e-2 for n, x in smooth.items()}}


def chosen_cases(most: int = 2) -> list[Case]:
    """Up to `most` cases of every operator, and as many of those that are written out as functions."""
    by_operator = defaultdict(list)
    for case in all_cases().values():
        by_operator[case.operator, case.expanded].append(case)
    chosen = []
    for cases in by_operator.values():
        step = max(1, (len(cases) - 1) // max(1, most - 1))
        chosen += cases[::step][:most]
    return chosen


def table(outcomes: dict[str, Outcome]) -> str:
    """A page of all outcomes, by operator."""
    cases = all_cases()
    lines = [
        "# ONNX's own tests, differentiated",
        "",
        f"Written by `python -m tests.standard_cases` with onnx {onnx.__version__}: every node test of the standard,",
        "its gradient with respect to all inputs beside central differences in float64. A case is *right* if the two",
        f"agree to {EXACT:g}, relative, in three random directions for each input; where the inputs sit on a kink or a",
        f"tie, after they were moved by {JITTERS[0]:g} or {JITTERS[1]:g}, or spread evenly. *No gradient*: integers,",
        "comparisons, steps, texts, sequences.",
        "*Cannot check*: runs in float64 neither in onnxruntime nor in onnx.reference, or is infinite.",
        "",
    ]
    for expanded, title in ((False, "Single nodes"), (True, "Function operators, written out as graphs")):
        some = [case for case in cases.values() if case.expanded == expanded and case.name in outcomes]
        total = Counter(outcomes[case.name].kind for case in some)
        lines += [f"## {title}", "", f"{len(some)} cases: {_summary(total)}.", ""]
        lines += [f"| operator | cases | {' | '.join(OUTCOMES)} |", f"|---|{'---:|' * (1 + len(OUTCOMES))}"]
        by_operator: dict[str, Counter[str]] = defaultdict(Counter)
        for case in some:
            by_operator[case.operator][outcomes[case.name].kind] += 1
        for operator, counts in sorted(by_operator.items()):
            numbers = " | ".join(str(counts[kind] or "") for kind in OUTCOMES)
            lines.append(f"| {operator} | {counts.total()} | {numbers} |")
        lines.append("")
    return "\n".join([*lines, *_reasons(outcomes)])


def _summary(counts: Counter[str]) -> str:
    return ", ".join(f"{counts[kind]} {kind}" for kind in OUTCOMES if counts[kind])


def _reasons(outcomes: dict[str, Outcome]) -> Iterator[str]:
    for kind, title in ((WRONG, "Wrong"), (NO_RULE, "Without a rule"), (CANNOT_CHECK, "Cannot be checked")):
        found = {name: outcome.why for name, outcome in outcomes.items() if outcome.kind == kind}
        if not found:
            continue
        yield from (f"## {title}", "")
        for name, why in found.items():
            yield f"- {name}: {' '.join(why.split())[:160]}"
        yield ""


def main(parts: list[str]) -> None:
    """Runs the cases whose names have one of these parts; without any all of them, into the table."""
    outcomes = {}
    for name, case in all_cases().items():
        if parts and not any(part in name for part in parts):
            continue
        outcomes[name] = outcome_of(case)
        if parts:
            print(f"{name}: {outcomes[name].kind} {outcomes[name].why}")
    print(_summary(Counter(outcome.kind for outcome in outcomes.values())))
    if not parts:
        TABLE.write_text(table(outcomes))


if __name__ == "__main__":
    main(sys.argv[1:])
