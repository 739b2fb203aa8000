"""Processes under mpiexec and torchrun against one alone: the same numbers, the same end whatever happens to one."""

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from tests.checks import same_bits
from tests.train.distributed import rank_programs as programs

from onnxgrad.train.batches import Batches, slice_of

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
SECONDS = 300  # after which something hangs
CLOSE = 1e-5  # relative, of losses in float32


LAUNCHERS = {
    "mpiexec": [Path(sys.executable).with_name("mpiexec"), "-n", "{}", sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "{}"],
}


def launched(launcher, ranks, *module):
    """The command line of a module run by so many processes."""
    return [str(word).format(ranks) for word in LAUNCHERS[launcher]] + ["-m", *map(str, module)]


def start(launcher, ranks, program, folder, **how):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return subprocess.Popen(
        launched(launcher, ranks, "tests.train.distributed.rank_programs", program, folder), cwd=folder,
        env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **how,
    )  # fmt: skip


def run(launcher, ranks, program, folder):
    """What each rank found."""
    with start(launcher, ranks, program, folder) as process:
        _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, errors
    return [pickle.loads((folder / f"{program}-{rank}.pickle").read_bytes()) for rank in range(ranks)]


@pytest.fixture(scope="module", params=LAUNCHERS)
def launcher(request):
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory, launcher):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def on_four(launcher, folder):
    return run(launcher, 4, "curves", folder)


@pytest.fixture(scope="module")
def on_two(launcher, folder, on_four):  # which leaves a checkpoint
    return run(launcher, 2, "problems", folder)


def close(found, expected, tolerance=CLOSE):
    return np.allclose(found, expected, rtol=tolerance, atol=0)


def assert_same_curve(found, expected):
    for what in ("steps", "norms", "epochs"):
        assert len(found[what]) == len(expected[what]) and close(found[what], expected[what]), what
    for mine, theirs in zip(found["validation"], expected["validation"], strict=True):
        assert mine["accuracy"] == theirs["accuracy"] and close(mine["loss"], theirs["loss"])
    assert_close_states(found["state"], expected["state"])


