"""The engine: goes through a graph backwards and writes the gradient that the rules describe."""

import functools
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
from onnx import defs

from onnxgrad.graph.broadcast import sum_to_shape
from onnxgrad.graph.builder import Builder, schema_of
from onnxgrad.graph.gradients import AtPosition, sum_gradients, zero_gradient
from onnxgrad.graph.node import NodeView, captured, needed_for, subgraphs, values_read
from onnxgrad.graph.replace import move_written
from onnxgrad.graph.tensor import Tensor, may_be_float
from onnxgrad.graph.torch_export import is_detach
from onnxgrad.rules.registry import RULES, Function, Rule, nondiff, todo
from onnxgrad.schema import is_standard

QUANTIZE, DEQUANTIZE = [("", "QuantizeLinear"), ("", "DynamicQuantizeLinear")], ("", "DequantizeLinear")

CONTROL_FLOW = ("If", "Loop", "Scan")


class NoRuleError(NotImplementedError):
    """An operator on the way has no gradient rule; whoever asked for the gradient adds what else can be done."""


def rule_of(node: ir.Node) -> Rule:
    """The node's rule."""
    rule = RULES.get((_domain(node), node.op_type))
    if rule is None:
        where = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
        raise NoRuleError(f"{where} (node {node.name!r}) has no gradient rule: add one with onnxgrad.vjp")
    return rule


def inputs_with_rules(node: ir.Node) -> list[tuple[ir.Value, Function | Any, int | None]]:
    """Each input that is there, with what the rule has for it, and its number if the rule's input is variadic."""
    rule = rule_of(node)
    if rule.subgraphs is not None:
        smooth = [v for k, v in enumerate(node.inputs) if v is not None and rule.of_input(k) is not nondiff]
        return [(v, rule.subgraphs, None) for v in dict.fromkeys((*smooth, *captured(node)))]
    names, found = rule.names, []
    for k, value in enumerate(node.inputs):
        if value is None:
            continue
        at = min(k, len(names) - 1)
        variadic = _is_variadic(rule.op_type, rule.domain, at)
        if k >= len(names) and not variadic:
            break
        passes = may_be_float(value) or (rule.domain, rule.op_type) == DEQUANTIZE
        function = rule.by_input[names[at]] if passes and not is_detach(node) else nondiff
        found.append((value, function, k - at if variadic else None))
    return found


def depends_on(nodes: Sequence[ir.Node], sources: set[ir.Value]) -> set[ir.Value]:
    """Every value that a gradient can flow from to one of the sources, these included."""
    reached = set(sources)
    for node in nodes:
        if not any(v in reached for v in values_read(node)):
            continue
        known = RULES.get((_domain(node), node.op_type))
        if known is not None and known.is_zero:
            continue
        if node.op_type in CONTROL_FLOW and is_standard(node.domain):
            reached.update(_outputs_reached(node, reached))
        # An operator without a rule stops us only if the result turns out to need it.
        elif known is None or any(v in reached and f is not nondiff for v, f, _ in inputs_with_rules(node)):
            reached.update(v for v in node.outputs if _may_have_gradient(v))
    return reached


def influences(nodes: Sequence[ir.Node], results: set[ir.Value]) -> set[ir.Value]:
    """Every value whose gradient a gradient of the results can flow to, these included."""
    reached = set(results)
    for node in reversed(nodes):
        if not any(v in reached for v in node.outputs):
            continue
        if node.op_type in CONTROL_FLOW and is_standard(node.domain):
            reached.update(_inputs_reached(node, reached))
        elif (_domain(node), node.op_type) in RULES:
            reached.update(v for v, f, _ in inputs_with_rules(node) if f is not nondiff and _may_have_gradient(v))
        else:  # whoever asks for a gradient through it is told that there is no rule
            reached.update(v for v in values_read(node) if _may_have_gradient(v))
    return reached


