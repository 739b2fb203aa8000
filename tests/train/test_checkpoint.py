"""Checkpoints: a resumed run gives the numbers of an uninterrupted one, and a crash leaves the last good file."""

import json
import os
import platform
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import safetensors.numpy
from tests.checks import raises, same_bits
from tests.train.two_layers import batch, mlp

from onnxgrad.train import losses, optim, schedules
from onnxgrad.train.trainer import Trainer

OPTIMIZERS = [
    optim.SGD(momentum=0.9),
    optim.Adam(),
    optim.AdamW(),
    optim.Adagrad(),
    optim.RMSprop(momentum=0.5),
    optim.Lamb(),
]


def new(optimizer, **how):
    settings = {"schedule": schedules.Cosine(30, warmup=3), "seed": 5, **how}
    return mlp(dropout=0.3), losses.CrossEntropy("logits"), optimizer, settings


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.name)
def test_a_resumed_run_gives_the_same_numbers(optimizer, accumulate, tmp_path):
    *args, how = new(optimizer, accumulate=accumulate)
    whole = Trainer(*args, **how)
    expected = [whole.step(batch(k)) for k in range(12)]
    first = Trainer(*args, **how)
    mine = [first.step(batch(k)) for k in range(5)]
    first.save(tmp_path / "run.safetensors")
    second = Trainer.load(tmp_path / "run.safetensors", *args, **how)
    mine += [second.step(batch(k)) for k in range(5, 12)]
    assert mine == expected
    assert all(same_bits(whole.parameters[name], a) for name, a in second.parameters.items())


