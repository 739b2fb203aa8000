"""GRUTraining and GRUGrad raise these errors, in these words."""

import numpy as np
import pytest
from tests.checks import check_refused, poisoned
from tests.gru_cases import GRADIENTS, case

from onnxgrad import gru_grad, gru_training

F32 = np.dtype(np.float32)
S, N, INPUTS, H = 3, 4, 5, 6
GIVEN = case(S, N, INPUTS, H, dtype=np.float32)
X, W, R, B, _, HT0, DHALL, DHFINAL = GIVEN
BACKWARD = dict(
    zip(["X", "W", "R", "B", "SL", "Ht0", "HAll", "ZRH", "dHAll", "dHFinal"], GIVEN.backward(), strict=True)
)
TYPES = "float16, float32, float64 or bfloat16"
NAMES = "Sigmoid, Tanh, Relu, HardSigmoid, LeakyRelu, ScaledTanh, Elu, Softsign, Softplus, ThresholdedRelu, Affine"


def lengths(*values):
    return np.array(values, np.int32)


BOTH = [
    (ValueError, "X has shape [3, 4], expected three dimensions [S,N,I]", {"X": X[..., 0]}),
    (ValueError, "W has shape [18, 5], expected three dimensions [D,3H,I]", {"W": W[0]}),
    (ValueError, "R has shape [18, 6], expected three dimensions [D,3H,H]", {"R": R[0]}),
    (ValueError, "R has shape [1, 17, 6], expected [1, 18, 6]", {"R": R[:, 1:]}),
    (ValueError, "R has shape [1, 18, 5], expected [1, 15, 5]", {"R": R[..., 1:]}),
    (ValueError, "W has shape [1, 17, 5], expected [1, 18, 5]", {"W": W[:, 1:]}),
    (ValueError, "W has shape [1, 18, 4], expected [1, 18, 5]", {"W": W[..., 1:]}),
    (ValueError, "R has shape [1, 18, 6], expected [2, 18, 6]", {"direction": "bidirectional"}),
    (ValueError, "R has shape [2, 18, 6], expected [1, 18, 6]", {"R": np.repeat(R, 2, axis=0)}),
    (ValueError, "B has shape [36], expected [1, 36]", {"B": B[0]}),
    (ValueError, "B has shape [1, 18], expected [1, 36]", {"B": B[:, :18]}),
    (ValueError, "Ht0 has shape [4, 6], expected [1, 4, 6]", {"Ht0": HT0[0]}),
    (ValueError, "Ht0 has shape [1, 3, 6], expected [1, 4, 6]", {"Ht0": HT0[:, 1:]}),
    (ValueError, "SL has shape [3], expected [4]", {"SL": lengths(1, 2, 3)}),
    (ValueError, "SL has shape [1, 4], expected [4]", {"SL": lengths(1, 2, 3, 3)[None]}),
    (ValueError, "SL has shape [], expected [4]", {"SL": 3}),
    (ValueError, "SL[2] is 4, expected 0 to 3, the number of steps", {"SL": lengths(1, 2, 4, -1)}),
    (ValueError, "SL[1] is -1, expected 0 to 3, the number of steps", {"SL": [1, -1, 3, 3]}),
    (TypeError, "SL is int64, expected int32", {"SL": np.array([1, 2, 3, 3])}),
    (ValueError, "SL holds values that do not fit int32", {"SL": [1, 2, 3, 2**31]}),
    (TypeError, f"X is int64, expected {TYPES}", {"X": X.astype(np.int64)}),
    (TypeError, f"X is None, expected an array of {TYPES}", {"X": None}),
    (TypeError, f"W is a list, expected a NumPy array of {TYPES}", {"W": W.tolist()}),
    (TypeError, "R is float64, expected float32 as X is", {"R": R.astype(np.float64)}),
    (TypeError, "Ht0 is float16, expected float32 as X is", {"Ht0": HT0.astype(np.float16)}),
    (ValueError, "hidden_size is 5, expected 6 as the last dimension of R", {"hidden_size": 5}),
    (TypeError, "hidden_size is 6.0, expected int", {"hidden_size": 6.0}),
    (ValueError, "linear_before_reset is 2, expected 0 or 1", {"linear_before_reset": 2}),
    (TypeError, "linear_before_reset is True, expected int", {"linear_before_reset": True}),
    (ValueError, "direction is 'both', expected one of forward, reverse, bidirectional", {"direction": "both"}),
    (TypeError, "direction is None, expected str", {"direction": None}),
    (ValueError, "clip is 0.0, expected more than 0, or nothing for no clipping", {"clip": 0}),
    (ValueError, "clip is -1.0, expected more than 0, or nothing for no clipping", {"clip": -1.0}),
    (ValueError, "clip is nan, expected more than 0, or nothing for no clipping", {"clip": float("nan")}),
    (TypeError, "clip is '1', expected float", {"clip": "1"}),
    (ValueError, "activations has 1 names, expected 2", {"activations": ["Tanh"]}),
    (ValueError, "activations has 4 names, expected 2", {"activations": ["Tanh"] * 4}),
    (ValueError, f"activations names 'Gelu', expected some of {NAMES}", {"activations": ["Sigmoid", "Gelu"]}),
    (TypeError, "activations is a str, expected a list of str", {"activations": "Tanh"}),
    (TypeError, "activations is 3, expected str", {"activations": ["Tanh", 3]}),
    (TypeError, "activation_alpha is a float, expected a list of float", {"activation_alpha": 0.5}),
    (TypeError, "activation_alpha is a ndarray, expected a list of float", {"activation_alpha": np.array(0.5)}),
    (TypeError, "activation_beta is 'x', expected float", {"activation_beta": ["x"]}),
    (ValueError, "activation_alpha has 1 values more than these activations take", {"activation_alpha": [0.5]}),
    (ValueError, "activation_beta has 2 values more than these activations take", {"activation_beta": [0.5, 1]}),
    (ValueError, "activation_alpha is -0.5 for Elu, expected at least 0: below, y does not determine dy/dx",
     {"activations": ["Sigmoid", "Elu"], "activation_alpha": [-0.5]}),
    (ValueError, "activation_alpha is nan for LeakyRelu, expected at least 0: below, y does not determine dy/dx",
     {"activations": ["LeakyRelu", "Tanh"], "activation_alpha": [float("nan")]}),
]  # fmt: skip
ATTRIBUTES = "hidden_size, linear_before_reset, direction, activations, activation_alpha, activation_beta, clip"
GRAD_ONLY = [
    (ValueError, "HAll has shape [3, 4, 6], expected [3, 1, 4, 6]", {"HAll": BACKWARD["HAll"][:, 0]}),
    (ValueError, "HAll has shape [2, 1, 4, 6], expected [3, 1, 4, 6]", {"HAll": BACKWARD["HAll"][1:]}),
    (ValueError, "ZRH has shape [3, 1, 4, 6], expected [3, 1, 4, 18]", {"ZRH": BACKWARD["HAll"]}),
    (ValueError, "dHAll has shape [3, 1, 4, 5], expected [3, 1, 4, 6]", {"dHAll": DHALL[..., 1:]}),
    (ValueError, "dHFinal has shape [4, 6], expected [1, 4, 6]", {"dHFinal": DHFINAL[0]}),
    (TypeError, "ZRH is float64, expected float32 as X is", {"ZRH": BACKWARD["ZRH"].astype(np.float64)}),
    (TypeError, f"HAll is None, expected an array of {TYPES}", {"HAll": None}),
    (TypeError, "has no argument 'dHLast', expected one of X, W, R, B, SL, Ht0, HAll, ZRH, dHAll, dHFinal, "
     f"{ATTRIBUTES}, outputs", {"dHLast": DHFINAL}),
    (ValueError, "outputs names 'dh0', expected some of dX, dW, dR, dB, dH0", {"outputs": ["dX", "dh0"]}),
    (TypeError, "outputs is 5, expected some of dX, dW, dR, dB, dH0", {"outputs": 5}),
]  # fmt: skip


