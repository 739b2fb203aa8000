"""find_lr(): what it finds, and that the trainer is afterwards what it was, to the bit."""

import math

import numpy as np
import pytest
from tests.checks import raises, same_bits
from tests.train.test_fit import data, trainer
from tests.train.two_layers import batch, mlp

from onnxgrad.train import losses, optim
from onnxgrad.train.batches import Batches
from onnxgrad.train.find_lr import LearningRates
from onnxgrad.train.fitting import TrainingStoppedError
from onnxgrad.train.trainer import Trainer


def everything(mine):
    arrays = {**mine._state.arrays(), **{f"gradient/{name}": a for name, a in mine.gradients.items()}}
    facts = mine.steps, mine._state.batches, mine._state.waiting, mine.gradient_norm, mine.schedule, mine.skipped
    return {name: np.array(a) for name, a in arrays.items()}, facts


@pytest.mark.parametrize("how", [{}, {"accumulate": 3}, {"ema": 0.9, "clip_norm": 1.0}], ids=str)
def test_the_trainer_is_what_it_was(how):
    mine, other = trainer(**how), trainer(**how)
    batches, same = data(), data()
    for one in (mine, other):
        for k in range(4):  # with accumulate, in the middle of an update
            one.step(batch(k))
    before = everything(mine)
    found = mine.find_lr(batches)
    after = everything(mine)
    assert after[1] == before[1] and all(same_bits(after[0][name], a) for name, a in before[0].items())
    assert len(found.rates) == len(found.losses) >= 50 and found.rates[0] == 1e-7
    assert np.allclose(np.diff(np.log(found.rates)), math.log(1e8) / 99)
    first, second = (one.fit(d, 2, quiet=True) for one, d in ((mine, batches), (other, same)))
    assert [r.loss for r in first] == [r.loss for r in second]
    assert all(same_bits(mine.parameters[name], a) for name, a in other.parameters.items())


def test_the_losses_are_those_of_training_at_these_rates():
    how = {"schedule": None}
    found = trainer(**how).find_lr(data(), lowest=1e-4, highest=1e-1, steps=20)
    rates = iter(found.rates)
    other = trainer(schedule=lambda step: next(rates) / 0.02)
    batches = data()
    both = [*batches, *batches, *batches]
    assert [other.step(one) for one in both[:20]] == found.losses


@pytest.mark.parametrize("optimizer", [optim.SGD(lr=0.1), optim.AdamW(), optim.SGD(lr=1.0, momentum=0.9)], ids=str)
def test_the_suggestion_trains_well(optimizer):
    """About as well as the best of rates around it."""
    batches = Batches(batch(0, 400), 16)
    mine = Trainer(mlp(), losses.CrossEntropy("logits"), optimizer)
    suggestion = mine.find_lr(batches).suggestion
    assert suggestion is not None
    results = {}
    for factor in (0.001, 0.1, 1, 1000):
        other = Trainer(mlp(), losses.CrossEntropy("logits"), type(optimizer)(
            **{**optimizer.numbers, "lr": suggestion * factor}))  # fmt: skip
        try:
            results[factor] = other.fit(batches, 2, quiet=True)[-1].loss
        except TrainingStoppedError:
            results[factor] = math.inf
    assert min(results, key=results.get) in (0.1, 1), (suggestion, results)
    assert results[1] < results[0.001], (suggestion, results)


def test_suggestions_of_curves():
    rates = list(np.geomspace(1e-6, 1, 61))
    falling = [2 / (1 + (rate / 1e-3) ** 2) + 1 if rate < 0.1 else 50.0 for rate in rates]
    assert 1e-4 < LearningRates(rates, falling).suggestion < 5e-3
    assert LearningRates(rates, [1 + k for k in range(61)]).suggestion is None
    assert LearningRates(rates, [1.0] * 61).suggestion is None
    assert LearningRates([], []).suggestion is None


def test_what_is_refused():
    mine = trainer()
    with raises(ValueError, "find_lr: lowest is 1 and highest 0.1, expected 0 < lowest < highest"):
        mine.find_lr(data(), lowest=1, highest=0.1)
    with raises(ValueError, "find_lr: steps is 2, expected a number of at least 5"):
        mine.find_lr(data(), steps=2)
    with raises(ValueError, "find_lr: there are no batches"):
        mine.find_lr([])
    with pytest.raises(TrainingStoppedError, match="the batch's x is nan"):
        mine.find_lr([{**batch(0), "x": np.full_like(batch(0)["x"], np.nan)}])
    assert mine.find_lr(iter(data()), steps=20).losses and mine.steps == 0
    still = Trainer(mlp(), losses.CrossEntropy("logits"), optim.SGD(lr=0))
    with raises(ValueError, "find_lr: the optimizer's lr is 0, which no schedule can raise: give it another value"):
        still.find_lr(data())
