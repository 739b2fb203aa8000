"""Models of one node in sessions of onnxruntime: inputs and results in guarded memory, shapes that change."""

import re
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime
from tests.checks import as_tuple, same_bits
from tests.fuzz import guarded
from tests.fuzz.calls import Call
from tests.fuzz.direct import FindingError
from tests.fuzz.draw import Draw
from tests.fuzz.families import draw_calls
from tests.runtime.nodes import element_type, feeds_of, model_of
from tests.runtime.sessions import carried

import onnxgrad

RUNS = 6
ITS_OWN = "Missing Input|Invalid rank|Got invalid dimensions"  # sentences of onnxruntime, which looks before us
NO_MEMORY = "Failed to allocate memory|std::bad_alloc"  # in onnxruntime's words
LARGE = 1 << 28  # bytes of results
# Types that sessions do not have, and those that come packed, which takes a copy that is tested elsewhere.
NOT_HERE = {np.dtype(t) for t in (np.complex64, np.complex128, ml_dtypes.int2, ml_dtypes.uint2)}
PACKED = {np.dtype(t) for t in (ml_dtypes.int4, ml_dtypes.uint4, ml_dtypes.float4_e2m1fn)}


def run_session(op: Any, seed: int, before_run: Any) -> int:
    """Runs one model with inputs of several shapes; how often."""
    d = Draw(seed, 1)
    drawn = draw_calls(op, d)
    first = drawn.make_inputs()
    if any(isinstance(a, np.ndarray) and a.dtype in NOT_HERE for a in first):
        return 0
    outputs = None
    if d.chance(0.3):
        outputs = [o.name for o in op.outputs if not o.optional or d.chance(0.5)] or [op.outputs[0].name]
    session = _session(model_of(op, first, drawn.attributes, outputs), d)
    for k in range(RUNS):
        inputs = first if k == 0 or d.chance(0.2) else drawn.make_inputs()
        wrong = ()
        if d.chance(0.2):
            inputs = [d.wild(a) if isinstance(a, np.ndarray) else a for a in inputs]
            wrong = ("extreme numbers",)
        if d.chance(0.1):
            inputs = [_resized(a, d) if isinstance(a, np.ndarray) and d.chance(0.4) else a for a in inputs]
            wrong = (*wrong, "other sizes")
        settings = {name: _as_stored(value) for name, value in drawn.attributes.items()}
        if outputs and op.chooses_outputs:
            settings["outputs"] = outputs
        call = Call(op, inputs, settings, (*wrong, f"in a session, run {k}"))
        before_run()
        try:
            _run(call, session, outputs, d)
        except FindingError as finding:
            raise FindingError(f"{call}: {finding}") from finding
    return RUNS


def _session(model: Any, d: Draw) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = d.one((1, 2, 3))
    options.log_severity_level = 4
    options.enable_cpu_mem_arena = False  # which takes all memory there is after a request that is too large
    return onnxgrad.session(model, options)


def _as_stored(value: Any) -> Any:
    """A model's numbers are float32."""
    return float(np.float32(value)) if isinstance(value, float) else value


def _resized(array: np.ndarray, d: Draw) -> np.ndarray:
    shape = [max(0, n + d.number(-1, 2)) for n in array.shape]
    return np.resize(array, shape) if array.size else np.zeros(shape, array.dtype)


def _run(call: Call, session: Any, outputs: Any, d: Draw) -> None:
    expected: Any
    try:
        expected = as_tuple(call.op(*call.inputs, **call.settings))
    except Exception as error:
        expected = error
    binding, kept = session.io_binding(), []
    for name, array in feeds_of(call.op, call.inputs).items():
        kept.append(guarded.read_only(carried(array), d.chance(0.6)))
        _bind(binding.bind_input, name, array, kept[-1])
    names = [o.name for o in session.get_outputs()]
    results = {} if isinstance(expected, Exception) else dict(zip(call.op.output_names, expected, strict=True))
    given = {}
    for name in names:
        wanted = results.get(name)
        if wanted is None or wanted.dtype in PACKED or d.chance(0.2):
            binding.bind_output(name, "cpu")
            continue
        given[name] = guarded.empty(wanted.shape, wanted.dtype, d.chance(0.7), 0xFF)
        _bind(binding.bind_output, name, wanted, given[name])
    try:
        session.run_with_iobinding(binding)
    except Exception as error:
        _check_refused(call, error, expected, sum(a.nbytes for a in results.values() if a is not None))
        return
    if isinstance(expected, Exception):
        raise FindingError(f"a direct call raises {expected!r}, the session nothing")
    for name, array in given.items():
        if not same_bits(array, results[name]):
            raise FindingError(f"{name} has other bits than that of a direct call")


def _bind(bind: Any, name: str, array: np.ndarray, memory: np.ndarray) -> None:
    bind(name, "cpu", 0, element_type(array.dtype), array.shape, memory.ctypes.data)


def _check_refused(call: Call, error: Exception, expected: Any, size: int) -> None:
    # onnxruntime takes memory for results before a kernel looks at the inputs, and more of it.
    if re.search(NO_MEMORY, str(error)) and (isinstance(expected, Exception) or size > LARGE):
        return
    if not isinstance(expected, Exception):
        raise FindingError(f"the session raised {error!r}, a direct call nothing") from error
    if str(expected) not in str(error) and not re.search(ITS_OWN, str(error)):
        raise FindingError(f"the session raised {error!r}, a direct call {expected!r}") from error
