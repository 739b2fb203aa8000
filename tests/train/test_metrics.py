"""Metrics of arrays by hand, and what they refuse."""

import numpy as np
import pytest
from tests.checks import raises

from onnxgrad.train import metrics


def test_metrics():
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
    with raises(ValueError, "Accuracy: 't' has shape [2], expected [3] for the classes of 'y' along axis 1"):
        metrics.Accuracy("y", "t")(outputs, {"t": np.array([0, 1])})
    with raises(ValueError, "Accuracy: axis is 2, but 'y' has 2 dimensions"):
        metrics.Accuracy("y", "t", axis=2)(outputs, batch)
    with raises(ValueError, "Accuracy: top is 0, expected at least 1"):
        metrics.Accuracy("y", top=0)
