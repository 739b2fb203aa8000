"""prepare(): the first passes of gradients and training, which bring a model into the form that rules expect."""

from collections import Counter
from contextlib import suppress

import onnx_ir as ir
from onnx import defs, version_converter
from onnx_ir.passes import common

from onnxgrad.functions.add_functions import WRITTEN_BY
from onnxgrad.graph.tensor import MOST_READ
from onnxgrad.graph.validity import one_line
from onnxgrad.passes.branch_by_rank import branch_by_rank
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
from onnxgrad.passes.infer import forget_new_names, infer
from onnxgrad.passes.infer_subgraphs import infer_subgraphs
from onnxgrad.passes.name_nodes import name_nodes
from onnxgrad.passes.resolve_sequences import resolve_sequences
from onnxgrad.passes.restore_weights import restore_weights
from onnxgrad.passes.stored_weights import is_dequantize
from onnxgrad.passes.validate import validate
from onnxgrad.passes.weights_aside import weights_aside
from onnxgrad.passes.write_gradients import bind_names, write_gradients
from onnxgrad.rules.registry import RULES
from onnxgrad.schema import OF_ONNXRUNTIME, is_standard

BATCHED_SCAN = 8  # the opset whose Scan goes through a batch, too
NORM_WITH_MODE = 14  # the opset since which BatchNormalization says whether it is in train mode
RESIZE_WITH_MODES = 11  # the first opset where Resize can be told where it reads
NUMBERS_AS_INPUTS = 11  # the first opset where Clip and Pad take numbers as inputs, in the type of their data
OLDEST_IR = 4  # from which on an initializer need not be an input, too
OLDEST_OPSET = 18  # the oldest that the functions of our operators are written for; older models are converted


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


def convert_opset(draft: Draft) -> None:
    """Converts a model of an older opset."""
    convert_to(draft, OLDEST_OPSET, f"rules are written for {OLDEST_OPSET} and newer")


def convert_to(draft: Draft, wanted: int, reason: str) -> None:
    """Converts a model to an opset, if its own is older; the reason is for a sentence if that cannot be."""
    opset = draft.graph.opset_imports.setdefault("", wanted)
    if opset >= wanted:
        return
    if not any(is_standard(node.domain) for node in draft.graph.all_nodes()):
        draft.graph.opset_imports[""] = wanted
        return
    in_training = _without_saved_statistics(draft.graph) if opset < NORM_WITH_MODE else set()
    if opset == BATCHED_SCAN:
        _batch_scans(draft)
    _hide_additions(draft.graph, opset)
    _copy_captured(draft.graph)
    with weights_aside(draft.graph) as weights:
        proto = ir.to_proto(draft.model)
    proto.ir_version = max(proto.ir_version, OLDEST_IR)
    try:
        converted = version_converter.convert_version(proto, wanted)
    except Exception as error:  # of any type, from C++
        raise ValueError(
            f"{draft.caller}: the model imports opset {opset}, {reason}, and onnx cannot convert it: {one_line(error)}"
        ) from None
    metadata = draft.model.metadata_props
    draft.model = ir.from_proto(converted)
    draft.model.metadata_props.update(metadata)
    weights.put_back(draft.graph)
    forget_new_names(draft.graph)
    _show_additions(draft.graph)
    for node in draft.graph:
        if node.outputs[0].name in in_training:
            node.attributes["training_mode"] = ir.AttrInt64("training_mode", 1)
    if opset < RESIZE_WITH_MODES:
        _keep_coordinates(draft.model)
    if opset < NUMBERS_AS_INPUTS:
        _cast_numbers(draft.graph)


def _copy_captured(graph: ir.Graph) -> None:
    """Lets subgraphs read copies: onnx's converter cannot put another value in the place of one that they read."""
    inner = {use.node: use.node.graph for node in graph for v in node.outputs for use in v.uses()}
    for node in list(graph):
        for value in node.outputs:
            uses = [use for use in value.uses() if inner[use.node] is not graph]
            if not uses:
                continue
            copy = ir.Node("", "Identity", [value], name=f"{value.name}_for_subgraphs")
            copy.outputs[0].name, copy.outputs[0].type = f"{value.name}_for_subgraphs", value.type
            copy.outputs[0].shape = value.shape
            graph.insert_after(node, copy)
            for user, k in uses:
                user.replace_input_with(k, copy.outputs[0])


