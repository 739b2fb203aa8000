"""Sessions of stock onnxruntime with the operators registered, and what goes in and comes out of them, of any type."""

import ctypes

import numpy as np
import onnx
import onnxruntime
import pytest
from tests.checks import DEVICE, as_tuple, call, same_bits
from tests.runtime.nodes import element_type, feeds_of, model_of

import onnxgrad

if DEVICE == "cuda":
    import torch  # noqa: F401, CUDA's libraries come with it …

    onnxruntime.preload_dlls()  # … and are loaded here
PROVIDERS = ["CUDAExecutionProvider"] * (DEVICE == "cuda") + ["CPUExecutionProvider"]
needs_provider = pytest.mark.skipif(
    not {*PROVIDERS} <= {*onnxruntime.get_available_providers()}, reason="needs onnxruntime-gpu"
)
OPTIONS = onnxgrad.register()
OPTIONS.log_severity_level = 4  # errors are raised; they need not be printed too


def session_of(model):
    session = onnxruntime.InferenceSession(model.SerializeToString(), OPTIONS, providers=PROVIDERS)
    assert session.get_providers() == PROVIDERS, "onnxruntime cannot use the provider under test"
    return session


def run_in(session, op, inputs):
    """Runs a session through OrtValues, which take types that NumPy has not."""
    binding, kept = session.io_binding(), []  # values point into the arrays, which must live till the end of the run
    for name, given in feeds_of(op, inputs).items():
        kept.append(carried(np.asarray(given)))
        value = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(kept[-1], element_type(given.dtype))
        binding.bind_ortvalue_input(name, value)
    for output in session.get_outputs():
        binding.bind_output(output.name, "cpu")
    session.run_with_iobinding(binding)
    return binding.get_outputs()


def carried(array):
    """The memory of a tensor, as an array of its shape in a type of NumPy's own; longer than the tensor if packed."""
    carrier = array.dtype if array.dtype.isbuiltin == 1 else np.dtype(f"uint{8 * array.dtype.itemsize}")
    result = np.zeros(array.shape, carrier)
    content = np.frombuffer(onnx.numpy_helper.from_array(array).raw_data, np.uint8)
    result.reshape(-1).view(np.uint8)[: content.size] = content
    return result


def bits_of(value, dtype):
    """The contents of an OrtValue."""
    if dtype.isbuiltin == 1:
        return value.numpy()
    size = value.tensor_size_in_bytes()
    raw = ctypes.string_at(value.data_ptr(), size) if size else b""
    tensor = onnx.TensorProto(data_type=element_type(dtype), dims=value.shape(), raw_data=raw)
    return onnx.numpy_helper.to_array(tensor)


def check_session(op, *inputs, outputs=None, **attributes):
    """The session's results are the direct call's, bit for bit, on a second run too."""
    chosen = {"outputs": outputs} if outputs is not None and op.chooses_outputs else {}
    expected = as_tuple(call(op, *inputs, **attributes, **chosen))
    names = [o.name for o in op.outputs]
    session = session_of(model_of(op, inputs, attributes, outputs))
    for _ in range(2):
        results = run_in(session, op, inputs)
        by_name = dict(zip([o.name for o in session.get_outputs()], results, strict=True))
        assert list(by_name) == [n for n in names if outputs is None or n in outputs]
        for name, wanted in zip(names, expected, strict=True):
            if wanted is not None and name in by_name:
                assert same_bits(bits_of(by_name[name], wanted.dtype), wanted), name
    return session
