"""What the tests leave out, counted, so that nobody takes it for tested: conftest.py prints it at the end."""

from collections import Counter

LEFT_OUT: Counter[str] = Counter()


def leave_out(what: str, count: int = 1) -> None:
    """Counts checks that cannot run here."""
    LEFT_OUT[what] += count
