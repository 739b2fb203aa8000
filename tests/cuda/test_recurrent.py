"""Recurrent operators whose states need the largest tiles, more of them than there are processors."""

import pytest
import torch
from tests.checks import DEVICE

from onnxgrad import gru_grad, gru_training, lstm_grad, lstm_training, rnn_grad

pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
STEPS, ROWS, INPUTS, HIDDEN, FEW = 2, 1100, 8, 2048, 16
GATES = {"gru": 3, "lstm": 4, "rnn": 1}


def _results(name, X, W, R, dHAll):
    """Every state and the gradient of X."""
    if name == "rnn":
        HAll = dHAll.clone()  # its gradient takes any states
        return HAll, rnn_grad(X, W, R, None, None, None, HAll, dHAll)[0]
    train, grad = (gru_training, gru_grad) if name == "gru" else (lstm_training, lstm_grad)
    kept = train(X, W, R)
    if name == "gru":
        HAll, _, ZRH = kept
        return HAll, grad(X, W, R, None, None, None, HAll, ZRH, dHAll)[0]
    HAll, _, _, CAll, IOFC = kept
    return HAll, grad(X, W, R, None, None, None, HAll, CAll, IOFC, dHAll)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", GATES)
def test_rows_are_computed_alike_in_a_batch_of_any_size(name, dtype):
    torch.manual_seed(0)
    shapes = (
        (STEPS, ROWS, INPUTS), (1, GATES[name] * HIDDEN, INPUTS), (1, GATES[name] * HIDDEN, HIDDEN),
        (STEPS, 1, ROWS, HIDDEN),
    )  # fmt: skip
    X, W, R, dHAll = (torch.randn(shape, dtype=dtype, device="cuda") * 0.05 for shape in shapes)
    all_rows = _results(name, X, W, R, dHAll)
    few_rows = _results(name, X[:, :FEW].contiguous(), W, R, dHAll[:, :, :FEW].contiguous())
    for whole, part, axis in zip(all_rows, few_rows, (2, 1), strict=True):
        bound = (1e-3 if dtype == torch.float32 else 1e-12) * part.abs().max()
        assert (whole.narrow(axis, 0, FEW) - part).abs().max() <= bound
