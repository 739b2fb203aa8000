"""The head of a model: replace_head() notes its parameters in the metadata, and `head` stands for them."""

import json
from collections.abc import Collection, Sequence

import onnx_ir as ir

HEAD = "head"  # what stands for them among names and patterns
_KEY = "onnxgrad.head"


def note_head(model: ir.Model, names: Sequence[str]) -> None:
    """Writes into the metadata which initializers are the head's."""
    model.metadata_props[_KEY] = json.dumps(list(names))


def head_of(model: ir.Model) -> list[str]:
    """The head's initializers that are still there; none in a model that has no new head."""
    noted = json.loads(model.metadata_props.get(_KEY, "[]"))
    return [name for name in noted if name in model.graph.initializers]


def without_word(model: ir.Model, names: str | Sequence[str], known: Collection[str]) -> list[str]:
    """Names and patterns, with the head's parameters for the word `head`, unless that is the name of something."""
    given = [names] if isinstance(names, str) else names
    head = head_of(model) if HEAD in given and HEAD not in known else []
    return [n for name in given for n in (head if head and name == HEAD else [name])]
