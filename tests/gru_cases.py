"""Random inputs of a GRU, and the GRU of the contract written in torch, for autograd to differentiate."""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from onnxgrad import gru_training

DIRECTIONS = ("forward", "reverse", "bidirectional")
GRADIENTS = ("dX", "dW", "dR", "dB", "dH0")
OPTIONALS = ("B", "Ht0", "dHAll", "dHFinal")


class Case(NamedTuple):
    """The inputs of GRUTraining, and the gradients that reach its results."""

    X: np.ndarray
    W: np.ndarray
    R: np.ndarray
    B: np.ndarray | None
    SL: np.ndarray | None
    Ht0: np.ndarray | None
    dHAll: np.ndarray | None  # noqa: N815
    dHFinal: np.ndarray | None  # noqa: N815

    @property
    def forward(self) -> tuple[Any, ...]:
        """The arguments of gru_training."""
        return self[:6]

    def without(self, *names: str) -> "Case":
        """The same with some inputs absent."""
        return self._replace(**dict.fromkeys(names))

    def backward(self, **attributes: Any) -> tuple[Any, ...]:
        """The arguments of gru_grad, with the results of the forward definition in the case's own type."""
        HAll, _, ZRH = gru_training.definition(*self.forward, **attributes)
        return *self.forward, HAll, ZRH, self.dHAll, self.dHFinal


def case(S=4, N=3, inputs=3, H=2, direction="forward", lengths=False, dtype=np.float64, seed=0, scale=0.6) -> Case:
    """Numbers of moderate size, so that no gate saturates; `lengths` gives every row its own, 0 and S among them."""
    rng = np.random.default_rng(seed)
    D = 2 if direction == "bidirectional" else 1

    def some(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * scale).astype(dtype)

    SL = rng.permutation(np.resize(np.append(np.arange(S, -1, -2), 0), N)).astype(np.int32) if lengths else None
    shrink = dtype(max(1, H)) ** -0.5 * 2 if H > 4 else dtype(1)
    W, R = some(D, 3 * H, inputs), (some(D, 3 * H, H) * shrink).astype(dtype)
    B, Ht0 = some(D, 6 * H), some(D, N, H)
    return Case(some(S, N, inputs), W, R, B, SL, Ht0, some(S, D, N, H), some(D, N, H))


ACTIVATIONS = {
    "sigmoid": lambda x, a, b: torch.sigmoid(x),
    "tanh": lambda x, a, b: torch.tanh(x),
    "relu": lambda x, a, b: torch.relu(x),
    "hardsigmoid": lambda x, a, b: torch.clamp(a * x + b, 0, 1),
    "leakyrelu": lambda x, a, b: functional.leaky_relu(x, a),
    "scaledtanh": lambda x, a, b: a * torch.tanh(b * x),
    "elu": lambda x, a, b: functional.elu(x, a),
    "softsign": lambda x, a, b: functional.softsign(x),
    "softplus": lambda x, a, b: functional.softplus(x),
    "thresholdedrelu": lambda x, a, b: torch.where(x > a, x, torch.zeros_like(x)),
    "affine": lambda x, a, b: a * x + b,
}


def torch_gru(
    X: torch.Tensor,
    W: torch.Tensor,
    R: torch.Tensor,
    B: torch.Tensor,
    SL: Any,
    Ht0: torch.Tensor,
    linear_before_reset: int = 0,
    direction: str = "forward",
    functions: Any = (("sigmoid", 0, 0), ("tanh", 0, 0)) * 2,
    clip: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """HAll and HFinal, row by row and step by step; `functions` gives (name, alpha, beta) of f, g, f, g."""
    S, N, _ = X.shape
    every_state, last_states = [], []
    for d, backwards in enumerate({"forward": [0], "reverse": [1], "bidirectional": [0, 1]}[direction]):
        (f, f_alpha, f_beta), (g, g_alpha, g_beta) = functions[2 * d : 2 * d + 2]
        states = [[torch.zeros_like(Ht0[d, 0]) for _ in range(N)] for _ in range(S)]
        last = []
        for n in range(N):
            length = S if SL is None else int(SL[n])
            H = Ht0[d, n]
            for t in reversed(range(length)) if backwards else range(length):
                Wz, Wr, Wh = W[d].chunk(3)
                Rz, Rr, Rh = R[d].chunk(3)
                Wbz, Wbr, Wbh, Rbz, Rbr, Rbh = B[d].chunk(6)

                def clamp(x):
                    return x if clip is None else torch.clamp(x, -clip, clip)

                z = ACTIVATIONS[f](clamp(Wz @ X[t, n] + Rz @ H + Wbz + Rbz), f_alpha, f_beta)
                r = ACTIVATIONS[f](clamp(Wr @ X[t, n] + Rr @ H + Wbr + Rbr), f_alpha, f_beta)
                inner = r * (Rh @ H + Rbh) if linear_before_reset else Rh @ (r * H) + Rbh
                h = ACTIVATIONS[g](clamp(Wh @ X[t, n] + inner + Wbh), g_alpha, g_beta)
                H = (1 - z) * h + z * H
                states[t][n] = H
            last.append(H)
        every_state.append(torch.stack([torch.stack(row) for row in states]))
        last_states.append(torch.stack(last))
    return torch.stack(every_state, 1), torch.stack(last_states)


def torch_gradients(given: Case, **attributes: Any) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
    """(HAll, HFinal) and (dX, dW, dR, dB, dH0) in float64, by autograd."""
    (_, N, _), (D, _, H) = given.X.shape, given.R.shape
    B = np.zeros((D, 6 * H)) if given.B is None else given.B
    Ht0 = np.zeros((D, N, H)) if given.Ht0 is None else given.Ht0
    X, W, R, B, Ht0 = (
        torch.tensor(a.astype(np.float64), requires_grad=True) for a in (given.X, given.W, given.R, B, Ht0)
    )
    HAll, HFinal = torch_gru(X, W, R, B, given.SL, Ht0, **attributes)
    total = (HAll * 0).sum() + (HFinal * 0).sum()
    for result, gradient in ((HAll, given.dHAll), (HFinal, given.dHFinal)):
        if gradient is not None:
            total = total + (result * torch.from_numpy(gradient.astype(np.float64))).sum()
    gradients = torch.autograd.grad(total, (X, W, R, B, Ht0), allow_unused=True, materialize_grads=True)
    return (HAll.detach().numpy(), HFinal.detach().numpy()), tuple(g.numpy() for g in gradients)
