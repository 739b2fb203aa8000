"""SoftmaxCrossEntropyLossInternal in native code: scores come once from memory, then from cache.

First for the highest score of each sample, then for the sum of exponentials, and to write their logarithms. Where
samples lie side by side in memory, a block of them goes through all classes together; so do samples of few classes.
"""

import math

import numpy as np

from onnxgrad.cpu.core.halves import load, store
from onnxgrad.cpu.core.jit import inlined, int64, native
from onnxgrad.cpu.core.parallel import parallel
from onnxgrad.cpu.core.recurrent.activations import exp
from onnxgrad.tensor_types import Array

LABELS = 1 << 16  # of one task
TASK = 1 << 14  # elements of one task, at least
COLUMNS = 256  # of one block, at most
LANES = 64  # highest scores and sums of a row, side by side, so that it goes through the machine's vectors
FILLED = 32  # of them are filled at least by what is left at the end of a row
HALVES = (32, 16, 8, 4, 2, 1)  # of them, as they come together
SHORT = 32  # classes that are too few for that
TRANSPOSED = 64  # rows of so few classes that go through vectors together


@native
def cross_entropy(
    scores: Array,
    labels: Array,
    weights: Array,
    output: Array,
    log_prob: Array,
    sizes: tuple[int, ...],
    how: tuple[bool, bool, bool, bool, int],
    scheduler: int,
) -> int:
    samples, classes, inner = sizes
    weighted, each_has_its_own, is_mean, _, ignore_index = how
    bad, total = count_samples(labels, weights, classes, ignore_index, weighted, scheduler)
    if bad >= 0:
        return bad
    if scores.size == 0:  # there are no samples, or no classes, and then all samples are ignored
        for i in range(output.size):
            store(output, i, 0)
        return int64(-1)
    work = (scores, labels, weights, output, log_prob)
    are_short = inner == 1 and classes < SHORT
    width = TRANSPOSED if are_short else min(COLUMNS, inner)
    blocks = (samples + width - 1) // width if are_short else samples * ((inner + width - 1) // width)
    per_task = max(1, TASK // (classes * width))
    tasks = (blocks + per_task - 1) // per_task
    losses = np.empty(tasks, np.float64)
    if are_short:
        parallel(scheduler, tasks, _loss_of_short_rows, (*work, losses, sizes, how, per_task))
    elif inner == 1:
        parallel(scheduler, tasks, _loss_of_rows, (*work, losses, sizes, how, per_task))
    else:
        parallel(scheduler, tasks, _loss_of_columns, (*work, losses, sizes, how, per_task))
    if not each_has_its_own:
        loss = 0.0
        for task in range(tasks):
            loss += losses[task]
        store(output, 0, type(load(scores, 0))(loss / total if is_mean and total != 0 else loss))
    return int64(-1)


@inlined
def _highest(scores: Array, at: int, size: int, lanes: Array) -> float:
    """The largest of a row's scores; of those that are numbers, or NaN."""
    whole = size // LANES * LANES
    for k in range(LANES):
        store(lanes, k, -math.inf)
    for k in range(size - whole):
        store(lanes, k, load(scores, at + whole + k))
    for i in range(0, whole, LANES):
        for k in range(LANES):
            x, before = load(scores, at + i + k), load(lanes, k)
            store(lanes, k, x if x > before else before)
    for half in HALVES:
        for k in range(half):
            x, before = load(lanes, half + k), load(lanes, k)
            store(lanes, k, x if x > before else before)
    return load(lanes, 0)


@inlined
def _sum_of_powers(scores: Array, at: int, size: int, highest: float, lanes: Array) -> float:
    """The sum of e to the power of each score's difference to the highest one."""
    whole = size // LANES * LANES
    rest = size - whole
    filled = (rest + FILLED - 1) // FILLED * FILLED  # a loop over few numbers would not go through vectors
    for k in range(LANES):
        store(lanes, k, 0)
    for k in range(filled):
        store(lanes, k, -math.inf)  # whose power is as good as 0
    for k in range(rest):
        store(lanes, k, load(scores, at + whole + k) - highest)
    for k in range(filled):
        store(lanes, k, exp(load(lanes, k)))
    for i in range(0, whole, LANES):
        for k in range(LANES):
            store(lanes, k, load(lanes, k) + exp(load(scores, at + i + k) - highest))
    for half in HALVES:
        for k in range(half):
            store(lanes, k, load(lanes, k) + load(lanes, half + k))
    return load(lanes, 0)


@inlined
def _loss_at(
    scores: Array, place: int, highest: float, log_of_sum: float, weights: Array, chosen: int, weighted: bool
) -> float:
    """The loss of a sample whose class has its score at that place."""
    loss = log_of_sum - (load(scores, place) - highest)
    return loss * load(weights, chosen) if weighted else loss


@native
def _loss_of_rows(
    task: int,
    scores: Array,
    labels: Array,
    weights: Array,
    output: Array,
    log_prob: Array,
    losses: Array,
    sizes: tuple[int, ...],
    how: tuple[bool, bool, bool, bool, int],
    per_task: int,
) -> None:
    samples, classes, _ = sizes
    weighted, each_has_its_own, _, is_kept, ignore_index = how
    number_type = type(load(scores, 0))  # float32 for half numbers
    lanes = np.empty(LANES, number_type)
    together = 0.0
    for row in range(task * per_task, min(samples, (task + 1) * per_task)):
        at, chosen = row * classes, int64(load(labels, row))
        loss = 0.0
        if is_kept or chosen != ignore_index:
            highest = _highest(scores, at, classes, lanes)
            log_of_sum = math.log(np.float64(_sum_of_powers(scores, at, classes, highest, lanes)))
            if is_kept:
                rest = number_type(log_of_sum)
                for i in range(classes):
                    store(log_prob, at + i, load(scores, at + i) - highest - rest)
            if chosen != ignore_index:
                loss = _loss_at(scores, at + chosen, highest, log_of_sum, weights, chosen, weighted)
        together += loss
        if each_has_its_own:
            store(output, row, number_type(loss))
    losses[task] = together


@inlined
def _look_at_columns(scores: Array, at: int, classes: int, inner: int, count: int, highest: Array, sums: Array) -> None:
    """The largest score of each of `count` columns, and the sum of e to the power of the differences to it."""
    for j in range(count):
        store(highest, j, load(scores, at + j))
        store(sums, j, 0)
    for i in range(1, classes):
        for j in range(count):
            x, before = load(scores, at + i * inner + j), load(highest, j)
            store(highest, j, x if x > before else before)
    for i in range(classes):
        for j in range(count):
            store(sums, j, load(sums, j) + exp(load(scores, at + i * inner + j) - load(highest, j)))


@native
def _loss_of_short_rows(
    task: int,
    scores: Array,
    labels: Array,
    weights: Array,
    output: Array,
    log_prob: Array,
    losses: Array,
    sizes: tuple[int, ...],
    how: tuple[bool, bool, bool, bool, int],
    per_task: int,
) -> None:
    """Rows that would not fill a vector are transposed, some at a time, and go through it side by side."""
    samples, classes, _ = sizes
    weighted, each_has_its_own, _, is_kept, ignore_index = how
    number_type = type(load(scores, 0))  # float32 for half numbers
    transposed = np.empty(classes * TRANSPOSED, number_type)
    highest, sums = np.empty(TRANSPOSED, number_type), np.empty(TRANSPOSED, number_type)
    together = 0.0
    for first in range(task * per_task * TRANSPOSED, min(samples, (task + 1) * per_task * TRANSPOSED), TRANSPOSED):
        count, at = min(TRANSPOSED, samples - first), first * classes
        for j in range(count):
            for i in range(classes):
                store(transposed, i * TRANSPOSED + j, load(scores, at + j * classes + i))
        _look_at_columns(transposed, 0, classes, TRANSPOSED, count, highest, sums)
        for j in range(count):
            log_of_sum = math.log(np.float64(load(sums, j)))
            above, rest = load(highest, j), number_type(log_of_sum)
            if is_kept:
                for i in range(classes):
                    store(log_prob, at + j * classes + i, load(transposed, i * TRANSPOSED + j) - above - rest)
            chosen, loss = int64(load(labels, first + j)), 0.0
            if chosen != ignore_index:
                loss = _loss_at(transposed, chosen * TRANSPOSED + j, above, log_of_sum, weights, chosen, weighted)
            together += loss
            if each_has_its_own:
                store(output, first + j, number_type(loss))
    losses[task] = together


@native
def _loss_of_columns(
    task: int,
    scores: Array,
    labels: Array,
    weights: Array,
    output: Array,
    log_prob: Array,
    losses: Array,
    sizes: tuple[int, ...],
    how: tuple[bool, bool, bool, bool, int],
    per_task: int,
) -> None:
    samples, classes, inner = sizes
    weighted, each_has_its_own, _, is_kept, ignore_index = how
    number_type = type(load(scores, 0))  # float32 for half numbers
    width = min(COLUMNS, inner)
    across = (inner + width - 1) // width
    highest, sums = np.empty(width, number_type), np.empty(width, number_type)
    together = 0.0
    for block in range(task * per_task, min(samples * across, (task + 1) * per_task)):
        first = block % across * width
        count = min(width, inner - first)
        sample = block // across * inner + first
        at = block // across * classes * inner + first
        _look_at_columns(scores, at, classes, inner, count, highest, sums)
        for j in range(count):
            log_of_sum = math.log(np.float64(load(sums, j)))
            store(sums, j, number_type(log_of_sum))
            chosen, loss = int64(load(labels, sample + j)), 0.0
            if chosen != ignore_index:
                place = at + chosen * inner + j
                loss = _loss_at(scores, place, load(highest, j), log_of_sum, weights, chosen, weighted)
            together += loss
            if each_has_its_own:
                store(output, sample + j, number_type(loss))
        if is_kept:
            for i in range(classes):
                for j in range(count):
                    x = load(scores, at + i * inner + j)
                    store(log_prob, at + i * inner + j, x - load(highest, j) - load(sums, j))
    losses[task] = together


@native
def count_samples(
    label: Array, weight: Array, classes: int, ignore_index: int, weighted: bool, scheduler: int
) -> tuple[int, float]:
    """The first label that is no class, or -1, and what the samples count for together, in float64."""
    tasks = (label.size + LABELS - 1) // LABELS
    first_bad, totals = np.empty(tasks, np.int64), np.empty(tasks, np.float64)
    parallel(scheduler, tasks, _count_some, (label, weight, classes, ignore_index, weighted, first_bad, totals))
    total = 0.0
    for task in range(tasks):
        if first_bad[task] >= 0:
            return first_bad[task], total
        total += totals[task]
    return int64(-1), total


@native
def _count_some(
    task: int,
    label: Array,
    weight: Array,
    classes: int,
    ignore_index: int,
    weighted: bool,
    first_bad: Array,
    totals: Array,
) -> None:
    total, bad = 0.0, int64(-1)
    for i in range(task * LABELS, min(label.size, (task + 1) * LABELS)):
        chosen = int64(load(label, i))
        if chosen == ignore_index:
            continue
        if chosen < 0 or chosen >= classes:
            bad = int64(i)
            break
        total += load(weight, chosen) if weighted else 1.0
    first_bad[task], totals[task] = bad, total


# Of a loss that comes in chunks of rows: what is added up, and what is multiplied with at the end.
SUM, SHARE, FACTOR = 0, 1, 2


@native
def begin_chunks(
    labels: Array, weights: Array, scale: Array, numbers: Array, classes: int, how: tuple[bool, int], scheduler: int
) -> int:
    """The first label that is no class, or -1; `numbers` get their beginning, gradients a factor times `scale`."""
    is_mean, ignore_index = how
    bad, total = count_samples(labels, weights, classes, ignore_index, weights.size > 0, scheduler)
    if bad >= 0:
        return bad
    numbers[SUM] = 0.0
    numbers[SHARE] = 1.0 / total if is_mean and total != 0 else 1.0
    numbers[FACTOR] = numbers[SHARE] * (load(scale, 0) if scale.size > 0 else 1.0)
    return int64(-1)


@native
def loss_of_chunk(
    scores: Array,
    labels: Array,
    weights: Array,
    numbers: Array,
    first: int,
    sizes: tuple[int, int],
    how: tuple[bool, int],
    scheduler: int,
) -> None:
    """Adds the losses of some rows of labels, from `first` on; their scores may be replaced by the gradient."""
    rows, classes = sizes
    per_task = max(1, TASK // max(classes, 1))
    tasks = (rows + per_task - 1) // per_task
    losses = np.empty(tasks, np.float64)
    work = (scores, labels, weights, numbers, losses, first, sizes, how, per_task)
    parallel(scheduler, tasks, _loss_of_some_rows, work)
    for task in range(tasks):
        numbers[SUM] += losses[task]


@native
def _loss_of_some_rows(
    task: int,
    scores: Array,
    labels: Array,
    weights: Array,
    numbers: Array,
    losses: Array,
    first: int,
    sizes: tuple[int, int],
    how: tuple[bool, int],
    per_task: int,
) -> None:
    rows, classes = sizes
    is_replaced, ignore_index = how
    number_type = type(load(scores, 0))
    lanes = np.empty(LANES, number_type)
    weighted, together = weights.size > 0, 0.0
    for row in range(task * per_task, min(rows, (task + 1) * per_task)):
        at, chosen = row * classes, int64(load(labels, first + row))
        if chosen == ignore_index:
            if is_replaced:
                for i in range(classes):
                    store(scores, at + i, number_type(0))
            continue
        highest = _highest(scores, at, classes, lanes)
        powers = np.float64(_sum_of_powers(scores, at, classes, highest, lanes))
        together += _loss_at(scores, at + chosen, highest, math.log(powers), weights, chosen, weighted)
        if is_replaced:
            each = numbers[FACTOR] * (load(weights, chosen) if weighted else 1.0)
            right = exp(load(scores, at + chosen) - highest)
            share = number_type(each / powers)
            for i in range(classes):
                store(scores, at + i, exp(load(scores, at + i) - highest) * share)
            store(scores, at + chosen, number_type((right / powers - 1.0) * each))
    losses[task] = together