def training_out():
    return tuple(poisoned(s, F32) for s in ((S, 1, N, H), (1, N, H), (S, 1, N, 3 * H)))


def grad_out():
    return tuple(poisoned(BACKWARD[name[1:] if name != "dH0" else "Ht0"].shape, F32) for name in GRADIENTS)


@pytest.mark.parametrize(("error", "text", "change"), BOTH)
def test_bad_calls_of_training(error, text, change):
    forward = dict(zip(["X", "W", "R", "B", "SL", "Ht0"], GIVEN.forward, strict=True))
    check_refused(gru_training, error, text, out=training_out(), **{**forward, **change})


@pytest.mark.parametrize(("error", "text", "change"), BOTH + GRAD_ONLY)
def test_bad_calls_of_the_gradient(error, text, change):
    check_refused(gru_grad, error, text, out=grad_out(), **{**BACKWARD, **change})


def test_missing_arguments():
    check_refused(gru_training, TypeError, "R is missing", X, W)
    check_refused(gru_grad, TypeError, "HAll is missing", X, W, R, B, None, HT0)
    check_refused(
        gru_training,
        TypeError,
        f"has no argument 'layout', expected one of X, W, R, B, SL, Ht0, {ATTRIBUTES}",
        X,
        W,
        R,
        layout=1,
    )
