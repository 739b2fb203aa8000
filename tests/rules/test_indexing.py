"""Operators that pick elements by position, or put them there."""

import warnings

import numpy as np
import pytest
import torch
from tests.gradients import check_rule, evaluate, model_of_node
from tests.linear_rules import check_adjoint, check_like_torch

import onnxgrad

RNG = np.random.default_rng(0)


def x(*shape):
    return RNG.standard_normal(shape)


def ints(*numbers):
    return np.array(numbers, np.int64)


def number(n):
    return np.array(n, np.int64)


SUM = {"exclusive": 1, "reverse": 1}
LINEAR = {
    "Gather": ("Gather", [x(4, 3), ints(0, -1, 1, 0)], {}),
    "Gather-axis": ("Gather", [x(4, 3), np.array([[2, 0], [1, 1]], np.int32)], {"axis": -1}),
    "Gather-one": ("Gather", [x(4, 3), number(1)], {}),
    "GatherElements": ("GatherElements", [x(4, 3), ints([0, 1, 2], [-1, 1, 0])], {}),
    "GatherElements-axis": ("GatherElements", [x(2, 3), ints([0, 0], [-1, 1])], {"axis": -1}),
    "GatherND": ("GatherND", [x(3, 4, 2), ints([0, 1], [2, -1], [0, 1])], {}),
    "GatherND-elements": ("GatherND", [x(3, 4), ints([0, 1], [2, -1], [0, 1])], {}),
    "GatherND-slices": ("GatherND", [x(3, 4, 2), ints([[0], [2]], [[0], [-1]])], {}),
    "GatherND-batch": ("GatherND", [x(2, 3, 4), ints([[0], [2], [2]], [[1], [1], [-1]])], {"batch_dims": 1}),
    "GatherND-batches": ("GatherND", [x(2, 3, 4, 2), RNG.integers(0, 4, (2, 3, 5, 1))], {"batch_dims": 2}),
    "Slice": ("Slice", [x(4, 6), ints(1, -1), ints(4, -7), ints(0, 1), ints(2, -2)], {}),
    "Slice-first-axes": ("Slice", [x(4, 6), ints(1), ints(3)], {}),
    "Compress": ("Compress", [x(4, 3), np.array([1, 0, 1], bool)], {}),
    "Compress-axis": ("Compress", [x(4, 3), np.array([1, 0, 1], bool)], {"axis": -1}),
    "CumSum": ("CumSum", [x(4, 3), number(-1)], {}),
    "CumSum-exclusive": ("CumSum", [x(4, 3), number(0)], {"exclusive": 1}),
    "CumSum-both": ("CumSum", [x(4, 3), number(0)], SUM),
}


@pytest.mark.parametrize("case", LINEAR)
def test_linear(case):
    op_type, inputs, attributes = LINEAR[case]
    check_adjoint(op_type, *inputs, attributes=attributes)
    check_rule(op_type, *inputs, **attributes)


def test_slice_by_constants():
    check_rule("Slice", x(4, 6), ints(1, 2), ints(3, 2**63 - 1), ints(-1, 0), fixed=[1, 2, 3])


@pytest.mark.parametrize(
    "attributes", [{}, {"axis": 0, "largest": 0}, {"axis": 0, "largest": 0, "sorted": 0}], ids=["", "smallest", "any"]
)
def test_top_k(attributes):
    check_rule("TopK", x(4, 6), ints(2), outputs=2, of=[0], **attributes)


def test_unique():
    check_rule("Unique", x(4, 3))
    check_rule("Unique", x(4, 3), axis=1, sorted=0)


def test_one_hot_values():
    check_rule("OneHot", ints(0, 2, -1, 7), number(3), x(2))
    check_rule("OneHot", ints([0, 2], [1, 1]), number(3), x(2), axis=0)


ONCE = {"ScatterElements": ints([0, 1, 2], [3, 2, 0]), "ScatterND": ints([0], [2])}
AGAIN = {"ScatterElements": ints([0, 1, 2], [0, 1, -1]), "ScatterND": ints([1], [-3])}


@pytest.mark.parametrize("reduction", ["none", "add", "mul", "max", "min"])
@pytest.mark.parametrize("op_type", ["ScatterElements", "ScatterND"])
def test_scatter(op_type, reduction):
    indices = (ONCE if reduction == "none" else AGAIN)[op_type]
    check_rule(op_type, x(4, 3), indices, x(2, 3), reduction=reduction)


@pytest.mark.slow
def test_scatter_to_single_elements():
    check_rule("ScatterND", x(4, 3), ints([1, 1], [-3, -2], [0, 0]), x(3), reduction="max")
    check_rule("ScatterND", x(4, 3), ints([[1, 1], [0, 2]]), x(1, 2), reduction="none")
    check_rule("ScatterElements", x(3, 4), ints([1, 0], [1, -1]), x(2, 2), axis=-1, reduction="mul")


