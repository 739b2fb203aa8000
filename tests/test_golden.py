"""Our definitions and kernels against the stored results of onnxruntime-training 1.19.2 (data/make_golden.py)."""

import functools
import json
from pathlib import Path

import numpy as np
import pytest
from tests import checks

from onnxgrad.op import OPERATORS

GOLDEN = Path(__file__).parent / "data" / "golden"
INDEX = {path.stem: json.loads(path.read_text()) for path in sorted(GOLDEN.glob("*.json"))}


def cases(invalid):
    return [
        pytest.param(operator, case, id=f"{operator}: {case['name']}")
        for operator, index in INDEX.items()
        for case in index["cases"]
        if ("invalid" in case) == invalid
    ]


@functools.cache
def numbers(operator):
    with np.load(GOLDEN / f"{operator}.npz") as packed:
        return dict(packed)


def arrays(operator, stored):
    """The inputs or outputs of a case by name, cut out of the flat array of their type."""
    cut = {}
    for name, (dtype, shape, offset) in stored.items():
        cut[name] = numbers(operator)[dtype][offset : offset + int(np.prod(shape))].reshape(shape)
    return cut


def call(how, operator, case):
    op = OPERATORS[operator]
    given = arrays(operator, case["inputs"])
    settings = dict(case["attributes"])
    if op.chooses_outputs and "outputs" in case:
        settings["outputs"] = list(case["outputs"])
    run = functools.partial(checks.call, op) if how == "kernel" else op.definition
    results = run(*[given.get(i.name) for i in op.inputs], **settings)
    results = results if isinstance(results, tuple) else (results,)
    return dict(zip([o.name for o in op.outputs], results, strict=True))


# How far two correct results may lie apart. A sum of n terms, in whatever order, is off by at most (n-1)·u·Σ|term| with
# u = eps/2; two such sums differ by at most (n-1)·eps·Σ|term|: one term or none must agree exactly.


def no_difference(operator, case, name):
    return 0


def of_gathered_sums(operator, case, name):
    """(n-1)·eps·Σ|term| for each element; float16 adds up in float32 and rounds once, to neighbours at worst."""
    given = arrays(operator, case["inputs"])
    definition = OPERATORS[operator].definition
    dtype, dY = given["dY"].dtype, given["dY"].astype(np.float64)
    count = definition(**{**given, "dY": np.ones_like(dY)}, **case["attributes"])
    total = definition(**{**given, "dY": np.abs(dY)}, **case["attributes"])
    apart = np.maximum(count - 1, 0) * np.finfo(np.float32 if dtype == np.float16 else dtype).eps * total
    if dtype == np.float16:
        apart += np.where(count > 1, np.finfo(dtype).eps * np.abs(arrays(operator, case["outputs"])[name]), 0)
    return apart


def of_states(operator, case, name):
    """eps · (I + H + 2 terms of a gate's sum) · the largest weight, if above 1 · S steps that carry errors on."""
    given = arrays(operator, case["inputs"])
    S, inputs, H = len(given["X"]), given["X"].shape[2], given["R"].shape[2]
    weight = max(np.abs(given[n]).max() for n in ("W", "R", "B") if n in given)
    return np.finfo(np.float32).eps * (inputs + H + 2) * max(1, weight) * S


def of_recurrent_gradients(operator, case, name):
    """eps · (one term for each gate's sum · S steps, then S·N terms of a weight's sum) · the largest value."""
    (S, N, _), (_, gates, _) = (case["inputs"][n][1] for n in "XR")
    largest = np.abs(arrays(operator, case["outputs"])[name]).max(initial=0)
    return np.finfo(np.float32).eps * (gates * S + S * N) * largest


def of_harness(operator, case, name):
    """Two right kernels are each as far from the definition as the harness allows."""
    op, given = OPERATORS[operator], arrays(operator, case["inputs"])
    _, bounds = checks.expect(op, *[given.get(i.name) for i in op.inputs], **case["attributes"])
    return 2 * bounds[op.output_names.index(name)]


def of_probabilities(operator, case, name):
    """A few roundings of (probability - 1) · each, wherever the two computed in one order or another."""
    given = arrays(operator, case["inputs"])
    each = np.abs(given["dY"]).max(initial=0) * np.abs(given.get("weight", np.ones(1, np.float32))).max()
    return 8 * np.finfo(given["log_prob"].dtype).eps * each


