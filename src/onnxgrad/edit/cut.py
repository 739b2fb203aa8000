"""cut(): a part of a model, between given values."""

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir
from onnx_ir.passes import common

from onnxgrad.edit.known_values import known_values, named_dims
from onnxgrad.graph.files import given_back, load
from onnxgrad.graph.suggest import suggestion
from onnxgrad.passes.draft import Draft
from onnxgrad.passes.expand_training import adopt_strays
from onnxgrad.passes.finish import drop_dead
from onnxgrad.passes.validate import validate
from onnxgrad.passes.write_gradients import bind_names, unbind_names


def cut(model: Any, outputs: str | Sequence[str], inputs: str | Sequence[str] = ()) -> Any:
    """Returns the part of a model that computes `outputs`, for example its features.

    - `model`: a path, an onnx.ModelProto or an onnx_ir.Model; it is not changed. For an onnx_ir.Model the result is one
      too.
    - `outputs`: names of values anywhere in the model.
    - `inputs`: names of values where the part begins. They become its inputs, in this order, before the inputs of the
      model that it still needs.

    The part contains only the nodes, weights, functions and inputs that it needs.
    """
    draft = Draft(load(model, "cut"), "cut").run([adopt_strays, validate, bind_names])
    cut_draft(draft, _listed(outputs), _listed(inputs))
    unbind_names(draft)
    return given_back(draft.model, model, "cut")


def cut_draft(draft: Draft, outputs: Sequence[str], inputs: Sequence[str]) -> None:
    """What cut() does to a model."""
    graph, known = draft.graph, known_values(draft)
    if not outputs:
        raise ValueError(f"{draft.caller}: outputs is empty, expected names of values in the model")
    ends = [_inside(draft, known, "outputs", name) for name in dict.fromkeys(outputs)]
    both = next((name for name in inputs if name in outputs), None)
    if both is not None:
        raise ValueError(f"{draft.caller}: {both!r} is among outputs and inputs, expected one of them")
    starts = [_input(draft, known, name) for name in dict.fromkeys(inputs)]
    for value in ends:
        value.type, value.shape = value.type or known[str(value.name)].type, named_dims(known[str(value.name)])
    graph.outputs[:] = ends
    drop_dead(draft)
    unused = next((v for v in starts if not v.uses()), None)
    if unused is not None:
        raise ValueError(f"{draft.caller}: outputs do not depend on {unused.name!r}, which inputs names")
    others = [v for v in graph.inputs if v not in starts and v.uses()]
    graph.inputs[:] = [*starts, *others]
    common.RemoveUnusedFunctionsPass()(draft.model)  # type: ignore[no-untyped-call]
    common.RemoveUnusedOpsetsPass()(draft.model)


def _listed(names: str | Sequence[str]) -> Sequence[str]:
    return [names] if isinstance(names, str) else names


def _inside(draft: Draft, known: Mapping[str, ir.Value], argument: str, name: str) -> ir.Value:
    """A value that a node of the main graph computes."""
    inside = {str(v.name): v for node in draft.graph for v in node.outputs if v.name}
    if name in inside:
        return inside[name]
    if name in known:
        kind = "input" if known[name].is_graph_input() else "initializer"
        raise ValueError(
            f"{draft.caller}: {argument} names {name!r}, which is an {kind}, expected what a node computes"
        )
    node = next((n for n in draft.graph if n.name == name), None)
    if node is not None:
        way_out = f"; did you mean its result, {node.outputs[0].name!r}?"
    elif any(v.name == name for n in draft.graph.all_nodes() for v in n.outputs):
        raise ValueError(
            f"{draft.caller}: {argument} names {name!r}, which is inside a subgraph, which cut() does not support"
        )
    else:
        way_out = suggestion(name, inside)
    raise ValueError(f"{draft.caller}: {argument} names {name!r}, which is not a value of the model{way_out}")


def _input(draft: Draft, known: Mapping[str, ir.Value], name: str) -> ir.Value:
    """An input of the graph, in the place of a value inside it."""
    graph = draft.graph
    given = next((v for v in graph.inputs if v.name == name), None)
    if given is not None:
        return given
    value = _inside(draft, known, "inputs", name)
    if known[name].type is None:
        raise ValueError(
            f"{draft.caller}: the type of {name!r} is not known, which an input needs: declare it in the "
            "model's value_info"
        )
    given = ir.Value(name=name, type=known[name].type, shape=named_dims(known[name]))
    value.name = f"{name}_cut_off"
    value.replace_all_uses_with(given, replace_graph_outputs=True)
    graph.inputs.append(given)
    return given
