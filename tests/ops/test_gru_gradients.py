"""GRUTraining and GRUGrad against torch autograd, central differences, torch.nn.GRU and onnx's own GRU."""

import itertools

import numpy as np
import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from tests.checks import assert_close, expect
from tests.gru_cases import DIRECTIONS, GRADIENTS, OPTIONALS, case, torch_gradients

from onnxgrad import gru_grad, gru_training

MISSING = [(), *[(name,) for name in OPTIONALS], ("B", "Ht0"), ("dHAll", "dHFinal"), OPTIONALS]
# name of f or g, its alpha and beta, for every function and both halves of those that have two
FUNCTIONS = [
    ("Sigmoid", None, None),
    ("Tanh", None, None),
    ("Relu", None, None),
    ("HardSigmoid", 0.3, 0.4),
    ("HardSigmoid", -1.5, 0.6),
    ("LeakyRelu", 0.2, None),
    ("LeakyRelu", 0.0, None),
    ("ScaledTanh", 1.3, 0.7),
    ("ScaledTanh", -0.8, 1.1),
    ("ScaledTanh", 0.0, 1.1),
    ("Elu", 0.6, None),
    ("Elu", 1.7, None),
    ("Softsign", None, None),
    ("Softplus", None, None),
    ("ThresholdedRelu", 0.1, None),
    ("ThresholdedRelu", -0.2, None),
    ("Affine", 0.4, 0.3),
]
DEFAULTS = {
    "HardSigmoid": (0.2, 0.5), "LeakyRelu": (0.01, None), "ScaledTanh": (1.0, 1.0), "Elu": (1.0, None),
    "ThresholdedRelu": (1.0, None), "Affine": (1.0, 0.0),
}  # fmt: skip


def compare_with_torch(given, attributes, functions=None):
    """The definition, forward and backward, against autograd: both in float64, so each may be off by the bound."""
    known = {k: v for k, v in attributes.items() if k in ("linear_before_reset", "direction", "clip")}
    if functions is not None:
        known["functions"] = [(name.lower(), a or 0, b or 0) for name, a, b in functions]
    states, gradients = torch_gradients(given, **known)
    expected, bounds = expect(gru_training, *given.forward, **attributes)
    for name, ours, bound, theirs in zip(("HAll", "HFinal"), expected, bounds, states, strict=False):
        assert_close(theirs, ours, 2 * bound, name)
    expected, bounds = expect(gru_grad, *given.backward(**attributes), **attributes)
    for name, ours, bound, theirs in zip(GRADIENTS, expected, bounds, gradients, strict=True):
        assert_close(theirs, ours, 2 * bound, name)
    return expected


@pytest.mark.parametrize("missing", MISSING, ids="-".join)
@pytest.mark.parametrize("lengths", [False, True], ids=["whole", "lengths"])
@pytest.mark.parametrize("linear_before_reset", [0, 1])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_gradients_are_those_of_autograd(direction, linear_before_reset, lengths, missing):
    given = case(S=4, N=4, inputs=3, H=2, direction=direction, lengths=lengths).without(*missing)
    gradients = compare_with_torch(given, {"linear_before_reset": linear_before_reset, "direction": direction})
    if {"dHAll", "dHFinal"} <= set(missing):
        assert not any(g.any() for g in gradients)


def directional(given, name, direction, attributes, h):
    """How fast the weighted sum of the results grows as one input moves along `direction`: (f(h) - f(-h)) / 2h."""
    ends = []
    for sign in (1, -1):
        moved = given._replace(**{name: getattr(given, name) + sign * h * direction})
        HAll, HFinal, _ = gru_training.definition(*moved.forward, **attributes)
        ends.append((HAll * given.dHAll).sum() + (HFinal * given.dHFinal).sum())
    return (ends[0] - ends[1]) / (2 * h)


