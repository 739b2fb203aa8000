"""The plot of a run: the loss and the metrics on validation data, over updates, as SVG, which cairosvg makes a PNG."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from onnxgrad.graph.files import replaced

WIDTH, HEIGHT = 720, 260  # of one panel
LEFT, RIGHT, TOP, BOTTOM = 70, 16, 34, 40
MOST_POINTS = 400  # of a curve: more do not show
COLOURS = ("#2563eb", "#ea580c", "#16a34a", "#9333ea", "#0891b2", "#be123c")
PALE = "#bfdbfe"
Point = tuple[float, float]


@dataclass(frozen=True)
class Curve:
    """Points to connect. A `marked` curve has a dot on each; a `pale` one stays in the background."""

    name: str
    points: Sequence[Point]
    marked: bool = False
    pale: bool = False


@dataclass(frozen=True)
class Panel:
    """Curves over one another."""

    title: str
    curves: Sequence[Curve]


def thinned(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """At most so many points, each the mean of neighbours."""
    size = -(-len(points) // most)
    if size <= 1:
        return list(points)
    chunks = [points[k : k + size] for k in range(0, len(points), size)]
    return [(sum(x for x, _ in c) / len(c), sum(y for _, y in c) / len(c)) for c in chunks]


def smoothed(points: Sequence[Point]) -> list[Point]:
    """Every loss averaged with those before it, over about a fiftieth of the run."""
    keep = 1 - 1 / max(1.0, len(points) / 50)
    found, mean, weight = [], 0.0, 0.0
    for x, y in points:
        mean, weight = keep * mean + (1 - keep) * y, keep * weight + (1 - keep)
        found.append((x, mean / weight))
    return found


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers from low to high."""
    raw = (high - low) / most
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * k for k in (1, 2, 5, 10) if unit * k >= raw * (1 - 1e-9))
    return [k * step for k in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def write_plot(path: Path, panels: Sequence[Panel], below: str = "updates") -> None:
    """Writes the plot; the file takes its name once it is complete."""
    shown = [Panel(p.title, [c for c in map(_finite, p.curves) if c.points]) for p in panels]
    drawn = svg([p for p in shown if p.curves], below).encode()
    if path.suffix == ".png":
        import cairosvg

        drawn = cairosvg.svg2png(drawn, scale=2)
    with replaced(path) as draft:
        draft.write_bytes(drawn)


def _finite(curve: Curve) -> Curve:
    points = [(x, y) for x, y in curve.points if math.isfinite(y)]
    return Curve(curve.name, points if curve.marked else thinned(points), curve.marked, curve.pale)


def svg(panels: Sequence[Panel], below: str) -> str:
    """The panels one above the other."""
    height = HEIGHT * max(1, len(panels))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="12" fill="#374151">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    for number, panel in enumerate(panels):
        lines += [f'<g transform="translate(0 {number * HEIGHT})">', *_panel(panel, _across(panels), below), "</g>"]
    return "\n".join([*lines, "</svg>", ""])


def _bounds(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    if high - low <= 1e-12 * max(abs(low), abs(high)):  # a level line
        room = abs(low) / 10 or 1.0
        return low - room, high + room
    return low, high


def _across(panels: Sequence[Panel]) -> tuple[float, float]:
    """The range of updates, the same for all panels, so that they line up."""
    return _bounds([x for p in panels for c in p.curves for x, _ in c.points])


def _panel(panel: Panel, across: tuple[float, float], below: str) -> list[str]:
    left, right = across
    low, high = _bounds([y for c in panel.curves for _, y in c.points])
    room = (high - low) / 20
    low, high = low - room, high + room

    def at(x: float, y: float) -> tuple[str, str]:
        width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
        return f"{LEFT + width * (x - left) / (right - left):.1f}", f"{TOP + height * (high - y) / (high - low):.1f}"

    lines = [f'<text x="{LEFT}" y="20" font-weight="bold">{escape(panel.title)}</text>']
    for y in ticks(low, high):
        _, down = at(left, y)
        lines.append(f'<path d="M{LEFT} {down}H{WIDTH - RIGHT}" stroke="#e5e7eb"/>')
        lines.append(f'<text x="{LEFT - 8}" y="{down}" dy="4" text-anchor="end">{y:.4g}</text>')
    for x in ticks(left, right, 8):
        place, _ = at(x, low)
        lines.append(f'<text x="{place}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{x:.6g}</text>')
    lines.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 6}" text-anchor="end">{escape(below)}</text>')
    for curve, colour in zip(panel.curves, _colours(panel), strict=True):
        way = "L".join(" ".join(at(x, y)) for x, y in curve.points)
        lines.append(f'<path d="M{way}" fill="none" stroke="{colour}" stroke-width="{1 if curve.pale else 2}"/>')
        if curve.marked or len(curve.points) == 1:
            places = (at(x, y) for x, y in curve.points)
            lines += [f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in places]
    return [*lines, *_legend(panel)]


def _colours(panel: Panel) -> list[str]:
    strong = iter(COLOURS * len(panel.curves))
    return [PALE if c.pale else next(strong) for c in panel.curves]


def _legend(panel: Panel) -> list[str]:
    """Names in the order of the curves, from the right edge."""
    lines, across = [], WIDTH - RIGHT
    for curve, colour in reversed(list(zip(panel.curves, _colours(panel), strict=True))):
        lines.append(f'<text x="{across}" y="20" text-anchor="end">{escape(curve.name)}</text>')
        across -= 7 * len(curve.name) + 8
        lines.append(f'<rect x="{across - 12}" y="15" width="12" height="3" fill="{colour}"/>')
        across -= 28
    return lines


def expect_plottable(path: Path) -> None:
    """Raises one sentence if a plot cannot be written as such a file."""
    if path.suffix not in (".svg", ".png"):
        raise ValueError(f"{str(path)!r} ends in {path.suffix!r}, expected .svg or .png for a plot")
    if path.suffix == ".png":
        try:
            import cairosvg  # noqa: F401
        except (ImportError, OSError):  # OSError: the library cairo itself is missing
            raise ValueError("a .png plot needs cairosvg: pip install cairosvg, or name an .svg file") from None
