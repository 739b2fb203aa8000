"""The activation functions of ONNX's recurrent operators, and their derivatives."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from onnxgrad.tensor_types import Array


@dataclass(frozen=True)
class Activation:
    """y = function(x, alpha, beta) and dy/dx = derivative(y, alpha, beta), computed from the result, which is kept."""

    function: Callable[[Array, float, float], Array]
    derivative: Callable[[Array, float, float], Array]
    alpha: float | None = None  # the default; None: the function has no such parameter
    beta: float | None = None


def _sigmoid(x: Array) -> Array:
    e = np.exp(-np.abs(x))  # never overflows
    return np.where(x >= 0, 1 / (1 + e), e / (1 + e))


def _scaled_tanh_derivative(y: Array, a: float, b: float) -> Array:
    return b * (a - y * y / a) if a != 0 else np.zeros_like(y)


# At a kink the derivative is PyTorch's: 0 for Relu, HardSigmoid and ThresholdedRelu, alpha for LeakyRelu and Elu.
ACTIVATIONS: dict[str, Activation] = {
    "Sigmoid": Activation(lambda x, a, b: _sigmoid(x), lambda y, a, b: y * (1 - y)),
    "Tanh": Activation(lambda x, a, b: np.tanh(x), lambda y, a, b: 1 - y * y),
    "Relu": Activation(lambda x, a, b: np.maximum(x, 0), lambda y, a, b: 1.0 * (y > 0)),
    "HardSigmoid": Activation(
        lambda x, a, b: np.clip(a * x + b, 0, 1), lambda y, a, b: a * ((y > 0) & (y < 1)), alpha=0.2, beta=0.5
    ),
    "LeakyRelu": Activation(
        lambda x, a, b: np.where(x > 0, x, a * x), lambda y, a, b: np.where(y > 0, 1.0, a), alpha=0.01
    ),
    "ScaledTanh": Activation(lambda x, a, b: a * np.tanh(b * x), _scaled_tanh_derivative, alpha=1.0, beta=1.0),
    "Elu": Activation(
        lambda x, a, b: np.where(x > 0, x, a * np.expm1(np.minimum(x, 0))),
        lambda y, a, b: np.where(y > 0, 1.0, y + a),
        alpha=1.0,
    ),
    "Softsign": Activation(lambda x, a, b: x / (1 + np.abs(x)), lambda y, a, b: (1 - np.abs(y)) ** 2),
    "Softplus": Activation(lambda x, a, b: np.logaddexp(x, 0), lambda y, a, b: -np.expm1(-y)),
    "ThresholdedRelu": Activation(
        lambda x, a, b: np.where(x > a, x, 0), lambda y, a, b: np.where((y > a) & (y != 0), 1.0, 0.0), alpha=1.0
    ),
    "Affine": Activation(lambda x, a, b: a * x + b, lambda y, a, b: np.full_like(y, a), alpha=1.0, beta=0.0),
}
_BY_LOWER_NAME = {name.lower(): name for name in ACTIVATIONS}
# With a negative alpha a negative x gives a positive y, from which the sign of x can no longer be read.
_NEED_POSITIVE_ALPHA = ("LeakyRelu", "Elu")


@dataclass(frozen=True)
class Chosen:
    """One activation of one gate, its parameters settled."""

    name: str
    alpha: float
    beta: float

    def __call__(self, x: Array) -> Array:
        return ACTIVATIONS[self.name].function(x, self.alpha, self.beta).astype(x.dtype)

    def derivative(self, y: Array) -> Array:
        return ACTIVATIONS[self.name].derivative(y, self.alpha, self.beta).astype(y.dtype)


def choose(
    names: Sequence[str] | None,
    alphas: Sequence[float] | None,
    betas: Sequence[float] | None,
    defaults: Sequence[str],
    directions: int,
) -> list[Chosen]:
    """The activations in the order of the attribute.

    alphas and betas go, as in onnxruntime, in order to the functions that have such a parameter; where they run out,
    functions keep their defaults.
    """
    wanted = list(names) if names else list(defaults) * directions
    if len(wanted) != len(defaults) * directions:
        raise ValueError(f"activations has {len(wanted)} names, expected {len(defaults) * directions}")
    chosen = []
    left_alphas, left_betas = list(alphas or ()), list(betas or ())
    for name in wanted:
        known = _BY_LOWER_NAME.get(name.lower())
        if known is None:
            raise ValueError(f"activations names {name!r}, expected some of {', '.join(ACTIVATIONS)}")
        entry = ACTIVATIONS[known]
        alpha = 0.0 if entry.alpha is None else left_alphas.pop(0) if left_alphas else entry.alpha
        beta = 0.0 if entry.beta is None else left_betas.pop(0) if left_betas else entry.beta
        if known in _NEED_POSITIVE_ALPHA and not alpha >= 0:
            raise ValueError(
                f"activation_alpha is {alpha} for {known}, expected at least 0: below, y does not determine dy/dx"
            )
        chosen.append(Chosen(known, alpha, beta))
    if left_alphas:
        raise ValueError(f"activation_alpha has {len(left_alphas)} values more than these activations take")
    if left_betas:
        raise ValueError(f"activation_beta has {len(left_betas)} values more than these activations take")
    return chosen
