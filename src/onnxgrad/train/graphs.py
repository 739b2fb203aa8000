"""The graphs a trainer runs: one for a step, with the loss and its gradients, and one to evaluate, without."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import onnx_ir as ir

from onnxgrad.differentiate import differentiate, load
from onnxgrad.graph.builder import Builder
from onnxgrad.prepared import finish, prepare
from onnxgrad.train.forms import SEED, Statistics, to_inference_form, to_training_form
from onnxgrad.train.losses import Total, append_loss


class StepGraph(NamedTuple):
    """A model whose inputs are a batch, the parameters and the running statistics."""

    model: ir.Model
    loss: str
    gradients: dict[str, str]  # outputs, by parameter
    statistics: list[Statistics]
    drops: bool  # whether it has an input SEED


class EvaluationGraph(NamedTuple):
    """The model in inference form with its loss; the weights that training changes are inputs."""

    model: ir.Model
    loss: str
    predictions: list[str]


def step_graph(model: Any, loss: Total | str, trainable: str | Sequence[str] | None) -> StepGraph:
    """Training form, loss, gradients."""
    prepared = prepare(load(model))
    graph = prepared.model.graph
    statistics = to_training_form(graph)
    builder = Builder(graph, prepared.opsets)
    name = _make_output(builder, append_loss(builder, loss))
    drops = any(v.name == SEED for v in graph.inputs)
    made = differentiate(finish(prepared), trainable, name, parameters_as_inputs=True)
    wanted = {name, *made.gradients.values(), *(n for s in statistics for n in s.following)}
    final = made.model.graph
    for value in [v for v in final.outputs if v.name not in wanted]:
        final.outputs.remove(value)
    _weights_to_inputs(final, [n for s in statistics for n in s.current])
    return StepGraph(made.model, name, made.gradients, statistics, drops)


def evaluation_graph(model: Any, loss: Total | str, changed: Sequence[str]) -> EvaluationGraph:
    """Inference form and loss."""
    prepared = prepare(load(model))
    graph = prepared.model.graph
    to_inference_form(graph)
    predictions = [str(v.name) for v in graph.outputs]
    builder = Builder(graph, prepared.opsets)
    name = _make_output(builder, append_loss(builder, loss))
    finished = finish(prepared)
    _weights_to_inputs(finished.graph, changed)
    return EvaluationGraph(finished, name, predictions)


def _make_output(builder: Builder, loss: ir.Value) -> str:
    if not loss.is_graph_output():
        loss.name = builder.fresh_value_name("loss")
        builder.graph.outputs.append(loss)
    return str(loss.name)


def _weights_to_inputs(graph: ir.Graph, names: Sequence[str]) -> None:
    for name in names:
        value = graph.initializers.pop(name, None)
        if value is not None and not value.is_graph_input():
            tensor = value.const_value
            value.const_value = None
            if tensor is not None:
                value.dtype, value.shape = tensor.dtype, ir.Shape(tensor.shape.numpy())
            graph.inputs.append(value)
