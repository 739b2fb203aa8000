"""onnxgrad ops: lists operators and rules."""

import fnmatch

import click

from onnxgrad.cli.group import command
from onnxgrad.cli.tables import show


@command
@click.argument("pattern", default="*")
@click.option("--rules", is_flag=True, help="List the operators that have a gradient rule.")
def ops(pattern: str, rules: bool) -> None:
    """List operators: onnxgrad's own, or all with a gradient.

    PATTERN selects operators by name, with wildcards.

    \b
    onnxgrad ops
    onnxgrad ops --rules 'Reduce*'
    onnxgrad ops --rules conv
    """
    from onnxgrad.cli import coverage

    if rules:
        found = [row for row in coverage.rules() if matches(row.operator, pattern)]
        heading = ["operator", "domain", "gradient for", "none for", "not written for", "notes"]
        rows = [
            [r.operator, r.domain or "ai.onnx", *(", ".join(i) for i in (r.gradient, r.none, r.unwritten)), r.notes]
            for r in found
        ]
    else:
        heading = ["operator", "call", *coverage.BACKENDS.values(), "types"]
        rows = [
            [op.name, f"onnxgrad.{op.function_name}",
             *("✓" if op.has_kernel(folder) else "–" for folder in coverage.BACKENDS),
             coverage.short_types(op)]
            for op in coverage.operators() if matches(op.name, pattern)
        ]  # fmt: skip
    if not rows:
        kind = "operator with a gradient rule" if rules else "operator of onnxgrad"
        raise ValueError(f"no {kind} matches {pattern!r}")
    show(heading, rows)


def matches(name: str, pattern: str) -> bool:
    """Whatever the case; without any of *?[ a part of the name is enough."""
    if not any(sign in pattern for sign in "*?["):
        return pattern.lower() in name.lower()
    return fnmatch.fnmatchcase(name.lower(), pattern.lower())
