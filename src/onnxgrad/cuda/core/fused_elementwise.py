"""The programs of FusedElementwise nodes as Triton kernels, one each: every input is read once, every output written.

Half types and float32 are computed in float32, and only outputs are rounded: a cast to a half type within a program
does nothing, as in the kernels of PyTorch's inductor.
"""

import functools
import hashlib
import itertools
import linecache
import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from onnxgrad.cuda.activation import HARD_SWISH_GRAD, LEAKY_RELU_GRAD, RELU_GRAD, SIGMOID_GRAD, TANH_GRAD
from onnxgrad.cuda.core.activations import activate
from onnxgrad.cuda.core.launch import LONGEST_IN_32_BITS, ceil_div, launch, power_of_two, to_type
from onnxgrad.cuda.dropout import draw
from onnxgrad.cuda.gelu import FAST_GELU_GRAD, GELU_GRAD, QUICK_GELU_GRAD, ROOT_HALF, Z1, Z3
from onnxgrad.ops.families.elementwise_program import Line, Program, broadcast, by_program

BLOCK = 1024  # elements of a program, eight a thread: 16 bytes of a half type


@triton.jit
def sigmoid(x):
    e = tl.exp(-tl.abs(x))  # never overflows
    return tl.where(x < 0, e, 1.0) / (1 + e)


@triton.jit
def tanh(x):
    """In float32 Cephes's polynomial near 0, where the exponential function would cancel."""
    if x.dtype == tl.float64:
        return activate("Tanh", x, 0, 0)
    else:  # noqa: RET505 - which Triton compiles only if the type is another
        square = x * x
        near = -5.70498872745e-3 * square + 2.06390887954e-2
        near = (near * square - 5.37397155531e-2) * square + 1.33314422036e-1
        near = (near * square - 3.33332819422e-1) * square * x + x
        e = tl.exp(-2 * tl.abs(x))
        far = (1 - e) / (1 + e)
        return tl.where(tl.abs(x) < 0.625, near, tl.where(x < 0, -far, far))


@triton.jit
def gelu(x):
    return x * (0.5 + 0.5 * tl.math.erf(x * ROOT_HALF))


@triton.jit
def fast_gelu(x):
    return x * sigmoid(x * (x * x * Z3 + Z1))


@triton.jit
def smaller(x, y):
    return tl.where((x < y) | (x != x), x, y)


@triton.jit
def larger(x, y):
    return tl.where((x > y) | (x != x), x, y)


@triton.jit
def drop(x, seed, scale, limit, at):
    return tl.where(draw(at, seed) >= limit, x * scale, 0.0)


