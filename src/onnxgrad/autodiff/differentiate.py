"""gradient() and hvp(): an ONNX model in, the model with its gradient or with products of its Hessian out."""

import fnmatch
from collections.abc import Sequence
from typing import Any, NamedTuple

import onnx_ir as ir

from onnxgrad.graph.builder import Builder
from onnxgrad.graph.files import load
from onnxgrad.graph.gradients import gradient_value, whole_gradient
from onnxgrad.graph.head import without_word
from onnxgrad.graph.quantization import OF_INTEGERS
from onnxgrad.graph.suggest import listed, suggestion
from onnxgrad.graph.tensor import Tensor, may_be_float
from onnxgrad.passes.draft import Draft
from onnxgrad.passes.finish import FINISH
from onnxgrad.passes.prepare import prepare
from onnxgrad.passes.recompute_steps import recompute_steps
from onnxgrad.rules.engine import NoRuleError, influences, write_gradient

# What to do about an operator without a rule, where it is not gradient()'s argument.
WAYS_OUT = {
    "Trainer": "freeze what reaches the loss through it",
    "grad": "leave out of --wrt what reaches the result through it",
    "Module": "set requires_grad to False for what reaches the result through it",
    "wrap": "set requires_grad to False for what reaches the result through it",
}


def gradient(
    model: Any,
    wrt: str | Sequence[str] | None = None,
    of: str | Sequence[str] | None = None,
    *,
    parameters_as_inputs: bool = False,
    recompute: bool = False,
) -> Any:
    """Returns the model with gradients: an output `<name>_grad` for each of `wrt`, after its own outputs.

    - `model`: a path, an onnx.ModelProto or an onnx_ir.Model; it is not changed. For an onnx_ir.Model the result is one
      too.
    - `wrt`: names of initializers and graph inputs, or patterns (`layer1.*`), in the order of the new outputs; by
      default the parameters that `of` depends on, as `onnxgrad inspect` shows them.
    - `of`: the output to differentiate, by default the only one, or several, whose gradients are summed. A scalar is
      seeded with 1; for any other the result has an input `<output>_grad`, and the gradients are vector-Jacobian
      products.
    - `parameters_as_inputs`: turns the initializers in `wrt` into inputs.
    - `recompute`: keeps only about √n states of a Loop or Scan of n steps, and computes each step once more.

    `onnxgrad.session(onnxgrad.gradient("model.onnx", wrt="x", of="logits"))` runs the result.
    """
    draft = prepare(load(model, "gradient"), "gradient")
    if recompute:
        recompute_steps(draft)
    add_gradient(draft, wrt, of, parameters_as_inputs=parameters_as_inputs)
    result = draft.run(FINISH).model
    return result if isinstance(model, ir.Model) else ir.to_proto(result)


def hvp(
    model: Any,
    wrt: str | Sequence[str] | None = None,
    of: str | Sequence[str] | None = None,
    *,
    parameters_as_inputs: bool = False,
) -> Any:
    """Returns the model with Hessian-vector products: an output `<name>_hvp` for each of `wrt`, after its own outputs.

    The arguments are those of gradient(). The vector consists of inputs `<name>_vector`, each with the shape of its
    input or parameter, so the product includes the blocks of the Hessian that mix two of `wrt`. If `of` is not a
    scalar, the result has an input `<output>_grad`, and the Hessian is that of the sum of `of` times this input. A run
    costs about as much as two gradients, and never forms the Hessian.
    """
    draft = prepare(load(model, "hvp"), "hvp")
    draft, _, _ = add_hvp(draft, wrt, of, parameters_as_inputs=parameters_as_inputs)
    result = draft.run(FINISH).model
    return result if isinstance(model, ir.Model) else ir.to_proto(result)


class Gradient(NamedTuple):
    """Which inputs and outputs of a model are what, once it has its gradient."""

    outputs: dict[str, str]  # by the name of the parameter or input that they are the gradient of
    seeds: dict[str, str]  # inputs, by the output of the model whose gradient they take; scalars have none
    results: list[str]  # outputs of the model that were differentiated


