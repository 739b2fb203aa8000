"""Kernels that have to be compiled are shared among processes: each is compiled once, nobody waits in vain."""

import os
import pickle
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from numba import types

from onnxgrad.cpu.core import ahead, jit
from onnxgrad.cpu.core.ahead import Ahead, compiling_ahead
from onnxgrad.cpu.core.compilers import Compiler, Wanted

KINDS = (types.int64,)
KERNELS = [Wanted(name, KINDS) for name in "abcdef"]


class FakeCompiler:
    """Compiles what it may, and notes it."""

    def __init__(self, ends_at=None, fails_at=None):
        self.done, self.started, self.may_go_on = [], threading.Event(), threading.Event()
        self.may_go_on.set()
        self._ends_at, self._fails_at = ends_at, fails_at

    def __call__(self):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def wait_until_ready(self):
        pass

    def compile(self, kernels):
        (kernel,) = kernels
        self.started.set()
        assert self.may_go_on.wait(10)
        if kernel.name == self._ends_at:
            raise ChildProcessError
        if kernel.name == self._fails_at:
            raise RuntimeError("a traceback")
        self.done.append(kernel.name)


@pytest.fixture
def everything_is_missing(monkeypatch):
    monkeypatch.setattr(ahead, "_is_missing", lambda kernel: True)


def run(monkeypatch, compiler, processes=1):
    """What this process compiles itself of KERNELS, which it needs in their order."""
    monkeypatch.setattr(ahead, "Compiler", compiler)
    here = Ahead(lambda: KERNELS, processes)
    return [kernel.name for kernel in KERNELS if not here.has_compiled(kernel.name, kernel.types)]


def test_each_kernel_is_compiled_once(monkeypatch, everything_is_missing):
    compiler = FakeCompiler()
    own = run(monkeypatch, compiler, processes=3)
    assert own[0] == "a" and sorted(own + compiler.done) == sorted(kernel.name for kernel in KERNELS)


def test_another_process_begins_with_the_last(monkeypatch, everything_is_missing):
    compiler = FakeCompiler()
    compiler.may_go_on.clear()
    monkeypatch.setattr(ahead, "Compiler", compiler)
    here = Ahead(lambda: KERNELS, 1)
    assert not here.has_compiled("a", KINDS) and compiler.started.wait(10)
    assert not here.has_compiled("b", KINDS)
    threading.Timer(0.05, compiler.may_go_on.set).start()
    assert here.has_compiled("f", KINDS)  # which it has waited for
    assert compiler.done[0] == "f"


def test_a_process_that_ends_leaves_its_kernels_to_this_one(monkeypatch, everything_is_missing):
    compiler = FakeCompiler(ends_at="e")
    own = run(monkeypatch, compiler)
    assert {"a", "b", "c", "d"} - {*own} <= {*compiler.done}
    assert compiler.done in ([], ["f"])


def test_what_another_process_cannot_compile_does_not_end_it(monkeypatch, everything_is_missing):
    compiler = FakeCompiler(fails_at="f")
    run(monkeypatch, compiler)
    assert "f" not in compiler.done


def test_few_kernels_are_no_work_for_a_process(monkeypatch, everything_is_missing):
    monkeypatch.setattr(ahead, "Compiler", pytest.fail)
    here = Ahead(lambda: KERNELS[:1], 4)
    here.has_compiled("z", KINDS)
    assert not here.has_compiled("a", KINDS)


def test_nothing_is_looked_for_before_a_kernel_has_to_be_compiled():
    with compiling_ahead(lambda: pytest.fail("looked for kernels"), 4):
        pass
    assert not ahead.has_compiled("a", KINDS)


def test_without_another_thread_this_one_compiles_all(monkeypatch, everything_is_missing):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert run(monkeypatch, FakeCompiler(), processes=2) == [kernel.name for kernel in KERNELS]


def test_threads_compile_ahead_apart():
    """Of two first steps that overlap, the earlier one may end while the other goes on."""
    began, may_end = threading.Event(), threading.Event()
    found = []

    def step():
        with compiling_ahead(list, 1):
            found.append(ahead.current())
            began.set()
            may_end.wait(10)
        found.append(ahead.current())

    with compiling_ahead(list, 1):
        mine = ahead.current()
        thread = threading.Thread(target=step)
        thread.start()
        assert began.wait(10) and ahead.current() is mine
    assert ahead.current() is None
    may_end.set()
    thread.join()
    assert found[0] not in (None, mine) and found[1] is None


def test_nobody_waits_once_kernels_could_not_be_kept(monkeypatch, everything_is_missing):
    compiler = FakeCompiler()
    compiler.may_go_on.clear()
    monkeypatch.setattr(ahead, "Compiler", compiler)
    with compiling_ahead(lambda: KERNELS, 1):
        assert not ahead.has_compiled("a", KINDS) and compiler.started.wait(10)
        ahead.give_up()
        assert not any(ahead.has_compiled(kernel.name, KINDS) for kernel in KERNELS)
    compiler.may_go_on.set()


