"""join(): two models in one compute what they compute one after the other."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from click.testing import CliRunner
from tests.checks import raises
from tests.torch_export import export
from torch import nn

import onnxgrad
from onnxgrad import losses, optim
from onnxgrad.cli import main


def run(model, feeds, names=None):
    data = model.SerializeToString() if isinstance(model, onnx.ModelProto) else str(model)
    return onnxruntime.InferenceSession(data).run(names, feeds)


FIRST = """
<ir_version: 8, opset_import: ["" : 17], metadata_props: ["author" : "a", "made": "x"]>
first (float[batch, 4] x) => (float[batch, 8] h, float[batch, 8] extra) {
    a = MatMul(x, w)
    h = own.act(a)
    extra = Neg(a)
}
<domain: "own", opset_import: ["" : 17]>
act (v) => (r) { r = Tanh(v) }
"""
SECOND = """
<ir_version: 9, opset_import: ["" : 19], metadata_props: ["author" : "b"]>
second (float[n, 8] x, float[n, batch] mask) => (float[n, 3] y) {
    a = MatMul(x, w)
    s = ReduceSum(mask, axes)
    y = Mul(a, s)
}
"""


def with_weights(text, **shapes):
    model = onnx.parser.parse_model(text)
    rng = np.random.default_rng(len(text))
    for name, shape in shapes.items():
        array = np.array([1]) if name == "axes" else rng.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


def pair():
    text = FIRST.replace('"own" : 1, ', "").replace('"" : 17], meta', '"" : 17, "own" : 1], meta')
    return with_weights(text, w=(4, 8)), with_weights(SECOND, w=(8, 3), axes=(1,))


def dims(value):
    return [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]


X = np.random.default_rng(1).standard_normal((5, 4)).astype(np.float32)
MASK = np.random.default_rng(2).standard_normal((5, 2)).astype(np.float32)


def test_names_opsets_dimensions_functions_and_metadata():
    first, second = pair()
    one = onnxgrad.join(first, second, {"h": "x"})
    onnx.checker.check_model(one, full_check=True)
    h, extra = run(first, {"x": X})
    (y,) = run(second, {"x": h, "mask": MASK})
    found = run(one, {"x": X, "mask": MASK})
    assert [o.name for o in one.graph.output] == ["extra", "y"]
    assert np.array_equal(found[0], extra) and np.array_equal(found[1], y)
    assert {t.name for t in one.graph.initializer} >= {"w", "second.w", "axes"}
    assert [v.name for v in one.graph.input] == ["x", "mask"]
    # n of the second is the batch of the first, and its own batch is another number.
    assert dims(one.graph.input[1]) == ["batch", "second.batch"] and dims(one.graph.output[1])[0] == "batch"
    assert {o.domain: o.version for o in one.opset_import}[""] == 19 and one.ir_version >= 9
    metadata = {p.key: p.value for p in one.metadata_props}
    assert metadata == {"author": "a", "made": "x", "second.author": "b"}
    assert (first, second) == pair()


def test_functions_of_both_stay():
    first, _ = pair()
    second = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17, "own" : 1]> s (float[n, 8] x) => (float[n, 8] y) '
        "{ b = own.act(x) y = own.more(b) } "
        '<domain: "own", opset_import: ["" : 17]> act (v) => (r) { r = Tanh(v) } '
        '<domain: "own", opset_import: ["" : 17]> more (v) => (r) { r = Exp(v) }'
    )
    one = onnxgrad.join(first, second, {"h": "x"})
    assert [f.name for f in one.functions] == ["act", "more"]
    np.testing.assert_allclose(run(one, {"x": X}, ["y"])[0], np.exp(np.tanh(run(first, {"x": X})[0])), rtol=1e-5)
    second.functions[0].node[0].op_type = "Sin"
    text = "join: both models have a function 'act' of 'own', and they differ: rename one of them"
    with raises(ValueError, text):
        onnxgrad.join(first, second, {"h": "x"})


def test_the_kind_of_model_that_comes_back_and_the_prefix():
    first, second = pair()
    one = onnxgrad.join(ir.from_proto(first), second, {"h": "x"}, prefix="b/")
    assert isinstance(one, ir.Model) and {"w", "b/w"} <= set(one.graph.initializers)


def test_only_ends_need_no_names():
    first, second = pair()
    one = onnxgrad.join(onnxgrad.cut(first, "h"), onnxgrad.cut(second, "a"))
    assert [o.name for o in one.graph.output] == ["second.a"]


@pytest.mark.parametrize(
    "connections, text",
    [
        (None, "join: say which outputs of the first model go into which inputs of the second, as {'a': 'b'}: the "
         "outputs are 'h', 'extra', the inputs 'x', 'mask'"),
        ({}, "join: connections is empty, expected at least one output and the input that takes it"),
        ({"hh": "x"}, "join: 'hh' is not an output of the first model; did you mean 'h'?"),
        ({"a": "x"}, "join: 'a' is not an output of the first model; it is inside: cut() makes outputs of values"),
        ({"h": "X2"}, "join: 'X2' is not an input of the second model; did you mean 'x'?"),
        ({"h": "x", "extra": "x"}, "join: the input 'x' of the second model is connected twice"),
    ],
)  # fmt: skip
def test_wrong_connections(connections, text):
    with raises(ValueError, text):
        onnxgrad.join(*pair(), connections)


def test_types_and_shapes_have_to_fit():
    first, second = pair()
    second.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 9
    second.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(np.ones((9, 3), np.float32), "w"))
    text = (
        "join: 'h' of the first model is float[batch, 8], 'x' of the second takes float[n, 9]: expected the same shape"
    )
    with raises(ValueError, text):
        onnxgrad.join(first, second, {"h": "x"})
    half = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> s (float16[n, 8] x) => (float16[n, 8] y) { y = Neg(x) }'
    )
    text = "join: 'h' of the first model is float[batch, 8], 'x' of the second takes float16[n, 8]: a Cast has to come"
    text += " between"
    with raises(ValueError, text):
        onnxgrad.join(first, half, {"h": "x"})
    with raises(FileNotFoundError, "join: second: the file 'no.onnx' does not exist, expected an ONNX model"):
        onnxgrad.join(first, "no.onnx")


@pytest.mark.slow
@pytest.mark.parametrize("dynamo", [(True, True), (True, False), (False, False)])
def test_two_modules_of_pytorch_train_as_one(dynamo, tmp_path):
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.LayerNorm(8))
    head = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3))
    x = torch.randn(6, 4)
    how = {"training": torch.onnx.TrainingMode.PRESERVE}
    export(encoder.train(), x, tmp_path / "encoder.onnx", dynamo=dynamo[0], **({} if dynamo[0] else how))
    export(head.train(), torch.randn(6, 8), tmp_path / "head.onnx", dynamo=dynamo[1], **({} if dynamo[1] else how))
    one = onnxgrad.join(tmp_path / "encoder.onnx", tmp_path / "head.onnx")
    trainer = onnxgrad.Trainer(one, losses.CrossEntropy(one.graph.output[0].name), optim.SGD(lr=0.1))
    names = [n for n, _ in encoder.named_parameters()]
    names += [f"second.{n}" if n in names else n for n, _ in head.named_parameters()]
    assert set(trainer.parameters) == set(names)
    both = nn.Sequential(encoder, head)
    step = torch.optim.SGD(both.parameters(), lr=0.1)
    target = torch.randint(0, 3, (6,))
    for _ in range(4):
        loss = nn.functional.cross_entropy(both(x), target)
        found = float(trainer.step({"x": x.numpy(), "target": target.numpy()}))
        assert found == pytest.approx(loss.item(), rel=1e-4)
        step.zero_grad()
        loss.backward()
        step.step()


def test_on_the_command_line(tmp_path):
    for name, model in zip(("first", "second"), pair(), strict=True):
        onnx.save(model, tmp_path / f"{name}.onnx")

    def join(*arguments):
        files = [str(tmp_path / f"{name}.onnx") for name in ("first", "second")]
        return CliRunner().invoke(main, ["join", *files, *map(str, arguments)])

    done = join("--connect", "h=x", "-o", tmp_path / "one.onnx")
    assert done.exit_code == 0, done.output
    assert len(run(tmp_path / "one.onnx", {"x": X, "mask": MASK})) == 2
    assert join("-o", tmp_path / "two.onnx").exit_code == 2
    wrong = join("--connect", "h", "-o", tmp_path / "two.onnx")
    assert wrong.exit_code == 2 and "--connect 'h' is not a pair of names, expected OUTPUT=INPUT" in wrong.output
