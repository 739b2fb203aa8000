"""Worker processes: the same batches in the same order, whatever their number, and none left when nobody waits."""

import gc
import signal
import subprocess
import sys

import numpy as np
import psutil
import pytest
from tests.checks import raises, same_bits

from onnxgrad.sources import Source, read
from onnxgrad.sources.workers import Workers
from onnxgrad.train.batches import Batches

ARRAYS = {
    "x": np.arange(240, dtype=np.float32).reshape(40, 6), "target": np.arange(40) % 3, "none": np.zeros((40, 0)),
}  # fmt: skip


@pytest.fixture
def mapped(tmp_path):
    """A source that workers have something to do for."""
    for name, array in ARRAYS.items():
        np.save(tmp_path / f"{name}.npy", array)
    return read(tmp_path)


def children():
    """The processes that this one has started and not waited for."""
    return psutil.Process().children()


def same(one, other):
    return one.keys() == other.keys() and all(same_bits(one[n], other[n]) for n in one)


def test_resuming_slicing_and_round_robin_are_those_of_one_process(mapped):
    alone, helped = Batches(mapped, 7, seed=3), Batches(mapped, 7, seed=3, workers=2)
    for make in (
        lambda b: b, lambda b: b.starting_at(2), lambda b: b.slices(1, 2, 1), lambda b: b.slices(6, 7),
        lambda b: b.round_robin(1, 2),
    ):  # fmt: skip
        pairs = list(zip(make(alone), make(helped), strict=True))
        assert pairs and all(same(one, other) for one, other in pairs)
        assert [getattr(one, "examples", 0) for one, _ in pairs] == [getattr(two, "examples", 0) for _, two in pairs]
    assert len(children()) == 2  # the same ones all the time
    del helped
    gc.collect()
    assert children() == []


@pytest.mark.slow
def test_two_iterators_at_a_time_and_one_that_is_left(mapped):
    batches = Batches(mapped, 7, shuffle=False, workers=1)
    for one, other in zip(batches, batches, strict=True):
        assert same(one, other)
    assert len(children()) == 2
    rest = batches.starting_at(0)
    first = next(rest)
    rest.close()
    assert len(children()) == 1
    first["x"][0] = 1  # memory of its own
    assert next(iter(batches))["x"][0, 0] == 0


def test_arrays_in_memory_need_no_workers():
    batches = Batches(ARRAYS, 7, workers=2)
    assert len(list(batches)) == 6 and children() == []


@pytest.mark.slow
def test_a_worker_that_is_killed_is_reported(mapped):
    workers = Workers(mapped, 1)
    taken = workers.take([(np.arange(3), ())] * 100)
    next(taken)
    (process,) = workers._processes
    process.kill()
    with raises(
        RuntimeError, "Batches: a worker process was killed by SIGKILL: with fewer workers it takes less memory"
    ):
        list(taken)
    assert children() == []


class Broken(Source):
    """A source that has no example 5."""

    def __len__(self):
        return 8

    def take(self, chosen, seed=()):
        if 5 in chosen:
            raise KeyError("five")
        return {"x": chosen}


@pytest.mark.slow
def test_errors_come_back(tmp_path, monkeypatch):
    module = tmp_path / "my_sources.py"
    module.write_text(
        "from onnxgrad.sources import Source\nclass Mine(Source):\n    def __len__(self): return 4\n"
        "    def take(self, chosen, seed=()):\n        open('/no/such/file')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import my_sources

    with raises(FileNotFoundError, "[Errno 2] No such file or directory: '/no/such/file'"):
        list(Batches(my_sources.Mine(), 2, workers=1))
    Broken.__module__ = "__main__"
    monkeypatch.setattr(sys.modules["__main__"], "Broken", Broken, raising=False)
    with pytest.raises(TypeError, match=r"its class has to be in a module, not in the script itself$"):
        list(Batches(Broken(), 2, workers=1))

    class Local(Broken):
        pass

    with pytest.raises(
        TypeError, match=r"^Batches: a Local cannot be sent to worker processes \(.*\): leave out workers$"
    ):
        list(Batches(Local(), 2, workers=1))
    assert children() == []


SCRIPT = """
import sys
import time
import numpy as np
from onnxgrad import Batches

print("started", flush=True)
batches = Batches(sys.argv[1], 1, workers=2)  # no guard: workers do not run this
found = iter(batches)
next(found)
print("training", flush=True)
if len(sys.argv) > 2:
    time.sleep(60)
"""


@pytest.mark.slow
def test_a_script_needs_no_guard_and_ctrl_c_or_a_kill_leaves_no_process(mapped, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    folder = str(mapped._folder)
    done = subprocess.run([sys.executable, script, folder], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "started\ntraining\n", "")
    for number in (signal.SIGINT, signal.SIGKILL):
        arguments = [sys.executable, script, folder, "wait"]
        process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert [process.stdout.readline(), process.stdout.readline()] == ["started\n", "training\n"]
        theirs = psutil.Process(process.pid).children()
        assert len(theirs) == 2
        process.send_signal(number)
        _, printed = process.communicate(timeout=20)
        assert "worker" not in printed
        _, alive = psutil.wait_procs(theirs, 20)
        assert alive == [] or all(
            p.status() == psutil.STATUS_ZOMBIE for p in alive
        )  # where no process waits for orphans
