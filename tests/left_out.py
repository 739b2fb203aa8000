"""What the tests leave out, counted, so that nobody takes it for tested: conftest.py prints it at the end."""

from collections import Counter

LEFT_OUT: Counter[str] = Counter()
# On the CPU, in a run of everything; a check that falls away does not go unnoticed.
MOST_LEFT_OUT = 32


def leave_out(what: str, count: int = 1) -> None:
    """Counts checks that cannot run here."""
    LEFT_OUT[what] += count
