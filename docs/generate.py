"""Writes docs/api.md, operators.md and rules.md, the tables of other pages and the drawings, from the code itself.

`python docs/generate.py` writes; with --check it only says, by its exit code, whether anything would change.
"""

import sys
from pathlib import Path

import click
from diagrams import drawings
from reference import api_page

from onnxgrad.cli import specs, train
from onnxgrad.cli.coverage import (
    BACKENDS,
    MISSING,
    NOTHING,
    SMOOTH,
    RuleRow,
    operators,
    rules,
    short_types,
    standings,
    type_names,
)
from onnxgrad.op import Attribute, Op
from onnxgrad.passes.expand_training import WRITERS
from onnxgrad.passes.expand_training.registry import NOT_THERE as NOT_OF_TRAINING
from onnxgrad.schema import MICROSOFT

ROOT = Path(__file__).parents[1]


def default_text(attribute: Attribute) -> str:
    return "absent" if attribute.default is None else repr(attribute.default)


def table() -> str:
    """Operators × devices × types."""
    lines = [
        f"| operator | call | {' | '.join(BACKENDS.values())} | types |",
        "|---|---|" + "---|" * len(BACKENDS) + "---|",
    ]
    for op in operators():
        marks = " | ".join("✓" if op.has_kernel(folder) else "–" for folder in BACKENDS)
        anchor = f"#{op.name.lower()}"
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
    folders = ["ops", *(folder for folder in BACKENDS if op.has_kernel(folder))]
    devices = ", ".join(name for folder, name in BACKENDS.items() if op.has_kernel(folder))
    sources = ", ".join(f"`src/onnxgrad/{folder}/{op.module}.py`" for folder in folders)
    return "\n".join([*lines, "", f"Devices: {devices}. Source: {sources}."])


HEAD = """# Operators

Generated from src/onnxgrad/ops by `make docs`. Every operator is known to onnx's checker, shape inference and, through
`onnxgrad.reference_ops()`, to `onnx.reference.ReferenceEvaluator`. `onnxgrad.<name>(…)` runs the kernel,
`onnxgrad.<name>.into(out, …)` writes into arrays you own, `onnxgrad.<name>.definition(…)` runs the plain NumPy body.
[arrays.md](arrays.md) shows it. CUDA: on tensors in a GPU's memory."""


def operators_page() -> str:
    return "\n\n".join([HEAD, table(), *(page(op) for op in operators())]) + "\n"


RULES_HEAD = """# Rules

Generated from src/onnxgrad/rules by `make docs`. Every operator of ONNX, of opset 7 and later, is in one of three
places. Gradients pass through the operators of the tables to the inputs named; inputs without a gradient are integers
or truth values, or the operator is a step function of them. Through others there is nothing to differentiate, and what
is missing comes last. `onnxgrad ops --rules` prints the same, and [the guide](guide.md#custom-rules) says how to
add a rule."""
NOTHING_HEAD = """Their results are integers, truth values, texts or steps, or do not depend on numbers. So it is with
what is drawn at random: Bernoulli gives 0 or 1, whatever the probability, and passes no gradient to it, as in PyTorch;
RandomNormalLike and RandomUniformLike read the shape of their input alone. A draw that Mul and Add scale and shift
passes gradients to what scales and shifts it; a rule of your own can pass them straight through."""


def standings_table() -> str:
    """How many operators of each domain of ONNX stand where."""
    kinds = [SMOOTH, NOTHING, MISSING]
    lines = [f"| domain | operators | {' | '.join(kinds)} |", "|---|---:|" + "---:|" * len(kinds)]
    found = standings()
    for domain in sorted({domain for domain, _ in found}):
        stand = [kind for (d, _), kind in found.items() if d == domain]
        counts = " | ".join(str(stand.count(kind)) for kind in kinds)
        lines.append(f"| {domain or 'ai.onnx'} | {len(stand)} | {counts} |")
    return "\n".join(lines)


