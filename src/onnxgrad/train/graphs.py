"""The graphs that a trainer runs: one for a step, with loss and gradients, and one for evaluation, without gradients.

Both begin as one prepared draft, and each is a list of passes: the list says what the graph is.
"""

import fnmatch
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import onnx_ir as ir

from onnxgrad.autodiff.differentiate import add_gradient, sources, weights_to_inputs
from onnxgrad.graph.builder import Builder, op
from onnxgrad.graph.head import without_word
from onnxgrad.graph.new_node import new_node
from onnxgrad.graph.suggest import suggestion
from onnxgrad.graph.torch_export import PRODUCER
from onnxgrad.passes.append_loss import append_loss, prediction_of
from onnxgrad.passes.batch_slice import PLACE, WEIGHTS
from onnxgrad.passes.cancel_transposes import cancel_transposes
from onnxgrad.passes.draft import Draft
from onnxgrad.passes.drop_identities import drop_identities
from onnxgrad.passes.expand_training import expand_training
from onnxgrad.passes.find_parameters import ADAPTER
from onnxgrad.passes.finish import FOR_SESSIONS, drop_dead
from onnxgrad.passes.fuse_attention import fuse_attention
from onnxgrad.passes.fuse_elementwise import fuse_elementwise
from onnxgrad.passes.fuse_gelu import fuse_gelu
from onnxgrad.passes.fuse_linear_loss import fuse_linear_loss
from onnxgrad.passes.fuse_loss import fuse_losses
from onnxgrad.passes.join_projections import join_projections
from onnxgrad.passes.mix_precision import mix_precision
from onnxgrad.passes.pack_attention import pack_attention
from onnxgrad.passes.read_transposed import read_transposed
from onnxgrad.passes.recompute_blocks import recompute_blocks
from onnxgrad.passes.recompute_steps import recompute_steps
from onnxgrad.passes.sample_variance import use_sample_variance
from onnxgrad.passes.save_batch_statistics import save_batch_statistics
from onnxgrad.passes.sink_transposes import sink_transposes
from onnxgrad.passes.sync_batch_norm import measure_together
from onnxgrad.passes.train_mode import SEED, Statistics, to_inference_mode, to_train_mode
from onnxgrad.passes.use_bias_grad import use_bias_grad
from onnxgrad.passes.use_channels_last import use_channels_last
from onnxgrad.passes.use_depthwise_conv import use_depthwise_conv
from onnxgrad.passes.use_permuted_matmul import use_permuted_matmul
from onnxgrad.train.losses import Loss, Total, parts_of

HALF_TYPES = {"bf16": ir.DataType.BFLOAT16, "fp16": ir.DataType.FLOAT16}
LOSS_SCALE = "loss_scale"  # an input of steps in fp16


class Selection(NamedTuple):
    """Which parameters to train, by names and patterns of such; None: all parameters."""

    trainable: str | Sequence[str] | None = None
    freeze: str | Sequence[str] = ()
    freeze_statistics: bool = False  # of layers whose weights are not trained


ALL = Selection()
STEPS = "steps"  # of loops: what `recompute` is about in any case


class StepGraph(NamedTuple):
    """A model whose inputs are a batch, the parameters and the running statistics."""

    model: ir.Model
    loss: str
    gradients: dict[str, str]  # outputs, by parameter
    statistics: list[Statistics]
    drops: bool  # whether it has an input SEED
    scales: bool  # whether it has an input LOSS_SCALE
    dtype: ir.DataType  # of the parameters
    narrow: dict[str, ir.Value]  # inputs that are parameters in a half type, by parameter


class EvaluationGraph(NamedTuple):
    """The model in inference mode with its loss; the weights that training changes are inputs."""

    model: ir.Model
    loss: str
    predictions: list[str]


@dataclass
class _Step(Draft):
    """A draft that becomes a training step, or an evaluation."""

    terms: Sequence[Loss] | str = ()  # the loss
    selection: Selection = ALL
    group: int | None = None  # of the ranks that train together (ops/all_reduce.py)
    weights: ir.Value | None = None  # inputs that say which slice of a batch this rank has
    place: ir.Value | None = None
    statistics: list[Statistics] = field(default_factory=list)
    loss: str = ""
    scaled: str = ""  # what is differentiated: the loss, or a multiple of it
    parameters: list[str] = field(default_factory=list)
    dtype: ir.DataType = ir.DataType.FLOAT  # that parameters are trained in
    gradients: dict[str, str] = field(default_factory=dict)
    narrow: dict[str, ir.Value] = field(default_factory=dict)


