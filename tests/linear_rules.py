"""What the tests of linear operators share: the gradient is the adjoint, and PyTorch has the same."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tests.gradients import evaluate, model_of_node

import onnxgrad


def gradients_of_node(
    op_type: str, inputs: Sequence[Any], seed: int = 5, wrt: Sequence[int] = (0,), **how: Any
) -> tuple[Any, Any, list[Any]]:
    """The result of a node in float64, a random gradient of it, and the gradients of its inputs."""
    model, feeds = model_of_node(op_type, inputs, **how)
    (result, *_) = evaluate(model, feeds)
    g = np.random.default_rng(seed).standard_normal(result.shape)
    differentiated = onnxgrad.gradient(model, [f"in_{k}" for k in wrt], "out_0")
    found = evaluate(differentiated, {**feeds, "out_0_grad": g})[len(model.graph.output) :]
    return result, g, found


def check_adjoint(op_type: str, *inputs: Any, exact: float = 1e-12, **how: Any) -> None:
    """<A x, y> = <x, Aᵀ y> for the first input, which the operator is linear in."""
    for static in (True, False):
        result, g, (adjoint,) = gradients_of_node(op_type, inputs, static=static, **how)
        assert adjoint.shape == inputs[0].shape
        scale = np.sqrt(np.sum(result**2) * np.sum(g**2)) + 1e-30
        assert abs(np.sum(result * g) - np.sum(inputs[0] * adjoint)) < exact * scale, op_type


def check_like_torch(
    function: Callable[..., Any], op_type: str, *inputs: Any, wrt: Sequence[int] = (0,), exact: float = 1e-7, **how: Any
) -> None:
    """The gradients are those of a function of PyTorch, which takes the inputs in `wrt`."""
    import torch

    result, g, found = gradients_of_node(op_type, inputs, wrt=wrt, **how)
    given = [torch.from_numpy(inputs[k].copy()).requires_grad_() for k in wrt]
    expected = function(*given)
    np.testing.assert_allclose(result, expected.detach().numpy(), rtol=exact, atol=exact)
    expected.backward(torch.from_numpy(g))
    for mine, theirs in zip(found, given, strict=True):
        np.testing.assert_allclose(mine, theirs.grad.numpy(), rtol=exact, atol=exact)