def add_gradient(
    draft: Draft,
    wrt: str | Sequence[str] | None,
    of: str | Sequence[str] | None,
    *,
    parameters_as_inputs: bool,
    scalars_have_seeds: bool = False,
) -> Gradient:
    """Adds to a draft that is prepared what gradient() adds to a model.

    With `scalars_have_seeds` the cotangents of scalars are inputs like those of others, not 1.
    """
    graph = draft.graph
    results = _results(graph, of, draft.caller)
    wanted = sources(draft, results, wrt, "`wrt`")
    builder = Builder(graph)
    seeds = _seeds(builder, results, scalars_have_seeds)
    names = [str(v.name) for v in results]
    inputs = {str(v.name): str(seed.value.name) for v, seed in seeds.items() if seed.value.producer() is None}
    found = _write_gradient(draft, builder, seeds, wanted)
    outputs = _add_outputs(builder, wanted, found, "grad")
    if parameters_as_inputs:
        weights_to_inputs(graph, [str(value.name) for value in wanted])
    return Gradient(outputs, inputs, names)


def add_hvp(
    draft: Draft, wrt: str | Sequence[str] | None, of: str | Sequence[str] | None, *, parameters_as_inputs: bool
) -> tuple[Draft, Gradient, dict[str, str]]:
    """A draft with what hvp() adds to a model, given one that is prepared, and the inputs that take the vector."""
    first = add_gradient(draft, wrt, of, parameters_as_inputs=False)
    draft = prepare(draft.run(FINISH).model, draft.caller)  # a gradient is a model as any other
    graph = draft.graph
    named = {**graph.initializers, **{str(v.name): v for v in graph.inputs}}
    wanted = [named[name] for name in first.outputs]
    gradients = [graph.outputs.pop() for _ in wanted][::-1]
    builder = Builder(graph)
    vectors = [_new_input(builder, value, f"{value.name}_vector") for value in wanted]
    found = _write_gradient(draft, builder, dict(zip(gradients, vectors, strict=True)), wanted)
    outputs = _add_outputs(builder, wanted, found, "hvp")
    if parameters_as_inputs:
        weights_to_inputs(graph, list(outputs))
    taking = {name: str(vector.value.name) for name, vector in zip(outputs, vectors, strict=True)}
    return draft, Gradient(outputs, first.seeds, first.results), taking


def _write_gradient(
    draft: Draft, builder: Builder, seeds: dict[ir.Value, Tensor], wanted: list[ir.Value]
) -> dict[ir.Value, Tensor]:
    """The engine's, with what can be done about an operator without a rule."""
    try:
        return write_gradient(builder, seeds, wanted)
    except NoRuleError as error:
        way_out = WAYS_OUT.get(draft.caller, "leave out of `wrt` what reaches the result through it")
        raise NoRuleError(f"{draft.caller}: {error}, or {way_out}") from None


def _results(graph: ir.Graph, of: str | Sequence[str] | None, caller: str) -> list[ir.Value]:
    outputs = {str(v.name): v for v in graph.outputs}
    if not outputs:
        raise ValueError(f"{caller}: the model has no outputs to differentiate")
    if of is None:
        smooth = [v for v in graph.outputs if may_be_float(v)]
        if len(smooth) != 1:
            raise ValueError(f"{caller}: name the output to differentiate with `of`; available: {listed(outputs)}")
        return smooth
    found = []
    for name in [of] if isinstance(of, str) else of:
        if name not in outputs:
            raise ValueError(
                f"{caller}: `of` names {name!r}, expected an output of the model; available: {listed(outputs)}"
            )
        value = outputs[name]
        if value.dtype is not None and not value.dtype.is_floating_point():
            raise ValueError(f"{caller}: the output {name!r} holds {value.dtype.name.lower()}, which has no gradient")
        found.append(value)
    if not found:
        raise ValueError(f"{caller}: `of` is empty, expected some of {listed(outputs)}")
    return list(dict.fromkeys(found))