def assert_close_states(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert np.allclose(found[name], array, rtol=1e-4, atol=1e-4 * np.abs(array).max()), name


@pytest.mark.parametrize("name", programs.SETTINGS)
def test_as_one_process_on_whole_batches(name, on_four):
    expected = programs.curve(name, programs.EPOCHS.get(name, 2))
    assert name != "adam" or len(expected["steps"]) >= 50
    assert_same_curve(on_four[0][name, False], expected)


@pytest.mark.parametrize("name", programs.SETTINGS)
def test_shared_state_of_the_optimizer_gives_the_same_bits(name, on_four):
    whole, shared = (on_four[0][name, shard] for shard in (False, True))
    assert shared["steps"] == whole["steps"] and shared["norms"] == whole["norms"]
    for part, array in whole["state"].items():
        assert same_bits(shared["state"][part], array), part


def test_two_ranks_and_the_same_bits_from_run_to_run(on_two, launcher, folder):
    expected = programs.curve("adam", programs.EPOCHS["adam"])
    assert_same_curve(on_two[0]["again"], expected)
    again = run(launcher, 2, "parts_and_again", folder)
    assert again[0]["again"]["steps"] == on_two[0]["again"]["steps"]
    for name, array in on_two[0]["again"]["state"].items():
        assert same_bits(again[0]["again"]["state"][name], array), name
    # Batches that ranks have cut themselves, one example here and seven there.
    whole = programs.trainer("adam")
    for batch in programs.batches(programs.IGNORING):
        whole.step(batch)
    assert_close_states(again[0]["parts"], programs.state_of(whole))
    # Losses of one's own, in float64, and a communicator of one.
    alone = programs.own_loss()
    for found in again:
        assert close(found["own_loss"], alone, 1e-12) and close(found["by_itself"], alone, 1e-12)


def test_all_ranks_stop_for_a_signal_of_one_and_another_number_goes_on(on_four, on_two):
    # Eleven micro-batches were run, three for an update.
    told = "stopped by SIGTERM after step 3; the state is in"
    assert all(found["stopped"][0].startswith(told) and found["stopped"][1] == 3 for found in on_four)
    whole = programs.trainer("accumulate")
    whole.fit(programs.batches(programs.WEIGHING), 3, quiet=True)
    assert_close_states(on_two[0]["resumed"], programs.state_of(whole))
    for name, array in on_two[0]["trained"].items():
        assert same_bits(on_two[1]["trained"][name], array), name


def test_averages_metrics_and_callbacks(launcher, folder, tmp_path):
    expected = programs.watched(tmp_path)
    assert 3 < len(expected["validation"]) < 12 and expected["resumed"] == expected["validation"]
    assert expected["kept"]["auc"] == max(found["auc"] for found in expected["validation"]) and expected["ended"] == 11
    on_ranks = run(launcher, 2, "watching", folder)
    for found in (one[shard] for one in on_ranks for shard in (False, True)):
        assert len(found["validation"]) == len(expected["validation"]) and found["ended"] == 11
        assert found["resumed"] == found["validation"]  # the same bits
        assert close(found["rates"], expected["rates"], 1e-4)
        for mine, theirs in zip((*found["validation"], found["kept"]), (*expected["validation"], expected["kept"]),
                                strict=True):  # fmt: skip
            assert mine["matrix"] == theirs["matrix"] and mine["f1"] == theirs["f1"] and mine["iou"] == theirs["iou"]
            assert all(close(mine[name], value, 1e-4) for name, value in theirs.items() if name != "matrix")
        assert_close_states(found["averages"], expected["averages"])
    for name, array in on_ranks[0][False]["averages"].items():
        for other in (on_ranks[1][False], *(one[True] for one in on_ranks)):
            assert same_bits(other["averages"][name], array), name
    exported = {t.name: numpy_helper.to_array(t) for t in onnx.load(folder / "watched.onnx").graph.initializer}
    assert all(same_bits(exported[name], a) for name, a in on_ranks[0][True]["averages"].items())


REFUSED = {
    "a_bad_batch_on_one_rank": "RankError: rank 1: the batch's x has shape [4, 2, 6, 5], expected ['N', 2, 6, 6]",
    "a_bad_batch_on_all_ranks": "ValueError: the batch lacks 'target', expected x, target",
    "an_iterator_that_raises": "RankError: rank 1: the disk is gone",
    "fewer_batches_on_one_rank":
        "RankError: rank 1 ran out of batches before the others: give every rank the same number of batches",
    "drift":
        "RankError: the ranks have drifted apart: after step 1, 'fc.bias' on rank 1 is not that of rank 0",
    "other_settings": "ValueError: Trainer: seed on rank 1 is not that of rank 0",
    "a_loss_that_is_not_finite":
        "TrainingStoppedError: step 2: the loss is nan: the batch's x is nan in example 7, at [7, 0, 0, 0]; "
        "the parameters are those before the step; the state before it is in '{folder}/nan.safetensors'",
    "no_batches":
        "ValueError: fit: there are no batches; give a list or Batches, since an iterator ends after one epoch",
    "no_folder":
        "FileNotFoundError: fit: the folder '/no/folder' to write 'run.safetensors' into does not exist",
    "nothing_to_restore":
        "FileNotFoundError: '/no/folder/run.safetensors' does not exist, expected a checkpoint of a trainer",
    "a_metric_that_raises": "RankError: rank 1: ZeroDivisionError: nothing to divide by",
    "a_fixed_batch":
        "ValueError: the model takes batches of a fixed size, so that 2 ranks cannot split one: give the first "
        "dimension of its inputs a name in place of a number",
    "no_communicator":
        "TypeError: Trainer: communicator is a str, expected one of mpi4py, such as MPI.COMM_WORLD, or a process group "
        "of torch.distributed",
}  # fmt: skip


@pytest.mark.parametrize("name", programs.PROBLEMS)
def test_what_is_wrong_is_told_by_all_ranks_in_the_same_words(name, on_two, folder):
    expected = REFUSED[name].format(folder=folder)
    assert [found["refused"].get(name) for found in on_two] == [expected, expected]


def test_a_rank_that_raises_ends_the_others(launcher, folder):
    began = time.monotonic()
    with start(launcher, 2, "raising", folder) as process:
        _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode != 0 and time.monotonic() - began < SECONDS
    assert "rank 1: ZeroDivisionError: nothing to divide by" in errors.splitlines()
    assert "has died" not in errors


@pytest.mark.parametrize("program, rank", [("leaving", 1), ("first_leaving", 0)])
def test_a_rank_that_ends_before_the_others_ends_them(program, rank, launcher, folder):
    with start(launcher, 3, program, folder) as process:
        try:
            _, errors = process.communicate(timeout=100)
        finally:
            process.terminate()
    assert process.returncode != 0
    told = (
        f"onnxgrad.train.distributed.ranks.RankError: rank {rank} ended, by sys.exit() perhaps, before the others were "
        "done: every rank has to call the same methods of the trainer"
    )
    # torch puts a prefix before each line of a traceback.
    assert [line.split("]: ")[-1] for line in errors.splitlines()].count(told) == 1
    assert "has died" not in errors


def wait_for_work(process):
    assert process.stdout.readline() == "at work\n", process.communicate(timeout=SECONDS)[1]


def test_a_rank_that_is_killed_ends_the_others(launcher, tmp_path):
    with start(launcher, 2, "endless", tmp_path) as process:
        wait_for_work(process)
        numbers = [int((tmp_path / f"process-{rank}").read_text()) for rank in (0, 1)]
        os.kill(numbers[1], signal.SIGKILL)
        began = time.monotonic()
        out, errors = process.communicate(timeout=SECONDS)
    assert process.returncode != 0 and time.monotonic() - began < 20
    told = f"rank 1 has died (process {numbers[1]} on {socket.gethostname()}), and so all ranks end"
    assert told in errors.splitlines()
    assert {"mpiexec": "BAD TERMINATION", "torchrun": "ChildFailedError"}[launcher] in out + errors  # its own words
    assert not Path(f"/proc/{numbers[0]}").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_to_the_launcher_save_first(number, launcher, tmp_path):
    with start(launcher, 2, "endless", tmp_path) as process:
        wait_for_work(process)
        process.send_signal(number)
        _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode != 0
    assert errors.count("stopping when this step is done") == 1
    assert errors.count("the state is in") == 1 and f"stopped by {number.name} after step" in errors
    mine = programs.trainer("adam")
    mine.restore(tmp_path / "run.safetensors")
    assert mine.steps >= 3


def command(launcher, ranks, folder, *options):
    """onnxgrad train, by so many processes."""
    data = {name: a for name, a in programs.images().items() if name != "soft"}
    onnx.save(programs.convnet(), folder / "model.onnx")
    np.savez(folder / "train.npz", **data)
    given = ["onnxgrad", "train", "model.onnx", "--data", "train.npz", "--batch-size", "8", "--val", "0.2",
             "--loss", "cross-entropy:logits:ignore-index=-100", "--epochs", "2", "--keep-best", *options]  # fmt: skip
    words = launched(launcher, ranks, *given) if ranks > 1 else [sys.executable, "-m", *given]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False, timeout=SECONDS)


