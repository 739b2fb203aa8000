"""Tables: columns become the inputs of a model and its loss, text becomes classes, and what is wrong has a line."""

import csv
import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import sklearn.datasets
from tests.checks import raises, same_bits
from tests.sources.models import linear

from onnxgrad.sources import Arrays, read
from onnxgrad.train import losses
from onnxgrad.train.batches import Batches

IRIS = sklearn.datasets.load_iris()
NAMES = ["sepal_length", "sepal_width", "petal_length", "petal_width"]
ENTROPY = losses.CrossEntropy("logits")


def write(path, rows, header=None, delimiter=","):
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "wt", newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows([header, *rows] if header else rows)
    return path


def iris_rows():
    return [[*x, IRIS.target_names[k]] for x, k in zip(IRIS.data.tolist(), IRIS.target, strict=True)]


def is_iris(source):
    assert same_bits(source.column("x"), IRIS.data.astype(source.column("x").dtype))
    return same_bits(source.column("target"), IRIS.target)


@pytest.mark.parametrize("name, delimiter", [("a.csv", ","), ("a.csv", ";"), ("a.tsv", "\t"), ("a.csv.gz", ",")])
def test_a_table_of_features_with_the_class_last_needs_no_word(tmp_path, name, delimiter):
    path = write(tmp_path / name, iris_rows(), [*NAMES, "species"], delimiter)
    source = read(path, linear(), ENTROPY)
    assert is_iris(source) and source.classes == {"target": ["setosa", "versicolor", "virginica"]}
    assert source.remarks == [
        f"{name}: 'target' is the column 'species'",
        f"{name}: 'species' as 3 classes: 0 setosa, 1 versicolor, 2 virginica",
    ]


@pytest.mark.parametrize("header", [["", *NAMES, "species"], ["0", "1", "2", "3", "species"], None])
def test_headers_of_pandas_and_none(tmp_path, header):
    numbered = header is not None and not header[0]
    rows = [[k, *row] for k, row in enumerate(iris_rows())] if numbered else iris_rows()
    assert is_iris(read(write(tmp_path / "a.csv", rows, header), linear(), ENTROPY))


