"""What commands print: tables, types and sizes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from onnxgrad.train.progress import in_bytes

WIDE = 240  # columns where the output is not a terminal, so that lines stay whole


def plain_console() -> Console:
    """As wide as the terminal; elsewhere lines stay whole, for other programs to read."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDE)


def show(heading: Sequence[str], rows: Sequence[Sequence[str]], numbers: int = 0) -> None:
    """Prints a table whose last `numbers` columns are numbers."""
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for k, name in enumerate(heading):
        table.add_column(name, justify="right" if k >= len(heading) - numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    plain_console().print(table)


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
