"""ONNX's own node tests: of every operator some, and of every function operator some that are written out."""

import pytest
from tests.standard_cases import NO_RULE, RIGHT, WRONG, chosen_cases, outcome_of

WITHOUT_RULE = {
    "Adagrad", "Adam", "ArrayFeatureExtractor", "Binarizer",
    "FlexAttention", "Momentum",
    "OptionalGetElement", "TreeEnsemble",
}  # fmt: skip


@pytest.mark.slow
def test_some_cases_of_every_operator():
    cases = chosen_cases()
    outcomes = {case.name: outcome_of(case) for case in cases}
    wrong = {name: outcome.why for name, outcome in outcomes.items() if outcome.kind == WRONG}
    assert not wrong
    without = {case.operator for case in cases if not case.expanded and outcomes[case.name].kind == NO_RULE}
    assert without <= WITHOUT_RULE
    right = {case.operator for case in cases if outcomes[case.name].kind == RIGHT}
    assert len(right) > 100, "most operators have a gradient"
