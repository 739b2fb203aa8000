"""The command line: what it writes, what it prints, and how it refuses."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper

import onnxgrad
from onnxgrad import cli
from onnxgrad.autodiff import check as checking
from onnxgrad.cli import gradients as gradient_commands
from onnxgrad.cli.group import sentence
from onnxgrad.cli.tables import size as size_of

SIZE = 80  # its square is more than what is looked into


def model(size=SIZE):
    """loss = sum of y·y, y = tanh(x·W + b), element by element."""
    rng = np.random.default_rng(0)
    weights = {"W": rng.standard_normal((size, size)), "b": rng.standard_normal(size)}
    nodes = [
        helper.make_node("Mul", ["x", "W"], ["h"]),
        helper.make_node("Add", ["h", "b"], ["a"]),
        helper.make_node("Tanh", ["a"], ["y"]),
        helper.make_node("Mul", ["y", "y"], ["yy"]),
        helper.make_node("ReduceSum", ["yy"], ["loss"], keepdims=0),
    ]
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", size, size])],
        [
            helper.make_tensor_value_info("loss", TensorProto.FLOAT, []),
            helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", size, size]),
        ],
        [numpy_helper.from_array(w.astype(np.float32), name) for name, w in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


@pytest.fixture
def path(tmp_path):
    """A model with its weights in a file beside it."""
    (tmp_path / "in").mkdir()
    found = tmp_path / "in" / "model.onnx"
    onnx.save(model(), found, save_as_external_data=True, location="weights.bin", size_threshold=0)
    return found


def run(*arguments, code=0):
    """What the command prints; its exit code is checked."""
    result = CliRunner().invoke(cli.main, [str(a) for a in arguments])
    assert result.exit_code == code, result.output
    return result.output


def gradients(path):
    """What the model at the path computes for x = 0.5."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    x = np.full((2, SIZE, SIZE), 0.5, np.float32)
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, {"x": x}), strict=True))


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def test_in_the_same_folder_weights_stay_in_their_file(path):
    printed = run("grad", path, "-o", path.with_name("out.onnx"), "--of", "loss")
    assert names(path.parent) == ["model.onnx", "out.onnx", "weights.bin"]
    expected = onnxruntime.InferenceSession(
        onnxgrad.gradient(model(), of="loss").SerializeToString(), providers=["CPUExecutionProvider"]
    ).run(None, {"x": np.full((2, SIZE, SIZE), 0.5, np.float32)})
    found = gradients(path.with_name("out.onnx"))
    assert list(found) == ["loss", "y", "W_grad", "b_grad"]
    for got, wanted in zip(found.values(), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)
    assert re.search(r"W +W_grad +float32\[80, 80\]", printed)
    assert re.search(r"differentiated: loss; nodes: 5 → \d+; out.onnx [\d.]+ kB \+ weights.bin 25.9 kB", printed)
    assert (path.with_name("out.onnx")).stat().st_size < 10_000


def test_in_another_folder_weights_are_copied_beside_it(path, tmp_path):
    beside = path.with_name("beside.onnx")
    run("grad", path, "-o", beside, "--of", "loss")
    (tmp_path / "out").mkdir()
    printed = run("grad", path, "-o", tmp_path / "out" / "far.onnx", "--of", "loss")
    assert names(tmp_path / "out") == ["far.onnx", "far.onnx.data"] and "far.onnx.data 25.9 kB" in printed
    expected = gradients(beside)
    (path.parent / "weights.bin").unlink()
    for name, got in gradients(tmp_path / "out" / "far.onnx").items():
        np.testing.assert_array_equal(got, expected[name])


def test_weights_within_the_model_stay_within(tmp_path):
    onnx.save(model(), tmp_path / "model.onnx")
    run("grad", tmp_path / "model.onnx", "-o", tmp_path / "model.onnx", "--of", "loss", "--overwrite")
    assert names(tmp_path) == ["model.onnx"]
    assert set(gradients(tmp_path / "model.onnx")) == {"loss", "y", "W_grad", "b_grad"}


def test_parameters_as_inputs_a_pattern_and_a_seed(path):
    out = path.with_name("out.onnx")
    printed = run("grad", path, "-o", out, "--of", "y", "--wrt", "[Wx]", "--wrt", "b", "--parameters-as-inputs")
    graph = onnx.load(out).graph
    assert [i.name for i in graph.input] == ["x", "y_grad", "W", "b"] and not graph.initializer
    assert [o.name for o in graph.output] == ["loss", "y", "W_grad", "x_grad", "b_grad"]
    assert "new input: y_grad, float32[batch, 80, 80], takes the gradient of y" in printed
    assert "float32[batch, 80, 80]" in printed and "weights.bin" not in printed


