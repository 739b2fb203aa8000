"""LSTMTraining, LSTMGrad and RNNGrad as ONNX functions, on stock onnxruntime and in onnx.reference."""

import numpy as np
import pytest
from tests import lstm_cases, rnn_cases
from tests.functions.models import FLOATS, check_functions
from tests.lstm_cases import GRADIENTS, OPTIONALS, case

from onnxgrad import lstm_grad, lstm_training, rnn_grad


def check_lstm(given, **attributes):
    check_functions(lstm_training, (given.forward, attributes))
    check_functions(lstm_grad, (given.backward(**attributes), attributes))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("direction", lstm_cases.DIRECTIONS)
def test_lstm(direction, dtype):
    check_lstm(case(direction=direction, lengths=True, dtype=dtype), direction=direction)


@pytest.mark.slow
@pytest.mark.parametrize("missing", [("B",), ("P",), ("Ht0", "dHAll"), ("Ct0", "dHFinal", "dCFinal"), OPTIONALS])
def test_lstm_without_optionals(missing):
    check_lstm(case(lengths=True).without(*missing), clip=0.5)


def test_lstm_settings():
    check_lstm(case(lengths=True), clip=0.25, input_forget=1)
    # Attributes are float32: only numbers that this can say give the same in float64.
    names = ["HardSigmoid", "Relu", "Softsign", "Sigmoid", "Elu", "ScaledTanh"]
    check_lstm(case(direction="bidirectional"), direction="bidirectional", activations=names, activation_alpha=[0.25])


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"S": 0}, {"N": 0}, {"inputs": 0}, {"H": 0}, {"S": 1, "N": 1, "inputs": 1, "H": 1}])
def test_of_no_size(sizes):
    check_lstm(case(**sizes), clip=2.0)
    check_functions(rnn_grad, (rnn_cases.case(**sizes).backward(clip=2.0), {"clip": 2.0}))


@pytest.mark.slow
def test_lstm_of_every_kind_in_one_model():
    both = "bidirectional"
    kinds = [
        (case(lengths=True), {}),
        (case(lengths=True, seed=1).without("B", "dHAll", "P"), {"direction": "reverse", "clip": 0.5}),
        (case(direction=both, seed=2, dtype=np.float32).without("Ht0", "dHFinal"), {"direction": both}),
        (case(seed=4).without("Ct0", "dCFinal"), {"input_forget": 1, "hidden_size": 2}),
    ]
    check_functions(lstm_training, *((c.forward, kw) for c, kw in kinds))
    check_functions(lstm_grad, *((c.backward(**kw), kw) for c, kw in kinds))


@pytest.mark.slow
def test_some_outputs():
    check_functions(lstm_training, (case().forward, {}), wanted=["HAll", "CAll", "IOFC"])
    for name in GRADIENTS:
        check_functions(lstm_grad, (case().backward(), {}), wanted=[name])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("direction", rnn_cases.DIRECTIONS)
def test_rnn(direction, dtype):
    given = rnn_cases.case(direction=direction, lengths=True, dtype=dtype)
    kinds = [(given, None), (given.without("B", "Ht0", "dHAll"), 0.5), (given.without("dHFinal", "SL"), 0.5)]
    calls = [(g.backward(direction=direction, clip=clip), {"direction": direction, "clip": clip}) for g, clip in kinds]
    calls = [(a, {k: v for k, v in kw.items() if v is not None}) for a, kw in calls]
    check_functions(rnn_grad, calls[0])
    check_functions(rnn_grad, *calls)
