"""Types of half a byte in sessions: onnxruntime packs two into a byte, the first into its lower half."""

import ctypes

import numpy as np
import pytest
from onnx import TensorProto, helper
from tests.checks import DEVICE, same_bits
from tests.runtime.nodes import ELEMENT_TYPES, feeds_of, model_of
from tests.runtime.sessions import bits_of, check_session, run_in, session_of

from onnxgrad import slice_grad
from onnxgrad.runtime import plan
from onnxgrad.runtime.custom_op import FOUR_BIT_TYPES
from onnxgrad.tensor_types import DTYPES

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="speaks of the CPU alone")


def numbers(shape, name):
    """All values that the type has, again and again."""
    low = 0 if name == "uint4" else -8
    values = np.arange(low, low + 16) * (0.5 if name == "float4e2m1" else 1)
    return np.resize(values, shape).astype(DTYPES[name])


@pytest.mark.parametrize("name", FOUR_BIT_TYPES)
@pytest.mark.parametrize(
    ("shape", "starts", "ends", "steps"),
    [
        ([5], [1], [4], None),
        ([1], [0], [1], None),
        ([3, 5], [0, 1], [3, 5], [1, 3]),
        ([3, 7], [2, -1], [-9, -9], [-1, -2]),
        ([4, 3], [1], [1], None),
        ([0, 3], [0], [9], None),
        ([3, 150_001], [0, 1], [3, 150_000], None),  # more than one task
    ],
    ids=str,
)
def test_sizes(shape, starts, ends, steps, name):
    axes = np.arange(len(starts))
    read = tuple(slice(s, None if e < -8 else e, t) for s, e, t in zip(starts, ends, steps or [1, 1], strict=False))
    dY = numbers(np.zeros(shape, np.uint8)[read].shape, name)
    given = [np.array(shape), np.array(starts), np.array(ends), axes, None if steps is None else np.array(steps)]
    check_session(slice_grad, dY, *given)


@pytest.mark.parametrize("name", ["int4", "uint4"])
def test_onnxruntime_packs_as_we_do(name):
    """Its own Cast before and after the node."""
    numbers_of = numbers((3, 5), name).astype(np.float32)
    args = numbers((3, 5), name), np.array([4, 8]), np.array([1, 0]), np.array([4, 5])
    model = model_of(slice_grad, args, {})
    model.graph.node.insert(0, helper.make_node("Cast", ["wide"], ["dY"], to=ELEMENT_TYPES[name]))
    model.graph.node.append(helper.make_node("Cast", ["dX"], ["result"], to=TensorProto.FLOAT))
    model.graph.input[0].CopyFrom(helper.make_tensor_value_info("wide", TensorProto.FLOAT, None))
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("result", TensorProto.FLOAT, None))
    feeds = feeds_of(slice_grad, args)
    del feeds["dY"]
    (result,) = session_of(model).run(None, feeds | {"wide": numbers_of})
    assert same_bits(result, slice_grad(numbers_of, *args[1:]))


def test_the_half_of_the_last_byte_that_nobody_reads_is_zero():
    args = numbers((3,), "int4"), np.array([3]), np.array([0]), np.array([3])
    (value,) = run_in(session_of(model_of(slice_grad, args, {})), slice_grad, args)
    assert ctypes.string_at(value.data_ptr(), 2) == bytes([0x98, 0x0A])
    assert same_bits(bits_of(value, DTYPES["int4"]), args[0])


def test_no_memory_to_work_in_is_an_error(monkeypatch):
    made = plan.make_plan

    def huge(node, key):
        result = made(node, key)
        result.memory["workspace"] = 2**60
        return result

    monkeypatch.setattr(plan, "make_plan", huge)
    args = numbers((3,), "int4"), np.array([3]), np.array([0]), np.array([3])
    with pytest.raises(Exception, match="SliceGrad: there was not enough memory to run it"):
        run_in(session_of(model_of(slice_grad, args, {})), slice_grad, args)