def test_a_product_of_the_hessian(path):
    out = path.with_name("out.onnx")
    printed = run("grad", path, "-o", out, "--of", "loss", "--wrt", "W", "--wrt", "b", "--hvp")
    graph = onnx.load(out, load_external_data=False).graph
    assert [i.name for i in graph.input] == ["x", "W_vector", "b_vector"]
    assert [o.name for o in graph.output] == ["loss", "y", "W_hvp", "b_hvp"]
    assert "new inputs: W_vector, b_vector, take the vector" in printed and "hvp of" in printed


def test_long_lists_of_gradients_are_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(gradient_commands, "MOST_ROWS", 1)
    onnx.save(model(), tmp_path / "model.onnx")
    printed = run("grad", tmp_path / "model.onnx", "-o", tmp_path / "out.onnx", "--of", "loss")
    assert "W_grad" in printed and "b_grad" not in printed and "… and 1 more" in printed


def test_a_failed_write_leaves_what_was_there(path, monkeypatch):
    import onnx_ir

    def half(_model, file, **_options):
        Path(file).write_text("half")
        raise OSError(28, "No space left on device", str(file))

    out = path.with_name("out.onnx")
    out.write_text("before")
    monkeypatch.setattr(onnx_ir, "save", half)
    assert "No space left on device" in run("grad", path, "-o", out, "--of", "loss", code=2)
    assert out.read_text() == "before" and names(path.parent) == ["model.onnx", "out.onnx", "weights.bin"]


def test_models_past_two_gigabytes_have_their_weights_beside_them(tmp_path, monkeypatch):
    monkeypatch.setattr("onnxgrad.graph.files.LARGEST", 1000)
    onnx.save(model(), tmp_path / "model.onnx")
    run("grad", tmp_path / "model.onnx", "-o", tmp_path / "out.onnx", "--of", "loss")
    assert names(tmp_path) == ["model.onnx", "out.onnx", "out.onnx.data"]
    assert set(gradients(tmp_path / "out.onnx")) == {"loss", "y", "W_grad", "b_grad"}


def test_check_with_random_inputs(tmp_path):
    onnx.save(model(4), tmp_path / "model.onnx")
    printed = run("check", tmp_path / "model.onnx", "--of", "loss", "--wrt", "*", "--dim", "batch=3")
    assert "random inputs: x float32[3, 4, 4]" in printed
    for name, shape in {"W": "4, 4", "b": "4", "x": "3, 4, 4"}.items():
        assert re.search(rf"{name} +\[{shape}\] +\S+ +\S+ +\d\.\de-(0[89]|1\d)", printed)
    assert "float32[2, 4, 4]" in run("check", tmp_path / "model.onnx", "--of", "y", "--directions", "1")


def test_check_with_feeds(tmp_path):
    onnx.save(model(4), tmp_path / "model.onnx")
    np.savez(tmp_path / "feeds.npz", x=np.ones((5, 4, 4), np.float32))
    given = [tmp_path / "model.onnx", "--feeds", tmp_path / "feeds.npz"]
    assert "inputs: x float32[5, 4, 4]" in run("check", *given, "--of", "loss")
    assert "give one of them" in run("check", *given, "--of", "loss", "--dim", "batch=3", code=2)
    np.savez(tmp_path / "feeds.npz", z=np.ones(1))
    assert "has an array 'z', which is not an input of the model; available: 'x'" in run(
        "check", *given, "--of", "loss", code=2
    )
    np.savez(tmp_path / "feeds.npz")
    assert "feeds lacks the input 'x'" in run("check", *given, "--of", "loss", code=2)
    (tmp_path / "feeds.npz").write_text("no")
    assert "feeds.npz' cannot be read as .npz (it has another format)" in run("check", *given, code=2)
    assert "none.npz' does not exist" in run("check", tmp_path / "model.onnx", "--feeds", tmp_path / "none.npz", code=2)


@pytest.mark.parametrize("error", [1e-3, float("nan")])
def test_check_says_which_gradient_is_wrong(tmp_path, monkeypatch, error):
    rows = [checking.Compared("W", (4, 4), 1.0, 1.0, 1e-9), checking.Compared("b", (4,), 1.0, 2.0, error)]
    monkeypatch.setattr(checking, "check_gradient", lambda *_, **__: checking.GradientCheck(rows))
    onnx.save(model(4), tmp_path / "model.onnx")
    result = CliRunner().invoke(cli.main, ["check", str(tmp_path / "model.onnx")])
    assert result.exit_code == 1
    assert result.stderr == "onnxgrad: off by more than 0.0001: b\n"
    assert not checking.GradientCheck(rows).worst <= 1e-4


