"""What there is: operators with their kernels and types, and gradient rules, as rows for tables."""

from typing import Any, NamedTuple

from onnxgrad.op import OPERATORS, Op

BACKENDS = {"cpu": "CPU", "cuda": "CUDA"}  # folders of kernels, and what users call them


class RuleRow(NamedTuple):
    """What a rule does for each input of an operator."""

    operator: str
    domain: str
    gradient: list[str]  # inputs that get one
    none: list[str]  # inputs that have none: integers, comparisons, steps
    unwritten: list[str]  # inputs that have one which is not written
    notes: str


def operators() -> list[Op[..., Any]]:
    """Our operators, in the order in which they were defined."""
    return list(OPERATORS.values())


def type_names(types: tuple[str, ...]) -> str:
    """Element types as NumPy calls them."""
    return ", ".join("float32" if t == "float" else "float64" if t == "double" else t for t in types)


def short_types(op: Op[..., Any]) -> str:
    """The element types in a few words."""
    constraint = op.outputs[0].constraint
    if len(constraint.types) > 4:
        return f"all {len(constraint.types)} fixed-size types: floats, integers, bool, complex"
    return type_names(constraint.types)


def rules() -> list[RuleRow]:
    """Every operator with a gradient rule, ONNX's own first, by name."""
    from onnxgrad.rules import RULES, nondiff, todo

    rows = []
    for (domain, name), rule in sorted(RULES.items()):
        none = [i for i, f in rule.by_input.items() if f is nondiff]
        # A node that is rewritten leaves its gradient to what takes its place.
        unwritten = [i for i, f in rule.by_input.items() if f is todo and rule.rewrite is None]
        gradient = [i for i in rule.by_input if i not in none and i not in unwritten]
        gradient += ["what subgraphs read from outside"] if rule.subgraphs is not None else []
        rows.append(RuleRow(name, domain, gradient, none, unwritten, rule.doc))
    return rows
