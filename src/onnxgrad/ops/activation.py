"""ReluGrad, LeakyReluGrad, SigmoidGrad, TanhGrad and HardSwishGrad: gradients of activations, as formulas.

Each body is all that there is of its operator: NumPy runs it, and cpu/, cuda/ and functions/ compile it.
"""

from onnxgrad.op import op
from onnxgrad.ops.families.formulas import in_work_type, one, six, three, where
from onnxgrad.schema import OWN, Dim, Known, agree
from onnxgrad.tensor_types import T


def common_shape(dY: Known, other: Known, name: str) -> tuple[Dim, ...] | None:
    """The shape of both, with all that is known of either."""
    if dY.dims is None or other.dims is None:
        return dY.dims if other.dims is None else other.dims
    if not agree(dY.dims, other.dims):
        raise ValueError(f"dY has shape {list(dY.dims)}, expected {list(other.dims)} as {name} has")
    return tuple(there if here is None else here for here, there in zip(other.dims, dY.dims, strict=True))


def _as_input(dY: Known, X: Known) -> tuple[Dim, ...] | None:
    return common_shape(dY, X, "X")


def _as_result(dY: Known, Y: Known) -> tuple[Dim, ...] | None:
    return common_shape(dY, Y, "Y")


@op("ReluGrad", outputs="dX", shape=_as_input)
@in_work_type
def relu_grad(dY: T, X: T) -> T:
    """Gradient of Relu: dX = dY where X > 0, else 0. X may as well be what Relu gave."""
    return where(X > 0, dY, 0)


@op(
    "LeakyReluGrad",
    outputs="dX",
    shape=lambda dY, Y, alpha: common_shape(dY, Y, "Y"),
)
@in_work_type
def leaky_relu_grad(dY: T, Y: T, alpha: float = 0.01) -> T:
    """Gradient of LeakyRelu: dX = dY where Y > 0, else dY · alpha.

    Y is what LeakyRelu gave or, which a negative alpha asks for, what it was given. float16 and bfloat16 compute in
    float32 and round once.
    """
    return where(Y > 0, dY, dY * alpha)


@op("SigmoidGrad", outputs="dX", shape=_as_result)
@in_work_type
def sigmoid_grad(dY: T, Y: T) -> T:
    """Gradient of Sigmoid: dX = dY · Y · (1 - Y), Y being what Sigmoid gave.

    float16 and bfloat16 compute in float32 and round once.
    """
    return dY * Y * (one - Y)


@op("TanhGrad", outputs="dX", shape=_as_result)
@in_work_type
def tanh_grad(dY: T, Y: T) -> T:
    """Gradient of Tanh: dX = dY · (1 - Y²), Y being what Tanh gave.

    float16 and bfloat16 compute in float32 and round once.
    """
    return dY * (one - Y * Y)


@op("HardSwishGrad", domain=OWN, outputs="dX", shape=_as_input)
@in_work_type
def hard_swish_grad(dY: T, X: T) -> T:
    """Gradient of HardSwish: dX = dY · (X / 3 + ½) where X is between -3 and 3, 0 below, and dY above.

    X is what HardSwish was given. float16 and bfloat16 compute in float32 and round once.
    """
    return where(X - three < 0, where(X + three > 0, dY * (X + X + three) / six, 0), dY)
