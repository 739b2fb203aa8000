"""A convolutional network with BatchNormalization and Dropout learns handwritten digits.

They come with scikit-learn: 1,797 pictures of 8 × 8 pixels, the test part of the UCI set "Optical Recognition of
Handwritten Digits" (Alpaydin and Kaynak, CC BY 4.0).
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from rich import box
from rich.columns import Columns
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits

import onnxgrad

BUILD = Path(__file__).parents[1] / "build" / "cnn_digits"
EPOCHS, BATCH, HELD_OUT = 12, 32, 360
NETWORK = """
<ir_version: 10, opset_import: ["" : 21]>
digits (float[batch, 1, 8, 8] picture) => (float[batch, 10] logits) <float dropped = {0.3}>
{
    conv1 = Conv <pads = [1, 1, 1, 1]> (picture, conv1_weight)
    normal1 = BatchNormalization (conv1, bn1_scale, bn1_bias, bn1_mean, bn1_variance)
    relu1 = Relu(normal1)
    conv2 = Conv <pads = [1, 1, 1, 1]> (relu1, conv2_weight)
    normal2 = BatchNormalization (conv2, bn2_scale, bn2_bias, bn2_mean, bn2_variance)
    relu2 = Relu(normal2)
    pooled = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (relu2)
    flat = Flatten(pooled)
    kept = Dropout(flat, dropped)
    logits = Gemm(kept, head_weight, head_bias)
}
"""
INKS = " ░▒▓█"
console = Console(highlight=False)


def write_network(path: Path, random: np.random.Generator, channels: tuple[int, int] = (16, 32)) -> None:
    """The model as an .onnx file, with random weights."""
    model = onnx.parser.parse_model(NETWORK)
    first, second = channels
    weights = {
        "conv1_weight": (first, 1, 3, 3),
        "conv2_weight": (second, first, 3, 3),
        "head_weight": (16 * second, 10),
    }
    arrays = {"head_bias": np.zeros(10)}
    for name, shape in weights.items():
        inputs = shape[0] if len(shape) == 2 else int(np.prod(shape[1:]))
        arrays[name] = random.standard_normal(shape) * np.sqrt(2 / inputs)
    for number, size in enumerate(channels, 1):
        arrays |= {f"bn{number}_{name}": np.ones(size) for name in ("scale", "variance")}
        arrays |= {f"bn{number}_{name}": np.zeros(size) for name in ("bias", "mean")}
    for name, array in arrays.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), name))
    onnx.checker.check_model(model)
    onnx.save(model, path)


def drawn(picture: np.ndarray, title: str) -> Table:
    """A picture in characters, under a title."""
    rows = ["".join(INKS[round(float(ink) * (len(INKS) - 1))] * 2 for ink in row) for row in picture]
    table = Table(title=title, box=None, show_header=False)
    table.add_row("\n".join(rows))
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--out", type=Path, default=BUILD, help="folder for the models")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    model, trained = options.out / "digits.onnx", options.out / "trained.onnx"
    random = np.random.default_rng(0)
    pictures, digits = load_digits(return_X_y=True)
    order = random.permutation(len(digits))
    pictures = (pictures[order] / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    digits = digits[order].astype(np.int64)
    test = {"picture": pictures[:HELD_OUT], "target": digits[:HELD_OUT]}
    batches = onnxgrad.Batches({"picture": pictures[HELD_OUT:], "target": digits[HELD_OUT:]}, BATCH)
    held_out = onnxgrad.Batches(test, HELD_OUT, shuffle=False)

    write_network(model, random)
    trainer = onnxgrad.Trainer(
        model, onnxgrad.losses.CrossEntropy("logits"), onnxgrad.optim.SGD(lr=0.02, momentum=0.9, nesterov=True),
        schedule=onnxgrad.schedules.Cosine(options.epochs * len(batches)),
    )  # fmt: skip
    console.print(f"{batches.examples} pictures to learn from, {HELD_OUT} held out\n")
    trainer.fit(batches, options.epochs, validation=held_out, metrics={"accuracy": onnxgrad.metrics.Accuracy("logits")})
    trainer.export(trained)

    session = onnxruntime.InferenceSession(trained)  # stock onnxruntime: nothing of onnxgrad is registered here
    (logits,) = session.run(None, {"picture": test["picture"]})
    found = logits.argmax(1)
    right = found == test["target"]
    table = Table(title="Held-out pictures, in plain onnxruntime", box=box.SIMPLE)
    for heading in ("digit", "pictures", "right", "mistaken for"):
        table.add_column(heading, justify="left" if heading == "mistaken for" else "right")
    for digit in range(10):
        own = test["target"] == digit
        wrong = ", ".join(map(str, sorted(set(found[own & ~right]))))
        table.add_row(str(digit), str(own.sum()), f"{np.mean(right[own]):.1%}", wrong)
    table.add_section()
    table.add_row("all", str(HELD_OUT), f"{np.mean(right):.1%}", "")
    console.print(table)
    wrong = np.flatnonzero(~right)
    if len(wrong):
        console.print("Wrong ones, as they look:")
        titles = [f"a {test['target'][k]}, taken for a {found[k]}" for k in wrong[:4]]
        console.print(Columns([drawn(test["picture"][k, 0], t) for k, t in zip(wrong[:4], titles, strict=True)]))
    console.print(f"model {trained}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
