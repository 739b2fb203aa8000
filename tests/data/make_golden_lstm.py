"""Runs onnxruntime-training 1.19.2 on small cases of LSTMTraining and LSTMGrad and stores what it gives in golden/."""

import itertools
from collections.abc import Iterator
from typing import Any

import make_golden
import numpy as np
from make_golden import Case, attempt, floats, ints, write

make_golden.OUTPUTS |= {
    "LSTMTraining": ("HAll", "HFinal", "CFinal", "CAll", "IOFC"),
    "LSTMGrad": ("dX", "dW", "dR", "dB", "dH0", "dC0", "dP"),
}
LOWER = ["sigmoid", "tanh", "tanh"]
CHANGES: dict[str, dict[str, Any]] = {  # attributes and inputs of which the peer takes few
    "activations not given": {"activations": None},
    "Sigmoid and Tanh capitalised": {"activations": ["Sigmoid", "Tanh", "Tanh"]},
    "reverse": {"direction": "reverse"},
    "clip": {"clip": 0.5},
    "input_forget": {"input_forget": 1},
    "SL": {"replace": {"SL": ints([3, 1], np.int32)}},
    "float64": {"dtype": np.float64},
    "hidden_size differs": {"hidden_size": 5, "invalid": "hidden_size is not R's"},
    "W of other width": {"replace": {"W": floats("", 1, 16, 2)}, "invalid": "W does not fit X"},
    "Ct0 of other rows": {"replace": {"Ct0": floats("", 1, 3, 4)}, "invalid": "Ct0 does not fit X"},
}


def lstm_cases(grad: bool) -> Iterator[Case]:
    def case(
        name: str, size: Any = (3, 2, 3, 4), absent: Any = (), dtype: Any = np.float32, replace: Any = None,
        outputs: Any = None, invalid: Any = None, **attributes: Any,
    ) -> Case:  # fmt: skip
        S, N, width, H = size
        shapes: dict[str, Any] = {"X": (S, N, width), "W": (1, 4 * H, width), "R": (1, 4 * H, H), "B": (1, 8 * H)}
        shapes |= {"SL": None, "Ht0": (1, N, H), "Ct0": (1, N, H), "P": (1, 3 * H)}
        attributes = {"hidden_size": H, "activations": LOWER} | attributes
        attributes = {n: v for n, v in attributes.items() if v is not None}
        forward = {
            n: None if s is None or n in absent else (floats(f"{name} {n}", *s) / 2).astype(dtype)
            for n, s in shapes.items()
        } | (replace or {})
        if not grad:
            return Case(name, forward, attributes, outputs, invalid)
        states, gates, last = (S, 1, N, H), (S, 1, N, 4 * H), (1, N, H)
        done = attempt("LSTMTraining", Case(name, forward, attributes))  # the peer's own forward pass, if it does one
        HAll, CAll, IOFC = (floats(name, *s) for s in (states, states, gates)) if isinstance(done, str) else (
            done[0], done[3], done[4])  # fmt: skip
        inputs = {n: forward[n] for n in ("X", "W", "R", "SL", "Ht0", "Ct0")}
        inputs |= {"HAll": HAll, "CAll": CAll, "IOFC": IOFC}
        gradients = {"dHAll": states, "dHFinal": last, "dCFinal": last}
        inputs |= {n: None if n in absent else floats(f"{name} {n}", *s) for n, s in gradients.items()}
        return Case(name, inputs, attributes, outputs, invalid)

    optional = ("Ht0", "Ct0", *(("dHAll", "dHFinal", "dCFinal") if grad else ("B", "P")))
    for count in range(len(optional) + 1):
        for absent in itertools.combinations(optional, count):
            yield case(f"without {', '.join(absent) or 'nothing'}", absent=absent)
    for size in ((1, 1, 1, 1), (1, 3, 2, 5), (6, 3, 1, 2), (4, 7, 6, 8)):
        yield case(f"S N I H {size}", size)
    for name, change in CHANGES.items():
        yield case(name, **change)
    if grad:
        yield case("only dW", outputs=("dW",))
        yield case("only dX, dP", outputs=("dX", "dP"))


if __name__ == "__main__":
    for grad, operator in enumerate(("LSTMTraining", "LSTMGrad")):
        done, cannot, differs = write(operator, lstm_cases(bool(grad)))
        print(operator, done, "cases; could not run:", cannot, "breaks the contract:", differs)
