"""GRUTraining and GRUGrad: the kernels against their definitions, for every type, size, layout and output choice."""

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from tests.checks import FLOATS, call, check, examples, layouts, on_threads, same_bits
from tests.expected import recurrence
from tests.gru_cases import DIRECTIONS, GRADIENTS, OPTIONALS, case
from tests.node_cases import NodeCase, only, without

from onnxgrad import gru_grad, gru_training

F32 = np.dtype(np.float32)


def check_both(given, **attributes):
    """Forward and backward through the harness."""
    check(gru_training, *given.forward, **attributes)
    return check(gru_grad, *given.backward(**attributes), **attributes)


@pytest.mark.parametrize("lengths", [False, True], ids=["whole", "lengths"])
@pytest.mark.parametrize("linear_before_reset", [0, 1])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_type(dtype, direction, linear_before_reset, lengths):
    given = case(S=5, N=6, inputs=7, H=9, direction=direction, lengths=lengths, dtype=dtype.type)
    check_both(given, direction=direction, linear_before_reset=linear_before_reset)


@pytest.mark.parametrize(
    "missing", [(n,) for n in OPTIONALS] + [("B", "Ht0"), ("dHAll", "dHFinal"), OPTIONALS], ids="-".join
)
@pytest.mark.parametrize("lengths", [False, True], ids=["whole", "lengths"])
@pytest.mark.parametrize("linear_before_reset", [0, 1])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_missing_optionals(missing, direction, linear_before_reset, lengths):
    given = case(S=3, N=4, inputs=5, H=6, direction=direction, lengths=lengths, dtype=np.float32).without(*missing)
    gradients = check_both(given, direction=direction, linear_before_reset=linear_before_reset)
    if {"dHAll", "dHFinal"} <= set(missing):
        assert not any(g.any() for g in gradients)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("linear_before_reset", [0, 1])
@pytest.mark.parametrize(
    "size",
    [
        (0, 3, 4, 5), (3, 0, 4, 5), (3, 4, 0, 5), (3, 4, 5, 0), (0, 0, 0, 0), (1, 1, 1, 1), (4, 1, 3, 3), (1, 4, 2, 17),
        (3, 2, 5, 33), (2, 3, 64, 16), (3, 17, 31, 32), (5, 70, 40, 50), (40, 2, 3, 4), (2, 130, 9, 20),
    ],
    ids=str,
)  # fmt: skip
def test_sizes(size, linear_before_reset, dtype):
    S, N, inputs, H = size
    for direction, lengths in (("forward", False), ("bidirectional", True)):
        given = case(S, N, inputs, H, direction, lengths and S > 0, dtype.type)
        check_both(given, direction=direction, linear_before_reset=linear_before_reset)


# Per case: names of f and g, alphas, betas.
CHOICES = [
    (["sigmoid", "TANH"], None, None),
    (["Tanh", "Sigmoid"], None, None),
    (["Relu", "Softsign"], None, None),
    (["HardSigmoid", "Softplus"], [0.3], [0.4]),
    (["Softsign", "HardSigmoid"], None, None),
    (["LeakyRelu", "Elu"], [0.2, 0.7], None),
    (["Elu", "LeakyRelu"], None, None),
    (["ScaledTanh", "ThresholdedRelu"], [0.9, 0.1], [1.2]),
    (["ThresholdedRelu", "ScaledTanh"], [-0.3, -1.1], [0.8]),
    (["Softplus", "Affine"], [0.6], [-0.1]),
    (["Affine", "Relu"], [0.4], [0.5]),
    (["Sigmoid", "ScaledTanh"], [0.0], [2.0]),
]


@pytest.mark.parametrize("clip", [None, 0.4])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("choice", CHOICES, ids=lambda c: "-".join(c[0]))
def test_activations_and_clip(choice, dtype, clip):
    names, alpha, beta = choice
    for linear_before_reset in (0, 1):
        given = case(S=3, N=5, inputs=6, H=7, lengths=True, dtype=dtype.type, seed=3, scale=0.4)
        check_both(
            given, activations=names, activation_alpha=alpha, activation_beta=beta, clip=clip,
            linear_before_reset=linear_before_reset,
        )  # fmt: skip


def test_activations_per_direction():
    given = case(S=3, N=4, inputs=5, H=6, direction="bidirectional", lengths=True, dtype=np.float32)
    names, alpha, beta = ("HardSigmoid", "LeakyRelu", "Sigmoid", "Affine"), (0.3, 0.2, 0.5), np.array([0.4, -0.1])
    for clip in (None, 0.5):
        check_both(
            given, direction="bidirectional", activations=names, activation_alpha=alpha, activation_beta=beta, clip=clip
        )


@pytest.mark.slow
@pytest.mark.parametrize("linear_before_reset", [0, 1])
def test_saturated_gates(linear_before_reset):
    """Pre-activations of thousands: exp must not overflow, and 1 - z may be exactly 0."""
    for dtype, scale in itertools.product((np.float32, np.float64), (30.0, 3000.0)):
        given = case(S=3, N=4, inputs=5, H=6, dtype=dtype)._replace(SL=None)
        given = given._replace(X=(given.X * scale).astype(dtype))
        gradients = check_both(given, linear_before_reset=linear_before_reset)
        assert all(np.isfinite(g).all() for g in gradients)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("linear_before_reset", [0, 1])
