"""RNNGrad: the kernel against its definition, that against autograd."""

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from tests.checks import FLOATS, assert_close, check, check_refused, expect, on_threads, same_bits
from tests.expected import recurrence
from tests.node_cases import NodeCase, without
from tests.rnn_cases import DIRECTIONS, GRADIENTS, OPTIONALS, case, torch_gradients

from onnxgrad import rnn_grad


@pytest.mark.parametrize("lengths", [False, True], ids=["whole", "lengths"])
@pytest.mark.parametrize("clip", [None, 0.4])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_type(dtype, direction, clip, lengths):
    given = case(S=5, N=6, inputs=7, H=9, direction=direction, lengths=lengths, dtype=dtype.type)
    check(rnn_grad, *given.backward(direction=direction, clip=clip), direction=direction, clip=clip)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("missing", [(), *[(n,) for n in OPTIONALS], ("B", "Ht0"), OPTIONALS], ids="-".join)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_gradients_are_those_of_autograd(direction, missing, dtype):
    """Those of the definition, in float64; those of the kernel are the definition's."""
    for lengths, clip in itertools.product((False, True), (None, 0.4)):
        sizes = {"S": 4, "N": 4, "inputs": 3, "H": 2, "direction": direction, "lengths": lengths}
        given = case(**sizes).without(*missing)
        attributes = {"direction": direction, "clip": clip}
        expected, bounds = expect(rnn_grad, *given.backward(**attributes), **attributes)
        _, theirs = torch_gradients(given, **attributes)
        for name, ours, bound, gradient in zip(GRADIENTS, expected, bounds, theirs, strict=True):
            assert_close(gradient, ours, 2 * bound, name)
        given = case(**sizes, dtype=dtype).without(*missing)
        check(rnn_grad, *given.backward(**attributes), **attributes)


FUNCTIONS = [
    ("Sigmoid", None, None), ("Relu", None, None), ("HardSigmoid", 0.3, 0.4), ("LeakyRelu", 0.2, None),
    ("ScaledTanh", 1.3, 0.7), ("Elu", 0.6, None), ("Softsign", None, None), ("Softplus", None, None),
    ("ThresholdedRelu", 0.1, None), ("Affine", 0.4, 0.3),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("function", FUNCTIONS, ids=str)
def test_activations(function, dtype):
    name, alpha, beta = function
    sizes = {"S": 3, "N": 5, "inputs": 6, "H": 7, "lengths": True, "seed": 3, "scale": 0.4}
    given = case(**sizes)
    attributes = {
        "activations": [name],
        "activation_alpha": None if alpha is None else [alpha],
        "activation_beta": None if beta is None else [beta],
    }
    torch_settings = {"functions": [(name.lower(), alpha or 0, beta or 0)]}
    backward = given.backward(**torch_settings)
    expected, bounds = expect(rnn_grad, *backward, **attributes)
    for ours, bound, theirs in zip(expected, bounds, torch_gradients(given, **torch_settings)[1], strict=True):
        assert_close(theirs, ours, 2 * bound)
    check(rnn_grad, *case(**sizes, dtype=dtype).backward(**torch_settings), **attributes)


@pytest.mark.parametrize(
    "size",
    [(0, 3, 4, 5), (3, 0, 4, 5), (3, 4, 0, 5), (3, 4, 5, 0), (1, 1, 1, 1), (3, 2, 5, 33), (5, 70, 40, 50)],
    ids=str,
)
def test_sizes(size):
    for direction in ("forward", "bidirectional"):
        given = case(*size, direction, lengths=size[0] > 0, dtype=np.float32)
        check(rnn_grad, *given.backward(direction=direction), direction=direction)


@pytest.mark.parametrize("name", ["X", "HAll", "dHAll"])
def test_what_lies_past_a_rows_length_is_never_used(name):
    given = case(S=6, N=5, inputs=3, H=4, direction="bidirectional", lengths=True, dtype=np.float32)
    inputs = dict(zip([i.name for i in rnn_grad.inputs], given.backward(direction="bidirectional"), strict=True))
    clean, dirty = inputs[name].copy(), inputs[name].copy()
    for n, length in enumerate(given.SL):
        clean[length:, ..., n, :], dirty[length:, ..., n, :] = 0, np.nan
    for grad in (rnn_grad, rnn_grad.definition):
        wanted, got = (grad(**{**inputs, name: a}, direction="bidirectional", clip=2.0) for a in (clean, dirty))
        assert all(same_bits(a, b) for a, b in zip(wanted, got, strict=True))


def test_only_the_outputs_asked_for():
    backward = case(S=3, N=5, inputs=4, H=6, lengths=True, dtype=np.float32).backward()
    everything = rnn_grad(*backward)
    for count in range(6):
        for names in itertools.combinations(GRADIENTS, count):
            for name, want, got in zip(GRADIENTS, everything, rnn_grad(*backward, outputs=names), strict=True):
                assert got is None if name not in names else same_bits(want, got), f"{name} of {names}"


def test_same_bits_on_any_number_of_threads():
    backward = case(S=6, N=37, inputs=70, H=65, lengths=True, dtype=np.float32).backward()
    results = []
    for count in (1, 2, 3, 7):
        with on_threads(count):
            results.append(rnn_grad(*backward))
    for other in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(results[0], other, strict=True))


