"""Metrics against scikit-learn, over uneven batches; by hand where it has none, and what they refuse."""

import math

import numpy as np
import pytest
from sklearn import metrics as peer
from tests.checks import raises

from onnxgrad.train import metrics

CLASSES = 5
CUTS = (3, 4, 20, 21)  # uneven batches
IGNORED = -100


def over_batches(metric, scores, target, cuts=CUTS):
    """The result of all batches, as evaluate() merges them."""
    batches = zip(np.split(scores, cuts), np.split(target, cuts), strict=True)
    return metric.result(metric.merge([metric.of_batch({"y": s}, {"t": t}) for s, t in batches]))


def logits(count=57, classes=CLASSES, seed=0, absent=()):
    """Scores and targets with ties, some of them right; `absent` classes neither occur nor are predicted."""
    rng = np.random.default_rng(seed)
    scores = np.round(rng.standard_normal((count, classes)), 1).astype(np.float32)
    target = np.where(rng.random(count) < 0.5, scores.argmax(1), rng.integers(0, classes, count))
    for absentee in absent:
        scores[:, absentee] = -9
        target[target == absentee] = 0
    return scores, target


def softmax(scores):
    exponents = np.exp(scores - scores.max(-1, keepdims=True, initial=-99))
    return exponents / exponents.sum(-1, keepdims=True)


RATIOS = [
    (metrics.F1, peer.f1_score),
    (metrics.Precision, peer.precision_score),
    (metrics.Recall, peer.recall_score),
]


@pytest.mark.parametrize("average", ["macro", "micro", "weighted"])
@pytest.mark.parametrize("absent", [(), (1, 3)])
@pytest.mark.parametrize("mine, theirs", RATIOS)
def test_of_classes(mine, theirs, absent, average):
    scores, target = logits(absent=absent)
    kept = np.arange(len(target)) % 4 > 0
    given = np.where(kept, target, IGNORED)
    found = over_batches(mine("y", "t", average=average, ignore_index=IGNORED), scores, given)
    expected = theirs(target[kept], scores.argmax(1)[kept], average=average, zero_division=0)
    assert found == pytest.approx(expected, rel=1e-12)
    if average == "macro":  # the default
        assert over_batches(mine("y", "t"), scores, target) == pytest.approx(
            theirs(target, scores.argmax(1), average="macro", zero_division=0), rel=1e-12
        )


@pytest.mark.parametrize("mine, theirs", RATIOS)
def test_of_two_classes(mine, theirs):
    scores, target = logits(classes=2)
    expected = theirs(target, scores.argmax(1))
    assert over_batches(mine("y", "t"), scores, target) == pytest.approx(expected)
    single = (scores[:, 1:] - scores[:, :1]).astype(np.float32)  # of Sigmoid
    of_single = mine("y", "t", threshold=0)
    assert over_batches(of_single, single, target[:, None].astype(np.float32)) == pytest.approx(
        theirs(target, single[:, 0] > 0)
    )
    macro = mine("y", "t", threshold=0, average="macro")
    assert over_batches(macro, single[:, 0], target) == pytest.approx(theirs(target, single[:, 0] > 0, average="macro"))
    nothing = np.full_like(single, -1)
    assert over_batches(of_single, nothing, target[:, None]) == theirs(target, nothing > 0, zero_division=0) == 0.0


@pytest.mark.parametrize("average", ["macro", "micro", "weighted"])
@pytest.mark.parametrize("mine, theirs", RATIOS)
def test_of_labels(mine, theirs, average):
    scores, _ = logits()
    target = (logits(seed=1)[0] > 0.4).astype(np.float32)
    target[:, 2] = 0  # a label that never occurs, and is not predicted either
    scores[:, 2] = -1
    found = over_batches(mine("y", "t", threshold=0.0, average=average), scores, target)
    assert found == pytest.approx(theirs(target, scores > 0, average=average, zero_division=0))
    target[::3, 1] = -1  # not known
    some = target[:, 1] >= 0
    expected = theirs(target[some, 1], scores[some, 1] > 0)
    single = mine("y", "t", threshold=0.0, ignore_index=-1)
    assert over_batches(single, scores[:, 1], target[:, 1]) == pytest.approx(expected)