def test_what_does_not_fit(tmp_path):
    *args, how = new(optim.Adam())
    path = tmp_path / "run.safetensors"
    trainer = Trainer(*args, **how)
    trainer.save(path)
    with raises(ValueError, f"{str(path)!r} was written with the optimizer Adam, not SGD"):
        Trainer.load(path, *args[:2], optim.SGD(), **how)
    with raises(ValueError, f"{str(path)!r} has 'optimizer/m/fc0.bias': it belongs to another model, or to other "
                "trainable parameters"):  # fmt: skip
        Trainer.load(path, *args, trainable="fc1.*", **how)
    with raises(FileNotFoundError, f"{str(tmp_path / 'no')!r} does not exist, expected a checkpoint of a trainer"):
        trainer.restore(tmp_path / "no")
    path.write_bytes(b"nothing of the kind")
    before = {name: a.copy() for name, a in trainer.parameters.items()}
    with pytest.raises(ValueError, match="is not a checkpoint"):
        trainer.restore(path)
    assert all(same_bits(before[name], a) for name, a in trainer.parameters.items())


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A trainer after some steps, and the file of its state."""
    *args, how = new(optim.Adam())
    trainer, path = Trainer(*args, **how), tmp_path_factory.mktemp("saved") / "run.safetensors"
    trainer.fit([batch(k) for k in range(3)], quiet=True, checkpoint=path)
    return trainer, path


def refusal(trainer, path):
    """Why a file is refused; nothing of the trainer has changed by then."""
    before, steps = {name: array.copy() for name, array in trainer._state.arrays().items()}, trainer.steps
    with pytest.raises(ValueError, match=re.escape(repr(str(path)))) as caught:
        trainer.restore(path)
    assert trainer.steps == steps and all(same_bits(before[n], a) for n, a in trainer._state.arrays().items())
    return str(caught.value)


def test_a_bit_that_has_changed_is_found(saved, tmp_path):
    trainer, good = saved
    content, path = good.read_bytes(), tmp_path / "flipped.safetensors"
    header = 8 + int.from_bytes(content[:8], "little")
    rng = np.random.default_rng(0)
    for place in [*rng.integers(0, header, 150), *rng.integers(header, len(content), 150)]:
        damaged = bytearray(content)
        damaged[place] ^= 1 << rng.integers(8)
        path.write_bytes(damaged)
        told = refusal(trainer, path)
        if place >= header:
            assert re.search("is damaged: '(parameter|optimizer)/.*' is not as it was saved; use another check", told)
    path.write_bytes(content)
    trainer.restore(path)


def rewritten(good, path, kind, **changes):
    with safetensors.safe_open(good, framework="numpy") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        facts = {**json.loads(file.metadata()["facts"]), **changes}
    facts = {name: value for name, value in facts.items() if value is not None}
    safetensors.numpy.save_file(arrays, path, {"kind": f"onnxgrad checkpoint {kind}", "facts": json.dumps(facts)})
    return path


def test_a_checkpoint_without_checksums(saved, tmp_path):
    trainer, good = saved
    trainer.restore(rewritten(good, tmp_path / "old", 1, steps=7))
    assert trainer.steps == 7
    trainer.restore(good)
    assert "'facts' is not as it was saved" in refusal(trainer, rewritten(good, tmp_path / "new", 2))


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"steps": None}, "'steps' is None"),
        ({"steps": -1}, "'steps' is -1"),
        ({"seed": "5"}, "'seed' is '5'"),
        ({"place": {"epoch": 1}}, "'place/batches' is None"),
        ({"place": 3}, "'place/batches' is None"),
        ({"more": 3}, "'more' is 3"),
    ],
)
def test_bad_facts_are_refused_before_anything_is_restored(changes, told, saved, tmp_path):
    trainer, good = saved
    path = rewritten(good, tmp_path / "bad", 1, **changes)
    assert refusal(trainer, path) == f"{str(path)!r} is damaged: {told}; use another checkpoint"


def test_micro_batches_that_wait_need_the_same_number_of_them(tmp_path):
    *args, how = new(optim.SGD(), accumulate=4)
    trainer, path = Trainer(*args, **how), tmp_path / "run.safetensors"
    for k in range(3):
        trainer.step(batch(k))
    trainer.save(path)
    how["accumulate"] = 2
    told = f"{str(path)!r} was saved between micro-batches: set accumulate to the number that it had"
    assert refusal(Trainer(*args, **how), path) == told


def test_what_a_killed_process_left_is_removed(saved, tmp_path):
    trainer, _ = saved
    path = tmp_path / "run.safetensors"
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    stale = tmp_path / f".run.safetensors.{platform.node()}.{ended.pid}.part"
    living = tmp_path / f".run.safetensors.{platform.node()}.{os.getppid()}.part"
    elsewhere = tmp_path / ".run.safetensors.elsewhere.4711.part"
    forgotten = tmp_path / ".run.safetensors.4711.part"
    other = tmp_path / f".other.safetensors.{platform.node()}.{ended.pid}.part"
    for left in (stale, living, elsewhere, forgotten, other):
        left.touch()
    os.utime(forgotten, (0, 0))
    trainer.save(path)
    assert {*tmp_path.iterdir()} == {path, living, elsewhere, other}


def test_the_target_of_a_link_is_written(saved, tmp_path):
    trainer, _ = saved
    (tmp_path / "disk").mkdir()
    link, target = tmp_path / "run.safetensors", tmp_path / "disk" / "real.safetensors"
    link.symlink_to(target)
    for _ in range(2):  # a link to nothing, then one to a file
        trainer.save(link)
        assert link.is_symlink() and link.resolve() == target and [*target.parent.iterdir()] == [target]
    trainer.restore(link)


def test_a_folder_that_cannot_be_written(tmp_path):
    *args, how = new(optim.SGD())
    told = f"the folder {str(tmp_path / 'missing')!r} to write 'run.safetensors' into does not exist"
    with raises(FileNotFoundError, told):
        Trainer(*args, **how).save(tmp_path / "missing" / "run.safetensors")


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="POSIX")
def test_killed_while_saving_the_last_good_file_stays(tmp_path):
    path = tmp_path / "run.safetensors"
    code = f"""
import numpy as np
from tests.train.test_checkpoint import new, Trainer, optim
*args, how = new(optim.Adam())
trainer = Trainer(*args, **how)
trainer.save({str(path)!r})
print("saved", flush=True)
while True:
    trainer.save({str(path)!r})
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "saved\n"
        time.sleep(0.3 + np.random.default_rng(os.getpid()).random() / 10)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    *args, how = new(optim.Adam())
    assert Trainer.load(path, *args, **how).steps == 0