@settings(max_examples=20, deadline=None, derandomize=True)
@drawn(st.data())
def test_any_size(data):
    sizes = [data.draw(st.integers(0, limit)) for limit in (5, 9, 20, 20)]
    direction, clip = data.draw(st.sampled_from(DIRECTIONS)), data.draw(st.sampled_from([None, 0.8]))
    given = case(*sizes, direction, data.draw(st.booleans()), np.float32, data.draw(st.integers(0, 99)))
    given = given.without(*data.draw(st.sets(st.sampled_from(OPTIONALS))))
    check(rnn_grad, *given.backward(direction=direction, clip=clip), direction=direction, clip=clip)


def test_bad_calls():
    given = dict(zip([i.name for i in rnn_grad.inputs], case(3, 4, 5, 6, dtype=np.float32).backward(), strict=True))
    for text, change in {
        "W has shape [6, 5], expected three dimensions [D,H,I]": {"W": given["W"][0]},
        "R has shape [1, 5, 6], expected [1, 6, 6]": {"R": given["R"][:, 1:]},
        "B has shape [1, 6], expected [1, 12]": {"B": given["B"][:, :6]},
        "HAll has shape [2, 1, 4, 6], expected [3, 1, 4, 6]": {"HAll": given["HAll"][1:]},
        "SL[1] is -1, expected 0 to 3, the number of steps": {"SL": [1, -1, 3, 3]},
        "activations has 2 names, expected 1": {"activations": ["Tanh", "Tanh"]},
    }.items():
        out = tuple(np.full_like(result, np.nan) for result in rnn_grad.definition(**given))
        check_refused(rnn_grad, ValueError, text, out=out, **{**given, **change})


expected = recurrence  # how far a right kernel may be from the definition


def node_cases() -> Iterator[NodeCase]:
    """Small calls for every runtime to run."""
    for dtype, direction, bare in itertools.product(FLOATS, DIRECTIONS, (False, True)):
        sizes = {"S": 4, "N": 3, "inputs": 5, "H": 6, "direction": direction, "lengths": not bare, "dtype": dtype.type}

        how = {"direction": direction, "clip": 0.5}

        def make(sizes=sizes, bare=bare, how=how):
            return case(**sizes).without(*(OPTIONALS if bare else ())).backward(**how)

        parameters = {"type": str(dtype), "direction": direction, "absent": without(["optionals"] if bare else [])}
        yield NodeCase(rnn_grad, parameters, make, {**how, "hidden_size": 6})
