"""`python -m bench.cuda.report`: docs/cuda.md and docs/cuda.svg from bench/cuda/results.csv."""

import csv
import sys
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).with_name("results.csv")
OURS, CAPTURED, THEIRS = "#2563eb", "#93c5fd", "#9ca3af"

TEXT = """# Speed on CUDA

`python -m bench.cuda --csv bench/cuda/results.csv`, then `python -m bench.cuda.report`. Medians of triton's `do_bench`
in milliseconds, all in one run: {device}, torch {torch}, triton {triton}.

- **onnxgrad**: a call with `check=False`; **checked**: the plain call, which waits for the GPU to report an invalid
  index; **captured**: the replay of the call in a CUDA graph, without the time of Python.
- **torch**: `index_add_`, `scatter_add_`, a strided copy into zeros, cuDNN's GRU.
- **floor**: the bytes that must be moved, at the speed of a copy. Bold: slower than torch.

![Times relative to torch](cuda.svg)

| work | type | onnxgrad | checked | captured | torch | floor |
|---|---|--:|--:|--:|--:|--:|
{rows}

Where onnxgrad is far from the floor, and why:

- GatherGrad of 8,192 rows waits for Python: the GPU itself needs the time of the captured call.
- GatherGrad along the last axis looks up, for every element of dX, which elements of dY belong to it; these lookups,
  not the bytes of dX, take the time.
- GatherElementsGrad adds through the atomic units of the second-level cache, about 70 billion additions a second, as
  torch's `scatter_add_` does. The deterministic form adds integers of twice the width.

## Precision

Every kernel computes float32 and half types in float32, and rounds once. Only these kernels may use TF32, whose
products have 10 bits after the binary point, if torch allows it:

- ConvGrad, and products of matrices, where `torch.backends.cuda.matmul.allow_tf32` is True or
  `torch.backends.cuda.matmul.fp32_precision` is `"tf32"`. By default they are not. ConvGrad ignores
  `torch.backends.cudnn.allow_tf32`, torch's switch for its own convolutions, since that is on by default.
- GRUTraining and GRUGrad, as cuDNN's GRU, and all products and convolutions of a Trainer, unless
  `torch.backends.cudnn.allow_tf32` is set to False.
"""


def main() -> int:
    with RESULTS.open() as file:
        rows = list(csv.DictReader(file))
    works: dict[tuple[str, str], dict[str, dict[str, str]]] = {}
    for row in rows:
        works.setdefault((row["work"], row["dtype"]), {})[row["side"]] = row
    lines = []
    for (work, dtype), sides in works.items():
        ms = {side: float(row["ms"]) for side, row in sides.items()}
        shown = [f"{ms[s]:.3g}" if s in ms else "–" for s in ("onnxgrad", "checked", "captured", "torch")]
        if ms["onnxgrad"] > ms["torch"]:
            shown[0] = f"**{shown[0]}**"
        floor = sides["onnxgrad"]["floor_ms"]
        lines.append(f"| {work} | {dtype} | {' | '.join(shown)} | {float(floor):.3g} |" if floor else
                     f"| {work} | {dtype} | {' | '.join(shown)} | – |")  # fmt: skip
    first = rows[0]
    text = TEXT.format(device=first["device"], torch=first["torch"], triton=first["triton"], rows="\n".join(lines))
    (ROOT / "docs" / "cuda.md").write_text(text)
    plot(works)
    return 0


def plot(works: dict[tuple[str, str], dict[str, dict[str, str]]]) -> None:
    """Bars of the time relative to torch's: the line at 1 is torch."""
    labels = [f"{work}, {dtype}" for work, dtype in works]
    figure = Figure(figsize=(9, 0.26 * len(labels) + 0.8))
    axes = figure.subplots()
    for at, sides in enumerate(works.values()):
        theirs = float(sides["torch"]["ms"])
        ratio = float(sides["onnxgrad"]["ms"]) / theirs
        axes.barh(at, ratio, 0.7, color=OURS if ratio <= 1 else "#dc2626")
        axes.barh(at, float(sides["captured"]["ms"]) / theirs, 0.3, color=CAPTURED)
    axes.axvline(1, color=THEIRS)
    axes.set_yticks(range(len(labels)), labels, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("time, torch = 1 (thin bar: captured in a CUDA graph; red: slower than torch)", fontsize=8)
    axes.tick_params(axis="x", labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    # Letters stay letters, for a small file and a search in it; and the same numbers give the same file.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "onnxgrad"}):
        figure.savefig(ROOT / "docs" / "cuda.svg", metadata={"Date": None})


if __name__ == "__main__":
    sys.exit(main())
