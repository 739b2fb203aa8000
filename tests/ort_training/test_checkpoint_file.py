"""Checkpoints of onnxruntime-training: 1.19.2's are read, ours come back as they were, damaged ones are named."""

import re
from pathlib import Path

import numpy as np
import pytest
from tests.ort_training.golden import CHECKPOINTS, VARIANTS, expected, folder_of

from onnxgrad.ort_training import checkpoint_file
from onnxgrad.ort_training.checkpoint_file import (
    Checkpoint,
    OptimizerGroup,
    Parameter,
    read_checkpoint,
    write_checkpoint,
)

PROPERTIES = {"epoch": 3, "rate": 0.25, "name": "digits", "none": 0, "negative": -(2**40)}


def a_checkpoint(seed=0):
    random = np.random.default_rng(seed)
    weights = {"w": random.standard_normal((3, 40)).astype(np.float32), "b": np.float32(random.standard_normal(7))}
    momenta = {n: {m: random.standard_normal(a.shape).astype(np.float32) for m in ("momentum0", "momentum1")}
               for n, a in weights.items()}  # fmt: skip
    parameters = {name: Parameter(array, True) for name, array in weights.items()}
    for dtype in (np.float64, np.int64, np.int8, np.bool_, np.float16):
        parameters[f"of {np.dtype(dtype)}"] = Parameter(np.ones((2, 9), dtype), False)
    parameters |= {"scalar": Parameter(np.float32(3)[None][0:1].reshape(()), False)}
    parameters |= {"empty": Parameter(np.zeros((0, 4), np.float32), False)}
    return Checkpoint(parameters, dict(PROPERTIES), {"group0": OptimizerGroup(12, 0.25, momenta)})


def assert_same(one, other):
    assert list(one.parameters) == list(other.parameters)
    assert (one.nominal, one.properties, one.groups.keys()) == (other.nominal, other.properties, other.groups.keys())
    for name, parameter in one.parameters.items():
        found = other.parameters[name]
        assert (parameter.requires_grad, parameter.dtype) == (found.requires_grad, found.dtype)
        if not one.nominal:
            assert_equal(parameter.data, found.data)
    for name, group in one.groups.items():
        found = other.groups[name]
        assert (group.step, group.initial_lr, group.momenta.keys()) == (
            found.step,
            found.initial_lr,
            found.momenta.keys(),
        )
        for parameter, momenta in group.momenta.items():
            for momentum, array in momenta.items():
                assert_equal(array, found.momenta[parameter][momentum])


def assert_equal(one, other):
    assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())


@pytest.mark.parametrize("large", [1, checkpoint_file.LARGE], ids=["apart", "inside"])
def test_comes_back_as_it_was(tmp_path, large):
    written = a_checkpoint()
    write_checkpoint(tmp_path / "file", written, large)
    found = read_checkpoint(tmp_path / "file")
    assert_same(written, found)
    assert found.apart == (large == 1) == (tmp_path / "file.data").exists()
    write_checkpoint(tmp_path / "again", found)  # as large files stay, this one has a second file, too
    assert_same(written, read_checkpoint(tmp_path / "again"))
    assert (tmp_path / "again.data").exists() == found.apart
    assert not list(tmp_path.glob(".*"))


def test_an_empty_one_and_a_nominal_one(tmp_path):
    write_checkpoint(tmp_path / "empty", Checkpoint())
    assert_same(Checkpoint(), read_checkpoint(tmp_path / "empty"))
    nominal = Checkpoint({"w": Parameter(None, True), "b": Parameter(None, False, dtype=np.float64)}, nominal=True)
    write_checkpoint(tmp_path / "nominal", nominal)
    found = read_checkpoint(tmp_path / "nominal")
    assert_same(nominal, found)
    assert [p.data for p in found.parameters.values()] == [None, None]


@pytest.mark.parametrize("name", VARIANTS)
def test_reads_what_generate_artifacts_wrote(name):
    """Against what 1.19.2 has trained, which is not far from it."""
    found = read_checkpoint(folder_of(name) / "checkpoint")
    after = {key.partition("/")[2]: array for key, array in expected(name).items() if key.startswith("parameter/")}
    trained = {key.partition("/")[2] for key in expected(name) if key.startswith("gradient/")}
    assert found.parameters.keys() == after.keys() and not found.groups and not found.properties
    for parameter, array in after.items():
        read = found.parameters[parameter]
        assert (read.requires_grad, read.shape, read.dtype) == (parameter in trained, array.shape, array.dtype)
        assert np.abs(read.data - array).max() < 2


def test_reads_the_state_of_an_optimizer(tmp_path):
    found = read_checkpoint(CHECKPOINTS / "saved")
    assert found.properties == PROPERTIES
    group = found.groups["group0"]
    assert group.step == 20 and group.momenta.keys() == found.parameters.keys()
    for name, parameter in found.parameters.items():
        first, second = group.momenta[name]["momentum0"], group.momenta[name]["momentum1"]
        assert first.shape == second.shape == parameter.shape and (second >= 0).all() and first.any()
    write_checkpoint(tmp_path / "again", found)
    assert_same(found, read_checkpoint(tmp_path / "again"))


def test_reads_a_nominal_one():
    found = read_checkpoint(CHECKPOINTS / "nominal")
    assert found.nominal and list(found.parameters) == ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]
    assert all(p.data is None and p.dtype == np.float32 and p.requires_grad for p in found.parameters.values())


def refusal(path):
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        read_checkpoint(path)
    text = str(caught.value)
    assert str(path) in text and "\n" not in text
    return text


def test_what_is_no_checkpoint_is_refused_by_name(tmp_path):
    assert "does not exist" in refusal(tmp_path / "nothing")
    assert "identifier ODTC" in refusal(CHECKPOINTS / "numbers.npz")
    (tmp_path / "empty").write_bytes(b"")
    assert "identifier ODTC" in refusal(tmp_path / "empty")
    write_checkpoint(tmp_path / "file", a_checkpoint(), large=1)
    (tmp_path / "file.data").write_bytes(b"abc")
    assert "is damaged" in refusal(tmp_path / "file")
    (tmp_path / "file.data").unlink()
    assert "file.data" in refusal(tmp_path / "file")


def test_a_later_version_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_file, "VERSION", 3)
    write_checkpoint(tmp_path / "file", a_checkpoint())
    assert "of version 3, expected 1 or 2" in refusal(tmp_path / "file")


def test_damage_is_one_sentence(tmp_path):
    write_checkpoint(tmp_path / "whole", a_checkpoint())
    whole = (tmp_path / "whole").read_bytes()
    path, random = tmp_path / "file", np.random.default_rng(0)
    cuts = [whole[:length] for length in range(8, len(whole), 61)]
    flips = []
    for _ in range(400):
        flipped = bytearray(whole)
        for at in random.integers(8, len(whole), 3):
            flipped[at] = random.integers(256)
        flips.append(bytes(flipped))
    refused = 0
    for damaged in cuts + flips:
        path.write_bytes(damaged)
        try:
            read_checkpoint(path)  # a number may have changed, which nothing tells
        except ValueError as error:
            assert re.fullmatch(rf"{re.escape(repr(str(path)))} is (damaged|a checkpoint of version).*", str(error))
            refused += 1
    assert refused > len(cuts)


def test_the_old_file_stays_if_the_new_one_cannot_be_written(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_checkpoint(path, a_checkpoint())
    before = path.read_bytes()

    def full(self, data):
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match=r"file' cannot be written: No space left on device"):
        write_checkpoint(path, a_checkpoint(1))
    assert path.read_bytes() == before and not list(tmp_path.glob(".*"))
