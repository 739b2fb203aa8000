"""The gradients of activations on the CPU: the formulas of their definitions, compiled."""

from onnxgrad.cpu.core.elementwise import Elementwise
from onnxgrad.ops import activation
from onnxgrad.ops.families.formulas import formula_of
from onnxgrad.tensor_types import Array

_relu_grad = Elementwise(formula_of(activation.relu_grad))
_leaky_relu_grad = Elementwise(formula_of(activation.leaky_relu_grad))
_sigmoid_grad = Elementwise(formula_of(activation.sigmoid_grad))
_tanh_grad = Elementwise(formula_of(activation.tanh_grad))
_hard_swish_grad = Elementwise(formula_of(activation.hard_swish_grad))


def relu_grad(dY: Array, X: Array, dX: Array) -> None:
    _relu_grad(dY, X, dX)


def leaky_relu_grad(dY: Array, Y: Array, dX: Array, alpha: float) -> None:
    _leaky_relu_grad(dY, Y, dX, alpha)


def sigmoid_grad(dY: Array, Y: Array, dX: Array) -> None:
    _sigmoid_grad(dY, Y, dX)


def tanh_grad(dY: Array, Y: Array, dX: Array) -> None:
    _tanh_grad(dY, Y, dX)


def hard_swish_grad(dY: Array, X: Array, dX: Array) -> None:
    _hard_swish_grad(dY, X, dX)
