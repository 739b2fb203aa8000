"""fit(): what it logs and saves, and what is on disk when a signal, a bad number or a full disk stops it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from onnx import parser
from tests.checks import raises, same_bits
from tests.train.two_layers import batch, mlp

from onnxgrad.runtime import plan
from onnxgrad.train import losses, optim, schedules
from onnxgrad.train.batches import Batches
from onnxgrad.train.fitting import TrainingStoppedError
from onnxgrad.train.interruption import Interrupted
from onnxgrad.train.trainer import Trainer

EXAMPLES = 50  # in batches of 8: six whole ones, and one of two


def trainer(**how):
    settings = {"schedule": schedules.Cosine(40, warmup=3), "seed": 3, **how}
    return Trainer(mlp(dropout=0.2), losses.CrossEntropy("logits"), optim.AdamW(lr=0.02), **settings)


def data():
    return Batches(batch(0, EXAMPLES), 8, seed=9)


def same_state(a, b):
    return all(same_bits(x, b._state.arrays()[name]) for name, x in a._state.arrays().items())


class Stopping:
    """Batches that bring a signal along with one of them."""

    def __init__(self, batches, at, number):
        self.batches, self.at, self.number = batches, at, number

    def __iter__(self):
        for k, one in enumerate(self.batches):
            if k == self.at:
                os.kill(os.getpid(), self.number)
            yield one


def test_remarks_are_printed_once_before_training_unless_it_is_quiet(capsys):
    mine = trainer()
    mine.remarks.append("Trainer leaves 'inv_freq' alone.")
    mine.fit(data(), quiet=True)
    mine.remarks.append("The last batch is dropped.")
    mine.fit(data())
    mine.fit(data())
    first, *lines = capsys.readouterr().err.splitlines()
    assert first == "The last batch is dropped." and [line[:10] for line in lines] == ["epoch 1/1:"] * 2


def test_the_log_tells_every_update_and_every_epoch(tmp_path):
    told = []
    mine = trainer(accumulate=2)
    records = mine.fit(data(), 3, validation=Batches(batch(1, 20), 8), quiet=True, log=told.append)
    steps = [t for t in told if t["event"] == "step"]
    assert [t["step"] for t in steps] == list(range(1, mine.steps + 1)) and mine.steps == 3 * 7 // 2
    assert all(t["gradient_norm"] > 0 and t["seconds"] > 0 and t["lr"] > 0 for t in steps)
    epochs = [t for t in told if t["event"] == "epoch"]
    assert [(t["epoch"], t["loss"], t["validation"]) for t in epochs] == [
        (r.epoch, r.loss, r.validation) for r in records
    ]
    json.dumps(told)
    assert steps[4]["lr"] == pytest.approx(0.02 * schedules.Cosine(40, warmup=3)(4))


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_while_a_kernel_is_compiled_stops_the_step(kind, monkeypatch, tmp_path):
    mine, path = trainer(), tmp_path / "run.safetensors"
    start = {name: array.copy() for name, array in mine.parameters.items()}

    def interrupted(*args):
        raise kind

    with monkeypatch.context() as patch:
        patch.setattr(plan, "make_plan", interrupted)
        for work in (
            lambda: mine.step(batch(0, 8)),
            lambda: mine.evaluate([batch(0, 8)]),
            lambda: mine.fit(data(), checkpoint=path, save_every=1, quiet=True),
            lambda: mine.fit(Stopping(data(), 0, signal.SIGTERM), checkpoint=path, save_every=1, quiet=True),
        ):
            with pytest.raises(kind):
                work()
    assert not path.exists() and mine.steps == 0
    assert all(same_bits(array, start[name]) for name, array in mine.parameters.items())
    mine.fit(data(), checkpoint=path, quiet=True)
    assert mine.steps == 7


@pytest.mark.parametrize("stop, accumulate", [(0, 1), (6, 1), (4, 3), (9, 3)])
def test_a_fit_that_was_interrupted_goes_on_as_if_it_had_not_been(stop, accumulate, tmp_path):
    whole = trainer(accumulate=accumulate)
    expected, told = [], []
    records = whole.fit(data(), 3, quiet=True, log=expected.append)
    path = tmp_path / "run.safetensors"
    seen = 0

    class Noting(Batches):
        def starting_at(self, first):
            nonlocal seen
            for one in super().starting_at(first):
                if seen == stop:
                    os.kill(os.getpid(), signal.SIGINT)
                seen += 1
                yield one

    batches = Noting(batch(0, EXAMPLES), 8, seed=9)
    with pytest.raises(Interrupted, match="stopped by SIGINT after step") as caught:
        trainer(accumulate=accumulate).fit(batches, 3, quiet=True, checkpoint=path, log=told.append)
    assert caught.value.saved == path and seen == stop + 1
    second = trainer(accumulate=accumulate)
    second.restore(path)
    rest = second.fit(data(), 3, quiet=True, checkpoint=path, log=told.append)
    assert same_state(whole, second)
    assert [r.loss for r in rest] == [r.loss for r in records][3 - len(rest) :]
    assert [t["loss"] for t in told if t["event"] == "epoch"] == [r.loss for r in records]
    third = trainer(accumulate=accumulate)
    third.restore(path)
    assert third.fit(data(), 3, quiet=True) == []  # all is done
    assert [r.epoch for r in third.fit(data(), 1, quiet=True)] == [1]  # a new one


def test_sigterm_and_iterables_of_any_kind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain = list(data())
    mine = trainer()
    with raises(Interrupted, "stopped by SIGTERM after step 3; the state is in 'onnxgrad-stopped.safetensors'"):
        mine.fit(Stopping(plain, 2, signal.SIGTERM), 2, quiet=True)
    mine = trainer()
    mine.restore("onnxgrad-stopped.safetensors")
    mine.fit(plain, 2, quiet=True)
    whole = trainer()
    whole.fit(plain, 2, quiet=True)
    assert same_state(whole, mine)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_in_a_process_of_its_own(tmp_path):
    code = """
