"""The graphs of a training and of an evaluation step, as onnxruntime-training 1.19.2 loads and runs them.

They are what `gradient` writes, in operators that 1.19.2 has: where it has another form of one of ours, a pass here
writes that, and what is left of our own domain comes along as ONNX functions.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import onnx
import onnx_ir as ir
from onnx import version_converter

from onnxgrad.autodiff.differentiate import add_gradient
from onnxgrad.functions.add_functions import WRITTEN_BY
from onnxgrad.graph.builder import Builder, op
from onnxgrad.graph.files import load
from onnxgrad.graph.replace import replace_node
from onnxgrad.graph.validity import one_line
from onnxgrad.passes.draft import Draft
from onnxgrad.passes.find_parameters import find_parameters
from onnxgrad.passes.finish import add_own_functions, drop_dead, import_domains, restore_dimensions
from onnxgrad.passes.prepare import PREPARE
from onnxgrad.passes.save_batch_statistics import save_batch_statistics
from onnxgrad.schema import MICROSOFT, OWN, is_standard

CALLER = "generate_artifacts"
NEWEST_OPSET, NEWEST_IR = 21, 10  # that onnxruntime-training 1.19.2 reads
RESET = "lazy_reset_grad"
ALL_OUTPUTS = {"BatchNormalizationGrad": 3, "LayerNormalizationGrad": 3, "SimplifiedLayerNormalizationGrad": 2}
GRADIENT, BUFFER, ACCUMULATED = "{}_grad", "{}_grad.accumulation.buffer", "{}_grad.accumulation.out"


def build_gradient_graph(
    model: onnx.ModelProto, requires_grad: Collection[str], frozen: Collection[str], outputs: Sequence[str]
) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """The training and the evaluation model of a model with its loss, which is the first of `outputs`.

    Inputs of both: the model's own, then its parameters in the order of the initializers. The training model has a
    buffer for each gradient and RESET after them, and gives for each, after `outputs`, whether it was accumulated.
    """
    forward = onnx.ModelProto()
    forward.CopyFrom(_in_old_opset(model))
    _parameters_to_inputs(forward, {*requires_grad, *frozen})
    trained = [value.name for value in forward.graph.input if value.name in requires_grad]
    draft = Draft(load(forward, CALLER), CALLER)
    draft.run([*(p for p in PREPARE if p is not find_parameters), measure_batches])
    if trained:
        _add_gradient(draft, trained, outputs)
    else:
        _accumulate(draft.graph, {})
    draft.run(FOR_1_19_2)
    training, evaluation = ir.to_proto(draft.model), _in_inference_mode(forward)
    for result in (training, evaluation):
        result.ir_version = min(result.ir_version, NEWEST_IR)
    return training, evaluation


def _parameters_to_inputs(model: onnx.ModelProto, names: Collection[str]) -> None:
    declared = {value.name for value in model.graph.input}
    moved = [place for place, tensor in enumerate(model.graph.initializer) if tensor.name in names]
    for tensor in (model.graph.initializer[place] for place in moved):
        if tensor.name not in declared:  # models before IR version 4 declare them
            model.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    for place in reversed(moved):  # one by one, in place: protobuf copies lists as bytes, which end at 2 GB
        del model.graph.initializer[place]


def _add_gradient(draft: Draft, trained: Sequence[str], outputs: Sequence[str]) -> None:
    """Gradients of the loss, accumulated. As 1.19.2 does, a loss of any shape is seeded with ones."""
    graph, loss = draft.graph, outputs[0]
    own = {str(v.name): v for v in graph.outputs}
    builder = Builder(graph)
    if builder.tensor(own[loss]).shape != ():
        with builder.at_work(f"{loss}_total"):
            total = op.ReduceSum(builder.tensor(own[loss]), keepdims=0).value
        graph.outputs.append(total)
        loss = total.name = builder.fresh_value_name(f"{loss}_total")
    gradients = add_gradient(draft, trained, loss, parameters_as_inputs=True).outputs
    found = {str(v.name): v for v in graph.outputs}
    graph.outputs[:] = [own[name] for name in outputs]
    _accumulate(graph, {name: found[gradients[name]] for name in trained})


def _accumulate(graph: ir.Graph, gradients: dict[str, ir.Value]) -> None:
    """An InPlaceAccumulatorV2 for each gradient: it adds to a buffer, or overwrites it if RESET is true."""
    reset = ir.Value(name=RESET, type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([1]))
    for name, gradient in gradients.items():
        gradient.name = GRADIENT.format(name)
        buffer = ir.Value(name=BUFFER.format(name), type=gradient.type, shape=gradient.shape)
        done = ir.Value(name=ACCUMULATED.format(name), type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([1]))
        graph.append(
            ir.Node(MICROSOFT, "InPlaceAccumulatorV2", [buffer, gradient, reset], outputs=[done], name=done.name)
        )
        graph.inputs.append(buffer)
        graph.outputs.append(done)
    graph.inputs.append(reset)


def _named(graph: ir.Graph, domain: str, op_type: str) -> list[ir.Node]:
    return [node for node in graph.all_nodes() if node.op_type == op_type and node.domain == domain]


def measure_batches(draft: Draft) -> None:
    """As in 1.19.2, every BatchNormalization measures the batch, in whichever mode and with whatever frozen it came."""
    for node in _named(draft.graph, "", "BatchNormalization"):
        node.attributes["training_mode"] = ir.AttrInt64("training_mode", 1)
        node.resize_outputs(3)
        for value, running in zip(node.outputs[1:], node.inputs[3:], strict=True):
            assert running is not None
            value.name = value.name or f"{node.outputs[0].name}_{running.name}"
            value.type, value.shape = running.type, running.shape


def keep_max_pool_indices(draft: Draft) -> None:
    """Our MaxPoolGrad finds the maxima again; that of 1.19.2, of ONNX's domain, reads where MaxPool found them."""
    pools = _named(draft.graph, "", "MaxPool")
    for node in _named(draft.graph, OWN, "MaxPoolGrad"):
        pool = next((p for p in pools if p.inputs[0] is node.inputs[1] and _has_windows_of(p, node)), None)
        if pool is None or pool.attributes.get_int("storage_order", 0) == 1:
            continue  # it stays, as an ONNX function
        pool.resize_outputs(2)
        values, indices = pool.outputs
        indices.name = indices.name or f"{values.name}_indices"
        indices.dtype, indices.shape = ir.DataType.INT64, values.shape
        attributes = list(node.attributes.values())
        new = ir.Node("", node.op_type, [node.inputs[0], indices], attributes, num_outputs=1, name=node.name)
        replace_node(node, new)


