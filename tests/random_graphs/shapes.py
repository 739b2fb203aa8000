"""Ways to grow: other shapes, parts and copies, and shapes that are computed at run time."""

import math

import numpy as np
from onnx import TensorProto, numpy_helper
from tests.random_graphs.growth import Graph, UnsuitableError, way

# Operators whose results have dimensions that nobody knows before they run, or that onnx does not infer.
UNKNOWN = {"Compress", "NonZero", "Unique", "If", "Loop", "Scan", "Range", "Einsum", "Resize", "Slice", "Reshape",
           "Expand", "ConstantOfShape", "SequenceAt", "ConcatFromSequence", "Tile", "Split", "OneHot", "CenterCropPad",
           "Pad", "Col2Im", "Upsample", "TopK", "AffineGrid", "Blend", "Mix", "DFT"}  # fmt: skip


@way(weight=2)
def transpose(g: Graph) -> None:
    name = g.of_rank(2, 3, 4, 5)
    order = [int(k) for k in g.rng.permutation(len(g.shape(name)))]
    g.add("Transpose", [name], **({"perm": order} if g.chance(0.8) else {}))


@way(weight=2)
def reshape(g: Graph) -> None:
    name = g.some(lambda x: x.numel() > 1)
    target = _factors(g, math.prod(g.shape(name)))
    if g.chance(0.4):
        target[g.between(0, len(target) - 1)] = -1
    g.add("Reshape", [name, g.ints(*target)])


def _factors(g: Graph, size: int) -> list[int]:
    found = []
    while size > 1 and len(found) < 3:
        divisors = [d for d in range(1, size + 1) if size % d == 0 and d <= 12]
        found.append(int(g.one_of(divisors)))
        size //= found[-1]
    return [*found, size]


@way(weight=1.5)
def reshape_at_run_time(g: Graph) -> None:
    """As exporters write a flattening: from the shape that comes in."""
    name = g.of_rank(2, 3, 4)
    rank = len(g.shape(name))
    shape = g.node("Shape", [name])
    first = g.node("Gather", [shape, g.ints(g.between(0, rank - 1))], axis=0)
    how = g.between(0, 2)
    if how == 0:
        g.add("Reshape", [name, g.node("Concat", [first, g.ints(-1)], axis=0)])
    elif how == 1:
        g.add("Reshape", [name, g.node("Concat", [g.ints(1, -1), first], axis=0)])
    else:
        inputs, settings = g.listed("axes", [0], 13)
        scalar = g.node("Squeeze", [first, *inputs], **settings)
        inputs, settings = g.listed("axes", [0], 13)
        whole = g.node("Unsqueeze", [g.node("Mul", [scalar, g.tensor(np.array(1))]), *inputs], **settings)
        g.add("Reshape", [name, g.node("Concat", [whole, g.ints(-1)], axis=0)])


@way(weight=1)
def expand(g: Graph) -> None:
    name = g.some(lambda x: x.numel() <= 40)
    shape = [d if d > 1 else g.between(1, 3) for d in g.shape(name)]
    if g.chance(0.5):
        shape = [2, *shape]
    if g.opset < 8:
        raise UnsuitableError
    if g.chance(0.5) or not shape:
        g.add("Expand", [name, g.ints(*shape)])
        return
    like = g.some(lambda x: list(x.shape)[-len(shape) :] == shape)
    g.add("Expand", [name, g.node("Shape", [like])])


@way()
def filled(g: Graph) -> None:
    """Zeros and ones in the shape of something."""
    if g.opset < 9:
        raise UnsuitableError
    name = g.some()
    value = numpy_helper.from_array(np.array([0.5], g.dtype))
    same = g.node("ConstantOfShape", [g.node("Shape", [name])], value=value)
    g.add(g.one_of(["Add", "Mul"]), [name, same])


@way()
def size_of(g: Graph) -> None:
    """A sum divided by the number of its elements, which is counted at run time."""
    name = g.some()
    own = TensorProto.FLOAT if g.dtype == np.float32 else TensorProto.DOUBLE
    count = g.node("Cast", [g.node("Size", [name])], to=own)
    g.add("Div", [g.node("ReduceSum", [name], keepdims=0), count])


@way()
def flatten(g: Graph) -> None:
    name = g.of_rank(1, 2, 3, 4)
    rank = len(g.shape(name))
    g.add("Flatten", [name], axis=g.between(0 if g.opset < 11 else -rank, rank))


@way(weight=1.5)
def unsqueeze(g: Graph) -> None:
    name = g.of_rank(0, 1, 2, 3)
    rank = len(g.shape(name))
    axes = sorted(int(k) for k in g.rng.choice(rank + 2, g.between(1, 2), replace=False))
    axes = [0] if len(axes) == 1 else axes
    if g.opset >= 13 and g.chance(0.3):
        axes = [-1]
    inputs, settings = g.listed("axes", axes, 13)
    g.add("Unsqueeze", [name, *inputs], **settings)


@way()
def squeeze(g: Graph) -> None:
    name = g.some(lambda x: 1 in x.shape)
    axes = [k for k, d in enumerate(g.shape(name)) if d == 1][: g.between(1, 2)]
    inputs, settings = g.listed("axes", axes, 13)
    known = not g.root.symbolic and not any(node.op_type in UNKNOWN for node in g.root.nodes)
    if known and len(axes) == sum(d == 1 for d in g.shape(name)) and g.chance(0.3):
        inputs, settings = [], {}  # of dimensions that are not known, onnxgrad takes it that none is 1
    g.add("Squeeze", [name, *inputs], **settings)


