"""convert_opset: models of older opsets, by onnx's converter, and what that loses or refuses."""

import onnx_ir as ir
from onnx import defs, version_converter

from onnxgrad.graph.new_node import identity_of, new_node
from onnxgrad.graph.validity import one_line
from onnxgrad.passes.draft import Draft
from onnxgrad.passes.infer import forget_new_names
from onnxgrad.passes.weights_aside import weights_aside
from onnxgrad.schema import OF_ONNXRUNTIME, is_standard

BATCHED_SCAN = 8  # the opset whose Scan goes through a batch, too
NORM_WITH_MODE = 14  # the opset since which BatchNormalization says whether it is in train mode
RESIZE_WITH_MODES = 11  # the first opset where Resize can be told where it reads
NUMBERS_AS_INPUTS = 11  # the first opset where Clip and Pad take numbers as inputs, in the type of their data
OLDEST_IR = 4  # from which on an initializer need not be an input, too
OLDEST_OPSET = 18  # the oldest that the functions of our operators are written for; older models are converted


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
            copy = identity_of(value, f"{value.name}_for_subgraphs")
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
                cast = new_node("CastLike", [number, node.inputs[0]], f"{node.outputs[0].name}_number_{k}")
                node.prepend(cast)
                node.replace_input_with(k, cast.outputs[0])
