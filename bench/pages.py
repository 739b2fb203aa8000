"""`python -m bench.pages`: writes the tables of docs/ and README.md from bench/*.csv; --check only compares."""

import sys
from pathlib import Path

from bench import (
    building,
    cuda_training,
    first_use,
    models,
    ort_training,
    pauses,
    precision,
    report,
    results,
    sessions,
    step_files,
    threads,
    training_report,
)

ROOT = Path(__file__).resolve().parents[1]
SPEED, MODELS, README = ROOT / "docs" / "speed.md", ROOT / "docs" / "models.md", ROOT / "README.md"


def _pages() -> dict[Path, dict[str, str]]:
    """What belongs between which markers of which page."""
    training = results.read(results.TRAINING)
    return {
        README: {"training": training_report.training_short(training)},
        SPEED: {
            "training": training_report.training(training),
            "ort_training": ort_training.CONTEST.tables(results.read(results.ARTIFACTS)),
            "precision": precision.CONTEST.tables(results.read(results.PRECISION)),
            "step_files": step_files.CONTEST.tables(results.read(results.STEP_FILES)),
            "threads": threads.tables(results.read(results.THREADS)),
            "cuda_training": cuda_training.table(),
            "pauses": pauses.table(results.read(results.PAUSES)),
            "operators": report.operators(results.read(results.OPERATORS)),
            "sessions": sessions.tables(results.read(results.SESSIONS)),
            "building": building.tables(results.read(results.BUILDING)),
            "first_use": first_use.tables(results.read(results.FIRST_USE)),
        },
        MODELS: {"models": models.tables(results.read(results.MODELS))},
    }


def _with_block(text: str, name: str, words: str) -> str:
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    head, rest = text.split(begin)
    return f"{head}{begin}\n{words}\n{end}{rest.split(end)[1]}"


def stale() -> dict[Path, str]:
    """The pages that would change, and what to."""
    found = {}
    for page, blocks in _pages().items():
        text = old = page.read_text(encoding="utf-8")
        for name, words in blocks.items():
            text = _with_block(text, name, words)
        if text != old:
            found[page] = text
    return found


def write() -> None:
    for page, text in stale().items():
        page.write_text(text, encoding="utf-8")


def main() -> int:
    if "--check" not in sys.argv[1:]:
        write()
        return 0
    for page in (found := stale()):
        print(f"{page.relative_to(ROOT)} is out of date: run python -m bench.pages")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
