"""Which pixels make an 8 an 8 and no 3? A small network learns digits, and its gradient answers.

Both jobs are one call of gradient(): with respect to the parameters for training, to the picture for the answer.
"""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from rich.console import Console

import onnxgrad

FONT = {
    "0": ".###. #...# #..## #.#.# ##..# #...# .###.",
    "1": "..#.. .##.. ..#.. ..#.. ..#.. ..#.. .###.",
    "2": ".###. #...# ....# ...#. ..#.. .#... #####",
    "3": ".###. #...# ....# ..##. ....# #...# .###.",
    "4": "...#. ..##. .#.#. #..#. ##### ...#. ...#.",
    "5": "##### #.... ####. ....# ....# #...# .###.",
    "6": "..##. .#... #.... ####. #...# #...# .###.",
    "7": "##### ....# ...#. ..#.. .#... .#... .#...",
    "8": ".###. #...# #...# .###. #...# #...# .###.",
    "9": ".###. #...# #...# .#### ....# ...#. .##..",
}
PICTURES = np.array([[c == "#" for c in rows.replace(" ", "")] for rows in FONT.values()], np.float32)
NETWORK = """
<ir_version: 10, opset_import: ["" : 21]>
digits (float[batch, 35] picture, int64[batch] digit) => (float[batch, 10] scores, float loss) {
    a = Gemm(picture, W1, b1)
    h = Tanh(a)
    scores = Gemm(h, W2, b2)
    loss = SoftmaxCrossEntropyLoss(scores, digit)
}
"""
Run = Callable[..., dict[str, Any]]


def network(random: np.random.Generator) -> onnx.ModelProto:
    """Two layers with random weights."""
    model = onnx.parser.parse_model(NETWORK)
    for name, shape in {"W1": (35, 32), "b1": (32,), "W2": (32, 10), "b2": (10,)}.items():
        array = (random.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


def runner(model: onnx.ModelProto) -> Run:
    """The model as a function of its inputs, with its outputs by name."""
    session = onnxgrad.session(model)
    names = [o.name for o in session.get_outputs()]
    return lambda **feeds: dict(zip(names, session.run(None, feeds), strict=True))


def train(model: onnx.ModelProto, random: np.random.Generator, steps: int = 200) -> float:
    """Plain gradient descent on noisy pictures; the weights end up in the model. Returns the last loss."""
    run = runner(onnxgrad.gradient(model, of="loss", parameters_as_inputs=True))
    weights = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    digits = np.tile(np.arange(10), 8)
    for _ in range(steps):
        noise = random.normal(0, 0.2, (80, 35)).astype(np.float32)
        found = run(picture=PICTURES[digits] + noise, digit=digits, **weights)
        weights = {name: old - 0.5 * found[f"{name}_grad"] for name, old in weights.items()}
    for tensor in model.graph.initializer:
        tensor.CopyFrom(onnx.numpy_helper.from_array(weights[tensor.name], tensor.name))
    return float(found["loss"])


def saliency(model: onnx.ModelProto, digit: int, other: int) -> Any:
    """How much each pixel of a digit speaks for it, and against another one."""
    run = runner(onnxgrad.gradient(model, of="scores", wrt="picture"))
    seed = np.zeros((1, 10), np.float32)
    seed[0, digit], seed[0, other] = 1, -1
    found = run(picture=PICTURES[[digit]], digit=np.array([digit]), scores_grad=seed)
    return found["picture_grad"].reshape(7, 5)


def sign(share: float) -> str:
    """Two of them for more than half of the largest, none for less than a quarter."""
    shown = ("+" if share > 0 else "-") * (1 + (abs(share) > 0.5))
    return f"{shown:2}" if abs(share) > 0.25 else "· "


def main() -> int:
    console, random = Console(highlight=False), np.random.default_rng(0)
    model = network(random)
    console.print(f"trained to a loss of {train(model, random):.3f}")
    found = saliency(model, 8, 3)
    console.print("an 8, and what speaks for it (+) and for a 3 (-):")
    for picture, row in zip(PICTURES[8].reshape(7, 5), found / np.abs(found).max(), strict=True):
        console.print("".join("██" if p else "· " for p in picture), "  ", *map(sign, row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
