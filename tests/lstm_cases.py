"""Random inputs of an LSTM, and the LSTM of the contract written in torch, for autograd to differentiate."""

from typing import Any, NamedTuple

import numpy as np
import torch
from tests.gru_cases import ACTIVATIONS

from onnxgrad.ops.lstm import lstm_training

DIRECTIONS = ("forward", "reverse", "bidirectional")
GRADIENTS = ("dX", "dW", "dR", "dB", "dH0", "dC0", "dP")
OPTIONALS = ("B", "Ht0", "Ct0", "P", "dHAll", "dHFinal", "dCFinal")


class Case(NamedTuple):
    """The inputs of LSTMTraining, and the gradients that reach its results."""

    X: np.ndarray
    W: np.ndarray
    R: np.ndarray
    B: np.ndarray | None
    SL: np.ndarray | None
    Ht0: np.ndarray | None
    Ct0: np.ndarray | None
    P: np.ndarray | None
    dHAll: np.ndarray | None  # noqa: N815
    dHFinal: np.ndarray | None  # noqa: N815
    dCFinal: np.ndarray | None  # noqa: N815

    @property
    def forward(self) -> tuple[Any, ...]:
        """The arguments of lstm_training."""
        return self[:8]

    def without(self, *names: str) -> "Case":
        """The same with some inputs absent."""
        return self._replace(**dict.fromkeys(names))

    def backward(self, **attributes: Any) -> tuple[Any, ...]:
        """The arguments of lstm_grad, with the results of the forward definition in the case's own type."""
        HAll, _, _, CAll, IOFC = lstm_training.definition(*self.forward, **attributes)
        inputs = self.X, self.W, self.R, self.SL, self.Ht0, self.Ct0
        return *inputs, HAll, CAll, IOFC, self.dHAll, self.dHFinal, self.dCFinal, self.B, self.P


def case(S=4, N=3, inputs=3, H=2, direction="forward", lengths=False, dtype=np.float64, seed=0, scale=0.6) -> Case:
    """Numbers of moderate size, so that no gate saturates; `lengths` gives every row its own, 0 and S among them."""
    rng = np.random.default_rng(seed)
    D = 2 if direction == "bidirectional" else 1

    def some(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * scale).astype(dtype)

    SL = rng.permutation(np.resize(np.append(np.arange(S, -1, -2), 0), N)).astype(np.int32) if lengths else None
    shrink = dtype(max(1, H)) ** -0.5 * 2 if H > 4 else dtype(1)
    W, R = some(D, 4 * H, inputs), (some(D, 4 * H, H) * shrink).astype(dtype)
    X, B, P = some(S, N, inputs), some(D, 8 * H), some(D, 3 * H)
    states = [some(D, N, H) for _ in range(4)]
    return Case(X, W, R, B, SL, *states[:2], P, some(S, D, N, H), *states[2:])


def torch_lstm(
    X: torch.Tensor,
    W: torch.Tensor,
    R: torch.Tensor,
    B: torch.Tensor,
    SL: Any,
    Ht0: torch.Tensor,
    Ct0: torch.Tensor,
    P: torch.Tensor,
    input_forget: int = 0,
    direction: str = "forward",
    functions: Any = (("sigmoid", 0, 0), ("tanh", 0, 0), ("tanh", 0, 0)) * 2,
    clip: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """HAll, HFinal and CFinal, row by row, step by step; `functions` gives (name, alpha, beta) of f, g, h, f, g, h."""
    S, N, _ = X.shape
    every_state, last_states, last_cells = [], [], []
    for d, backwards in enumerate({"forward": [0], "reverse": [1], "bidirectional": [0, 1]}[direction]):

        def activation(k, x, d=d):
            name, alpha, beta = functions[3 * d + k]
            return ACTIVATIONS[name](x if k == 2 or clip is None else torch.clamp(x, -clip, clip), alpha, beta)

        Pi, Po, Pf = P[d].chunk(3)
        states = [[torch.zeros_like(Ht0[d, 0]) for _ in range(N)] for _ in range(S)]
        last, cells = [], []
        for n in range(N):
            length = S if SL is None else int(SL[n])
            H, C = Ht0[d, n], Ct0[d, n]
            for t in reversed(range(length)) if backwards else range(length):
                inner = W[d] @ X[t, n] + R[d] @ H + sum(B[d].chunk(2))
                before_i, before_o, before_f, before_c = inner.chunk(4)
                i, c = activation(0, before_i + Pi * C), activation(1, before_c)
                f = 1 - i if input_forget else activation(0, before_f + Pf * C)
                C = f * C + i * c
                H = activation(0, before_o + Po * C) * activation(2, C)
                states[t][n] = H
            last.append(H)
            cells.append(C)
        every_state.append(torch.stack([torch.stack(row) for row in states]))
        last_states.append(torch.stack(last))
        last_cells.append(torch.stack(cells))
    return torch.stack(every_state, 1), torch.stack(last_states), torch.stack(last_cells)


def torch_gradients(given: Case, **attributes: Any) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
    """(HAll, HFinal, CFinal) and the seven gradients in float64, by autograd."""
    (_, N, _), (D, _, H) = given.X.shape, given.R.shape
    shapes = {"B": (D, 8 * H), "Ht0": (D, N, H), "Ct0": (D, N, H), "P": (D, 3 * H)}
    filled = {n: np.zeros(s) if getattr(given, n) is None else getattr(given, n) for n, s in shapes.items()}
    arrays = {"X": given.X, "W": given.W, "R": given.R, **filled}
    tensors = {n: torch.tensor(a.astype(np.float64), requires_grad=True) for n, a in arrays.items()}
    results = torch_lstm(**tensors, SL=given.SL, **attributes)
    total = sum((r * 0).sum() for r in results)
    for result, gradient in zip(results, (given.dHAll, given.dHFinal, given.dCFinal), strict=True):
        if gradient is not None:
            total = total + (result * torch.from_numpy(gradient.astype(np.float64))).sum()
    order = [tensors[n] for n in ("X", "W", "R", "B", "Ht0", "Ct0", "P")]
    gradients = torch.autograd.grad(total, order, allow_unused=True, materialize_grads=True)
    return tuple(r.detach().numpy() for r in results), tuple(g.numpy() for g in gradients)
