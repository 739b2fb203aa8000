"""weights_at(): the bytes of a file that are an initializer's numbers."""

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from tests.train.two_layers import mlp, weights

from onnxgrad.graph.weights_at import weights_at


@pytest.mark.parametrize("apart", [False, True], ids=["in the model's file", "in a file of their own"])
def test_the_bytes_are_the_numbers(apart, tmp_path):
    path = tmp_path / "model.onnx"
    onnx.save(mlp(), path, save_as_external_data=apart, location="weights.bin", size_threshold=0)
    found = weights_at(path)
    assert found.keys() == weights().keys()
    for name, array in weights().items():
        file, (offset, length) = found[name]
        assert file == ("weights.bin" if apart else "model.onnx")
        data = (tmp_path / file).read_bytes()[offset : offset + length]
        assert np.array_equal(np.frombuffer(data, np.float32).reshape(array.shape), array)


def test_numbers_that_are_not_bytes_have_no_place(tmp_path):
    model = mlp()
    bias = next(t for t in model.graph.initializer if t.name == "fc0.bias")
    numbers = numpy_helper.to_array(bias)
    bias.ClearField("raw_data")
    bias.float_data.extend(numbers.tolist())
    onnx.save(model, path := tmp_path / "model.onnx")
    assert weights_at(path).keys() == weights().keys() - {"fc0.bias"}
