"""check_gradient(): a model's gradient beside central differences, in random directions."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from onnxgrad.autodiff import draws
from onnxgrad.autodiff.differentiate import add_gradient
from onnxgrad.autodiff.float64 import in_float64
from onnxgrad.autodiff.reference.loops import Loop, Scan
from onnxgrad.autodiff.reference.normalization import NORMALIZATIONS
from onnxgrad.autodiff.reference.recurrent import FAILING, RECURRENT
from onnxgrad.autodiff.reference.windows import WINDOWS
from onnxgrad.functions.add_functions import all_nodes
from onnxgrad.graph.files import expect_weights, load
from onnxgrad.op import operator_of, reference_ops
from onnxgrad.passes.convert_opset import OLDEST_OPSET
from onnxgrad.passes.draft import Draft
from onnxgrad.passes.expand_contrib import is_fused
from onnxgrad.passes.finish import FINISH
from onnxgrad.passes.lift_weights import lift_initializers
from onnxgrad.passes.prepare import TO_NEW_OPSET, prepare
from onnxgrad.passes.validate import validate
from onnxgrad.passes.write_gradients import is_gradient
from onnxgrad.rules.contrib_schemas import contrib_ops, fast_gelu, gelu
from onnxgrad.runtime.interrupts import run
from onnxgrad.schema import ML

STEP = 1e-5  # for numbers up to 1; in float64 the error of a central difference is then about 1e-10
# What onnxruntime does not compute in float64 as it should: in float32, with constants of float32,
# or by an older definition of the operator.
IMPRECISE = {"Shrink", "Attention", "MeanVarianceNormalization"}
# What onnx.reference rounds, too, whatever the type of its inputs, or where it does not see what subgraphs read.
ROUNDED = {"LinearAttention", "FlexAttention", "Adagrad", "Adam", "Momentum"}
# What onnxruntime says of a model that it has no kernels for: an operator, a type or a version that it does not know,
# or attributes that its kernel refuses.
NOT_TAKEN = re.compile(
    r"Could not find an implementation|is not a registered function/op"
    r"|Exception during initialization: \S+/core/providers/cpu/"
    r"|Type Error: Type ('tensor\(double\)'|\(tensor\(double\)\)) of (input parameter|output arg)"
    r"|Unsupported model IR version|only \*guarantees\* support"
)
Feeds = Mapping[str, Any]


class Erf(OpRun):
    """onnx.reference computes it in float32, whatever it is given."""

    op_domain = ""

    def _run(self, x: Any) -> tuple[Any]:
        return (np.vectorize(math.erf, otypes=[x.dtype])(x),)


class Gelu(OpRun):
    """onnx.reference takes its own Erf for it."""

    op_domain = ""

    def _run(self, x: Any, approximate: str | None = None) -> tuple[Any]:
        return ((fast_gelu if approximate == "tanh" else gelu)(x).astype(x.dtype),)


class Mean(OpRun):
    """onnx.reference does not broadcast here."""

    op_domain = ""

    def _run(self, *inputs: Any) -> tuple[Any]:
        return (sum(inputs) / len(inputs),)


class DynamicQuantizeLinear(OpRun):
    """onnx.reference computes the scale in float32, whatever it is given."""

    op_domain = ""

    def _run(self, x: Any) -> tuple[Any, Any, Any]:
        low, high = np.min(x, initial=0), np.max(x, initial=0)
        scale = np.asarray((high - low) / 255 if high > low else 1, x.dtype)
        zero_point = np.rint(-low / scale)
        return np.clip(np.rint(x / scale) + zero_point, 0, 255).astype(np.uint8), scale, zero_point.astype(np.uint8)


OWN_OPS = [Erf, Gelu, Mean, DynamicQuantizeLinear, *NORMALIZATIONS, *RECURRENT, Loop, Scan, *WINDOWS]


class Compared(NamedTuple):
    """One input: its gradient and the difference quotient, both along the direction where they differ most."""

    name: str
    shape: tuple[int, ...]
    gradient: float
    difference: float
    error: float  # of the gradient, relative to its size


class GradientCheck(list[Compared]):
    """A row for each input; printed, it is a table."""

    @property
    def worst(self) -> float:
        """The largest relative error; NaN if there is one."""
        errors = [row.error for row in self]
        return next((e for e in errors if math.isnan(e)), max(errors, default=0.0))

    def __str__(self) -> str:
        width = max([5, *(len(row.name) for row in self)])
        lines = [f"{'input':{width}}  {'shape':16} {'gradient':>14} {'difference':>14} {'error':>9}"]
        for row in self:
            shape = str(list(row.shape))
            numbers = f"{row.gradient:14.6g} {row.difference:14.6g} {row.error:9.1e}"
            lines.append(f"{row.name:{width}}  {shape:16} {numbers}")
        return "\n".join(lines)


def check_gradient(
    model: Any,
    feeds: Feeds,
    wrt: str | Sequence[str] | None = None,
    of: str | Sequence[str] | None = None,
    *,
    directions: int = 3,
    seed: int = 0,
    new_ops: Sequence[type[OpRun]] = (),
) -> GradientCheck:
    """Compares gradient(model, wrt, of) with central differences, in float64 for models of any type.

    - `feeds`: the inputs of the model by name.
    - `wrt`, `of`: as in gradient().
    - `directions`: the number of random directions in which each input or parameter is moved, drawn with `seed`.
    - `new_ops`: custom operators, as onnx.reference takes them.

    A correct gradient has errors of about 1e-8, unless the model has a kink within 1e-5 of these inputs. Random values
    of the model, such as the choice of Dropout, are drawn once. `print(check_gradient(…))` shows a table.
    """
    proto = in_float64(_whole_proto(model))
    draft = prepare(ir.from_proto(proto), "check_gradient")
    ready: onnx.ModelProto = ir.to_proto(draft.model)
    if is_random := any(map(draws.is_random, ready.graph.node)):
        proto = ready  # in which functions are written out: what they draw has to be the same as in the gradient
    made = add_gradient(draft, wrt, of, parameters_as_inputs=True)
    forward = _with_inputs(proto, list(made.outputs))
    initial = {t.name: onnx.numpy_helper.to_array(t) for t in proto.graph.initializer}
    values = {}
    for given in forward.graph.input:
        name = given.name
        if name not in feeds and name not in initial:
            raise ValueError(f"check_gradient: feeds lacks the input {name!r}")
        values[name] = _wide(feeds[name] if name in feeds else initial[name])
        _expect_fit(given, values[name])
    if is_random:
        drawing = draws.with_draws(forward)
        drawn = dict(zip((o.name for o in drawing.graph.output), evaluator(drawing, new_ops)(values), strict=True))
        values |= drawn
        forward = draws.with_draws(forward, drawn)
    rng = np.random.default_rng(seed)
    outputs = [o.name for o in forward.graph.output]
    run = evaluator(forward, new_ops)
    chosen = [of] if isinstance(of, str) else list(of) if of is not None else _smooth(forward)
    first = dict(zip(outputs, run(values), strict=True))
    weights = {n: rng.standard_normal(np.shape(first[n])) if n in made.seeds else np.ones(()) for n in chosen}
    weights = {n: np.where(np.isfinite(first[n]), w, 0) for n, w in weights.items()}  # a masked score stays -∞

    def scalar(changed: Feeds) -> float:
        now = dict(zip(outputs, run({**values, **changed}), strict=True))
        return float(sum(np.sum(np.where(weights[n] != 0, now[n] * weights[n], 0)) for n in chosen))

    backward: onnx.ModelProto = ir.to_proto(draft.run(FINISH).model)
    if is_random:
        backward = draws.with_draws(backward, drawn)
    fed = {**values, **{seed_input: weights[n] for n, seed_input in made.seeds.items()}}
    found = dict(zip([o.name for o in backward.graph.output], evaluator(backward, new_ops)(fed), strict=True))
    # Rounding of the function's own terms, which shows in a difference where the gradient is zero.
    least = 1e-3 * sum(float(np.sum(np.abs(first[n] * w), where=w != 0)) for n, w in weights.items())
    return GradientCheck(
        _compare(name, values[name], found[result], scalar, rng, directions, least)
        for name, result in made.outputs.items()
    )


def _expect_fit(declared: onnx.ValueInfoProto, array: Any) -> None:
    """Raises one sentence unless the array has the declared type and shape."""
    kind = declared.type.tensor_type
    if not kind.elem_type:
        return
    expected = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
    if array.dtype != expected:
        wanted = "floating-point numbers" if expected == np.float64 else expected
        raise TypeError(f"check_gradient: feeds has {declared.name!r} as {array.dtype}, expected {wanted}")
    dims = [d.dim_value if d.HasField("dim_value") else d.dim_param or "any" for d in kind.shape.dim]
    unlike = any(isinstance(d, int) and d != have for d, have in zip(dims, array.shape, strict=False))
    if kind.HasField("shape") and (len(dims) != array.ndim or unlike):
        raise ValueError(f"check_gradient: feeds has {declared.name!r} of shape {list(array.shape)}, expected {dims}")


def _with_inputs(model: onnx.ModelProto, names: Sequence[str]) -> onnx.ModelProto:
    """The model with these initializers as inputs."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    there = {i.name for i in copy.graph.input}
    moved = [t for t in copy.graph.initializer if t.name in names]
    for tensor in moved:
        if tensor.name not in there:
            copy.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
        copy.graph.initializer.remove(tensor)
    return copy


