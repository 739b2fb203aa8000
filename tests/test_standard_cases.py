"""ONNX's own node tests: of every operator some, and of every function operator some that are written out."""

import pytest
from tests.standard_cases import CANNOT_CHECK, NO_RULE, RIGHT, WRONG, chosen_cases, outcome_of


@pytest.mark.slow
def test_some_cases_of_every_operator():
    cases = chosen_cases()
    outcomes = {case.name: outcome_of(case) for case in cases}
    wrong = {name: outcome.why for name, outcome in outcomes.items() if outcome.kind == WRONG}
    assert not wrong
    assert not {name for name, outcome in outcomes.items() if outcome.kind in (NO_RULE, CANNOT_CHECK)}
    right = {case.operator for case in cases if outcomes[case.name].kind == RIGHT}
    assert len(right) > 100, "most operators have a gradient"
