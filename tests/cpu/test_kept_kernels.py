"""Kernels that a machine keeps: whole files, read by those they are made for; what cannot be kept stops nobody."""

import pytest
from numba import types
from numba.core import config

from onnxgrad.cpu.core import kept_kernels
from onnxgrad.cpu.core.kept_kernels import KeptKernels

FLOATS, DOUBLES = (types.float32,), (types.float64,)


@pytest.fixture
def kept(monkeypatch, tmp_path):
    monkeypatch.setattr(kept_kernels, "_folder_for", lambda function: tmp_path / "cache")
    kept_kernels._warn.cache_clear()

    def kernel():
        pass

    yield KeptKernels(f"{__name__}.<lambda>-1[32]", kernel)
    kept_kernels._warn.cache_clear()


def test_what_was_written_is_read(kept):
    assert kept.read(FLOATS) is None and not kept.has(FLOATS)
    kept.write(FLOATS, ["code"])
    assert kept.read(FLOATS) == ["code"] and kept.has(FLOATS)
    assert kept.read(DOUBLES) is None
    kept.write(FLOATS, ["newer"])
    assert kept.read(FLOATS) == ["newer"]
    (file,) = kept.folder.iterdir()
    assert file.name.startswith("test_kept_kernels.lambda-1[32].")


def test_each_kernel_has_a_file_of_its_own(kept):
    """Where processes number their files, two that write at a time give one number to two kernels."""
    for types_of_arguments in (FLOATS, DOUBLES):
        kept.write(types_of_arguments, types_of_arguments)
    assert len([*kept.folder.iterdir()]) == 2
    assert kept.read(FLOATS) == FLOATS and kept.read(DOUBLES) == DOUBLES


@pytest.mark.parametrize("damage", [lambda c: c[:-1], lambda c: c[:20], lambda c: b"", lambda c: c[:-1] + b"x"])
def test_a_damaged_file_is_not_there(kept, damage):
    kept.write(FLOATS, ["code"])
    (file,) = kept.folder.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    assert kept.read(FLOATS) is None and not kept.has(FLOATS)


def test_kernels_of_other_sources_are_stale(kept, monkeypatch):
    kept.write(FLOATS, ["code"])
    monkeypatch.setattr(kept_kernels, "_stamp", lambda: b"others")
    assert kept.read(FLOATS) is None
    kept.write(FLOATS, ["newer"])
    assert kept.read(FLOATS) == ["newer"]
    assert len([*kept.folder.iterdir()]) == 1


def test_a_disk_without_room_is_told_once(kept, monkeypatch):
    def fail(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kept_kernels.Path, "write_bytes", fail)
    with pytest.warns(RuntimeWarning) as told:
        kept.write(FLOATS, ["code"])
        kept.write(DOUBLES, ["code"])
    assert [str(warning.message) for warning in told] == [
        f"compiled kernels cannot be kept in {str(kept.folder)!r} (No space left on device), so that later processes "
        "compile them again: NUMBA_CACHE_DIR may name a folder that can be written to and has room"
    ]
    assert [*kept.folder.iterdir()] == []  # no half a file


def test_no_folder_at_all_is_told_once(monkeypatch):
    def refuse(function):
        raise RuntimeError("cannot cache function: no locator available")

    monkeypatch.setattr(kept_kernels, "FunctionCache", refuse)
    kept_kernels._warn.cache_clear()
    nowhere = [KeptKernels(f"{__name__}.kernel-{line}", refuse) for line in (1, 2)]  # all may be shipped: no warning
    with pytest.warns(RuntimeWarning, match=r"cannot be kept anywhere, neither beside the package nor in") as told:
        for kept in nowhere:
            kept.write(FLOATS, ["code"])
            assert kept.read(FLOATS) is None
    assert len(told) == 1
    kept_kernels._warn.cache_clear()


@pytest.mark.parametrize(("readable", "found"), [("first", True), ("beside", True), ("last", True), ("other", False)])
def test_kernels_of_folders_that_others_write_are_read(monkeypatch, tmp_path, readable, found):
    """In the order of Numba's; this user can write to the last one alone."""
    source = tmp_path / "source"
    exec(compile("def kernel(): pass", source / "module.py", "exec"), namespace := {"__name__": "module"})
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path / "cache"))
    first = tmp_path / "cache" / kept_kernels._CacheLocator.get_suitable_cache_subpath(str(source / "module.py"))
    folders = {"first": first, "beside": source / "__pycache__", "last": tmp_path / "user", "other": tmp_path / "other"}
    for own, name in ((folders[readable], readable), (folders["last"], "last")):
        monkeypatch.setattr(kept_kernels, "_folder_for", lambda function, own=own: own)
        kept = KeptKernels("module.kernel-1", namespace["kernel"])
        if name == readable:
            kept.write(FLOATS, ["code"])
    assert kept.folder == folders["last"]
    assert kept.has(FLOATS) is found and kept.read(FLOATS) == (["code"] if found else None)


def test_folders_after_the_own_one_are_not_read(monkeypatch, tmp_path):
    """Whoever names an empty folder wants kernels compiled there."""
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))
    own = tmp_path / kept_kernels._CacheLocator.get_suitable_cache_subpath(__file__)

    def kernel():
        pass

    monkeypatch.setattr(kept_kernels, "_folder_for", lambda function: own)
    assert KeptKernels("module.kernel-1", kernel)._folders == [own]


def test_a_folder_stays_where_it_was(monkeypatch, tmp_path):
    """Also one that NUMBA_CACHE_DIR names from the current folder, which may be another one later."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(config, "CACHE_DIR", "cache")

    def kernel():
        pass

    kept = KeptKernels("module.kernel-1", kernel)
    assert kept.folder.parent == tmp_path / "cache" and kept._folders == [kept.folder]
