"""Einsum: the gradient of an operand is an Einsum of the result's gradient and the other operands."""

from collections.abc import Sequence
from string import ascii_lowercase, ascii_uppercase

from onnxgrad.graph.node import NodeView
from onnxgrad.graph.tensor import Dim, Tensor
from onnxgrad.rules import op, vjp


def parse(equation: str, ranks: Sequence[int]) -> tuple[list[str], str, str]:
    """The letters of each operand, of the result, and of the ellipsis, which is written out in letters of its own."""
    equation = equation.replace(" ", "")
    left, arrow, right = equation.partition("->")
    operands = left.split(",")
    if len(operands) != len(ranks):
        raise ValueError(f"the equation {equation!r} has {len(operands)} operands, but the node has {len(ranks)}")
    hidden = [rank - len(term.replace("...", "")) for term, rank in zip(operands, ranks, strict=True)]
    if any(h < 0 or (h and "..." not in term) for h, term in zip(hidden, operands, strict=True)):
        raise ValueError(f"the equation {equation!r} does not fit operands of {', '.join(map(str, ranks))} dimensions")
    free = [c for c in ascii_lowercase + ascii_uppercase if c not in equation]
    extra = "".join(free[: max(hidden)])
    letters = [term.replace("...", extra[len(extra) - h :]) for term, h in zip(operands, hidden, strict=True)]
    if arrow:
        return letters, right.replace("...", extra), extra
    named = [c for term in operands for c in term if c != "."]
    return letters, extra + "".join(sorted(c for c in set(named) if named.count(c) == 1)), extra


def _operand(g: Tensor, n: NodeView, k: int) -> Tensor:
    inputs: list[Tensor] = n.Inputs
    letters, result, extra = parse(n.equation, [x.rank for x in inputs])
    x, own = inputs[k], letters[k]
    others = [j for j in range(len(inputs)) if j != k]
    distinct = "".join(dict.fromkeys(own))
    own_sizes = dict(zip(own, x.shape or (), strict=True))
    sizes: dict[str, list[Dim]] = {}  # of the others
    for j in others:
        for c, d in zip(letters[j], inputs[j].shape or (), strict=True):
            sizes.setdefault(c, []).append(d)
    # Along a letter that only this operand has, or where all others are of size 1, everything was summed.
    given = set(result) | {c for c, ds in sizes.items() if own_sizes.get(c) == 1 or any(d != 1 for d in ds)}
    found = "".join(c for c in distinct if c in given)
    part = g
    if others or found != result:
        # g comes first: where a letter is broadcast, onnx takes the size from there.
        equation = f"{','.join([result, *(letters[j] for j in others)])}->{found}"
        if extra and extra in own and all(extra in term or not set(extra) & set(term) for term in letters):
            equation = equation.replace(extra, "...")  # so that a second derivative knows what may be broadcast
        part = op.Einsum(g, *(inputs[j] for j in others), equation=equation)
    part = _with_axes(part, [p for p, c in enumerate(own) if own.index(c) != p or c not in given])
    for p, c in enumerate(own):
        if (first := own.index(c)) != p:
            part = op.Where(_diagonal(x, first, p), part, 0)
    if found != distinct:
        part = part if part.static_shape is not None and part.shape == x.shape else op.Expand(part, op.Shape(x))
    return _sum_over_broadcast(part, x, own, sizes, extra)


def _sum_over_broadcast(part: Tensor, x: Tensor, own: str, others: dict[str, list[Dim]], hidden: str) -> Tensor:
    """The sum over axes along which the operand is of size 1 and another is not.

    Only sizes in an ellipsis may turn out to differ: those of a letter are the same, unless one is known to be 1.
    """
    sizes = list(zip(own, x.shape or (), strict=True))
    if any(
        c in hidden and not isinstance(d, int) and any(e is None or e not in (1, d) for e in others.get(c, []))
        for c, d in sizes
    ):
        shape = op.Shape(x)
        axes = op.BroadcastGradientArgs(shape, op.Shape(part), outputs=2)[0]
        return op.Reshape(op.ReduceSum(part, axes, keepdims=1, noop_with_empty_axes=1), shape)
    narrow = [p for p, (c, d) in enumerate(sizes) if d == 1 and any(e != 1 for e in others.get(c, []))]
    return op.ReduceSum(part, narrow, keepdims=1) if narrow else part


def _with_axes(x: Tensor, axes: list[int]) -> Tensor:
    return op.Unsqueeze(x, axes) if axes else x


def _diagonal(x: Tensor, first: int, second: int) -> Tensor:
    """True where the positions along the two axes are the same; other axes are of size 1."""
    size = (x.shape or ())[first]
    length = size if isinstance(size, int) else op.Squeeze(op.Gather(op.Shape(x), [first]), [0])
    at = op.Range(0, length, 1)
    rows, columns = (op.Unsqueeze(at, [k for k in range(x.rank) if k != axis]) for axis in (first, second))
    return rows.equals(columns)


vjp("Einsum", Inputs=_operand)
