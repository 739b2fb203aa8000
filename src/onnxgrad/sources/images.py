"""Images: files, or bytes of files, converted to the input of a model, with augmentation that depends on a seed."""

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrad.graph.suggest import listed, suggestion
from onnxgrad.sources.request import Field, Request
from onnxgrad.sources.source import Source
from onnxgrad.sources.table import Assembly, Table
from onnxgrad.tensor_types import Array

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # means and deviations of red, green and blue
NORMALIZE = {
    "imagenet": IMAGENET, "0..1": ((0.0,), (1.0,)), "-1..1": ((0.5,), (0.5,)), "0..255": ((0.0,), (1 / 255,)),
}  # fmt: skip
MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # Pillow's, by the number of channels
Random = np.random.Generator
Pixels = Any  # a PIL.Image.Image


@dataclass(frozen=True)
class Look:
    """What a model takes for an image: its size, where its channels are, and which numbers stand for its colors."""

    field: Field
    channels: int
    axis: int | None  # of the channels in an example; None where there is no such axis
    height: int
    width: int
    means: tuple[float, ...] | None  # None where it takes bytes
    deviations: tuple[float, ...]

    def array(self, picture: Pixels) -> Array:
        """An image of the right size as an array."""
        found: Array = np.asarray(picture)
        if self.channels > 1 and self.axis == 0:
            found = found.transpose(2, 0, 1)
        elif self.channels == 1 and self.axis is not None:
            found = np.expand_dims(found, self.axis)
        if self.means is None:
            return found
        shape = [1] * found.ndim
        if self.axis is not None:
            shape[self.axis] = -1
        factor = np.reshape([1 / (255 * d) for d in self.deviations], shape).astype(np.float32)
        offset = np.reshape([m / d for m, d in zip(self.means, self.deviations, strict=True)], shape).astype(np.float32)
        return found * factor - offset


def pillow(request: Request) -> None:
    """Raises one sentence if Pillow is not installed."""
    try:
        import PIL  # noqa: F401
    except ImportError:
        raise ImportError(f"{request.subject}: reading images needs Pillow: pip install 'onnxgrad[images]'") from None


def look_of(request: Request) -> Look:
    """What the model takes, from the one input that can be an image."""
    inputs = [f for f in request.inputs if f.shape is not None and len(f.shape) in (2, 3)]
    if len(inputs) != 1:
        found = listed(f.name for f in inputs or request.inputs)
        raise request.error(
            f"holds images, but the model has {'no input' if not inputs else 'several inputs'} for them, of the shape "
            f"[N, 3, height, width] for example: {found}"
        )
    field = inputs[0]
    shape, settings = field.shape, request.settings
    assert shape is not None
    axis = None if len(shape) == 2 else 0 if shape[0] in MODES else 2 if shape[2] in MODES else 0
    channels = 1 if axis is None else shape[axis] or 3
    if channels not in MODES:
        raise request.error(f"holds images, but {field.name!r} takes {channels} channels, expected 1, 3 or 4")
    height, width = (d for k, d in enumerate(shape) if k != axis)
    size = settings.image_size or (None, None)
    for known, given in zip((height, width), size, strict=True):
        if known is not None and given is not None and known != given:
            raise request.error(f"is read with image-size {list(size)}, but {field.name!r} takes {[height, width]}")
    height, width = height or size[0], width or size[1]
    if height is None or width is None:
        raise request.error(f"holds images, whose size {field.name!r} leaves open: say image-size 224 for example")
    means, deviations = _normalization(request, field, channels)
    return Look(field, channels, axis, height, width, means, deviations)


