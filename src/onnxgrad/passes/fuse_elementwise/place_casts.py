"""Casts between half types and float32, put where groups read and write the half type."""

import onnx_ir as ir

from onnxgrad.graph.builder import Builder
from onnxgrad.graph.new_node import new_node
from onnxgrad.passes.fuse_elementwise.fusible import inputs_of, is_fusible, narrows, widens
from onnxgrad.schema import is_standard

MOVING = {"Flatten", "Reshape", "Squeeze", "Transpose", "Unsqueeze"}


def place_casts(builder: Builder) -> None:
    """Moves casts beside element-wise nodes, and gives each reader one of its own."""
    while _move_casts(builder.graph):
        pass
    _copy_casts(builder)


def _move_casts(graph: ir.Graph) -> bool:
    """Has tensors reshaped and transposed in the half type that they are cast to after it, or from before it.

    So there is less to move, and casts come to lie beside element-wise nodes. Whether there were any.
    """
    moved = False
    for cast in [n for n in graph if widens(n) or narrows(n)]:
        (result,), (source,) = cast.outputs, inputs_of(cast)
        if result.is_graph_output():
            continue
        before, after = source.producer(), [user for user, _ in result.uses()]
        if narrows(cast) and _moves(before) and len(source.uses()) == 1 and not source.is_graph_output():
            assert before is not None
            _swap(before, cast)
        elif widens(cast) and len(after) == 1 and _moves(after[0]) and after[0].graph is graph:
            if after[0].outputs[0].is_graph_output():
                continue
            _swap(cast, after[0])
        else:
            continue
        moved = True
    if moved:
        graph.sort()
    return moved


def _moves(node: ir.Node | None) -> bool:
    """Whether it only moves elements, those of its first input."""
    return node is not None and is_standard(node.domain) and node.op_type in MOVING


def _swap(first: ir.Node, second: ir.Node) -> None:
    """Two nodes of which the second alone reads the first, the other way round; one of them is a Cast."""
    (between,), (result,), source = first.outputs, second.outputs, first.inputs[0]
    assert source is not None
    result.replace_all_uses_with(between)
    second.replace_input_with(0, source)
    first.replace_input_with(0, result)
    between.type, between.shape = result.type, result.shape
    if second.op_type == "Cast":
        result.shape = source.shape
    else:
        result.type = source.type


def _copy_casts(builder: Builder) -> None:
    """Gives each element-wise reader of a half type that is cast to float32 a cast of its own.

    Then groups pass the half type on, half the memory: what Gelu's gradient reads, say.
    """
    for cast in [n for n in builder.graph if widens(n) and is_fusible(builder, n)]:
        (wide,), (narrow,) = cast.outputs, inputs_of(cast)
        users = {u: None for u, _ in wide.uses() if u.graph is builder.graph and is_fusible(builder, u)}
        stays = len(users) < len({u for u, _ in wide.uses()}) or wide.is_graph_output()
        for user in list(users)[0 if stays else 1 :]:
            name = builder.fresh_value_name(f"{wide.name}_copy")
            copy = new_node("Cast", [narrow], name, {"to": ir.DataType.FLOAT.value}, like=wide)
            builder.graph.insert_before(user, copy)
            for k, v in enumerate(user.inputs):
                if v is wide:
                    user.replace_input_with(k, copy.outputs[0])