# What kernels call.
NAMES = {
    "__name__": __name__, "triton": triton, "tl": tl, "to_type": to_type, "activate": activate, "sigmoid": sigmoid,
    "tanh": tanh, "gelu": gelu, "fast_gelu": fast_gelu, "smaller": smaller, "larger": larger, "drop": drop,
    "relu_grad": RELU_GRAD.compute, "leaky_relu_grad": LEAKY_RELU_GRAD.compute, "tanh_grad": TANH_GRAD.compute,
    "sigmoid_grad": SIGMOID_GRAD.compute, "hard_swish_grad": HARD_SWISH_GRAD.compute, "gelu_grad": GELU_GRAD.compute,
    "fast_gelu_grad": FAST_GELU_GRAD.compute, "quick_gelu_grad": QUICK_GELU_GRAD.compute,
}  # fmt: skip
# What each operation is in Triton; Cast and Constant aside.
EXPRESSIONS = {
    "Add": "{0} + {1}", "Sub": "{0} - {1}", "Mul": "{0} * {1}", "Div": "{0} / {1}", "Neg": "-{0}",
    "Equal": "{0} == {1}", "Less": "{0} < {1}", "Greater": "{0} > {1}", "LessOrEqual": "{0} <= {1}",
    "GreaterOrEqual": "{0} >= {1}", "And": "{0} & {1}", "Or": "{0} | {1}", "Xor": "{0} ^ {1}", "Not": "{0} == 0",
    "IsNaN": "{0} != {0}", "Where": "tl.where({0}, {1}, {2})", "Min": "smaller({0}, {1})", "Max": "larger({0}, {1})",
    "Abs": "tl.abs({0})", "Sqrt": "tl.sqrt({0})", "Reciprocal": "1 / {0}", "Exp": "tl.exp({0})", "Log": "tl.log({0})",
    "Sin": "tl.sin({0})", "Cos": "tl.cos({0})", "Erf": "tl.math.erf({0})", "Tanh": "tanh({0})",
    "Sigmoid": "sigmoid({0})", "Relu": "tl.where({0} < 0, 0.0, {0})", "LeakyRelu": "tl.where({0} < 0, {0} * {1}, {0})",
    "Gelu": "gelu({0})", "FastGelu": "fast_gelu({0})", "QuickGelu": "{0} * sigmoid({0} * {1})",
    "HardSigmoid": 'activate("HardSigmoid", {0}, {1}, {2})', "Elu": 'activate("Elu", {0}, {1}, {1})',
    "HardSwish": '{0} * activate("HardSigmoid", {0}, 1 / 6, 0.5)', "Softplus": 'activate("Softplus", {0}, 0, 0)',
    "ReluGrad": "relu_grad({0}, {1})", "LeakyReluGrad": "leaky_relu_grad({0}, {1}, {2})",
    "SigmoidGrad": "sigmoid_grad({0}, {1})", "TanhGrad": "tanh_grad({0}, {1})",
    "HardSwishGrad": "hard_swish_grad({0}, {1})", "GeluGrad": "gelu_grad({0}, {1})",
    "FastGeluGrad": "fast_gelu_grad({0}, {1})", "QuickGeluGrad": "quick_gelu_grad({0}, {1}, {2})",
    "SeededDropout": "drop({0}, {1}, {2}, {3}, at)", "RowMean": "tl.sum(tl.where(here, {0}, 0.0), axis=0) / length",
}  # fmt: skip
WORK = {"float16": "float32", "bfloat16": "float32", "bool": "int1"}  # types to compute in, if others