def _normalization(request: Request, field: Field, channels: int) -> tuple[tuple[float, ...] | None, tuple[float, ...]]:
    text = request.settings.normalize
    if field.dtype is not None and field.dtype.kind != "f":
        if field.dtype != np.uint8:
            raise request.error(f"holds images, but {field.name!r} takes {field.dtype}, expected float32 or uint8")
        if text is not None:
            raise request.error(f"is for {field.name!r}, which takes bytes: leave out normalize")
        return None, ()
    text = text or ("imagenet" if channels == 3 else "0..1")
    found = NORMALIZE.get(text) or _numbers(text)
    counts = {len(part) for part in found or ()}
    if found is None or not counts <= {1, channels} or not all(d > 0 for d in found[1]):
        raise ValueError(
            f"{request.subject}: normalize is {text!r}, expected {', '.join(NORMALIZE)}, or means and deviations of "
            f"{channels} channel{'s' * (channels > 1)} as in {IMAGENET_TEXT}"
        )
    means, deviations = (part * channels if len(part) == 1 else part for part in found)
    return means, deviations


IMAGENET_TEXT = "/".join(",".join(map(str, part)) for part in IMAGENET)


def _numbers(text: str) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    try:
        means, deviations = (tuple(map(float, part.split(","))) for part in text.split("/"))
    except ValueError:
        return None
    return means, deviations


# Augmentation, in this order.


def _crop(picture: Pixels, random: Random, look: Look) -> Pixels:
    """A random part, of 8% to 100% of the area and 3/4 to 4/3 of the shape, as torchvision's RandomResizedCrop."""
    for _ in range(10):
        area = picture.width * picture.height * random.uniform(0.08, 1)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3))) * look.width / look.height
        width, height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < width <= picture.width and 0 < height <= picture.height:
            left, top = random.integers(picture.width - width + 1), random.integers(picture.height - height + 1)
            box = (left, top, left + width, top + height)
            return picture.resize((look.width, look.height), _bilinear(), box=tuple(map(int, box)))
    return picture


def _rotate(picture: Pixels, random: Random, look: Look) -> Pixels:
    """By up to 15 degrees; what comes into view is black."""
    return picture.rotate(random.uniform(-15, 15), _bilinear())


def _flip(picture: Pixels, random: Random, look: Look) -> Pixels:
    """Left and right exchanged, in half of the cases."""
    from PIL import ImageOps

    return ImageOps.mirror(picture) if random.random() < 0.5 else picture


def _color(picture: Pixels, random: Random, look: Look) -> Pixels:
    """Brightness, contrast and saturation, by up to a fifth."""
    from PIL import ImageEnhance

    for kind in (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color):
        factor = random.uniform(0.8, 1.2)
        if picture.mode == "RGB" or kind is not ImageEnhance.Color:
            picture = kind(picture).enhance(factor)
    return picture


AUGMENT: Mapping[str, Callable[[Pixels, Random, Look], Pixels]] = {
    "crop": _crop, "rotate": _rotate, "flip": _flip, "color": _color,
}  # fmt: skip


def _bilinear() -> Any:
    from PIL import Image

    return Image.Resampling.BILINEAR


def fitted(picture: Pixels, look: Look) -> Pixels:
    """The middle of an image whose shorter side fits, as torchvision's Resize and CenterCrop."""
    width, height = look.width, look.height
    if look.width * picture.height >= look.height * picture.width:
        height = max(height, int(look.width * picture.height / picture.width))
    else:
        width = max(width, int(look.height * picture.width / picture.height))
    if (width, height) != picture.size:
        picture = picture.resize((width, height), _bilinear())
    left, top = round((width - look.width) / 2), round((height - look.height) / 2)
    if (width, height) == (look.width, look.height):
        return picture
    return picture.crop((left, top, left + look.width, top + look.height))


