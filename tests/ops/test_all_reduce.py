"""AllReduceSum: a process alone gets its own numbers back, and a group what its function makes of them."""

import contextlib
from collections.abc import Iterator

import numpy as np
import onnxruntime
import pytest
from tests.checks import DEVICE, check, raises, same_bits
from tests.expected import exact
from tests.node_cases import NodeCase
from tests.runtime.nodes import feeds_of, model_of

import onnxgrad
from onnxgrad.cpu.core import groups
from onnxgrad.ops.all_reduce import all_reduce_sum

TYPES = [np.dtype(np.float32), np.dtype(np.float64)]
on_the_cpu = pytest.mark.skipif(DEVICE != "cpu", reason="talks to other processes, which the CPU does")


def numbers(shape, dtype=np.float32):
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


@contextlib.contextmanager
def group(reduce):
    number = groups.join(reduce)
    try:
        yield number
    finally:
        groups.leave(number)


@on_the_cpu
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 4, 5)], ids=str)
def test_alone(shape, dtype):
    check(all_reduce_sum, numbers(shape, dtype))


@on_the_cpu
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_group_in_calls_and_in_sessions(dtype):
    data = numbers((3, 4), dtype)
    seen = []

    def three_of_the_same(array):
        seen.append(array.copy())
        array *= 3

    with group(three_of_the_same) as number:
        assert same_bits(all_reduce_sum(data, group=number), data * dtype.type(3))
        model = model_of(all_reduce_sum, [data], {"group": number})
        session = onnxruntime.InferenceSession(model.SerializeToString(), onnxgrad.register())
        for _ in range(2):
            assert same_bits(session.run(None, feeds_of(all_reduce_sum, [data]))[0], data * dtype.type(3))
    assert len(seen) == 3 and all(same_bits(s, data.reshape(-1)) for s in seen)


@on_the_cpu
def test_what_is_refused():
    with raises(ValueError, "AllReduceSum: group is 123456, which this process is not in"):
        all_reduce_sum(numbers(3), group=123456)


@on_the_cpu
def test_its_gradient_is_the_sum_of_the_gradients():
    data = numbers((2, 3))
    model = model_of(all_reduce_sum, [data], {"group": 0})
    assert onnxgrad.check_gradient(model, feeds_of(all_reduce_sum, [data]), "data").worst < 1e-6
    made = onnxgrad.gradient(model, wrt="data")
    assert [n.op_type for n in made.graph.node].count("AllReduceSum") == 2


expected = exact  # how far a right kernel may be from the definition


def node_cases() -> Iterator[NodeCase]:
    """Small calls for every runtime to run."""
    for dtype in (np.dtype(np.float32), np.dtype(np.float64)):

        def make(dtype=dtype):
            return (np.random.default_rng(0).standard_normal((3, 40)).astype(dtype),)

        yield NodeCase(all_reduce_sum, {"type": str(dtype)}, make, {"group": 0})
