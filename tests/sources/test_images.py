"""Images: the pixels that torchvision gives, in the layout and numbers of the model's input, changed by seeds alone."""

import io
import pickle

import numpy as np
import pytest
import sklearn.datasets
import torch
from onnx import TensorProto
from PIL import Image
from tests.checks import raises, same_bits
from tests.sources.models import linear, pooled
from torch.nn import functional

from onnxgrad.sources import read
from onnxgrad.sources.images import AUGMENT
from onnxgrad.train import losses
from onnxgrad.train.batches import Batches

ENTROPY = losses.CrossEntropy("logits")
SIDES = [(40, 30), (30, 40), (32, 32), (17, 61)]


def photo(width, height, seed=0):
    """A smooth picture in colors."""
    noise = np.random.default_rng(seed).uniform(0, 255, (4, 4, 3)).astype(np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)


@pytest.fixture
def photos(tmp_path):
    """Four photos of two classes, of several sizes."""
    for k, sides in enumerate(SIDES):
        (tmp_path / "photos" / ["dog", "cat"][k % 2]).mkdir(parents=True, exist_ok=True)
        photo(*sides, k).save(tmp_path / "photos" / ["dog", "cat"][k % 2] / f"{k}.png")
    (tmp_path / "photos" / "cat" / "notes.txt").write_text("no picture")
    return tmp_path / "photos"


def taken(source, seed=()):
    return source.take(np.arange(len(source)), seed)


