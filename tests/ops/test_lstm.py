"""LSTMTraining and LSTMGrad: the kernels against their definitions, these against autograd and differences."""

import itertools
from collections.abc import Iterator

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from onnx.reference import ReferenceEvaluator
from tests.checks import FLOATS, assert_close, check, check_refused, expect, layouts, on_threads, same_bits
from tests.expected import recurrence
from tests.lstm_cases import DIRECTIONS, GRADIENTS, OPTIONALS, case, torch_gradients
from tests.node_cases import NodeCase, without

from onnxgrad import lstm_grad, lstm_training

F32 = np.dtype(np.float32)


def check_both(given, **attributes):
    """Forward and backward through the harness."""
    check(lstm_training, *given.forward, **attributes)
    return check(lstm_grad, *given.backward(**attributes), **attributes)


@pytest.mark.parametrize("lengths", [False, True], ids=["whole", "lengths"])
@pytest.mark.parametrize("input_forget", [0, 1])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_type(dtype, direction, input_forget, lengths):
    given = case(S=5, N=6, inputs=7, H=9, direction=direction, lengths=lengths, dtype=dtype.type)
    check_both(given, direction=direction, input_forget=input_forget)


@pytest.mark.parametrize("missing", [(n,) for n in OPTIONALS] + [("B", "P"), ("Ht0", "Ct0"), OPTIONALS], ids="-".join)
@pytest.mark.parametrize("clip", [None, 0.4])
def test_missing_optionals(missing, clip):
    given = case(S=3, N=4, inputs=5, H=6, direction="bidirectional", lengths=True, dtype=np.float32).without(*missing)
    gradients = check_both(given, direction="bidirectional", clip=clip)
    if missing == OPTIONALS:
        assert not any(g.any() for g in gradients)


@pytest.mark.parametrize(
    "size",
    [
        (0, 3, 4, 5), (3, 0, 4, 5), (3, 4, 0, 5), (3, 4, 5, 0), (1, 1, 1, 1), (4, 1, 3, 3), (1, 4, 2, 17),
        (3, 2, 5, 33), (3, 17, 31, 32), (5, 70, 40, 50), (40, 2, 3, 4), (2, 130, 9, 20), (2, 3, 9, 110),
    ],
    ids=str,
)  # fmt: skip
def test_sizes(size):
    S, N, inputs, H = size
    for direction, lengths in (("forward", False), ("bidirectional", True)):
        given = case(S, N, inputs, H, direction, lengths and S > 0, np.float32)
        check_both(given, direction=direction)


# Names of f, g and h, alphas, betas.
CHOICES = [
    (["sigmoid", "TANH", "Tanh"], None, None),
    (["Relu", "Softsign", "Softplus"], None, None),
    (["HardSigmoid", "Softplus", "Elu"], [0.3, 0.7], [0.4]),
    (["Softsign", "LeakyRelu", "HardSigmoid"], [0.2], None),
    (["ScaledTanh", "ThresholdedRelu", "Affine"], [0.9, 0.1, 0.5], [1.2, 0.1]),
]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("clip", [None, 0.4])
@pytest.mark.parametrize("choice", CHOICES, ids=lambda c: "-".join(c[0]))
def test_activations_and_clip(choice, clip, dtype):
    names, alpha, beta = choice
    given = case(S=3, N=5, inputs=6, H=7, lengths=True, dtype=dtype, seed=3, scale=0.4)
    check_both(given, activations=names, activation_alpha=alpha, activation_beta=beta, clip=clip)


def test_activations_per_direction():
    given = case(S=3, N=4, inputs=5, H=6, direction="bidirectional", lengths=True, dtype=np.float32)
    names = ("HardSigmoid", "LeakyRelu", "Tanh", "Sigmoid", "Affine", "Softsign")
    check_both(given, direction="bidirectional", activations=names, activation_alpha=(0.3, 0.2), clip=0.5)


