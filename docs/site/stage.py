"""Puts the pages of docs/, the README and the examples into one folder, with links that lead to each other there.

python docs/site/stage.py FOLDER
"""

import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
ALSO = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md",
        "release/README.md": "releasing.md"}  # fmt: skip
LANGUAGES = {".py": "python", ".mjs": "javascript", ".html": "html"}
LINK = re.compile(r"(\]\()(?!https?://|#)([^)#\s]+)(#[^)\s]*)?\)")
# A heading for each part of the list of pages at the side; every page is in one.
PARTS = {
    "Training": ("getting-started", "command-line", "fine-tuning", "data", "pytorch", "anywhere", "scale",
                 "from-onnxruntime-training"),
    "Gradients": ("guide",),
    "Reference": ("api", "arrays", "operators", "rules", "glossary", "limits"),
    "Evidence": ("speed", "cuda", "models", "standard-cases", "gallery"),
    "Inside": ("layout", "contributing", "releasing", "changelog"),
}  # fmt: skip


def main() -> None:
    folder = Path(sys.argv[1])
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path in DOCS.iterdir():
        if path.suffix == ".md":
            write(folder / path.name, path.read_text(encoding="utf-8"), DOCS)
        elif path.suffix in (".svg", ".png"):
            shutil.copy(path, folder)
    for name, page in ALSO.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        write(folder / page, text + (contents(folder) if page == "index.md" else ""), (ROOT / name).parent)
    for path in sorted((ROOT / "examples").rglob("*")):
        if path.suffix in LANGUAGES or path.is_dir():
            show(path, folder / f"{path.relative_to(ROOT)}.md")


def show(path: Path, page: Path) -> None:
    """A page with the code of an example, or with the list of a folder."""
    page.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        files = sorted(p.name for p in path.iterdir() if p.suffix in LANGUAGES)
        text = "\n".join(f"- [{name}]({path.name}/{name}.md)" for name in files)
    else:
        text = f"``````{LANGUAGES[path.suffix]}\n{path.read_text(encoding='utf-8')}\n``````"
    page.write_text(f"---\norphan: true\n---\n# {path.relative_to(ROOT)}\n\n{text}\n", encoding="utf-8")


def write(page: Path, text: str, home: Path) -> None:
    """A page, its links led from where it was to where everything is now."""

    def led(found: re.Match[str]) -> str:
        target = (home / found[2]).resolve()
        name = str(target.relative_to(ROOT))
        place = ALSO.get(name) or (target.name if target.parent == DOCS else name)
        if name.startswith("examples"):
            place = f"{name}.md"
        return f"{found[1]}{place}{found[3] or ''})"

    page.write_text(LINK.sub(led, text), encoding="utf-8")


def contents(folder: Path) -> str:
    """The list of pages at the side."""
    here = {path.stem for path in folder.glob("*.md")} | {Path(page).stem for page in ALSO.values()} - {"index"}
    listed = {page for pages in PARTS.values() for page in pages}
    if here - listed - {"index"}:
        raise SystemExit(f"{', '.join(sorted(here - listed))}: in no part of docs/site/stage.py's PARTS")
    parts = []
    for part, pages in PARTS.items():
        lines = "\n".join(page for page in pages if page in here)
        parts.append(f"\n```{{toctree}}\n:hidden:\n:caption: {part}\n\n{lines}\n```\n")
    return "".join(parts)


if __name__ == "__main__":
    main()
