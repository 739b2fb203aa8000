"""Runs onnxruntime-training 1.19.2 on cases of SoftmaxCrossEntropyLossInternal and its gradient, for golden/."""

import itertools
from collections.abc import Iterator
from typing import Any

import make_golden
import numpy as np
from make_golden import Case, floats, ints, some_indices, write

make_golden.OUTPUTS |= {
    "SoftmaxCrossEntropyLossGrad": ("d_logits",),
    "SoftmaxCrossEntropyLossInternal": ("output", "log_prob"),
}


def loss_case(
    name: str, shape: Any, reduction: str = "mean", weighted: bool = False, index: Any = np.int64, label: Any = None,
    dY: Any = None, weight: Any = None, dtype: Any = np.float32, invalid: str | None = None, **attributes: Any,
) -> Case:  # fmt: skip
    x = floats(name, *shape).astype(np.float64) * 3
    log_prob = (x - np.log(np.exp(x).sum(1, keepdims=True))).astype(dtype)
    samples = (shape[0], *shape[2:])
    label = (
        np.abs(some_indices(f"{name} label", shape[1], *samples, dtype=index)) % shape[1] if label is None else label
    )
    if dY is None:
        dY = floats(f"{name} dY", *(samples if reduction == "none" else ()), dtype=dtype)
    if weight is None and weighted:
        weight = np.abs(floats(f"{name} weight", shape[1], dtype=dtype))
    inputs = {"dY": np.asarray(dY, dtype), "log_prob": log_prob, "label": label, "weight": weight}
    return Case(name, inputs, {"reduction": reduction, **attributes}, invalid=invalid)


def loss_cases() -> Iterator[Case]:
    for reduction, weighted, index in itertools.product(("none", "mean", "sum"), (False, True), (np.int32, np.int64)):
        for shape in ((5, 4), (2, 3, 4), (2, 3, 2, 3)):
            named = f"{reduction} {'weighted ' if weighted else ''}{np.dtype(index)} {shape}"
            yield loss_case(named, shape, reduction, weighted, index)
            yield loss_case(f"{named} ignoring 1", shape, reduction, weighted, index, ignore_index=1)
    yield loss_case("one class", (3, 1))
    yield loss_case("one sample", (1, 7))
    yield loss_case("-1 without ignore_index", (4, 3), label=ints([0, -1, 2, 1]))
    yield loss_case("all ignored", (3, 3), label=ints([5, 5, 5]), ignore_index=5)
    yield loss_case("all ignored, weighted", (3, 3), weighted=True, label=ints([5, 5, 5]), ignore_index=5)
    yield loss_case("weights of zero", (3, 3), weight=np.zeros(3, np.float32), label=ints([0, 1, 2]))
    yield loss_case("ignored far away", (4, 3), label=ints([0, -100, 2, -100]), ignore_index=-100)
    yield loss_case("float64", (3, 4), dtype=np.float64)
    yield loss_case("label of other shape", (4, 3), label=ints([0, 1]), invalid="label does not fit log_prob")
    short = np.ones(2, np.float32)
    yield loss_case("weight of other length", (4, 3), weight=short, label=ints([0, 1, 0, 1]), invalid="weight is short")


def forward_cases() -> Iterator[Case]:
    """The same labels and weights; scores in place of log_prob, and ignore_index is an input."""
    for case in loss_cases():
        given, settings = case.inputs, dict(case.attributes)
        ignored = settings.pop("ignore_index", None)
        scores = floats(f"{case.name} scores", *given["log_prob"].shape, dtype=given["log_prob"].dtype) * 3
        inputs = {"scores": scores, "labels": given["label"], "weights": given["weight"]}
        inputs["ignore_index"] = None if ignored is None else ints(ignored)
        yield Case(case.name, inputs, settings, invalid=case.invalid)


if __name__ == "__main__":
    makers = {"SoftmaxCrossEntropyLossGrad": loss_cases, "SoftmaxCrossEntropyLossInternal": forward_cases}
    for operator, cases in makers.items():
        done, cannot, differs = write(operator, cases())
        print(operator, done, "cases; could not run:", cannot, "breaks the contract:", differs)
