"""Images by class: a folder for each class, as in photos/cat/1.png."""

from pathlib import Path

import numpy as np

from onnxgrad.graph.suggest import listed
from onnxgrad.sources.images import Pictures, images, pillow
from onnxgrad.sources.request import Request
from onnxgrad.sources.source import Source
from onnxgrad.sources.table import classes_told, in_order

WHAT = "a folder of images by class"
TAKES = ("image_size", "normalize", "augment")
ENDINGS = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"}


def is_mine(folder: Path) -> bool:
    """Whether it has folders with images."""
    return any(_is_picture(file) for inner in _folders(folder) for file in inner.iterdir())


def read(request: Request) -> Source:
    """The images of all classes; a model is what says how they are read."""
    pillow(request)
    if request.fields is None:
        raise request.error("is a folder of images, which needs a model: onnxgrad.sources.read(…, model, loss)")
    by_class = {folder.name: _pictures(folder) for folder in _folders(request.path)}
    empty = next((name for name, found in by_class.items() if not found), None)
    if empty is not None:
        raise request.error(f"has no image in the folder of the class {empty!r}")
    if len(request.targets) != 1:
        found = listed(f.name for f in request.targets) or "none"
        raise request.error(f"has the class of each image, for the one target of a loss, but there are: {found}")
    name = request.targets[0].name
    known = request.classes.get(name)
    names = list(known) if known is not None else in_order(by_class)
    unknown = next((c for c in by_class if c not in names), None)
    if unknown is not None:
        raise request.error(f"has the class {unknown!r}, which is not one of those to train on: {listed(names)}")
    files = [file for found in by_class.values() for file in found]
    labels = np.array([names.index(c) for c, found in by_class.items() for _ in found], np.int64)
    remarks = [] if known is not None else [f"{request.path.name}: {classes_told(name, names)}"]
    return images(request, Pictures(files, request.subject), {name: labels}, {name: names}, remarks)


def _folders(folder: Path) -> list[Path]:
    return sorted(f for f in folder.iterdir() if f.is_dir() and not f.name.startswith("."))


def _pictures(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if _is_picture(file))


def _is_picture(file: Path) -> bool:
    return file.suffix.lower() in ENDINGS and not file.name.startswith(".")