def _outputs_reached(node: ir.Node, reached: set[ir.Value]) -> list[ir.Value]:
    """Of a node with subgraphs: the outputs that a gradient can flow from to one of these values."""
    found = []
    for graph, first_input, first_output, states in _bodies(node):
        starts = {inside for inside, v in zip(graph.inputs, node.inputs, strict=False) if v in reached}
        results = list(graph.outputs)[first_output:]
        while True:  # a state may take what it depends on to the next step
            inside = depends_on(list(graph), reached | starts)
            more = {graph.inputs[first_input + k] for k in range(states) if results[k] in inside} - starts
            if not more:
                break
            starts |= more
        found += [v for v, result in zip(node.outputs, results, strict=False) if result in inside]
    return [v for v in found if _may_have_gradient(v)]


def _inputs_reached(node: ir.Node, reached: set[ir.Value]) -> list[ir.Value]:
    """Of a node with subgraphs: the inputs, and values that they read, to which a gradient of these values can flow."""
    found: list[ir.Value | None] = []
    for graph, first_input, first_output, states in _bodies(node):
        results = list(graph.outputs)[first_output:]
        ends = {result for result, v in zip(results, node.outputs, strict=False) if v in reached}
        while True:
            inside = influences(list(graph), ends)
            more = {results[k] for k in range(states) if graph.inputs[first_input + k] in inside} - ends
            if not more:
                break
            ends |= more
        found += [v for v, given in zip(node.inputs, graph.inputs, strict=False) if given in inside]
        found += [v for v in captured(node) if v in inside]
    return [v for v in found if v is not None and _may_have_gradient(v)]


def _bodies(node: ir.Node) -> list[tuple[ir.Graph, int, int, int]]:
    """The subgraphs, at which of their inputs and outputs the states begin, and how many states there are."""
    if node.op_type == "If":
        return [(graph, 0, 0, 0) for graph in subgraphs(node)]
    body = node.attributes["body"].as_graph()
    if node.op_type == "Loop":
        return [(body, 2, 1, len(node.inputs) - 2)]
    return [(body, 0, 0, len(node.inputs) - node.attributes["num_scan_inputs"].as_int())]


def write_gradient(builder: Builder, seeds: dict[ir.Value, Tensor], wrt: Sequence[ir.Value]) -> dict[ir.Value, Tensor]:
    """Appends the nodes that compute the gradients of `wrt`, given those of the results."""
    builder.variables.update(wrt)  # training changes them, and they may be differentiated once more
    _rewrite_forward(builder, seeds, wrt)
    nodes = list(builder.graph)
    live = depends_on(nodes, set(wrt))
    useful = needed_for(nodes, set(seeds))
    parts: dict[ir.Value, list[Tensor | AtPosition]] = {value: [seed] for value, seed in seeds.items()}
    for node in reversed(nodes):
        if node not in useful or not any(v in live and v in parts for v in node.outputs):
            continue
        if not any(v in live for v in values_read(node)):  # it gives one of `wrt`, and the gradient ends there
            continue
        with builder.at_work(f"{node.name}_grad"):
            grads = [sum_gradients(builder.tensor(v), parts[v]) if v in parts else None for v in node.outputs]
            for value, total in zip(node.outputs, grads, strict=True):
                if total is not None:
                    parts[value] = [total]
            for value, part in _parts_of(builder, node, grads, live):
                parts.setdefault(value, []).append(part)
    found = {}
    for value in wrt:
        with builder.at_work(f"{value.name}_grad"):
            # Without parts, as rules on the way gave nothing, it is zero.
            of = builder.tensor(value)
            found[value] = sum_gradients(of, parts[value]) if value in parts else zero_gradient(of)
    return found


