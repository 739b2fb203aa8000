"""One case from start to end: our result checked, every side timed, memory measured."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

import onnxgrad
from bench.cases import FLOOR, INTO, MEMORY, Case, output_types
from bench.floor import zeroing_and_reading
from bench.measure import Effort, time_sides
from bench.memory import peak_extra_bytes
from bench.peers import OURS, CannotRunError, HereSide, Peer, Side
from bench.quiet import Neighbours
from bench.results import Row, new_row
from bench.verify import first_difference, right_results

OnProgress = Callable[[float], None]  # told the share of a case done since the last time


class WrongResultError(Exception):
    """Our result is wrong, or there is none: nothing to time."""


class KernelMissingError(Exception):
    """The operator has no CPU kernel yet."""


@dataclass
class Outcome:
    """What a case gave: rows for the results, and what a reader should know besides."""

    rows: list[Row] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def run(
    case: Case,
    peers: Sequence[Peer],
    effort: Effort,
    with_memory: bool,
    on_progress: OnProgress = lambda share: None,
) -> Outcome:
    """Measures one case, unless there is no kernel for it or its result is wrong."""
    try:
        case.op.kernel("cpu")
    except (ImportError, AttributeError) as error:
        raise KernelMissingError(f"{case.op.name} has no CPU kernel yet ({error})") from None
    inputs = case.inputs()
    arguments = tuple(inputs.values())
    types = output_types(case, inputs)
    names = [t.name for t in types]
    right = right_results(case, inputs)
    outputs = [np.full(t.shape, 1, case.numpy_dtype) for t in types]  # not 0: a kernel must write its zeros too

    def call() -> object:
        return case.op(*arguments, **case.attributes)

    def call_into() -> object:
        return case.op.into(outputs, *arguments, **case.attributes)

    for form, one_call in (("the call", call), (".into", call_into)):
        try:
            results = one_call()
        except Exception as error:  # whatever it is, the other cases can still be timed
            raise WrongResultError(
                f"{case.work}, {case.dtype}, {form} raised {type(error).__name__}: {error}"
            ) from error
        arrays = list(results) if isinstance(results, tuple) else [results]
        if difference := first_difference(names, arrays, right, case.reduction_length):
            raise WrongResultError(f"{case.work}, {case.dtype}, {form} is wrong: {difference}")
        del results, arrays

    outcome = Outcome()
    sides: dict[str, Side] = {OURS: HereSide(call), INTO: HereSide(call_into)}
    notes: dict[str, str] = {}
    for peer in peers:
        try:
            sides[peer.name], computed = peer.prepare(case.operator, inputs, case.attributes, types)
        except CannotRunError as reason:
            notes[peer.name] = str(reason)
            continue
        if difference := first_difference(names, computed, right, case.reduction_length):
            notes[peer.name] = f"differs from the definition: {difference}"
            outcome.remarks.append(
                f"{peer.name} differs from the definition (†) in {case.work}, {case.dtype}: {difference}"
            )
        elif all(a is None for a in computed):
            notes[peer.name] = "computes linear_before_reset 1, having no other form"
        del computed
    if case.has_floor:
        sides[FLOOR] = HereSide(zeroing_and_reading(types[0].shape, inputs["dY"], onnxgrad.get_num_threads()))
    del right

    neighbours = Neighbours()
    timings = time_sides(sides, effort, on_progress)
    if note := neighbours.note():
        notes[OURS] = note
        outcome.remarks.append(f"{case.work}, {case.dtype}: {notes[OURS]}, so take the figures for a guess")
    for side in dict.fromkeys((*timings, *notes)):
        row = new_row(case.name, case.work, case.dtype, side)
        row.note = notes.get(side, "")
        if side in timings:
            row.set_timing(timings[side])
        outcome.rows.append(row)
    if with_memory and case.memory_of is not None:
        try:
            extra = peak_extra_bytes(case)
        except CannotRunError as reason:
            outcome.remarks.append(f"no figure for the memory of {case.work}, {case.dtype}: {reason}")
        else:
            row = new_row(case.name, case.work, case.dtype, MEMORY)
            given = inputs[case.memory_of]
            assert given is not None
            row.memory_mb, row.note = extra / 2**20, f"{extra / given.nbytes:.2f}× {case.memory_of}"
            outcome.rows.append(row)
    return outcome
