"""GRU and LSTM become GRUTraining and LSTMTraining, which keep their gates for GRUGrad and LSTMGrad; RNN has RNNGrad.

These operators are in ops/; they know layout 0 only, so the rules write transposes around them.
"""

from collections.abc import Sequence

from onnxgrad.graph.node import NodeView
from onnxgrad.graph.tensor import Tensor
from onnxgrad.op import OPERATORS
from onnxgrad.ops.families import recurrent as families
from onnxgrad.rules import by_rewriting, nondiff, op, vjp
from onnxgrad.rules.registry import Function
from onnxgrad.schema import MICROSOFT

ATTRIBUTES = ("hidden_size", *families.ATTRIBUTES)

NO_GATES = "{1} of {0} has no gradient: differentiate the states instead"


def _swapped(x: Tensor | None) -> Tensor | None:
    """X with rows and steps swapped, or states with rows and directions, as layout 1 has them."""
    return None if x is None else op.Transpose(x, perm=[1, 0, 2])


def _training(n: NodeView, name: str, inputs: Sequence[Tensor | None], states: int, own: Sequence[str]) -> list[Tensor]:
    """Every state [S,D,N,H] and the last ones [D,N,H] of the operator `name`, laid out as the node has them.

    `inputs` are those after X; the first `states` outputs of the operator are those of the ONNX operator.
    """
    X = _swapped(n.X) if n.layout else n.X
    attributes = {a: getattr(n, a) for a in (*ATTRIBUTES, *own)}
    results = getattr(op, name)(X, *inputs, outputs=len(OPERATORS[name].outputs), **attributes)[:states]
    if not n.layout:
        return list(results)
    return [op.Transpose(results[0], perm=[2, 0, 1, 3]), *(op.Transpose(r, perm=[1, 0, 2]) for r in results[1:])]


def _gru_training(n: NodeView) -> list[Tensor]:
    first = _swapped(n.initial_h) if n.layout else n.initial_h
    inputs = n.W, n.R, n.B, n.sequence_lens, first
    return _training(n, "GRUTraining", inputs, 2, ["linear_before_reset"])


vjp(
    "GRU",
    outputs=("Y", "Y_h"),
    rewrite=_gru_training,
    X=by_rewriting,
    W=by_rewriting,
    R=by_rewriting,
    B=by_rewriting,
    sequence_lens=nondiff,
    initial_h=by_rewriting,
)


def _of_gru(k: int) -> Function:
    """The k-th output of GRUGrad, which one node computes for all inputs."""

    def function(g: Tensor | None, n: NodeView) -> Tensor:
        if n.grad(2) is not None:
            raise ValueError(NO_GATES.format("GRUTraining", "ZRH"))
        attributes = {a: getattr(n, a) for a in (*ATTRIBUTES, "linear_before_reset")}
        given = n.X, n.W, n.R, n.B, n.SL, n.Ht0, n.HAll, n.ZRH, n.grad(0), n.grad(1)
        found: tuple[Tensor, ...] = op.GRUGrad(*given, outputs=5, **attributes)
        return found[k]

    return function


vjp(
    "GRUTraining",
    domain=MICROSOFT,
    outputs=("HAll", "HFinal"),
    X=_of_gru(0),
    W=_of_gru(1),
    R=_of_gru(2),
    B=_of_gru(3),
    SL=nondiff,
    Ht0=_of_gru(4),
)


def _lstm_training(n: NodeView) -> list[Tensor]:
    firsts = [_swapped(v) if n.layout else v for v in (n.initial_h, n.initial_c)]
    inputs = n.W, n.R, n.B, n.sequence_lens, *firsts, n.P
    return _training(n, "LSTMTraining", inputs, 3, ["input_forget"])


vjp(
    "LSTM",
    outputs=("Y", "Y_h", "Y_c"),
    rewrite=_lstm_training,
    X=by_rewriting,
    W=by_rewriting,
    R=by_rewriting,
    B=by_rewriting,
    sequence_lens=nondiff,
    initial_h=by_rewriting,
    initial_c=by_rewriting,
    P=by_rewriting,
)


def _of_lstm(k: int) -> Function:
    """The k-th output of LSTMGrad, which one node computes for all inputs."""

    def function(g: Tensor | None, n: NodeView) -> Tensor:
        if n.grad(3) is not None or n.grad(4) is not None:
            raise ValueError(NO_GATES.format("LSTMTraining", "CAll or IOFC"))
        attributes = {a: getattr(n, a) for a in (*ATTRIBUTES, "input_forget")}
        kept = n.HAll, n.CAll, n.IOFC
        given = n.X, n.W, n.R, n.SL, n.Ht0, n.Ct0, *kept, n.grad(0), n.grad(1), n.grad(2), n.B, n.P
        found: tuple[Tensor, ...] = op.LSTMGrad(*given, outputs=7, **attributes)
        return found[k]

    return function


vjp(
    "LSTMTraining",
    domain=MICROSOFT,
    outputs=("HAll", "HFinal", "CFinal"),
    X=_of_lstm(0),
    W=_of_lstm(1),
    R=_of_lstm(2),
    B=_of_lstm(3),
    SL=nondiff,
    Ht0=_of_lstm(4),
    Ct0=_of_lstm(5),
    P=_of_lstm(6),
)


def _of_rnn(k: int) -> Function:
    """The k-th output of RNNGrad, which one node computes for all inputs; the states are all it needs of the RNN."""

    def function(g: Tensor | None, n: NodeView) -> Tensor:
        X, first, Y, dY_h = n.X, n.initial_h, n.Y, n.grad(1)
        if n.layout:
            X, first, dY_h = _swapped(X), _swapped(first), _swapped(dY_h)
            Y, g = (None if v is None else op.Transpose(v, perm=[1, 2, 0, 3]) for v in (Y, g))
        attributes = {a: getattr(n, a) for a in ATTRIBUTES}
        # By default there are two, of which a single direction uses the first.
        attributes["activations"] = attributes["activations"][: 2 if n.direction == "bidirectional" else 1]
        given = X, n.W, n.R, n.B, n.sequence_lens, first, Y, g, dY_h
        found: Tensor = op.RNNGrad(*given, outputs=5, **attributes)[k]
        return _swapped(found) if n.layout and k in (0, 4) else found  # type: ignore[return-value]

    return function


vjp(
    "RNN",
    outputs=("Y", "Y_h"),
    X=_of_rnn(0),
    W=_of_rnn(1),
    R=_of_rnn(2),
    B=_of_rnn(3),
    sequence_lens=nondiff,
    initial_h=_of_rnn(4),
)