def test_rows_do_not_mix(direction, linear_before_reset):
    given = case(S=3, N=19, inputs=5, H=18, direction=direction, dtype=np.float32)
    attributes = {"direction": direction, "linear_before_reset": linear_before_reset}
    clean = call(gru_training, *given.forward, **attributes)
    dirty = given.X.copy()
    dirty[1, 7] = np.nan
    rest = np.arange(19) != 7
    for before, after in zip(clean, call(gru_training, dirty, *given.forward[1:], **attributes), strict=True):
        axis = before.ndim - 2
        assert same_bits(np.compress(rest, before, axis), np.compress(rest, after, axis))


@pytest.mark.parametrize("linear_before_reset", [0, 1])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", ["X", "HAll", "ZRH", "dHAll"])
@pytest.mark.parametrize("how", ["definition", "kernel"])
def test_what_lies_past_a_rows_length_is_never_used(how, name, direction, linear_before_reset):
    given = case(S=6, N=5, inputs=3, H=4, direction=direction, lengths=True, dtype=np.float32)
    attributes = {"direction": direction, "linear_before_reset": linear_before_reset, "clip": 2.0}
    names = ["X", "W", "R", "B", "SL", "Ht0", "HAll", "ZRH", "dHAll", "dHFinal"]
    inputs = dict(zip(names, given.backward(**attributes), strict=True))
    clean, dirty = inputs[name].copy(), inputs[name].copy()
    for n, length in enumerate(given.SL):
        clean[length:, ..., n, :], dirty[length:, ..., n, :] = 0, np.nan
    grad, train = (op.definition if how == "definition" else partial(call, op) for op in (gru_grad, gru_training))
    expected = grad(**{**inputs, name: clean}, **attributes)
    for output, want, got in zip(GRADIENTS, expected, grad(**{**inputs, name: dirty}, **attributes), strict=True):
        assert same_bits(want, got), f"garbage in {name} past the lengths reached {output}"
    if name == "X":
        expected = train(clean, *given.forward[1:], **attributes)
        for want, got in zip(expected, train(dirty, *given.forward[1:], **attributes), strict=True):
            assert same_bits(want, got), "garbage in X past the lengths reached the states"