def compare_with_torch(given, functions=None, **attributes):
    """The definition, forward and backward, against autograd: both in float64, so each may be off by the bound."""
    known = {k: v for k, v in attributes.items() if k in ("input_forget", "direction", "clip")}
    if functions is not None:
        known["functions"] = [(name.lower(), a or 0, b or 0) for name, a, b in functions]
    states, gradients = torch_gradients(given, **known)
    expected, bounds = expect(lstm_training, *given.forward, **attributes)
    for name, ours, bound, theirs in zip(("HAll", "HFinal", "CFinal"), expected, bounds, states, strict=False):
        assert_close(theirs, ours, 2 * bound, name)
    expected, bounds = expect(lstm_grad, *given.backward(**attributes), **attributes)
    for name, ours, bound, theirs in zip(GRADIENTS, expected, bounds, gradients, strict=True):
        assert_close(theirs, ours, 2 * bound, name)


@pytest.mark.parametrize("missing", [(), ("B", "P"), ("Ht0", "Ct0"), ("dHAll",), ("dHFinal", "dCFinal")], ids="-".join)
@pytest.mark.parametrize("input_forget", [0, 1])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_gradients_are_those_of_autograd(direction, input_forget, missing):
    for lengths, clip in itertools.product((False, True), (None, 0.4)):
        given = case(S=4, N=4, inputs=3, H=2, direction=direction, lengths=lengths).without(*missing)
        compare_with_torch(given, direction=direction, input_forget=input_forget, clip=clip)


def test_activations_are_those_of_autograd():
    functions = [("HardSigmoid", 0.3, 0.4), ("LeakyRelu", 0.2, None), ("Elu", 0.6, None)]
    names = {
        "activations": [n for n, _, _ in functions],
        "activation_alpha": [0.3, 0.2, 0.6],
        "activation_beta": [0.4],
    }
    compare_with_torch(case(S=3, N=3, H=3, lengths=True, seed=2), functions, **names)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_gradients_are_those_of_central_differences(direction):
    given = case(S=3, N=4, inputs=3, H=2, direction=direction, lengths=True, seed=5)
    gradients = lstm_grad.definition(*given.backward(direction=direction), direction=direction)
    rng, h = np.random.default_rng(1), 2.0**-17

    def total(moved):
        HAll, HFinal, CFinal, _, _ = lstm_training.definition(*moved.forward, direction=direction)
        return (HAll * given.dHAll).sum() + (HFinal * given.dHFinal).sum() + (CFinal * given.dCFinal).sum()

    for name, gradient in zip(("X", "W", "R", "B", "Ht0", "Ct0", "P"), gradients, strict=True):
        along = rng.standard_normal(gradient.shape)
        ends = [total(given._replace(**{name: getattr(given, name) + sign * h * along})) for sign in (1, -1)]
        np.testing.assert_allclose((gradient * along).sum(), (ends[0] - ends[1]) / (2 * h), rtol=1e-7, atol=1e-8)


