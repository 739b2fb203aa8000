"""The names of classes and tokens, from what lies in a model's file or beside it."""

import ast
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

# Where exporters put the classes: Ultralytics, Hugging Face, others.
KEYS = ("names", "id2label", "classes", "class_names", "labels")
TOKENIZER = "tokenizer.json"  # as exporters of language models write it beside the model


def class_names(model: Path) -> list[str]:
    """The classes in their order, by the model's metadata; none if it does not say."""
    from onnxgrad.graph.files import load

    metadata = load(model, "report").metadata_props
    return next((found for key in KEYS if (found := _listed(metadata.get(key, "")))), [])


def _listed(text: str) -> list[str]:
    """The names in a list, or a dict by class number, written as JSON or as Python does; or with commas between."""
    for read in (json.loads, ast.literal_eval):
        try:
            found: Any = read(text)
        except (ValueError, SyntaxError):
            continue
        if isinstance(found, dict):
            numbers = {str(key): str(name) for key, name in found.items()}
            found = [numbers.get(str(k)) for k in range(len(numbers))]
        if isinstance(found, list) and found and None not in found:
            return [str(name) for name in found]
    return [name.strip() for name in text.split(",")] if "," in text else []


class Tokens:
    """The text of tokens, by the tokenizer that lies beside a model, if there is one."""

    def __init__(self, model: Path) -> None:
        self._tokenizer: Any = None
        path = model.parent / TOKENIZER
        if path.is_file():
            try:
                from tokenizers import Tokenizer
            except ImportError:  # numbers are shown in place of text
                return
            self._tokenizer = Tokenizer.from_file(str(path))

    def text(self, numbers: Sequence[int]) -> str | None:
        """The text of tokens, without special ones; None if the tokenizer is not known."""
        return None if self._tokenizer is None else str(self._tokenizer.decode(list(numbers)))

    def token(self, number: int) -> str | None:
        """One token: as text, if it has any, or else as the tokenizer calls it."""
        if self._tokenizer is None:
            return None
        text = str(self._tokenizer.decode([number]))
        return text if text.strip() else self._tokenizer.id_to_token(number)


class Names(NamedTuple):
    """What the numbers of classes stand for."""

    classes: Sequence[str]
    tokens: Tokens

    def of(self, number: int, in_sequence: bool = False) -> str:
        """A class by its name; without names a token, where there is a sequence of them, or the number."""
        if 0 <= number < len(self.classes):
            return self.classes[number]
        token = self.tokens.token(number) if in_sequence and not self.classes else None
        return str(number) if token is None else token