from tests.train.test_fit import *
def forever():
    while True:
        print("at work", flush=True)
        yield batch(0)
trainer().fit(forever(), checkpoint="run.safetensors", quiet=True)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
        env=environment,
    )  # fmt: skip
    with process:
        assert process.stdout.readline() == "at work\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "stopping when this step is done" in errors
    assert "the state is in 'run.safetensors'" in errors.splitlines()[-1]
    mine = trainer()
    mine.restore(tmp_path / "run.safetensors")
    assert mine.steps >= 1


def test_a_bad_number_is_found_in_the_data(tmp_path, monkeypatch):
    """Whatever batch it came in; a target is data, too."""
    monkeypatch.chdir(tmp_path)
    arrays = {"x": np.ones((40, 2), np.float32), "target": np.ones((40, 1), np.float32)}
    arrays["target"][29] = np.nan
    model = parser.parse_model("""<ir_version: 9, opset_import: ["": 20]> g (float[N, 2] x) => (float[N, 1] y)
        <float[2, 1] w = {1, 2}> { y = MatMul(x, w) }""")
    mine = Trainer(model, losses.MSE("y"), optim.SGD())
    with pytest.raises(TrainingStoppedError) as caught:
        mine.fit(Batches(arrays, 8, seed=3), quiet=True)
    assert "the batch's target is nan in example " in str(caught.value)
    assert "; in the data, target is nan in example 29, at [29, 0]; the state before it is in" in str(caught.value)


def test_a_bad_number_leaves_the_last_good_state(tmp_path):
    batches = list(data())
    batches[4] = {**batches[4], "x": np.full_like(batches[4]["x"], np.inf)}
    path = tmp_path / "run.safetensors"
    with pytest.raises(TrainingStoppedError) as caught:
        trainer().fit(batches, 2, quiet=True, checkpoint=path)
    assert str(caught.value) == (
        "step 5: the loss is nan: the batch's x is inf in example 0, at [0, 0]; "
        f"the parameters are those before the step; the state before it is in {str(path)!r}"
    )
    good, mine = trainer(), trainer()
    for one in batches[:4]:
        good.step(one)
    mine.restore(path)
    assert same_state(good, mine)


