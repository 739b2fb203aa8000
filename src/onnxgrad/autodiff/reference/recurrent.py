"""GRU, LSTM and RNN for onnx.reference, whose own leave out lengths, activations and clip."""

from typing import Any

import numpy as np
from onnx.reference.op_run import OpRun

from onnxgrad.op import OPERATORS
from onnxgrad.ops.families.recurrent import ATTRIBUTES, clamp, lengths_of, settings
from onnxgrad.ops.rnn import DEFAULTS


class _Recurrent(OpRun):
    op_domain = ""
    states = 2  # how many outputs the ONNX operator has

    def _run(self, X: Any, W: Any, R: Any, B: Any = None, *more: Any, layout: int = 0, **attributes: Any) -> Any:
        lengths, *others = more or (None,)
        firsts, rest = others[: self.states - 1], others[self.states - 1 :]
        if layout:
            X, firsts = X.swapaxes(0, 1), [None if s is None else s.swapaxes(0, 1) for s in firsts]
        given = {k: v for k, v in attributes.items() if v is not None}
        results = self.compute(X, W, R, B, lengths, *firsts, *rest, **given)[: self.states]
        if layout:
            results = results[0].transpose(2, 0, 1, 3), *(r.swapaxes(0, 1) for r in results[1:])
        return tuple(results[: len(self.onnx_node.output)])

    def compute(self, *inputs: Any, **attributes: Any) -> Any:
        """With layout 0."""
        return OPERATORS[f"{type(self).__name__}Training"].definition(*inputs, **attributes)


class GRU(_Recurrent):
    """As onnxruntime computes it."""


class LSTM(_Recurrent):
    """As onnxruntime computes it."""

    states = 3


class RNN(_Recurrent):
    """As onnxruntime computes it."""

    def compute(self, X: Any, W: Any, R: Any, B: Any, SL: Any, Ht0: Any = None, **attributes: Any) -> Any:
        """With layout 0."""
        (S, N, _), (D, H, _) = X.shape, R.shape
        attributes = {**attributes, "activations": attributes["activations"][:D]}
        given = settings(DEFAULTS, **{name: attributes[name] for name in ATTRIBUTES if name in attributes})
        lengths, states, last = lengths_of(X, SL), np.zeros((S, D, N, H), X.dtype), np.zeros((D, N, H), X.dtype)
        for d, (backwards, (f,)) in enumerate(given.directions):
            state = last[d] if Ht0 is None else Ht0[d]
            bias = 0 if B is None else np.add(*np.split(B[d], 2))
            for t in reversed(range(S)) if backwards else range(S):
                new = f(clamp(X[t] @ W[d].T + state @ R[d].T + bias, given.clip))
                alive = (t < lengths)[:, None]
                states[t, d], state = np.where(alive, new, 0), np.where(alive, new, state)
            last[d] = state
        return states, last


RECURRENT = [GRU, LSTM, RNN]
FAILING = {"GRU", "LSTM"}  # onnxruntime makes a session of these in float64, which then does not run
