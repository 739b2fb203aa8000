"""The graphs a trainer runs: one for a step, with the loss and its gradients, and one to evaluate, without."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import onnx_ir as ir

from onnxgrad.autodiff.differentiate import differentiate, load, sources
from onnxgrad.graph.builder import Builder
from onnxgrad.passes.append_loss import append_loss
from onnxgrad.passes.batch_slice import PLACE, WEIGHTS
from onnxgrad.passes.fuse_gelu import recognise_gelu
from onnxgrad.passes.fuse_loss import fuse_losses
from onnxgrad.passes.prepare import finish, prepare
from onnxgrad.passes.sink_transposes import move_transposes_behind_cuts
from onnxgrad.passes.sync_batch_norm import measure_together
from onnxgrad.passes.train_mode import SEED, Statistics, to_inference_mode, to_train_mode
from onnxgrad.passes.use_amx_matmul import use_permuted_products
from onnxgrad.train.losses import Loss, Total, parts_of


class StepGraph(NamedTuple):
    """A model whose inputs are a batch, the parameters and the running statistics."""

    model: ir.Model
    loss: str
    gradients: dict[str, str]  # outputs, by parameter
    statistics: list[Statistics]
    drops: bool  # whether it has an input SEED
    dtype: ir.DataType  # of the parameters


class EvaluationGraph(NamedTuple):
    """The model in inference mode with its loss; the weights that training changes are inputs."""

    model: ir.Model
    loss: str
    predictions: list[str]


def step_graph(
    model: Any,
    loss: Total | str,
    trainable: str | Sequence[str] | None,
    group: int | None = None,
    use_amx: bool = False,
) -> StepGraph:
    """Train mode, loss, gradients; `use_amx`: with products for AMX.

    With the number of a `group` of ranks (ops/all_reduce.py), of one rank's slice of a batch.
    """
    prepared = prepare(load(model))
    graph = prepared.model.graph
    weights = place = None
    if group is not None:
        count = 1 if isinstance(loss, str) else len(loss.parts)
        weights = _new_input(graph, WEIGHTS, ir.DataType.DOUBLE, count)
        place = _new_input(graph, PLACE, ir.DataType.INT64, 3)
    statistics = to_train_mode(graph, place)
    builder = Builder(graph, prepared.opsets)
    recognise_gelu(builder)
    if use_amx:
        move_transposes_behind_cuts(builder)
    if group is not None and place is not None:
        measure_together(builder, statistics, place, group)
    name = _make_output(builder, append_loss(builder, _terms(loss), weights))
    drops = any(v.name == SEED for v in graph.inputs)
    loss_value = next(v for v in graph.outputs if v.name == name)
    parameters = _parameters(graph, loss_value, trainable)
    wide = _training_type(graph, parameters)
    _widen(graph, parameters, wide)
    made = differentiate(finish(prepared), parameters, name, parameters_as_inputs=True)
    wanted = {name, *made.gradients.values(), *(n for s in statistics for n in s.following)}
    final = made.model.graph
    for value in [v for v in final.outputs if v.name not in wanted]:
        final.outputs.remove(value)
    _weights_to_inputs(final, [n for s in statistics for n in s.current])
    if use_amx:
        use_permuted_products(final)
    fuse_losses(final)
    return StepGraph(made.model, name, made.gradients, statistics, drops, wide)


def _terms(loss: Total | str) -> Sequence[Loss] | str:
    return loss if isinstance(loss, str) else parts_of(loss)


def _new_input(graph: ir.Graph, name: str, dtype: ir.DataType, length: int) -> ir.Value:
    value = ir.Value(name=name, shape=ir.Shape([length]), type=ir.TensorType(dtype))
    graph.inputs.append(value)
    return value


def evaluation_graph(model: Any, loss: Total | str, step: StepGraph) -> EvaluationGraph:
    """Inference mode and loss, of the model that the step is of."""
    prepared = prepare(load(model))
    graph = prepared.model.graph
    to_inference_mode(graph)
    predictions = [str(v.name) for v in graph.outputs]
    builder = Builder(graph, prepared.opsets)
    name = _make_output(builder, append_loss(builder, _terms(loss)))
    _widen(graph, [name for name in step.gradients if name in graph.initializers], step.dtype)
    finished = finish(prepared)
    fuse_losses(finished.graph)
    _weights_to_inputs(finished.graph, [*step.gradients, *(n for s in step.statistics for n in s.current)])
    return EvaluationGraph(finished, name, predictions)


def _parameters(graph: ir.Graph, loss: ir.Value, trainable: str | Sequence[str] | None) -> list[str]:
    """The names of the weights to train."""
    for name in [trainable] if isinstance(trainable, str) else trainable or ():
        if any(v.name == name for v in graph.inputs):
            raise ValueError(f"Trainer: trainable names {name!r}, which is an input of the model, not a weight")
    try:
        found = [str(v.name) for v in sources(graph, list(graph), [loss], trainable)]
    except ValueError as error:
        raise ValueError(str(error).replace("gradient: ", "Trainer: ").replace("`wrt`", "trainable")) from None
    return [name for name in found if name in graph.initializers]


def _training_type(graph: ir.Graph, parameters: Sequence[str]) -> ir.DataType:
    """What parameters are trained in: float64 if one of them is, else float32; half types keep too few digits."""
    kinds = {graph.initializers[name].dtype for name in parameters}
    return ir.DataType.DOUBLE if ir.DataType.DOUBLE in kinds else ir.DataType.FLOAT


def _widen(graph: ir.Graph, parameters: Sequence[str], wide: ir.DataType) -> None:
    """Parameters of other types come in the type they are trained in, and are cast before use."""
    for name in parameters:
        value = graph.initializers[name]
        narrow: Any = value.const_value
        if value.dtype == wide or value.dtype is None or narrow is None:
            continue
        graph.initializers.pop(name)
        source = ir.Value(name=name, type=ir.TensorType(wide), shape=value.shape)
        values = functools.partial(_as_type, narrow, wide)
        source.const_value = ir.LazyTensor(values, wide, ir.Shape(narrow.shape.numpy()), name=name)
        graph.register_initializer(source)
        to = ir.AttrInt64("to", value.dtype.value)
        cast = ir.Node("", "Cast", [source], [to], num_outputs=1, name=f"{name}_cast")
        cast.outputs[0].name = f"{name}_{value.dtype.name.lower()}"
        cast.outputs[0].type, cast.outputs[0].shape = value.type, value.shape
        graph.insert_before(graph[0], cast)
        value.replace_all_uses_with(cast.outputs[0], replace_graph_outputs=True)


def _as_type(tensor: Any, dtype: ir.DataType) -> ir.Tensor[Any]:
    return ir.Tensor(tensor.numpy().astype(dtype.numpy()))


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
