"""DeformConv: a product of the kernel with what is read at the places that the offsets move to, as GridSample reads."""

import functools

import numpy as np

from onnxgrad.functions.grid_sample import How, Samples
from onnxgrad.graph.cast import in_type, wide_type
from onnxgrad.graph.function_body import GraphBody
from onnxgrad.graph.node import NodeView
from onnxgrad.graph.tensor import Tensor
from onnxgrad.rules import op, vjp
from onnxgrad.rules.shape import reshaped_like

GRID_SAMPLE = 20  # the opset since which onnxruntime has it in float64, too
READS = How(align_corners=0, mode="linear", normalized=0, padding_mode="zeros")


class Columns:
    """What the gradients share: [batch · offset groups, channels, elements of the kernel, places of the output]."""

    def __init__(self, g: Tensor, n: NodeView) -> None:
        self.n, self.per_group = n, op.Shape(n.W, end=1) / n.group
        self.batch, self.area = op.Shape(g, end=1), op.ReduceProd(op.Shape(g, start=2))
        self.g = self.shaped(g, self.batch, [n.group], self.per_group, self.area)
        shape = n.kernel_shape or (n.W.shape or ())[2:]
        if len(shape) != 2 or not all(isinstance(d, int) for d in shape):
            raise ValueError("its kernel must have two dimensions, and known ones: give the node its kernel_shape")
        self.kernel = [int(d) for d in shape]
        self.elements = self.kernel[0] * self.kernel[1]
        channels = op.Shape(n.X, start=1, end=2) / n.offset_group
        self.X = self.shaped(n.X, self.batch * n.offset_group, channels, op.Shape(n.X, start=2))
        self.shape = op.Concat(op.Shape(self.X, end=2), [self.elements], self.area, axis=0)

    @staticmethod
    def shaped(x: Tensor, *dims: Tensor | list[int]) -> Tensor:
        return op.Reshape(x, op.Concat(*dims, axis=0), allowzero=1)

    def wide(self, x: Tensor) -> Tensor:
        """In the type that places are computed in."""
        return in_type(x, wide_type(self.n.X, self.n.offset))

    @functools.cached_property
    def places(self) -> Tensor:
        """Where each element of the kernel reads, for each place of the output, in elements of X."""
        n = self.n
        images, size = op.Shape(self.X, end=1), op.Shape(n.offset, start=2)
        moved = self.shaped(self.wide(n.offset), images, [self.elements, 2], size)
        places = []
        for axis, within in enumerate(np.indices(self.kernel).reshape(2, -1)):
            (step, begin, apart) = (
                (given or [d, d])[axis] for given, d in ((n.strides, 1), (n.pads, 0), (n.dilations, 1))
            )
            starts = op.Range(0, op.Gather(size, axis), 1) * step
            base = op.Unsqueeze(starts, [0, 2 - axis]) + (within * apart - begin)[:, None, None]
            at = op.Gather(moved, axis, axis=2) + op.Cast(base, to=moved.dtype)
            places.append(self.shaped(at, images, [self.elements], self.area, [1]))
        return op.Concat(places[1], places[0], axis=-1)

    @functools.cached_property
    def read(self) -> Tensor:
        X, builder = self.wide(self.X), self.n.builder
        if builder.opsets[""] >= GRID_SAMPLE:
            sizes = op.Cast(op.Gather(op.Shape(X), [3, 2]), to=X.dtype)
            read = op.GridSample(X, (self.places * 2 + 1) / sizes - 1, mode="linear")
        else:
            read = Samples(GraphBody(builder), X, self.places, 2, READS).image()  # type: ignore[arg-type]
        return in_type(read, self.n.X.dtype)

    @functools.cached_property
    def gradients(self) -> tuple[Tensor, Tensor]:
        """Of what is read of X, and of the places."""
        given = self.wide(self.read_grad), self.wide(self.X), self.places
        dX, dplaces = op.GridSampleGrad(*given, outputs=2, **READS._asdict())
        return dX, dplaces

    @functools.cached_property
    def mask(self) -> Tensor | None:
        if self.n.mask is None:
            return None
        return self.shaped(self.n.mask, op.Shape(self.X, end=1), [1, self.elements], self.area)

    @functools.cached_property
    def masked_grad(self) -> Tensor:
        """The gradient of what was read, once the mask was applied to it."""
        kernel = self.shaped(self.n.W, [self.n.group], self.per_group, [-1])
        return op.Reshape(op.Transpose(kernel, perm=[0, 2, 1]) @ self.g, self.shape, allowzero=1)

    @functools.cached_property
    def read_grad(self) -> Tensor:
        return self.masked_grad if self.mask is None else self.masked_grad * self.mask

    def of_image(self) -> Tensor:
        return reshaped_like(in_type(self.gradients[0], self.n.X.dtype), self.n.X)

    def of_kernel(self) -> Tensor:
        masked = self.read if self.mask is None else self.read * self.mask
        columns = self.shaped(masked, self.batch, [self.n.group, -1], self.area)
        each = self.g @ op.Transpose(columns, perm=[0, 1, 3, 2])
        return reshaped_like(op.ReduceSum(each, [0], keepdims=0), self.n.W)

    def of_offset(self) -> Tensor:
        found = op.Gather(self.gradients[1], [1, 0], axis=-1)
        return reshaped_like(in_type(op.Transpose(found, perm=[0, 1, 3, 2]), self.n.offset.dtype), self.n.offset)

    def of_mask(self) -> Tensor:
        return reshaped_like(op.ReduceSum(self.masked_grad * self.read, [1]), self.n.mask)


vjp(
    "DeformConv",
    X=lambda g, n: Columns(g, n).of_image(),
    W=lambda g, n: Columns(g, n).of_kernel(),
    offset=lambda g, n: Columns(g, n).of_offset(),
    B=lambda g, n: op.ReduceSum(g, [0, 2, 3], keepdims=0),
    mask=lambda g, n: Columns(g, n).of_mask(),
)
