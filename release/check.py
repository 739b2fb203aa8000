"""Checks what `make dist` has built: the wheel's platform, and that it works in empty environments of every Python.

Each environment gets the wheel and its dependencies, has no compiler, and runs the first example of the README.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
PLATFORM = "manylinux_2_28_x86_64"
EXAMPLE = re.compile(r"```python\n(.*?)```\s+```\n(.*?)```", re.S)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the packages are")
    folder = parser.parse_args().folder
    (wheel,) = folder.glob("*.whl")
    for command in (
        ["twine", "check", "--strict", *map(str, folder.iterdir())],
        ["auditwheel", "show", str(wheel)],
    ):
        print("$", *command, flush=True)
        ran = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, check=False)
        print(ran.stdout + ran.stderr)
        if ran.returncode != 0:
            return 1
    if not wheel.name.endswith(f"-py3-none-{PLATFORM}.whl") or PLATFORM not in ran.stdout.replace("\n", " "):
        print(f"{wheel.name} is not for {PLATFORM} and any Python 3")
        return 1
    (sources,) = folder.glob("*.tar.gz")
    with tarfile.open(sources) as file:
        if compiled := [name for name in file.getnames() if name.endswith((".zip", ".so"))]:
            print(f"{sources.name} has {', '.join(compiled)}, expected sources alone")
            return 1
    tried = [version for version in PYTHONS if works(version, wheel)]
    print(f"The README's first example runs in Python {', '.join(tried)}." if tried else "No Python was found.")
    return 0 if tried else 1


def works(version: str, wheel: Path) -> bool:
    """Whether there is such a Python; raises if the package does not work in it."""
    python = shutil.which(f"python{version}")
    if python is None or subprocess.run([python, "--version"], capture_output=True, check=False).returncode != 0:
        print(f"Python {version} is not here: not tried")
        return False
    code, printed = EXAMPLE.search((ROOT / "README.md").read_text(encoding="utf-8")).groups()  # type: ignore[union-attr]
    with tempfile.TemporaryDirectory() as folder:
        print(f"Python {version} …", flush=True)
        subprocess.run([python, "-m", "venv", folder], check=True)
        own = Path(folder, "bin", "python")
        without_compiler = {**os.environ, "CC": "no-compiler-here"}
        install = [own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", f"{wheel}[cpu]"]
        subprocess.run(install, check=True, env=without_compiler)
        subprocess.run([own, ROOT / "release" / "readme_files.py"], cwd=folder, check=True)
        subprocess.run([own, ROOT / "release" / "check_kernels.py"], check=True)
        found = subprocess.run([own, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
        if found.stdout != printed:
            raise SystemExit(f"Python {version}: the README's first example prints {found.stdout!r}")
    return True


if __name__ == "__main__":
    sys.exit(main())
