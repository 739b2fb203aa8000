"""trainable_parameters(): which parameters of a model patterns stand for."""

import fnmatch
from collections.abc import Sequence
from typing import Any

from onnxgrad.autodiff.differentiate import STATISTICS
from onnxgrad.autodiff.engine import influences
from onnxgrad.cli.suggest import suggestion
from onnxgrad.graph.files import load
from onnxgrad.passes.prepare import prepare
from onnxgrad.train.losses import Total


def trainable_parameters(
    model: Any, loss: Total | str, trainable: Sequence[str], freeze: Sequence[str]
) -> list[str] | None:
    """The names that `trainable` (all, if empty) has and `freeze` has not; None stands for all."""
    if not trainable and not freeze:
        return None
    graph = prepare(load(model, "train"), "train").graph
    names = {loss} if isinstance(loss, str) else {part.prediction for part in loss.parts}
    nodes = list(graph)
    reached = influences(nodes, {v for node in nodes for v in node.outputs if v.name in names})
    measured = {n.inputs[k] for n in nodes for k in STATISTICS.get(n.op_type, ()) if k < len(n.inputs)}
    known = [
        name for name, v in graph.initializers.items()
        if v in reached and v not in measured and v.dtype is not None and v.dtype.is_floating_point()
    ]  # fmt: skip
    chosen = _matching("--trainable", trainable, known) if trainable else set(known)
    chosen -= _matching("--freeze", freeze, known)
    if not chosen:
        raise ValueError("--freeze leaves nothing to train")
    return [name for name in known if name in chosen]


def _matching(option: str, patterns: Sequence[str], known: Sequence[str]) -> set[str]:
    found = set()
    for pattern in patterns:
        names = {pattern} & set(known) or {n for n in known if fnmatch.fnmatchcase(n, pattern)}
        if not names:
            raise ValueError(
                f"{option} {pattern!r} matches no parameter that the loss depends on{suggestion(pattern, known)}"
            )
        found |= names
    return found
