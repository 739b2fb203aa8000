"""The gradients of activations on CUDA: the formulas of their definitions, compiled."""

import torch

from onnxgrad.cuda.core.elementwise import Elementwise
from onnxgrad.cuda.core.indices import BadIndex
from onnxgrad.ops import activation
from onnxgrad.ops.families.formulas import formula_of

_relu_grad = Elementwise(formula_of(activation.relu_grad))
_leaky_relu_grad = Elementwise(formula_of(activation.leaky_relu_grad))
_sigmoid_grad = Elementwise(formula_of(activation.sigmoid_grad))
_tanh_grad = Elementwise(formula_of(activation.tanh_grad))
_hard_swish_grad = Elementwise(formula_of(activation.hard_swish_grad))


def relu_grad(dY: torch.Tensor, X: torch.Tensor, dX: torch.Tensor, bad: BadIndex) -> None:
    _relu_grad(dY, X, dX)


def leaky_relu_grad(dY: torch.Tensor, Y: torch.Tensor, dX: torch.Tensor, alpha: float, bad: BadIndex) -> None:
    _leaky_relu_grad(dY, Y, dX, alpha=alpha)


def sigmoid_grad(dY: torch.Tensor, Y: torch.Tensor, dX: torch.Tensor, bad: BadIndex) -> None:
    _sigmoid_grad(dY, Y, dX)


def tanh_grad(dY: torch.Tensor, Y: torch.Tensor, dX: torch.Tensor, bad: BadIndex) -> None:
    _tanh_grad(dY, Y, dX)


def hard_swish_grad(dY: torch.Tensor, X: torch.Tensor, dX: torch.Tensor, bad: BadIndex) -> None:
    _hard_swish_grad(dY, X, dX)
