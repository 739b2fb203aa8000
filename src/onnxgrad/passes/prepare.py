"""prepare(): the first passes of gradients and training, which bring a model into the form that rules expect."""

from contextlib import suppress

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from onnxgrad.functions.add_functions import WRITTEN_BY
from onnxgrad.graph.new_node import new_node
from onnxgrad.graph.tensor import MOST_READ
from onnxgrad.passes.branch_by_rank import branch_by_rank
from onnxgrad.passes.convert_opset import convert_opset
from onnxgrad.passes.draft import Draft, Pass
from onnxgrad.passes.expand import expand
from onnxgrad.passes.expand_contrib import expand_contrib
from onnxgrad.passes.expand_ml import drop_zip_maps, expand_ml
from onnxgrad.passes.expand_preview import expand_preview
from onnxgrad.passes.expand_sequence_map import expand_sequence_map
from onnxgrad.passes.expand_training import adopt_strays, expand_before_gradient
from onnxgrad.passes.fake_quantize import fake_quantize
from onnxgrad.passes.find_parameters import find_parameters
from onnxgrad.passes.fold_shapes import fold_shapes
from onnxgrad.passes.forget_sequence_shapes import forget_sequence_shapes
from onnxgrad.passes.infer import infer
from onnxgrad.passes.infer_subgraphs import infer_subgraphs
from onnxgrad.passes.lift_weights import lift_constants, lift_initializers
from onnxgrad.passes.name_nodes import name_nodes
from onnxgrad.passes.resolve_sequences import resolve_sequences
from onnxgrad.passes.restore_weights import restore_weights
from onnxgrad.passes.validate import validate
from onnxgrad.passes.write_gradients import bind_names, write_gradients
from onnxgrad.rules.registry import RULES
from onnxgrad.schema import is_standard


def drop_own_functions(draft: Draft) -> None:
    """Removes functions that add_functions wrote: the nodes are known without them."""
    for key, function in list(draft.model.functions.items()):
        if function.doc_string == WRITTEN_BY:
            del draft.model.functions[key]


def read_small_tensors(draft: Draft) -> None:
    """Reads small tensors out of their files: shape inference may need them, and knows no folders."""
    for value in draft.graph.initializers.values():
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor) and tensor.size <= MOST_READ:
            with suppress(FileNotFoundError):  # a ModelProto does not say in which folder its files are
                value.const_value = ir.Tensor(tensor.numpy().copy(), dtype=tensor.dtype, name=tensor.name)


def inline_functions(draft: Draft) -> None:
    """Puts the bodies of functions in their place, save those with a rule, which may say something else."""
    if draft.model.functions:
        draft.model = common.InlinePass(lambda f: (f.domain, f.name) not in RULES)(draft.model).model


def remove_initializers_from_inputs(draft: Draft) -> None:
    """Makes weights of those inputs that have a value, as models before IR version 4 declare all of them."""
    common.RemoveInitializersFromInputsPass()(draft.model)


def name_dimensions(draft: Draft) -> None:
    """Names unknown dimensions of inputs, so that the same one is recognised wherever it turns up."""
    for value in draft.graph.inputs:
        if value.shape is not None and any(not isinstance(d, int) and d.value is None for d in value.shape):
            draft.unnamed[str(value.name)] = ir.Shape(list(value.shape))
            value.shape = ir.Shape(
                d if isinstance(d, int) or d.value is not None else f"{value.name}_dim_{k}"
                for k, d in enumerate(value.shape)
            )


def type_eye_like(draft: Draft) -> None:
    """Gives EyeLike zeros of its `dtype` to look at, as onnx 1.23 dies where it does not know the type of the input."""
    for node in draft.graph.all_nodes():
        given, value = node.attributes.get("dtype"), node.inputs[0] if node.inputs else None
        if node.op_type != "EyeLike" or not is_standard(node.domain) or given is None or value is None or value.dtype:
            continue
        kind, name = ir.DataType(given.as_int()), node.outputs[0].name
        shape = new_node("Shape", [value], f"{name}_shape")
        zero = {"value": ir.Tensor(np.zeros(1, kind.numpy()), kind)}
        zeros = new_node("ConstantOfShape", [shape.outputs[0]], f"{name}_zeros", zero)
        assert node.graph is not None
        node.graph.insert_before(node, [shape, zeros])
        node.replace_input_with(0, zeros.outputs[0])


def drop_empty_scales(draft: Draft) -> None:
    """Leaves out the empty regions and scales that a Resize had to have before opset 13, and that many still have."""
    for node in draft.graph.all_nodes():
        if node.op_type != "Resize" or not is_standard(node.domain):
            continue
        for k, value in enumerate(node.inputs[:3]):
            if k > 0 and value is not None and value.shape is not None and list(value.shape) == [0]:
                node.replace_input_with(k, None)


def cast_to_known_types(draft: Draft) -> None:
    """Makes a Cast of each CastLike whose type is known, which onnxruntime can compute ahead."""
    for node in draft.graph.all_nodes():
        like = node.inputs[1] if node.op_type == "CastLike" and is_standard(node.domain) else None
        if like is not None and like.dtype is not None:
            node.op_type = "Cast"
            node.attributes["to"] = ir.AttrInt64("to", like.dtype.value)
            node.replace_input_with(1, None)
            node.resize_inputs(1)


# What training changes is an initializer of its own, under the name that its author knows. Exporting does it, too.
RESTORE: list[Pass] = [lift_initializers, lift_constants, restore_weights]
TO_NEW_OPSET: list[Pass] = [inline_functions, remove_initializers_from_inputs, type_eye_like, convert_opset]
# What a graph that onnxruntime-training wrote goes through before its operators are written with others.
OLD_GRAPH: list[Pass] = [
    adopt_strays, drop_own_functions, inline_functions, read_small_tensors, type_eye_like, convert_opset, name_nodes
]  # fmt: skip

PREPARE: list[Pass] = [
    adopt_strays,
    validate,
    bind_names,
    lift_initializers,
    drop_own_functions,
    read_small_tensors,
    drop_zip_maps,
    *TO_NEW_OPSET,
    name_nodes,
    name_dimensions,
    expand_ml,
    expand_before_gradient,
    expand_contrib,
    expand_preview,
    find_parameters,
    forget_sequence_shapes,
    infer,
    expand_sequence_map,
    expand,
    cast_to_known_types,
    drop_empty_scales,
    fold_shapes,
    resolve_sequences,
    branch_by_rank,
    infer_subgraphs,
    write_gradients,
]


def prepare(model: ir.Model, caller: str) -> Draft:
    """A draft of the model, which may be changed, to be differentiated."""
    return Draft(model, caller).run(PREPARE)


def prepare_for_training(model: ir.Model, caller: str) -> Draft:
    """A draft of the model, which may be changed, with each weight under the name that its author knows."""
    return Draft(model, caller).run([*RESTORE, fake_quantize, *PREPARE])
