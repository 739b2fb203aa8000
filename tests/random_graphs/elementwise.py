"""Ways to grow: element by element, with and without broadcasting."""

import numpy as np
from onnx import TensorProto
from tests.random_graphs.growth import FROM_KINKS, Graph, UnsuitableError, way

SMOOTH = ["Tanh", "Sigmoid", "Sin", "Cos", "Softplus", "Erf", "Neg", "Atan", "Identity", "Gelu", "Mish", "Asinh", "Exp",
          "Swish", "Sinh", "Cosh", "Selu", "Elu", "Celu", "HardSwish", "Softsign"]  # fmt: skip
KINKS = {"Relu": [0], "Abs": [0], "LeakyRelu": [0], "Elu": [0], "Selu": [0], "HardSigmoid": [-2.5, 2.5], "Celu": [0],
         "ThresholdedRelu": [1], "Shrink": [-0.5, 0.5], "HardSwish": [-3, 3], "Softsign": []}  # fmt: skip
INSIDE = ["Asin", "Acos", "Atanh", "Tan"]
POSITIVE = ["Log", "Sqrt", "Reciprocal"]


@way(weight=5)
def unary(g: Graph) -> None:
    op_type = g.one_of(SMOOTH + list(KINKS))
    name = g.some()
    g.away_from(name, *KINKS.get(op_type, []))
    settings = {}
    if op_type in ("Elu", "Celu", "LeakyRelu", "Swish") and g.chance(0.5):
        settings = {"alpha": 0.7}
    if op_type == "Gelu" and g.chance(0.5):
        settings = {"approximate": "tanh"}
    g.add(op_type, [name], **settings)


@way(weight=2)
def of_a_domain(g: Graph) -> None:
    op_type = g.one_of([*INSIDE, *POSITIVE, "Acosh"])
    name = g.some()
    inner = g.inside(name) if op_type in INSIDE else g.positive(name, 1.3 if op_type == "Acosh" else 0.3)
    g.add(op_type, [inner])


def partner(g: Graph, name: str) -> str:
    """Another value that broadcasts with it, or a parameter that does, or the same once more."""
    shape = g.shape(name)
    if g.chance(0.1):
        return name
    if g.chance(0.55):
        return g.some(lambda x: _broadcasts(tuple(x.shape), shape))
    cut = g.between(0, len(shape))
    return g.weight(*[d if g.chance(0.7) else 1 for d in shape[cut:]])


def _broadcasts(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    try:
        np.broadcast_shapes(a, b)
    except ValueError:
        return False
    return True


@way(weight=5)
def binary(g: Graph) -> None:
    a = g.some()
    b = partner(g, a)
    if g.chance(0.5):
        a, b = b, a
    op_type = g.one_of(["Add", "Sub", "Mul", "Mul", "Div", "Pow", "Max", "Min", "Mean", "Sum", "PRelu"])
    if op_type == "Div":
        b = g.positive(b)
    elif op_type == "Pow":
        a = g.positive(a)
    elif op_type in ("Max", "Min"):
        apart(g, a, b)
    elif op_type == "PRelu":
        a, b = _with_slope(g, a)
    g.add(op_type, [a, b])


def _with_slope(g: Graph, name: str) -> tuple[str, str]:
    g.away_from(name, 0)
    shape = g.shape(name)
    return name, g.weight(*[d if g.chance(0.5) else 1 for d in shape])


def apart(g: Graph, *names: str) -> None:
    """Whether no two inputs tie anywhere."""
    for k, a in enumerate(names):
        for b in names[k + 1 :]:
            if float((g.values[a] - g.values[b]).abs().min()) < FROM_KINKS:
                raise UnsuitableError


@way()
def power(g: Graph) -> None:
    """By a constant, as exporters write squares and roots."""
    name, exponent = g.some(), g.one_of([2.0, 3.0, 0.5, -1.0])
    g.add("Pow", [name if exponent > 1 else g.positive(name), g.number(exponent)])


@way()
def variadic(g: Graph) -> None:
    first = g.some()
    names = [first, partner(g, first), g.weight()]
    op_type = g.one_of(["Sum", "Mean", "Max", "Min"])
    if op_type in ("Max", "Min"):
        apart(g, *names)
    g.add(op_type, names)


@way()
def clip(g: Graph) -> None:
    name = g.some()
    low, high = g.one_of([(-0.5, 0.5), (-1.0, 2.0), (0.0, 1.0)])
    g.away_from(name, low, high)
    if g.opset < 11:
        g.add("Clip", [name], min=low, max=high)
    elif g.chance(0.3):
        g.add("Clip", [name, "", g.number(high)])
    else:
        g.add("Clip", [name, g.number(low), g.number(high)])


@way()
def modulo(g: Graph) -> None:
    name = g.some()
    g.away_from(name, *[0.75 * k for k in range(-7, 8)])
    g.add("Mod", [name, g.number(0.75)], fmod=1)


@way(since=9)
def where(g: Graph) -> None:
    a = g.some()
    b = partner(g, a)
    limit = g.number(0.1)
    chosen = g.node(g.one_of(["Greater", "Less"]), [a, limit])
    g.away_from(a, 0.1)
    if g.chance(0.3):
        chosen = g.node("Not", [chosen])
    if g.chance(0.3):
        other = g.node("Less", [a, g.number(0.7)])
        g.away_from(a, 0.7)
        chosen = g.node(g.one_of(["And", "Or", "Xor"]), [chosen, other])
    g.add("Where", [chosen, a, b] if g.chance(0.5) else [chosen, b, a])


@way()
def by_cast(g: Graph) -> None:
    """Through another type and back; a mask as a factor."""
    name = g.some()
    own = TensorProto.FLOAT if g.dtype == np.float32 else TensorProto.DOUBLE
    if g.chance(0.5):
        g.away_from(name, 0)
        mask = g.node("Cast", [g.node("Greater", [name, g.number(0.0)])], to=own)
        g.add("Mul", [name, mask])
    else:
        g.away_from(name, *range(-5, 6))
        whole = g.node("Cast", [g.node("Cast", [name], to=TensorProto.INT64)], to=own)
        g.add("Sub", [name, whole])


@way(weight=0.5)
def rounded(g: Graph) -> None:
    """What lies beyond a whole number: steps have no gradient."""
    name = g.some()
    g.away_from(name, *[k / 2 for k in range(-9, 10)])
    op_type = g.one_of(["Floor", "Ceil", "Round", "Sign"])
    g.add("Sub", [name, g.node(op_type, [name])])


@way(weight=0.5)
def dropout(g: Graph) -> None:
    """In inference mode, in which it passes everything."""
    name = g.some()
    ratio = 0.3
    if g.opset >= 12:
        g.add("Dropout", [name, g.tensor(np.array(ratio, np.float32))])
    else:
        g.add("Dropout", [name], ratio=ratio)


@way(since=15, weight=0.5)
def cast_like(g: Graph) -> None:
    g.add("CastLike", [g.some(), g.some()])