@pytest.mark.parametrize("clip", [None, 0.7])
@pytest.mark.parametrize("lengths", [False, True], ids=["whole", "lengths"])
@pytest.mark.parametrize("linear_before_reset", [0, 1])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_gradients_are_those_of_central_differences(direction, linear_before_reset, lengths, clip):
    given = case(S=3, N=4, inputs=3, H=2, direction=direction, lengths=lengths, seed=5)
    attributes = {"direction": direction, "linear_before_reset": linear_before_reset, "clip": clip}
    gradients = gru_grad.definition(*given.backward(**attributes), **attributes)
    rng = np.random.default_rng(1)
    h = 2.0**-12
    rounding = 2.0**-52 * (np.abs(given.dHAll).sum() + np.abs(given.dHFinal).sum()) / h  # of f, states being below 1
    for name, gradient in zip(("X", "W", "R", "B", "Ht0"), gradients, strict=True):
        for _ in range(3):
            direction_ = rng.standard_normal(gradient.shape)
            coarse, fine = (directional(given, name, direction_, attributes, k) for k in (2 * h, h))
            # Halving h divides the error, c·h², by four: the two tell its size, and how to take it off.
            extrapolated, bound = fine + (fine - coarse) / 3, np.abs(fine - coarse) + rounding
            assert_close(np.float64((gradient * direction_).sum()), extrapolated, bound, f"d{name}")


@pytest.mark.parametrize("linear_before_reset", [0, 1])
@pytest.mark.parametrize("place", ["gates", "candidate"])
@pytest.mark.parametrize("function", FUNCTIONS, ids=str)
def test_every_activation(function, place, linear_before_reset):
    other = ("Tanh", None, None) if place == "gates" else ("Sigmoid", None, None)
    pair = (function, other) if place == "gates" else (other, function)
    check_functions(pair, linear_before_reset, "forward")


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_of_alpha_and_beta(name):
    function = (name, *DEFAULTS[name])
    given = case(S=3, N=3, lengths=True)
    attributes = {"activations": [name.upper(), name.lower()]}
    compare_with_torch(given, attributes, (function, function))


@pytest.mark.parametrize("clip", [None, 0.5])
def test_activations_of_two_directions_and_the_order_of_their_parameters(clip):
    """alpha and beta go, in order, to the functions that have one."""
    functions = [("HardSigmoid", 0.3, 0.4), ("LeakyRelu", 0.2, None), ("Sigmoid", None, None), ("Affine", 0.5, -0.1)]
    check_functions(functions, 1, "bidirectional", clip)
    check_functions(functions[::-1], 0, "bidirectional", clip)


def check_functions(functions, linear_before_reset, direction, clip=None):
    given = case(S=3, N=3, inputs=3, H=3, direction=direction, lengths=True, seed=2)
    attributes = {
        "activations": [name for name, _, _ in functions],
        "activation_alpha": [a for _, a, _ in functions if a is not None],
        "activation_beta": [b for _, _, b in functions if b is not None],
        "linear_before_reset": linear_before_reset,
        "direction": direction,
        "clip": clip,
    }
    compare_with_torch(given, attributes, functions)


@pytest.mark.parametrize("clip", [0.05, 0.4, 1.0, 1e6])
@pytest.mark.parametrize("linear_before_reset", [0, 1])
def test_clip(clip, linear_before_reset):
    given = case(S=4, N=4, H=3, direction="bidirectional", lengths=True)
    attributes = {"clip": clip, "linear_before_reset": linear_before_reset, "direction": "bidirectional"}
    compare_with_torch(given, attributes)
    if clip == 1e6:
        clipped = gru_grad.definition(*given.backward(**attributes), **attributes)
        free = gru_grad.definition(*given.backward(**{**attributes, "clip": None}), **{**attributes, "clip": None})
        assert all(np.array_equal(a, b) for a, b in zip(clipped, free, strict=True))


