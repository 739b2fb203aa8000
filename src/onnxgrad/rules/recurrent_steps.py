"""Second derivatives of recurrent operators: GRUGrad, LSTMGrad and RNNGrad written out, step by step.

To differentiate such a node, the rule writes the forward operator once more, in standard operators, and the engine
writes the gradient of these. The rule ignores HAll and the gates that the node takes: the other inputs determine them.
"""

from collections.abc import Callable, Sequence

from onnxgrad.graph.node import NodeView
from onnxgrad.graph.tensor import Tensor
from onnxgrad.ops import gru, lstm, rnn
from onnxgrad.ops.families.activations import Chosen
from onnxgrad.ops.families.recurrent import ATTRIBUTES, settings
from onnxgrad.rules import by_rewriting, nondiff, op, vjp
from onnxgrad.rules.registry import Function
from onnxgrad.schema import MICROSOFT, OWN

Leaves = dict[str, Tensor | None]  # the inputs by name
# From the inputs of one step's gates, without the state's product, and the states before it: the states after it.
Step = Callable[[Tensor, Sequence[Tensor]], Sequence[Tensor]]


def _activation(chosen: Chosen, x: Tensor) -> Tensor:
    a, b = chosen.alpha, chosen.beta
    if chosen.name == "ScaledTanh":
        return op.Tanh(x * b) * a
    if chosen.name == "Affine":
        return x * a + b
    parameters = {"HardSigmoid": {"alpha": a, "beta": b}}.get(chosen.name)
    if parameters is None:
        parameters = {"alpha": a} if chosen.name in ("LeakyRelu", "Elu", "ThresholdedRelu") else {}
    return getattr(op, chosen.name)(x, **parameters)


def _gate(n: NodeView, chosen: Chosen, x: Tensor) -> Tensor:
    return _activation(chosen, x if n.clip is None else op.Clip(x, -n.clip, n.clip))


def _of(x: Tensor | None, d: int) -> Tensor | None:
    """Direction d of a tensor."""
    return None if x is None else op.Gather(x, d, axis=0)


def _split(x: Tensor | None, count: int, axis: int = -1) -> list[Tensor]:
    if x is None:
        return []
    return [x] if count == 1 else list(op.Split(x, axis=axis, num_outputs=count, outputs=count))


def _plus(x: Tensor, *more: Tensor | None) -> Tensor:
    for other in more:
        x = x if other is None else x + other
    return x


def _product(x: Tensor, weights: Tensor) -> Tensor:
    return x @ op.Transpose(weights, perm=[1, 0])


def _forward_steps(
    before: Tensor, firsts: Sequence[Tensor], SL: Tensor | None, backwards: bool, step: Step
) -> tuple[Tensor, list[Tensor]]:
    """Every state [S,1,N,H] and the last ones [1,N,H] of one direction."""
    steps = before.shape[0] if before.shape is not None else None
    if not isinstance(steps, int) or steps == 0:
        raise ValueError(
            "the second derivative is written out step by step: the number of steps must be known, and not 0"
        )
    every: dict[int, Tensor] = {}
    states = list(firsts)
    inputs = [op.Squeeze(x, [0]) for x in _split(before, steps, axis=0)]
    for t in reversed(range(steps)) if backwards else range(steps):
        new = step(inputs[t], states)
        every[t] = new[0]
        if SL is not None:
            alive = op.Unsqueeze(op.Greater(SL, t), [1])
            every[t] = op.Where(alive, new[0], 0)
            new = [op.Where(alive, a, b) for a, b in zip(new, states, strict=True)]
        states = list(new)
    HAll = op.Concat(*(op.Unsqueeze(every[t], [0, 1]) for t in range(steps)), axis=0)
    return HAll, [op.Unsqueeze(state, [0]) for state in states]


def _gru_step(n: NodeView, leaves: Leaves, d: int, chosen: Sequence[Chosen]) -> tuple[Tensor | None, Step]:
    f, g = chosen
    Rz, Rr, Rh = _split(_of(leaves["R"], d), 3, axis=0)
    biases = _split(_of(leaves["B"], d), 6)
    outside, inside = None, None  # of the product with r
    if biases:
        Wz, Wr, Wh, Rbz, Rbr, Rbh = biases
        inside = Rbh if n.linear_before_reset else None
        outside = op.Concat(Wz + Rbz, Wr + Rbr, Wh if n.linear_before_reset else Wh + Rbh, axis=0)

    def step(before: Tensor, states: Sequence[Tensor]) -> list[Tensor]:
        (state,) = states
        before_z, before_r, before_h = _split(before, 3)
        z = _gate(n, f, before_z + _product(state, Rz))
        r = _gate(n, f, before_r + _product(state, Rr))
        from_state = r * _plus(_product(state, Rh), inside) if n.linear_before_reset else _product(r * state, Rh)
        h = _gate(n, g, before_h + from_state)
        return [(1 - z) * h + z * state]

    return outside, step


