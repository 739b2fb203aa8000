"""Operators that move numbers without changing them."""

import numpy as np
import pytest
import torch
from tests.gradients import check_rule, daily, evaluate, model_of_node
from tests.linear_rules import check_adjoint, check_like_torch

import onnxgrad

RNG = np.random.default_rng(0)


def x(*shape):
    return RNG.standard_normal(shape)


def ints(*numbers):
    return np.array(numbers, np.int64)


# Operator, inputs, what else model_of_node is told; linear in the first input.
LINEAR = {
    "Transpose": ("Transpose", [x(2, 3, 4)], {}),
    "Transpose-perm": ("Transpose", [x(2, 3, 4)], {"attributes": {"perm": [1, 2, 0]}}),
    "Tile": ("Tile", [x(2, 3), ints(2, 3)], {}),
    "Tile-known": ("Tile", [x(2, 3, 2), ints(1, 3, 2)], {"fixed": [1]}),
    "Tile-once": ("Tile", [x(2, 3), ints(1, 1)], {"fixed": [1]}),
    "Tile-never": ("Tile", [x(2, 3), ints(2, 0)], {}),
    "Pad": ("Pad", [x(3, 4), ints(1, 0, 2, 3)], {}),
    "Pad-negative": ("Pad", [x(3, 4), ints(-1, 2, 1, -2)], {"fixed": [1]}),
    "Pad-axes": ("Pad", [x(2, 3, 4), ints(1, 2), None, ints(-2)], {"fixed": [1, 3]}),
    "Pad-unknown-axes": ("Pad", [x(2, 3, 4), ints(1, 2), None, ints(-2)], {}),
    "Pad-edge": ("Pad", [x(3, 4), ints(1, 0, 2, 3)], {"attributes": {"mode": "edge"}}),
    "Pad-edge-negative": ("Pad", [x(3, 4), ints(1, -1, -1, 3)], {"attributes": {"mode": "edge"}, "fixed": [1]}),
    "Pad-reflect": ("Pad", [x(3, 4), ints(2, 1), None, ints(-1)], {"attributes": {"mode": "reflect"}}),
    "Pad-reflect-known": ("Pad", [x(3, 4), ints(2, 1), None, ints(-1)],
                          {"attributes": {"mode": "reflect"}, "fixed": [1, 3]}),
    "Pad-wrap": ("Pad", [x(3, 4), ints(1, 2, 2, 1)], {"attributes": {"mode": "wrap"}, "fixed": [1]}),
    "CenterCropPad": ("CenterCropPad", [x(5, 4), ints(2, 7)], {}),
    "CenterCropPad-axes": ("CenterCropPad", [x(2, 5, 4), ints(6, 2)], {"attributes": {"axes": [1, -1]}, "fixed": [1]}),
    "DepthToSpace": ("DepthToSpace", [x(2, 8, 2, 3)], {"attributes": {"blocksize": 2}}),
    "DepthToSpace-CRD": ("DepthToSpace", [x(2, 8, 2, 3)], {"attributes": {"blocksize": 2, "mode": "CRD"}}),
    "SpaceToDepth": ("SpaceToDepth", [x(1, 2, 4, 6)], {"attributes": {"blocksize": 2}}),
    "Trilu": ("Trilu", [x(3, 4)], {}),
    "Trilu-lower": ("Trilu", [x(2, 3, 4), np.array(1, np.int64)], {"attributes": {"upper": 0}}),
    "ReverseSequence": ("ReverseSequence", [x(4, 3, 2), ints(4, 2, 1)], {}),
    "ReverseSequence-batch": ("ReverseSequence", [x(3, 4), ints(4, 2, 1)],
                              {"attributes": {"batch_axis": 0, "time_axis": 1}}),
}  # fmt: skip


VARIED = {"Pad-unknown-axes", "Pad-edge-negative", "Pad-reflect", "Pad-wrap", "CenterCropPad-axes"}