def torch_module(given, bidirectional):
    """torch.nn.GRU with our weights: its gates come in the order r, z, n, so the first two change places."""
    H = given.R.shape[2]
    module = torch.nn.GRU(given.X.shape[2], H, bidirectional=bidirectional, dtype=torch.float64)
    order = np.r_[H : 2 * H, 0:H, 2 * H : 3 * H]
    with torch.no_grad():
        for d, suffix in enumerate(("", "_reverse")[: len(given.R)]):
            weights = {
                "weight_ih": given.W[d], "weight_hh": given.R[d],
                "bias_ih": given.B[d, : 3 * H], "bias_hh": given.B[d, 3 * H :],
            }  # fmt: skip
            for name, value in weights.items():
                getattr(module, f"{name}_l0{suffix}").copy_(torch.from_numpy(value[order]))
    return module, order


@pytest.mark.parametrize("lengths", [False, True], ids=["whole", "lengths"])
@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
def test_torch_nn_gru(direction, lengths):
    given = case(S=6, N=5, inputs=4, H=7, direction=direction)
    S, N, _ = given.X.shape
    D, _, H = given.R.shape
    module, order = torch_module(given, direction == "bidirectional")
    X = torch.tensor(given.X, requires_grad=True)
    Ht0 = torch.tensor(given.Ht0, requires_grad=True)
    if lengths:
        given = given._replace(SL=np.array([6, 1, 3, 6, 2], np.int32))  # torch packs no empty rows
        packed = torch.nn.utils.rnn.pack_padded_sequence(X, torch.from_numpy(given.SL).long(), enforce_sorted=False)
        packed, HFinal = module(packed, Ht0)
        states, _ = torch.nn.utils.rnn.pad_packed_sequence(packed, total_length=S)
    else:
        states, HFinal = module(X, Ht0)
    HAll = states.reshape(S, N, D, H).transpose(1, 2)
    attributes = {"direction": direction, "linear_before_reset": 1}
    expected, bounds = expect(gru_training, *given.forward, **attributes)
    assert_close(HAll.detach().numpy(), expected[0], 2 * bounds[0], "HAll")
    assert_close(HFinal.detach().numpy(), expected[1], 2 * bounds[1], "HFinal")

    ((HAll * torch.from_numpy(given.dHAll)).sum() + (HFinal * torch.from_numpy(given.dHFinal)).sum()).backward()
    expected, bounds = expect(gru_grad, *given.backward(**attributes), **attributes)
    back = np.argsort(order)
    parameters = {name: p.grad.numpy()[back] for name, p in module.named_parameters()}
    for d, suffix in enumerate(("", "_reverse")[:D]):
        biases = np.concatenate([parameters[f"bias_ih_l0{suffix}"], parameters[f"bias_hh_l0{suffix}"]])
        theirs = parameters[f"weight_ih_l0{suffix}"], parameters[f"weight_hh_l0{suffix}"], biases
        for name, k, gradient in zip(("dW", "dR", "dB"), (1, 2, 3), theirs, strict=True):
            assert_close(gradient, expected[k][d], 2 * bounds[k][d], name)
    assert_close(X.grad.numpy(), expected[0], 2 * bounds[0], "dX")
    assert_close(Ht0.grad.numpy(), expected[4], 2 * bounds[4], "dH0")


@pytest.mark.parametrize("linear_before_reset", [0, 1])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("missing", [(), ("B",), ("Ht0",), ("B", "Ht0")], ids="-".join)
def test_onnx_gru(direction, linear_before_reset, missing):
    given = case(S=5, N=4, inputs=3, H=6, direction=direction).without(*missing)
    names = ["X", "W", "R", "B", "", "Ht0"]
    node = onnx.helper.make_node(
        "GRU", ["" if n in missing else n for n in names], ["Y", "Y_h"], hidden_size=6, direction=direction,
        linear_before_reset=linear_before_reset,
    )  # fmt: skip
    value = onnx.helper.make_tensor_value_info
    present = {n: getattr(given, n) for n in names if n and n not in missing}
    graph = onnx.helper.make_graph(
        [node], "gru", [value(n, onnx.TensorProto.DOUBLE, a.shape) for n, a in present.items()],
        [value("Y", onnx.TensorProto.DOUBLE, None), value("Y_h", onnx.TensorProto.DOUBLE, None)],
    )  # fmt: skip
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 22)])
    theirs = ReferenceEvaluator(model).run(None, present)
    attributes = {"direction": direction, "linear_before_reset": linear_before_reset, "hidden_size": 6}
    expected, bounds = expect(gru_training, *given.forward, **attributes)
    assert_close(theirs[0], expected[0], 2 * bounds[0], "HAll")
    assert_close(theirs[1], expected[1], 2 * bounds[1], "HFinal")