@pytest.mark.parametrize("lengths", [False, True], ids=["whole", "lengths"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("linear_before_reset", [0, 1])
def test_only_the_outputs_asked_for(direction, linear_before_reset, lengths):
    given = case(S=3, N=5, inputs=4, H=6, direction=direction, lengths=lengths, dtype=np.float32)
    attributes = {"direction": direction, "linear_before_reset": linear_before_reset}
    backward = given.backward(**attributes)
    everything = call(gru_grad, *backward, **attributes)
    for count in range(6):
        for names in itertools.combinations(GRADIENTS, count):
            some = call(gru_grad, *backward, **attributes, outputs=names)
            plain = gru_grad.definition(*backward, **attributes, outputs=names)
            for name, want, got, defined in zip(GRADIENTS, everything, some, plain, strict=True):
                assert (defined is None) == (name not in names)
                assert got is None if name not in names else same_bits(want, got), f"{name} of {names}"


@pytest.mark.parametrize("outputs", ["dX", ["dW"], ("dR", "dH0"), {"dB"}, [], None], ids=str)
def test_outputs_through_the_harness(outputs):
    given = case(S=3, N=4, inputs=5, H=6, lengths=True, dtype=np.float32)
    check(gru_grad, *given.backward(), outputs=outputs)


def test_into_writes_only_the_outputs_asked_for():
    backward = case(S=3, N=4, inputs=5, H=6, dtype=np.float32).backward()
    out = [np.full_like(g, np.nan) for g in gru_grad.definition(*backward)]
    results = gru_grad.into(out, *backward, outputs=("dW",))
    assert [r is None for r in results] == [True, False, True, True, True]
    assert [bool(np.isnan(o).all()) for o in out] == [True, False, True, True, True]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("layout", list(layouts(np.zeros((2, 2), F32))))
def test_layouts(layout, dtype):
    given = case(S=3, N=4, inputs=5, H=6, direction="bidirectional", lengths=True, dtype=dtype.type)

    def relaid(array):
        return None if array is None else layouts(array).get(layout, array)

    check(gru_training, *map(relaid, given.forward), direction="bidirectional")
    backward = given.backward(direction="bidirectional")
    check(gru_grad, *map(relaid, backward), direction="bidirectional", linear_before_reset=1)


def test_broadcast_views_and_lengths_as_a_list():
    given = case(S=3, N=4, inputs=5, H=6, dtype=np.float32)
    given = given._replace(
        X=np.broadcast_to(given.X[:1, :1], (3, 4, 5)), SL=[3, 0, 2, 1],
        Ht0=np.broadcast_to(given.Ht0[:, :1], (1, 4, 6)), dHAll=np.broadcast_to(np.float32(1), (3, 1, 4, 6)),
        dHFinal=np.broadcast_to(np.float32(0.5), (1, 4, 6)),
    )  # fmt: skip
    check_both(given, hidden_size=6)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_same_bits_on_any_number_of_threads(dtype):
    given = case(S=6, N=37, inputs=70, H=65, direction="bidirectional", lengths=True, dtype=dtype.type)
    for linear_before_reset in (0, 1):
        attributes = {"direction": "bidirectional", "linear_before_reset": linear_before_reset}
        backward = given.backward(**attributes)
        results = []
        for count in (1, 2, 3, 7):
            with on_threads(count):
                results.append([*gru_training(*given.forward, **attributes), *gru_grad(*backward, **attributes)])
        for other in results[1:]:
            assert all(same_bits(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@settings(max_examples=examples(20), deadline=None, derandomize=True)
@drawn(data=st.data())
def test_any_size(dtype, data):
    S, N, inputs, H = (
        data.draw(st.integers(0, limit), name) for limit, name in ((5, "S"), (9, "N"), (20, "I"), (20, "H"))
    )
    direction = data.draw(st.sampled_from(DIRECTIONS))
    missing = data.draw(st.sets(st.sampled_from(OPTIONALS)))
    given = case(S, N, inputs, H, direction, data.draw(st.booleans()), dtype, data.draw(st.integers(0, 99))).without(
        *missing
    )
    check_both(
        given, direction=direction, linear_before_reset=data.draw(st.integers(0, 1)),
        clip=data.draw(st.sampled_from([None, 0.8])),
    )  # fmt: skip


def test_the_defaults_spelled_out_change_nothing():
    given = case(S=3, N=4, inputs=5, H=6, dtype=np.float32)
    plain = call(gru_training, *given.forward)
    spelled = call(
        gru_training, *given.forward, hidden_size=np.int64(6), linear_before_reset=0, direction="forward",
        activations=["SIGMOID", "tanh"], activation_alpha=[], activation_beta=(), clip=float("inf"),
    )  # fmt: skip
    assert all(same_bits(a, b) for a, b in zip(plain, spelled, strict=True))


expected = recurrence  # how far a right kernel may be from the definition


def node_cases() -> Iterator[NodeCase]:
    """Small calls for every runtime to run."""
    grid = itertools.product(FLOATS, (0, 1), DIRECTIONS, (False, True))
    for dtype, linear_before_reset, direction, lengths in grid:
        sizes = {"S": 4, "N": 3, "inputs": 5, "H": 6, "direction": direction, "lengths": lengths}
        attributes = {"linear_before_reset": linear_before_reset, "direction": direction, "hidden_size": 6}
        parameters = {
            "type": str(dtype),
            "linear": f"linear_before_reset_{linear_before_reset}",
            "direction": direction,
            "absent": without([] if lengths else ["SL"]),
        }
        yield from _both_of_gru(parameters, attributes, dtype, sizes)
    patterns = [m for n in (1, 2) for m in itertools.combinations(OPTIONALS, n)]
    for dtype, missing in itertools.product(FLOATS, patterns):
        parameters = {"type": str(dtype), "absent": without(["SL", *missing])}
        both = _both_of_gru(parameters, {}, dtype, {}, missing)
        yield from (node for node in both if all(m in [i.name for i in node.op.inputs] for m in missing))
    for count in (1, 2):
        for outputs in itertools.combinations(GRADIENTS, count):
            yield from _some_of_gru(gru_grad, outputs)
    yield from _some_of_gru(gru_training, ("HAll", "ZRH"))
    every_attribute = {
        "direction": "bidirectional",
        "activations": ["HardSigmoid", "ScaledTanh", "sigmoid", "LeakyRelu"],
        "activation_alpha": [0.25, 1.5, 0.125],
        "activation_beta": [0.5, 0.75],
        "clip": 0.5,
        "linear_before_reset": 1,
    }
    parameters = {"type": "float32", "attributes": "every_attribute"}
    yield from _both_of_gru(parameters, every_attribute, np.dtype(np.float32), {"direction": "bidirectional"})


def _both_of_gru(
    parameters: dict[str, str],
    attributes: dict[str, Any],
    dtype: np.dtype[Any],
    sizes: dict[str, Any],
    missing: Sequence[str] = (),
) -> Iterator[NodeCase]:
    def given():
        return case(**sizes, dtype=dtype.type).without(*missing)

    yield NodeCase(gru_training, parameters, lambda: given().forward, attributes)
    yield NodeCase(gru_grad, parameters, lambda: given().backward(**attributes), attributes)


def _some_of_gru(op: Any, outputs: Sequence[str]) -> Iterator[NodeCase]:
    for node in _both_of_gru({"type": "float32", "outputs": only(outputs)}, {}, np.dtype(np.float32), {}):
        if node.op is op:
            yield NodeCase(op, node.parameters, node.make_inputs, outputs=outputs)
