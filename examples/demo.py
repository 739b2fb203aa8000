"""A GRU learns to tell the language of a name, character by character: an .onnx model in, a trained one out.

make demo runs it. The names come from CLDR, see language_names.py for their licence.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import language_names
import numpy as np
import onnx
import onnxruntime
from babel import Locale
from language_names import LANGUAGES, Alphabet, Names
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

import onnxgrad
from onnxgrad.graph.files import load
from onnxgrad.op import operator_of
from onnxgrad.passes.prepare import prepare
from onnxgrad.train.graphs import step_graph

BUILD = Path(__file__).parents[1] / "build" / "demo"
LOSS = onnxgrad.losses.CrossEntropy("logits")
EMBEDDING, HIDDEN, BATCH, EPOCHS, RATE = 32, 128, 64, 8, 6e-3
# The GRU reads pairs of neighbours: each character by one table of vectors, the one after it by another. A name's
# state is the one at its own end; batches are as wide as their longest name.
NETWORK = f"""
<ir_version: 10, opset_import: ["" : 21]>
languages (int64[batch, characters] text, int64[batch] length) => (float[batch, {len(LANGUAGES)}] logits)
<int64[1] zero = {{0}}, int64[1] one = {{1}}, int64[1] minus_one = {{-1}}, int64[1] end = {{{2**63 - 1}}},
 int64[1] two = {{2}}, int64[2] around = {{0, 2}}, float dropped = {{0.5}}>
{{
    characters_here = Gather(this_character, text)
    characters_next = Gather(next_character, text)
    here = Slice(characters_here, zero, minus_one, one)
    after = Slice(characters_next, one, end, one)
    pairs = Add(here, after)
    steps = Transpose <perm = [1, 0, 2]> (pairs)
    all_states = GRU <hidden_size = {HIDDEN}, linear_before_reset = 1> (steps, gru_W, gru_R, gru_B)
    states = Squeeze(all_states, one)
    last = Sub(length, two)
    last_row = Unsqueeze(last, around)
    shape = Shape <start = 1> (states)
    one_row = Concat <axis = 0> (one, shape)
    where = Expand(last_row, one_row)
    ends = GatherElements <axis = 0> (states, where)
    state = Squeeze(ends, zero)
    kept = Dropout(state, dropped)
    logits = Gemm(kept, head_weight, head_bias)
}}
"""
# What the training graph has to differentiate, and where it comes from.
GRADIENTS = {
    "GatherGrad": "looking up the vectors of characters",
    "SliceGrad": "shifting them by one, into pairs",
    "GRUGrad": "the GRU, through time",
    "GatherElementsGrad": "the state at each name's own end",
    "SeededDropout": "Dropout, forward and back",
    "GRUTraining": "the GRU forward, keeping what GRUGrad needs",
}
# A town or region where each language is spoken, none of which CLDR has a name for.
UNSEEN = {
    "cs": "České Budějovice", "cy": "Aberystwyth", "da": "Vesthimmerland", "de": "Bad Neuenahr-Ahrweiler",
    "en": "Newcastle upon Tyne", "es": "Castilla y León", "eu": "Gipuzkoako mendiak", "fi": "Hämeenlinna",
    "fr": "Saint-Étienne-du-Rouvray", "hu": "Székesfehérvár", "id": "Kepulauan Seribu", "it": "San Gimignano",
    "nl": "Bergen op Zoom", "pl": "Częstochowa", "pt": "Ribeirão Preto", "ro": "Târgu Mureș", "sv": "Örnsköldsvik",
    "sw": "Mlima wa Usambara", "tr": "Büyükçekmece", "vi": "Vũng Tàu",
}  # fmt: skip
SHADES = {0.02: "·", 0.05: "░", 0.1: "▒", 0.3: "▓", 0.7: "█"}  # by the share above which each is used
console = Console(highlight=False)


def write_network(path: Path, characters: int, random: np.random.Generator) -> None:
    """The model as an .onnx file, with random weights."""
    model = onnx.parser.parse_model(NETWORK)
    classes, bound = len(LANGUAGES), 1 / np.sqrt(HIDDEN)
    shapes = {
        "this_character": ((characters, EMBEDDING), 0.5), "next_character": ((characters, EMBEDDING), 0.5),
        "gru_W": ((1, 3 * HIDDEN, EMBEDDING), bound), "gru_R": ((1, 3 * HIDDEN, HIDDEN), bound),
        "gru_B": ((1, 6 * HIDDEN), bound), "head_weight": ((HIDDEN, classes), bound), "head_bias": ((classes,), 0.0),
    }  # fmt: skip
    for name, (shape, largest) in shapes.items():
        array = random.uniform(-largest, largest, shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    onnx.checker.check_model(model)
    onnx.save(model, path)


class NameBatches(onnxgrad.Batches):
    """Batches that are as wide as the longest name in them."""

    def __init__(self, names: Names, alphabet: Alphabet, size: int, *, shuffle: bool = True) -> None:
        super().__init__({**alphabet.encode(names.texts), "target": names.labels}, size, shuffle=shuffle)

    def starting_at(self, first: int) -> Iterator[dict[str, Any]]:
        for batch in super().starting_at(first):
            yield {**batch, "text": batch["text"][:, : batch["length"].max()]}


def english(code: str) -> str:
    """A language's name in English."""
    return str(Locale.parse(code).english_name)


