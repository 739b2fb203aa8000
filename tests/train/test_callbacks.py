"""Callbacks: when they are called, how they end training, and that a resumed run goes on with what they knew."""

import math
import os
import signal

import numpy as np
import pytest
from tests.checks import raises, same_bits
from tests.train.test_fit import EXAMPLES, data, same_state, trainer
from tests.train.two_layers import batch

from onnxgrad.train import metrics
from onnxgrad.train.batches import Batches
from onnxgrad.train.callbacks import Callback, EarlyStopping, KeepBest
from onnxgrad.train.fitting import Record
from onnxgrad.train.interruption import Interrupted

LOSSES = [0.9, 0.5, 0.6, 0.49, 0.7, 0.495, 0.8, 0.1]


def record(value, epoch=1, name="loss"):
    return Record(epoch, epoch, 1.0, 0.1, {"loss": 1.0, name: value})


def held_out():
    return Batches(batch(1, 20), 8, shuffle=False)


class Noting(Callback):
    """Notes what it is called with; ends training after a step or an epoch."""

    def __init__(self, after_step=None, after_epoch=None):
        self.after_step, self.after_epoch, self.noted = after_step, after_epoch, []

    def on_start(self, trainer):
        self.noted.append("start")

    def on_step(self, trainer, record):
        self.noted.append(record["step"])
        assert trainer.steps == record["step"]
        return "it is enough" if record["step"] == self.after_step else None

    def on_epoch(self, trainer, record):
        self.noted.append(("epoch", record.epoch))
        return "enough of it" if record.epoch == self.after_epoch else None

    def on_end(self, trainer):
        self.noted.append("end")


@pytest.mark.parametrize("by, patience, expected", [(0.0, 1, 3), (0.0, 2, 6), (0.02, 2, 4), (0.0, 9, None)])
def test_when_early_stopping_ends(by, patience, expected):
    stopping, rising = EarlyStopping(patience, min_delta=by), EarlyStopping(patience, "accuracy", by, mode="max")
    for one, sign in ((stopping, 1), (rising, -1)):
        one.expect({"accuracy": len})
        name = "accuracy" if sign < 0 else "loss"
        ends = [k for k, loss in enumerate(LOSSES, 1) if one.on_epoch(None, record(sign * loss, k, name))]
        assert (ends[0] if ends else None) == expected


def test_a_number_that_is_not_finite_is_never_better():
    stopping = EarlyStopping(2)
    for value, waited in ((math.nan, 0), (math.nan, 1), (2.0, 0), (math.nan, 1), (1.0, 0)):
        stopping.on_epoch(None, record(value))
        assert stopping.waited == waited
        again = EarlyStopping(2)
        again.load_state(stopping.state())
        assert again.waited == waited and (again.best == stopping.best or math.isnan(stopping.best))


def test_calls_in_their_order_and_ends(tmp_path, capsys):
    steps = Noting()
    trainer().fit(data(), 2, quiet=True, callbacks=[steps])
    first, second = list(range(1, 8)), list(range(8, 15))
    assert steps.noted == ["start", *first, ("epoch", 1), *second, ("epoch", 2), "end"]
    path = tmp_path / "run.safetensors"
    mine, within = trainer(), Noting(after_step=9)
    records = mine.fit(data(), 3, callbacks=[within], checkpoint=path)
    assert [r.epoch for r in records] == [1] and mine.steps == 9 and within.noted[-2:] == [9, "end"]
    assert capsys.readouterr().err.splitlines()[-1] == "training ends after epoch 1, step 9: it is enough"
    resumed, whole = trainer(), trainer()
    resumed.restore(path)
    resumed.fit(data(), 3, quiet=True, callbacks=[Noting(after_epoch=2)])
    whole.fit(data(), 2, quiet=True)
    assert same_state(resumed, whole)


def test_the_best_epoch_is_kept_and_restored(tmp_path):
    path, accuracy = tmp_path / "best.safetensors", {"accuracy": metrics.Accuracy("logits")}
    mine = trainer()
    best = KeepBest(path, "accuracy")
    records = mine.fit(data(), 6, validation=held_out(), metrics=accuracy, quiet=True, callbacks=[best])
    found = [r.validation["accuracy"] for r in records]
    epoch = int(np.argmax(found)) + 1
    assert epoch < 6 and best.best == max(found), found
    same, last = trainer(), trainer()
    same.fit(data(), epoch, quiet=True)
    last.fit(data(), 6, quiet=True)
    assert same_state(mine, same) and not same_state(mine, last)
    assert mine.evaluate(held_out(), accuracy)["accuracy"] == max(found)
    kept = trainer()
    kept.fit(data(), 6, validation=held_out(), metrics=accuracy, quiet=True,
             callbacks=[KeepBest(path, "accuracy", restores=False)])  # fmt: skip
    assert same_state(kept, last)
    kept.restore(path)
    assert same_state(kept, same)


