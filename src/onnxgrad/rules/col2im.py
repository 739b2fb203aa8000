"""Col2Im, which adds up blocks of an image: its gradient takes the blocks out again."""

from onnxgrad.graph.node import NodeView
from onnxgrad.graph.tensor import Tensor
from onnxgrad.rules import nondiff, op, vjp
from onnxgrad.rules.shape import reshaped_like


def _col2im(g: Tensor, n: NodeView) -> Tensor:
    """A convolution of every channel by itself, with a kernel for each place in a block, 1 there and 0 elsewhere."""
    at = op.Range(0, op.ReduceProd(n.block_shape, keepdims=0), 1)
    places = op.CastLike(op.Unsqueeze(at, [1]).equals(op.Unsqueeze(at, [0])), g)
    kernels = op.Reshape(places, op.Concat([-1, 1], n.block_shape, axis=0))
    channels = op.Reshape(g, op.Concat([-1, 1], n.image_shape, axis=0))
    blocks = op.Conv(channels, kernels, dilations=n.dilations, pads=n.pads, strides=n.strides)
    return reshaped_like(blocks, n.input)


vjp("Col2Im", input=_col2im, image_shape=nondiff, block_shape=nondiff)