def show_names(train: Names, held_out: Names) -> None:
    """How many there are, with an example of each language."""
    table = Table(title="Names of places and languages (CLDR)", box=box.SIMPLE, padding=(0, 1))
    for _ in range(2):
        table.add_column("language")
        table.add_column("names", justify="right")
        table.add_column("for example")
    counts = np.bincount(train.labels, minlength=len(LANGUAGES))
    cells = []
    for label, code in enumerate(LANGUAGES):
        example = next(
            (t for t, k in zip(train.texts, train.labels, strict=True) if k == label and 8 < len(t) < 16), ""
        )
        cells.append([english(code), str(counts[label]), example])
    half = len(cells) // 2
    for left, right in zip(cells[:half], cells[half:], strict=True):
        table.add_row(*left, *right)
    console.print(table)
    console.print(
        f"{len(train.texts):,} names to learn from; {len(held_out.texts):,} names of other things are held out.\n"
    )


def show_gradients(path: Path) -> bool:
    """The gradient operators of the training graph; whether all that the model is to show are there."""
    step = step_graph(prepare(load(path, "demo"), "demo"), LOSS)
    nodes = Counter(node.op_type for node in step.model.graph if operator_of(node.domain, node.op_type) is not None)
    table = Table(title="onnxgrad's operators in the training graph", box=box.SIMPLE)
    table.add_column("operator")
    table.add_column("nodes", justify="right")
    table.add_column("for")
    for name in [*GRADIENTS, *(n for n in nodes if n not in GRADIENTS)]:
        table.add_row(name, str(nodes[name]), GRADIENTS.get(name, ""))
    console.print(table)
    return all(nodes[name] for name in GRADIENTS)


def prepare_kernels(path: Path, batch: Any) -> None:
    """One step of a trainer that nobody needs: kernels compile, which takes its time once, and are kept on disk."""
    start = time.perf_counter()
    with console.status("compiling kernels: half a minute or so, but only the first time"):
        onnxgrad.Trainer(path, LOSS, onnxgrad.optim.AdamW(), clip_norm=1e-6).step(batch)
    console.print(f"Kernels are ready after {time.perf_counter() - start:.0f} s.")


def classify(session: onnxruntime.InferenceSession, alphabet: Alphabet, texts: list[str]) -> np.ndarray:
    """The probability of each language for each text."""
    (logits,) = session.run(None, alphabet.encode(texts))
    likely = np.exp(logits - logits.max(1, keepdims=True))
    return np.asarray(likely / likely.sum(1, keepdims=True))


def confusion(labels: np.ndarray, found: np.ndarray) -> np.ndarray:
    """For each language, the shares of its names taken for each language."""
    counts = np.zeros((len(LANGUAGES), len(LANGUAGES)))
    np.add.at(counts, (labels, found), 1)
    return counts / np.maximum(counts.sum(1, keepdims=True), 1)


def show_confusion(shares: np.ndarray) -> None:
    """A picture of characters: rows are the languages of names, columns what the model says."""
    console.print("\n[bold]What the held-out names of each language are taken for[/bold]")
    console.print("     " + " ".join(LANGUAGES) + "   right")
    for code, row, own in zip(LANGUAGES, shares, np.diag(shares), strict=True):
        line = Text(f"  {code} ")
        for to, share in zip(LANGUAGES, row, strict=True):
            shade = next((s for least, s in reversed(SHADES.items()) if share >= least), " ")
            line.append(shade * 2 + " ", "green" if to == code else "red")
        line.append(f" {own:5.0%}")
        console.print(line)
    wrong = shares - np.diag(np.diag(shares))
    pairs = [np.unravel_index(k, wrong.shape) for k in np.argsort(-wrong, axis=None)[:3]]
    console.print("Most often mistaken:")
    for a, b in pairs:
        console.print(f"  {english(LANGUAGES[a])} for {english(LANGUAGES[b])} ({wrong[a, b]:.0%})")


