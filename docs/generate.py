"""Writes docs/operators.md and the table of operators in the README from the operators themselves.

`python docs/generate.py` writes; with --check it only says, by its exit code, whether anything would change.
"""

import sys
from pathlib import Path

import onnxgrad
from onnxgrad.op import OPERATORS, Attribute, Op

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- operators:begin -->", "<!-- operators:end -->"
BACKENDS = {"cpu": "CPU", "cuda": "CUDA"}


def devices(op: Op) -> list[str]:
    """The backends that have a kernel file for the operator."""
    return [name for folder, name in BACKENDS.items() if has_kernel(op, folder)]


def has_kernel(op: Op, backend: str) -> bool:
    return (Path(onnxgrad.__file__).parent / backend / f"{op.module}.py").exists()


def type_names(types: tuple[str, ...]) -> str:
    return ", ".join("float32" if t == "float" else "float64" if t == "double" else t for t in types)


def short_types(op: Op) -> str:
    """The element types in a few words."""
    constraint = op.outputs[0].constraint
    if len(constraint.types) > 4:
        return f"all {len(constraint.types)} fixed-size types: floats, integers, bool, complex"
    return type_names(constraint.types)


def default_text(attribute: Attribute) -> str:
    return "absent" if attribute.default is None else repr(attribute.default)


def table() -> str:
    """Operators × devices × types."""
    lines = [
        f"| operator | call | {' | '.join(BACKENDS.values())} | types |",
        "|---|---|" + "---|" * len(BACKENDS) + "---|",
    ]
    for op in OPERATORS.values():
        marks = " | ".join("✓" if has_kernel(op, folder) else "–" for folder in BACKENDS)
        anchor = f"docs/operators.md#{op.name.lower()}"
        lines.append(f"| [{op.name}]({anchor}) | `onnxgrad.{op.function_name}` | {marks} | {short_types(op)} |")
    return "\n".join(lines)


def page(op: Op) -> str:
    """The section of one operator."""
    arguments = ", ".join(i.name + ("?" if i.optional else "") for i in op.inputs)
    results = ", ".join(o.name + ("?" if o.optional else "") for o in op.outputs)
    call = f"`{op.name}({arguments}) → {results}` · domain `{op.domain}`, version {op.version}"
    lines = [f"## {op.name}", "", call, "", op.doc, "", "| | kind | type | |", "|---|---|---|---|"]
    for entry in op.inputs:
        notes = [note for note, on in (("optional", entry.optional), ("on the host", entry.constraint.on_host)) if on]
        lines.append(f"| {entry.name} | input | {entry.constraint.name} | {'; '.join(notes)} |")
    for entry in op.outputs:
        lines.append(f"| {entry.name} | output | {entry.constraint.name} | {'optional' if entry.optional else ''} |")
    for entry in op.attributes:
        kind = f"list of {entry.kind.__name__}" if entry.is_list else entry.kind.__name__
        lines.append(f"| {entry.name} | attribute | {kind} | default {default_text(entry)} |")
    constraints = {p.constraint.name: p.constraint for p in (*op.inputs, *op.outputs)}
    lines += ["", *(f"- {c.name}: {type_names(c.types)}" for c in constraints.values())]
    folders = ["ops", *(folder for folder in BACKENDS if has_kernel(op, folder))]
    sources = ", ".join(f"`src/onnxgrad/{folder}/{op.module}.py`" for folder in folders)
    return "\n".join([*lines, "", f"Devices: {', '.join(devices(op))}. Source: {sources}."])


HEAD = """# Operators

Generated from src/onnxgrad/ops by `make docs`. Every operator is known to onnx's checker, shape inference and, through
`onnxgrad.reference_ops()`, to `onnx.reference.ReferenceEvaluator`. `onnxgrad.<name>(…)` runs the kernel,
`onnxgrad.<name>.into(out, …)` writes into arrays you own, `onnxgrad.<name>.definition(…)` runs the plain NumPy body."""


def operators_page() -> str:
    return "\n\n".join([HEAD, *(page(op) for op in OPERATORS.values())]) + "\n"


def with_table(readme: str) -> str:
    before, rest = readme.split(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"


def main() -> int:
    readme = ROOT / "README.md"
    wanted = {ROOT / "docs" / "operators.md": operators_page(), readme: with_table(readme.read_text())}
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is out of date: run make docs")
        return 1 if stale else 0
    for path in stale:
        path.write_text(wanted[path])
        print(f"wrote {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
