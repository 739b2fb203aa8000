"""join(): joins two models: inputs of the second read outputs of the first."""

from collections.abc import Iterator, Mapping
from typing import Any

import onnx_ir as ir

from onnxgrad.edit.known_values import known_values
from onnxgrad.graph.files import expect_weights, given_back, load
from onnxgrad.graph.head import head_of, note_head
from onnxgrad.graph.suggest import listed, suggestion
from onnxgrad.graph.tensor import Dim, dims_of
from onnxgrad.graph.torch_export import PARAMETER, PRODUCER, forget_signature, mark
from onnxgrad.passes.convert_opset import convert_to
from onnxgrad.passes.draft import Draft
from onnxgrad.passes.expand_training import adopt_strays
from onnxgrad.passes.find_parameters import find_parameters
from onnxgrad.passes.finish import drop_dead
from onnxgrad.passes.prepare import RESTORE, inline_functions
from onnxgrad.passes.validate import validate
from onnxgrad.passes.write_gradients import bind_names, unbind_names

Connections = Mapping[str, str]


def join(first: Any, second: Any, connections: Connections | None = None, *, prefix: str = "second.") -> Any:
    """Connects two models: `connections` maps outputs of the first to inputs of the second.

    - `first`, `second`: paths, onnx.ModelProtos or onnx_ir.Models; they are not changed. If the first is an
      onnx_ir.Model, so is the result.
    - `connections`: by default the only output of the first and the only input of the second.
    - `prefix`: put before names of the second model that the first uses too.

    The result has the unconnected inputs of both models, the unconnected outputs of the first, and the outputs of the
    second. It has the newer of the two opsets, and the functions and metadata of both.
    """
    one, two = (
        Draft(load(first, "join: first"), "join: first"),
        Draft(load(second, "join: second"), "join: second"),
    )
    for draft in (one, two):
        draft.run([adopt_strays, validate, bind_names])
    return given_back(joined(one, two, connections, prefix, "join"), first, "join")


def joined(one: Draft, two: Draft, connections: Connections | None, prefix: str, caller: str) -> ir.Model:
    """What join() returns, of two drafts that are used up."""
    pairs = _pairs(one.graph, two.graph, connections, caller)
    _align_opsets(one, two, caller)
    _keep_roles(one, two)
    _expect_types(known_values(one), known_values(two), pairs, caller)
    _rename_dims(one.graph, two.graph, pairs, prefix)
    renamed = _rename(one.graph, two.graph, set(pairs.values()), prefix)
    heads = [*head_of(one.model), *(renamed.get(name, name) for name in head_of(two.model))]
    _move(one.graph, two.graph, pairs)
    _merge_functions(one.model, two.model, caller)
    for ours, theirs in (
        (one.model.metadata_props, two.model.metadata_props),
        (one.graph.metadata_props, two.graph.metadata_props),
    ):
        for key, text in theirs.items():
            ours[key if ours.get(key, text) == text else f"{prefix}{key}"] = text
    if heads:
        note_head(one.model, heads)
    one.model.ir_version = max(one.model.ir_version, two.model.ir_version)
    drop_dead(one)
    unbind_names(one)
    return one.model  # type: ignore[no-any-return]


def _pairs(first: ir.Graph, second: ir.Graph, connections: Connections | None, caller: str) -> dict[str, str]:
    """Names of outputs and inputs, which exist."""
    outputs = [str(v.name) for v in first.outputs]
    inputs = [str(v.name) for v in second.inputs if v.name not in second.initializers]
    if connections is None:
        if len(outputs) != 1 or len(inputs) != 1:
            raise ValueError(
                f"{caller}: say which outputs of the first model go into which inputs of the second, as {{'a': 'b'}}: "
                f"the outputs are {listed(outputs)}, the inputs {listed(inputs)}"
            )
        return {outputs[0]: inputs[0]}
    if not connections:
        raise ValueError(f"{caller}: connections is empty, expected at least one output and the input that takes it")
    for name in connections:
        if name not in outputs:
            inner = any(v.name == name for node in first for v in node.outputs)
            way_out = "; it is inside: cut() makes outputs of values" if inner else suggestion(name, outputs)
            raise ValueError(f"{caller}: {name!r} is not an output of the first model{way_out}")
    for name in connections.values():
        if name not in inputs:
            raise ValueError(f"{caller}: {name!r} is not an input of the second model{suggestion(name, inputs)}")
    twice = next((n for n in connections.values() if list(connections.values()).count(n) > 1), None)
    if twice is not None:
        raise ValueError(f"{caller}: the input {twice!r} of the second model is connected twice")
    return dict(connections)


def _align_opsets(one: Draft, two: Draft, caller: str) -> None:
    """The newer opset of ONNX's for both; those of other domains have to agree."""
    wanted = max(draft.graph.opset_imports.get("", 1) for draft in (one, two))
    for draft in (one, two):
        if draft.graph.opset_imports.get("", wanted) < wanted:
            draft.run([inline_functions])  # which onnx does not convert
            convert_to(draft, wanted, f"the other model {wanted}")
    ours, theirs = one.graph.opset_imports, two.graph.opset_imports
    for domain, version in theirs.items():
        if ours.setdefault(domain, version) != version:
            raise ValueError(
                f"{caller}: the first model imports version {ours[domain]} of {domain!r}, the second version "
                f"{version}: convert one of them before"
            )


