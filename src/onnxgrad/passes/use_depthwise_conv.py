"""use_depthwise_conv: DepthwiseConv in place of depthwise Conv nodes, on the CPU.

onnxruntime lays weights out for its fast convolution when a session begins. Weights that are trained change with every
run, and what is left to it is a product for each channel, several times slower.
"""

import onnx_ir as ir

from onnxgrad.graph.replace import replace_node
from onnxgrad.passes.draft import Draft
from onnxgrad.schema import OWN, is_standard

TYPES = (ir.DataType.FLOAT, ir.DataType.DOUBLE)


def use_depthwise_conv(draft: Draft) -> None:
    """Replaces the nodes whose weights are not constant."""
    for node in list(draft.graph):
        if node.op_type != "Conv" or not is_standard(node.domain) or len(node.inputs) < 2:
            continue
        image, weight = node.inputs[0], node.inputs[1]
        if image is None or weight is None or weight.shape is None or not weight.shape.is_static():
            continue
        dims, attributes = weight.shape.numpy(), node.attributes
        rank = len(dims) - 2
        if rank > 2 or dims[1] != 1 or dims[0] != attributes.get_int("group", 1) or dims[0] < 2:
            continue
        if image.dtype not in TYPES or weight.is_initializer():
            continue
        if attributes.get_string("auto_pad", "NOTSET") != "NOTSET":
            continue
        settings = {
            "dilations": attributes.get_ints("dilations", [1] * rank),
            "pads": attributes.get_ints("pads", [0] * (2 * rank)),
            "strides": attributes.get_ints("strides", [1] * rank),
        }
        made = ir.Node(
            OWN, "DepthwiseConv", node.inputs,
            [ir.AttrInt64("group", dims[0]), *(ir.AttrInt64s(name, list(given)) for name, given in settings.items())],
            num_outputs=1, name=f"{node.name}_depthwise",
        )  # fmt: skip
        replace_node(node, made)