class Prepared:
    """The programs of a node for inputs of certain shapes; if there are several, none of them has rows."""

    def __init__(self, programs: Sequence[Program], shapes: Sequence[Sequence[int]]) -> None:
        parts = by_program(programs, shapes)
        wholes = [broadcast(part) for part in parts]
        row = wholes[0][-1] if programs[0].has_rows else None
        counts = [math.prod(whole) for whole in wholes]
        blocks = [ceil_div(count, row or BLOCK) if count else 0 for count in counts]
        indices = [[_index(shape, whole) for shape in part] for part, whole in zip(parts, wholes, strict=True)]
        self._count, self._blocks, self._warps = counts[0], sum(blocks), 4 if row is None or row <= BLOCK else 8
        self._kernel = _compiled(_source(programs, indices, counts, blocks, row))

    def __call__(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        if self._blocks:
            launch(self._kernel, self._blocks, *inputs, *outputs, self._count, num_warps=self._warps)


def _index(shape: Sequence[int], whole: Sequence[int]) -> str:
    """Where an input has the element that goes into element `at` of the outputs; "" if it has just one."""
    shape = [1] * (len(whole) - len(shape)) + list(shape)
    terms, inner, stride, k = [], 1, 1, len(whole) - 1
    while k >= 0:  # runs of dimensions that the input has, from the last one on
        if shape[k] == 1:
            inner *= whole[k]
            k -= 1
            continue
        size, below = 1, inner
        while k >= 0 and (shape[k] != 1 or whole[k] == 1):
            size *= whole[k]
            inner *= whole[k]
            k -= 1
        term = "at" if below == 1 else f"(at // {below})"
        if any(n != 1 for n in whole[: k + 1]):
            term = f"({term} % {size})"
        terms.append(term if stride == 1 else f"{term} * {stride}")
        stride *= size
    return " + ".join(terms)


def _source(
    programs: Sequence[Program],
    indices: Sequence[Sequence[str]],
    counts: Sequence[int],
    blocks: Sequence[int],
    row: int | None,
) -> str:
    """A kernel in Triton, which finds by the number of a block whose it is."""
    inputs = [f"p{k}" for k in range(sum(map(len, indices)))]
    outputs = [f"q{k}" for k in range(sum(len(program.results) for program in programs))]
    lines = ["@triton.jit", f"def fused({', '.join((*inputs, *outputs))}, count):", "    number = tl.program_id(0)"]
    if len(programs) == 1:
        lines += _body(programs[0], indices[0], inputs, outputs, counts[0], "count", row)
        return "\n".join(lines) + "\n"
    # Programs that differ in nothing but their tensors have their code in common.
    kinds: dict[Any, list[tuple[int, int, int, list[str]]]] = {}
    first, read, written = 0, iter(inputs), iter(outputs)
    for program, its, count, size in zip(programs, indices, counts, blocks, strict=True):
        pointers = [*itertools.islice(read, len(its)), *itertools.islice(written, len(program.results))]
        kinds.setdefault((program, tuple(its)), []).append((first, first + size, count, pointers))
        first += size
    for (program, its), members in kinds.items():
        chosen = [f"c{k}" for k in range(len(members[0][3]))]
        lines += ["    first = -1", "    end = 0", *map("    {} = {}".format, chosen, members[0][3])]
        for start, stop, count, pointers in members:
            lines += [f"    if (number >= {start}) & (number < {stop}):", f"        first = {start}"]
            lines += [f"        end = {count}", *map("        {} = {}".format, chosen, pointers)]
        most = max(count for _, _, count, _ in members)
        body = _body(program, its, chosen[: len(its)], chosen[len(its) :], most, "end", None, "first")
        lines += ["    if first >= 0:", *(f"    {line}" for line in body)]
    return "\n".join(lines) + "\n"


def _body(
    program: Program, indices: Sequence[str], inputs: Sequence[str], outputs: Sequence[str], count: int, end: str,
    row: int | None, first: str = "0",
) -> list[str]:  # fmt: skip
    """What one program computes: a block of elements, or a row of that length."""
    dtypes, of_rows = program.dtypes, program.of_rows
    lines = [f"own = (number - {first}).to({'tl.int32' if count < LONGEST_IN_32_BITS else 'tl.int64'})"]
    if row is None:
        lines += [f"at = own * {BLOCK} + tl.arange(0, {BLOCK})", f"here = at < {end}"]
    else:
        lines += [f"column = tl.arange(0, {power_of_two(row)})", f"here = column < {row}"]
        lines += [f"at = own * {row} + column", f"length = {row}"]
        known = {f"(at % {row})": "column", f"(at // {row})": "own"}
        indices = [known.get(index, index) for index in indices]
    for line, pointer, index in zip(program.inputs, inputs, indices, strict=True):
        alone = index in ("", "own")
        loaded = f"tl.load({pointer}{index and f' + {index}'}{'' if alone else ', here, other=0'})"
        if line.dtype in ("float16", "bfloat16"):
            loaded += ".to(tl.float32)"
        lines.append(f"{line.name} = {loaded}{' != 0' if line.dtype == 'bool' else ''}")
    lines += [f"{line.name} = {_expression(line)}" for line in program.lines if line.operation]
    for name, pointer in zip(program.results, outputs, strict=True):
        stored = name if dtypes[name] == "bool" else f"to_type({name}, tl.{dtypes[name]})"
        place = f"{pointer} + own + tl.full([1], 0, tl.int32)" if name in of_rows else f"{pointer} + at"
        lines.append(f"tl.store({place}, {stored}{'' if name in of_rows else ', here'})")
    return [f"    {line}" for line in lines]


def _expression(line: Line) -> str:
    work = WORK.get(line.dtype, line.dtype)
    if line.operation == "Constant":
        (number,) = line.arguments
        return f"tl.full([1], {number if _is_finite(number) else f'float({number!r})'}, tl.{work})"
    if line.operation == "Cast":
        (given,) = line.arguments
        return f"{given} != 0" if line.dtype == "bool" else f"{given}.to(tl.{work})"
    return EXPRESSIONS[line.operation].format(*line.arguments)


def _is_finite(number: str) -> bool:
    return number not in ("inf", "-inf", "nan")


@functools.cache
def _compiled(source: str) -> Any:
    """The function of that source, which Triton wants to read: linecache has it in place of a file."""
    name = f"<fused_elementwise {hashlib.sha256(source.encode()).hexdigest()[:16]}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    found = dict(NAMES)
    exec(compile(source, name, "exec"), found)
    return found["fused"]