def _keep_roles(one: Draft, two: Draft) -> None:
    """What torch's exporters say of their weights: names of a module mean nothing beside those of another."""
    if PRODUCER not in (one.model.producer_name, two.model.producer_name):
        return
    for draft in (one, two):
        expect_weights(draft.model, draft.caller)
        draft.run([*RESTORE, find_parameters])
        for name, role in draft.roles.items():
            mark(draft.graph.initializers[name], PARAMETER if role.is_parameter else "BUFFER")
        forget_signature(draft.graph)


def _expect_types(one: Mapping[str, ir.Value], two: Mapping[str, ir.Value], pairs: Connections, caller: str) -> None:
    for output, name in pairs.items():
        given, taken = one[output], two[name]
        if given.type is not None and taken.type is not None and given.type != taken.type:
            raise ValueError(
                f"{caller}: {output!r} of the first model is {_described(given)}, {name!r} of the second takes "
                f"{_described(taken)}: a Cast has to come between"
            )
        have, want = dims_of(given), dims_of(taken)
        if have is None or want is None:
            continue
        pairs_of_dims = zip(have, want, strict=False)
        if len(have) != len(want) or any(
            isinstance(a, int) and isinstance(b, int) and a != b for a, b in pairs_of_dims
        ):
            raise ValueError(
                f"{caller}: {output!r} of the first model is {_described(given)}, {name!r} of the second takes "
                f"{_described(taken)}: expected the same shape"
            )


def _described(value: ir.Value) -> str:
    kind = "?" if value.dtype is None else value.dtype.name.lower()
    dims = dims_of(value)
    return kind if dims is None else f"{kind}[{', '.join('?' if d is None else str(d) for d in dims)}]"


def _every_value(graph: ir.Graph) -> Iterator[ir.Value]:
    for inner in (graph, *graph.subgraphs()):
        yield from inner.inputs
        yield from inner.initializers.values()
        for node in inner:
            yield from (v for v in node.outputs if v.name)


def _rename_dims(first: ir.Graph, second: ir.Graph, pairs: Connections, prefix: str) -> None:
    """Dimensions known by name: where models meet they are the first's; others of the same name are not the same."""
    outputs, inputs = ({str(v.name): v for v in values} for values in (first.outputs, second.inputs))
    names: dict[Dim, Dim] = {}
    for output, name in pairs.items():
        for ours, theirs in zip(dims_of(outputs[output]) or (), dims_of(inputs[name]) or (), strict=False):
            if isinstance(theirs, str):
                names[theirs] = names.get(theirs) or ours
    taken = {d for v in _every_value(first) for d in dims_of(v) or () if isinstance(d, str)}
    for value in dict.fromkeys(_every_value(second)):
        dims = dims_of(value)
        if dims is None or not any(isinstance(d, str) for d in dims):
            continue
        for dim in dims:
            if isinstance(dim, str):
                names.setdefault(dim, f"{prefix}{dim}" if dim in taken else dim)
        value.shape = ir.Shape(names.get(d, d) for d in dims)


def _rename(first: ir.Graph, second: ir.Graph, connected: set[str], prefix: str) -> dict[str, str]:
    """Gives the prefix to names of the second that the first has; the new ones of values."""
    taken = {str(v.name) for v in _every_value(first)}
    free = taken | {str(v.name) for v in _every_value(second)}
    renamed = {}
    for value in dict.fromkeys(_every_value(second)):
        name = str(value.name)
        if name not in taken or (value.is_graph_input() and value.graph is second and name in connected):
            continue
        new = f"{prefix}{name}"
        while new in free:
            new = f"{prefix}{new}"
        free.add(new)
        value.name = new
        renamed[name] = new
    nodes = {node.name for node in first.all_nodes()}
    for node in second.all_nodes():
        if node.name and node.name in nodes:
            node.name = f"{prefix}{node.name}"
    return renamed


def _move(first: ir.Graph, second: ir.Graph, pairs: Connections) -> None:
    """All of the second graph goes into the first."""
    outputs, inputs = {str(v.name): v for v in first.outputs}, {str(v.name): v for v in second.inputs}
    others = [v for v in first.outputs if v.name not in pairs]
    for output, name in pairs.items():
        inputs[name].replace_all_uses_with(outputs[output], replace_graph_outputs=True)
    results = list(second.outputs)
    free = [v for v in second.inputs if v.name not in pairs.values()]
    initializers, nodes = list(second.initializers.values()), list(second)
    second.outputs.clear()
    second.inputs.clear()
    second.initializers.clear()
    second.remove(nodes)
    first.inputs.extend(free)
    for value in initializers:
        first.register_initializer(value)
    first.extend(nodes)
    first.outputs[:] = [*others, *results]


def _merge_functions(one: ir.Model, two: ir.Model, caller: str) -> None:
    for key, function in two.functions.items():
        ours = one.functions.setdefault(key, function)
        if ours is not function and ir.to_proto(ours) != ir.to_proto(function):
            raise ValueError(
                f"{caller}: both models have a function {key[1]!r} of {key[0]!r}, and they differ: rename one of them"
            )
