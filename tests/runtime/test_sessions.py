"""Every operator in a session of stock onnxruntime gives the bits of a direct call, on the CPU or the CUDA provider."""

import ctypes
import subprocess
import sys
import threading
import weakref

import numpy as np
import onnxruntime
import pytest
from tests import gru_cases
from tests.checks import DEVICE, FLOATS, call, raises, runs_on_gpus, same_bits
from tests.node_cases import all_cases
from tests.runtime.nodes import feeds_of, model_of
from tests.runtime.sessions import bits_of, check_session, needs_provider, run_in, session_of

import onnxgrad
from onnxgrad import (
    broadcast_gradient_args,
    gather_grad,
    gru_training,
)
from onnxgrad.ops.softmax_cross_entropy_loss import (
    softmax_cross_entropy_loss_grad,
    softmax_cross_entropy_loss_internal,
)
from onnxgrad.runtime import plan
from onnxgrad.runtime.custom_op import FOUR_BIT_TYPES

pytestmark = needs_provider
F32 = np.dtype(np.float32)
GATHER = np.array([40, 64]), np.array([0, 1]), np.ones((2, 64), F32)
on_the_cpu = pytest.mark.skipif(DEVICE != "cpu", reason="speaks of the CPU alone")


def runs_here(case):
    """The CUDA provider has no kernels for types of half a byte, and some operators have none for GPUs."""
    if DEVICE == "cpu":
        return case.op.has_kernel("cpu")
    return (case.op.on_host_only or runs_on_gpus(case.op)) and case.parameters.get("type") not in FOUR_BIT_TYPES


@pytest.mark.parametrize("case", [*filter(runs_here, all_cases())], ids=str)
def test_every_operator(case):
    check_session(case.op, *case.make_inputs(), outputs=case.outputs, **case.attributes)


def test_a_bad_label_is_named():
    case = next(c for c in all_cases() if c.op is softmax_cross_entropy_loss_grad)
    dY, log_prob, label, weight = case.make_inputs()
    label[2] = 5
    session = session_of(model_of(case.op, (dY, log_prob, label, weight), case.attributes))
    with pytest.raises(Exception, match=r"label\[2\] is 5, expected 0 to 4 or ignore_index -1"):
        run_in(session, case.op, (dY, log_prob, label, weight))


def test_a_bad_label_of_a_loss_is_named():
    scores, labels = np.zeros((4, 5), F32), np.array([0, 1, 5, 2])
    for ignored in (-1, -100):
        given = (scores, labels, None, np.array(ignored))
        session = session_of(model_of(softmax_cross_entropy_loss_internal, given, {}))
        with pytest.raises(Exception, match=rf"label\[2\] is 5, expected 0 to 4 or ignore_index {ignored}"):
            run_in(session, softmax_cross_entropy_loss_internal, given)


def test_a_type_of_results_that_is_not_that_of_the_scores_is_refused():
    given = (np.zeros((4, 5), F32), np.zeros(4, np.int64))
    with pytest.raises(Exception, match="output_type is 10, expected none or 1: float32 as scores are"):
        run_in(
            session_of(model_of(softmax_cross_entropy_loss_internal, given, {"output_type": 10})),
            softmax_cross_entropy_loss_internal,
            given,
        )


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
def test_a_plan_lives_as_long_as_its_run(monkeypatch):
    session = session_of(model_of(gather_grad, GATHER, {}))
    plans, begun, go_on = [], threading.Event(), threading.Event()

    @ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)
    def wait(words):
        begun.set()
        return -1 if go_on.wait(60) else 0

    def run_with(rows):
        session.run(None, {"shape": np.array([rows, 64]), "indices": GATHER[1], "dY": GATHER[2]})

    def made(node, key, make=plan.make_plan):
        result = make(node, key)
        plans.append(weakref.ref(result))
        return result

    monkeypatch.setattr(plan, "make_plan", made)
    for rows in range(2, 260):
        run_with(rows)
    kept = len(plans)
    with monkeypatch.context() as patch:
        address = ctypes.cast(wait, ctypes.c_void_p).value
        patch.setattr(plan, "prepare", lambda call: (address, []))
        long_run = threading.Thread(target=run_with, args=(1000,))
        long_run.start()
        assert begun.wait(60)
    for rows in range(1001, 1300):
        run_with(rows)
    assert plans[kept]() is not None
    go_on.set()
    long_run.join()
    assert plans[kept]() is None
    assert sum(p() is not None for p in plans) == 256


@on_the_cpu
def test_no_memory_to_work_in_is_an_error(monkeypatch):
    made = plan.make_plan

    def huge(node, key):
        result = made(node, key)
        result.memory["workspace"] = 2**60
        return result

    monkeypatch.setattr(plan, "make_plan", huge)
    args = np.array([40, 64]), np.array([0, 1]), np.ones((2, 64), F32)
    session = session_of(model_of(gather_grad, args, {}))
    with pytest.raises(Exception, match="GatherGrad: there was not enough memory to run it"):
        session.run(None, feeds_of(gather_grad, args))


@pytest.mark.skipif(DEVICE != "cpu", reason="speaks of the CPU alone")
def test_no_memory_for_a_task_is_an_error():
    dY, X = np.ones((1, 1, 1, 1), F32), np.ones((1, 1, 4, 4), F32)
    args = dY, X, np.array([[0, 0, 3, 3]], F32), np.zeros(1, np.int64)
    session = session_of(model_of(onnxgrad.roi_align_grad, args, {"sampling_ratio": 2**44}))
    with pytest.raises(Exception, match="RoiAlignGrad: there was not enough memory to run it"):
        session.run(None, feeds_of(onnxgrad.roi_align_grad, args))


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
        import torch

        free, total = torch.cuda.mem_get_info()
        return total - free
    return pytest.importorskip("psutil").Process().memory_info().rss


@pytest.mark.slow
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


@pytest.mark.parametrize(
    "how", ["keep", "drop", pytest.param("cycle", marks=pytest.mark.slow), "fork" if DEVICE == "cpu" else "spawn"]
)
def test_the_process_ends_cleanly(how):
    code = f"""
import numpy as np, onnxruntime, onnxgrad, os, subprocess, sys
from tests.runtime.nodes import model_of, feeds_of
from tests.runtime.sessions import PROVIDERS
args = np.array([40, 64]), np.array([0, 1]), np.ones((2, 64), np.float32)
options = onnxgrad.register()
model = model_of(onnxgrad.gather_grad, args, {{}}).SerializeToString()
session = onnxruntime.InferenceSession(model, options, providers=PROVIDERS)
session.run(None, feeds_of(onnxgrad.gather_grad, args))
if {how!r} == "drop":
    del session, options
if {how!r} == "cycle":  # what refers to itself goes last, after all modules
    made = [onnxruntime.InferenceSession(model, options, providers=PROVIDERS) for _ in range(50)]
    made.append(made)
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