def _parts_of(
    builder: Builder, node: ir.Node, grads: list[Tensor | None], live: set[ir.Value]
) -> list[tuple[ir.Value, Tensor | AtPosition]]:
    """What a node adds to the gradients of its inputs."""
    rule = rule_of(node)
    schema = schema_of(node.op_type, _domain(node), builder.opsets) if defs.has(node.op_type, _domain(node)) else None
    view = NodeView(builder, node, schema, rule.names, grads, write_gradient)
    if rule.subgraphs is not None:
        try:
            return list(rule.subgraphs(view, [v for v, _, _ in inputs_with_rules(node) if v in live]))
        except ValueError as error:
            raise ValueError(f"gradient of {node.op_type} (node {node.name!r}): {error}") from error
    if not rule.outputs and any(g is not None for g in grads[1:]):
        k = next(k for k, g in enumerate(grads) if k and g is not None)
        raise NoRuleError(
            f"{node.op_type} (node {node.name!r}) has no rule for the gradient of its output {k}, "
            f"{node.outputs[k].name!r}: add one with onnxgrad.vjp"
        )
    found = []
    for value, function, number in inputs_with_rules(node):
        if value not in live or function is nondiff:
            continue
        if function is todo:
            raise NoRuleError(
                f"the gradient of {node.op_type} with respect to {value.name!r} is not written (node {node.name!r}): "
                "add it with onnxgrad.vjp"
            )
        try:
            part = function(grads[0], view) if number is None else function(grads[0], view, number)
        except ValueError as error:
            raise ValueError(f"gradient of {node.op_type} (node {node.name!r}): {error}") from error
        if part is None:
            continue
        target = builder.tensor(value)
        part = sum_to_shape(part, target) if rule.broadcast else part
        if not isinstance(value.type, (ir.SequenceType, ir.OptionalType)):
            _share_shape(part, target)
        found.append((value, part))
    return found


def _share_shape(g: Tensor, x: Tensor) -> None:
    """A gradient has the shape of what it is the gradient of, where inference did not find that out."""
    have, want = g.shape, x.shape
    if want is None or g.value.producer() is None or (have is not None and len(have) != len(want)):
        return
    if have is None:
        g.value.shape = ir.Shape(want)
    elif None in have:
        g.value.shape = ir.Shape([w if h is None else h for h, w in zip(have, want, strict=True)])


def _rewrite_forward(builder: Builder, seeds: dict[ir.Value, Tensor], wrt: Sequence[ir.Value]) -> None:
    """Replaces nodes by others that keep what their gradient needs, where a gradient passes."""
    nodes = list(builder.graph)
    live, useful = depends_on(nodes, set(wrt)), needed_for(nodes, set(seeds))
    rewritten = False
    for node in nodes:
        rule = RULES.get((_domain(node), node.op_type))
        if rule is None or rule.rewrite is None or node not in useful or not any(v in live for v in values_read(node)):
            continue
        schema = schema_of(node.op_type, _domain(node), builder.opsets)
        last = builder.graph[-1]
        with builder.at_work(str(node.name)):
            try:
                results = rule.rewrite(NodeView(builder, node, schema, rule.names, [], write_gradient))
            except ValueError as error:
                raise ValueError(f"gradient of {node.op_type} (node {node.name!r}): {error}") from error
        if results is not None:
            move_written(last, node)
            _put_in_place(node, results)
            for old, new in zip(node.outputs, results, strict=False):
                if new is not None and old in live:
                    live.add(new.value)  # which nodes after this one read by now
                if old in seeds and new is not None:
                    seeds[new.value] = seeds.pop(old)
            rewritten = True
    if rewritten:
        builder.graph.sort()  # the builder may have used a node that was there already, further down


def _put_in_place(node: ir.Node, results: Sequence[Tensor | None]) -> None:
    """Lets results go where a node's outputs went."""
    for old, new in zip(node.outputs, results, strict=False):
        if new is not None:
            name, is_output = old.name, old.is_graph_output()
            old.replace_all_uses_with(new.value, replace_graph_outputs=is_output)
            if is_output:
                old.name, new.value.name = f"{name}_before", name


@functools.cache
def _is_variadic(op_type: str, domain: str, at: int) -> bool:
    if not defs.has(op_type, domain):
        return False
    inputs = defs.get_schema(op_type, domain=domain).inputs
    return bool(inputs[at].option == defs.OpSchema.FormalParameterOption.Variadic)


def _may_have_gradient(value: ir.Value) -> bool:
    """Also integers, from a quantization to DequantizeLinear: the gradient is that of the numbers before rounding."""
    producer = value.producer()
    return may_be_float(value) or (
        producer is not None
        and (_domain(producer), producer.op_type) in QUANTIZE
        and any((_domain(user), user.op_type) == DEQUANTIZE for user, _ in value.uses())
    )


def _domain(node: ir.Node) -> str:
    return "" if is_standard(node.domain) else node.domain
