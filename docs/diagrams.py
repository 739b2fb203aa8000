"""The drawings of docs/: a model on its way through training, an operator's files, and where a step's time goes.

`python docs/diagrams.py` writes them. Boxes have a fill and dark text of their own, and all else is a grey that is
readable on white and on black: pages are shown on both.
"""

import csv
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[1]
DARK, GREY = "#1f2937", "#768390"
BLUE, GREEN, ORANGE, PURPLE, STONE = "#bfdbfe", "#bbf7d0", "#fed7aa", "#ddd6fe", "#e5e7eb"
COLOURS = {
    "forward: products": "#60a5fa",
    "forward: other operators": "#bfdbfe",
    "backward: products": "#f97316",
    "backward: other operators": "#fed7aa",
    "onnxruntime between nodes": "#9ca3af",
    "batch check and AdamW": "#4ade80",
}
NETWORKS = {"gru": "GRU classifier", "transformer": "Transformer encoder", "mlp": "MLP", "cnn": "CNN"}


def svg(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    """A drawing; its title is what a screen reader says."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="13" role="img">'
    )
    tip = (
        f'<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
        f'orient="auto-start-reverse"><path d="M0 0L8 4L0 8z" fill="{GREY}"/></marker></defs>'
    )
    return "\n".join([head, f"<title>{escape(title)}</title>", tip, *parts, "</svg>"]) + "\n"


def text(x: float, y: float, words: str, colour: str = GREY, more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{colour}" {more}>{escape(words)}</text>'


def box(x: int, y: int, width: int, height: int, fill: str, title: str, *lines: str) -> str:
    """A box with a title and a line for each thing in it."""
    parts = [f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" fill="{fill}"/>']
    parts.append(text(x + 12, y + 22, title, DARK, 'font-weight="bold"'))
    parts += [text(x + 12, y + 42 + 18 * k, line, DARK, 'font-size="12"') for k, line in enumerate(lines)]
    return "\n".join(parts)


def arrow(points: str, both: bool = False) -> str:
    start = 'marker-start="url(#tip)" ' if both else ""
    return f'<path d="{points}" fill="none" stroke="{GREY}" stroke-width="1.6" {start}marker-end="url(#tip)"/>'


def training() -> str:
    """load, passes, sessions, step, export."""
    return svg(
        760,
        540,
        "How onnxgrad trains a model: it loads the file, runs passes that make a step graph and an evaluation graph, "
        "opens both in onnxruntime, repeats training steps, and exports the original model with trained weights.",
        [
            box(
                10,
                10,
                200,
                98,
                STONE,
                "model.onnx",
                "a path, a ModelProto or",
                "an onnx_ir.Model; large",
                "weights stay on disk",
            ),
            arrow("M210 58H258"),
            box(
                262,
                10,
                230,
                98,
                BLUE,
                "1  load and prepare",
                "inline functions, convert old",
                "opsets, infer shapes,",
                "find the parameters",
            ),
            arrow("M300 108V146"),
            arrow("M492 58H610V146"),
            box(
                10,
                150,
                450,
                136,
                BLUE,
                "2  step graph",
                "Dropout and BatchNormalization in train mode",
                "the loss, with an input for its target",
                "the gradient of every parameter, as rules write it",
                "parameters as inputs, gradients as outputs",
                "onnxgrad's operators where they are faster",
            ),
            box(
                480,
                150,
                270,
                136,
                BLUE,
                "2  evaluation graph",
                "inference mode",
                "the loss",
                "predictions, for metrics",
            ),
            arrow("M230 286V314"),
            arrow("M610 286V314"),
            box(
                10,
                318,
                740,
                62,
                GREEN,
                "3  two sessions of stock onnxruntime",
                "bound to the arrays of the parameters and their gradients: a step copies neither",
            ),
            arrow("M265 384V408", both=True),
            box(10, 412, 130, 42, ORANGE, "4  check batch"),
            arrow("M140 433H186"),
            box(190, 412, 150, 42, ORANGE, "run the session"),
            arrow("M340 433H386"),
            box(390, 412, 150, 42, ORANGE, "clip the gradient"),
            arrow("M540 433H586"),
            box(590, 412, 160, 42, ORANGE, "update parameters"),
            arrow("M650 454V470H75V458"),
            arrow("M715 454V486"),
            box(10, 490, 740, 42, STONE, "5  trained.onnx: the original model with trained weights"),
        ],
    )


def operator() -> str:
    """One operator's files, and what reads them."""
    return svg(
        760,
        400,
        "The files of the operator GatherGrad: ops/gather.py declares it, kernels and an ONNX function carry the same "
        "name, and calls with arrays and nodes of onnxruntime sessions run the same kernels.",
        [
            box(
                10,
                10,
                340,
                114,
                BLUE,
                "ops/gather.py",
                "@op gather_grad: its signature declares",
                "inputs, outputs, attributes and types;",
                "a shape rule, checks,",
                "and its definition in NumPy",
            ),
            arrow("M350 67H386"),
            box(
                390,
                10,
                360,
                114,
                STONE,
                "schema.py: an OpSchema for onnx",
                "checker, shape inference, ReferenceEvaluator",
                "the types that onnxruntime registers",
                "docs/operators.md",
                "what tests/ops/test_gather.py expects",
            ),
            arrow("M90 124V160"),
            arrow("M265 124V160"),
            arrow("M330 124V142H570V160"),
            box(10, 164, 160, 72, GREEN, "cpu/gather.py", "a Numba kernel", "for all cores"),
            box(185, 164, 165, 72, GREEN, "cuda/gather.py", "a Triton kernel that", "never waits for the host"),
            box(
                390,
                164,
                360,
                72,
                PURPLE,
                "functions/gather.py",
                "the operator as an ONNX function of standard",
                "operators, for runtimes without onnxgrad",
            ),
            f'<path d="M90 236V258M265 236V258M90 258H570" fill="none" stroke="{GREY}" stroke-width="1.6"/>',
            arrow("M180 258V276"),
            arrow("M570 258V276"),
            box(
                10,
                280,
                340,
                112,
                ORANGE,
                "a call: onnxgrad.gather_grad(…)",
                "checks the arguments, computes the shape of the",
                "result, allocates it, and calls the kernel of the",
                "device that the arrays are on",
            ),
            box(
                390,
                280,
                360,
                112,
                ORANGE,
                "a node: onnxgrad.session(model)",
                "the first run with new shapes: Python records the",
                "kernel's native calls as a plan; every later run:",
                "onnxruntime executes the plan without Python,",
                "on the session's own threads",
            ),
        ],
    )


def step_time() -> str:
    """Shares of a step, a bar for each network, as bench/step_profile.csv has them."""
    with (ROOT / "bench" / "step_profile.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    networks = list(dict.fromkeys(row["case"] for row in rows))
    left, width, top, pitch = 150, 590, 78, 44
    parts = []
    for k, (name, colour) in enumerate(COLOURS.items()):
        x, y = 10 + 250 * (k % 3), 14 + 24 * (k // 3)
        parts.append(f'<rect x="{x}" y="{y}" width="14" height="14" rx="3" fill="{colour}"/>')
        parts.append(text(x + 22, y + 12, name))
    for k, network in enumerate(networks):
        found = {row["side"]: float(row["best_ms"]) for row in rows if row["case"] == network}
        y, x, total = top + pitch * k, float(left), sum(found.values())
        parts.append(text(10, y + 20, NETWORKS[network], GREY, 'font-weight="bold"'))
        for name, colour in COLOURS.items():
            share = found[name] / total
            parts.append(f'<rect x="{x:.1f}" y="{y}" width="{width * share:.1f}" height="30" fill="{colour}"/>')
            if share >= 0.05:
                parts.append(text(x + width * share / 2, y + 20, f"{share:.0%}", DARK, 'text-anchor="middle"'))
            x += width * share
    return svg(760, top + pitch * len(networks), "Where the time of a training step goes, for each network.", parts)


DRAWINGS = {"training.svg": training, "operator.svg": operator, "step-time.svg": step_time}


def drawings() -> dict[Path, str]:
    """What belongs into each file."""
    return {ROOT / "docs" / name: draw() for name, draw in DRAWINGS.items()}


if __name__ == "__main__":
    for path, drawing in drawings().items():
        path.write_text(drawing, encoding="utf-8")
