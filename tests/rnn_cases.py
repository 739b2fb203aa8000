"""Random inputs of an RNN, and the RNN of the contract written in torch, for autograd to differentiate."""

from typing import Any, NamedTuple

import numpy as np
import torch
from tests.gru_cases import ACTIVATIONS

DIRECTIONS = ("forward", "reverse", "bidirectional")
GRADIENTS = ("dX", "dW", "dR", "dB", "dH0")
OPTIONALS = ("B", "Ht0", "dHAll", "dHFinal")


class Case(NamedTuple):
    """The inputs of an RNN, and the gradients that reach its results."""

    X: np.ndarray
    W: np.ndarray
    R: np.ndarray
    B: np.ndarray | None
    SL: np.ndarray | None
    Ht0: np.ndarray | None
    dHAll: np.ndarray | None  # noqa: N815
    dHFinal: np.ndarray | None  # noqa: N815

    def without(self, *names: str) -> "Case":
        """The same with some inputs absent."""
        return self._replace(**dict.fromkeys(names))

    def backward(self, **attributes: Any) -> tuple[Any, ...]:
        """The arguments of rnn_grad, with the states in the case's own type."""
        HAll = torch_gradients(self, **attributes)[0][0].astype(self.X.dtype)
        return *self[:6], HAll, self.dHAll, self.dHFinal


def case(S=4, N=3, inputs=3, H=2, direction="forward", lengths=False, dtype=np.float64, seed=0, scale=0.6) -> Case:
    """Numbers of moderate size; `lengths` gives every row its own, 0 and S among them."""
    rng = np.random.default_rng(seed)
    D = 2 if direction == "bidirectional" else 1

    def some(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * scale).astype(dtype)

    SL = rng.permutation(np.resize(np.append(np.arange(S, -1, -2), 0), N)).astype(np.int32) if lengths else None
    shrink = dtype(max(1, H)) ** -0.5 * 2 if H > 4 else dtype(1)
    W, R = some(D, H, inputs), (some(D, H, H) * shrink).astype(dtype)
    return Case(some(S, N, inputs), W, R, some(D, 2 * H), SL, some(D, N, H), some(S, D, N, H), some(D, N, H))


def torch_gradients(
    given: Case,
    direction: str = "forward",
    functions: Any = (("tanh", 0, 0),) * 2,
    clip: float | None = None,
) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
    """(HAll, HFinal) and (dX, dW, dR, dB, dH0) in float64, by autograd; `functions` gives (name, alpha, beta)."""
    (S, N, _), (D, H, _) = given.X.shape, given.R.shape
    arrays = [given.X, given.W, given.R, given.B, given.Ht0]
    shapes = [None, None, None, (D, 2 * H), (D, N, H)]
    filled = [np.zeros(s) if a is None else a.astype(np.float64) for a, s in zip(arrays, shapes, strict=True)]
    X, W, R, B, Ht0 = tensors = [torch.tensor(a, requires_grad=True) for a in filled]
    lengths = torch.full((N,), S) if given.SL is None else torch.from_numpy(given.SL)
    every_state, last_states = [], []
    for d, backwards in enumerate({"forward": [0], "reverse": [1], "bidirectional": [0, 1]}[direction]):
        name, alpha, beta = functions[d]
        state, states = Ht0[d], [torch.zeros(0)] * S
        for t in reversed(range(S)) if backwards else range(S):
            inner = X[t] @ W[d].T + state @ R[d].T + sum(B[d].chunk(2))
            new = ACTIVATIONS[name](inner if clip is None else torch.clamp(inner, -clip, clip), alpha, beta)
            alive = (t < lengths)[:, None]
            states[t], state = torch.where(alive, new, 0), torch.where(alive, new, state)
        every_state.append(torch.stack(states) if S else torch.zeros((0, N, H), dtype=torch.float64))
        last_states.append(state)
    results = torch.stack(every_state, 1), torch.stack(last_states)
    total = sum((t * 0).sum() for t in tensors)
    for result, gradient in zip(results, (given.dHAll, given.dHFinal), strict=True):
        if gradient is not None:
            total = total + (result * torch.from_numpy(gradient.astype(np.float64))).sum()
    gradients = torch.autograd.grad(total, tensors)
    return tuple(r.detach().numpy() for r in results), tuple(g.numpy() for g in gradients)