def step_graph(
    prepared: Draft,
    loss: Total | str,
    selection: Selection = ALL,
    group: int | None = None,
    own_products: bool = False,
    on_cpu: bool | None = None,
    precision: str = "float32",
    recompute: bool | str | Sequence[str] = False,
) -> StepGraph:
    """Train mode, loss and gradients; `own_products`, `on_cpu`: products and attention, convolutions are our own.

    If `on_cpu` is False it is for CUDA alone, channels of images come last and element-wise nodes are fused; if it is
    None, for any device, and what operators there are for Gelu in onnxruntime is left to that.

    In the `precision` "bf16", products on the CPU round what they multiply; elsewhere, and in "fp16", values have the
    half type. With `recompute` loops keep about √n of their states, and the blocks that it names none of their
    activations. With the number of a `group` of ranks, it is a step of one rank's slice of a batch. Remarks are added
    to those of `prepared`.
    """
    step = _Step(**vars(prepared), terms=_terms(loss), selection=selection, group=group)
    rounds_products = bool(on_cpu) and precision == "bf16"  # onnxruntime's CPU provider has no kernels for half types
    mixes = precision in HALF_TYPES and not rounds_products
    scales = precision == "fp16"
    blocks = [] if isinstance(recompute, bool) else [name for name in _names(recompute) or () if name != STEPS]
    passes: list[Callable[[_Step], Any]] = [
        _keep_predictions,
        *([_add_slice_inputs] if group is not None else []),
        _to_train_mode,
        *([fuse_gelu] if on_cpu is not None else []),
        *([sink_transposes, _fuse_attention] if own_products or rounds_products or on_cpu is False else []),
        *([_join_projections, pack_attention] if on_cpu is False else []),
        *([_sync_batch_norm] if group is not None else []),
        *([_use_sample_variance] if group is None and _is_of_torch(step) else []),
        drop_dead,
        *([drop_identities, cancel_transposes] if on_cpu is False else []),
        *([recompute_steps] if recompute else []),
        *([functools.partial(mix_precision, dtype=HALF_TYPES[precision])] if mixes else []),
        _append_loss,
        *([_scale_loss] if scales else []),
        _choose_parameters,
        _widen_parameters,
        functools.partial(_fuse_linear_loss, precision="bfloat16" if rounds_products else "float32"),
        _add_gradient,
        _keep_outputs_of_step,
        drop_dead,
        save_batch_statistics,
        *([functools.partial(use_permuted_matmul, precision="bfloat16")] if rounds_products else []),
        *([use_permuted_matmul] if own_products else []),
        *([read_transposed] if on_cpu else []),
        *([_use_channels_last] if on_cpu is False else []),
        *([functools.partial(use_permuted_matmul, on_gpu=True)] if on_cpu is False else []),
        *([use_bias_grad] if on_cpu is False else []),
        *([_casts_to_inputs] if on_cpu is False and mixes else []),
        *([use_depthwise_conv] if on_cpu else []),
        fuse_losses,
        *([functools.partial(_recompute_blocks, names=blocks)] if blocks else []),
        *([expand_training, drop_dead, _fuse_elementwise] if on_cpu is False else []),
        *FOR_SESSIONS,
    ]
    step.run(passes)
    drops = any(v.name == SEED for v in step.graph.inputs)
    return StepGraph(step.model, step.loss, step.gradients, step.statistics, drops, scales, step.dtype, step.narrow)


def evaluation_graph(
    prepared: Draft, loss: Total | str, step: StepGraph, on_cpu: bool | None = None
) -> EvaluationGraph:
    """Inference mode and loss, of the model that the step is of; None: for any device, with none of our operators."""
    draft = _Step(**vars(prepared), terms=_terms(loss))
    draft.parameters = [name for name in step.gradients if name in draft.graph.initializers]
    draft.dtype, draft.statistics = step.dtype, step.statistics
    _keep_predictions(draft)
    predictions = [str(v.name) for v in draft.graph.outputs]
    passes: list[Callable[[_Step], Any]] = [
        _to_inference_mode,
        *([sink_transposes] if on_cpu is False else []),
        *([functools.partial(fuse_attention, trained=draft.parameters)] if on_cpu is not None else []),
        *([pack_attention] if on_cpu is False else []),
        _append_loss,
        _widen_parameters,
        drop_dead,
        _weights_to_inputs,
        *([use_depthwise_conv] if on_cpu else []),
        fuse_losses,
        *FOR_SESSIONS,
    ]
    draft.run(passes)
    return EvaluationGraph(draft.model, draft.loss, predictions)


def _terms(loss: Total | str) -> Sequence[Loss] | str:
    return loss if isinstance(loss, str) else parts_of(loss)


def _keep_predictions(step: _Step) -> None:
    """Values inside the model that the loss names become outputs: passes keep these, and metrics may name them, too."""
    for part in [step.terms] if isinstance(step.terms, str) else step.terms:
        value = prediction_of(step.graph, part)
        if not value.is_graph_output():
            step.graph.outputs.append(value)


