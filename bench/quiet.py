"""How much of the machine others took while we measured: two-thread work on half a machine tells nothing."""

import time

import psutil
from rich.console import Console

BUSY = "other processes used"  # how the note of a row opens that was measured in company
# Up to here it is the system's own housekeeping.
NOTICEABLE = 0.05


class Neighbours:
    """Counts, from its creation on, the processor time that neither this process nor its children used."""

    def __init__(self) -> None:
        self._start, self._others = time.perf_counter(), _seconds_of_others()

    def share(self) -> float:
        """Their part of all cores together, 0 to 1."""
        available = (time.perf_counter() - self._start) * (psutil.cpu_count() or 1)
        return max(0.0, (_seconds_of_others() - self._others) / available)

    def note(self) -> str:
        """For a row that was measured meanwhile; empty if others took next to nothing."""
        return f"{BUSY} {share:.0%} of the machine" if (share := self.share()) > NOTICEABLE else ""


def warn_if_busy(console: Console) -> None:
    """Says before measuring that something else is at work."""
    if (share := psutil.cpu_percent(interval=0.5)) > 100 * NOTICEABLE:
        console.print(f"[yellow]Something else uses {share:.0f} % of the processor: figures will be noisy.[/]")


def _seconds_of_others() -> float:
    machine = psutil.cpu_times()
    idle = machine.idle + getattr(machine, "iowait", 0.0)
    ours = psutil.Process()
    own = [process.cpu_times() for process in (ours, *ours.children(recursive=True))]
    # Children that have ended count as the time of those that waited for them.
    used = sum(t.user + t.system + getattr(t, "children_user", 0.0) + getattr(t, "children_system", 0.0) for t in own)
    return sum(machine) - getattr(machine, "guest", 0.0) - idle - used
