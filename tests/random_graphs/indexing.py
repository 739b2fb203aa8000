"""Ways to grow: elements read and written by indices, some of them computed at run time."""

import numpy as np
from onnx import TensorProto
from tests.random_graphs.growth import Graph, UnsuitableError, way


@way(weight=2)
def gather(g: Graph) -> None:
    name = g.some(lambda x: x.dim() > 0)
    shape = g.shape(name)
    axis = g.between(0, len(shape) - 1)
    count = g.one_of([(), (2,), (1,), (2, 2), (3,)])
    least = -shape[axis] if g.opset >= 11 else 0
    g.add("Gather", [name, g.tensor(g.rng.integers(least, shape[axis], count))], axis=axis)


@way(weight=1)
def embedding(g: Graph) -> None:
    """Rows of a table, chosen by the position of the largest number."""
    name = g.some(lambda x: x.dim() > 1 and x.shape[-1] > 1)
    rank = len(g.shape(name))
    g.without_ties(name, (rank - 1,))
    chosen = g.node(g.one_of(["ArgMax", "ArgMin"]), [name], axis=rank - 1, keepdims=0)
    g.add("Gather", [g.weight(g.shape(name)[-1], g.between(1, 3)), chosen], axis=0)


@way(since=11, weight=1)
def gather_a_range(g: Graph) -> None:
    """Positions counted from a shape, as exporters write those of a text."""
    name = g.some(lambda x: x.dim() > 0 and x.shape[0] > 0)
    length = g.node("Gather", [g.node("Shape", [name]), g.tensor(np.array(0))], axis=0)
    places = g.node("Range", [g.tensor(np.array(0)), length, g.tensor(np.array(1))])
    if g.chance(0.5):
        places = g.node("Sub", [g.node("Sub", [length, g.tensor(np.array(1))]), places])
    g.add("Gather", [name, places], axis=0)


@way(since=11, weight=1.5)
def gather_elements(g: Graph) -> None:
    name = g.some(lambda x: x.dim() > 0)
    shape = list(g.shape(name))
    axis = g.between(0, len(shape) - 1)
    shape[axis], size = g.between(1, 3), shape[axis]
    g.add("GatherElements", [name, g.tensor(g.rng.integers(-size, size, shape))], axis=axis)


@way(since=11, weight=1.5)
def gather_nd(g: Graph) -> None:
    name = g.some(lambda x: x.dim() > 1)
    shape = g.shape(name)
    batch = g.between(0, 1) if g.opset >= 12 else 0
    deep = g.between(1, len(shape) - batch)
    lead = [*shape[:batch], g.between(1, 3)]
    indices = np.stack([g.rng.integers(0, d, lead) for d in shape[batch : batch + deep]], -1)
    g.add("GatherND", [name, g.tensor(indices)], **({"batch_dims": batch} if g.opset >= 12 else {}))


@way(since=9, weight=1.5)
def scatter(g: Graph) -> None:
    name = g.some(lambda x: x.dim() > 0)
    shape = g.shape(name)
    axis = g.between(0, len(shape) - 1)
    count = g.between(1, shape[axis])
    sizes = [count if k == axis else g.between(1, d) for k, d in enumerate(shape)]
    settings = {}
    how = g.one_of(["none", "add", "mul", *(["max", "min"] if g.opset >= 18 else [])]) if g.opset >= 16 else "none"
    if how != "none":
        settings["reduction"] = how
    order = np.argsort(g.rng.random([shape[axis] if k == axis else d for k, d in enumerate(sizes)]), axis=axis)
    indices = np.take(order, np.arange(count), axis)  # none twice
    if how == "add" and g.chance(0.5):
        indices = g.rng.integers(0, shape[axis], sizes)
    updates = g.weight(*sizes)
    op_type = "Scatter" if g.opset < 11 else "ScatterElements"
    if how in ("max", "min"):
        old = np.take_along_axis(
            g.values[name].numpy()[tuple(slice(0, shape[k] if k == axis else d) for k, d in enumerate(sizes))],
            indices,
            axis,
        )
        if np.abs(old - g.values[updates].numpy()).min() < 2e-3:
            raise UnsuitableError
    g.add(op_type, [name, g.tensor(indices), updates], axis=axis, **settings)