def rule_table(rows: list[RuleRow]) -> str:
    """Operators of one domain, input by input."""
    lines = ["| operator | gradient for | none for | not written for | |", "|---|---|---|---|---|"]
    for row in rows:
        cells = [row.operator, *(", ".join(names) for names in (row.gradient, row.none, row.unwritten)), row.notes]
        lines.append(f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |")
    return "\n".join(lines)


def rules_page() -> str:
    """What gradients pass through, by domain, then what ends them."""
    known = rules()
    through = [r for r in known if r.gradient or r.unwritten]
    parts = [RULES_HEAD, standings_table()]
    for domain in sorted({r.domain for r in through}):
        parts += [f"## {domain or 'ONNX'}", rule_table([r for r in through if r.domain == domain])]
    ends = [f"{r.domain}.{r.operator}".lstrip(".") for r in known if r not in through]
    parts += ["## Nothing to differentiate", NOTHING_HEAD, ", ".join(ends) + "."]
    missing = [f"{domain}.{name}".lstrip(".") for (domain, name), kind in standings().items() if kind == MISSING]
    parts += ["## Missing", ", ".join(missing) + "." if missing else "None."]
    return "\n\n".join(parts) + "\n"


ITS_OPERATORS = ROOT / "tests" / "data" / "ort_training_operators.txt"  # those that stock onnxruntime does not have


def training_table() -> str:
    """Which of onnxruntime-training's operators there are, and how."""
    ours = {op.name for op in operators() if op.domain == MICROSOFT}
    names = sorted({*ITS_OPERATORS.read_text().split(), *WRITERS, *NOT_OF_TRAINING})
    kernels = [f"[{name}](operators.md#{name.lower()})" for name in names if name in ours]
    written = [name for name in names if name in WRITERS and name not in ours]
    lines = ["| | operators |", "|---|---|"]
    lines += [f"| with a kernel | {', '.join(kernels)} |", f"| expanded into other operators | {', '.join(written)} |"]
    missing = [name for name in names if name not in ours and name not in WRITERS]
    for reason in dict.fromkeys(NOT_OF_TRAINING[name] for name in missing):
        lines.append(
            f"| not available: {reason} | {', '.join(name for name in missing if NOT_OF_TRAINING[name] == reason)} |"
        )
    return "\n".join(lines)


def options_table() -> str:
    """What `onnxgrad train --help` says."""
    lines = ["| option | |", "|---|---|"]
    for option in train.params:
        if isinstance(option, click.Option) and (record := option.get_help_record(click.Context(train))):
            names, text = record
            escaped = names.replace("|", "\\|")
            lines.append(f"| `{escaped}` | {text} |")
    return "\n".join(lines)


def settings_table() -> str:
    """The kinds that `onnxgrad train` takes, and their settings."""
    lines = ["| option | kind | settings |", "|---|---|---|"]
    for option, kinds in specs.KINDS.items():
        first = f"`{option}`"
        for name, kind in kinds.items():
            settings = [*specs.settings_of(kind), *(["name"] if option == "--metric" else [])]
            lines.append(f"| {first} | `{name}` | {', '.join(f'`{setting}`' for setting in settings)} |")
            first = ""
    return "\n".join(lines)


def with_tables(page: Path, tables: dict[str, str]) -> str:
    """The page with each table between its two marks."""
    text = page.read_text()
    for name, table in tables.items():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        before, rest = text.split(begin)
        text = f"{before}{begin}\n{table}\n{end}{rest.split(end)[1]}"
    return text


def main() -> int:
    command_line = ROOT / "docs" / "command-line.md"
    coming = ROOT / "docs" / "from-onnxruntime-training.md"
    wanted = {
        ROOT / "docs" / "api.md": api_page(),
        ROOT / "docs" / "operators.md": operators_page(),
        ROOT / "docs" / "rules.md": rules_page(),
        command_line: with_tables(command_line, {"settings": settings_table(), "options": options_table()}),
        coming: with_tables(coming, {"gradients": training_table()}),
        **drawings(),
    }
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