@pytest.mark.parametrize("stop", [3, 7, 17, 30])
def test_a_run_that_was_interrupted_stops_where_the_whole_one_does(stop, tmp_path):
    def fitted(mine, folder, checkpoint=None, batches=None):
        watching = [EarlyStopping(2, "f1"), KeepBest(folder / "best.safetensors"), EarlyStopping(5, "perplexity")]
        measured = {"f1": metrics.F1("logits"), "perplexity": metrics.Perplexity("logits")}
        return mine.fit(batches or data(), 12, validation=held_out(), metrics=measured, quiet=True, callbacks=watching,
                        checkpoint=checkpoint)  # fmt: skip

    class Signalling(Batches):
        seen = 0

        def starting_at(self, first):
            for one in super().starting_at(first):
                if self.seen == stop:
                    os.kill(os.getpid(), signal.SIGINT)
                self.seen += 1
                yield one

    how = {"ema": 0.9}
    whole = trainer(**how)
    (tmp_path / "whole").mkdir()
    records = fitted(whole, tmp_path / "whole")
    assert 5 < len(records) < 12
    path, rest = tmp_path / "run.safetensors", []
    with pytest.raises(Interrupted):
        fitted(trainer(**how), tmp_path, path, Signalling(batch(0, EXAMPLES), 8, seed=9))
    second = trainer(**how)
    second.restore(path)
    rest = fitted(second, tmp_path, path)
    assert [r.validation for r in rest] == [r.validation for r in records[-len(rest) :]]
    assert same_state(whole, second)
    third = trainer(**how)
    third.restore(path)
    assert fitted(third, tmp_path, path) == [] and same_state(whole, third)  # it has ended, and stays so


def test_callbacks_begin_anew_in_another_fit():
    stopping, mine = EarlyStopping(1, min_delta=100.0), trainer()
    for _ in range(2):
        assert len(mine.fit(data(), 5, quiet=True, callbacks=[stopping])) == 2


def test_what_checkpoints_have_of_callbacks_of_your_own(tmp_path):
    class Counting(Callback):
        count = 0

        def on_epoch(self, trainer, record):
            self.count += 1

        def state(self):
            return {"count": self.count}

        def load_state(self, state):
            self.count = state.get("count", 0)

    path, two = tmp_path / "run.safetensors", [Counting(), Counting()]
    two[1].on_epoch = lambda trainer, record: None
    trainer().fit(data(), 2, quiet=True, checkpoint=path, callbacks=two)
    mine, two = trainer(), [Counting(), Counting()]
    mine.restore(path)
    mine.save(tmp_path / "again.safetensors")  # before it is used
    mine.restore(tmp_path / "again.safetensors")
    mine.fit(data(), 3, quiet=True, callbacks=two)
    assert [one.count for one in two] == [3, 1]


def test_what_is_refused(tmp_path):
    mine = trainer()
    how = {"quiet": True, "validation": held_out()}
    with raises(TypeError, "fit: callbacks has a function, expected onnxgrad.callbacks.Callback"):
        mine.fit(data(), callbacks=[lambda: None], **how)
    with raises(ValueError, "EarlyStopping: 'acuracy' is not measured; did you mean 'accuracy'?"):
        mine.fit(data(), metrics={"accuracy": len}, callbacks=[EarlyStopping(monitor="acuracy")], **how)
    with raises(ValueError, "KeepBest: 'mine' is a function: mode='min' or mode='max' says which of its numbers are "
                "best"):  # fmt: skip
        mine.fit(data(), metrics={"mine": len}, callbacks=[KeepBest("best", "mine")], **how)
    matrix = {"matrix": metrics.ConfusionMatrix("logits")}
    with raises(ValueError, "KeepBest: 'matrix' is a ConfusionMatrix: mode='min' or mode='max' says which of its "
                "numbers are best"):  # fmt: skip
        mine.fit(data(), metrics=matrix, callbacks=[KeepBest("best", "matrix")], **how)
    with raises(TypeError, "KeepBest: 'matrix' is a list, expected a number"):
        mine.fit(data(), metrics=matrix, callbacks=[KeepBest(tmp_path / "best", "matrix", mode="max")], **how)
    with raises(FileNotFoundError, "KeepBest: the folder 'no' to write 'best' into does not exist"):
        mine.fit(data(), callbacks=[KeepBest("no/best")], **how)
    with raises(ValueError, "EarlyStopping: patience is 0, expected a number of epochs, at least 1"):
        EarlyStopping(0)
    with raises(ValueError, "EarlyStopping: min_delta is -1, expected a number of at least 0"):
        EarlyStopping(min_delta=-1)
    with raises(ValueError, "EarlyStopping: mode is 'up', expected 'min' or 'max'"):
        EarlyStopping(mode="up")
    with raises(TypeError, "fit: callbacks is a single EarlyStopping, expected a list of callbacks"):
        mine.fit(data(), callbacks=EarlyStopping(), **how)
    holding = Noting()
    holding.state = lambda: {"best": np.float32(1)}
    with raises(TypeError, "fit: the state of the callback Noting cannot be saved as JSON: Object of type float32 is "
                "not JSON serializable"):  # fmt: skip
        mine.fit(data(), callbacks=[holding], checkpoint=tmp_path / "run.safetensors", **how)
    ending = Noting()
    ending.on_epoch = lambda trainer, record: True
    with raises(TypeError, "fit: on_epoch of a callback returned True, expected None, or why training ends"):
        mine.fit(data(), callbacks=[ending], **how)


def test_a_confusion_matrix_in_records_and_logs():
    told, mine = [], trainer()
    matrix = {"matrix": metrics.ConfusionMatrix("logits")}
    (last,) = mine.fit(data(), validation=held_out(), metrics=matrix, log=told.append)
    assert np.sum(last.validation["matrix"]) == 20 and told[-1]["validation"] == last.validation
    outputs = [mine.evaluate([{n: a[k : k + 1] for n, a in held_out().arrays.items()}], matrix) for k in range(20)]
    assert np.array_equal(np.sum([o["matrix"] for o in outputs], 0), last.validation["matrix"])
    assert same_bits(np.array(last.validation["matrix"]), np.array(told[-1]["validation"]["matrix"]))
