"""The gradients of activations on CUDA: the formulas of their definitions, compiled."""

import torch

from onnxgrad.cuda.core.elementwise import Elementwise
from onnxgrad.cuda.core.indices import BadIndex
from onnxgrad.ops import activation
from onnxgrad.ops.families.formulas import formula_of

RELU_GRAD = Elementwise(formula_of(activation.relu_grad))
LEAKY_RELU_GRAD = Elementwise(formula_of(activation.leaky_relu_grad))
SIGMOID_GRAD = Elementwise(formula_of(activation.sigmoid_grad))
TANH_GRAD = Elementwise(formula_of(activation.tanh_grad))
HARD_SWISH_GRAD = Elementwise(formula_of(activation.hard_swish_grad))


def relu_grad(dY: torch.Tensor, X: torch.Tensor, dX: torch.Tensor, bad: BadIndex) -> None:
    RELU_GRAD(dY, X, dX)


def leaky_relu_grad(dY: torch.Tensor, Y: torch.Tensor, dX: torch.Tensor, alpha: float, bad: BadIndex) -> None:
    LEAKY_RELU_GRAD(dY, Y, dX, alpha=alpha)


def sigmoid_grad(dY: torch.Tensor, Y: torch.Tensor, dX: torch.Tensor, bad: BadIndex) -> None:
    SIGMOID_GRAD(dY, Y, dX)


def tanh_grad(dY: torch.Tensor, Y: torch.Tensor, dX: torch.Tensor, bad: BadIndex) -> None:
    TANH_GRAD(dY, Y, dX)


def hard_swish_grad(dY: torch.Tensor, X: torch.Tensor, dX: torch.Tensor, bad: BadIndex) -> None:
    HARD_SWISH_GRAD(dY, X, dX)
