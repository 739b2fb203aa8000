"""GridSample: every place of the grid reads a few elements of X along each axis, and adds them up with weights."""

from onnxgrad.functions.grid_sample import How, Samples
from onnxgrad.graph.cast import in_type, wide_type
from onnxgrad.graph.function_body import GraphBody
from onnxgrad.graph.node import NodeView
from onnxgrad.graph.tensor import Tensor
from onnxgrad.ops.grid_sample import MOST_AXES
from onnxgrad.rules import by_rewriting, op, vjp
from onnxgrad.schema import OWN


def _how(n: NodeView) -> How:
    # It was bilinear and bicubic until opset 20.
    return How(n.align_corners, n.mode.removeprefix("bi"), getattr(n, "normalized", 1), n.padding_mode)


def _written_out(dY: Tensor, n: NodeView) -> list[Tensor]:
    """dX and dgrid in standard operators, which can be differentiated again."""
    dtype = wide_type(n.X, n.grid)
    g, X, grid = (in_type(x, dtype) for x in (dY, n.X, n.grid))
    samples = Samples(GraphBody(n.builder), X, grid, X.rank - 2, _how(n))  # type: ignore[arg-type]
    found: list[Tensor] = samples.gradients(g)  # type: ignore[arg-type, assignment]
    return [in_type(gradient, x.dtype) for gradient, x in zip(found, (n.X, n.grid), strict=True)]


def _gradients(g: Tensor, n: NodeView) -> list[Tensor]:
    if n.X.rank - 2 > MOST_AXES:
        return _written_out(g, n)
    dtype = n.X.dtype if n.X.dtype == n.grid.dtype else wide_type(n.X, n.grid)
    given = (in_type(x, dtype) for x in (g, n.X, n.grid))
    found = op.GridSampleGrad(*given, outputs=2, **_how(n)._asdict())
    return [in_type(gradient, x.dtype) for gradient, x in zip(found, (n.X, n.grid), strict=True)]


vjp(
    "GridSample",
    doc="As in PyTorch: where the mode is nearest, and at a border that clips, the grid gets 0.",
    X=lambda g, n: _gradients(g, n)[0],
    grid=lambda g, n: None if n.mode == "nearest" else _gradients(g, n)[1],
)
vjp(
    "GridSampleGrad",
    domain=OWN,
    rewrite=lambda n: _written_out(n.dY, n),
    dY=by_rewriting,
    X=by_rewriting,
    grid=by_rewriting,
)