@pytest.mark.slow  # kernels for float64 are compiled
@pytest.mark.parametrize("bidirectional", [False, True])
def test_torch_nn_lstm(bidirectional):
    """The kernel against the module of torch, whose gates come in the order i, f, c, o."""
    given = case(S=6, N=5, inputs=4, H=7, direction="bidirectional" if bidirectional else "forward").without("P")
    (S, N, inputs), (D, _, H) = given.X.shape, given.R.shape
    module = torch.nn.LSTM(inputs, H, bidirectional=bidirectional, dtype=torch.float64)
    order = np.r_[0:H, 2 * H : 4 * H, H : 2 * H]
    suffixes = ("_l0", "_l0_reverse")[:D]
    with torch.no_grad():
        for d, suffix in enumerate(suffixes):
            weights = {"weight_ih": given.W[d], "weight_hh": given.R[d]}
            weights |= dict(zip(("bias_ih", "bias_hh"), np.split(given.B[d], 2), strict=True))
            for name, value in weights.items():
                getattr(module, f"{name}{suffix}").copy_(torch.from_numpy(value[order]))
    X, Ht0, Ct0 = (torch.tensor(a, requires_grad=True) for a in (given.X, given.Ht0, given.Ct0))
    states, (HFinal, CFinal) = module(X, (Ht0, Ct0))
    HAll = states.reshape(S, N, D, H).transpose(1, 2)
    weighted = zip((HAll, HFinal, CFinal), (given.dHAll, given.dHFinal, given.dCFinal), strict=True)
    sum((r * torch.from_numpy(g)).sum() for r, g in weighted).backward()
    attributes = {"direction": "bidirectional" if bidirectional else "forward"}
    for ours, theirs in zip(lstm_training(*given.forward, **attributes), (HAll, HFinal, CFinal), strict=False):
        np.testing.assert_allclose(ours, theirs.detach(), rtol=1e-12, atol=1e-13)
    dX, dW, dR, dB, dH0, dC0, _ = lstm_grad(*given.backward(**attributes), **attributes)
    pairs = [(dX, X.grad), (dH0, Ht0.grad), (dC0, Ct0.grad)]
    for d, suffix in enumerate(suffixes):
        grads = {n.removesuffix(suffix): p.grad for n, p in module.named_parameters() if n.endswith(suffix)}
        pairs += [(dW[d][order], grads["weight_ih"]), (dR[d][order], grads["weight_hh"])]
        pairs += [(half[order], grads[n]) for half, n in zip(np.split(dB[d], 2), ("bias_ih", "bias_hh"), strict=True)]
    for ours, theirs in pairs:
        np.testing.assert_allclose(ours, theirs, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("missing", [(), ("P",), ("B", "Ht0", "Ct0", "P")], ids="-".join)
def test_onnx_lstm(direction, missing):
    given = case(S=5, N=4, inputs=3, H=6, direction=direction).without(*missing)
    names = {"X": "X", "W": "W", "R": "R", "B": "B", "": "SL", "initial_h": "Ht0", "initial_c": "Ct0", "P": "P"}
    present = {n: getattr(given, ours) for n, ours in names.items() if getattr(given, ours) is not None}
    inputs = [n if n in present else "" for n in names]
    node = onnx.helper.make_node("LSTM", inputs, ["Y", "Y_h", "Y_c"], hidden_size=6, direction=direction)
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [node], "lstm", [value(n, onnx.TensorProto.DOUBLE, a.shape) for n, a in present.items()],
        [value(n, onnx.TensorProto.DOUBLE, None) for n in ("Y", "Y_h", "Y_c")],
    )  # fmt: skip
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 22)])
    for theirs, ours in zip(
        ReferenceEvaluator(model).run(None, present),
        lstm_training.definition(*given.forward, direction=direction),
        strict=False,
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", ["X", "HAll", "CAll", "IOFC", "dHAll"])
def test_what_lies_past_a_rows_length_is_never_used(name, direction):
    given = case(S=6, N=5, inputs=3, H=4, direction=direction, lengths=True, dtype=np.float32)
    attributes = {"direction": direction, "clip": 2.0}
    inputs = dict(zip([i.name for i in lstm_grad.inputs], given.backward(**attributes), strict=True))
    clean, dirty = inputs[name].copy(), inputs[name].copy()
    for n, length in enumerate(given.SL):
        clean[length:, ..., n, :], dirty[length:, ..., n, :] = 0, np.nan
    for grad in (lstm_grad, lstm_grad.definition):
        wanted, got = (grad(**{**inputs, name: a}, **attributes) for a in (clean, dirty))
        assert all(same_bits(a, b) for a, b in zip(wanted, got, strict=True))
    if name == "X":
        for train in (lstm_training, lstm_training.definition):
            wanted, got = (train(a, *given.forward[1:], **attributes) for a in (clean, dirty))
            assert all(same_bits(a, b) for a, b in zip(wanted, got, strict=True))


def test_only_the_outputs_asked_for():
    backward = case(S=3, N=5, inputs=4, H=6, direction="bidirectional", lengths=True, dtype=np.float32).backward(
        direction="bidirectional"
    )
    everything = lstm_grad(*backward, direction="bidirectional")
    for names in [*itertools.combinations(GRADIENTS, 1), *itertools.combinations(GRADIENTS, 2), (), GRADIENTS]:
        some = lstm_grad(*backward, direction="bidirectional", outputs=names)
        for name, want, got in zip(GRADIENTS, everything, some, strict=True):
            assert got is None if name not in names else same_bits(want, got), f"{name} of {names}"


@pytest.mark.parametrize("layout", list(layouts(np.zeros((2, 2), F32))))
def test_layouts(layout):
    given = case(S=3, N=4, inputs=5, H=6, direction="bidirectional", lengths=True, dtype=np.float32)

    def relaid(array):
        return None if array is None else layouts(array).get(layout, array)

    check(lstm_training, *map(relaid, given.forward), direction="bidirectional")
    check(lstm_grad, *map(relaid, given.backward(direction="bidirectional")), direction="bidirectional")


def test_same_bits_on_any_number_of_threads():
    given = case(S=6, N=37, inputs=70, H=65, direction="bidirectional", lengths=True, dtype=np.float32)
    backward = given.backward(direction="bidirectional")
    results = []
    for count in (1, 2, 3, 7):
        with on_threads(count):
            made = lstm_training(*given.forward, direction="bidirectional")
            results.append([*made, *lstm_grad(*backward, direction="bidirectional")])
    for other in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(results[0], other, strict=True))


