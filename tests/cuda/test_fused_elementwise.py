"""Programs of FusedElementwise as kernels: every operation, types, and broadcasts."""

import math

import numpy as np
import pytest
from tests.checks import DEVICE
from tests.elementwise_programs import MEANINGS, evaluate
from tests.gpu import to_array, to_tensor

from onnxgrad.ops.families.elementwise_program import ROW_MEAN, Line, Program, broadcast, parse, parse_all

pytestmark = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU or Triton's interpreter")

BOUNDS = {"float64": 1e-12, "float32": 3e-6, "float16": 1e-3, "bfloat16": 8e-3}
FLAGS = {"And", "Or", "Xor", "Not"}
COMPARISONS = {"Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual", "IsNaN"}
NUMBERS = {  # constants behind the inputs
    "LeakyRelu": ("0.25",), "Elu": ("1.5",), "HardSigmoid": ("0.25", "0.5"), "QuickGelu": ("1.702",),
    "LeakyReluGrad": ("0.25",), "QuickGeluGrad": ("1.702",),
}  # fmt: skip
ONE_INPUT = {
    "Neg", "Abs", "Not", "IsNaN", "Sqrt", "Reciprocal", "Exp", "Log", "Sin", "Cos", "Erf", "Tanh", "Sigmoid", "Relu",
    "LeakyRelu", "Gelu", "FastGelu", "QuickGelu", "HardSigmoid", "HardSwish", "Elu", "Softplus",
}  # fmt: skip


def numbers(shape, dtype, seed=0):
    random = np.random.default_rng(seed)
    if dtype == "bool":
        return random.random(shape) < 0.5
    array = random.standard_normal(shape) * 3
    return (array.astype(np.int64) if dtype.startswith("int") else array).astype(np.dtype(dtype))


@np.errstate(all="ignore")
def check(text, *inputs, bound=0.0):
    """The kernel's outputs are those of NumPy."""
    from onnxgrad.cuda.core.fused_elementwise import Prepared

    program = parse(text)
    assert program.text() == text
    prepared = Prepared([program], [x.shape for x in inputs])
    shapes = program.shapes([x.shape for x in inputs])
    kinds = [np.dtype(program.dtypes[name]) for name in program.results]
    outputs = [to_tensor(np.zeros(shape, kind)) for shape, kind in zip(shapes, kinds, strict=True)]
    prepared([to_tensor(x) for x in inputs], outputs)
    for name, output, expected in zip(program.results, outputs, evaluate(text, inputs), strict=True):
        dtype = program.dtypes[name]
        found = to_array(output)
        if dtype in BOUNDS:
            assert np.array_equal(np.isnan(found), np.isnan(expected))
            rtol = max(bound, BOUNDS[dtype])
            wide = [np.nan_to_num(a.astype(np.float64), posinf=1e300, neginf=-1e300) for a in (found, expected)]
            assert np.allclose(*wide, rtol=rtol, atol=rtol / 10), name
        else:
            assert np.array_equal(found, expected), name


def program_of(operation, dtype):
    """The text of a program of one operation."""
    kinds = ["bool" if operation in FLAGS else dtype] * (1 if operation in ONE_INPUT else 2)
    if operation == "Where":
        kinds = ["bool", dtype, dtype]
    lines = [Line(f"v{k}", kind) for k, kind in enumerate(kinds)]
    for number in NUMBERS.get(operation, ()):
        lines.append(Line(f"v{len(lines)}", dtype, "Constant", (number,)))
    kind = "bool" if operation in FLAGS | COMPARISONS else dtype
    lines.append(Line("y", kind, operation, tuple(line.name for line in lines)))
    return Program(tuple(lines), ("y",)).text(), kinds


@pytest.mark.parametrize("operation", sorted(set(MEANINGS) - {"SeededDropout", ROW_MEAN}))
def test_operations(operation):
    for dtype in ("float32", "bfloat16", "float64"):
        text, kinds = program_of(operation, dtype)
        inputs = [numbers((7, 33), kind, seed) for seed, kind in enumerate(kinds)]
        if operation in ("Sqrt", "Log"):
            inputs = [np.abs(inputs[0])]
        elif dtype != "bfloat16" and kinds[-1] != "bool":
            inputs[-1][0, :2] = (np.nan, np.inf) if operation in ("IsNaN", "Min", "Max", "Relu", "Less") else (0, 100)
        check(text, *inputs, bound=1e-5 if dtype == "float32" and "Gelu" in operation else 0.0)


def test_operations_are_those_of_the_pass():
    from onnxgrad.cuda.core.fused_elementwise import EXPRESSIONS
    from onnxgrad.passes.fuse_elementwise.fusible import CHAINED, KNOWN

    assert set(EXPRESSIONS) == set(MEANINGS)
    written = {"Cast", "Clip", "Pow", "Sum", "LayerNormalization", "LayerNormalizationGrad"}  # with others
    assert set(EXPRESSIONS) == (set(KNOWN) - written) | {*CHAINED.values(), ROW_MEAN}


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_integers(dtype):
    for operation in ("Add", "Sub", "Mul", "Neg", "Abs", "Equal", "Less", "Where", "Min", "Max"):
        text, kinds = program_of(operation, dtype)
        check(text, *(numbers((3, 50), kind, seed) for seed, kind in enumerate(kinds)))


