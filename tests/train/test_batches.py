"""Batches: every example once in each epoch, in an order that the seed decides, from whatever holds the arrays."""

import numpy as np
import pytest
from tests.checks import raises, same_bits

from onnxgrad.train.batches import Batches

ARRAYS = {
    "x": np.arange(22, dtype=np.float32).reshape(11, 2),
    "tokens": np.arange(11, dtype=np.int32),
    "target": np.arange(11) % 3,
}
FILES = ".csv, .tsv, .jsonl, .npz, .parquet or .txt"
RAGGED = (
    "Batches: the column 'x' holds objects, lists of different lengths, or has gaps, expected numbers, the same shape "
    "for every example"
)


class Dataset:
    """As much of a Hugging Face dataset as is asked of one."""

    def __init__(self, columns):
        self._columns, self.column_names = columns, list(columns)

    def with_format(self, kind):
        assert kind == "numpy"
        return self

    def __getitem__(self, key):
        assert key == slice(None)
        return self._columns


def joined(batches):
    found = list(batches)
    return {name: np.concatenate([b[name] for b in found]) for name in found[0]}


def test_every_example_once_in_an_order_of_its_own():
    batches = Batches(ARRAYS, 4, seed=7)
    assert len(batches) == 3 and [len(b["x"]) for b in batches] == [4, 4, 3]
    batches.epoch = 0
    first, second, again = joined(batches), joined(batches), joined(Batches(ARRAYS, 4, seed=7))
    for epoch in (first, second):
        assert sorted(epoch["tokens"].tolist()) == list(range(11))
        assert same_bits(epoch["x"], ARRAYS["x"][epoch["tokens"]])  # rows stay together
    assert same_bits(first["tokens"], again["tokens"]) and not same_bits(first["tokens"], second["tokens"])
    assert not same_bits(first["tokens"], joined(Batches(ARRAYS, 4, seed=8))["tokens"])
    assert same_bits(joined(Batches(ARRAYS, 4, shuffle=False))["x"], ARRAYS["x"])


def test_the_last_batch_may_be_left_out_and_the_first_ones_too():
    batches = Batches(ARRAYS, 4, drop_last=True)
    assert len(batches) == 2 and [len(b["x"]) for b in batches] == [4, 4]
    whole = list(Batches(ARRAYS, 2, seed=1))
    rest = list(Batches(ARRAYS, 2, seed=1).starting_at(4))
    assert all(same_bits(a["tokens"], b["tokens"]) for a, b in zip(rest, whole[4:], strict=True))


def test_files(tmp_path):
    np.savez(tmp_path / "data.npz", **ARRAYS)
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    columns = {name: arrow.array(a) for name, a in ARRAYS.items() if a.ndim == 1}
    columns["x"] = arrow.array(ARRAYS["x"].tolist(), arrow.list_(arrow.float32()))
    parquet.write_table(arrow.table(columns), tmp_path / "data.parquet")
    for name in ("data.npz", "data.parquet"):
        found = joined(Batches(tmp_path / name, 4, shuffle=False))
        assert all(same_bits(found[k], a) for k, a in ARRAYS.items()), name
    ragged = arrow.table({"x": [[1.0], [2.0, 3.0]], "target": [0, 1]})
    parquet.write_table(ragged, tmp_path / "ragged.parquet")
    with raises(ValueError, RAGGED):
        Batches(tmp_path / "ragged.parquet", 1)


def test_datasets():
    found = joined(Batches(Dataset(ARRAYS), 4, shuffle=False))
    assert all(same_bits(found[k], a) for k, a in ARRAYS.items())
    with raises(ValueError, RAGGED):
        Batches(Dataset({"x": np.array([np.zeros(1), np.zeros(2)], object), "target": ARRAYS["target"][:2]}), 1)


def test_what_is_refused(tmp_path):
    with raises(ValueError, "Batches: size is 0, expected a number of examples"):
        Batches(ARRAYS, 0)
    with raises(ValueError, "Batches: data is empty, expected arrays by input name"):
        Batches({}, 2)
    with raises(ValueError, "Batches: the arrays have different numbers of examples (x: 11, y: 3)"):
        Batches({"x": ARRAYS["x"], "y": np.zeros(3)}, 2)
    with raises(
        TypeError,
        "Batches: data is a int, expected a dict of arrays, a path, a source of onnxgrad.sources or a datasets.Dataset",
    ):
        Batches(3, 2)
    with raises(FileNotFoundError, f"Batches: 'no.npz' does not exist, expected a file ({FILES}) or a folder"):
        Batches("no.npz", 2)
    (tmp_path / "data.doc").touch()
    with raises(ValueError, f"Batches: {str(tmp_path / 'data.doc')!r} ends in '.doc', expected {FILES}"):
        Batches(tmp_path / "data.doc", 2)
    with raises(ValueError, "Batches: workers is -1, expected a number of processes"):
        Batches(ARRAYS, 2, workers=-1)
    for suffix in (".npz", ".parquet"):
        for content in (b"", b"nothing of the kind", b"PK\x03\x04" + bytes(40)):
            path = tmp_path / f"bad{suffix}"
            path.write_bytes(content)
            with pytest.raises(ValueError, match=rf"^Batches: '.*' cannot be read as {suffix} \("):
                Batches(path, 2)
    (tmp_path / "bad.npz").write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match=r"cannot be read as \.npz \(it has another format\)$"):
        Batches(tmp_path / "bad.npz", 2)


def test_objects_are_refused(tmp_path):
    objects = ARRAYS["x"].astype(object)
    with raises(ValueError, RAGGED):
        Batches({**ARRAYS, "x": objects}, 4)
    with raises(ValueError, RAGGED):
        Batches({"x": [[1, 2], [3]], "target": [0, 1]}, 1)
    path = tmp_path / "train.npz"
    np.savez(path, **{**ARRAYS, "x": objects})
    with raises(
        ValueError, f"Batches: {str(path)!r} cannot be read as .npz ('x' holds Python objects, expected numbers)"
    ):
        Batches(path, 4)
