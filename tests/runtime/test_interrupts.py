"""KeyboardInterrupt and SystemExit while onnxruntime calls Python: the node fails, and whoever runs it raises them."""

import ctypes
import sys

import numba
import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper
from tests.checks import DEVICE
from tests.runtime.nodes import feeds_of, model_of
from tests.runtime.sessions import OPTIONS, session_of

import onnxgrad
from onnxgrad import gather_grad
from onnxgrad.cpu.core.c_calls import invoke
from onnxgrad.runtime import interrupts, kernels, plan, register
from onnxgrad.runtime.interrupts import run

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="speaks of the CPU alone")
GATHER = np.array([40, 64]), np.array([0, 1]), np.ones((2, 64), np.float32)
KINDS = [KeyboardInterrupt, SystemExit]


def raising(error):
    def function(*args):
        raise error

    return function


@pytest.mark.parametrize("kind", KINDS)
def test_while_a_plan_is_made(monkeypatch, kind):
    session = session_of(model_of(gather_grad, GATHER, {}, name="gather"))
    feeds, error = feeds_of(gather_grad, GATHER), kind()
    with monkeypatch.context() as patch:
        patch.setattr(plan, "make_plan", raising(error))
        with pytest.raises(Exception, match=rf"interrupted by {kind.__name__} \(node 'gather'\)"):
            session.run(None, feeds)
        with pytest.raises(kind) as caught:
            run(session.run, None, feeds)
        assert caught.value is error
    assert run(session.run, None, feeds)[0].sum() == 128


@pytest.mark.parametrize("kind", KINDS)
def test_while_a_kernel_is_created(monkeypatch, kind):
    model = model_of(gather_grad, GATHER, {}).SerializeToString()
    monkeypatch.setattr(kernels, "add", raising(kind()))
    with pytest.raises(Exception, match=f"interrupted by {kind.__name__}"):
        onnxruntime.InferenceSession(model, OPTIONS)
    with pytest.raises(kind):
        run(onnxruntime.InferenceSession, model, OPTIONS)


def test_while_operators_are_registered(monkeypatch):
    monkeypatch.setattr(register, "_domains", raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        onnxgrad.register()


SET_INTERRUPT = ctypes.cast(ctypes.pythonapi.PyErr_SetInterrupt, ctypes.c_void_p).value


@numba.cfunc("int64(int64)")
def interrupt(words):
    """A signal arrives while native code runs."""
    invoke(SET_INTERRUPT, ())
    return -1


@numba.cfunc("int64(int64)")
def interrupt_and_find(words):
    """The same in a call that finds a bad value."""
    invoke(SET_INTERRUPT, ())
    return 0


def two_nodes():
    """The second runs after the first."""
    floats = helper.make_tensor_value_info("dY", TensorProto.FLOAT, ["n", 64])
    numbers = [helper.make_tensor_value_info(name, TensorProto.INT64, [None]) for name in ("shape", "indices")]
    nodes = [
        helper.make_node("GatherGrad", ["shape", "indices", dY], [dX], domain="com.microsoft")
        for dY, dX in (("dY", "inner"), ("inner", "dX"))
    ]
    outputs = [helper.make_tensor_value_info("dX", TensorProto.FLOAT, [None, None])]
    graph = helper.make_graph(nodes, "two", [*numbers, floats], outputs)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


@pytest.mark.parametrize("function", [interrupt, interrupt_and_find], ids=["prepare", "explain"])
def test_a_signal_just_before_python_is_asked(monkeypatch, function):
    feeds = {"shape": np.array([2, 64]), "indices": np.array([0, 1]), "dY": np.ones((2, 64), np.float32)}
    prepare, made = plan.prepare, []

    def prepared(call):
        made.append(call)
        return (function.address, []) if len(made) == 1 else prepare(call)

    monkeypatch.setattr(plan, "prepare", prepared)
    session = session_of(two_nodes())
    with pytest.raises(KeyboardInterrupt):
        run(session.run, None, feeds)
    session = session_of(two_nodes())
    made.clear()
    with pytest.raises(Exception, match="interrupted, by Ctrl-C perhaps"):
        session.run(None, feeds)


def test_what_others_cannot_raise_goes_where_it_went(monkeypatch):
    there = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: there.append(unraisable.exc_type))
    interrupts._hook_unraisable.__wrapped__()

    @ctypes.CFUNCTYPE(None)
    def broken():
        raise KeyboardInterrupt

    broken()
    assert there == [KeyboardInterrupt]