def _lstm_step(n: NodeView, leaves: Leaves, d: int, chosen: Sequence[Chosen]) -> tuple[Tensor | None, Step]:
    f, g, h = chosen
    training = n.IOFC.value.producer()
    for name, k in {"B": 3, "P": 7}.items():
        if training is not None and leaves[name] is None and any(training.inputs[k : k + 1]):
            raise ValueError(
                f"the second derivative needs the LSTM's input {name}, expected it as LSTMGrad's {name} too"
            )
    R, biases = _of(leaves["R"], d), _split(_of(leaves["B"], d), 2)
    peepholes: Sequence[Tensor | None] = _split(_of(leaves["P"], d), 3) or [None] * 3
    Pi, Po, Pf = peepholes
    assert R is not None

    def peeping(x: Tensor, peephole: Tensor | None, cell: Tensor) -> Tensor:
        return x if peephole is None else x + peephole * cell

    def step(before: Tensor, states: Sequence[Tensor]) -> list[Tensor]:
        state, cell = states
        inner_i, inner_o, inner_f, inner_c = _split(before + _product(state, R), 4)
        gate_i = _gate(n, f, peeping(inner_i, Pi, cell))
        gate_f = 1 - gate_i if n.input_forget else _gate(n, f, peeping(inner_f, Pf, cell))
        new_cell = gate_f * cell + gate_i * _gate(n, g, inner_c)
        gate_o = _gate(n, f, peeping(inner_o, Po, new_cell))
        return [gate_o * _activation(h, new_cell), new_cell]

    return _plus(*biases) if biases else None, step


def _rnn_step(n: NodeView, leaves: Leaves, d: int, chosen: Sequence[Chosen]) -> tuple[Tensor | None, Step]:
    R, biases = _of(leaves["R"], d), _split(_of(leaves["B"], d), 2)
    assert R is not None
    bias = _plus(*biases) if biases else None
    return bias, lambda before, states: [_gate(n, chosen[0], before + _product(states[0], R))]


def _forward(
    n: NodeView, leaves: Leaves, first_names: Sequence[str], defaults: Sequence[str], make_step: Function
) -> list[Tensor]:
    """Every state [S,D,N,H] and the last ones [D,N,H], as the ONNX operator gives them."""
    given = settings(defaults, *(getattr(n, name) for name in ATTRIBUTES))
    X, W, R = leaves["X"], leaves["W"], leaves["R"]
    assert X is not None and W is not None and R is not None
    shape = op.Concat(op.Shape(X, start=1, end=2), op.Shape(R, start=2, end=3), axis=0)
    zeros = op.CastLike(op.ConstantOfShape(shape), X)
    every, last = [], []
    for d, (backwards, activations) in enumerate(given.directions):
        bias, step = make_step(n, leaves, d, activations)
        before = _plus(_product(X, op.Gather(W, d, axis=0)), bias)
        firsts = [zeros if leaves[name] is None else op.Gather(leaves[name], d, axis=0) for name in first_names]
        HAll, finals = _forward_steps(before, firsts, n.SL, backwards, step)
        every.append(HAll)
        last.append(finals)
    return [op.Concat(*every, axis=1), *(op.Concat(*states, axis=0) for states in zip(*last, strict=True))]


def _by_steps(
    inputs: Sequence[str], gradients: Sequence[str], firsts: Sequence[str], defaults: Sequence[str], make_step: Function
) -> Function:
    """Rewrites a gradient operator; `inputs` are those it has gradients for, in the order of its outputs."""

    def rewrite(n: NodeView) -> list[Tensor | None]:
        builder = n.builder
        seeds = [getattr(n, name) for name in gradients]
        if all(seed is None for seed in seeds):
            return []
        # Copies, so that the engine stops here, whatever the inputs depend on.
        given = {name: getattr(n, name) for name in inputs}
        leaves = {name: None if v is None else builder.copy(v) for name, v in given.items()}
        results = _forward(n, leaves, firsts, defaults, make_step)
        seeded = {r.value: seed for r, seed in zip(results, seeds, strict=True) if seed is not None}
        found = n.write_gradient(seeded, [leaf.value for leaf in leaves.values() if leaf is not None])
        return [None if leaf is None else found.get(leaf.value) for leaf in leaves.values()]

    return rewrite


DOC = "Written out step by step: the number of steps must be known."
vjp(
    "GRUGrad",
    domain=MICROSOFT,
    doc=DOC,
    rewrite=_by_steps(("X", "W", "R", "B", "Ht0"), ("dHAll", "dHFinal"), ("Ht0",), gru.DEFAULTS, _gru_step),
    X=by_rewriting,
    W=by_rewriting,
    R=by_rewriting,
    B=by_rewriting,
    SL=nondiff,
    Ht0=by_rewriting,
    HAll=nondiff,
    ZRH=nondiff,
    dHAll=by_rewriting,
    dHFinal=by_rewriting,
)
vjp(
    "LSTMGrad",
    domain=MICROSOFT,
    doc=f"{DOC} B must be there if the LSTM has one.",
    rewrite=_by_steps(
        ("X", "W", "R", "B", "Ht0", "Ct0", "P"),
        ("dHAll", "dHFinal", "dCFinal"),
        ("Ht0", "Ct0"),
        lstm.DEFAULTS,
        _lstm_step,
    ),
    X=by_rewriting,
    W=by_rewriting,
    R=by_rewriting,
    SL=nondiff,
    Ht0=by_rewriting,
    Ct0=by_rewriting,
    HAll=nondiff,
    CAll=nondiff,
    IOFC=nondiff,
    dHAll=by_rewriting,
    dHFinal=by_rewriting,
    dCFinal=by_rewriting,
    B=by_rewriting,
    P=by_rewriting,
)
vjp(
    "RNNGrad",
    domain=OWN,
    doc=DOC,
    rewrite=_by_steps(("X", "W", "R", "B", "Ht0"), ("dHAll", "dHFinal"), ("Ht0",), rnn.DEFAULTS, _rnn_step),
    X=by_rewriting,
    W=by_rewriting,
    R=by_rewriting,
    B=by_rewriting,
    SL=nondiff,
    Ht0=by_rewriting,
    HAll=nondiff,
    dHAll=by_rewriting,
    dHFinal=by_rewriting,
)
