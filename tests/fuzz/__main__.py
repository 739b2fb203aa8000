"""python -m tests.fuzz: random calls of every operator in guarded memory, until one ends as none must.

    --seconds N, --calls N   how long (60 seconds if neither is said)
    --seed S                 the number of the first call; the next has the next number
    --only PATTERN           operators whose name contains it

A number says all of its call, so `--seed S --calls 1 --only NAME` makes the call of a finding again.
"""

import argparse
import sys

from tests.fuzz.fuzz import report, run

EVER = 2**62


def main() -> int:
    """The exit status: 1 if there was a finding."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, help="for how long; 60 unless --calls is given")
    parser.add_argument("--calls", type=int, help="how many numbers to take")
    parser.add_argument("--seed", type=int, default=0, help="the number of the first call")
    parser.add_argument("--only", default="", help="operators whose name contains this")
    given = parser.parse_args()
    seconds = given.seconds if given.seconds is not None else 60.0 if given.calls is None else float(EVER)
    outcome = run(given.seed, seconds, EVER if given.calls is None else given.calls, given.only, print)
    print(report(outcome))
    return 1 if outcome.findings else 0


if __name__ == "__main__":
    sys.exit(main())