def _batch_scans(draft: Draft) -> None:
    """Makes such a Scan one over the examples of a batch, with one over the steps in it: onnx would drop the batch."""
    for node in [n for n in draft.graph.all_nodes() if n.op_type == "Scan" and is_standard(n.domain)]:
        lengths, *values = node.inputs
        if lengths is not None:
            raise ValueError(
                f"{draft.caller}: Scan (node {node.name!r}) of opset {BATCHED_SCAN} has lengths, which later opsets do "
                "not take, expected none"
            )
        steps = list(node.attributes.values())
        if "directions" in node.attributes:
            steps.append(ir.AttrInt64s("scan_input_directions", node.attributes["directions"].as_ints()))
        examples = [ir.Value(name=f"{node.outputs[0].name}_example_{k}") for k in range(len(values))]
        kept = [a for a in steps if a.name != "directions"]
        scan = ir.Node(OF_ONNXRUNTIME, "Scan", examples, kept, num_outputs=len(node.outputs))
        for k, result in enumerate(scan.outputs):
            result.name = f"{node.outputs[0].name}_of_example_{k}"
        node.attributes.clear()
        node.attributes["body"] = ir.AttrGraph("body", ir.Graph(examples, scan.outputs, nodes=[scan], name="example"))
        node.attributes["num_scan_inputs"] = ir.AttrInt64("num_scan_inputs", len(values))
        for k, value in enumerate(values):
            node.replace_input_with(k, value)
        node.resize_inputs(len(values))
        node.domain, draft.graph.opset_imports[OF_ONNXRUNTIME] = OF_ONNXRUNTIME, 1


def _hide_additions(graph: ir.Graph, opset: int) -> None:
    """Moves what only onnxruntime has in ONNX's domain, LayerNormalization before opset 17 say, where onnx is blind."""
    for node in graph.all_nodes():
        if is_standard(node.domain) and not defs.has(node.op_type, opset):
            node.domain = OF_ONNXRUNTIME
            graph.opset_imports[OF_ONNXRUNTIME] = 1


def _show_additions(graph: ir.Graph) -> None:
    graph.opset_imports.pop(OF_ONNXRUNTIME, None)
    for node in graph.all_nodes():
        if node.domain == OF_ONNXRUNTIME:
            node.domain = ""


def _without_saved_statistics(graph: ir.Graph) -> set[str]:
    """Drops outputs of BatchNormalization that later opsets do not have; results of those that are in train mode.

    Before opset 14 a node was in train mode if it had such outputs, which nothing uses but training in old frameworks.
    """
    found = set()
    for node in graph:
        if node.op_type != "BatchNormalization" or not is_standard(node.domain) or len(node.outputs) == 1:
            continue
        if not any(v.uses() or v.is_graph_output() for v in node.outputs[3:]):
            node.resize_outputs(min(len(node.outputs), 3))
            found.add(str(node.outputs[0].name))
    return found


def _keep_coordinates(model: ir.Model) -> None:
    """Says how an Upsample or Resize without modes reads: onnx's converter lets it take the newer default."""
    for graph in model.graphs():
        for node in graph:
            if node.op_type == "Resize" and is_standard(node.domain):
                node.attributes["coordinate_transformation_mode"] = ir.AttrString(
                    "coordinate_transformation_mode", "asymmetric"
                )
                node.attributes["nearest_mode"] = ir.AttrString("nearest_mode", "floor")


def _cast_numbers(graph: ir.Graph) -> None:
    """Casts the numbers of Clip and Pad, of which onnx's converter makes float32, in a model that has other types."""
    types = {value.dtype for value in (*graph.inputs, *graph.initializers.values())} - {None, ir.DataType.FLOAT}
    if not any(dtype.is_floating_point() for dtype in types if dtype):
        return
    for node in [n for n in graph.all_nodes() if n.op_type in ("Clip", "Pad") and is_standard(n.domain)]:
        for k, number in enumerate(node.inputs):
            if number is not None and k >= (1 if node.op_type == "Clip" else 2):
                cast = ir.Node("", "CastLike", [number, node.inputs[0]])
                cast.outputs[0].name = f"{node.outputs[0].name}_number_{k}"
                node.prepend(cast)
                node.replace_input_with(k, cast.outputs[0])


