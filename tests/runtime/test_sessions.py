"""Every operator in a session of stock onnxruntime gives the bits of a direct call, on the CPU or the CUDA provider."""

import itertools
import subprocess
import sys
import threading

import numpy as np
import onnxruntime
import pytest
from tests import gru_cases
from tests.checks import DEVICE, FLOATS, INDICES, as_tuple, call, raises, same_bits
from tests.runtime.nodes import element_type, feeds_of, model_of

import onnxgrad
from onnxgrad import (
    broadcast_gradient_args,
    gather_elements_grad,
    gather_grad,
    gru_grad,
    gru_training,
    slice_grad,
)
from onnxgrad.runtime import compute, plan
from onnxgrad.runtime.custom_op import ELEMENT_TYPES
from onnxgrad.tensor_types import DTYPES

F32 = np.dtype(np.float32)
if DEVICE == "cuda":
    import torch

    onnxruntime.preload_dlls()  # CUDA's libraries, those that came with torch
PROVIDERS = ["CUDAExecutionProvider"] * (DEVICE == "cuda") + ["CPUExecutionProvider"]
OPTIONS = onnxgrad.register()
OPTIONS.log_severity_level = 4  # errors are raised; they need not be printed too
on_the_cpu = pytest.mark.skipif(DEVICE != "cpu", reason="speaks of the CPU alone")


def session_of(model):
    session = onnxruntime.InferenceSession(model.SerializeToString(), OPTIONS, providers=PROVIDERS)
    assert session.get_providers() == PROVIDERS, "onnxruntime cannot use the provider under test"
    return session


def run_in(session, op, inputs):
    """Runs a session through OrtValues, which take types that NumPy has not."""
    binding, kept = session.io_binding(), []  # values point into the arrays, which must live till the end of the run
    for name, given in feeds_of(op, inputs).items():
        array = np.ascontiguousarray(given).reshape(np.shape(given))
        kept.append(array.view(carrier(array.dtype)).reshape(array.shape))
        value = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(kept[-1], element_type(array.dtype))
        binding.bind_ortvalue_input(name, value)
    for output in session.get_outputs():
        binding.bind_output(output.name, "cpu")
    session.run_with_iobinding(binding)
    return binding.get_outputs()


def carrier(dtype):
    """A type of NumPy's own for the bits of one of ml_dtypes'."""
    return dtype if dtype.isbuiltin == 1 else np.dtype(f"uint{8 * dtype.itemsize}")


def bits_of(value, dtype):
    """The contents of an OrtValue."""
    if dtype.isbuiltin == 1:
        return value.numpy()
    import ctypes

    shape = value.shape()
    size = int(np.prod(shape)) * dtype.itemsize
    raw = ctypes.string_at(value.data_ptr(), size) if size else b""
    return np.frombuffer(raw, np.uint8).view(dtype).reshape(shape)


def check_session(op, *inputs, outputs=None, **attributes):
    """The session's results are the direct call's, bit for bit, on a second run and with other shapes between."""
    expected = as_tuple(call(op, *inputs, **attributes, **({"outputs": outputs} if outputs is not None else {})))
    names = [o.name for o in op.outputs]
    session = session_of(model_of(op, inputs, attributes, outputs))
    for _ in range(2):
        results = run_in(session, op, inputs)
        by_name = dict(zip([o.name for o in session.get_outputs()], results, strict=True))
        for name, wanted in zip(names, expected, strict=True):
            if wanted is not None and (outputs is None or name in outputs):
                assert same_bits(bits_of(by_name[name], wanted.dtype), wanted), name
    return session


