"""The softmax cross entropy on the CPU: labels are checked and counted, then numbers are gone through.

SoftmaxCrossEntropyLossInternal is core/cross_entropy.py. SoftmaxCrossEntropyLossGrad goes through log_prob once; where
samples lie side by side in memory, a block of them goes through all classes together.
"""

import math

import numpy as np

from onnxgrad.arguments import label_error
from onnxgrad.cpu.core.cross_entropy import count_samples, cross_entropy
from onnxgrad.cpu.core.halves import flat, load, store
from onnxgrad.cpu.core.jit import int64, native
from onnxgrad.cpu.core.memory import workspace
from onnxgrad.cpu.core.parallel import parallel
from onnxgrad.cpu.core.recurrent.activations import probability
from onnxgrad.cpu.core.threads import NOTHING_WRONG, launch
from onnxgrad.ops.softmax_cross_entropy_loss import check_output_type, ignored_label
from onnxgrad.tensor_types import Array

TASK = 1 << 14  # elements of one task, at least
COLUMNS = 256  # of one block, at most
NO_CLASS = np.int32(-1)


def softmax_cross_entropy_loss_internal(
    scores: Array,
    labels: Array,
    weights: Array | None,
    ignore_index: Array | None,
    output: Array | None,
    log_prob: Array | None,
    reduction: str,
    output_type: int | None,
) -> None:
    check_output_type(str(scores.dtype), output_type)
    classes, inner = scores.shape[1], math.prod(scores.shape[2:])
    ignored = ignored_label(ignore_index)
    if output is None:
        output = workspace(labels.shape if reduction == "none" else (), scores.dtype)
    sizes = (scores.shape[0], classes, inner)
    how = (weights is not None, reduction == "none", reduction == "mean", log_prob is not None, ignored)
    arrays = (scores, labels, scores if weights is None else weights, output, scores if log_prob is None else log_prob)
    touched = scores.nbytes * (1 if log_prob is None else 2) + labels.nbytes
    position = launch(cross_entropy, *(flat(a) for a in arrays), sizes, how, bytes_touched=touched)
    if position != NOTHING_WRONG:
        raise label_error(labels.shape, position, labels.reshape(-1)[position], classes, ignored)


def softmax_cross_entropy_loss_grad(
    dY: Array,
    log_prob: Array,
    label: Array,
    weight: Array | None,
    d_logits: Array,
    reduction: str,
    ignore_index: int,
) -> None:
    classes, inner = log_prob.shape[1], math.prod(log_prob.shape[2:])
    weighted = weight is not None
    weights = flat(dY if weight is None else weight)
    sizes = (log_prob.shape[0], classes, inner)
    how = (weighted, reduction == "none", reduction == "mean", ignore_index)
    work = (flat(dY), flat(log_prob), flat(label), weights, flat(d_logits), sizes, how)
    touched = 2 * log_prob.nbytes + label.nbytes
    position = launch(_gradient, *work, bytes_touched=touched)
    if position != NOTHING_WRONG:
        raise label_error(label.shape, position, label.reshape(-1)[position], classes, ignore_index)


@native
def _gradient(
    dY: Array,
    log_prob: Array,
    label: Array,
    weight: Array,
    d_logits: Array,
    sizes: tuple[int, ...],
    how: tuple[bool, bool, bool, int],
    scheduler: int,
) -> int:
    samples, classes, inner = sizes
    weighted, each_has_its_own, is_mean, ignore_index = how
    bad, total = count_samples(label, weight, classes, ignore_index, weighted, scheduler)
    if bad >= 0:
        return bad
    if d_logits.size == 0:
        return int64(-1)
    factor = np.empty(1, np.float64)  # an array has a type in native code, a number none
    factor[0] = 1 / total if is_mean and total != 0 else 1.0
    work = (dY, log_prob, label, weight, d_logits, factor, sizes, (weighted, each_has_its_own, ignore_index))
    if inner == 1:
        per_task = max(1, TASK // classes)
        parallel(scheduler, (samples + per_task - 1) // per_task, _rows, (*work, per_task))
    else:
        width = min(COLUMNS, inner)
        blocks = samples * ((inner + width - 1) // width)
        per_task = max(1, TASK // (classes * width))
        parallel(scheduler, (blocks + per_task - 1) // per_task, _columns, (*work, per_task))
    return int64(-1)


@native
def _rows(
    task: int,
    dY: Array,
    log_prob: Array,
    label: Array,
    weight: Array,
    d_logits: Array,
    factor: Array,
    sizes: tuple[int, ...],
    how: tuple[bool, bool, int],
    per_task: int,
) -> None:
    samples, classes, _ = sizes
    weighted, each_has_its_own, ignore_index = how
    number_type = type(load(log_prob, 0))  # float32 for half numbers
    for row in range(task * per_task, min(samples, (task + 1) * per_task)):
        at, chosen = row * classes, int64(load(label, row))
        if chosen == ignore_index:
            for i in range(classes):
                store(d_logits, at + i, number_type(0))
            continue
        each = number_type(load(dY, row if each_has_its_own else 0) * factor[0])
        if weighted:
            each *= load(weight, chosen)
        for i in range(classes):
            store(d_logits, at + i, probability(load(log_prob, at + i)) * each)
        store(d_logits, at + chosen, (probability(load(log_prob, at + chosen)) - number_type(1)) * each)


@native
def _columns(
    task: int,
    dY: Array,
    log_prob: Array,
    label: Array,
    weight: Array,
    d_logits: Array,
    factor: Array,
    sizes: tuple[int, ...],
    how: tuple[bool, bool, int],
    per_task: int,
) -> None:
    samples, classes, inner = sizes
    weighted, each_has_its_own, ignore_index = how
    number_type = type(load(log_prob, 0))  # float32 for half numbers
    width = min(COLUMNS, inner)
    across = (inner + width - 1) // width
    each, chosen = np.empty(width, number_type), np.empty(width, np.int32)
    for block in range(task * per_task, min(samples * across, (task + 1) * per_task)):
        first = block % across * width
        count = min(width, inner - first)
        sample = block // across * inner + first
        at = block // across * classes * inner + first
        for j in range(count):
            given = int64(load(label, sample + j))
            ignored = given == ignore_index
            chosen[j] = NO_CLASS if ignored else np.int32(given)
            counts = number_type(load(dY, sample + j if each_has_its_own else 0) * factor[0])
            if weighted and not ignored:
                counts *= load(weight, given)
            each[j] = counts
        for i in range(classes):
            here = np.int32(i)
            for j in range(count):
                right = number_type(1) if load(chosen, j) == here else number_type(0)
                result = (probability(load(log_prob, at + i * inner + j)) - right) * load(each, j)
                store(d_logits, at + i * inner + j, result if load(chosen, j) >= 0 else number_type(0))
