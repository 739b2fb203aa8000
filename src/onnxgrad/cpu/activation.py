"""ReluGrad, LeakyReluGrad, SigmoidGrad and TanhGrad on the CPU: one pass each, as fast as memory is."""

import numpy as np

from onnxgrad.cpu.core.halves import flat, load, store
from onnxgrad.cpu.core.jit import native
from onnxgrad.cpu.core.parallel import parallel
from onnxgrad.cpu.core.threads import launch
from onnxgrad.tensor_types import Array, accumulator

TASK = 1 << 14  # elements


def relu_grad(dY: Array, X: Array, dX: Array) -> None:
    launch(_relu, flat(dY), flat(X), flat(dX), bytes_touched=3 * dX.nbytes)


def leaky_relu_grad(dY: Array, Y: Array, dX: Array, alpha: float) -> None:
    slope = np.array([alpha], accumulator(dX.dtype))  # an array has a type in native code, a number none
    launch(_leaky_relu, flat(dY), flat(Y), flat(dX), slope, bytes_touched=3 * dX.nbytes)


def sigmoid_grad(dY: Array, Y: Array, dX: Array) -> None:
    launch(_sigmoid, flat(dY), flat(Y), flat(dX), bytes_touched=3 * dX.nbytes)


def tanh_grad(dY: Array, Y: Array, dX: Array) -> None:
    launch(_tanh, flat(dY), flat(Y), flat(dX), bytes_touched=3 * dX.nbytes)


@native
def _relu(dY: Array, X: Array, dX: Array, scheduler: int) -> None:
    parallel(scheduler, (dX.size + TASK - 1) // TASK, _relu_some, (dY, X, dX))


@native
def _relu_some(task: int, dY: Array, X: Array, dX: Array) -> None:
    for i in range(task * TASK, min(dX.size, (task + 1) * TASK)):
        x, g = load(X, i), load(dY, i)
        nothing = type(g)(0)
        store(dX, i, g if x > nothing else nothing)


@native
def _leaky_relu(dY: Array, Y: Array, dX: Array, alpha: Array, scheduler: int) -> None:
    parallel(scheduler, (dX.size + TASK - 1) // TASK, _leaky_relu_some, (dY, Y, dX, alpha))


@native
def _leaky_relu_some(task: int, dY: Array, Y: Array, dX: Array, alpha: Array) -> None:
    slope = alpha[0]
    for i in range(task * TASK, min(dX.size, (task + 1) * TASK)):
        y, g = load(Y, i), load(dY, i)
        store(dX, i, g if y > type(g)(0) else g * slope)


@native
def _sigmoid(dY: Array, Y: Array, dX: Array, scheduler: int) -> None:
    parallel(scheduler, (dX.size + TASK - 1) // TASK, _sigmoid_some, (dY, Y, dX))


@native
def _sigmoid_some(task: int, dY: Array, Y: Array, dX: Array) -> None:
    for i in range(task * TASK, min(dX.size, (task + 1) * TASK)):
        y, g = load(Y, i), load(dY, i)
        store(dX, i, g * y * (type(y)(1) - y))


@native
def _tanh(dY: Array, Y: Array, dX: Array, scheduler: int) -> None:
    parallel(scheduler, (dX.size + TASK - 1) // TASK, _tanh_some, (dY, Y, dX))


@native
def _tanh_some(task: int, dY: Array, Y: Array, dX: Array) -> None:
    for i in range(task * TASK, min(dX.size, (task + 1) * TASK)):
        y, g = load(Y, i), load(dY, i)
        store(dX, i, g * (type(y)(1) - y * y))
