"""Text: the ids of the tokenizer, padded as the model wants them, and the next token where there is no target."""

import itertools
import json
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.checks import raises, same_bits
from tests.sources.models import embedded

from onnxgrad.sources import read
from onnxgrad.train import losses
from onnxgrad.train.batches import Batches

tokenizers = pytest.importorskip("tokenizers")
ENTROPY = losses.CrossEntropy("logits")
NEXT = losses.CrossEntropy("logits", axis=-1, ignore_index=-100)
MODEL_INPUTS = ("attention_mask", "token_type_ids")


@pytest.fixture(scope="module")
def names():
    """Names of languages, in their own language and others, and which language that is."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    import language_names

    sys.path.pop(0)
    train, _ = language_names.load()
    return list(zip(train.texts[:40], train.labels[:40].tolist(), strict=True))


@pytest.fixture
def folder(names, tmp_path):
    """A tokenizer trained on the names, and files of them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    special = ["[PAD]", "[CLS]", "[SEP]"]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([text for text, _ in names], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    rows = [{"text": text, "label": f"L{label}"} for text, label in names]
    (tmp_path / "names.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "names.txt").write_text("\n".join(text for text, _ in names))
    return tmp_path


def tokenized(folder, *texts, length=None):
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [tokenizer.encode(*text if isinstance(text, tuple) else (text,)).ids[:length] for text in texts]


def read_names(folder, model, loss=ENTROPY, name="names.jsonl", **how):
    return read(folder / name, model, loss, tokenizer=folder / "tokenizer.json", **how)


def test_text_is_padded_to_the_longest_of_the_batch(folder, names):
    source = read_names(folder, embedded(300, 9, extra=MODEL_INPUTS))
    batch = next(iter(Batches(source, 8, shuffle=False)))
    ids = tokenized(folder, *(text for text, _ in names[:8]))
    width = max(map(len, ids))
    assert batch["input_ids"].tolist() == [[*row, *[0] * (width - len(row))] for row in ids]
    assert batch["attention_mask"].sum(1).tolist() == list(map(len, ids))
    assert batch["token_type_ids"].shape == (8, width) and not batch["token_type_ids"].any()
    labels = sorted({f"L{label}" for _, label in names})
    assert batch["target"].tolist() == [labels.index(f"L{label}") for _, label in names[:8]]
    assert source.classes == {"target": labels}


def test_the_length_of_the_model_or_of_the_option(folder, names):
    fixed = read_names(folder, embedded(300, 9, 12)).take(np.arange(40))
    assert fixed["input_ids"].shape == (40, 12)
    short = read_names(folder, embedded(300, 9, extra=()), length=5).take(np.arange(40))
    assert list(short) == ["input_ids", "target"] and short["input_ids"].shape == (40, 5)
    own = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    own.enable_truncation(5)
    own.enable_padding()
    assert short["input_ids"].tolist() == [e.ids for e in own.encode_batch([text for text, _ in names])]
    with raises(
        ValueError,
        f"read: {str(folder / 'names.jsonl')!r} is read with a length of 9, but 'input_ids' takes 12 tokens",
    ):
        read_names(folder, embedded(300, 9, 12), length=9)


def test_pairs_have_types(folder, names):
    pairs = enumerate(itertools.pairwise(text for text, _ in names))
    rows = [{"premise": a, "hypothesis": b, "label": k % 2} for k, (a, b) in pairs]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = read_names(folder, embedded(300, 2, extra=MODEL_INPUTS), name="pairs.jsonl")
    batch = source.take(np.array([3]))
    (expected,) = tokenized(folder, (names[3][0], names[4][0]))
    assert batch["input_ids"].tolist() == [expected] and batch["target"].tolist() == [1]
    second = tokenized(folder, names[4][0])[0]
    assert batch["token_type_ids"][0].tolist() == [0] * (len(expected) - len(second) + 1) + [1] * (len(second) - 1)
    swapped = read_names(folder, embedded(300, 2), name="pairs.jsonl", columns={"text": ["hypothesis", "premise"]})
    assert swapped.take(np.array([3]))["input_ids"].tolist() == tokenized(folder, (names[4][0], names[3][0]))


def test_without_a_target_each_token_predicts_the_next(folder, names):
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text, _ in names))
    source = read_names(folder, embedded(300, 300, is_next=True, extra=("position_ids",)), NEXT, "text.jsonl")
    batch = source.take(np.arange(3))
    for ids, target, positions, row in zip(
        batch["input_ids"],
        batch["target"],
        batch["position_ids"],
        tokenized(folder, *(t for t, _ in names[:3])),
        strict=True,
    ):
        assert ids[: len(row)].tolist() == row and positions[: len(row)].tolist() == list(range(len(row)))
        assert target.tolist() == [*row[1:], *[-100] * (len(ids) - len(row) + 1)]
    with raises(
        ValueError,
        f"read: {str(folder / 'text.jsonl')!r} has no column 'target', so each token is to predict the next: give the "
        "loss ignore-index=-100, which is the target where there is none",
    ):
        read_names(folder, embedded(300, 300, is_next=True), losses.CrossEntropy("logits", axis=-1), "text.jsonl")