def test_save_every_and_bad_plans(tmp_path):
    path = tmp_path / "run.safetensors"
    found = []

    def look(facts):
        mine = trainer()
        if path.exists():
            mine.restore(path)
        found.append(mine.steps)

    trainer().fit(data(), 1, quiet=True, checkpoint=path, save_every=3, log=look)
    assert found == [0, 0, 0, 3, 3, 3, 6, 6]  # the last one is told before the epoch's checkpoint is written
    with raises(ValueError, "fit: epochs is 0, expected a number of at least 1"):
        trainer().fit(data(), 0)
    with raises(ValueError, "fit: save_every needs a checkpoint, the file to write"):
        trainer().fit(data(), save_every=2)
    missing, link = tmp_path / "no" / "run.safetensors", tmp_path / "link"
    link.symlink_to(missing)
    for place in (missing, link):
        told = f"fit: the folder {str(missing.parent)!r} to write 'run.safetensors' into does not exist"
        with raises(FileNotFoundError, told):
            trainer().fit(data(), checkpoint=place)
    with raises(IsADirectoryError, f"fit: {str(tmp_path)!r} is a folder, expected the name of a file to write"):
        trainer().fit(data(), checkpoint=tmp_path)
    with raises(
        ValueError, "fit: there are no batches; give a list or Batches, since an iterator ends after one epoch"
    ):
        trainer().fit([], quiet=True)


def test_a_full_disk_keeps_the_last_good_checkpoint(tmp_path):
    path = tmp_path / "run.safetensors"
    mine = trainer()
    mine.save(path)
    before = path.read_bytes()
    code = f"""
import resource
from tests.train.test_fit import *
mine = trainer()
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
try:
    mine.save({str(path)!r})
except OSError as error:
    print("refused:", error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.startswith(f"refused: {str(path)!r} cannot be written: "), done.stderr
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["run.safetensors"]


@pytest.mark.parametrize("folder", ["/proc", "read-only"])
def test_a_folder_that_is_read_only(folder, tmp_path):
    if folder == "read-only":
        if os.geteuid() == 0:
            pytest.skip("root may write anywhere but in /proc")
        tmp_path.chmod(0o500)
        folder = tmp_path
    elif not Path(folder).is_dir():
        pytest.skip("this system has no /proc")
    path = Path(folder, "run.safetensors")
    with pytest.raises(OSError, match=r"run\.safetensors"):
        trainer().save(path)
    with pytest.raises(OSError, match=r"run\.safetensors"):
        trainer().fit(data(), quiet=True, checkpoint=path)


def test_what_is_easily_given_instead_gets_a_sentence_before_the_first_epoch():
    trained = trainer()
    a_list = "expected a list of batches or onnxgrad.Batches(data, size)"
    for wrong, sentence in [
        ({"batches": batch(0)}, f"fit: batches is a dict, {a_list}"),
        ({"validation": batch(0)}, f"fit: validation is a dict, {a_list}"),
        ({"metrics": len}, "fit: metrics is a builtin_function_or_method, expected a dict of metrics by name"),
        (
            {"metrics": {"a": "accuracy"}},
            "fit: metrics['a'] is 'accuracy', expected one of onnxgrad.metrics or a function of outputs and batch",
        ),
        ({"log": 3}, "fit: log is 3, expected a function of an event, a dict"),
    ]:
        with raises(TypeError, sentence):
            trained.fit(**{"batches": [batch(0)], "validation": [batch(0)], **wrong})
    with raises(TypeError, f"evaluate: batches is a dict, {a_list}"):
        trained.evaluate(batch(0))
    assert not trained.steps