def _compare(
    name: str, at: Any, total: Any, scalar: Callable[[Feeds], float], rng: np.random.Generator, directions: int,
    least: float,
) -> Compared:  # fmt: skip
    if np.shape(total) != at.shape:
        raise ValueError(f"check_gradient: the gradient of {name!r} has shape {np.shape(total)}, expected {at.shape}")
    worst = Compared(name, at.shape, 0.0, 0.0, -1.0)
    for _ in range(directions):
        direction = rng.standard_normal(at.shape)
        # Less than in proportion to large numbers: others of the same input may be small.
        step = STEP * math.sqrt(max(1.0, float(np.max(np.abs(at), where=np.isfinite(at), initial=0))))
        quotient = (scalar({name: at + step * direction}) - scalar({name: at - step * direction})) / (2 * step)
        analytic = float(np.sum(total * direction))
        # Where terms cancel, the size of the terms is what rounding is relative to.
        size = max(abs(quotient), float(np.sqrt(np.sum((total * direction) ** 2))), least, 1e-12)
        error = abs(analytic - quotient) / size
        if math.isnan(error) or error > worst.error:
            worst = Compared(name, at.shape, analytic, quotient, error)
    return worst


def evaluator(model: onnx.ModelProto, new_ops: Sequence[type[OpRun]] = ()) -> Callable[[Feeds], list[Any]]:
    """Runs a model in onnxruntime if that has kernels for all of it, else in onnx.reference."""
    names = [i.name for i in model.graph.input]
    session = None
    if not any(node.op_type in FAILING or node.op_type in IMPRECISE for node in model.graph.node):
        session = session_if_possible(model)
    if session is not None:
        return lambda feeds: list(run(session.run, None, {n: np.asarray(feeds[n]) for n in names}))
    ours: list[Any] = [*reference_ops(), *contrib_ops(), *OWN_OPS]
    reference = ReferenceEvaluator(_with_named_outputs(model), new_ops=[*new_ops, *ours])
    return lambda feeds: list(reference.run(None, {n: np.asarray(feeds[n]) for n in names}))


