"""shrink(): a failing graph made as small as it stays failing, by leaving out outputs and nodes."""

import re
import traceback
from collections.abc import Callable
from typing import Any

import onnx
from onnx import helper
from tests.random_graphs.growth import Case
from tests.random_graphs.oracle import as_torch, run_model

MOST_TRIES = 100


def shrink(case: Case, check: Callable[[Case], Any], failure: str) -> Case:
    """Fails in the same words, numbers and names aside."""
    kind, tries = _kind(failure), 0

    def fails(smaller: Case) -> bool:
        nonlocal tries
        tries += 1
        if tries > MOST_TRIES:
            return False
        try:
            onnx.checker.check_model(smaller.model)
            check(smaller)
        except Exception as error:  # whatever it is, it is compared
            return _kind(said(error)) == kind
        return False

    case = _fewer_outputs(case, fails)
    progress = True
    while progress:
        progress = False
        for name in reversed([n for node in case.model.graph.node for n in node.output]):
            smaller = _without(case, name)
            if smaller is not None and fails(smaller):
                case, progress = smaller, True
    return _tidied(case)


def said(error: Exception) -> str:
    """The error's type and text, and where it is from."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({place.filename.rsplit('/', 1)[-1]}:{place.lineno})"


def _kind(failure: str) -> str:
    """Its words, without numbers and names."""
    return re.sub(r"\W*\w*\d\w*|\(.*?\)", "", failure.splitlines()[0])[:120]


def _fewer_outputs(case: Case, fails: Callable[[Case], bool]) -> Case:
    for name in case.of:
        smaller = Case(_copy(case.model), case.feeds, [name])
        kept = [o for o in smaller.model.graph.output if o.name == name]
        del smaller.model.graph.output[:]
        smaller.model.graph.output.extend(kept)
        smaller = _tidied(smaller)
        if fails(smaller):
            return smaller
    return case


def _without(case: Case, name: str) -> Case | None:
    """The case with a value as an input, in place of the nodes that compute it."""
    model = _copy(case.model)
    graph = model.graph
    if name in {o.name for o in graph.output} or name in case.feeds:
        return None
    kind = next(iter(case.feeds.values())).dtype
    try:
        feeds = {n: as_torch(a) for n, a in case.feeds.items()}
        value = run_model(case.model, feeds)[name]
    except (RuntimeError, KeyError):
        return None
    if not hasattr(value, "is_floating_point"):
        return None
    array = value.numpy().astype(kind) if value.is_floating_point() else value.numpy()
    for node in graph.node:
        node.output[:] = [f"{n}_unused" if n == name else n for n in node.output]
    info = helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
    if value.is_floating_point():
        graph.input.append(info)
        feeds_now = {**case.feeds, name: array}
    else:
        graph.initializer.append(onnx.numpy_helper.from_array(array, name))
        feeds_now = dict(case.feeds)
    smaller = _tidied(Case(model, feeds_now, case.of))
    return smaller if len(smaller.model.graph.node) < len(case.model.graph.node) else None


def _copy(model: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return copy


def _tidied(case: Case) -> Case:
    """Without nodes, weights and inputs that the outputs do not need."""
    model = _copy(case.model)
    graph = model.graph
    needed = {o.name for o in graph.output}
    kept = []
    for node in reversed(graph.node):
        if needed & set(node.output):
            kept.append(node)
            needed |= _reads(node)
    kept = kept[::-1]
    del graph.node[:]
    graph.node.extend(kept)
    for field in (graph.initializer, graph.input):
        there = [item for item in field if item.name in needed]
        del field[:]
        field.extend(there)
    inputs = {i.name for i in graph.input}
    return Case(model, {n: a for n, a in case.feeds.items() if n in inputs}, case.of)


def _reads(node: Any) -> set[str]:
    found = set(node.input)
    for attribute in node.attribute:
        if attribute.HasField("g"):
            found |= {o.name for o in attribute.g.output}
            for inner in attribute.g.node:
                found |= _reads(inner)
    return found
