"""The cost model of docs/scale.md: its limits are those of the formulas, and the page has its tables."""

from pathlib import Path

import pytest
from bench import ranks, scale

FAST = scale.Network("fast", 0.0, 1e9)
SLOW = scale.Network("slow", 1.0, 1e30)
COSTS = scale.Costs(0.0, 1e-3, 0.0, 4e8)


def test_a_ring_sends_the_lower_bound_and_a_tree_takes_few_messages():
    for ranks_ in scale.MACHINES:
        assert scale.ring(1e9, ranks_, FAST) == pytest.approx(2 * (ranks_ - 1) / ranks_)
        assert scale.ring(1.0, ranks_, SLOW) == pytest.approx(2 * (ranks_ - 1))
    assert [scale.tree(1.0, n, SLOW) for n in (1, 2, 4, 5, 1024)] == pytest.approx([0, 2, 4, 6, 20])


def test_a_step_takes_the_quicker_way_and_stops_paying_where_the_wire_takes_as_long_as_the_work():
    assert COSTS.step(8, 1, FAST) == COSTS.compute(8) == pytest.approx(8e-3)
    assert COSTS.step(8, 64, SLOW) == pytest.approx(COSTS.compute(8) + 12)
    limit = scale.stops_paying(COSTS, 4096, FAST)
    before, after = (COSTS.step(4096 / n, n, FAST) / COSTS.step(4096 / n / 2, 2 * n, FAST) for n in (limit // 2, limit))
    assert before >= 1.5 > after


def test_the_page_has_what_was_measured():
    text = Path(ranks.PAGE).read_text()
    measured = text.split(ranks.BEGIN)[1].split(ranks.END)[0]
    rows = [line for line in measured.splitlines() if line.startswith("| ")]
    assert any(line.startswith("| 1,024 |") for line in rows)
    found = {
        tuple(line.split(" | ")[k].strip("| ") for k in (0, 2)) for line in rows if "whole" in line or "shared" in line
    }
    assert found == {("1", "whole"), ("2", "whole"), ("2", "shared"), ("4", "whole"), ("4", "shared")}


def test_the_page_has_the_table_of_gpus():
    assert scale.gpu_table() in Path(ranks.PAGE).read_text()
