"""Text as tokens, the input of language models: by a tokenizer.json, for each batch or for a whole text."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrad.graph.suggest import listed
from onnxgrad.sources.request import Field, Request
from onnxgrad.sources.source import Arrays, Source
from onnxgrad.sources.table import Assembly, Table
from onnxgrad.tensor_types import Array

PADDING = ("[PAD]", "<pad>", "<|pad|>", "<|endoftext|>", "</s>")  # tokens to pad with, if the tokenizer does not say
IGNORED = -100  # the target of a place that does not count, as PyTorch has it


class Tokens:
    """A tokenizer, which a worker process reads itself."""

    def __init__(self, file: Path, subject: str, most: int | None, is_fixed: bool) -> None:
        self._how = file.absolute(), subject, most, is_fixed
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise ImportError(f"{subject}: reading text needs tokenizers: pip install 'onnxgrad[text]'") from None
        if not file.is_file():
            raise FileNotFoundError(f"{subject}: the tokenizer {str(file)!r} does not exist, expected a tokenizer.json")
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # which has no other type
            raise ValueError(f"{subject}: {str(file)!r} is not a tokenizer ({error})") from None
        given = self._tokenizer.padding or {}
        names = [token for token in PADDING if self._tokenizer.token_to_id(token) is not None]
        token = given.get("pad_token") or (names[0] if names else "[PAD]")
        number = given.get("pad_id", self._tokenizer.token_to_id(token) or 0)
        direction = given.get("direction", "right")
        self._tokenizer.enable_padding(
            pad_id=number, pad_token=token, direction=direction, length=most if is_fixed else None,
            pad_type_id=given.get("pad_type_id", 0),
        )  # fmt: skip
        if most is not None:
            self._tokenizer.enable_truncation(most)

    def __reduce__(self) -> Any:
        return Tokens, self._how

    def batch(self, texts: Sequence[Any]) -> tuple[Array, Array, Array]:
        """Ids, mask and types of texts, or of pairs of texts, padded to one length."""
        found = self._tokenizer.encode_batch(texts)
        return tuple(np.array([getattr(e, name) for e in found], np.int64) for name in ENCODED)  # type: ignore[return-value]

    def whole(self, text: str) -> Array:
        """The ids of a text, as it is."""
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int64)


ENCODED = ("ids", "attention_mask", "type_ids")


def roles(request: Request) -> dict[str, str]:
    """What each whole-number input of the model that is no column stands for: ids, mask, types or positions."""
    found: dict[str, str] = {}
    inputs = [f for f in request.inputs if f.is_whole and (f.shape is None or len(f.shape) == 1)]
    for field in inputs:
        name = field.name.lower()
        role = next((r for r, words in ROLES.items() if any(word in name for word in words)), None)
        if role is not None and role not in found.values():
            found[field.name] = role
    others = [f.name for f in inputs if f.name not in found]
    if "ids" not in found.values() and len(others) == 1:
        found[others[0]] = "ids"
    if "ids" not in found.values():
        raise request.error(
            f"is text, but the model has no input for token ids, as 'input_ids' of the shape [N, length] would be: "
            f"{listed(f.name for f in request.inputs)}"
        )
    return found


ROLES: Mapping[str, tuple[str, ...]] = {
    "mask": ("mask",), "types": ("type", "segment"), "positions": ("position",), "ids": ("input_id", "token"),
}  # fmt: skip


def length_of(request: Request, names: Mapping[str, str]) -> tuple[int | None, bool]:
    """The most tokens of an example, and whether all have to have so many."""
    fixed = [f for f in request.inputs if f.name in names and f.numbers is not None]
    given = request.settings.length
    if fixed:
        length = fixed[0].numbers
        if given is not None and given != length:
            raise request.error(f"is read with a length of {given}, but {fixed[0].name!r} takes {length} tokens")
        return length, True
    return given, False


class Texts(Source):
    """Text that becomes tokens batch by batch, padded to the longest of the batch or the length that the model has."""

    def __init__(
        self, texts: Sequence[Any], tokens: Tokens, roles: Mapping[str, str], others: Mapping[str, Array],
        following: Field | None, classes: Mapping[str, Sequence[str]], remarks: Sequence[str],
    ) -> None:  # fmt: skip
        self._texts, self._tokens, self._roles, self._others = texts, tokens, roles, others
        self._following, self.classes, self.remarks = following, classes, remarks

    def __len__(self) -> int:
        return len(self._texts)

    def take(self, chosen: Array, seed: Sequence[int] = ()) -> dict[str, Array]:
        ids, mask, types = self._tokens.batch([self._texts[k] for k in chosen])
        found = inputs_of(self._roles, ids, mask, types)
        if self._following is not None:
            ignored = IGNORED if self._following.ignore is None else self._following.ignore
            found[self._following.name] = np.where(_after(mask) > 0, _after(ids), ignored)
        return {**found, **{name: a[chosen] for name, a in self._others.items()}}

    def column(self, name: str) -> Array | None:
        return self._others.get(name)


def _after(array: Array) -> Array:
    """What comes after each token; nothing after the last."""
    return np.concatenate([array[:, 1:], np.zeros_like(array[:, :1])], 1)


def inputs_of(roles: Mapping[str, str], ids: Array, mask: Array, types: Array) -> dict[str, Array]:
    """The inputs of a model, by their names."""
    of_role = {"ids": ids, "mask": mask, "types": types}
    if "positions" in roles.values():
        of_role["positions"] = np.maximum(np.cumsum(mask, 1) - 1, 0)
    return {name: of_role[role] for name, role in roles.items()}


def from_texts(table: Table, request: Request) -> Source:
    """Text in one column of a table, or a pair in two, and targets in others."""
    assert request.fields is not None and request.settings.tokenizer is not None
    names = roles(request)
    assembly = Assembly(table, request)
    fields = [f for f in request.fields if f.name not in names]
    texts = _text_columns(table, request, assembly, fields)
    following = _following(table, request, texts, fields)
    fields = [f for f in fields if f is not following]
    made_of = assembly.choose(fields, texts)
    others = {f.name: assembly.join(f, made_of[f.name]) for f in fields}
    assembly.say_unused(made_of, texts)
    most, is_fixed = length_of(request, names)
    tokens = Tokens(request.settings.tokenizer, request.subject, most, is_fixed)
    columns = [table.texts(c) for c in texts]
    cells = columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))
    return Texts(cells, tokens, names, others, following, assembly.classes, assembly.remarks)


def _text_columns(table: Table, request: Request, assembly: Assembly, fields: Sequence[Field]) -> list[str]:
    """The one or two columns that are read: "text", or all text that no target is made of."""
    named = request.settings.columns.get("text")
    if named is not None:
        found = assembly.matching("text", named)
    elif "text" in table.names:
        found = [n for n in ("text", "text_pair") if n in table.names]
    else:
        taken = {c for f in fields for c in request.settings.columns.get(f.name, (f.name,))}
        found = [n for n in table.names if table.is_text(n) and n not in taken]
        labels = [n for n in found if n.lower() in ("target", "label", "labels", "class")]
        found = [n for n in found if n not in labels]
    if not 1 <= len(found) <= 2:
        what = f"has {len(found)} columns of text ({listed(found)})" if found else "has no column of text"
        way_out = request.in_columns("text", table.names[0])
        raise request.error(f"{what}, expected one, or two for pairs; {way_out} names the column")
    return found


def _following(table: Table, request: Request, texts: Sequence[str], fields: Sequence[Field]) -> Field | None:
    """The target of a language model, which is the next token, if the table has none."""
    targets = [f for f in fields if f.is_target and f.shape is not None and len(f.shape) == 1 and f.is_whole]
    free = [f for f in targets if f.name not in table.names and f.name not in request.settings.columns]
    if not free:
        return None
    if free[0].ignore is None:
        raise request.error(
            f"has no column {free[0].name!r}, so each token is to predict the next: give the loss "
            f"ignore-index={IGNORED}, which is the target where there is none"
        )
    return free[0]


def from_chunks(request: Request) -> Source:
    """A text as a whole, in chunks of the model's length, each token to predict the next."""
    assert request.settings.tokenizer is not None
    names = roles(request)
    length, _ = length_of(request, names)
    if length is None:
        raise request.error(
            f"is split into chunks of a number of tokens that the model leaves open: set {request.option('length')}"
        )
    left = [f.name for f in request.inputs if f.name not in names]
    if left or len(request.targets) > 1:
        raise request.error(f"is text alone, but there is {(left or [f.name for f in request.targets])[-1]!r} as well")
    single = next((f.name for f in request.targets if f.shape == ()), None)
    if single is not None:
        raise request.error(f"is text whose tokens predict the next, but {single!r} is one class for an example")
    tokens = Tokens(request.settings.tokenizer, request.subject, None, False)
    ids = tokens.whole(request.path.read_text(encoding="utf-8-sig"))
    count = (len(ids) - 1) // length
    if count < 1:
        raise request.error(f"has {len(ids)} tokens, expected more than {length}, the length of an example")
    chunks = ids[: count * length].reshape(count, length)
    one, zero = (np.broadcast_to(np.int64(k), chunks.shape) for k in (1, 0))
    arrays = inputs_of(names, chunks, one, zero)
    arrays |= {f.name: ids[1 : count * length + 1].reshape(count, length) for f in request.targets}
    remark = f"{request.path.name}: {len(ids):,} tokens in {count:,} examples of {length}"
    return Arrays(arrays, remarks=[remark])