def _has_windows_of(pool: ir.Node, gradient: ir.Node) -> bool:
    """Whether the gradient is that pool's, and not that of another one of the same input."""
    return all(
        pool.attributes[name].value == attribute.value
        for name, attribute in gradient.attributes.items()
        if name in pool.attributes
    )


def drop_inputs_of_lstm(draft: Draft) -> None:
    """LSTMGrad of 1.19.2 has neither B, which matters with `clip` only, nor P."""
    for node in _named(draft.graph, MICROSOFT, "LSTMGrad"):
        if len(node.inputs) > 13 and node.inputs[13] is not None:
            raise ValueError(f"{CALLER}: {node.name!r} is of an LSTM with peepholes: 1.19.2 has no gradient of them")
        if "clip" in node.attributes:
            raise ValueError(f"{CALLER}: {node.name!r} is of an LSTM with clip: 1.19.2 has no gradient of it")
        node.resize_inputs(min(len(node.inputs), 12))


def name_all_outputs(draft: Draft) -> None:
    """Gradients of normalizations have optional outputs here, and none in 1.19.2."""
    for op_type, count in ALL_OUTPUTS.items():
        for node in _named(draft.graph, MICROSOFT, op_type):
            node.resize_outputs(count)
            for k, value in enumerate(node.outputs):
                value.name = value.name or f"{node.name}_unused_{k}"


def keep_own_functions(draft: Draft) -> None:
    """1.19.2 has the operators of com.microsoft; functions are for those of our own domain."""
    for key, function in list(draft.model.functions.items()):
        if function.doc_string == WRITTEN_BY and function.domain == MICROSOFT:
            del draft.model.functions[key]


FOR_1_19_2: list[Callable[[Draft], Any]] = [
    drop_dead,
    save_batch_statistics,
    keep_max_pool_indices,
    restore_dimensions,
    import_domains,
    add_own_functions,
    keep_own_functions,
    drop_inputs_of_lstm,
    name_all_outputs,
]


def _in_inference_mode(model: onnx.ModelProto) -> onnx.ModelProto:
    result = onnx.ModelProto()
    result.CopyFrom(model)
    for node in result.graph.node:
        if not is_standard(node.domain):
            continue
        if node.op_type == "Dropout" and len(node.input) > 2:
            node.input[2] = ""  # as people's code expects it: absent, not gone
        if node.op_type == "BatchNormalization":
            for attribute in node.attribute:
                if attribute.name == "training_mode":
                    attribute.i = 0
            del node.output[1:]
    return result


def _in_old_opset(model: onnx.ModelProto) -> onnx.ModelProto:
    """Of an opset that 1.19.2 reads."""
    opset = next((entry.version for entry in model.opset_import if is_standard(entry.domain)), NEWEST_OPSET)
    if opset <= NEWEST_OPSET:
        return model
    try:
        return version_converter.convert_version(model, NEWEST_OPSET)
    except Exception as error:  # of any type, from C++
        raise ValueError(
            f"{CALLER}: the model imports opset {opset}, onnxruntime-training 1.19.2 reads {NEWEST_OPSET} at most, and "
            f"onnx cannot convert it: {one_line(error)}"
        ) from None