@pytest.mark.parametrize("absent", [(), (1, 3)])
def test_mean_iou_and_confusion_matrix_of_pixels(absent):
    scores, target = logits(57 * 12, absent=absent)
    images = np.moveaxis(scores.reshape(57, 4, 3, CLASSES), -1, 1)
    pixels = target.reshape(57, 4, 3)
    predicted = scores.argmax(1)
    expected = peer.jaccard_score(target, predicted, average="macro")
    assert over_batches(metrics.MeanIoU("y", "t"), images, pixels) == pytest.approx(expected)
    kept = target != 2
    masked = metrics.MeanIoU("y", "t", ignore_index=2)
    expected = peer.jaccard_score(target[kept], predicted[kept], average="macro", zero_division=0)
    assert over_batches(masked, images, pixels) == pytest.approx(expected)
    found = over_batches(metrics.ConfusionMatrix("y", "t"), images, pixels)
    assert found == peer.confusion_matrix(target, predicted, labels=range(CLASSES)).tolist()
    two = metrics.ConfusionMatrix("y", "t", threshold=0.5, classes=("no", "yes"))
    found = over_batches(two, scores[:, 0], target == 0)
    assert found == peer.confusion_matrix(target == 0, scores[:, 0] > 0.5).tolist()


@pytest.mark.parametrize("as_logits", [True, False])
@pytest.mark.parametrize("classes", [2, CLASSES])
def test_auc_of_classes(classes, as_logits):
    scores, target = logits(classes=classes)
    probabilities = softmax(scores.astype(np.float64))
    given = target.copy()
    given[::5] = IGNORED
    counted = given != IGNORED
    of_all, of_some = (
        peer.roc_auc_score(target[k], probabilities[k, 1] if classes == 2 else probabilities[k], multi_class="ovr")
        for k in (slice(None), counted)
    )
    shown = scores if as_logits else probabilities
    assert over_batches(metrics.AUC("y", "t"), shown, target) == pytest.approx(of_all, rel=1e-12)
    some = metrics.AUC("y", "t", ignore_index=IGNORED)
    assert over_batches(some, shown, given) == pytest.approx(of_some, rel=1e-12)


def test_auc_of_scores_and_of_labels():
    scores, _ = logits()
    target = (logits(seed=1)[0] > 0.4).astype(np.float32)
    auc = metrics.AUC("y", "t")
    assert over_batches(auc, scores, target) == pytest.approx(peer.roc_auc_score(target, scores, average="macro"))
    one = peer.roc_auc_score(target[:, 0], scores[:, 0])
    assert over_batches(auc, scores[:, 0], target[:, 0]) == pytest.approx(one)
    assert over_batches(auc, scores[:, :1], target[:, :1].astype(np.int64)) == pytest.approx(one)
    assert over_batches(auc, np.zeros(57, np.float32), target[:, 0]) == 0.5  # all are ties
    target[:, 3] = 1  # a label that all have says nothing, whatever its scores
    others = [0, 1, 2, 4]
    expected = peer.roc_auc_score(target[:, others], scores[:, others])
    assert over_batches(auc, scores, target) == pytest.approx(expected)
    assert math.isnan(over_batches(auc, scores[:, 3], target[:, 3]))
    far = np.array([[0, 50], [0, 60], [0, 70], [0, 80]], np.float32)  # all of them probabilities of 1
    assert over_batches(auc, far, np.array([0, 0, 1, 1]), (2,)) == 1.0


@pytest.mark.parametrize("kind", ["logits", "logs", "probabilities"])
def test_perplexity(kind):
    scores, target = logits(57 * 3)
    probabilities = softmax(scores.astype(np.float64)).reshape(57, 3, CLASSES)
    shown = {"logits": scores.reshape(57, 3, CLASSES), "logs": np.log(probabilities), "probabilities": probabilities}
    target = target.reshape(57, 3)
    target[:, 2] = np.where(np.arange(57) < 30, IGNORED, target[:, 2])
    target[3] = IGNORED  # a batch without anything
    kept = target != IGNORED
    expected = math.exp(peer.log_loss(target[kept], probabilities[kept], labels=range(CLASSES)))
    found = over_batches(metrics.Perplexity("y", "t", axis=-1, ignore_index=IGNORED), shown[kind], target)
    assert found == pytest.approx(expected, rel=1e-5 if kind == "logits" else 1e-12)
    nothing = metrics.Perplexity("y", "t", axis=2, ignore_index=IGNORED)
    assert math.isnan(over_batches(nothing, scores.reshape(57, 3, CLASSES), np.full((57, 3), IGNORED)))


@pytest.mark.parametrize("top", [1, 2])
def test_accuracy_counts_what_it_does_not_ignore(top):
    scores, target = logits()
    given = np.where(np.arange(57) < 19, IGNORED, target)  # whole batches, and most of another
    found = over_batches(metrics.Accuracy("y", "t", top=top, ignore_index=IGNORED), scores, given)
    assert found == pytest.approx(peer.top_k_accuracy_score(target[19:], scores[19:] - np.arange(5) * 1e-5, k=top))