def test_the_command_line(launcher, tmp_path):
    done = [
        command(launcher, ranks, tmp_path, "-o", f"{ranks}.onnx", "--report", f"{ranks}.html", *more)
        for ranks, more in ((1, []), (2, ["--shard-optimizer"]))
    ]
    assert [d.returncode for d in done] == [0, 0], done[1].stderr
    assert done[1].stderr.count("training") == 1
    assert len(done[1].stdout.splitlines()) == len(done[0].stdout.splitlines())
    alone, together = (onnx.load(tmp_path / f"{ranks}.onnx").graph.initializer for ranks in (1, 2))
    for mine, theirs in zip(together, alone, strict=True):
        assert mine.name == theirs.name
        a, b = map(numpy_helper.to_array, (mine, theirs))
        assert np.allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(b).max()), mine.name
    events = [[json.loads(x) for x in (tmp_path / f"{r}.jsonl").read_text().splitlines()] for r in (1, 2)]
    losses = [[e["loss"] for e in found if e["event"] == "step"] for found in events]
    assert len(losses[0]) == len(losses[1]) and close(*losses)
    norms = [[e["norms"] for e in found if e["event"] == "gradients"] for found in events]
    np.testing.assert_allclose(norms[1], norms[0], rtol=1e-2, atol=1e-4 * np.max(norms[0]))
    alone, together = (next(e for e in found if e["event"] == "examples") for found in events)
    assert together["confusion"] == alone["confusion"] and together["examples"] == alone["examples"]
    assert {one["index"] for one in together["worst"]} == {one["index"] for one in alone["worst"]}
    assert close([one["loss"] for one in together["worst"]], [one["loss"] for one in alone["worst"]])
    refused = command(launcher, 2, tmp_path, "-o", "no/folder.onnx")
    assert refused.returncode == {"mpiexec": 2, "torchrun": 1}[launcher]
    told = [line for line in refused.stderr.splitlines() if line.startswith("onnxgrad: ")]
    assert told[0] == "onnxgrad: rank 0: the folder 'no' to write 'folder.onnx' into does not exist"
    alone = command(launcher, 1, tmp_path, "-o", "x.onnx", "--shard-optimizer")
    assert alone.stderr == "onnxgrad: --shard-optimizer is for several processes: start them by mpiexec or torchrun\n"