def resized(picture, size):
    """As torchvision's Resize and CenterCrop do on tensors, with antialiasing."""
    pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None].float()
    width, height = picture.size
    short = min(width, height)
    sides = (size * height // short, size * width // short)
    pixels = functional.interpolate(pixels, sides, mode="bilinear", antialias=True).round()
    top, left = round((sides[0] - size) / 2), round((sides[1] - size) / 2)
    return pixels[0, :, top : top + size, left : left + size].numpy()


def test_images_are_resized_and_normalized_as_torchvision_does(photos):
    source = read(photos, pooled(3, 16, 16), ENTROPY)
    assert source.classes == {"target": ["cat", "dog"]} and source.column("target").tolist() == [0, 0, 1, 1]
    assert source.remarks == [
        "photos: 'target' as 2 classes: 0 cat, 1 dog",
        "photos: images become 16×16 pixels, numbers normalized by 'imagenet'",
    ]
    found = taken(source)["image"]
    means, deviations = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    for image, k in zip(found, (1, 3, 0, 2), strict=True):
        expected = (resized(photo(*SIDES[k], k), 16) / 255 - means[:, None, None]) / deviations[:, None, None]
        assert np.abs(image - expected).max() < 2.5 / 255 / 0.224  # Pillow rounds in between
    assert found.dtype == np.float32


@pytest.mark.parametrize(
    "normalize, expected",
    [("0..1", (0, 1)), ("-1..1", (-1, 1)), ("0..255", (0, 255)), ("0.5,0.5,0.5/.25,.25,.25", (-2, 2))],
)
def test_the_numbers_that_stand_for_colors(tmp_path, normalize, expected):
    (tmp_path / "a").mkdir()
    Image.fromarray(np.array([[[0] * 3, [255] * 3]], np.uint8)).save(tmp_path / "a" / "a.png")
    image = taken(read(tmp_path, pooled(3, 1, 2), ENTROPY, normalize=normalize))["image"]
    np.testing.assert_allclose(image, np.broadcast_to(np.float32(expected), (1, 3, 1, 2)), atol=1e-5)


def test_layouts_types_and_channels(photos):
    plain = taken(read(photos, pooled(3, 8, 12), ENTROPY, normalize="0..255"))["image"]
    assert plain.shape == (4, 3, 8, 12)
    last = taken(read(photos, pooled(3, 8, 12, is_last=True), ENTROPY, normalize="0..255"))["image"]
    assert same_bits(last, plain.transpose(0, 2, 3, 1))
    is_bytes = pooled(3, 8, 12, dtype=TensorProto.UINT8)
    assert same_bits(taken(read(photos, is_bytes, ENTROPY))["image"], plain.astype(np.uint8))
    gray = taken(read(photos, pooled(1, 8, 12), ENTROPY))["image"]
    expected = plain.transpose(0, 2, 3, 1) @ [0.299, 0.587, 0.114] / 255
    assert gray.shape == (4, 1, 8, 12) and np.abs(gray[:, 0] - expected).max() < 0.01
    without = taken(read(photos, linear(96, 2, shape=(8, 12)), ENTROPY))["x"]
    assert same_bits(without, gray[:, 0])
    free = taken(read(photos, pooled(3), ENTROPY, image_size=(8, 12), normalize="0..255"))["image"]
    assert same_bits(free, plain)


def test_odd_files_become_what_they_show(tmp_path):
    (tmp_path / "a").mkdir()
    expected = photo(12, 8)
    upright = expected.transpose(Image.Transpose.ROTATE_90)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees to the right
    upright.save(tmp_path / "a" / "1.png", exif=exif)
    expected.convert("P", palette=Image.Palette.ADAPTIVE).save(tmp_path / "a" / "2.gif")
    Image.fromarray(np.full((8, 12), 128 * 256, np.uint16)).save(tmp_path / "a" / "3.png")
    found = taken(read(tmp_path, pooled(3, 8, 12), ENTROPY, normalize="0..255"))["image"]
    pixels = np.asarray(expected).transpose(2, 0, 1)
    assert np.abs(found[0] - pixels).max() < 1e-3
    assert np.abs(found[1] - pixels).mean() < 8
    assert np.abs(found[2] - 128).max() < 1e-3


def test_augmentation_depends_on_seed_and_example_alone(photos):
    source = read(photos, pooled(3, 16, 16), ENTROPY, augment=list(AUGMENT), normalize="0..255")
    first, second = taken(source, (1, 0)), taken(source, (1, 1))
    assert not same_bits(first["image"], second["image"]) and same_bits(first["target"], second["target"])
    backwards = source.take(np.array([3, 1]), (1, 0))
    assert same_bits(backwards["image"], first["image"][[3, 1]])
    assert same_bits(taken(source.plain(), (1, 0))["image"], taken(source.plain(), (5, 5))["image"])
    left, aside = source.split(0.5, seed=1)
    assert not same_bits(taken(left, (0,))["image"], taken(left, (1,))["image"])
    assert same_bits(taken(aside, (0,))["image"], taken(aside, (1,))["image"])
    flipped = {
        taken(read(photos, pooled(3, 16, 16), ENTROPY, augment="flip"), (k,))["image"].tobytes() for k in range(60)
    }
    assert len(flipped) == 2**4  # each of four, or not


@pytest.mark.slow
def test_workers_make_the_same_batches(photos):
    source = read(photos, pooled(3, 16, 16), ENTROPY, augment=["crop", "color"])
    alone, helped = (Batches(source, 3, seed=2, workers=k) for k in (0, 2))
    for _ in range(2):
        for one, other in zip(alone, helped, strict=True):
            assert one.keys() == other.keys() and all(same_bits(one[n], other[n]) for n in one)
    (photos / "cat" / "1.png").write_bytes(b"broken")
    with pytest.raises(
        ValueError, match=r"^read: the image '.*/cat/1\.png' cannot be read \(cannot identify image file"
    ):
        list(helped)


def test_a_broken_image_is_named(photos):
    (photos / "dog" / "0.png").write_bytes((photos / "dog" / "0.png").read_bytes()[:200])
    source = read(photos, pooled(3, 16, 16), ENTROPY)
    with pytest.raises(ValueError, match=r"^read: the image '.*/dog/0\.png' cannot be read \("):
        taken(source)


def test_a_folder_with_train_and_val(photos):
    whole = photos.parent / "whole"
    whole.mkdir()
    photos.rename(whole / "train")
    assert len(read(whole, pooled(3, 8, 8), ENTROPY)) == 4


def png(picture):
    file = io.BytesIO()
    picture.save(file, "png")
    return {"bytes": file.getvalue(), "path": "1.png"}


def test_images_in_a_parquet_file_of_the_datasets_library(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    digits = sklearn.datasets.load_digits()
    cells = [png(Image.fromarray((image * 15).astype(np.uint8))) for image in digits.images[:6]]
    table = arrow.table({"image": cells, "label": digits.target[:6]})
    names = [f"digit {k}" for k in range(10)]
    features = '{"info": {"features": {"label": {"names": %s, "_type": "ClassLabel"}, "image": {"_type": "Image"}}}}'
    note = features % str(names).replace("'", '"')
    parquet.write_table(table.replace_schema_metadata({"huggingface": note}), tmp_path / "a.parquet")
    source = read(tmp_path / "a.parquet", pooled(1, 8, 8, 10), ENTROPY, normalize="0..255")
    batch = taken(pickle.loads(pickle.dumps(source)))  # as a worker does
    np.testing.assert_allclose(batch["image"][:, 0], digits.images[:6] * 15, atol=1e-3)
    assert same_bits(batch["target"], digits.target[:6].astype(np.int64)) and source.classes == {"target": names}


@pytest.mark.parametrize(
    "how, model, sentence",
    [
        ({}, pooled(3), "holds images, whose size 'image' leaves open: say image-size 224 for example"),
        ({}, pooled(5, 8, 8), "holds images, but 'image' takes 5 channels, expected 1, 3 or 4"),
        ({"image_size": 9}, pooled(3, 8, 8), "is read with image-size [9, 9], but 'image' takes [8, 8]"),
        ({"normalize": "0..1"}, pooled(3, 8, 8, dtype=TensorProto.UINT8),
         "is for 'image', which takes bytes: leave out normalize"),
        ({}, linear(), "holds images, but the model has no input for them, of the shape [N, 3, height, width] for "
         "example: 'x'"),
        ({"length": 3}, pooled(3, 8, 8), "is a folder of images by class, which has no use for 'length'"),
    ],
)  # fmt: skip
def test_what_is_refused(photos, how, model, sentence):
    with raises(ValueError, f"read: {str(photos)!r} {sentence}"):
        read(photos, model, ENTROPY, **how)


def test_what_is_refused_of_settings_and_folders(photos):
    with raises(ValueError, "read: augment has 'flipp'; did you mean 'flip'?"):
        read(photos, pooled(3, 8, 8), ENTROPY, augment=["flipp"])
    with raises(
        ValueError,
        "read: normalize is '1,2/3,4', expected imagenet, 0..1, -1..1, 0..255, or means and deviations of 3 channels "
        "as in 0.485,0.456,0.406/0.229,0.224,0.225",
    ):
        read(photos, pooled(3, 8, 8), ENTROPY, normalize="1,2/3,4")
    with raises(
        ValueError,
        f"read: {str(photos)!r} has the class 'cat', which is not one of those to train on: 'bird', 'dog'",
    ):
        read(photos, pooled(3, 8, 8), ENTROPY, like=type("Train", (), {"classes": {"target": ["bird", "dog"]}}))
    (photos / "bird").mkdir()
    with raises(ValueError, f"read: {str(photos)!r} has no image in the folder of the class 'bird'"):
        read(photos, pooled(3, 8, 8), ENTROPY)
    nothing = photos / "bird"
    with raises(
        ValueError,
        f"read: the folder {str(nothing)!r} is neither a Hugging Face dataset nor a folder of images by class nor a "
        "folder of .npy files",
    ):
        read(nothing, pooled(3, 8, 8), ENTROPY)