@pytest.mark.parametrize("case", daily(LINEAR, *(LINEAR.keys() - VARIED)))
def test_linear(case):
    op_type, inputs, how = LINEAR[case]
    check_adjoint(op_type, *inputs, **how)
    check_rule(op_type, *inputs, fixed=how.get("fixed", ()), **how.get("attributes", {}))


@pytest.mark.parametrize("opset", [18, 24])
def test_other_opsets(opset):
    check_adjoint("Pad", x(2, 3), ints(1, 2), None, ints(1), opset=opset)
    check_adjoint("Transpose", x(2, 3), opset=opset)
    check_rule("Split", x(2, 5), outputs=2, num_outputs=2, opset=opset, twice=False)


def test_space_to_depth_has_modes_since_opset_28():
    check_adjoint("SpaceToDepth", x(1, 2, 4, 6), opset=28, attributes={"blocksize": 2, "mode": "CRD"})
    check_adjoint("DepthToSpace", x(1, 8, 2, 3), opset=28, attributes={"blocksize": 2, "mode": "CRD"})


def test_padded_value():
    check_rule("Pad", x(3, 4), ints(1, 0, 2, 3), np.array(0.5))
    check_rule("Pad", x(3, 4), ints(-1, 2, 1, -2), np.array(0.5), fixed=[1])
    check_rule("Pad", x(2, 3, 4), ints(1, 2), np.array(0.5), ints(-2))


@pytest.mark.parametrize("shapes, axis", [([(2, 3), (2, 1), (2, 2)], -1), ([(2, 3), (1, 3)], 0), ([(2, 3)], 1)])
def test_concat(shapes, axis):
    check_rule("Concat", *(x(*s) for s in shapes), axis=axis)


def test_split():
    check_rule("Split", x(2, 5), ints(2, 3), outputs=2, axis=1)
    check_rule("Split", x(2, 5), ints(2, 0, 3), outputs=3, axis=-1, fixed=[1], of=[0, 2])
    check_rule("Split", x(2, 5), outputs=3, axis=1, num_outputs=3, of=[1])
    check_rule("Split", x(4, 2), outputs=1, num_outputs=1)


@pytest.mark.parametrize("mode, name", [("edge", "replicate"), ("reflect", "reflect"), ("wrap", "circular")])
def test_pad_like_torch(mode, name):
    def pad(data):
        return torch.nn.functional.pad(data, (2, 1, 0, 1), mode=name)

    pads = ints(0, 0, 0, 2, 0, 0, 1, 1)
    check_like_torch(pad, "Pad", x(1, 2, 3, 4), pads, attributes={"mode": mode}, fixed=[1])


def test_like_torch():
    check_like_torch(lambda a: a.repeat(2, 3), "Tile", x(2, 3), ints(2, 3))
    shuffled = {"attributes": {"blocksize": 2, "mode": "CRD"}}
    check_like_torch(lambda a: torch.nn.functional.pixel_shuffle(a, 2), "DepthToSpace", x(2, 8, 2, 3), **shuffled)
    check_like_torch(lambda a: a.triu(-1), "Trilu", x(3, 4), np.array(-1, np.int64))
    check_like_torch(lambda a, b: torch.cat([a, b], 1), "Concat", x(2, 3), x(2, 1), wrt=[0, 1], attributes={"axis": 1})


@pytest.mark.parametrize("numbers", [(1.0, 3.2, 0.5), (2.0, -1.3, -0.7), (1.0, 0.5, 1.0)])
def test_range(numbers):
    check_rule("Range", *map(np.array, numbers), wrt=[0, 2])


def test_range_as_in_torch():
    start, delta = torch.tensor(0.5, requires_grad=True), torch.tensor(0.25, requires_grad=True)
    result = start + delta * torch.arange(7)
    g = RNG.standard_normal(7).astype(np.float32)
    result.backward(torch.from_numpy(g))
    model, feeds = model_of_node("Range", [np.array(0.5), np.array(2.2), np.array(0.25)], dtype=np.float32)
    got = evaluate(onnxgrad.gradient(model, ["in_0", "in_2"]), {**feeds, "out_0_grad": g})[1:]
    np.testing.assert_allclose(got, [start.grad, delta.grad], rtol=1e-6)
