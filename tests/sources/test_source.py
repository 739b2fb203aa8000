"""Sources: splits that keep classes together, weights of classes, arrays that stay in their files, and datasets."""

import json
import pickle

import numpy as np
import pytest
from sklearn.model_selection import StratifiedShuffleSplit
from sklearn.utils.class_weight import compute_class_weight
from tests.checks import raises, same_bits
from tests.sources.models import linear

from onnxgrad.sources import Arrays, balanced_weights, read
from onnxgrad.train import losses
from onnxgrad.train.batches import Batches

ENTROPY = losses.CrossEntropy("logits")
LABELS = np.repeat([0, 1, 2], [60, 30, 11])
ARRAYS = {"x": np.arange(404, dtype=np.float32).reshape(101, 4), "target": LABELS}


def test_a_split_keeps_the_shares_of_classes():
    left, aside = Arrays(ARRAYS).split(0.2, 3, "target")
    rows = np.concatenate([s.column("x")[:, 0] for s in (left, aside)])
    assert sorted(rows.tolist()) == ARRAYS["x"][:, 0].tolist()
    _, theirs = next(StratifiedShuffleSplit(1, test_size=20, random_state=0).split(LABELS, LABELS))
    assert np.bincount(aside.column("target")).tolist() == np.bincount(LABELS[theirs]).tolist() == [12, 6, 2]
    _, again = Arrays(ARRAYS).split(0.2, 3, "target")
    _, other = Arrays(ARRAYS).split(0.2, 4, "target")
    assert same_bits(aside.column("x"), again.column("x")) and not same_bits(aside.column("x"), other.column("x"))
    with raises(
        ValueError, "stratify: 'x' holds float32 of shape [101, 4], expected one class number for each example"
    ):
        Arrays(ARRAYS).split(0.2, 3, "x")
    with raises(ValueError, "0.001 of 101 examples is 0, expected at least one, and one to train on"):
        Arrays(ARRAYS).split(0.001)


def test_balanced_weights_are_those_of_scikit_learn():
    expected = compute_class_weight("balanced", classes=np.arange(3), y=LABELS)
    np.testing.assert_allclose(balanced_weights(LABELS), expected)
    with_ignored = np.append(LABELS, -100)
    np.testing.assert_allclose(balanced_weights(with_ignored, 4), [*expected, 1])


def test_mapped_arrays_stay_in_their_files(tmp_path):
    for name, array in ARRAYS.items():
        np.save(tmp_path / f"{name}.npy", array)
    np.save(tmp_path / "more.npy", LABELS)
    source = read(tmp_path, linear(), ENTROPY)
    assert source.remarks == [f"{tmp_path.name}: not used: 'more'"]
    assert all(isinstance(a.base, np.memmap) or isinstance(a, np.memmap) for a in source.arrays.values())
    expected = list(Batches(ARRAYS, 16, seed=5))
    left, aside = source.split(0.2, 3, "target")
    in_memory = Arrays(ARRAYS).split(0.2, 3, "target")
    for mine in (source, pickle.loads(pickle.dumps(source))):  # of this process, and of a worker
        for one, other in zip(Batches(mine, 16, seed=5), expected, strict=True):
            assert all(same_bits(one[n], other[n]) for n in ARRAYS)
    for mine, theirs in zip((left, aside), in_memory, strict=True):
        assert same_bits(mine.take(np.arange(len(mine)))["x"], theirs.column("x"))
    (tmp_path / "more.npy").write_bytes(b"broken")
    with pytest.raises(ValueError, match=r"^read: '.*/more\.npy' cannot be read as \.npy \("):
        read(tmp_path)


def test_datasets_on_disk(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    table = arrow.table({"x": ARRAYS["x"].tolist(), "label": LABELS})
    table = table.set_column(0, "x", table["x"].cast(arrow.list_(arrow.float32())))
    names = ["low", "middle", "high"]
    features = {
        "x": {"feature": {"dtype": "float32"}, "_type": "Sequence"},
        "label": {"names": names, "_type": "ClassLabel"},
    }
    folder = tmp_path / "set" / "train"
    folder.mkdir(parents=True)
    (tmp_path / "set" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    note = json.dumps({"info": {"features": features}})
    table = table.replace_schema_metadata({"huggingface": note})
    for k, part in enumerate((table[:70], table[70:])):
        file = arrow.OSFile(str(folder / f"data-0000{k}-of-00002.arrow"), "wb")
        with file, arrow.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(part, max_chunksize=32)
    (folder / "dataset_info.json").write_text(json.dumps({"features": features}))
    files = [{"filename": f"data-0000{k}-of-00002.arrow"} for k in range(2)]
    (folder / "state.json").write_text(json.dumps({"_data_files": files}))
    for path in (folder, tmp_path / "set"):
        source = read(path, linear(), ENTROPY)
        assert same_bits(source.column("x"), ARRAYS["x"]) and same_bits(source.column("target"), LABELS)
        assert source.classes == {"target": names}
    (folder / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(ValueError, match=r"^read: '.*/train' cannot be read as a dataset \("):
        read(folder, linear(), ENTROPY)