def draw(path: Path, records: list[Any], shares: np.ndarray) -> None:
    """The same as a picture, with the curves of training."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "onnxgrad", "font.size": 9})
    figure, axes = plt.subplot_mosaic("am;bm", figsize=(9, 4.2), width_ratios=(1, 1.1), layout="constrained")
    loss, share, right = axes["a"], axes["b"], axes["m"]
    epochs = [r.epoch for r in records]
    loss.plot(epochs, [r.loss for r in records], "o-", label="training")
    loss.plot(epochs, [r.validation["loss"] for r in records], "o-", label="held-out names")
    loss.set(ylabel="loss", ylim=(0, None), xticks=epochs)
    loss.legend(frameon=False)
    share.plot(epochs, [100 * r.validation["accuracy"] for r in records], "o-", color="C1")
    share.set(ylabel="held-out names right, %", ylim=(0, 100), xlabel="epoch", xticks=epochs)
    right.pcolormesh(np.sqrt(shares), cmap="Greens", edgecolors="white", linewidth=0.5)  # √: rare mistakes show, too
    ticks = np.arange(len(LANGUAGES)) + 0.5
    right.set_xticks(ticks, LANGUAGES)
    right.set_yticks(ticks, LANGUAGES)
    right.invert_yaxis()
    right.set(xlabel="taken for", ylabel="held-out names in", aspect="equal")
    right.tick_params(length=0)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def show_unseen(session: onnxruntime.InferenceSession, alphabet: Alphabet, seen: set[str]) -> None:
    """What the exported model says of places it has never met."""
    texts = [text for text in UNSEEN.values() if text.casefold() not in seen]
    likely = classify(session, alphabet, texts)
    table = Table(title="Places that are in no training data, in plain onnxruntime", box=box.SIMPLE)
    for heading in ("place", "", "language", "next"):
        table.add_column(heading, justify="left")
    right = 0
    for (code, text), row in zip(((c, t) for c, t in UNSEEN.items() if t in texts), likely, strict=True):
        first, second = np.argsort(-row)[:2]
        right += LANGUAGES[first] == code
        mark = "[green]✓[/green]" if LANGUAGES[first] == code else "[red]✗[/red]"
        told = [f"{english(LANGUAGES[k])} {row[k]:.0%}" for k in (first, second)]
        table.add_row(text, mark, *told)
    console.print(table)
    console.print(f"{right} of {len(texts)} right; a blind guess is right once in {len(LANGUAGES)}.")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--names", type=int, help="learn from so many names only")
    parser.add_argument("--out", type=Path, default=BUILD, help="folder for models and picture")
    options = parser.parse_args()
    start, random = time.perf_counter(), np.random.default_rng(0)
    options.out.mkdir(parents=True, exist_ok=True)
    model, trained, picture = (options.out / name for name in ("languages.onnx", "trained.onnx", "languages.svg"))

    train, held_out = language_names.load()
    if options.names:
        chosen = random.permutation(len(train.texts))[: options.names]
        train = Names([train.texts[k] for k in chosen], train.labels[chosen])
    show_names(train, held_out)
    alphabet = Alphabet(train.texts)
    write_network(model, alphabet.size, random)
    if not show_gradients(model):
        console.print("[red]the training graph lacks a gradient operator that it should use[/red]")
        return 1

    batches = NameBatches(train, alphabet, BATCH)
    validation = NameBatches(held_out, alphabet, 256, shuffle=False)
    prepare_kernels(model, next(iter(validation)))
    trainer = onnxgrad.Trainer(
        model, LOSS, onnxgrad.optim.AdamW(lr=RATE),
        schedule=onnxgrad.schedules.OneCycle(options.epochs * len(batches)), clip_norm=1.0,
    )  # fmt: skip
    count = sum(array.size for array in trainer.parameters.values())
    console.print(f"Training {count:,} parameters.\n")
    records = trainer.fit(
        batches, options.epochs, validation=validation, metrics={"accuracy": onnxgrad.metrics.Accuracy("logits")}
    )
    trainer.export(trained)

    session = onnxruntime.InferenceSession(trained)  # stock onnxruntime: nothing of onnxgrad is registered here
    found = classify(session, alphabet, held_out.texts).argmax(1)
    if not np.isclose(np.mean(found == held_out.labels), records[-1].validation["accuracy"], atol=2 / len(found)):
        console.print("[red]the exported model answers otherwise than the trainer[/red]")
        return 1
    shares = confusion(held_out.labels, found)
    show_confusion(shares)
    draw(picture, records, shares)
    show_unseen(session, alphabet, {text.casefold() for text in train.texts})
    seconds = time.perf_counter() - start
    console.print(f"{records[-1].validation['accuracy']:.1%} of held-out names right after {seconds:.0f} s.")
    console.print(f"model {trained}, picture {picture}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
