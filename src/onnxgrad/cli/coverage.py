"""Coverage: operators with their kernels and types, gradient rules, and the status of each ONNX operator."""

from typing import Any, NamedTuple

from onnx import defs

from onnxgrad.op import OPERATORS, Op
from onnxgrad.schema import MICROSOFT, ML, PREVIEW, PREVIEW_TRAINING

BACKENDS = {"cpu": "CPU", "cuda": "CUDA"}  # folders of kernels, and what users call them


class RuleRow(NamedTuple):
    """What a rule does for each input of an operator."""

    operator: str
    domain: str
    gradient: list[str]  # inputs that get one
    none: list[str]  # inputs that have none: integers, comparisons, steps
    unwritten: list[str]  # inputs that have one which is not written
    notes: str


SMOOTH, NOTHING, MISSING = "smooth", "nothing to differentiate", "missing"
# Operators that opset 18 does not have: models of older opsets are converted.
CONVERTED = {"Scatter": "ScatterElements", "Upsample": "Resize"}


def standings() -> dict[tuple[str, str], str]:
    """Where every operator of every domain and opset of ONNX stands: SMOOTH, NOTHING or MISSING."""
    from onnxgrad.rules import RULES

    written = written_with_others()
    found = {}
    for key in sorted({(s.domain, s.name) for s in defs.get_all_schemas_with_history()}):
        if key[0] and not key[0].startswith("ai.onnx"):
            continue  # ours and onnxruntime's
        passes = key in written or (key in RULES and not RULES[key].is_zero)
        found[key] = SMOOTH if passes else NOTHING if key in RULES else MISSING
    return found


def written_with_others() -> dict[tuple[str, str], str]:
    """Operators without a rule of their own that are replaced by others which have some, and how."""
    from onnxgrad.passes import expand_contrib, expand_ml, expand_preview
    from onnxgrad.rules import RULES

    schemas: list[Any] = [s for s in defs.get_all_schemas() if (s.domain, s.name) not in RULES]
    found = {
        (s.domain, s.name): "By ONNX's own definition."
        for s in schemas
        if s.has_function or s.has_context_dependent_function
    }
    found |= {("", name): f"Converted to {new}." for name, new in CONVERTED.items()}
    found[ML, "ZipMap"] = "Left out: the tensor that it makes maps of is the result."
    written = {MICROSOFT: expand_contrib.FUSED, ML: expand_ml.WRITERS, PREVIEW: ["FlexAttention"]}
    found[PREVIEW_TRAINING, "Gradient"] = "The gradient that it stands for is written in its place."
    written[PREVIEW_TRAINING] = [name for name in expand_preview.WRITERS if name != "FlexAttention"]
    found |= {(domain, name): "Written with standard operators." for domain in written for name in written[domain]}
    return found


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
    """Every operator with a gradient rule, or written with others that have some; ONNX's own first, by name."""
    from onnxgrad.rules import RULES, nondiff, todo

    rows = []
    for (domain, name), rule in RULES.items():
        none = [i for i, f in rule.by_input.items() if f is nondiff]
        # A node that is rewritten leaves its gradient to what takes its place.
        unwritten = [i for i, f in rule.by_input.items() if f is todo and rule.rewrite is None]
        gradient = [i for i in rule.by_input if i not in none and i not in unwritten]
        gradient += ["what subgraphs read from outside"] if rule.subgraphs is not None else []
        rows.append(RuleRow(name, domain, gradient, none, unwritten, rule.doc))
    rows += [
        RuleRow(name, domain, ["floating-point inputs"], [], [], how)
        for (domain, name), how in written_with_others().items()
    ]
    return sorted(rows, key=lambda row: (row.domain, row.operator))