class Pictures:
    """Images by number: paths of files, or bytes and what is known of their names."""

    def __init__(self, places: Sequence[Any], subject: str) -> None:
        self._places, self._subject = places, subject

    def __len__(self) -> int:
        return len(self._places)

    def open(self, number: int, look: Look, times: int) -> Pixels:
        """An image, upright, in the model's colors; a larger one at least so many times the size that is needed."""
        from PIL import Image, ImageOps

        place = self._places[number]
        name, file = (str(place), place) if isinstance(place, Path) else _bytes(place, number)
        try:
            with Image.open(file) as picture:
                # A photo of many more pixels than needed is decoded at half, a quarter or an eighth of its size.
                picture.draft(None, (times * look.width, times * look.height))
                return _in_mode(ImageOps.exif_transpose(picture), MODES[look.channels])
        except FileNotFoundError:
            raise
        except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
            raise ValueError(f"{self._subject}: the image {name!r} cannot be read ({error})") from None


def _bytes(found: Any, number: int) -> tuple[str, Any]:
    """Of a cell as the `datasets` library has it."""
    name = found.get("path") or f"of example {number}"
    return name, io.BytesIO(found["bytes"]) if found.get("bytes") else Path(name)


def _in_mode(picture: Pixels, mode: str) -> Pixels:
    if picture.mode.startswith("I"):  # 16 bits of gray, which Pillow would cut off at 255
        picture = picture.convert("I").point(lambda x: x * (1 / 256)).convert("L")
    if "transparency" in picture.info and mode != "RGBA":
        picture = picture.convert("RGBA")
    return picture if picture.mode == mode else picture.convert(mode)


@dataclass(frozen=True)
class Images(Source):
    """Images, with the other columns of a batch."""

    pictures: Pictures
    look: Look
    others: Mapping[str, Array]
    augment: tuple[str, ...] = ()
    classes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    remarks: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.pictures)

    def take(self, chosen: Array, seed: Sequence[int] = ()) -> dict[str, Array]:
        arrays = [self._one(int(k), seed) for k in chosen]
        return {self.look.field.name: np.stack(arrays), **{name: a[chosen] for name, a in self.others.items()}}

    def _one(self, number: int, seed: Sequence[int]) -> Array:
        picture = self.pictures.open(number, self.look, 4 if "crop" in self.augment else 2)
        if not self.augment:
            return self.look.array(fitted(picture, self.look))
        random = np.random.default_rng([*seed, number])
        steps = [step for name, step in AUGMENT.items() if name in self.augment]
        if "crop" in self.augment:
            picture = steps.pop(0)(picture, random, self.look)
        picture = fitted(picture, self.look)
        for step in steps:
            picture = step(picture, random, self.look)
        return self.look.array(picture)

    def column(self, name: str) -> Array | None:
        return self.others.get(name)

    def plain(self) -> Source:
        return replace(self, augment=())


def images(
    request: Request, pictures: Pictures, others: Mapping[str, Array], classes: Mapping[str, Sequence[str]],
    remarks: Sequence[str],
) -> Source:  # fmt: skip
    """The source of images, and a remark on how they are read."""
    look = look_of(request)
    augment = tuple(request.settings.augment)
    for name in augment:
        if name not in AUGMENT:
            raise ValueError(f"{request.subject}: augment has {name!r}{suggestion(name, AUGMENT)}")
    how = "bytes"
    if look.means is not None:
        given = request.settings.normalize or ("imagenet" if look.channels == 3 else "0..1")
        how = f"numbers normalized by {given!r}"
    remark = f"{request.path.name}: images become {look.height}×{look.width} pixels, {how}"
    return Images(pictures, look, others, augment, classes, [*remarks, remark])


def from_pictures(table: Table, request: Request) -> Source:
    """Images in a column of a table, and targets in others."""
    pillow(request)
    assert request.fields is not None
    name = next(n for n in table.names if table.is_picture(n))
    look = look_of(request)
    assembly = Assembly(table, request)
    fields = [f for f in request.fields if f.name != look.field.name]
    made_of = assembly.choose(fields, [name])
    others = {f.name: assembly.join(f, made_of[f.name]) for f in fields}
    assembly.say_unused(made_of, [name])
    pictures = Pictures(table.pictures(name), request.subject)
    return images(request, pictures, others, assembly.classes, assembly.remarks)
