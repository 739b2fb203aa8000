"""What commands print: tables, types and sizes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from onnxgrad.train.progress import in_bytes

TEXT, PADDING = 8, 3  # columns that text gets at least, and those between two
WIDE = 240  # columns where the output is not a terminal, so that lines stay whole


def plain_console() -> Console:
    """As wide as the terminal; elsewhere lines stay whole, for other programs to read."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDE)


def show(heading: Sequence[str], rows: Sequence[Sequence[str]], numbers: int = 0) -> None:
    """Prints a table whose last `numbers` columns are numbers, which stay whole in a narrow terminal."""
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    console, narrowest = plain_console(), 0
    for k, name in enumerate(heading):
        is_number = k >= len(heading) - numbers
        width = max(map(len, (*name.split(), *(row[k] for row in rows)))) if is_number else None
        narrowest += (width or TEXT) + PADDING
        table.add_column(name, justify="right" if is_number else "left", overflow="fold", min_width=width)
    for row in rows:
        table.add_row(*map(Text, row))
    console.width = max(console.width, narrowest)
    console.print(table)


def described(value: Any) -> str:
    """Type and shape of a value of a graph."""
    kind = value.dtype.numpy().name if value.dtype is not None else "?"
    if value.shape is None:
        return f"{kind}[…]"
    return f"{kind}[{', '.join('?' if not isinstance(d, int) and d.value is None else str(d) for d in value.shape)}]"


def size(path: Path) -> str:
    """Of a file, in a few letters; a file of weights that stays may be missing."""
    if not path.exists():
        return "(not there)"
    return in_bytes(path.stat().st_size)