def test_random_inputs_of_other_types_and_nameless_dimensions(tmp_path):
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, "n", 3]),
        helper.make_tensor_value_info("mask", TensorProto.BOOL, ["n", 1]),
        helper.make_tensor_value_info("shape", TensorProto.INT64, [3]),
    ]
    nodes = [helper.make_node("Where", ["mask", "x", "zero"], ["y"]), helper.make_node("Cast", ["shape"], ["s"], to=1),
             helper.make_node("Mul", ["y", "s"], ["out"])]  # fmt: skip
    graph = helper.make_graph(
        nodes, "graph", inputs, [helper.make_tensor_value_info("out", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.zeros((), np.float32), "zero")],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]), tmp_path / "model.onnx")
    printed = run("check", tmp_path / "model.onnx", "--wrt", "x", "--dim", "x_dim_0=5")
    assert "x float32[5, 2, 3], mask bool[2, 1], shape int64[3]" in printed
    refused = run("check", tmp_path / "model.onnx", "--dim", "batch=5", code=2)
    assert refused == "onnxgrad: no input has a dimension 'batch'; available: 'n', 'x_dim_0'\n"


def test_ops_lists_operators_and_kernels():
    printed = run("ops")
    assert re.search(r"GatherGrad +onnxgrad\.gather_grad +✓ +✓ +float16, float32, float64, bfloat16", printed)
    assert re.search(r"BroadcastGradientArgs +onnxgrad\.broadcast_gradient_args +✓ +– +int64", printed)
    assert "SliceGrad" not in run("ops", "gather") and "GatherGrad" in run("ops", "gather*")


def test_ops_lists_rules():
    printed = run("ops", "--rules")
    assert re.search(r"Reshape +ai\.onnx +data +shape", printed)
    assert "Where several inputs tie" in run("ops", "--rules", "max") and "Add" not in run("ops", "--rules", "M*")


def test_refusals_are_one_sentence(path, tmp_path):
    out = tmp_path / "out.onnx"
    (tmp_path / "text.onnx").write_text("no model")
    for arguments, expected in {
        ("grad", tmp_path / "none.onnx", "-o", out): "none.onnx' does not exist, expected an ONNX model",
        ("grad", tmp_path / "text.onnx", "-o", out): "is not an ONNX model",
        ("grad", tmp_path, "-o", out): f"grad: {str(tmp_path)!r} is a folder, expected an ONNX model",
        ("grad", path, "-o", "/proc/x.onnx", "--of", "y"): "onnxgrad: /proc/x.onnx: No such file or directory",
        ("grad", path, "-o", out): "name the output to differentiate with `of`; available: 'loss', 'y'",
        (
            "grad",
            path,
            "-o",
            out,
            "--of",
            "z",
        ): "`of` names 'z', expected an output of the model; available: 'loss', 'y'",
        ("grad", path, "-o", out, "--of", "y", "--wrt", "z"): "`wrt` names 'z', which is not an input or initializer",
        ("grad", path, "-o", tmp_path / "none" / "out.onnx", "--of", "y"): "to write 'out.onnx' into does not exist",
        ("grad", path, "-o", tmp_path, "--of", "y"): "is a folder, expected the name of a file to write",
        ("ops", "--rules", "Nothing"): "no operator with a gradient rule matches 'Nothing'",
        ("ops", "Nothing"): "no operator of onnxgrad matches 'Nothing'",
    }.items():
        printed = run(*arguments, code=2)
        assert printed.startswith("onnxgrad: ") and expected in printed and printed.count("\n") == 1, printed
    assert not out.exists()
    assert "expected a name and a number, as in batch=4" in run("check", path, "--dim", "batch", code=2)
    debugged = run("grad", path, "-o", out, "--of", "z", "--debug", code=2)
    assert "Traceback" in debugged and debugged.splitlines()[-1].startswith("onnxgrad: grad: `of` names 'z'")


def test_errors_of_others_name_their_type():
    assert sentence(KeyError("x")) == "KeyError: 'x' (--debug shows where)"
    assert sentence(PermissionError(13, "Permission denied", "/a")) == "/a: Permission denied"


@pytest.mark.parametrize(
    "size, text",
    [(999, "999 B"), (1500, "1.5 kB"), (25_900_000, "25.9 MB"), (3 * 10**9, "3 GB"), (5 * 10**12, "5e+03 GB")],
)
def test_sizes(tmp_path, size, text):
    with (tmp_path / "file").open("wb") as file:
        file.truncate(size)
    assert size_of(tmp_path / "file") == text


def test_help_has_examples():
    assert all(name in run("--help") for name in ("train", "grad", "check", "ops"))
    for name in ("train", "grad", "check", "ops"):
        assert f"  onnxgrad {name}" in run(name, "-h")


def test_the_installed_script(path):
    script = Path(sys.executable).with_name("onnxgrad")
    result = subprocess.run(
        [script, "grad", path, "-o", path.with_name("out.onnx")], capture_output=True, text=True, check=False
    )
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr == "onnxgrad: grad: name the output to differentiate with `of`; available: 'loss', 'y'\n"
