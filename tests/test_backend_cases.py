"""The cases written for other runtimes: three ways to run them give what is stored."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator
from tests.checks import assert_close, expect, result_dtype, result_dtypes, same_bits
from tests.conv_cases import is_right_in_onnx_reference
from tests.node_cases import all_cases
from tests.runtime.sessions import bits_of, run_in, session_of

from onnxgrad.op import OPERATORS
from onnxgrad.ops.channels_last import nhwc_conv_grad, nhwc_convolution
from onnxgrad.ops.conv import conv_grad, depthwise_conv
from onnxgrad.runtime.custom_op import ELEMENT_TYPES
from onnxgrad.tensor_types import DTYPES

CASES = all_cases()
ROOT = Path(__file__).parents[1]
COMMAND = [sys.executable, "-m", "tests.backend_cases"]
# The types for which stock onnxruntime has kernels of everything that the functions are made of.
NUMPYS_OWN = {dtype for dtype in DTYPES.values() if dtype.isbuiltin == 1}
# It convolves in float32 only.
CONVOLUTIONS = (conv_grad, depthwise_conv, nhwc_conv_grad, nhwc_convolution)
WITHOUT_STOCK_KERNELS = {(op, np.dtype(np.float64)) for op in CONVOLUTIONS}


def test_every_operator_occurs_with_every_type_and_optional_input():
    assert len(set(map(str, CASES))) == len(CASES)
    for op in OPERATORS.values():
        cases = [case for case in CASES if case.op is op]
        inputs = [case.make_inputs() for case in cases]
        types = {
            str(result_dtype(op, tuple(given), case.attributes)) for case, given in zip(cases, inputs, strict=True)
        }
        assert types == {str(DTYPES[name]) for name in op.outputs[0].constraint.types if name in ELEMENT_TYPES}
        for k, entry in enumerate(op.inputs):
            there = {len(given) > k and given[k] is not None for given in inputs}
            assert there == ({True, False} if entry.optional else {True}), f"{op.name} {entry.name}"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The folder into which the command has written all cases."""
    folder = tmp_path_factory.mktemp("cases")
    done = subprocess.run([*COMMAND, str(folder)], cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout == f"{len(CASES)} cases in {folder}\n"
    return folder


@pytest.mark.slow
def test_the_command_writes_a_folder_for_each(written):
    assert {path.name for path in written.iterdir()} == set(map(str, CASES))
    assert subprocess.run(COMMAND, cwd=ROOT, check=False, capture_output=True).returncode == 2


def run_registered(model, op, inputs):
    """Our kernels."""
    session = session_of(model)
    types = [value.type.tensor_type.elem_type for value in model.graph.output]
    dtypes = [onnx.helper.tensor_dtype_to_np_dtype(t) for t in types]
    return [bits_of(v, dtype) for v, dtype in zip(run_in(session, op, inputs), dtypes, strict=True)]


def run_stock(model, feeds):
    """The functions, in onnxruntime."""
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


def tensors_in(folder, kind):
    """{name: array} of a data set, in order."""
    paths = [folder / f"{kind}_{k}.pb" for k in range(len(list(folder.glob(f"{kind}_*.pb"))))]
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in map(onnx.load_tensor, paths)}


def _thinned(cases):
    """Those of float32, and every fifth of the others, whose kernels tests/runtime runs, every one."""
    others = [case for case in cases if case.parameters.get("type") != "float32"]
    return [*(case for case in cases if case not in others), *others[::5]]


@pytest.mark.slow
@pytest.mark.parametrize("case", _thinned(CASES), ids=str)
def test_every_runtime_gives_what_is_stored(case, written):
    model = onnx.load(written / str(case) / "model.onnx")
    onnx.checker.check_model(model, full_check=True)
    assert [f.name for f in model.functions] == [case.op.name]
    data = written / str(case) / "test_data_set_0"
    feeds, stored = tensors_in(data, "input"), tensors_in(data, "output")
    assert list(feeds) == [i.name for i in model.graph.input]
    assert list(stored) == [o.name for o in model.graph.output]

    op = case.op
    inputs = tuple(feeds.get(i.name) for i in op.inputs)
    dtypes = result_dtypes(op, inputs, case.attributes)
    results = {"onnxruntime and our kernels": run_registered(model, op, inputs)} if op.has_kernel("cpu") else {}
    if op is not conv_grad or is_right_in_onnx_reference(*(a.shape for a in inputs[1:]), case.attributes):
        results["onnx.reference"] = ReferenceEvaluator(model).run(None, feeds)
    if all(a.dtype in NUMPYS_OWN for a in feeds.values()) and (op, dtypes[0]) not in WITHOUT_STOCK_KERNELS:
        results["stock onnxruntime"] = run_stock(model, feeds)
    exact, bounds = expect(op, *inputs, **case.attributes)
    expected = {o.name: entry for o, *entry in zip(op.outputs, exact, bounds, dtypes, strict=True)}
    for runtime, arrays in results.items():
        for (name, wanted), actual in zip(stored.items(), arrays, strict=True):
            value, bound, dtype = expected[name]
            assert same_bits(wanted, value.astype(dtype)), f"{name} is not what the definition gives"
            assert actual.dtype == dtype, f"{runtime} {name} is {actual.dtype}"
            if bound is None:
                assert same_bits(actual, wanted), f"{runtime} {name}"
            else:
                rounded_off = np.abs(wanted.astype(np.float64) - value)
                assert_close(actual, wanted.astype(np.float64), bound + rounded_off, f"{runtime} {name}")
