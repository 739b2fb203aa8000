"""save_batch_statistics: BatchNormalization in train mode tells its statistics, and its gradient reads them."""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.replace import replace_node
from onnxgrad.passes.draft import Draft
from onnxgrad.schema import MICROSOFT, is_standard

KEPT = ("epsilon", "momentum", "training_mode")
OUTPUTS = ("running_mean", "running_var", "saved_mean", "saved_inv_std")


def save_batch_statistics(draft: Draft) -> None:
    """Puts BatchNormInternal in place of every BatchNormalization in train mode.

    Ours is faster than onnxruntime's, which has none for CUDA; and BatchNormalizationGrad need not measure again.
    """
    saved: dict[tuple[ir.Value | None, float], Sequence[ir.Value]] = {}
    nodes = list(draft.graph.all_nodes())
    for node in nodes:
        if node.op_type != "BatchNormalization" or not is_standard(node.domain) or not _trains(node):
            continue
        attributes = [node.attributes[name] for name in KEPT if name in node.attributes]
        new = ir.Node(MICROSOFT, "BatchNormInternal", node.inputs, attributes, num_outputs=5, name=node.name)
        X, statistic = node.inputs[0], node.inputs[3]
        assert X is not None and statistic is not None
        for value, name in zip(new.outputs[1:], OUTPUTS, strict=True):
            value.name, value.type, value.shape = f"{node.outputs[0].name}_{name}", statistic.type, statistic.shape
        new.outputs[0].type, new.outputs[0].shape = X.type, X.shape
        replace_node(node, new)
        saved[X, _epsilon(new)] = new.outputs[3:]
    for node in nodes:
        if node.op_type == "BatchNormalizationGrad" and node.domain == MICROSOFT and _measures(node):
            found = saved.get((node.inputs[1], _epsilon(node)))
            for k, value in enumerate(found or (), 3):
                node.resize_inputs(5)
                node.replace_input_with(k, value)


def _trains(node: ir.Node) -> bool:
    return node.attributes.get_int("training_mode", 0) == 1


def _epsilon(node: ir.Node) -> float:
    """As attributes hold it, and the default does not."""
    return float(np.float32(node.attributes.get_float("epsilon", 1e-5)))


def _measures(node: ir.Node) -> bool:
    """Whether a gradient has no statistics given."""
    return len(node.inputs) < 4 or node.inputs[3] is None
