"""Moves transposes past nodes that split a tensor, directly before the products that use the parts.

Models that compute queries, keys and values at once transpose all of them and then take them apart. A product can take
a transposed part as it lies in memory, and its gradient gives such a part.
"""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.builder import Builder
from onnxgrad.graph.new_node import new_node
from onnxgrad.graph.node import is_transpose, permutation
from onnxgrad.graph.replace import take_place
from onnxgrad.passes.draft import Draft
from onnxgrad.schema import is_standard

AXES = {"Squeeze": 1, "Slice": 3}  # which input names the axes


def sink_transposes(draft: Draft) -> int:
    """Moves each Transpose that only Split, Slice, Squeeze and Gather of one index follow behind them; how many moves.

    What is not used any more stays in the graph.
    """
    builder = Builder(draft.graph)
    waiting = [node for node in draft.graph if is_transpose(node)]
    moves = 0
    while waiting:
        node = waiting.pop()
        value = node.outputs[0]
        users = [user for user, _ in value.uses()]
        if not users or value.is_graph_output() or not all(_is_cut(builder, user, value) for user in users):
            continue
        for user in users:
            waiting += _swap(builder, node, user)
            moves += 1
    return moves


def _is_cut(builder: Builder, user: ir.Node, value: ir.Value) -> bool:
    if user.graph is not builder.graph or not is_standard(user.domain):
        return False
    if user.inputs[0] is not value or any(v is value for v in user.inputs[1:]):
        return False
    if any(v.shape is None for v in user.outputs):
        return False
    if user.op_type in AXES:
        axes = user.inputs[AXES[user.op_type]] if len(user.inputs) > AXES[user.op_type] else None
        return axes is not None and builder.constant_of(axes) is not None
    if user.op_type == "Gather":
        index = user.inputs[1]
        return index is not None and index.shape is not None and len(index.shape) == 0
    return user.op_type == "Split"


def _swap(builder: Builder, transpose: ir.Node, cut: ir.Node) -> list[ir.Node]:
    """The cut of what is not transposed, and a Transpose of each part; these are given."""
    source, perm = transpose.inputs[0], permutation(transpose)
    assert source is not None
    graph, rank = builder.graph, len(perm)
    inputs: list[ir.Value | None] = [source, *cut.inputs[1:]]
    attributes = [a for a in cut.attributes.values() if a.name != "axis"]
    gone: list[int] = []
    if cut.op_type in AXES:
        at = AXES[cut.op_type]
        named = cut.inputs[at]
        given = None if named is None else builder.constant_of(named)
        assert given is not None
        axes = [perm[int(a) % rank] for a in given.reshape(-1)]
        name = builder.fresh_value_name(f"{cut.name}_axes")
        constant = new_node("Constant", [], name, {"value": ir.tensor(np.array(axes, np.int64))})
        constant.outputs[0].type, constant.outputs[0].shape = ir.TensorType(ir.DataType.INT64), ir.Shape([len(axes)])
        graph.insert_before(cut, constant)
        inputs[at], gone = constant.outputs[0], axes if cut.op_type == "Squeeze" else []
    else:
        along = perm[cut.attributes.get_int("axis", 0) % rank]
        attributes.append(ir.AttrInt64("axis", along))
        gone = [along] if cut.op_type == "Gather" else []
    new = ir.Node("", cut.op_type, inputs, attributes, num_outputs=len(cut.outputs), name=f"{cut.name}_before")
    graph.insert_before(cut, new)
    kept = _without(perm, gone)
    made = []
    for old, part in zip(cut.outputs, new.outputs, strict=True):
        dims = list(old.shape or ())
        part.name, part.type = builder.fresh_value_name(f"{old.name}_before"), old.type
        part.shape = ir.Shape([dims[kept.index(k)] for k in range(len(kept))])
        if kept == sorted(kept):  # the axes that changed places are those that are gone
            take_place(part, old)
            continue
        name = builder.fresh_value_name(f"{old.name}_transposed")
        transposed = new_node("Transpose", [part], name, {"perm": kept}, like=old)
        graph.insert_before(cut, transposed)
        take_place(transposed.outputs[0], old)
        made.append(transposed)
    return made


def _without(perm: Sequence[int], gone: Sequence[int]) -> list[int]:
    """The permutation of the axes that are left, by their new numbers."""
    left = [k for k in range(len(perm)) if k not in gone]
    return [left.index(k) for k in perm if k not in gone]