def _add_slice_inputs(step: _Step) -> None:
    """Inputs that say which slice of a batch a rank has."""
    count = 1 if isinstance(step.terms, str) else len(step.terms)
    step.weights = ir.Value(name=WEIGHTS, shape=ir.Shape([count]), type=ir.TensorType(ir.DataType.DOUBLE))
    step.place = ir.Value(name=PLACE, shape=ir.Shape([3]), type=ir.TensorType(ir.DataType.INT64))
    step.graph.inputs.extend([step.weights, step.place])


def _to_train_mode(step: _Step) -> None:
    """Which layers keep their statistics is decided by names: the loss is not there yet."""
    frozen = _frozen(step)
    if step.selection.freeze_statistics:
        frozen |= {n for n, role in step.roles.items() if n not in _chosen(step) and role.kind != "statistic"}
    step.statistics = to_train_mode(step.graph, step.place, frozen, by_weights=step.selection.freeze_statistics)


def _fuse_attention(step: _Step) -> None:
    """Numbers that are trained are no constants, and masks that are trained stay where they are."""
    fuse_attention(step, _trained(step))


def _join_projections(step: _Step) -> None:
    join_projections(step, _trained(step))


def _trained(step: _Step) -> set[str]:
    """The names of what is trained, as far as it is known before the loss is there."""
    return _chosen(step) - _frozen(step)


def _chosen(step: _Step) -> set[str]:
    """What `trainable` names, or all parameters; adapters in any case."""
    trainable = _names(step.selection.trainable)
    return {
        n for n, role in step.roles.items()
        if role.kind == ADAPTER
        or (role.is_parameter if trainable is None else any(fnmatch.fnmatchcase(n, p) for p in trainable))
    }  # fmt: skip


def _to_inference_mode(step: _Step) -> None:
    to_inference_mode(step.model)


def _sync_batch_norm(step: _Step) -> None:
    assert step.place is not None and step.group is not None
    measure_together(Builder(step.graph), step.statistics, step.place, step.group, of_sample=_is_of_torch(step))


def _use_sample_variance(step: _Step) -> None:
    step.statistics = use_sample_variance(Builder(step.graph), step.statistics)


def _is_of_torch(step: _Step) -> bool:
    """Whether one of torch's exporters wrote the model."""
    return bool(step.model.producer_name == PRODUCER)


def _append_loss(step: _Step) -> None:
    """The loss becomes an output."""
    builder = Builder(step.graph)
    value = append_loss(builder, step.terms, step.weights, step.remarks)
    if not value.is_graph_output():
        value.name = builder.fresh_value_name("loss")
        step.graph.outputs.append(value)
    step.loss = step.scaled = str(value.name)


def _scale_loss(step: _Step) -> None:
    """The loss times an input becomes an output, too, to be differentiated in its place."""
    builder = Builder(step.graph)
    factor = ir.Value(name=LOSS_SCALE, shape=ir.Shape([]), type=ir.TensorType(ir.DataType.FLOAT))
    step.graph.inputs.append(factor)
    loss = next(v for v in step.graph.outputs if v.name == step.loss)
    with builder.at_work("loss"):
        scaled = (builder.tensor(loss) * op.CastLike(builder.tensor(factor), builder.tensor(loss))).value
    step.graph.outputs.append(scaled)
    step.scaled = str(scaled.name)


def _choose_parameters(step: _Step) -> None:
    """The weights to train, and the type to train them in."""
    trainable = _names(step.selection.trainable)
    inputs = {v.name for v in step.graph.inputs}
    for name in trainable or ():
        if name in inputs:
            raise ValueError(f"{step.caller}: trainable names {name!r}, which is an input of the model, not a weight")
    loss = next(v for v in step.graph.outputs if v.name == step.loss)
    found = [str(v.name) for v in sources(step, [loss], trainable, "trainable")]
    has_adapters = any(role.kind == ADAPTER for role in step.roles.values())
    if trainable is not None and has_adapters:
        found = list(dict.fromkeys([*(str(v.name) for v in sources(step, [loss], None, "trainable")), *found]))
    found = [name for name in found if name in step.graph.initializers]
    frozen = _frozen(step)
    step.parameters = [name for name in found if name not in frozen]
    if not step.parameters:
        raise ValueError(f"{step.caller}: freeze leaves nothing to train")
    step.dtype = _training_type(step.graph, step.parameters)
    if trainable is None and not has_adapters:
        step.remarks += _left_alone(step)


def _names(names: str | Sequence[str] | None) -> Sequence[str] | None:
    return [names] if isinstance(names, str) else names


def _frozen(step: _Step) -> set[str]:
    """What `freeze` names."""
    return {name for pattern in _names(step.selection.freeze) or () for name in _matching(step, pattern)}


