"""Runs onnxruntime-training 1.19.2 on small cases of ConvGrad and stores what it gives in golden/."""

import itertools
from collections.abc import Iterator
from typing import Any

import make_golden
from make_golden import Case, floats, write

make_golden.OUTPUTS |= {"ConvGrad": ("dX", "dW", "dB")}
# (X, W, dY, attributes); without SAME_UPPER and SAME_LOWER, for which the peer takes no pads at all
CONVOLUTIONS: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "one axis": ((2, 3, 7), (4, 3, 3), (2, 4, 5), {"kernel_shape": [3]}),
    "two axes": ((2, 3, 5, 4), (2, 3, 3, 2), (2, 2, 5, 5), {"pads": [1, 0, 1, 2]}),
    "three axes": ((1, 2, 4, 3, 4), (2, 2, 2, 1, 3), (1, 2, 5, 3, 4), {"pads": [1, 0, 1, 1, 0, 1]}),
    "pointwise": ((2, 3, 3, 4), (4, 3, 1, 1), (2, 4, 3, 4), {}),
    "stride leaves rows out": (
        (2, 2, 6, 8), (3, 2, 3, 3), (2, 3, 2, 3), {"strides": [2, 3], "pads": [0, 1, 0, 1]},
    ),
    "dilations": ((2, 2, 7, 6), (3, 2, 3, 2), (2, 3, 4, 6), {"dilations": [2, 3], "pads": [1, 1, 0, 2]}),
    "groups": ((2, 4, 4, 5), (6, 2, 2, 3), (2, 6, 2, 5), {"group": 2, "pads": [1, 1, 0, 1], "strides": [2, 1]}),
    "depthwise": ((2, 3, 4, 5), (3, 1, 3, 3), (2, 3, 4, 5), {"group": 3, "pads": [1, 1, 1, 1]}),
    "VALID": ((2, 2, 5, 4), (2, 2, 3, 2), (2, 2, 2, 3), {"auto_pad": "VALID", "strides": [2, 1]}),
}  # fmt: skip


def conv_cases() -> Iterator[Case]:
    for (name, (X, W, dY, attributes)), outputs in itertools.product(
        CONVOLUTIONS.items(), (None, ("dX",), ("dW", "dB"))
    ):
        spelled = name if outputs is None else f"{name}, only {', '.join(outputs)}"
        inputs = {n: floats(f"{name} {n}", *s) for n, s in (("dY", dY), ("X", X), ("W", W))}
        yield Case(spelled, inputs, attributes, outputs, None)
    wrong = {"dY": floats("dY", 2, 4, 4), "X": floats("X", 2, 3, 7), "W": floats("W", 4, 3, 3)}
    yield Case("dY of other size", wrong, {"kernel_shape": [3]}, None, "dY is not what Conv gives")
    wrong = {"dY": floats("dY", 2, 4, 5), "X": floats("X", 2, 3, 7), "W": floats("W", 4, 2, 3)}
    yield Case("W of other channels", wrong, {"kernel_shape": [3]}, None, "W does not fit X")


if __name__ == "__main__":
    done, cannot, differs = write("ConvGrad", conv_cases())
    print("ConvGrad", done, "cases; could not run:", cannot, "breaks the contract:", differs)
