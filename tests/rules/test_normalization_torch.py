"""Normalizations beside PyTorch's, in float32: first and second derivatives; half numbers; what has no gradient."""

import numpy as np
import pytest
import torch
from tests.gradients import evaluate, model_of_node
from torch.nn import functional

import onnxgrad
from onnxgrad.rules.engine import NoRuleError

RNG = np.random.default_rng(5)
IMAGE = (2, 4, 3, 3)
CASES = {
    "LayerNormalization": (IMAGE, (3, 3), (3, 3), {"axis": 2}, lambda x, s, b: functional.layer_norm(x, (3, 3), s, b)),
    "InstanceNormalization": (IMAGE, (4,), (4,), {}, lambda x, s, b: functional.instance_norm(x, weight=s, bias=b)),
    "GroupNormalization": (IMAGE, (4,), (4,), {"num_groups": 2}, lambda x, s, b: functional.group_norm(x, 2, s, b)),
    "RMSNormalization": (IMAGE, (3,), None, {"epsilon": 1e-5}, lambda x, s: functional.rms_norm(x, (3,), s, 1e-5)),
    "SimplifiedLayerNormalization": (IMAGE, (3,), None, {}, lambda x, s: functional.rms_norm(x, (3,), s, 1e-5)),
    "LpNormalization": (IMAGE, None, None, {"axis": 1}, lambda x: functional.normalize(x, dim=1)),
    "LRN": (IMAGE, None, None, {"size": 3, "alpha": 0.5}, lambda x: functional.local_response_norm(x, 3, 0.5)),
}  # fmt: skip


def torch_gradients(function, arrays, seed, second_seed):
    inputs = [torch.tensor(a, dtype=torch.float64, requires_grad=True) for a in arrays]
    first = torch.autograd.grad(function(*inputs), inputs, torch.tensor(seed, dtype=torch.float64), create_graph=True)
    total = sum((g * g * w).sum() for g, w in zip(first, map(torch.tensor, second_seed), strict=True))
    second = torch.autograd.grad(total, inputs, allow_unused=True)
    return [g.detach().numpy() for g in first], [None if g is None else g.numpy() for g in second]


def check_with_torch(name, arrays, function, wrt, extra=(), **how):
    model, feeds = model_of_node(name, [*arrays, *extra], dtype=np.float32, **how)
    names = [f"in_{k}" for k in wrt]
    once = onnxgrad.gradient(model, names, ["out_0"])
    seed = RNG.standard_normal(arrays[0].shape)
    second_seed = [RNG.standard_normal(arrays[k].shape) for k in wrt]
    first, second = torch_gradients(function, arrays, seed, second_seed)
    seeds = {"out_0_grad": seed.astype(np.float32)}
    count = len(model.graph.output)
    found = evaluate(once, {**feeds, **seeds})[count:]
    for got, expected in zip(found, first, strict=True):
        close(got, expected)
    needed = [k for k in wrt if second[wrt.index(k)] is not None]
    twice = onnxgrad.gradient(once, [f"in_{k}" for k in needed], [f"in_{k}_grad" for k in wrt])
    for k in wrt:
        seeds[f"in_{k}_grad_grad"] = (2 * first[wrt.index(k)] * second_seed[wrt.index(k)]).astype(np.float32)
    there = {i.name for i in twice.graph.input}
    found = evaluate(twice, {n: a for n, a in {**feeds, **seeds}.items() if n in there})[-len(needed) :]
    for got, k in zip(found, needed, strict=True):
        close(got, second[wrt.index(k)])


def close(got, expected):
    np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max())


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_as_in_torch(name, static):
    shape, scale, shift, attributes, function = CASES[name]
    arrays = [RNG.standard_normal(shape)] + [RNG.uniform(0.5, 1.5, s) for s in (scale, shift) if s is not None]
    wrt = list(range(len(arrays)))
    check_with_torch(name, arrays, function, wrt, attributes=attributes, opset=23, static=static)


@pytest.mark.parametrize("shape", [(6, 4), IMAGE])
@pytest.mark.parametrize("training", [0, 1])
def test_batch_normalization_as_in_torch(training, shape):
    arrays = [RNG.standard_normal(shape), *(RNG.uniform(0.5, 1.5, 4) for _ in range(2))]
    mean, variance = (RNG.uniform(0.5, 1.5, 4) for _ in range(2))

    def function(x, s, b):
        return functional.batch_norm(x, torch.tensor(mean), torch.tensor(variance), s, b, training=bool(training))

    check_with_torch(
        "BatchNormalization", arrays, function, [0, 1, 2], [mean, variance],
        outputs=3 if training else 1, attributes={"training_mode": training},
    )  # fmt: skip


@pytest.mark.parametrize("name", ["LayerNormalization", "RMSNormalization", "GroupNormalization", "LpNormalization"])
def test_half_numbers_are_summed_in_float32(name):
    shape, scale, shift, attributes, _ = CASES[name]
    arrays = [RNG.standard_normal(shape)] + [RNG.uniform(0.5, 1.5, s) for s in (scale, shift) if s is not None]
    results = []
    for dtype in (np.float16, np.float32):
        model, feeds = model_of_node(name, arrays, attributes=attributes, opset=23, dtype=dtype)
        seed = np.random.default_rng(1).standard_normal(shape).astype(dtype)
        results.append(evaluate(onnxgrad.gradient(model, list(feeds)), {**feeds, "out_0_grad": seed})[1:])
    for got, expected in zip(*results, strict=True):
        assert got.dtype == np.float16
        np.testing.assert_allclose(got, expected, rtol=1e-2, atol=1e-2 * np.abs(expected).max())


def test_lp_normalization_of_nothing():
    model, feeds = model_of_node("LpNormalization", [np.zeros((2, 3))])
    _, found = evaluate(onnxgrad.gradient(model, ["in_0"]), {**feeds, "out_0_grad": np.ones((2, 3))})
    assert np.array_equal(found, np.zeros((2, 3)))


def test_running_statistics_have_no_gradient():
    channels = [RNG.uniform(0.5, 1.5, 4) for _ in range(4)]
    model, feeds = model_of_node(
        "BatchNormalization", [RNG.standard_normal(IMAGE), *channels], 3, attributes={"training_mode": 1}
    )
    with pytest.raises(NoRuleError, match=r"no rule for the gradient of its output 1"):
        onnxgrad.gradient(model, ["in_0"], ["out_1"])
    _, _, _, found = evaluate(onnxgrad.gradient(model, ["in_3"], ["out_0"]), {**feeds, "out_0_grad": np.ones(IMAGE)})
    assert np.array_equal(found, np.zeros(4))