def sources(
    draft: Draft, results: Sequence[ir.Value], wrt: str | Sequence[str] | None, argument: str
) -> list[ir.Value]:
    """The values to differentiate with respect to; sentences name the argument that chose them."""
    graph, caller = draft.graph, draft.caller
    inputs = {str(v.name): v for v in graph.inputs}
    reached = influences(list(graph), set(results))
    named = {name: v for name, v in graph.initializers.items() if name not in inputs}
    kinds = "initializer"
    if draft.caller != "Trainer":  # which trains no inputs
        named, kinds = named | inputs, "input or initializer"
    result = listed(str(v.name) for v in results)
    if wrt is None:
        roles = draft.roles
        found = [
            v
            for n, v in graph.initializers.items()
            if v in reached and n in roles and roles[n].is_parameter and _is_float(v)
        ]
        if not found:
            others = [n for n, v in named.items() if v in reached and _is_float(v)]
            integers = sorted({n.op_type for n in graph.all_nodes() if n.op_type in OF_INTEGERS})
            if integers:
                raise ValueError(
                    f"{caller}: {result} depends on no parameter: the model computes in integers ({listed(integers)}), "
                    "which have no gradient, expected the model from before it was quantized, or one quantized with "
                    "quant_format=QuantFormat.QDQ"
                )
            raise ValueError(
                f"{caller}: {result} depends on no parameter; it depends on {listed(others)}: name some with {argument}"
                if others
                else f"{caller}: {result} depends on no {kinds} that has a gradient"
            )
        return found
    chosen: dict[str, ir.Value] = {}
    for pattern in without_word(draft.model, wrt, named):
        exact = pattern in named
        matches = [pattern] if exact else [n for n in named if fnmatch.fnmatchcase(n, pattern) and _is_float(named[n])]
        if not matches:
            raise ValueError(
                f"{caller}: {argument} names {pattern!r}, which is not an {kinds} of the model"
                f"{suggestion(pattern, named)}"
            )
        for name in matches:
            if not _is_float(named[name]):
                kind = named[name].dtype
                raise ValueError(
                    f"{caller}: {name!r} holds {kind.name.lower() if kind else '?'}, which has no gradient"
                )
            if named[name] not in reached:
                if not exact:
                    continue  # a pattern stands for those of its names that matter
                raise ValueError(f"{caller}: {result} does not depend on {name!r} in a way that has a gradient")
            chosen[name] = named[name]
    if not chosen:
        raise ValueError(f"{caller}: {result} depends on nothing that {argument} names")
    return list(chosen.values())


def _is_float(value: ir.Value) -> bool:
    """Numbers of 8 bits or fewer are quantized ones, which are no more moved than integers are."""
    return value.dtype is not None and value.dtype.is_floating_point() and value.dtype.bitwidth > 8


def _seeds(builder: Builder, results: list[ir.Value], scalars_have_seeds: bool) -> dict[ir.Value, Tensor]:
    seeds = {}
    for value in results:
        tensor = builder.tensor(value)
        if tensor.shape == () and not tensor.is_sequence and not scalars_have_seeds:
            with builder.at_work(f"{value.name}_grad"):
                seeds[value] = builder.constant(1, tensor.dtype)
            continue
        seeds[value] = _new_input(builder, value, f"{value.name}_grad")
    return seeds


def _new_input(builder: Builder, like: ir.Value, name: str) -> Tensor:
    """An input of the type and shape of another value's gradient."""
    made = gradient_value(builder.fresh_value_name(name), like)
    builder.graph.inputs.append(made)
    return builder.tensor(made)


def _add_outputs(
    builder: Builder, sources: list[ir.Value], found: dict[ir.Value, Tensor], suffix: str
) -> dict[str, str]:
    """Gives each gradient its name, and makes it an output."""
    names = {}
    taken: set[ir.Value] = {*builder.graph.inputs, *builder.graph.outputs}
    for source in sources:
        with builder.at_work(f"{source.name}_{suffix}"):
            total = whole_gradient(builder.tensor(source), found[source]).value
            producer = total.producer()
            if total in taken or producer is None or producer.op_type == "Constant" or total.is_initializer():
                total = builder.copy(builder.tensor(total)).value
        taken.add(total)
        total.name = builder.fresh_value_name(f"{source.name}_{suffix}")
        builder.graph.outputs.append(total)
        names[str(source.name)] = str(total.name)
    return names


def weights_to_inputs(graph: ir.Graph, names: Sequence[str]) -> None:
    """Makes inputs of initializers; other names are left alone."""
    for name in names:
        value = graph.initializers.pop(name, None)
        if value is None or value.is_graph_input():
            continue
        if value.const_value is not None:
            value.dtype, value.shape = value.const_value.dtype, ir.Shape(value.const_value.shape.numpy())
            value.const_value = None
        graph.inputs.append(value)
