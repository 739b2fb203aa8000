"""The gradients of LayerNormalizationGrad and SimplifiedLayerNormalizationGrad."""

from onnxgrad.graph.broadcast import sum_to_shape
from onnxgrad.graph.cast import in_type, wide_type
from onnxgrad.graph.node import NodeView
from onnxgrad.graph.tensor import Tensor
from onnxgrad.rules import op, vjp
from onnxgrad.rules.normalization import last_axes, through_statistics
from onnxgrad.schema import MICROSOFT


def _total(*terms: Tensor | None) -> Tensor | None:
    """The sum of those that are there."""
    there = [t for t in terms if t is not None]
    return sum(there[1:], there[0]) if there else None


class Second:
    """What the gradients of one of these nodes share.

    With x = (X - mean) · inv and g = Y_grad · scale it computes X_grad = inv · (g - mean of g - x · mean of g · x),
    scale_grad = sum of Y_grad · x and bias_grad = sum of Y_grad. To it, mean and inv are numbers like any other.
    """

    def __init__(self, n: NodeView, *, centred: bool) -> None:
        self.n, self.centred, self.dtype = n, centred, wide_type(n.X)
        self.axes = last_axes(n.axis, n.X)
        grads = n.grad(0), n.grad(1), n.grad(2) if centred else None
        self.to_X, self.to_scale, self.to_bias = (None if t is None else self._wide(t) for t in grads)
        self.inv, self.scale, self.Y_grad = (self._wide(t) for t in (n.inv_std_var, n.scale, n.Y_grad))
        self.shifted = self._wide(n.X) - self._wide(n.mean) if centred else self._wide(n.X)
        self.xhat, self.g = self.shifted * self.inv, self.Y_grad * self.scale

    def _wide(self, x: Tensor) -> Tensor:
        return in_type(x, self.dtype)

    def _mean(self, x: Tensor) -> Tensor:
        return op.ReduceMean(x, self.axes, keepdims=1)

    def _sum(self, x: Tensor) -> Tensor:
        return op.ReduceSum(x, self.axes, keepdims=1)

    def _to_g(self) -> Tensor | None:
        """X_grad is linear in g, and symmetric."""
        if self.to_X is None:
            return None
        return through_statistics(self.to_X, self.xhat, self.inv, self.axes, centred=self.centred)

    def _to_xhat(self) -> Tensor | None:
        by_X = None
        if self.to_X is not None:
            by_X = self.to_X * self._mean(self.g * self.xhat) + self.g * self._mean(self.to_X * self.xhat)
            by_X = -by_X * self.inv
        return _total(by_X, None if self.to_scale is None else self.Y_grad * self.to_scale)

    def of_gradient(self) -> Tensor | None:
        """The gradient of Y_grad."""
        to_g = self._to_g()
        by_scale = None if self.to_scale is None else self.xhat * self.to_scale
        total = _total(None if to_g is None else to_g * self.scale, by_scale, self.to_bias)
        if total is None:
            return None
        whole = total if total.shape == self.n.X.shape else op.Expand(total, op.Shape(self.n.X))
        return in_type(whole, self.n.Y_grad.dtype)

    def of_input(self) -> Tensor | None:
        """The gradient of X."""
        to_xhat = self._to_xhat()
        return None if to_xhat is None else in_type(to_xhat * self.inv, self.n.X.dtype)

    def of_scale(self) -> Tensor | None:
        """The gradient of the scale."""
        to_g = self._to_g()
        return None if to_g is None else in_type(sum_to_shape(to_g * self.Y_grad, self.n.scale), self.n.scale.dtype)

    def of_mean(self) -> Tensor | None:
        """The gradient of the mean."""
        to_xhat = self._to_xhat()
        return None if to_xhat is None else in_type(-self._sum(to_xhat) * self.inv, self.n.mean.dtype)

    def of_inv(self) -> Tensor | None:
        """The gradient of inv_std_var."""
        to_xhat, by_X = self._to_xhat(), None
        if self.to_X is not None:
            inner = self.g - self.xhat * self._mean(self.g * self.xhat)
            by_X = self._sum(self.to_X * (inner - self._mean(self.g) if self.centred else inner))
        total = _total(by_X, None if to_xhat is None else self._sum(to_xhat * self.shifted))
        return None if total is None else in_type(total, self.n.inv_std_var.dtype)


def _layer(n: NodeView) -> Second:
    return Second(n, centred=True)


def _simplified(n: NodeView) -> Second:
    return Second(n, centred=False)


vjp(
    "LayerNormalizationGrad",
    domain=MICROSOFT,
    outputs=("X_grad", "scale_grad", "bias_grad"),
    Y_grad=lambda g, n: _layer(n).of_gradient(),
    X=lambda g, n: _layer(n).of_input(),
    scale=lambda g, n: _layer(n).of_scale(),
    mean=lambda g, n: _layer(n).of_mean(),
    inv_std_var=lambda g, n: _layer(n).of_inv(),
)
vjp(
    "SimplifiedLayerNormalizationGrad",
    domain=MICROSOFT,
    outputs=("X_grad", "scale_grad"),
    Y_grad=lambda g, n: _simplified(n).of_gradient(),
    X=lambda g, n: _simplified(n).of_input(),
    scale=lambda g, n: _simplified(n).of_scale(),
    inv_std_var=lambda g, n: _simplified(n).of_inv(),
)
