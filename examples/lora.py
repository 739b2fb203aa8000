"""Full fine-tuning and LoRA beside each other: a pre-trained MiniLM learns which kind of emoji fits a sentence.

Each way trains in a process of its own, whose memory is measured. The data is that of finetune_minilm.py; minilm.py
says where the model comes from.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import onnxruntime
from finetune_minilm import HELD_OUT, LONGEST, SENTENCES, SentenceBatches, load_emoji
from minilm import encode, load_minilm, load_tokenizer
from rich import box
from rich.console import Console
from rich.table import Table

import onnxgrad

BUILD = Path(__file__).parents[1] / "build" / "lora"
EPOCHS, BATCH = 4, 16
FULL, ADAPTED = "full fine-tuning", "LoRA, rank 8"
RATES = {FULL: 1e-4, ADAPTED: 1e-3}  # adapters begin at 0, and take larger steps
console = Console(highlight=False)


def warm_up() -> int:
    """Loads libraries and kernels; the most memory, in bytes, that this takes."""
    tiny = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 21]>
        tiny (int64[n] x) => (float[n, 4] y) <float[3, 4] W = {1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0}> { y = Gather(W, x) }
    """)
    trainer = onnxgrad.Trainer(tiny, onnxgrad.losses.CrossEntropy("y"), onnxgrad.optim.AdamW())
    trainer.step({"x": np.zeros(2, np.int64), "target": np.zeros(2, np.int64)})
    return trainer.peak_memory


def train(way: str, folder: Path, epochs: int, texts: int | None) -> dict[str, Any]:
    """Trains in one of two ways, writes the result, and says how it went."""
    before = warm_up()
    names, labels, _, _ = load_emoji(np.random.default_rng(0))
    arrays = {**encode(load_tokenizer(LONGEST), names[:texts]), "target": labels[:texts]}
    cut = int(HELD_OUT * len(arrays["target"]))
    held_out = SentenceBatches({n: a[:cut] for n, a in arrays.items()}, BATCH, shuffle=False)
    batches = SentenceBatches({n: a[cut:] for n, a in arrays.items()}, BATCH)
    model = onnx_ir.load(folder / "minilm.onnx")  # whose weights stay in their file
    if way == ADAPTED:
        model = onnxgrad.lora(model, "*query*|*value*", rank=8)
    trainer = onnxgrad.Trainer(
        model, onnxgrad.losses.CrossEntropy("logits"),
        onnxgrad.optim.AdamW(lr=RATES[way], groups={"classifier.*": {"lr": 1e-2}}),
        "classifier.*" if way == ADAPTED else None,
        schedule=onnxgrad.schedules.Linear(epochs * len(batches), warmup=len(batches) // 2), clip_norm=1.0,
    )  # fmt: skip
    metrics = {"accuracy": onnxgrad.metrics.Accuracy("logits")}
    untrained = trainer.evaluate(held_out, metrics)["accuracy"]
    record = trainer.fit(batches, epochs, validation=held_out, metrics=metrics, quiet=True)[-1]
    if way == ADAPTED:
        written = onnxgrad.save_adapter(trainer, folder / "adapter")
    else:
        written = trainer.export(folder / "finetuned.onnx")
    return {
        "trained": sum(a.size for a in trainer.parameters.values()),
        "before": untrained,
        "after": record.validation["accuracy"],
        "memory": record.peak_memory - before,
        "written": sum(file.stat().st_size for file in written),
    }


def in_a_process(way: str, options: argparse.Namespace) -> dict[str, Any]:
    """What train() returns; a process of its own has a peak of its own."""
    command = [sys.executable, __file__, "--way", way, "--epochs", str(options.epochs), "--out", str(options.out)]
    if options.texts is not None:
        command += ["--texts", str(options.texts)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def show_sentences(folder: Path) -> None:
    """What the merged model makes of sentences, in plain onnxruntime."""
    _, _, kinds, _ = load_emoji(np.random.default_rng(0))
    adapted = onnxgrad.load_adapter(folder / "minilm.onnx", folder / "adapter")
    onnx.save(onnxgrad.merge_lora(adapted), folder / "merged.onnx")
    session = onnxruntime.InferenceSession(folder / "merged.onnx")
    (logits,) = session.run(None, encode(load_tokenizer(LONGEST), SENTENCES))
    for sentence, row in zip(SENTENCES[:4], logits, strict=False):
        console.print(f"{sentence}: {kinds[int(row.argmax())]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--texts", type=int, help="take so many texts only")
    parser.add_argument("--out", type=Path, default=BUILD, help="folder for the models")
    parser.add_argument("--way", choices=list(RATES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way is not None:
        print(json.dumps(train(options.way, options.out, options.epochs, options.texts)))
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    _, _, kinds, _ = load_emoji(np.random.default_rng(0))
    model = load_minilm(len(kinds), np.random.default_rng(1))
    onnx.save(model, options.out / "minilm.onnx", save_as_external_data=True, location="minilm.onnx.data")
    results = Table(title="MiniLM, in both ways", box=box.SIMPLE)
    for heading in ("", "numbers trained", "memory for training", "written", "accuracy before", "after"):
        results.add_column(heading, justify="right" if heading else "left")
    for way in RATES:
        found = in_a_process(way, options)
        results.add_row(
            way, f"{found['trained']:,}", f"{found['memory'] / 1e6:.0f} MB", f"{found['written'] / 1e6:.1f} MB",
            f"{found['before']:.1%}", f"{found['after']:.1%}",
        )  # fmt: skip
    console.print(results)
    show_sentences(options.out)
    console.print(f"adapter {options.out / 'adapter'}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