@settings(max_examples=25, deadline=None, derandomize=True)
@drawn(st.data())
def test_any_size(data):
    sizes = [data.draw(st.integers(0, limit)) for limit in (5, 9, 20, 20)]
    direction = data.draw(st.sampled_from(DIRECTIONS))
    missing = data.draw(st.sets(st.sampled_from(OPTIONALS)))
    given = case(*sizes, direction, data.draw(st.booleans()), np.float32, data.draw(st.integers(0, 99)))
    check_both(
        given.without(*missing), direction=direction, clip=data.draw(st.sampled_from([None, 0.8])),
        input_forget=data.draw(st.integers(0, 1)),
    )  # fmt: skip


X, W, R, B, _, HT0, CT0, P, *_ = GIVEN = case(3, 4, 5, 6, dtype=np.float32)
REFUSED = [
    ("W has shape [24, 5], expected three dimensions [D,4H,I]", {"W": W[0]}),
    ("R has shape [1, 23, 6], expected [1, 24, 6]", {"R": R[:, 1:]}),
    ("B has shape [1, 24], expected [1, 48]", {"B": B[:, :24]}),
    ("P has shape [18], expected [1, 18]", {"P": P[0]}),
    ("Ht0 has shape [4, 6], expected [1, 4, 6]", {"Ht0": HT0[0]}),
    ("Ct0 has shape [1, 3, 6], expected [1, 4, 6]", {"Ct0": CT0[:, 1:]}),
    ("SL[2] is 4, expected 0 to 3, the number of steps", {"SL": np.array([1, 2, 4, -1], np.int32)}),
    ("input_forget is 2, expected 0 or 1", {"input_forget": 2}),
    ("clip is 0.0, expected more than 0, or nothing for no clipping", {"clip": 0}),
    ("activations has 2 names, expected 3", {"activations": ["Sigmoid", "Tanh"]}),
    ("direction is 'both', expected one of forward, reverse, bidirectional", {"direction": "both"}),
]


@pytest.mark.parametrize(("text", "change"), REFUSED)
def test_bad_calls(text, change):
    for op, arguments in ((lstm_training, GIVEN.forward), (lstm_grad, GIVEN.backward())):
        given = dict(zip([i.name for i in op.inputs], arguments, strict=True))
        out = tuple(np.full_like(result, np.nan) for result in op.definition(*arguments))
        check_refused(op, ValueError, text, out=out, **{**given, **change})


def test_bad_calls_of_the_gradient():
    backward = dict(zip([i.name for i in lstm_grad.inputs], GIVEN.backward(), strict=True))
    for name, text in {
        "IOFC": "IOFC has shape [3, 1, 4, 6], expected [3, 1, 4, 24]",
        "dCFinal": "dCFinal has shape [3, 1, 4, 6], expected [1, 4, 6]",
    }.items():
        check_refused(lstm_grad, ValueError, text, **{**backward, name: backward["HAll"]})


expected = recurrence  # how far a right kernel may be from the definition


def node_cases() -> Iterator[NodeCase]:
    """Small calls for every runtime to run."""
    for dtype, direction, bare in itertools.product(FLOATS, DIRECTIONS, (False, True)):
        sizes = {"S": 4, "N": 3, "inputs": 5, "H": 6, "direction": direction, "lengths": not bare, "dtype": dtype.type}

        def made(sizes=sizes, bare=bare):
            return case(**sizes).without(*(OPTIONALS if bare else ()))

        parameters = {"type": str(dtype), "direction": direction, "absent": without(["optionals"] if bare else [])}
        how = {"direction": direction, "hidden_size": 6, "clip": 0.5, "input_forget": int(bare)}
        yield NodeCase(lstm_training, parameters, lambda made=made: made().forward, how)
        yield NodeCase(lstm_grad, parameters, lambda made=made, how=how: made().backward(**how), how)