def test_of_one_batch_by_hand():
    scores = np.array([[3, 2, 1], [1, 2, 3], [2, 3, 1]], np.float32)
    outputs, batch = {"y": scores}, {"t": np.array([0, 1, -1])}
    assert metrics.Accuracy("y", "t")(outputs, batch) == pytest.approx(1 / 3)
    assert metrics.Accuracy("y", "t", ignore_index=-1)(outputs, batch) == 0.5
    assert metrics.Accuracy("y", "t", top=2)(outputs, batch) == pytest.approx(2 / 3)
    assert metrics.Accuracy("y", "t")(outputs, {"t": np.eye(3)[[0, 2, 2]]}) == pytest.approx(2 / 3)
    pixels = np.moveaxis(scores[None], 2, 1)  # classes along axis 1
    assert metrics.Accuracy("y", "t")({"y": pixels}, {"t": np.array([[0, 1, 1]])}) == pytest.approx(2 / 3)
    assert metrics.BinaryAccuracy("y", "t", threshold=1.5)(outputs, {"t": scores > 1}) == 1.0
    assert metrics.MAE("y", "t")(outputs, {"t": scores + 2}) == 2.0
    assert metrics.MSE("y", "t")(outputs, {"t": scores + 2}) == 4.0


def test_errors_are_means_over_numbers_whatever_the_batches():
    scores, _ = logits()
    target = logits(seed=1)[0]
    assert over_batches(metrics.MAE("y", "t"), scores, target) == pytest.approx(
        peer.mean_absolute_error(target, scores), rel=1e-6
    )
    assert over_batches(metrics.MSE("y", "t"), scores, target) == pytest.approx(
        peer.mean_squared_error(target, scores), rel=1e-6
    )


TWO, THREE = {"y": np.zeros((4, 2), np.float32)}, {"y": np.zeros((4, 3), np.float32)}
ONE = {"y": np.zeros((4, 1), np.float32)}
IN_THREE = {"t": np.array([0, 1, 2, 0])}


@pytest.mark.parametrize("metric, outputs, batch, sentence", [
    (metrics.Accuracy("y", "t"), THREE, {"t": np.array([0, 1])},
     "Accuracy: 't' has shape [2], expected [4] for the classes of 'y' along axis 1"),
    (metrics.Accuracy("y", "t", axis=2), THREE, IN_THREE, "Accuracy: axis is 2, but 'y' has 2 dimensions"),
    (metrics.F1("y", "t"), TWO, IN_THREE, "F1: 't' has the class 2, expected 0 to 1; ignore_index=2 leaves it out"),
    (metrics.F1("y", "t", average="binary"), THREE, IN_THREE,
     "F1: average is 'binary', but 'y' has 3 classes: take 'macro', 'micro' or 'weighted'"),
    (metrics.Recall("y", "t"), ONE, {"t": ONE["y"]},
     "Recall: 'y' is one score for each example: set the threshold above which it predicts class 1 (0 for logits, 0.5 "
     "for probabilities)"),
    (metrics.F1("y", "t", threshold=0.0), THREE, IN_THREE, "F1: 't' has shape [4], but 'y' has [4, 3]"),
    (metrics.ConfusionMatrix("y", "t", threshold=0.0), THREE, {"t": THREE["y"]},
     "ConfusionMatrix: 'y' has 3 labels, of which any may apply: there is a matrix of classes only, without a "
     "threshold"),
    (metrics.ConfusionMatrix("y", "t", classes=("a", "b")), THREE, IN_THREE,
     "ConfusionMatrix: classes has 2 names, but 'y' has 3 classes"),
    (metrics.AUC("z", "t"), THREE, IN_THREE, "AUC: 'z' is not in the outputs, which has 'y'"),
    (metrics.AUC("y", "u"), THREE, IN_THREE, "AUC: 'u' is not in the batch, which has 't'"),
])  # fmt: skip
def test_what_is_refused(metric, outputs, batch, sentence):
    with raises(ValueError, sentence):
        metric(outputs, batch)


def test_settings_that_are_refused():
    with raises(ValueError, "Accuracy: top is 0, expected at least 1"):
        metrics.Accuracy("y", top=0)
    with raises(ValueError, "Recall: average is 'mean', expected one of auto, binary, macro, micro, weighted"):
        metrics.Recall("y", average="mean")


def test_targets_may_be_distributions():
    scores, target = logits()
    for kind in (metrics.Accuracy, metrics.F1, metrics.MeanIoU, metrics.Perplexity):
        assert over_batches(kind("y", "t"), scores, np.eye(5)[target]) == over_batches(kind("y", "t"), scores, target)