def _matching(step: _Step, pattern: str) -> list[str]:
    """Floating-point initializers that a pattern of `freeze` stands for."""
    names = without_word(step.model, pattern, step.roles)
    found = [n for n in step.roles if n in names or (pattern not in step.roles and fnmatch.fnmatchcase(n, pattern))]
    if not found:
        raise ValueError(
            f"{step.caller}: freeze names {pattern!r}, which is not a parameter of the model"
            f"{suggestion(pattern, step.roles)}"
        )
    return found


def _left_alone(step: _Step) -> list[str]:
    """One sentence about what looks like a weight, but is not trained."""
    others = [
        f"{name} ({role.why})" for name, role in step.roles.items()
        if not (role.is_parameter or role.is_made)
        and role.kind in ("buffer", "table", "mask", "factor", "token", "constant")
    ]  # fmt: skip
    if not others:
        return []
    more = f" and {len(others) - 3} more" if len(others) > 3 else ""
    return [f"left as they are: {', '.join(others[:3])}{more}; naming them in trainable trains them"]


def _fuse_linear_loss(step: _Step, precision: str) -> None:
    scale = next((v for v in step.graph.inputs if v.name == LOSS_SCALE), None)
    fuse_linear_loss(step, {step.loss, step.scaled, *_measured(step)}, scale, precision)


def _add_gradient(step: _Step) -> None:
    step.gradients = add_gradient(step, step.parameters, step.scaled, parameters_as_inputs=True).outputs


def _keep_outputs_of_step(step: _Step) -> None:
    """Of the outputs only what a step computes; running statistics, which it changes, become inputs."""
    wanted = {step.loss, *step.gradients.values(), *_measured(step)}
    step.graph.outputs[:] = [v for v in step.graph.outputs if v.name in wanted]
    weights_to_inputs(step.graph, [n for s in step.statistics for n in s.current])


def _measured(step: _Step) -> set[str]:
    """Outputs that are statistics."""
    return {n for s in step.statistics for n in (*s.following, s.unread) if n is not None}


def _casts_to_inputs(step: _Step) -> None:
    """Makes inputs of the parameters in a half type: the trainer casts all of them at once, not one by one."""
    parameters = {v: str(v.name) for v in step.graph.inputs if v.name in step.parameters}
    for node in list(step.graph):
        source, value = node.inputs[0] if node.inputs else None, node.outputs[0]
        if node.op_type != "Cast" or source not in parameters or value.dtype not in HALF_TYPES.values():
            continue
        narrow = ir.Value(name=value.name, type=value.type, shape=value.shape)
        value.name = None
        value.replace_all_uses_with(narrow)
        step.graph.remove(node, safe=True)
        step.graph.inputs.append(narrow)
        step.narrow[parameters[source]] = narrow


def _use_channels_last(step: _Step) -> None:
    """Batch normalization then corrects its running variance itself."""
    use_channels_last(step)
    outputs = {v.name for v in step.graph.outputs}
    step.statistics = [s if s.unread in outputs else replace(s, unread=None) for s in step.statistics]


def _recompute_blocks(step: _Step, names: Sequence[str]) -> None:
    recompute_blocks(step, names, step.loss, step.gradients)


def _fuse_elementwise(step: _Step) -> None:
    fuse_elementwise(step, step.loss)


def _weights_to_inputs(step: _Step) -> None:
    """What training changes."""
    weights_to_inputs(step.graph, [*step.parameters, *(n for s in step.statistics for n in s.current)])


def _training_type(graph: ir.Graph, parameters: Sequence[str]) -> ir.DataType:
    """What parameters are trained in: float64 if one of them is, else float32; half types keep too few digits."""
    kinds = {graph.initializers[name].dtype for name in parameters}
    return ir.DataType.DOUBLE if ir.DataType.DOUBLE in kinds else ir.DataType.FLOAT


def _widen_parameters(step: _Step) -> None:
    """Parameters of other types come in the type they are trained in, and are cast before use."""
    graph, wide = step.graph, step.dtype
    for name in step.parameters:
        value = graph.initializers[name]
        narrow: Any = value.const_value
        if value.dtype == wide or value.dtype is None or narrow is None:
            continue
        graph.initializers.pop(name)
        source = ir.Value(name=name, type=ir.TensorType(wide), shape=value.shape)
        values = functools.partial(_as_type, narrow, wide)
        source.const_value = ir.LazyTensor(values, wide, ir.Shape(narrow.shape.numpy()), name=name)
        graph.register_initializer(source)
        cast = new_node("Cast", [source], f"{name}_{value.dtype.name.lower()}", {"to": value.dtype.value}, like=value)
        graph.insert_before(graph[0], cast)
        value.replace_all_uses_with(cast.outputs[0], replace_graph_outputs=True)


def _as_type(tensor: Any, dtype: ir.DataType) -> ir.Tensor[Any]:
    return ir.Tensor(tensor.numpy().astype(dtype.numpy()))
