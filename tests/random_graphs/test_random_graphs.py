"""Random graphs, each of them differentiated and trained: some daily, more in the slow tests, all by the command."""

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from onnx import helper
from tests.random_graphs import checks
from tests.random_graphs.__main__ import main
from tests.random_graphs.growth import Case, model_of, nodes_of
from tests.random_graphs.shrink import said, shrink
from tests.random_graphs.ways import random_case

DAILY, SLOW = range(20), range(100, 150)
LONG = 5  # one in so many has its training, file and second order checked, too


def check(seed: int, nodes: int, thorough: bool) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # of which small graphs have no use
    try:
        checks.check_all(random_case(seed, nodes), thorough)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("seed", DAILY)
def test_small_graphs(seed):
    check(seed, 12, seed == 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SLOW)
def test_graphs_of_fifty_nodes(seed):
    check(seed, 50, seed % LONG == 0)


def test_a_seed_is_a_graph():
    assert random_case(3, 15).model == random_case(3, 15).model


def wrong_case():
    """A Sin that a check is going to find, in the midst of others."""
    nodes = [
        helper.make_node("Tanh", ["x"], ["a"]),
        helper.make_node("Sin", ["a"], ["b"]),
        helper.make_node("Mul", ["b", "a"], ["c"]),
        helper.make_node("Cos", ["x"], ["d"]),
        helper.make_node("Add", ["c", "d"], ["y"]),
    ]
    info = [helper.make_tensor_value_info(n, 1, [2]) for n in ("x", "y", "d")]
    model = model_of(helper.make_graph(nodes, "g", info[:1], info[1:]), 20)
    return Case(model, {"x": np.ones(2, np.float32)}, ["y", "d"])


def test_what_fails_is_made_small():
    def has_no_sine(case: Case) -> bool:
        if any(node.op_type == "Sin" for node in nodes_of(case.model.graph)):
            raise checks.WrongError("there is a sine")
        return True

    case = wrong_case()
    with pytest.raises(checks.WrongError) as raised:
        has_no_sine(case)
    small = shrink(case, has_no_sine, said(raised.value))
    assert [node.op_type for node in small.model.graph.node] in (["Sin", "Add"], ["Sin", "Mul", "Add"])
    assert small.of == ["y"]


def test_checks_find_a_wrong_gradient(monkeypatch):
    """The oracle is told that Tanh is a sine: results differ, and gradients."""
    monkeypatch.setitem(checks.run_model.__globals__["COMPUTES"], "Tanh", lambda n, x: x.sin())
    with pytest.raises(checks.WrongError, match=r"onnxruntime: \w is off by"):
        checks.check_results(wrong_case())
    with pytest.raises(checks.WrongError, match=r"plain: \w is off by"):
        checks.check_gradient(wrong_case())


def test_the_command_prints_a_table():
    result = CliRunner().invoke(main, ["--count", "2", "--nodes", "6", "--every", "2"])
    assert result.exit_code == 0, result.output
    rows = dict(line.split(maxsplit=1) for line in result.output.splitlines()[:3])
    assert rows["graphs"] == "2" and rows["wrong"] == "0"
