"""Which kind of emoji fits a sentence? A pre-trained MiniLM learns it from a thousand emoji, most layers frozen.

The texts are the Unicode names of emoji (Python's unicodedata, Unicode License V3), the eight kinds come with the
package emojis (MIT); minilm.py says where the model comes from.
"""

import argparse
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from minilm import encode, load_minilm, load_tokenizer
from rich import box
from rich.console import Console
from rich.table import Table

import onnxgrad

BUILD = Path(__file__).parents[1] / "build" / "finetune_minilm"
EPOCHS, BATCH, LONGEST, HELD_OUT = 4, 32, 24, 0.2
# What is trained, as patterns of the parameters' names; a new classifier learns faster than what is trained already.
CHOICES = {
    "the classifier": ["classifier.*"],
    "the classifier and the last of six layers": ["classifier.*", "encoder.layer.5.*"],
}
OPTIMIZER = onnxgrad.optim.AdamW(lr=3e-4, groups={"classifier.*": {"lr": 1e-2}})
SENTENCES = [
    "I could cry all day long", "We had noodles and a cold beer", "She waved and clapped her hands",
    "The train leaves from the old castle", "A hungry wolf ran through the forest", "Do not enter",
    "They won the cup in the last minute", "I need a screwdriver and some nails", "He laughed until tears came",
    "Two eggs, butter and a slice of bread", "An aeroplane over the mountains", "Playing chess on a rainy evening",
]  # fmt: skip
console = Console(highlight=False)


def load_emoji(random: np.random.Generator) -> tuple[list[str], np.ndarray, list[str], list[str]]:
    """Names of emoji in random order, the number of the kind of each, the kinds, and an emoji of each name."""
    from emojis import db

    named: dict[str, tuple[str, str]] = {}
    for kind in sorted(db.get_categories()):
        for emoji in db.get_emojis_by_category(kind):
            character = emoji.emoji.removesuffix("\N{VARIATION SELECTOR-16}")
            if kind != "Flags" and len(character) == 1:  # flags and sequences of characters have no name of their own
                named.setdefault(unicodedata.name(character, "").lower(), (kind, emoji.emoji))
    named.pop("", None)
    texts = [sorted(named)[k] for k in random.permutation(len(named))]
    kinds = sorted({kind for kind, _ in named.values()})
    return texts, np.array([kinds.index(named[t][0]) for t in texts]), kinds, [named[t][1] for t in texts]


class SentenceBatches(onnxgrad.Batches):
    """Batches that are as wide as the longest sentence in them."""

    def starting_at(self, first: int) -> Iterator[dict[str, Any]]:
        for batch in super().starting_at(first):
            width = batch["mask"].sum(1).max()
            yield {**batch, "tokens": batch["tokens"][:, :width], "mask": batch["mask"][:, :width]}


def finetune(
    model: onnx.ModelProto, patterns: list[str], train: SentenceBatches, held_out: SentenceBatches, epochs: int
) -> tuple[onnxgrad.Trainer, float, float]:
    """A trainer that has trained what the patterns name, with the accuracy on held-out texts before and after."""
    trainer = onnxgrad.Trainer(
        model, onnxgrad.losses.CrossEntropy("logits"), OPTIMIZER, patterns,
        schedule=onnxgrad.schedules.Linear(epochs * len(train), warmup=len(train) // 2), clip_norm=1.0,
    )  # fmt: skip
    metrics = {"accuracy": onnxgrad.metrics.Accuracy("logits")}
    before = trainer.evaluate(held_out, metrics)["accuracy"]
    records = trainer.fit(train, epochs, validation=held_out, metrics=metrics)
    return trainer, before, records[-1].validation["accuracy"]


def show_sentences(path: Path, tokenizer: Any, kinds: list[str], signs: list[str]) -> None:
    """What the exported model makes of sentences, in plain onnxruntime."""
    session = onnxruntime.InferenceSession(path)
    (logits,) = session.run(None, encode(tokenizer, SENTENCES))
    likely = np.exp(logits - logits.max(1, keepdims=True))
    likely /= likely.sum(1, keepdims=True)
    table = Table(title="Sentences of ours, in plain onnxruntime", box=box.SIMPLE)
    for heading in ("sentence", "kind of emoji", ""):
        table.add_column(heading)
    for sentence, row in zip(SENTENCES, likely, strict=True):
        best = int(row.argmax())
        table.add_row(sentence, f"{kinds[best]} {row[best]:.0%}", signs[best])
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--texts", type=int, help="take so many texts only")
    parser.add_argument("--out", type=Path, default=BUILD, help="folder for the models")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    texts, labels, kinds, emoji = load_emoji(random)
    signs = [emoji[int(np.argmax(labels == k))] for k in range(len(kinds))]  # one emoji of each kind
    texts, labels = texts[: options.texts], labels[: options.texts]
    tokenizer = load_tokenizer(LONGEST)
    cut = int(HELD_OUT * len(texts))
    arrays = {**encode(tokenizer, texts), "target": labels}
    held_out = SentenceBatches({n: a[:cut] for n, a in arrays.items()}, 128, shuffle=False)
    train = SentenceBatches({n: a[cut:] for n, a in arrays.items()}, BATCH)

    table = Table(title=f"{train.examples} names of emoji to learn from, {cut} held out", box=box.SIMPLE)
    for heading in ("kind", "names", "for example"):
        table.add_column(heading, justify="right" if heading == "names" else "left")
    of_kind = [np.flatnonzero(labels == k) for k in range(len(kinds))]
    for kind, members in zip(kinds, of_kind, strict=True):
        table.add_row(kind, str(len(members)), ", ".join(f"{emoji[k]} {texts[k]}" for k in members[:2]))
    console.print(table)

    model = load_minilm(len(kinds), random)
    onnx.save(model, options.out / "minilm.onnx")
    total = sum(int(np.prod(t.dims)) for t in model.graph.initializer)
    results = Table(title="Held-out names", box=box.SIMPLE)
    for heading in ("trained", "parameters", "before", "after"):
        results.add_column(heading, justify="left" if heading == "trained" else "right")
    for number, (what, patterns) in enumerate(CHOICES.items()):
        console.print(f"[bold]Training {what}[/bold]")
        trainer, before, after = finetune(model, patterns, train, held_out, options.epochs)
        count = sum(a.size for a in trainer.parameters.values())
        results.add_row(what, f"{count:,} of {total:,}", f"{before:.1%}", f"{after:.1%}")
        trained = options.out / f"trained_{number}.onnx"
        trainer.export(trained)
    console.print(results)
    show_sentences(trained, tokenizer, kinds, signs)
    console.print(f"model {trained}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