@pytest.mark.parametrize("reduction, name", [("mul", "prod"), ("max", "amax"), ("min", "amin"), ("add", "sum")])
@pytest.mark.parametrize("zeros", [0, 1, 2, 3])
def test_scatter_like_torch(reduction, name, zeros):
    """Zeros among factors, and ties of the largest."""
    data = np.array([[1.0, 2, 3], [0, 5, 2], [1, 1, 1]])
    updates = np.array([[2.0, 2, 3], [4, 2, 3], [5, 2, -1]])
    updates[:zeros, 1:] = 0
    indices = ints([0, 1, 2], [0, 1, 0], [0, 1, 0])

    def scatter(data, updates):
        return data.scatter_reduce(0, torch.from_numpy(indices), updates, name)

    check_like_torch(
        scatter, "ScatterElements", data, indices, updates, wrt=[0, 2], attributes={"reduction": reduction}
    )
    flat = np.stack([indices, np.broadcast_to(np.arange(3), (3, 3))], -1)
    check_like_torch(scatter, "ScatterND", data, flat, updates, wrt=[0, 2], attributes={"reduction": reduction})


def test_cum_prod():
    check_rule("CumProd", x(4, 3), number(0), opset=26)
    for exclusive, reverse in [(0, 0), (1, 1)]:
        zeros = np.array([[1.0, 0, 2, 0, 3], [4, 5, 0, 2, 1]])
        check_rule("CumProd", zeros, number(1), opset=26, exclusive=exclusive, reverse=reverse, twice=False)
    check_like_torch(lambda a: a.cumprod(1), "CumProd", zeros, number(1), opset=26)


def test_like_torch():
    index = ints([0, 2], [1, 1])
    check_like_torch(lambda a: a[torch.from_numpy(index)], "Gather", x(3, 2), index)
    check_like_torch(lambda a: a.gather(1, torch.from_numpy(index)), "GatherElements", x(2, 3), index,
                     attributes={"axis": 1})  # fmt: skip
    check_like_torch(lambda a: a.topk(2).values, "TopK", x(3, 4), ints(2), outputs=2)
    check_like_torch(lambda a: a.cumsum(0), "CumSum", x(3, 4), number(0))
    check_like_torch(lambda a: a[1:, ::2], "Slice", x(3, 4), ints(1, 0), ints(9, 9), ints(0, 1), ints(1, 2))


def test_pytorch_does_not_train_the_row_for_padding(tmp_path):
    table, target = torch.nn.Embedding(5, 3, padding_idx=0), torch.randn(2, 4, 3)
    ids, path = torch.tensor([[1, 0, 4, 0], [0, 2, 1, 0]]), str(tmp_path / "m.onnx")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(table, (ids,), path, dynamo=True, output_names=["y"], input_names=["x"], verbose=False)
    trainer = onnxgrad.Trainer(path, onnxgrad.losses.MSE("y"), onnxgrad.optim.SGD(lr=0.1))
    trainer.step({"x": ids.numpy(), "target": target.numpy()})
    torch.nn.functional.mse_loss(table(ids), target).backward()
    np.testing.assert_allclose(trainer.gradients["weight"], table.weight.grad, rtol=1e-6)
    assert not trainer.gradients["weight"][0].any()


@pytest.mark.parametrize("mode", ["linear", "circular"])
@pytest.mark.parametrize(("past", "update", "axis"), [((2, 5, 3), (2, 2, 3), -2), ((2, 3, 2, 4), (2, 3, 2, 3), 3)])
@pytest.mark.parametrize("has_indices", [False, True], ids=["", "indices"])
def test_tensor_scatter(past, update, axis, mode, has_indices):
    size = past[axis] - update[axis]
    at = [ints(size, past[axis] - 1 if mode == "circular" else 0)] if has_indices else []
    check_rule("TensorScatter", x(*past), x(*update), *at, opset=24, axis=axis, mode=mode)


def test_tensor_scatter_in_float16():
    inputs = [x(2, 4, 3), x(2, 2, 3), ints(1, 3)]
    how = {"attributes": {"mode": "circular"}, "opset": 24, "dtype": np.float16, "static": False}
    model, feeds = model_of_node("TensorScatter", inputs, **how)
    g = x(2, 4, 3).astype(np.float16)
    past, update = evaluate(onnxgrad.gradient(model, ["in_0", "in_1"]), {**feeds, "out_0_grad": g})[1:]
    np.testing.assert_array_equal(update, np.stack([g[0, [1, 2]], g[1, [3, 0]]]))
    expected = g.copy()
    expected[0, [1, 2]] = expected[1, [3, 0]] = 0
    np.testing.assert_array_equal(past, expected)