@pytest.mark.parametrize("examples", [1, 2, 3, 4, 7, 57])
def test_no_example_is_lost_or_doubled(examples):
    for size in (1, 2, 3, 4, 8):
        cut = [slice_of(examples, rank, size) for rank in range(size)]
        assert np.concatenate([np.arange(examples)[c] for c in cut]).tolist() == list(range(examples))
        assert max(c.stop - c.start for c in cut) - min(c.stop - c.start for c in cut) <= 1
        data = {"x": np.arange(examples)}
        whole = [b["x"].tolist() for b in Batches(data, 4, seed=3)]
        each = [Batches(data, 4, seed=3).slices(rank, size) for rank in range(size)]
        for expected, parts in zip(whole, zip(*each, strict=True), strict=True):
            assert [x for part in parts for x in part["x"][: part.examples].tolist()] == expected
            assert all(len(part["x"]) == max(1, part.examples) for part in parts)


def test_batches_that_a_class_makes_are_made_by_it():
    class Negative(Batches):
        def starting_at(self, first):
            for one in super().starting_at(first):
                yield {"x": -one["x"]}

    mine = Negative({"x": np.arange(10)}, 4, shuffle=False)
    assert [b["x"].tolist() for b in mine.slices(1, 2, 1)] == [[-4, -5, -6, -7], [-8, -9]]  # the trainer cuts them
    assert [b["x"].tolist() for b in mine.round_robin(1, 2)] == [[-4, -5, -6, -7]]
    plain = Batches({"x": np.arange(10)}, 4, shuffle=False)
    assert [b["x"].tolist() for b in plain.round_robin(0, 2)] == [[0, 1, 2, 3], [8, 9]]


def test_a_trainer_alone_shares_nothing():
    with pytest.raises(ValueError) as caught:
        programs.trainer("adam", shard_optimizer=True)
    assert str(caught.value) == "Trainer: shard_optimizer needs a communicator, whose processes shard the state"
    assert "mpi4py" not in sys.modules
