"""`python -m onnxgrad.ort_training script.py …`, or `-m module …`: runs it with onnxgrad's onnxruntime.training."""

import runpy
import sys
from pathlib import Path

from onnxgrad.ort_training import install

USAGE = "usage: python -m onnxgrad.ort_training script.py [argument …], or -m module [argument …]"


def main() -> None:
    """Runs what the command line names, as python itself would."""
    arguments = sys.argv[1:]
    by_module = arguments[:1] == ["-m"]
    arguments = arguments[by_module:]
    if not arguments or arguments[0].startswith("-"):
        sys.exit(USAGE)
    install()
    sys.argv = arguments
    if by_module:
        sys.path.insert(0, "")
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        return
    script = Path(arguments[0])
    if not script.is_file():
        sys.exit(f"{arguments[0]!r} does not exist, expected a script\n{USAGE}")
    sys.path.insert(0, str(script.resolve().parent))
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