@way(since=11, weight=1)
def scatter_nd(g: Graph) -> None:
    name = g.some(lambda x: x.dim() > 0)
    shape = g.shape(name)
    count = g.between(1, shape[0])
    rows = g.rng.permutation(shape[0])[:count].reshape(count, 1)
    settings = {"reduction": "add"} if g.opset >= 16 and g.chance(0.4) else {}
    g.add("ScatterND", [name, g.tensor(rows), g.weight(count, *shape[1:])], **settings)


@way(since=9, weight=0.8)
def one_hot(g: Graph) -> None:
    name = g.some(lambda x: x.dim() in (2, 3) and x.shape[-1] > 1)
    rank = len(g.shape(name))
    g.without_ties(name, (rank - 1,))
    chosen = g.node("ArgMax", [name], axis=rank - 1, keepdims=0)
    values = g.weight(2)
    g.add("OneHot", [chosen, g.tensor(np.array(g.shape(name)[-1])), values], axis=g.one_of([-1, 0]))


@way(since=9, weight=0.8)
def compress(g: Graph) -> None:
    name = g.some(lambda x: x.dim() > 0)
    shape = g.shape(name)
    axis = g.between(0, len(shape) - 1)
    chosen = g.rng.random(shape[axis]) < 0.6
    chosen[0] = True
    g.add("Compress", [name, g.tensor(chosen)], axis=axis)


@way(since=10, weight=0.8)
def reverse_sequence(g: Graph) -> None:
    name = g.of_rank(2, 3)
    steps, batch = g.shape(name)[:2]
    lengths = g.tensor(g.rng.integers(1, steps + 1, batch))
    g.add("ReverseSequence", [name, lengths], time_axis=0, batch_axis=1)


@way(weight=1)
def top_k(g: Graph) -> None:
    name = g.some(lambda x: x.dim() > 0 and x.shape[-1] > 1)
    shape = g.shape(name)
    g.without_ties(name, (len(shape) - 1,))
    count = g.between(1, shape[-1])
    if g.opset < 10:
        g.add("TopK", [name], 2, k=count)
    else:
        settings = {"largest": g.between(0, 1)} if g.opset >= 11 else {}
        g.add("TopK", [name, g.ints(count)], 2, axis=-1, **settings)


@way(since=9, weight=0.6)
def non_zero(g: Graph) -> None:
    """Elements above a limit, found at run time."""
    name = g.of_rank(1)
    g.away_from(name, 0.1)
    mask = g.node("Greater", [name, g.number(0.1)])
    places = g.node("NonZero", [mask])
    inputs, settings = g.listed("axes", [0], 13)
    g.add("Gather", [name, g.node("Squeeze", [places, *inputs], **settings)], axis=0)


@way(since=11, weight=0.4)
def range_of_numbers(g: Graph) -> None:
    """Start and step are computed, the number of steps stays."""
    step = g.positive(g.some(lambda x: x.dim() == 0))
    limit = g.node("Mul", [step, g.number(3.5)])
    g.add("Range", [g.number(0.0), limit, step])


@way(since=11, weight=0.5)
def unique(g: Graph) -> None:
    name = g.of_rank(1)
    g.without_ties(name, (0,))
    g.add("Unique", [name], 2, sorted=1)


@way(weight=0.6)
def mask_of_lengths(g: Graph) -> None:
    """Which steps are within a text, as attention masks are made."""
    if g.opset < 11:
        raise UnsuitableError
    name = g.some(lambda x: x.dim() > 0)
    size = g.shape(name)[-1]
    own = TensorProto.FLOAT if g.dtype == np.float32 else TensorProto.DOUBLE
    places = g.node("Range", [g.tensor(np.array(0)), g.tensor(np.array(size)), g.tensor(np.array(1))])
    mask = g.node("Less", [places, g.tensor(np.array(g.between(1, size)))])
    g.add("Mul", [name, g.node("Cast", [mask], to=own)])