def test_parquet_and_json_lines_give_the_same(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [dict(zip([*NAMES, "species"], row, strict=True)) for row in iris_rows()]
    table = arrow.Table.from_pylist(rows)
    parquet.write_table(table, tmp_path / "a.parquet")
    words = table["species"].combine_chunks().dictionary_encode()
    parquet.write_table(table.set_column(4, "species", words), tmp_path / "b.parquet")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("a.parquet", "b.parquet", "a.jsonl"):
        source = read(tmp_path / name, linear(), ENTROPY)
        assert is_iris(source) and source.classes == {"target": ["setosa", "versicolor", "virginica"]}, name


def test_numbers_alone_have_no_header_and_take_the_shape_of_the_input():
    path = Path(sklearn.datasets.__file__).parent / "data" / "digits.csv.gz"
    digits = sklearn.datasets.load_digits()
    source = read(path, linear(64, 10, "picture", (1, 8, 8)), ENTROPY)
    assert same_bits(source.column("picture"), digits.images[:, None].astype(np.int64).astype(np.float32))
    assert same_bits(source.column("target"), digits.target.astype(np.int64))
    assert source.remarks == ["digits.csv.gz: 'target' is the column 'column65'"] and not source.classes


def test_columns_are_named_where_there_are_others(tmp_path):
    rows = [[k, "red" if k % 2 else "blue", 2 * k, k % 3, 3 * k] for k in range(5)]
    path = write(tmp_path / "a.csv", rows, ["id", "color", "a", "kind", "b"])
    how = {"x": ["b", "color", "a"], "target": "kind"}
    source = read(path, linear(3), ENTROPY, columns=how)
    assert source.column("x").tolist() == [[3 * k, k % 2, 2 * k] for k in range(5)]
    assert source.column("target").tolist() == [0, 1, 2, 0, 1]
    assert source.classes == {"color": ["blue", "red"]}
    assert source.remarks == ["a.csv: 'color' as 2 classes: 0 blue, 1 red", "a.csv: not used: 'id'"]
    four = "'id', 'color', 'a', 'b'"
    named = read(path, linear(2), losses.CrossEntropy("logits", target="kind"), columns={"x": ["[ab]"]})
    assert named.column("x")[:, 1].tolist() == [0, 3, 6, 9, 12] and named.column("kind").tolist() == [0, 1, 2, 0, 1]
    with raises(
        ValueError,
        f"read: {str(path)!r} has 4 columns for 'x', which takes 2: {four}; columns={{'x': ['id', …]}} selects some",
    ):
        read(path, linear(2), losses.CrossEntropy("logits", target="kind"))
    with raises(
        ValueError, "read: columns names 'y', which is not an input of the model or the loss; available: 'x', 'target'"
    ):
        read(path, linear(2), ENTROPY, columns={"y": ["a", "b"]})


def test_a_label_is_found_wherever_it_is_and_regression_has_the_shape_of_the_output(tmp_path):
    path = write(tmp_path / "a.csv", [[k % 3, k, k + 1] for k in range(4)], ["Label", "a", "b"])
    assert read(path, linear(2), ENTROPY).column("target").tolist() == [0, 1, 2, 0]
    target = read(path, linear(2, 1), losses.MSE("logits")).column("target")
    assert target.tolist() == [[0], [1], [2], [0]]
    whole = read(path)
    assert isinstance(whole, Arrays) and list(whole.arrays) == ["Label", "a", "b"]
    assert next(iter(Batches(path, 4, shuffle=False)))["b"].tolist() == [1, 2, 3, 4]


def test_text_is_the_classes_of_the_data_to_train_on(tmp_path):
    train = read(write(tmp_path / "a.csv", iris_rows(), [*NAMES, "species"]), linear(), ENTROPY)
    few = write(tmp_path / "b.csv", iris_rows()[60:70], [*NAMES, "species"])
    assert read(few, linear(), ENTROPY, like=train).column("target").tolist() == [1] * 10
    assert read(few, linear(), ENTROPY).column("target").tolist() == [0] * 10
    with raises(
        ValueError,
        f"read: {str(tmp_path / 'a.csv')!r} has 'setosa' in the column 'species' in line 2, which is not one of the "
        "classes: 'versicolor'",
    ):
        read(tmp_path / "a.csv", linear(), ENTROPY, like=read(few, linear(), ENTROPY))


def test_classes_that_are_numbers_are_in_their_order(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(f'{{"x": [1, 2], "label": "{k}"}}\n' for k in (9, 10, 2)))
    source = read(tmp_path / "a.jsonl", linear(2), ENTROPY)
    assert source.column("target").tolist() == [1, 2, 0] and source.classes == {"target": ["2", "9", "10"]}


def test_a_target_of_a_chosen_name_is_a_column_of_that_name(tmp_path):
    path = write(tmp_path / "a.csv", iris_rows(), [*NAMES, "species"])
    with raises(
        ValueError, f"read: {str(path)!r} lacks 'specis', an input of the model or the loss; did you mean 'species'?"
    ):
        read(path, linear(), losses.CrossEntropy("logits", target="specis"))


def test_text_is_no_number_to_predict(tmp_path):
    (tmp_path / "a.csv").write_text("a,b,target\n1,2,low\n3,4,high\n5,6,middle\n")
    with raises(
        ValueError,
        f"read: {str(tmp_path / 'a.csv')!r} has text in the column 'target', 'low' in line 2, expected numbers for "
        "'target'",
    ):
        read(tmp_path / "a.csv", linear(2, 1), losses.MSE("logits"))
    (tmp_path / "a.csv").write_text("a,b,target\n1,2,yes\n3,4,no\n5,6,no\n")
    found = read(tmp_path / "a.csv", linear(2, 1), losses.BCEWithLogits("logits")).column("target")
    assert found.tolist() == [[1], [0], [0]]


GOOD = "a,b,target\n1,2,0\n"


@pytest.mark.parametrize(
    "content, sentence",
    [
        (GOOD + '"3\n4",5,1\n', r"has '3\n4' in the column 'a' in line 4, expected a number"),
        (GOOD + "3,,1\n", "has nothing in the column 'b' in line 3, expected a number"),
        (GOOD + "\n\n3,nan,1\n", "has 'nan' in the column 'b' in line 5, expected a number"),
        (GOOD + "3,4\n", "has 2 cells in line 3, expected 3"),
        (GOOD + "3,4,5,6\n", "has 4 cells in line 3, expected 3"),
        ("a,b,target\nn/a,2,0\n1,3,1\n2,4,1\n", "has 'n/a' in the column 'a' in line 2, expected a number"),
        ("a,b,target\n1,2,cat\n3,4,\n", "has nothing in the column 'target' in line 3, expected text"),
        ("a,a,target\n1,2,0\n", "has two columns 'a' in line 1"),
        ("a,target\n1,0\n", "has 1 column for 'x', which takes 2: 'a'"),
        (
            "a,b,c,target\n1,2,3,0\n",
            "has 3 columns for 'x', which takes 2: 'a', 'b', 'c'; columns={'x': ['a', …]} selects some",
        ),
        (
            "a,b\n1,2\n",
            "lacks 'target', an input of the model or the loss; available: 'a', 'b'; columns={'target': ['b']} names "
            "the column",
        ),
        ("a,b,targets,z\n1,2,0,0\n", "lacks 'target', an input of the model or the loss; did you mean 'targets'?"),
        (GOOD + '1,"2" ,0\n', "cannot be read as a table in line 3 (',' expected after '\"')"),
        ("a,b,target\n", "has no examples"),
        ("", "has no examples"),
    ],
)
def test_what_is_wrong_with_a_table_has_its_line(tmp_path, content, sentence):
    (tmp_path / "a.csv").write_text(content)
    with raises(ValueError, f"read: {str(tmp_path / 'a.csv')!r} {sentence}"):
        read(tmp_path / "a.csv", linear(2), ENTROPY)


@pytest.mark.parametrize(
    "content, sentence",
    [
        ('{"x": [1, 2], "target": 0}\n{"x": [1], "target": 0}\n', None),
        ('{"x": [1, 2], "target": 0}\n{"x": [1, 2]}\n', "lacks 'target' in line 2, which line 1 has"),
        ('{"x": [1, 2], "target": 0}\n{"x"}\n', "is not JSON in line 2 (Expecting ':' delimiter)"),
        ("[1, 2]\n", "has a list in line 1, expected an object with names"),
        (
            '{"x": [1, 2], "target": 0}\n{"x": "a", "target": 0}\n',
            "has 'a' in the column 'x' in line 2, expected a number",
        ),
    ],
)
def test_what_is_wrong_with_json_lines_has_its_line(tmp_path, content, sentence):
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    ragged = "the column 'x' holds objects, lists of different lengths, or has gaps, expected numbers, the same shape"
    expected = f"{str(path)!r} {sentence}" if sentence else f"{ragged} for every example"
    with raises(ValueError, f"read: {expected}"):
        read(path, linear(2), ENTROPY)


def test_lists_are_arrays_and_null_is_refused(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    images = np.arange(24, dtype=np.float32).reshape(3, 2, 4)
    table = arrow.table({"picture": images.tolist(), "target": [0, 1, 2]})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    source = read(tmp_path / "a.parquet", linear(8, 3, "x", (2, 4)), ENTROPY)  # the only column that is left
    assert same_bits(source.column("x").astype(np.float32), images)
    parquet.write_table(arrow.table({"x": [[1.0], [2.0]], "target": [0, None]}), tmp_path / "b.parquet")
    with raises(
        ValueError,
        f"read: {str(tmp_path / 'b.parquet')!r} has nothing in the column 'target' in example 1, expected a number",
    ):
        read(tmp_path / "b.parquet", linear(1), ENTROPY)


@pytest.mark.parametrize("columns", ["a", {"x": 3}, {"x": [3]}])
def test_columns_that_are_not_names_by_input(tmp_path, columns):
    (tmp_path / "a.csv").write_text(GOOD)
    sentence = f"read: columns is {columns!r}, expected names of columns by input, as in {{'x': ['width', 'height']}}"
    with raises(TypeError, sentence):
        read(tmp_path / "a.csv", linear(2), ENTROPY, columns=columns)
