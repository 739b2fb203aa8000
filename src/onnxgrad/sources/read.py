"""read(): reads a file or folder as inputs of a model and its loss; each kind of data is a module of kinds/."""

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from onnxgrad.sources import kinds
from onnxgrad.sources.request import Field, Request, Settings, expect_taken
from onnxgrad.sources.source import Source

VALIDATION = ("val", "valid", "validation")  # folders beside train/


class Kind:
    """A module of kinds/: `WHAT` it is, how its names end or what `is_mine` sees in a folder, and how to read it."""

    def __init__(self, module: Any) -> None:
        self.what: str = module.WHAT
        self.suffixes: tuple[str, ...] = getattr(module, "SUFFIXES", ())
        self.is_mine: Callable[[Path], bool] | None = getattr(module, "is_mine", None)
        self.takes: tuple[str, ...] = module.TAKES
        self.read: Callable[[Request], Source] = module.read


@functools.cache
def all_kinds() -> tuple[Kind, ...]:
    """One for each module, in the order of their names."""
    found = pkgutil.iter_modules(kinds.__path__)
    return tuple(Kind(importlib.import_module(f"{kinds.__name__}.{m.name}")) for m in found)


def read(
    path: str | Path,
    model: Any = None,
    loss: Any = None,
    *,
    columns: Mapping[str, str | Sequence[str]] | None = None,
    image_size: int | Sequence[int] | None = None,
    normalize: str | None = None,
    augment: Sequence[str] = (),
    tokenizer: str | Path | None = None,
    length: int | None = None,
    like: Source | None = None,
) -> Source:
    """Reads the examples of a file or folder, as a model and its loss need them.

    - `path`: a table (.csv, .tsv, .parquet, .jsonl), text (.txt), arrays (.npz, a folder of .npy), a folder of images
      by class, or a Hugging Face dataset on disk. Without a model, every column is an array.
    - `columns`: the columns of an input or target, patterns allowed: `{"x": ["width", "height"], "target": "species"}`.
    - `image_size`: height and width of images, where the model leaves them open.
    - `normalize`: "imagenet", "0..1", "-1..1", "0..255" or "mean,mean,mean/std,std,std".
    - `augment`: any of "flip", "crop", "color" and "rotate".
    - `tokenizer`: a tokenizer.json, for text; `length`: the maximum number of tokens of an example.
    - `like`: a source whose classes to use for text, that of the training data.
    """
    fields = None
    if model is not None:
        from onnxgrad.sources.fields import fields_of

        fields = fields_of(model, loss, "read")
    settings = settings_of("read", columns, image_size, normalize, augment, tokenizer, length)
    return read_source(Path(path), "read", fields, settings, {} if like is None else like.classes)


def settings_of(
    subject: str,
    columns: Mapping[str, str | Sequence[str]] | None,
    image_size: int | Sequence[int] | None,
    normalize: str | None,
    augment: Sequence[str],
    tokenizer: str | Path | None,
    length: int | None,
) -> Settings:
    """The settings, checked as far as they can be without data."""
    if columns is not None and not (isinstance(columns, Mapping) and all(map(_are_names, columns.values()))):
        raise TypeError(
            f"{subject}: columns is {columns!r}, expected names of columns by input, as in {{'x': ['width', 'height']}}"
        )
    named = {n: (c,) if isinstance(c, str) else tuple(c) for n, c in (columns or {}).items()}
    size = None
    if image_size is not None:
        size = (image_size, image_size) if isinstance(image_size, int) else tuple(image_size)
        if len(size) != 2 or not all(isinstance(d, int) and d > 0 for d in size):
            raise ValueError(
                f"{subject}: image-size is {image_size!r}, expected a number of pixels, or height and width"
            )
    if length is not None and length < 1:
        raise ValueError(f"{subject}: length is {length}, expected a number of tokens")
    augment = (augment,) if isinstance(augment, str) else tuple(augment)
    path = None if tokenizer is None else Path(tokenizer)
    return Settings(named, size, normalize, augment, path, length)  # type: ignore[arg-type]


def _are_names(names: Any) -> bool:
    return isinstance(names, str) or (isinstance(names, Sequence) and all(isinstance(name, str) for name in names))


def read_source(
    path: Path,
    subject: str,
    fields: tuple[Field, ...] | None = None,
    settings: Settings | None = None,
    classes: Mapping[str, Sequence[str]] | None = None,
) -> Source:
    """What read() does, in sentences about `subject`; a folder with train/ is the examples in there."""
    split = path / "train"
    if split.is_dir() and _kind(path) is None and _kind(split) is not None:
        path = split
    kind = _kind(path)
    if kind is None:
        raise _no_kind(path, subject)
    request = Request(path, subject, fields, settings or Settings(), classes or {})
    expect_taken(request, kind.what, kind.takes)
    return kind.read(request)


def validation_beside(path: Path) -> Path | None:
    """The folder with examples to validate with, where `path` has one beside train/."""
    if not (path / "train").is_dir():
        return None
    return next((path / name for name in VALIDATION if (path / name).is_dir()), None)


def _kind(path: Path) -> Kind | None:
    if path.is_dir():
        return next((k for k in all_kinds() if k.is_mine is not None and k.is_mine(path)), None)
    name = path.name.lower()
    return next((k for k in all_kinds() if path.is_file() and name.endswith(k.suffixes or ("/",))), None)


def _no_kind(path: Path, subject: str) -> Exception:
    suffixes = [s for kind in all_kinds() for s in kind.suffixes if not s.endswith(".gz")]
    files = f"{', '.join(suffixes[:-1])} or {suffixes[-1]}"
    if not path.exists():
        return FileNotFoundError(f"{subject}: {str(path)!r} does not exist, expected a file ({files}) or a folder")
    if path.is_dir():
        folders = [kind.what for kind in all_kinds() if kind.is_mine is not None]
        return ValueError(f"{subject}: the folder {str(path)!r} is neither {' nor '.join(folders)}")
    return ValueError(f"{subject}: {str(path)!r} ends in {path.suffix!r}, expected {files}")