@pytest.mark.parametrize("linear_before_reset", [0, 1])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_row_with_a_length_is_that_row_alone(direction, linear_before_reset):
    given = case(S=6, N=5, inputs=3, H=4, direction=direction, lengths=True)
    attributes = {"direction": direction, "linear_before_reset": linear_before_reset}
    (HAll, HFinal, ZRH), training_bounds = expect(gru_training, *given.forward, **attributes)
    gradients, bounds = expect(gru_grad, *given.backward(**attributes), **attributes)
    sums = [0.0, 0.0, 0.0]
    for n, length in enumerate(given.SL):
        row = np.s_[:length, :, n : n + 1]
        alone = given._replace(
            X=given.X[:length, n : n + 1], SL=None, Ht0=given.Ht0[:, n : n + 1],
            dHAll=given.dHAll[row], dHFinal=given.dHFinal[:, n : n + 1],
        )  # fmt: skip
        states = gru_training.definition(*alone.forward, **attributes)
        for ours, theirs, k in ((HAll[row], states[0], 0), (ZRH[row], states[2], 2)):
            assert_close(theirs, ours, 2 * training_bounds[k][row], f"row {n}")
        assert_close(states[1], HFinal[:, n : n + 1], 2 * training_bounds[1][:, n : n + 1], f"HFinal {n}")
        assert not HAll[length:, :, n].any() and not ZRH[length:, :, n].any()
        mine = gru_grad.definition(*alone.backward(**attributes), **attributes)
        assert_close(mine[0][:, 0], gradients[0][:length, n], 2 * bounds[0][:length, n], f"dX {n}")
        assert not gradients[0][length:, n].any()
        assert_close(mine[4][:, 0], gradients[4][:, n], 2 * bounds[4][:, n], f"dH0 {n}")
        sums = [s + m for s, m in zip(sums, mine[1:4], strict=True)]
    for name, total, k in zip(("dW", "dR", "dB"), sums, (1, 2, 3), strict=True):
        assert_close(np.asarray(total), gradients[k], 2 * bounds[k], name)


def test_bidirectional_is_both_directions_side_by_side():
    for linear_before_reset, lengths in itertools.product((0, 1), (False, True)):
        both = case(S=4, N=5, inputs=3, H=4, direction="bidirectional", lengths=lengths)
        attributes = {"linear_before_reset": linear_before_reset}
        whole = gru_grad.definition(
            *both.backward(**attributes, direction="bidirectional"), **attributes, direction="bidirectional"
        )
        each = []
        for d, direction in enumerate(("forward", "reverse")):
            one = both._replace(
                W=both.W[d : d + 1], R=both.R[d : d + 1], B=both.B[d : d + 1], Ht0=both.Ht0[d : d + 1],
                dHAll=both.dHAll[:, d : d + 1], dHFinal=both.dHFinal[d : d + 1],
            )  # fmt: skip
            each.append(
                gru_grad.definition(*one.backward(**attributes, direction=direction), **attributes, direction=direction)
            )
        np.testing.assert_array_equal(whole[0], each[0][0] + each[1][0])
        for k in range(1, 5):
            np.testing.assert_array_equal(whole[k], np.concatenate([each[0][k], each[1][k]]))