def of_derivatives(operator, case, name):
    """Roundings of dY · derivative: the peer has float32 constants, and multiplies X by a rounded s · (1 - s)."""
    dY, X, *_ = arrays(operator, case["inputs"]).values()
    reach = 1 + np.abs(X.astype(np.float32)) if X.dtype != np.bool_ else 1
    return 8 * max(np.finfo(dY.dtype).eps, np.finfo(np.float32).eps) * np.abs(dY) * reach


def of_products(operator, case, name):
    """(n-1)·eps·Σ|term| for each element, as for sums, and one more for the product."""
    given = arrays(operator, case["inputs"])
    definition, position = OPERATORS[operator].definition, ("dX", "dW", "dB").index(name)
    wide = {n: a.astype(np.float64) for n, a in given.items()}
    count = definition(**{n: np.ones_like(a) for n, a in wide.items()}, **case["attributes"])[position]
    total = definition(**{n: np.abs(a) for n, a in wide.items()}, **case["attributes"])[position]
    return count * np.finfo(np.float32).eps * total


ALLOWED = {  # all others: of_harness
    "ConvGrad": of_products,
    "ReluGrad": no_difference,
    "LeakyReluGrad": of_derivatives,
    "SigmoidGrad": of_derivatives,
    "TanhGrad": of_derivatives,
    "GeluGrad": of_derivatives,
    "FastGeluGrad": of_derivatives,
    "QuickGeluGrad": of_derivatives,
    "BiasGeluGrad_dX": of_derivatives,
    "BiasFastGeluGrad_dX": of_derivatives,
    "DropoutGrad": of_derivatives,
    "BroadcastGradientArgs": no_difference,
    "SliceGrad": no_difference,
    "GatherGrad": of_gathered_sums,
    "GatherElementsGrad": of_gathered_sums,
    "GRUTraining": of_states,
    "GRUGrad": of_recurrent_gradients,
    "LSTMTraining": of_states,
    "SoftmaxCrossEntropyLossGrad": of_probabilities,
    "LSTMGrad": of_recurrent_gradients,
}


def test_every_operator_has_cases():
    assert set(ALLOWED) <= set(INDEX) <= set(OPERATORS)
    assert all(index["peer"] == "onnxruntime-training 1.19.2" for index in INDEX.values())


@pytest.mark.parametrize("how", ["definition", "kernel"])
@pytest.mark.parametrize(("operator", "case"), cases(invalid=False))
def test_agrees_with_the_peer(how, operator, case):
    ours = call(how, operator, case)
    if OPERATORS[operator].chooses_outputs:
        assert {name for name, array in ours.items() if array is not None} == set(case["outputs"])
    for name, peers in arrays(operator, case["outputs"]).items():
        assert (ours[name].dtype, ours[name].shape) == (peers.dtype, peers.shape), name
        apart = np.abs(ours[name].astype(np.result_type(peers, np.int64)) - peers)
        far = ~(apart <= ALLOWED.get(operator, of_harness)(operator, case, name))  # so that NaN is far from everything
        assert not far.any(), (
            f"{name}{np.argwhere(far)[0].tolist()}: {ours[name][far][0]}, the peer has {peers[far][0]}"
        )


@pytest.mark.parametrize("how", ["definition", "kernel"])
@pytest.mark.parametrize(("operator", "case"), cases(invalid=True))
def test_refuses_what_the_contract_refuses(how, operator, case):
    """With or without the peer: where it "differs", it had computed something from input that makes no sense."""
    with pytest.raises((ValueError, TypeError, IndexError), match=f"^{operator}: "):
        call(how, operator, case)


@pytest.mark.parametrize(("operator", "case"), [c for c in cases(invalid=True) if "peer_differs" in c.values[1]])
def test_kernel_and_definition_refuse_alike(operator, case):
    raised = []
    for how in ("definition", "kernel"):
        with pytest.raises((ValueError, TypeError, IndexError)) as error:
            call(how, operator, case)
        raised.append(error.type)
    assert raised[0] is raised[1]