@pytest.mark.parametrize(("keeps", "missing"), [(True, True), (False, False)])
def test_processes_compile_only_what_can_be_kept(monkeypatch, keeps, missing):
    cache = SimpleNamespace(keeps=keeps, has=lambda types: False)
    monkeypatch.setitem(jit.KERNELS, "a", SimpleNamespace(overloads={}, _cache=cache))
    assert ahead._is_missing(KERNELS[0]) is missing


@pytest.mark.parametrize(
    ("executable", "expected"), [("/usr/bin/python3.12", True), ("/usr/bin/blender", False), (None, False)]
)
def test_an_application_is_no_python_to_start(monkeypatch, executable, expected):
    monkeypatch.setattr(sys, "executable", executable)
    assert ahead.can_start() is expected


@pytest.mark.slow
def test_a_process_tells_what_went_wrong():
    with Compiler() as process:
        process.wait_until_ready()
        with pytest.raises(RuntimeError, match="KeyError: 'no such kernel'"):
            process.compile([Wanted("no such kernel", KINDS)])


@pytest.mark.slow
def test_a_process_that_is_killed_is_noticed():
    with Compiler() as process:
        process.wait_until_ready()
        process._process.kill()
        with pytest.raises(ChildProcessError, match="was ended by signal 9, as where memory is short"):
            process.compile(KERNELS)


@pytest.mark.slow
def test_what_a_process_prints_is_no_answer(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('hello')")
    with Compiler({"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}) as process:
        process.wait_until_ready()


SCRIPT = """
import numpy as np, onnx, time
from onnx import helper, numpy_helper, TensorProto as T
import onnxgrad
from onnxgrad.cpu.core import ahead, kernel_cache
random = np.random.default_rng(0)
def weight(name, *shape): return numpy_helper.from_array(random.normal(size=shape).astype(np.float32) / 8, name)
nodes = [
    helper.make_node("Gather", ["table", "x"], ["e"]),
    helper.make_node("Gelu", ["e"], ["a"]), helper.make_node("Relu", ["a"], ["b"]),
    helper.make_node("LayerNormalization", ["b", "s"], ["c"]),
    helper.make_node("ReduceMean", ["c", "one"], ["d"], keepdims=0),
    helper.make_node("MatMul", ["d", "w"], ["logits"]),
]
graph = helper.make_graph(
    nodes, "g", [helper.make_tensor_value_info("x", T.INT64, ["n", 3])],
    [helper.make_tensor_value_info("logits", T.FLOAT, ["n", 4])],
    [weight("table", 10, 8), weight("s", 8), weight("w", 8, 4), numpy_helper.from_array(np.array([1]), "one")],
)
onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), "m.onnx")
asked = {}
def note(name, types, original=kernel_cache.ahead.has_compiled):
    asked[name] = original(name, types)
    until = time.monotonic() + 60  # on a busy machine all may be compiled here before another process has begun
    here = ahead.current()
    while here and here._waiting and not here._begun and time.monotonic() < until:
        time.sleep(0.01)
    return asked[name]
kernel_cache.ahead.has_compiled = note
onnxgrad.set_num_threads(3)
trainer = onnxgrad.Trainer("m.onnx", onnxgrad.losses.CrossEntropy("logits"), onnxgrad.optim.SGD(0.1))
loss = trainer.step({"x": np.array([[1, 2, 3], [4, 5, 6]]), "target": np.array([1, 2])})
own = [name for name, by_others in asked.items() if not by_others and name.startswith("onnxgrad.cpu")]
print(loss, sum("optimizers" not in name for name in own))
"""


@pytest.mark.slow
def test_a_script_without_a_guard(tmp_path):
    """No process runs the user's script again, and what they compile is the same."""
    (tmp_path / "script.py").write_text(SCRIPT)
    printed = []
    for turn, command in enumerate((["script.py"], ["-c", SCRIPT], ["script.py"])):
        run = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, check=False,
            env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / f"cache{turn % 2}"), "ONNXGRAD_SHIPPED_KERNELS": "0"},
        )  # fmt: skip
        assert run.returncode == 0, run.stderr
        assert run.stdout.count("\n") == 1
        printed.append(run.stdout.split())
    losses, compiled_here = zip(*printed, strict=True)
    assert len({*losses}) == 1 and np.isfinite(float(losses[0]))
    assert 1 <= int(compiled_here[0]) < 6 and 1 <= int(compiled_here[1]) < 6  # of the six that its nodes want
    assert compiled_here[2] == "0"  # all of them are kept


def test_a_compiler_whose_caller_was_killed_ends_quietly():
    read, write = os.pipe()
    os.close(read)
    code = f"from onnxgrad.cpu.core.compilers import serve; serve({write})"
    begin_with = pickle.dumps((None, False))
    done = subprocess.run(
        [sys.executable, "-c", code], input=begin_with, capture_output=True, pass_fds=[write], check=False
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")