def test_casts():
    kinds = ("float16", "bfloat16", "float32", "float64", "int32", "int64", "bool")
    for kind in kinds:
        lines = [Line("x", kind), *(Line(f"y{k}", to, "Cast", ("x",)) for k, to in enumerate(kinds))]
        text = Program(tuple(lines), tuple(f"y{k}" for k in range(len(kinds)))).text()
        check(text, numbers((2, 30), kind), bound=1e-2)


def test_constants():
    text = """x float32
a float32 Constant -inf
b float32 Constant nan
c bool Constant True
d float32 Constant 1e-40
e float32 Max x a
f float32 Add x b
g float32 Where c x a
h float32 Add d x
return e f g h"""
    check(text, numbers((40,), "float32"))


SHAPES = [
    [(4, 5, 6), (6,)],
    [(4, 5, 6), (5, 1)],
    [(4, 5, 6), (4, 1, 1)],
    [(4, 5, 6), (4, 5, 1)],
    [(4, 5, 6), (4, 1, 6)],
    [(4, 5, 6), ()],
    [(4, 5, 6), (1, 1, 1)],
    [(4, 1, 6), (5, 1)],
    [(4, 1), (1, 6)],
    [(1, 5, 1, 6), (4, 1, 3, 1)],
    [(2, 3, 2, 3, 2), (3, 1, 3, 1)],
    [(2, 3, 2, 3, 2), (2, 1, 2, 1, 2)],
    [(1, 1), (1,)],
    [(1, 7, 1), (7, 1)],
    [(50, 60), (60,)],
    [(0, 4), (4,)],
]


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_broadcasts(shapes):
    assert broadcast(shapes) == np.broadcast_shapes(*shapes)
    inputs = [np.arange(math.prod(shape), dtype=np.float32).reshape(shape) for shape in shapes]
    text = (
        "v0 float32\nv1 float32\nv2 float32 Constant 10000.0\nv3 float32 Mul v1 v2\nv4 float32 Add v0 v3\nreturn v4 v3"
    )
    check(text, *inputs)


def test_dropout_draws_as_the_operator_does():
    from onnxgrad.cuda.core.fused_elementwise import Prepared
    from onnxgrad.ops.dropout import seeded_dropout, threshold

    text = f"""x float32
seed int64
scale float32 Constant {1 / 0.7!r}
limit int64 Constant {threshold(0.3)}
y float32 SeededDropout x seed scale limit
z float32 Add y x
return y z"""
    x, seed = numbers((3, 700), "float32"), np.array(-5)
    prepared = Prepared([parse(text)], [x.shape, ()])
    outputs = [to_tensor(np.zeros_like(x)) for _ in range(2)]
    prepared([to_tensor(x), to_tensor(seed)], outputs)
    assert np.array_equal(to_array(outputs[0]), seeded_dropout.definition(x, seed, ratio=0.3))
    check(text, x, seed)


def test_several_outputs_and_types_in_one_program():
    text = """v0 bfloat16
v1 float32
v2 bool
v3 bfloat16 Add v0 v1
v4 float32 Cast v3
v5 float32 Gelu v4
v6 float32 Constant 0.0
v7 float32 Where v2 v5 v6
v8 bfloat16 Cast v7
v9 bool IsNaN v5
return v3 v8 v9 v7"""
    check(text, numbers((6, 300), "bfloat16"), numbers((300,), "float32"), numbers((6, 1), "bool"))


@pytest.mark.parametrize("columns", [5, 300, 1500])
def test_rows(columns):
    """A LayerNormalization between element-wise operations; a number a row goes in, and out."""
    text = """v0 bfloat16
v1 float32
v2 float32
v3 float32
v4 float32 Add v0 v1
v5 float32 RowMean v4
v6 float32 Sub v4 v5
v7 float32 Mul v6 v6
v8 float32 RowMean v7
v9 float32 Constant 1e-05
v10 float32 Add v8 v9
v11 float32 Sqrt v10
v12 float32 Reciprocal v11
v13 float32 Mul v6 v12
v14 float32 Mul v13 v2
v15 bfloat16 Add v14 v3
return v15 v4 v5 v12"""
    shapes = (2, 3, columns), (2, 3, columns), (columns,), (2, 3, 1)
    inputs = [numbers(shape, "float32" if k else "bfloat16", k) for k, shape in enumerate(shapes)]
    check(text, *inputs, bound=2e-5)  # of sums, in another order


@np.errstate(all="ignore")
def test_several_programs_in_one_launch():
    from onnxgrad.cuda.core.fused_elementwise import Prepared

    text = """x bfloat16
y float32 Cast x
return y

a float32
b float32
c float32 Add a b
d float32 Mul c c
return c d

x bfloat16
y float32 Cast x
return y

e float32
f bfloat16 Cast e
return f"""
    shapes = [(3, 700), (40, 50), (50,), (5, 3), (7,)]
    inputs = [numbers(shape, "bfloat16" if k in (0, 3) else "float32", k) for k, shape in enumerate(shapes)]
    expected = evaluate(text, inputs)
    outputs = [to_tensor(np.zeros_like(array)) for array in expected]
    Prepared(parse_all(text), shapes)([to_tensor(x) for x in inputs], outputs)
    for found, right in zip(outputs, expected, strict=True):
        assert np.allclose(to_array(found).astype(np.float32), right.astype(np.float32), rtol=1e-6)