@way(weight=1.5)
def concat(g: Graph) -> None:
    name = g.of_rank(1, 2, 3, 4)
    shape = g.shape(name)
    axis = g.between(0, len(shape) - 1)

    def fits(x: object) -> bool:
        other = tuple(x.shape)  # type: ignore[attr-defined]
        return len(other) == len(shape) and all(
            a == b for k, (a, b) in enumerate(zip(other, shape, strict=True)) if k != axis
        )

    parts = [name, g.some(fits)]
    if g.chance(0.4):
        parts.append(g.weight(*[g.between(1, 2) if k == axis else d for k, d in enumerate(shape)]))
    g.add("Concat", parts, axis=axis - (len(shape) if g.chance(0.3) and g.opset >= 11 else 0))


@way(weight=1.5)
def split(g: Graph) -> None:
    name = g.some(lambda x: max(x.shape, default=0) > 1)
    shape = g.shape(name)
    axis = g.one_of([k for k, d in enumerate(shape) if d > 1])
    size = shape[axis]
    first = g.between(1, size - 1)
    if g.chance(0.3) and size % 2 == 0:
        settings = {"num_outputs": 2} if g.opset >= 18 else {}
        g.add("Split", [name], 2, axis=axis, **settings)
        return
    inputs, settings = g.listed("split", [first, size - first], 13)
    g.add("Split", [name, *inputs], 2, axis=axis, **settings)


@way(weight=2)
def slice_(g: Graph) -> None:
    name = g.some(lambda x: x.dim() > 0)
    shape = g.shape(name)
    axes = sorted(int(k) for k in g.rng.choice(len(shape), g.between(1, min(2, len(shape))), replace=False))
    starts = [g.between(-shape[k], shape[k] - 1) for k in axes]
    ends = [g.one_of([shape[k], 1000, s + 1 if s != -1 else 1000]) for k, s in zip(axes, starts, strict=True)]
    if g.opset < 10:
        g.add("Slice", [name], starts=starts, ends=ends, axes=axes)
        return
    steps = [g.one_of([1, 1, 2]) for _ in axes]
    if g.chance(0.3):
        starts, ends, steps = [1000] * len(axes), [-1000] * len(axes), [g.one_of([-1, -2]) for _ in axes]
    g.add("Slice", [name, g.ints(*starts), g.ints(*ends), g.ints(*axes), g.ints(*steps)])


@way()
def slice_to_a_computed_end(g: Graph) -> None:
    if g.opset < 10:
        raise UnsuitableError
    name = g.some(lambda x: x.dim() > 0 and x.shape[0] > 1)
    length = g.node("Gather", [g.node("Shape", [name]), g.ints(0)], axis=0)
    end = g.node("Sub", [length, g.ints(1)])
    g.add("Slice", [name, g.ints(0), end, g.ints(0)])


@way(weight=1.5)
def pad(g: Graph) -> None:
    name = g.some(lambda x: 0 < x.dim() < 5 and x.numel() < 60)
    shape = g.shape(name)
    mode = g.one_of(["constant", "constant", "edge", "reflect", *(["wrap"] if g.opset >= 19 else [])])
    most = [2 if mode == "constant" else min(1, d - 1) if mode == "reflect" else 1 for d in shape]
    pads = [g.between(0, m) if len(shape) < 3 or k > len(shape) - 3 else 0 for k, m in enumerate(most)] * 2
    if mode == "constant" and g.chance(0.2) and shape[-1] > 1:
        pads[-1] = -1
    if g.opset < 11:
        g.add("Pad", [name], pads=pads, mode=mode, **({"value": 0.3} if mode == "constant" else {}))
        return
    value = [g.weight()] if mode == "constant" and g.chance(0.6) else []
    if g.opset >= 18 and g.chance(0.4):
        inputs = [name, g.ints(pads[-1] if pads[-1] > 0 else 0, 0), *(value or [""]), g.ints(-1)]
        g.add("Pad", inputs, mode=mode)
        return
    g.add("Pad", [name, g.ints(*pads), *value], mode=mode)


@way()
def tile(g: Graph) -> None:
    name = g.some(lambda x: x.dim() > 0 and x.numel() <= 40)
    g.add("Tile", [name, g.ints(*[g.between(1, 2) for _ in g.shape(name)])])


@way(since=14, weight=0.7)
def trilu(g: Graph) -> None:
    name = g.of_rank(2, 3, 4)
    k = [g.tensor(np.array(g.between(-1, 1)))] if g.chance(0.6) else []
    g.add("Trilu", [name, *k], upper=g.between(0, 1))


@way(since=18, weight=0.7)
def center_crop_pad(g: Graph) -> None:
    name = g.of_rank(2, 3, 4)
    g.add("CenterCropPad", [name, g.ints(g.between(1, 5), g.between(1, 5))], axes=[0, 1] if g.chance(0.5) else [-1, -2])


@way(weight=0.7)
def blocks(g: Graph) -> None:
    if g.chance(0.5):
        name = g.some(lambda x: x.dim() == 4 and x.shape[1] % 4 == 0)
        settings = {"mode": g.one_of(["DCR", "CRD"])} if g.opset >= 11 else {}
        g.add("DepthToSpace", [name], blocksize=2, **settings)
    else:
        name = g.some(lambda x: x.dim() == 4 and x.shape[2] % 2 == 0 and x.shape[3] % 2 == 0)
        g.add("SpaceToDepth", [name], blocksize=2)


@way(since=9, weight=0.5)
def eye_like(g: Graph) -> None:
    name = g.of_rank(2)
    own = TensorProto.FLOAT if g.dtype == np.float32 else TensorProto.DOUBLE
    g.add("Add", [name, g.node("EyeLike", [name], dtype=own)])
