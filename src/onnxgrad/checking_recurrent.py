"""GRU, LSTM and RNN for onnx.reference, whose own leave out lengths, activations and clip."""

from typing import Any

from onnx.reference.op_run import OpRun

from onnxgrad.op import OPERATORS


class _Recurrent(OpRun):
    op_domain = ""
    states = 2  # how many outputs the ONNX operator has

    def _run(self, X: Any, W: Any, R: Any, B: Any = None, *more: Any, layout: int = 0, **attributes: Any) -> Any:
        lengths, *others = more or (None,)
        firsts, rest = others[: self.states - 1], others[self.states - 1 :]
        if layout:
            X, firsts = X.swapaxes(0, 1), [None if s is None else s.swapaxes(0, 1) for s in firsts]
        training = OPERATORS[f"{type(self).__name__}Training"]
        given = {k: v for k, v in attributes.items() if v is not None}
        results = training.definition(X, W, R, B, lengths, *firsts, *rest, **given)[: self.states]
        if layout:
            results = results[0].transpose(2, 0, 1, 3), *(r.swapaxes(0, 1) for r in results[1:])
        return tuple(results[: len(self.onnx_node.output)])


class GRU(_Recurrent):
    """As onnxruntime computes it."""


class LSTM(_Recurrent):
    """As onnxruntime computes it."""

    states = 3


RECURRENT = [GRU, LSTM]
FAILING = {"GRU", "LSTM"}  # onnxruntime makes a session of these in float64, which then does not run
