"""The gradients of activations as ONNX functions: the formulas of their definitions, as nodes."""

from collections.abc import Callable
from typing import Any

from onnxgrad.functions.body import Body, Operand, Value
from onnxgrad.op import Op
from onnxgrad.ops import activation
from onnxgrad.ops.families.formulas import bind, formula_of


def relu_grad(o: Body, dY: Value, X: Value) -> list[Value]:
    return [_formula(activation.relu_grad)(dY, X)]


def leaky_relu_grad(o: Body, dY: Value, Y: Value, alpha: float) -> list[Value]:
    return o.in_work_type(dY, lambda work: [_formula(activation.leaky_relu_grad)(work(dY), work(Y), alpha)])


def sigmoid_grad(o: Body, dY: Value, Y: Value) -> list[Value]:
    return o.in_work_type(dY, lambda work: [_formula(activation.sigmoid_grad)(work(dY), work(Y))])


def tanh_grad(o: Body, dY: Value, Y: Value) -> list[Value]:
    return o.in_work_type(dY, lambda work: [_formula(activation.tanh_grad)(work(dY), work(Y))])


def hard_swish_grad(o: Body, dY: Value, X: Value) -> list[Value]:
    return o.in_work_type(dY, lambda work: [_formula(activation.hard_swish_grad)(work(dY), work(X))])


def _formula(op: Op[..., Any]) -> Callable[..., Value]:
    return bind(formula_of(op), op.function_name, where=_where)


def _where(condition: Value, a: Value, b: Operand) -> Value:
    return condition.body.Where(condition, a, condition.body.like(b, a))
