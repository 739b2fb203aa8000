"""suggestion(): the name that was probably meant, for messages."""

import difflib
from collections.abc import Iterable

MOST_LISTED = 12


def suggestion(name: str, names: Iterable[str]) -> str:
    """`; did you mean 'logits'?`, or the names that exist."""
    known = list(names)
    lower = {n.lower(): n for n in reversed(known)}
    close = difflib.get_close_matches(name.lower(), lower, n=1)
    if close:
        return f"; did you mean {lower[close[0]]!r}?"
    return f"; available: {listed(known)}" if known else ""


def listed(names: Iterable[str]) -> str:
    """A few names, in quotes."""
    quoted = [repr(n) for n in names]
    more = f" and {len(quoted) - MOST_LISTED} more" if len(quoted) > MOST_LISTED else ""
    return ", ".join(quoted[:MOST_LISTED]) + more
