"""What is measured is kept by kind of processor, and the pages have what was measured."""

import pytest
from bench import avx2, machine, measure, pages, results, step_floor, training_report
from bench.cases import FLOOR
from bench.report import by_processor, median
from bench.results import Row


@pytest.mark.parametrize(
    "model, flags, kind",
    [
        ("Intel(R) Xeon(R) Processor", "avx2 avx512f amx_tile", "Intel Xeon, AMX"),
        ("AMD EPYC 9B14 96-Core Processor", "avx512f avx2", "AMD EPYC, AVX-512"),
        ("aarch64", "", "aarch64"),
    ],
)
def test_the_kind_of_a_processor_is_its_family_and_its_widest_instructions(model, flags, kind):
    assert machine.kind(model, flags.split()) == kind


def test_a_processor_whose_newer_instructions_are_left_alone_is_a_kind_of_its_own(monkeypatch):
    for name, value in avx2.ALONE.items():
        monkeypatch.setenv(name, value)
    assert machine.processor().endswith(", AVX2 alone")


def test_the_floor_counts_products_results_and_parameters():
    """3 × 4 · 4 × 5: the input has no gradient, so there are two products of 2 · 60 operations."""
    torch = pytest.importorskip("torch")
    batch = {"x": torch.ones(3, 4).numpy(), "target": torch.zeros(3, dtype=torch.int64).numpy()}
    work = step_floor.work_of(torch.nn.Linear(4, 5), batch)
    assert work == (2 * 2 * 3 * 4 * 5, 4 * (5 * 15 + 8 * 25))
    assert step_floor.Speed(flops=240e3, bytes=1100e3).milliseconds(work) == pytest.approx(2.0)


def test_the_table_says_how_many_times_the_floor_a_step_takes():
    sides = ("onnxgrad", "onnxruntime-training", "PyTorch", FLOOR)
    taken = zip(sides, (3, 9, 6, 2.5), strict=True)
    rows = [Row("A, AVX2 alone", "mlp", "MLP", "float32", side, ms, best_ms=ms) for side, ms in taken]
    rows[-1].note = "1 GFLOP"
    table = training_report.training(rows)
    assert "| 2.5, × 1.20 |" in table and "MLP: 1 GFLOP." in table and "no such switch" in table


def test_a_timing_has_the_median_and_where_eight_of_ten_are():
    timing = measure.timing([k / 1e3 for k in range(11)])
    assert [timing.p10_ms, timing.median_ms, timing.p90_ms, timing.best_ms] == pytest.approx([1, 5, 9, 0])
    assert timing.calls == 11


def test_a_run_has_the_calls_asked_for_and_the_seconds():
    effort = measure.Effort(5, 3.0, calls=100, slow_calls=30)
    assert [effort.calls_of_run(seconds) for seconds in (0.003, 0.09, 0.3)] == [1000, 100, 30]


def test_a_run_replaces_rows_of_its_own_processor_which_then_comes_first_on_pages(tmp_path):
    def row(processor, case, milliseconds):
        return Row(processor, case, case, "float32", "onnxgrad", milliseconds, milliseconds / 2, 2 * milliseconds)

    file = tmp_path / "rows.csv"
    results.write(file, [row("A", "mlp", 1.0), row("A", "gru", 2.0), row("B", "mlp", 3.0)])
    results.update(file, [row("A", "mlp", 4.0)], lambda old: old.case == "mlp", lambda old: old.case)
    found = results.read(file)
    assert [(r.processor, r.case, r.median_ms) for r in found] == [("B", "mlp", 3), ("A", "gru", 2), ("A", "mlp", 4)]
    assert list(by_processor(found)) == ["A", "B"]
    assert median(found[0]) == "3 (1.5–6)"


def test_the_pages_have_what_was_measured():
    assert [str(page) for page in pages.stale()] == []


@pytest.mark.parametrize(
    "name, operator, part",
    [
        ("/layers/layers.0/qkv/MatMul", "Gemm", "forward: products"),
        ("/layers/layers.0/qkv/MatMul_grad/Gemm", "Gemm", "backward: products"),
        ("/conv1/Conv_grad", "ConvGrad", "backward: products"),
        ("/Relu", "Relu", "forward: other operators"),
        ("/layers/layers.0/Add_3_grad/Add", "Add", "backward: other operators"),
    ],
)
def test_a_node_belongs_to_a_part_of_the_step(name, operator, part):
    from bench.step_profile import part_of

    assert part_of(name, operator) == part
