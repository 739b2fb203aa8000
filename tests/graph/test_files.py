"""save(): where the files of a model go, and what else is in the folder afterwards."""

import os
import platform
import subprocess
import sys

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper
from safetensors.numpy import save_file

from onnxgrad.graph.files import expect_place, load, replaced, replaced_together, save


def model():
    proto = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["" : 18]> g (float[N, 3] x) => (float[N, 600] y) { y = MatMul(x, w) }'
    )
    proto.graph.initializer.append(numpy_helper.from_array(np.ones((3, 600), np.float32), "w"))
    return ir.from_proto(proto)


@pytest.mark.parametrize("apart", [False, True], ids=["inside", "apart"])
def test_the_target_of_a_link_is_written(apart, tmp_path):
    for name in ("links", "models"):
        (tmp_path / name).mkdir()
    link, target = tmp_path / "links" / "link.onnx", tmp_path / "models" / "m.onnx"
    link.symlink_to(target)
    data = tmp_path / "models" / "m.onnx.data"
    if apart:
        data.symlink_to(tmp_path / "w.data")  # from which onnx would not read weights
    for _ in range(2):
        written = save(model(), link, None if apart else link)
        assert written == [target, data] if apart else written == [target]
        assert link.is_symlink() and not data.is_symlink()
        assert numpy_helper.to_array(onnx.load(target).graph.initializer[0]).sum() == 1800
    assert {*tmp_path.rglob("*.*")} == {link, *written}


@pytest.mark.parametrize("apart", [False, True], ids=["inside", "apart"])
def test_what_a_killed_process_left_is_removed(apart, tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    path = tmp_path / "m[1].onnx"
    stale = tmp_path / f".m[1].onnx.{platform.node()}.{ended.pid}.part"
    if apart:
        stale.mkdir()
        (stale / "m.onnx.data").touch()
    else:
        stale.touch()
    living = tmp_path / f".m[1].onnx.{platform.node()}.{os.getppid()}.part"
    living.touch()
    written = save(model(), path, None if apart else path)
    assert {*tmp_path.iterdir()} == {*written, living}


@pytest.mark.parametrize("together", [False, True], ids=["alone", "together"])
def test_who_may_read_a_file(together, tmp_path):
    def written(name):
        with replaced_together(tmp_path / "other") if together else replaced(tmp_path / name) as draft:
            save_file({"w": np.ones(3)}, draft / name if together else draft)  # which is for its owner alone
        return (tmp_path / name).stat().st_mode & 0o777

    umask = os.umask(0o027)
    try:
        assert written("new") == 0o640
        (tmp_path / "new").chmod(0o604)
        assert written("new") == 0o604
    finally:
        os.umask(umask)


def test_dimensions_of_any_size_that_old_converters_wrote_as_negative():
    proto = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["" : 18]> g (float[N, 3] x) => (float[N, 3] y) { y = Neg(x) }'
    )
    for value in (proto.graph.input[0], proto.graph.output[0]):
        value.type.tensor_type.shape.dim[0].dim_value = -1
    loaded = load(proto, "test")
    for value in (loaded.graph.inputs[0], loaded.graph.outputs[0]):
        assert list(value.shape) == [None, 3]


def test_onnx_by_its_longer_name():
    loaded = load(onnx.parser.parse_model('<ir_version: 9, opset_import: ["ai.onnx" : 18]> g () => () {}'), "test")
    assert loaded.graph.opset_imports == {"": 18}


@pytest.mark.parametrize("inside", [False, True], ids=["initializer", "Constant"])
def test_sparse_tensors_are_refused(inside):
    values, places = numpy_helper.from_array(np.ones(1, np.float32), "w"), numpy_helper.from_array(np.array([4]), "at")
    sparse = onnx.helper.make_sparse_tensor(values, places, [3, 2])
    proto = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["" : 18]> g (float[N, 3] x) => (float[N, 2] y) { y = MatMul(x, w) }'
    )
    if inside:
        proto.graph.node.insert(0, onnx.helper.make_node("Constant", [], ["w"], sparse_value=sparse))
    else:
        proto.graph.sparse_initializer.append(sparse)
    with pytest.raises(ValueError, match="test: the model has the sparse tensor 'w', expected dense ones"):
        load(proto, "test")


def test_a_pipe_is_not_replaced(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    sentence = f"{str(path)!r} is a device or a pipe, expected the name of a file to write"
    for write in (expect_place, lambda path: replaced(path).__enter__()):
        with pytest.raises(ValueError, match=sentence):
            write(path)
    assert path.is_fifo()


def test_errors_of_the_system_name_the_file_that_is_wanted(tmp_path):
    with pytest.raises(OSError, match=r"gone/model\.onnx'$"), replaced(tmp_path / "gone" / "model.onnx"):
        pass
    path = tmp_path / "model.onnx"
    with pytest.raises(OSError, match=r"device: '.*/model\.onnx'$"), replaced(path), open("/dev/full", "w") as file:  # noqa: PTH123
        file.write("text")
