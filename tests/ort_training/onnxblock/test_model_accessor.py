"""base(), empty_base() and custom_op_library(): what blocks build on."""

import numpy as np
import onnx
from onnx import helper, numpy_helper
from tests.checks import raises

from onnxgrad.ort_training import onnxblock
from onnxgrad.ort_training.onnxblock import model_accessor


def model_with_weights():
    info = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [4])
    out = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [4])
    weight = numpy_helper.from_array(np.arange(4, dtype=np.float32), "weight")
    graph = helper.make_graph([helper.make_node("Mul", ["x", "weight"], ["y"])], "g", [info], [out], [weight])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_one_model_at_a_time():
    model = model_with_weights()
    sentence = "a block builds on a model: call it within `with onnxblock.base(model):`, or within "
    with raises(RuntimeError, f"{sentence}`with onnxblock.empty_base():` if it begins one"):
        onnxblock.blocks.Neg()("x")
    with onnxblock.base(model) as accessor:
        assert model_accessor.current() is accessor and not accessor.has_path
        assert accessor.model == model and accessor.model is not model
        with raises(RuntimeError, "the model has no path: onnxblock.base was given none"):
            _ = accessor.path
        for another in (onnxblock.base(model), onnxblock.empty_base()):
            with (
                raises(RuntimeError, "blocks build on one model at a time: end the `with` of the other first"),
                another,
            ):
                pass
    with onnxblock.base(model, "folder/model.onnx") as accessor:
        assert accessor.has_path and accessor.path == "folder/model.onnx"
    with (
        raises(RuntimeError, "onnxblock.base: model is None; onnxblock.empty_base() begins a new model"),
        onnxblock.base(None),
    ):
        pass


def test_a_new_model_is_one_that_1_19_2_can_load():
    with onnxblock.empty_base() as accessor:
        opsets = {o.domain: o.version for o in accessor.model.opset_import}
        assert opsets == {"com.microsoft": 1, "": 21} and accessor.model.ir_version == 10
    with onnxblock.empty_base(opset_version=14) as accessor:
        assert accessor.model.opset_import[1].version == 14 and accessor.model.ir_version == 7


def test_weights_in_files_are_found(tmp_path, monkeypatch):
    path = tmp_path / "model.onnx"
    onnx.save(model_with_weights(), path, save_as_external_data=True, location="weights", size_threshold=0)
    model = onnx.load(path, load_external_data=False)
    with onnxblock.base(model, path) as accessor:
        assert numpy_helper.to_array(accessor.model.graph.initializer[0]).tolist() == [0, 1, 2, 3]
    sentence = "the weights 'weight' are in the file 'weights', which does not exist: "
    way_out = "give the path of the model, or load it with its weights"
    with raises(FileNotFoundError, sentence + way_out), onnxblock.base(model):
        pass
    monkeypatch.chdir(tmp_path)
    with onnxblock.base(model) as accessor:
        assert accessor.model.graph.initializer[0].raw_data


def test_a_library_of_operators(tmp_path):
    library = tmp_path / "operators.so"
    with (
        raises(RuntimeError, f"the library of custom operators {str(library)!r} does not exist"),
        onnxblock.custom_op_library(library),
    ):
        pass
    library.touch()
    with onnxblock.custom_op_library(library) as found:
        assert found == library