def name_dimensions(draft: Draft) -> None:
    """Names unknown dimensions of inputs, so that the same one is recognised wherever it turns up."""
    for value in draft.graph.inputs:
        if value.shape is not None and any(not isinstance(d, int) and d.value is None for d in value.shape):
            draft.unnamed[str(value.name)] = ir.Shape(list(value.shape))
            value.shape = ir.Shape(
                d if isinstance(d, int) or d.value is not None else f"{value.name}_dim_{k}"
                for k, d in enumerate(value.shape)
            )


def lift_initializers(draft: Draft) -> None:
    """Makes initializers of subgraphs the main graph's, where gradients and training look for parameters."""
    subgraphs = list(draft.graph.subgraphs())
    if not any(graph.initializers for graph in subgraphs):
        return
    taken = set(draft.graph.initializers)
    taken |= {str(v.name) for node in draft.graph.all_nodes() for v in node.outputs}
    taken |= {str(v.name) for graph in (draft.graph, *subgraphs) for v in graph.inputs}
    for graph in subgraphs:
        for name, value in list(graph.initializers.items()):
            if value.is_graph_input():
                continue
            for k, output in enumerate(graph.outputs):
                if output is value:  # which has to be a node's
                    copy = ir.Node("", "Identity", [value], num_outputs=1)
                    copy.outputs[0].type, copy.outputs[0].shape = value.type, value.shape
                    copy.outputs[0].name = f"{value.name}_given"
                    graph.append(copy)
                    graph.outputs[k] = copy.outputs[0]
            graph.initializers.pop(name)
            while value.name in taken:  # two branches may each have one of the same name
                value.name = f"{value.name}_"
            taken.add(str(value.name))
            draft.graph.register_initializer(value)


def lift_constants(draft: Draft) -> None:
    """Makes initializers of Constant nodes with several floating-point numbers, and of integers that are dequantized.

    Some exporters keep weights there, in branches and loops too.
    """
    main = draft.graph
    taken: Counter[str] | None = None
    for graph in (main, *main.subgraphs()):
        for node in list(graph):
            if node.op_type != "Constant" or "value" not in node.attributes:  # Pad's, before opset 11, is a number
                continue
            tensor = node.attributes["value"].as_tensor()
            if tensor.size < 2:
                continue
            (result,) = node.outputs
            is_weight = tensor.dtype.is_floating_point() or any(is_dequantize(use.node) for use in result.uses())
            if result.is_graph_output() or not is_weight:
                continue
            name = str(result.name)
            if graph is not main:  # two branches may each have one of the same name
                taken = taken or _names_of_values(main)
                while taken[name] > (name == result.name):
                    name += "_"
                taken[name] += 1
            weight = ir.Value(name=name, type=ir.TensorType(tensor.dtype), const_value=tensor)
            weight.shape, result.name = ir.Shape(tensor.shape.numpy()), None
            main.register_initializer(weight)
            result.replace_all_uses_with(weight)
            graph.remove(node, safe=True)


def _names_of_values(main: ir.Graph) -> Counter[str]:
    """How often each name is given, in all graphs."""
    graphs = (main, *main.subgraphs())
    named = (v for graph in graphs for v in (*graph.inputs, *graph.initializers.values()))
    return Counter(str(v.name) for v in (*named, *(v for node in main.all_nodes() for v in node.outputs)))


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
TO_NEW_OPSET: list[Pass] = [inline_functions, remove_initializers_from_inputs, convert_opset]
# What a graph that onnxruntime-training wrote goes through before its operators are written with others.
OLD_GRAPH: list[Pass] = [
    adopt_strays, drop_own_functions, inline_functions, read_small_tensors, convert_opset, name_nodes
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