def session_if_possible(model: onnx.ModelProto) -> Any:
    """A session of onnxruntime; None if that is not installed, or has no kernels for all of the model."""
    try:
        import onnxruntime
    except ImportError:
        return None
    from onnxgrad.runtime.register import register

    options = register() if has_ours(model) else onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        serialized = model.SerializeToString()
        return run(onnxruntime.InferenceSession, serialized, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors have no type in common
        if NOT_TAKEN.search(str(error)):
            return None
        raise


def has_ours(model: onnx.ModelProto) -> bool:
    """Whether an operator of ours is in it; a session that knows them takes many times as long to make."""
    return any(operator_of(node.domain, node.op_type) is not None for node in all_nodes(model))


def _with_named_outputs(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy in which outputs left out have names: onnx.reference would take such a result for every absent input."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for k, node in enumerate(copy.graph.node):
        node.output[:] = [name or f"left out {k} {i}" for i, name in enumerate(node.output)]
    return copy


def _whole_proto(model: Any) -> onnx.ModelProto:
    """With its weights in it, which are going to be moved, and of an opset that onnx.reference runs as it should."""
    loaded = load(model, "check_gradient")
    validate(Draft(loaded, "check_gradient"))
    expect_weights(loaded, "check_gradient")
    loaded = ir.external_data.load_to_model(loaded)
    lift_initializers(Draft(loaded, "check_gradient"))
    # ML's weights are attributes, fused operators have kernels in float32 alone, nobody runs ONNX's Gradient, and the
    # definitions of others round to float32 unless they are written out by now.
    inside = [node for function in loaded.functions.values() for node in function]
    if any(map(_is_written_out, loaded.graph.all_nodes())) or any(map(is_gradient, inside)):
        loaded = prepare(loaded, "check_gradient").model
    elif loaded.graph.opset_imports.get("", OLDEST_OPSET) < OLDEST_OPSET:
        loaded = Draft(loaded, "check_gradient").run(TO_NEW_OPSET).model
    proto: onnx.ModelProto = ir.to_proto(loaded)
    return proto


def _is_written_out(node: ir.Node) -> bool:
    return node.domain == ML or node.op_type in ROUNDED or is_fused(node) or is_gradient(node)


def _smooth(proto: onnx.ModelProto) -> list[str]:
    floats = (onnx.TensorProto.DOUBLE, onnx.TensorProto.UNDEFINED)
    return [o.name for o in proto.graph.output if o.type.tensor_type.elem_type in floats]


def _wide(array: Any) -> Any:
    array = np.asarray(array)
    wide = array.dtype.kind == "f" and array.dtype.itemsize > 1  # float8 is for quantized numbers
    return array.astype(np.float64) if wide or array.dtype.name == "bfloat16" else array
