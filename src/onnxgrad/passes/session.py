"""session(): a session of stock onnxruntime for any model, with every operator of onnxgrad and onnxruntime-training."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import onnx

from onnxgrad.functions.add_functions import all_nodes
from onnxgrad.op import operator_of
from onnxgrad.runtime.session import open_session
from onnxgrad.schema import MICROSOFT, PREVIEW_TRAINING, STRAYS, is_standard

OF_PREVIEW = {"Adagrad", "Adam", "Gradient", "Momentum"}  # of ONNX's domain for training, which no runtime has


def session(model: Any, options: Any = None, providers: Sequence[Any] | None = None) -> Any:
    """Returns an onnxruntime.InferenceSession for a model, with every operator of onnxgrad; Ctrl-C interrupts its runs.

    - `model`: a path, an onnx.ModelProto or an onnx_ir.Model; it is not changed. External weights may be in any folder.
    - `options`: existing onnxruntime.SessionOptions, to which the operators are added.
    - `providers`: those of InferenceSession.

    Operators of onnxruntime-training without a kernel in onnxgrad are expanded into other operators. Where such an
    operator would write into an input of the model, the session has an output `<input>.updated` instead. Gradient and
    the other operators of ai.onnx.preview.training are expanded, too.
    """
    foreign = foreign_operators(model)
    return open_session(expanded(model, foreign) if foreign else model, options, providers)


def foreign_operators(model: Any) -> set[str]:
    """Operators that are neither ONNX's nor ours; which of them are old, imports could tell, which take their time."""
    if isinstance(model, (str, os.PathLike)):
        path = Path(model)
        if not path.is_file() or not _mentions_foreign(path.read_bytes()):
            return set()
        try:
            model = onnx.load(path, load_external_data=False)
        except Exception:  # of protobuf, or whatever reads the format: onnxruntime says what is wrong
            return set()
    return {node.op_type for node in nodes_of(model) if _is_foreign(node.domain, node.op_type)}


def nodes_of(model: Any) -> Iterable[Any]:
    """All nodes of a model, of its functions and subgraphs too; none of anything else."""
    if isinstance(model, onnx.ModelProto):
        return all_nodes(model)
    if hasattr(model, "functions"):
        return (node for graph in (model.graph, *model.functions.values()) for node in graph.all_nodes())
    return ()


def _mentions_foreign(content: bytes) -> bool:
    return any(word.encode() in content for word in (MICROSOFT, PREVIEW_TRAINING, *STRAYS))


def _is_foreign(domain: str, op_type: str) -> bool:
    if domain == MICROSOFT:  # BatchNormInternal is ours, but its statistics are to be shown (show_updates)
        return operator_of(domain, op_type) is None or op_type == "BatchNormInternal"
    return domain == PREVIEW_TRAINING or (is_standard(domain) and op_type in STRAYS)


def expanded(model: Any, foreign: set[str]) -> Any:
    """The model without old operators; itself, if it has none."""
    from onnxgrad.passes.expand_training import WRITERS, expand_training, show_updates
    from onnxgrad.passes.expand_training.registry import IN_PLACE, NOT_THERE

    for name in sorted(foreign & NOT_THERE.keys()):
        raise ValueError(
            f"session: the model has the operator {name}, which onnxgrad does not have: it {NOT_THERE[name]}"
        )
    if foreign.isdisjoint({*WRITERS, *IN_PLACE, *OF_PREVIEW}):
        return model
    from onnxgrad.graph.files import load
    from onnxgrad.passes.draft import Draft
    from onnxgrad.passes.finish import FOR_SESSIONS, drop_dead, import_domains
    from onnxgrad.passes.prepare import OLD_GRAPH, PREPARE

    draft = Draft(load(model, "session"), "session")
    if not foreign.isdisjoint(OF_PREVIEW):
        draft.run([*PREPARE, *FOR_SESSIONS])
    return draft.run([*OLD_GRAPH, show_updates, expand_training, drop_dead, import_domains]).model