@pytest.mark.parametrize("index", INDICES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape_type", [np.int64, np.int32])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_gather_grad(axis, shape_type, dtype, index):
    rng = np.random.default_rng(0)
    shape = (5, 33, 7)
    indices = rng.integers(-shape[axis], shape[axis], (4, 3)).astype(index)
    dims = shape[: axis % 3] + indices.shape + shape[axis % 3 + 1 :]
    check_session(gather_grad, np.array(shape, shape_type), indices, rng.standard_normal(dims).astype(dtype), axis=axis)


@pytest.mark.parametrize("index", INDICES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_gather_elements_grad(axis, dtype, index):
    rng = np.random.default_rng(0)
    indices = rng.integers(-4, 4, (4, 4, 4)).astype(index)
    dY = rng.standard_normal(indices.shape).astype(dtype)
    check_session(gather_elements_grad, dY, np.array([5, 4, 6]), indices, axis=axis)


@pytest.mark.parametrize("outputs", [None, ["a_axes"], ["b_axes"]], ids=str)
def test_broadcast_gradient_args(outputs):
    for a, b in (([2, 3], [3]), ([], [4]), ([1, 5, 1], [7, 1, 1, 2]), ([3], [3])):
        both = np.array(a, np.int64), np.array(b, np.int64)
        expected = dict(zip(("a_axes", "b_axes"), broadcast_gradient_args(*both), strict=True))
        session = session_of(model_of(broadcast_gradient_args, both, {}, outputs))
        for name in outputs or expected:
            (result,) = session.run([name], {"a_shape": both[0], "b_shape": both[1]})
            assert same_bits(result, expected[name])


@pytest.mark.parametrize("index", INDICES, ids=str)
@pytest.mark.parametrize("name", list(ELEMENT_TYPES))
def test_slice_grad(name, index):
    dtype = DTYPES[name]
    dY = (np.arange(12) % 5).astype(dtype).reshape(2, 6)
    starts, ends = np.array([0, -1], index), np.array([2, -99], index)
    for axes, steps in (
        (None, None),
        (np.array([0, 1], index), None),
        (np.array([0, -1], index), np.array([1, -1], index)),
    ):
        last = ends if steps is not None else np.array([2, 8], index)
        first = starts if steps is not None else np.array([0, 2], index)
        shape = np.array([3, 6] if steps is not None else [3, 8])
        check_session(slice_grad, dY, shape, first, last, axes, steps)


@pytest.mark.parametrize("lengths", [False, True], ids=["whole", "lengths"])
@pytest.mark.parametrize("direction", gru_cases.DIRECTIONS)
@pytest.mark.parametrize("linear_before_reset", [0, 1])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_gru(dtype, linear_before_reset, direction, lengths):
    given = gru_cases.case(S=4, N=3, inputs=5, H=6, direction=direction, lengths=lengths, dtype=dtype.type)
    attributes = {"linear_before_reset": linear_before_reset, "direction": direction, "hidden_size": 6}
    check_session(gru_training, *given.forward, **attributes)
    check_session(gru_grad, *given.backward(**attributes), **attributes)


@pytest.mark.parametrize(
    "missing", [m for n in (1, 2) for m in itertools.combinations(gru_cases.OPTIONALS, n)], ids="-".join
)
def test_gru_without_optional_inputs(missing):
    given = gru_cases.case(dtype=np.float32).without(*missing)
    check_session(gru_training, *given.forward)
    check_session(gru_grad, *given.backward(), linear_before_reset=0)


@pytest.mark.parametrize("count", [1, 2])
def test_gru_with_some_outputs(count):
    given = gru_cases.case(dtype=np.float32)
    check_session(gru_training, *given.forward, linear_before_reset=1)
    session = session_of(model_of(gru_training, given.forward, {}, ["HAll", "ZRH"]))
    HAll, _, ZRH = call(gru_training, *given.forward)
    results = session.run(["HAll", "ZRH"], feeds_of(gru_training, given.forward))
    assert same_bits(results[0], HAll) and same_bits(results[1], ZRH)
    for outputs in itertools.combinations(gru_cases.GRADIENTS, count):
        check_session(gru_grad, *given.backward(), outputs=list(outputs))


def test_gru_with_every_attribute():
    given = gru_cases.case(direction="bidirectional", dtype=np.float32)
    attributes = {
        "direction": "bidirectional",
        "activations": ["HardSigmoid", "ScaledTanh", "sigmoid", "LeakyRelu"],
        "activation_alpha": [0.25, 1.5, 0.125],
        "activation_beta": [0.5, 0.75],
        "clip": 0.5,
        "linear_before_reset": 1,
    }
    check_session(gru_training, *given.forward, **attributes)
    check_session(gru_grad, *given.backward(**attributes), **attributes)


def test_shapes_may_change_from_run_to_run():
    session = session_of(model_of(gather_grad, (np.zeros(1, np.int64), np.zeros(1, np.int64), np.zeros(1, F32)), {}))
    rng = np.random.default_rng(0)
    for trial in range(600):  # more than the plans that are kept
        rows, width = trial % 300 + 1, trial % 7 + 1
        indices, dY = rng.integers(0, rows, 5), rng.standard_normal((5, width)).astype(F32)
        feeds = {"shape": np.array([rows, width]), "indices": indices, "dY": dY}
        assert same_bits(session.run(None, feeds)[0], call(gather_grad, [rows, width], indices, dY))


@on_the_cpu
def test_plans_that_are_used_once_are_not_kept_for_ever():
    psutil = pytest.importorskip("psutil")
    session = session_of(model_of(broadcast_gradient_args, (np.zeros(1, np.int64), np.zeros(1, np.int64)), {}))
    sizes = []
    for block in range(4):
        for k in range(2000):
            shape = np.array([2000 * block + k + 2])
            session.run(None, {"a_shape": shape, "b_shape": np.ones(1, np.int64)})
        sizes.append(psutil.Process().memory_info().rss)
    assert sizes[-1] - sizes[0] < 4 * 2**20, sizes


@on_the_cpu
def test_no_memory_to_work_in_is_an_error(monkeypatch):
    made = plan.make_plan

    def huge(node, key):
        result = made(node, key)
        result.words[compute.WORKSPACE] = 2**60
        return result

    monkeypatch.setattr(plan, "make_plan", huge)
    args = np.array([40, 64]), np.array([0, 1]), np.ones((2, 64), F32)
    session = session_of(model_of(gather_grad, args, {}))
    with pytest.raises(Exception, match="GatherGrad: there was not memory enough to run it"):
        session.run(None, feeds_of(gather_grad, args))


def test_large_work_is_shared_among_the_sessions_threads():
    rng = np.random.default_rng(0)
    shape, indices = np.array([30522, 256]), rng.integers(0, 30522, 4096)
    dY = rng.standard_normal((4096, 256)).astype(F32)
    check_session(gather_grad, shape, indices, dY)
    check_session(gru_training, *gru_cases.case(S=20, N=40, inputs=64, H=96, dtype=np.float32).forward)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_bad_index_is_named_and_the_session_goes_on(dtype):
    good = np.array([4, 3]), np.array([0, -4]), np.ones((2, 3), dtype)
    session = session_of(model_of(gather_grad, good, {}, name="/embedding/GatherGrad"))
    for _ in range(2):
        with pytest.raises(
            Exception, match=r"GatherGrad: indices\[1\] is 4, expected -4 to 3 \(node '/embedding/GatherGrad'\)"
        ):
            run_in(session, gather_grad, (good[0], np.array([0, 4]), good[2]))
        (result,) = run_in(session, gather_grad, good)
        assert same_bits(bits_of(result, dtype), call(gather_grad, *good))


def test_bad_shapes_and_lengths_are_named():
    session = session_of(model_of(gather_grad, (np.zeros(1, np.int64), np.zeros(1, np.int64), np.zeros(1, F32)), {}))
    feeds = {"shape": np.array([4, 3]), "indices": np.array([0]), "dY": np.ones((2, 3), F32)}
    with pytest.raises(Exception, match=r"GatherGrad: dY has shape \[2, 3\], expected \[1, 3\]"):
        session.run(None, feeds)
    given = gru_cases.case(dtype=np.float32, lengths=True)
    session = session_of(model_of(gru_training, given.forward, {}, name="gru"))
    with pytest.raises(
        Exception, match=r"GRUTraining: SL\[0\] is 9, expected 0 to 4, the number of steps \(node 'gru'\)"
    ):
        session.run(None, feeds_of(gru_training, given._replace(SL=np.full(3, 9, np.int32)).forward))
    both = np.array([2]), np.array([3])
    session = session_of(model_of(broadcast_gradient_args, both, {}))
    with pytest.raises(Exception, match=r"BroadcastGradientArgs: a_shape \[2\] and b_shape \[3\] do not broadcast"):
        session.run(None, feeds_of(broadcast_gradient_args, both))


def test_bad_attributes_are_named_when_the_session_runs():
    given = gru_cases.case(dtype=np.float32)
    session = session_of(model_of(gru_training, given.forward, {"activations": ["Sigmoid", "Nothing"]}, name="gru"))
    with pytest.raises(Exception, match="GRUTraining: activations names 'Nothing', expected some of"):
        session.run(None, feeds_of(gru_training, given.forward))


def test_two_sessions_on_two_threads():
    rng = np.random.default_rng(0)
    wrong = []

    def work(seed):
        own = np.random.default_rng(seed)
        indices, dY = own.integers(0, 500, 300), own.standard_normal((300, 64)).astype(F32)
        shape = np.array([500, 64])
        session = session_of(model_of(gather_grad, (shape, indices, dY), {}))
        expected = call(gather_grad, shape, indices, dY)
        feeds = feeds_of(gather_grad, (shape, indices, dY))
        for _ in range(500):
            if not same_bits(session.run(None, feeds)[0], expected):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(int(rng.integers(1000)) + k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_one_session_on_two_threads():
    rng = np.random.default_rng(0)
    shape, session = np.array([500, 64]), None
    cases = []
    for count in (300, 200):
        indices, dY = rng.integers(0, 500, count), rng.standard_normal((count, 64)).astype(F32)
        cases.append((feeds_of(gather_grad, (shape, indices, dY)), call(gather_grad, shape, indices, dY)))
        session = session or session_of(model_of(gather_grad, (shape, indices, dY), {}))
    wrong = []

    def work(feeds, expected):
        wrong.extend(1 for _ in range(500) if not same_bits(session.run(None, feeds)[0], expected))

    threads = [threading.Thread(target=work, args=case) for case in cases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def memory_in_use():
    if DEVICE == "cuda":
        free, total = torch.cuda.mem_get_info()
        return total - free
    return pytest.importorskip("psutil").Process().memory_info().rss


def test_a_thousand_sessions_leave_nothing_behind():
    args = np.array([40, 64]), np.array([0, 1]), np.ones((2, 64), F32)
    model, feeds = model_of(gather_grad, args, {}), feeds_of(gather_grad, args)
    sizes = []
    for _ in range(4):
        for _ in range(250):
            session_of(model).run(None, feeds)
        sizes.append(memory_in_use())
    assert sizes[-1] - sizes[1] < 8 * 2**20, sizes


def test_register_checks_its_argument():
    with raises(TypeError, "register: options is a dict, expected onnxruntime.SessionOptions"):
        onnxgrad.register({})
    mine = onnxruntime.SessionOptions()
    assert onnxgrad.register(mine) is mine


@pytest.mark.parametrize("how", ["keep", "drop", "fork"] if DEVICE == "cpu" else ["keep", "drop", "spawn"])
def test_the_process_ends_cleanly(how):
    code = f"""
import numpy as np, onnxruntime, onnxgrad, os, subprocess, sys
from tests.runtime.nodes import model_of, feeds_of
from tests.runtime.test_sessions import PROVIDERS
args = np.array([40, 64]), np.array([0, 1]), np.ones((2, 64), np.float32)
options = onnxgrad.register()
model = model_of(onnxgrad.gather_grad, args, {{}}).SerializeToString()
session = onnxruntime.InferenceSession(model, options, providers=PROVIDERS)
session.run(None, feeds_of(onnxgrad.gather_grad, args))
if {how!r} == "drop":
    del session, options
if {how!r} == "fork":
    child = os.fork()
    if child == 0:
        session.run(None, feeds_of(onnxgrad.gather_grad, args))
        fresh = onnxruntime.InferenceSession(model, onnxgrad.register(), providers=PROVIDERS)
        fresh.run(None, feeds_of(onnxgrad.gather_grad, args))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
if {how!r} == "spawn" and len(sys.argv) == 1:
    command = [sys.executable, "-c", open(0).read(), "child"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
print("ended")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], input=code, check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ended\n"