def test_a_text_as_a_whole_is_cut_into_chunks(folder):
    model = embedded(300, 300, is_next=True)
    source = read_names(folder, model, NEXT, "names.txt", length=16)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode((folder / "names.txt").read_text(), add_special_tokens=False).ids
    batch = source.take(np.arange(len(source)))
    count = (len(ids) - 1) // 16
    assert batch["input_ids"].ravel().tolist() == ids[: 16 * count]
    assert batch["target"].ravel().tolist() == ids[1 : 16 * count + 1] and batch["attention_mask"].all()
    assert source.remarks == [f"names.txt: {len(ids)} tokens in {count} examples of 16"]
    fixed = read_names(folder, embedded(300, 300, 16, is_next=True), NEXT, "names.txt")
    assert same_bits(fixed.take(np.arange(3))["target"], batch["target"][:3])
    for how, sentence in (
        ({}, "is split into chunks of a number of tokens that the model leaves open: set length="),
        ({"length": 9999}, f"has {len(ids)} tokens, expected more than 9999, the length of an example"),
    ):
        with raises(ValueError, f"read: {str(folder / 'names.txt')!r} {sentence}"):
            read_names(folder, model, NEXT, "names.txt", **how)
    with raises(
        ValueError,
        f"read: {str(folder / 'names.txt')!r} is text whose tokens predict the next, but 'target' is one class for an "
        "example",
    ):
        read_names(folder, embedded(300, 9, 16), ENTROPY, "names.txt")


def test_workers_have_tokenizers_of_their_own(folder):
    source = read_names(folder, embedded(300, 9))
    one, other = (s.take(np.arange(16)) for s in (source, pickle.loads(pickle.dumps(source))))
    assert all(same_bits(one[n], other[n]) for n in one)


def test_what_is_refused(folder):
    model = embedded(300, 9)
    with raises(FileNotFoundError, "read: the tokenizer 'none.json' does not exist, expected a tokenizer.json"):
        read(folder / "names.jsonl", model, ENTROPY, tokenizer="none.json")
    with pytest.raises(ValueError, match=r"^read: '.*/names\.jsonl' is not a tokenizer \("):
        read(folder / "names.jsonl", model, ENTROPY, tokenizer=folder / "names.jsonl")
    with raises(
        ValueError,
        f"read: {str(folder / 'names.txt')!r} is text, which needs a model and its tokenizer.json, which tokenizer= "
        "names",
    ):
        read(folder / "names.txt", model, ENTROPY)
    with raises(
        ValueError,
        f"read: {str(folder / 'names.jsonl')!r} is text, and the model takes token ids, 'input_ids': name its "
        "tokenizer.json with tokenizer=",
    ):
        read(folder / "names.jsonl", model, ENTROPY)
    (folder / "many.csv").write_text("a,b,c,label\nx,y,z,0\n")
    with raises(
        ValueError,
        f"read: {str(folder / 'many.csv')!r} has 3 columns of text ('a', 'b', 'c'), expected one, or two for pairs; "
        "columns={'text': ['a']} names the column",
    ):
        read_names(folder, model, name="many.csv")
