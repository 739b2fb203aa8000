"""A network that reads handwritten digits, in integers of 8 and of 4 bits: rounded, and trained while it is rounded.

The digits are those of cnn_digits.py. Rounding a trained network costs some of what it has learned, with 4 bits more
than with 8; quantization-aware training lets the weights settle where rounding does not hurt.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from cnn_digits import HELD_OUT, write_network
from rich import box
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits

import onnxgrad

BUILD = Path(__file__).parents[1] / "build" / "quantize_digits"
EPOCHS, BATCH = 10, 32
KINDS = {"int8": True, "int4": True, "int4 per tensor": False}  # whether each channel has a scale of its own
INTEGER_KERNELS = ("QLinearConv", "QGemm")
LOSS = onnxgrad.losses.CrossEntropy("logits")
console = Console(highlight=False)


def digits() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Pictures and digits to learn from, and others to be tested with."""
    pictures, found = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(found))
    pictures = (pictures[order] / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    columns = {"picture": pictures, "target": found[order].astype(np.int64)}
    return {n: a[HELD_OUT:] for n, a in columns.items()}, {n: a[:HELD_OUT] for n, a in columns.items()}


def train(model: Path, data: dict[str, np.ndarray], epochs: int, lr: float, output: Path) -> None:
    """Trains a model, whatever its weights are stored as, and writes it in the same form."""
    batches = onnxgrad.Batches(data, BATCH)
    trainer = onnxgrad.Trainer(
        model, LOSS, onnxgrad.optim.SGD(lr, momentum=0.9), schedule=onnxgrad.schedules.Cosine(epochs * len(batches))
    )
    trainer.fit(batches, epochs, quiet=True)
    trainer.export(output)


def right(model: Path, test: dict[str, np.ndarray]) -> tuple[float, int]:
    """The share of the held-out digits that stock onnxruntime reads right, and how many integer kernels do it."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath, options.log_severity_level = str(model.with_suffix(".optimized.onnx")), 3
    (logits,) = onnxruntime.InferenceSession(model, options).run(None, {"picture": test["picture"]})
    nodes = onnx.load(options.optimized_model_filepath).graph.node
    found = float(np.mean(logits.argmax(1) == test["target"]))
    return found, sum(node.op_type in INTEGER_KERNELS for node in nodes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--out", type=Path, default=BUILD, help="folder for the models")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    data, test = digits()
    untrained, trained = options.out / "digits.onnx", options.out / "float32.onnx"
    write_network(untrained, np.random.default_rng(0), (8, 8))
    train(untrained, data, options.epochs, 0.02, trained)

    table = Table(title=f"{HELD_OUT} held-out pictures, in plain onnxruntime", box=box.SIMPLE)
    for heading in ("weights", "bytes", "integer kernels", "right, rounded", "right, trained"):
        table.add_column(heading, justify="left" if heading == "weights" else "right")
    table.add_row("float32", f"{trained.stat().st_size:,}", "0", f"{right(trained, test)[0]:.1%}", "")
    for k, (weights, per_channel) in enumerate(KINDS.items()):
        rounded, tuned = options.out / f"rounded_{k}.onnx", options.out / f"trained_{k}.onnx"
        examples = onnxgrad.Batches(data, BATCH)
        onnx.save(onnxgrad.quantize(trained, examples, weights.split()[0], per_channel=per_channel), rounded)
        train(rounded, data, options.epochs, 0.005, tuned)
        before, after = right(rounded, test), right(tuned, test)
        table.add_row(weights, f"{tuned.stat().st_size:,}", str(after[1]), f"{before[0]:.1%}", f"{after[0]:.1%}")
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
