"""Checkpoints: a resumed run gives the numbers of an uninterrupted one, and a crash leaves the last good file."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
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


def test_a_folder_that_cannot_be_written(tmp_path):
    *args, how = new(optim.SGD())
    with raises(
        FileNotFoundError, f"{str(tmp_path / 'missing')!r} does not exist, so no checkpoint can be written there"
    ):
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
