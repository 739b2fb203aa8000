"""gradient() of models as they come: old opsets, functions, weights in files, thousands of nodes, subgraphs."""

import re
import resource
import sys

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper, parser
from tests.gradients import evaluate, names, results_of
from tests.torch_export import export

import onnxgrad
from onnxgrad.rules import op

RNG = np.random.default_rng(0)


# Versions


@pytest.mark.parametrize("opset", [7, 9, 11, 13, 17])
def test_older_models_are_converted(opset):
    text = f"""<ir_version: 8, opset_import: ["" : {opset}]>
    g (float[2,3] x) => (float[1,3] y) {{
        h = Exp(x)
        flat = Squeeze(h)
        y = ReduceMean <axes = [0], keepdims = 1> (flat)
    }}"""
    old = parser.parse_model(text)
    made = onnxgrad.gradient(old, "x")
    assert made.opset_import[0].version == 18
    x, seed = RNG.standard_normal((2, 3)).astype(np.float32), RNG.standard_normal((1, 3)).astype(np.float32)
    np.testing.assert_allclose(results_of(made, x=x, y_grad=seed)["x_grad"], seed * np.exp(x) / 2, rtol=1e-5)


def test_a_model_that_cannot_be_converted_is_refused():
    text = '<ir_version: 8, opset_import: ["" : 1]> g (float[2] x) => (float[2] y) { y = Pad <paddings = [0, 0]> (x) }'
    message = "gradient: the model imports opset 1, rules are written for 18 and newer, and onnx cannot convert it: "
    message += re.escape("No Adapter From Version $1 for Pad")
    with pytest.raises(ValueError, match=message):
        onnxgrad.gradient(parser.parse_model(text), "x")


@pytest.mark.parametrize("opset", range(18, onnx.defs.onnx_opset_version() + 1))
def test_newer_models_stay_as_they_are(opset):
    text = f'<ir_version: 10, opset_import: ["" : {opset}]> g (float[2] x) => (float[2] y) {{ y = Tanh(x) }}'
    assert onnxgrad.gradient(parser.parse_model(text), "x").opset_import[0].version == opset


# Functions


def test_functions_of_the_model_are_inlined():
    text = """<ir_version: 9, opset_import: ["" : 18, "mine" : 1]>
    g (float[2] x, float[2] z) => (float[2] y) {
        h = mine.outer <gain = 3.0> (x)
        y = Mul(h, z)
    }
    <domain: "mine", opset_import: ["" : 18, "mine" : 1]>
    outer <gain> (a) => (b) {
        k = Constant <value_float : float = @gain> ()
        c = Mul(a, k)
        b = mine.inner(c)
    }
    <domain: "mine", opset_import: ["" : 18]>
    inner (a) => (b) {
        b = Exp(a)
    }"""
    made = onnxgrad.gradient(parser.parse_model(text), ["x", "z"])
    assert not made.functions and {n.domain for n in made.graph.node} == {""}
    x, z, seed = RNG.standard_normal((3, 2)).astype(np.float32)
    results = results_of(made, x=x, z=z, y_grad=seed)
    np.testing.assert_allclose(results["x_grad"], seed * z * 3 * np.exp(3 * x), rtol=1e-5)
    np.testing.assert_allclose(results["z_grad"], seed * np.exp(3 * x), rtol=1e-5)


# Weights that are not looked at


def chain(layers: int, width: int) -> onnx.ModelProto:
    """tanh(x · w₀ + b₀), and so on."""
    nodes, weights = [], []
    for k in range(layers):
        nodes.append(helper.make_node("Mul", [f"h{k}", f"w{k}"], [f"m{k}"], name=f"mul{k}"))
        nodes.append(helper.make_node("Add", [f"m{k}", f"b{k}"], [f"a{k}"], name=f"add{k}"))
        nodes.append(helper.make_node("Tanh", [f"a{k}"], [f"h{k + 1}"], name=f"tanh{k}"))
        weights += [f"w{k}", f"b{k}"]
    infos = [helper.make_tensor_value_info("h0", TensorProto.FLOAT, ["N", width])]
    results = [helper.make_tensor_value_info(f"h{layers}", TensorProto.FLOAT, ["N", width])]
    rng = np.random.default_rng(0)
    arrays = [numpy_helper.from_array(rng.standard_normal(width).astype(np.float32), n) for n in weights]
    graph = helper.make_graph(nodes, "chain", infos, results, arrays)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


@pytest.mark.parametrize("width, content", [(5000, "garbage"), (5000, "missing"), (5, "missing")])
def test_weights_in_a_file_are_not_read(tmp_path, monkeypatch, width, content):
    where = tmp_path / "model"
    where.mkdir()
    weights = where / "weights.bin"
    onnx.save(chain(2, width), where / "m.onnx", save_as_external_data=True, location=weights.name, size_threshold=0)
    expected = weights.read_bytes()
    if content == "garbage":
        weights.write_bytes(b"?" * len(expected))
    else:
        weights.unlink()
    monkeypatch.chdir(tmp_path)  # where the file is not
    made = onnxgrad.gradient(where / "m.onnx")
    assert names(made.graph.output)[1:] == ["w0_grad", "b0_grad", "w1_grad", "b1_grad"]
    for tensor in made.graph.initializer:
        assert tensor.data_location == TensorProto.EXTERNAL and not tensor.raw_data
    weights.write_bytes(expected)
    onnx.save(made, where / "grad.onnx")
    session = onnxruntime.InferenceSession(where / "grad.onnx", providers=["CPUExecutionProvider"])
    feeds = {"h0": np.ones((3, width), np.float32), "h2_grad": np.ones((3, width), np.float32)}
    plain = evaluate(onnxgrad.gradient(chain(2, width)), feeds)
    for got, wanted in zip(session.run(None, feeds), plain, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


def test_shapes_in_a_file_are_read(tmp_path, monkeypatch):
    text = """<ir_version: 9, opset_import: ["" : 18]>
    g (float[N,6] x) => (float[N,2,3] y) <int64[3] target = {0, 2, 3}> { y = Reshape(x, target) }"""
    (tmp_path / "model").mkdir()
    path = tmp_path / "model" / "m.onnx"
    onnx.save(parser.parse_model(text), path, save_as_external_data=True, location="w.bin", size_threshold=0)
    monkeypatch.chdir(tmp_path)
    graph = onnxgrad.gradient(ir.load(path), "x").graph
    assert [d if isinstance(d, int) else d.value for d in graph.outputs[1].shape] == ["N", 6]


def test_more_weights_than_a_proto_can_hold(tmp_path):
    layers, shape = 3, [20_000, 15_000]
    big = chain(layers, 4)
    for info in (big.graph.input[0], big.graph.output[0]):
        info.CopyFrom(helper.make_tensor_value_info(info.name, TensorProto.FLOAT, shape))
    size = 4 * shape[0] * shape[1]
    for k, tensor in enumerate(big.graph.initializer):
        tensor.CopyFrom(TensorProto(name=tensor.name, data_type=TensorProto.FLOAT, dims=shape))
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in {"location": "w.bin", "offset": k * size, "length": size}.items():
            tensor.external_data.add(key=key, value=str(value))
    (tmp_path / "m.onnx").write_bytes(big.SerializeToString())
    with (tmp_path / "w.bin").open("wb") as file:
        file.truncate(2 * layers * size)  # 7.2 GB that take no room
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    made = onnxgrad.gradient(tmp_path / "m.onnx")
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown * 1024 < 2**30, f"{grown} KB more than before"  # kilobytes, on Linux
    assert len(made.graph.output) == 1 + 2 * layers and made.ByteSize() < 100_000


# Size


def calls(layers: int) -> int:
    """Python functions called while the gradient is built: unlike seconds, the same on any machine at any time."""
    model, count = chain(layers, 4), 0

    def note(frame, event, argument):
        nonlocal count
        count += 1

    sys.setprofile(note)
    try:
        made = onnxgrad.gradient(model)
    finally:
        sys.setprofile(None)
    assert len(made.graph.output) == 1 + 2 * layers
    return count


@pytest.mark.slow
def test_work_is_linear_in_the_number_of_layers():
    calls(10)  # what is done once
    half, whole = calls(300), calls(600)
    assert whole < 2.1 * half, f"300 layers took {half:,} calls, 600 took {whole:,}"


@pytest.mark.slow
def test_depth_is_no_matter():
    layers = 10_000
    nodes = [helper.make_node("Neg", [f"h{k}"], [f"h{k + 1}"]) for k in range(layers)]
    infos = [helper.make_tensor_value_info(f"h{k}", TensorProto.FLOAT, [2]) for k in (0, layers)]
    graph = helper.make_graph(nodes, "deep", infos[:1], infos[1:])
    deep = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    assert layers > sys.getrecursionlimit()
    made = onnxgrad.gradient(deep, "h0")
    assert len(made.graph.node) >= 2 * layers
    seed = np.array([1, 2], np.float32)
    assert results_of(made, h0=seed, h10000_grad=seed)["h0_grad"].tolist() == [1, 2]


# Subgraphs


def test_a_branch_beside_the_way():
    text = """<ir_version: 9, opset_import: ["" : 18]>
    g (bool flag, float[2] x, float[2] z) => (float[2] y) {
        h = Exp(x)
        b = If (flag) <
            then_branch = t () => (float[2] p) { p = Neg(h) },
            else_branch = e () => (float[2] q) { q = Identity(h) }
        >
        y = Mul(b, z)
    }"""
    made = onnxgrad.gradient(parser.parse_model(text), "z")
    x, seed = np.ones(2, np.float32), np.array([1, 2], np.float32)
    got = results_of(made, flag=np.array(True), x=x, z=x, y_grad=seed)["z_grad"]
    np.testing.assert_allclose(got, -np.exp(x) * seed, rtol=1e-5)


# What rules may do


def test_a_rule_that_gives_nothing_means_zero(forget_rules):
    onnxgrad.vjp("Exp", input=lambda g, n: None)
    text = """<ir_version: 9, opset_import: ["" : 18]>
    g (float[N] x, float[N] z) => (float[N] y) {
        h = Exp(x)
        y = Add(h, z)
    }"""
    made = onnxgrad.gradient(parser.parse_model(text), ["x", "z"])
    seed = np.ones(3, np.float32)
    results = results_of(made, x=seed, z=seed, y_grad=seed)
    assert results["x_grad"].tolist() == [0, 0, 0] and results["z_grad"].tolist() == [1, 1, 1]


def test_a_rewritten_node_may_use_what_the_graph_computes_later(forget_rules):
    onnxgrad.vjp("Softsign", input=lambda g, n: g, rewrite=lambda n: [n.input / (1 + op.Abs(n.input))])
    text = """<ir_version: 9, opset_import: ["" : 18]>
    g (float[2] x) => (float[2] s, float[2] y) {
        s = Softsign(x)
        a = Abs(x)
        y = Mul(a, s)
    }"""
    made = onnxgrad.gradient(parser.parse_model(text), "x", "y")
    x, seed = np.array([1, -3], np.float32), np.ones(2, np.float32)
    results = results_of(made, x=x, y_grad=seed)
    np.testing.assert_allclose(results["s"], x / (1 + np.abs(x)), rtol=1e-6)
    slope = np.abs(x) / (1 + np.abs(x)) ** 2 + np.sign(x) * x / (1 + np.abs(x))
    np.testing.assert_allclose(results["x_grad"], slope, rtol=1e-5)


@pytest.mark.parametrize("outputs", ["y", "y, "])
def test_an_output_that_the_node_left_out_is_added_for_the_rule(forget_rules, outputs):
    onnxgrad.vjp("MaxPool", X=lambda g, n: g * op.CastLike(n.Indices, g))
    text = f"""<ir_version: 9, opset_import: ["" : 18]>
    g (float[1,1,2] x) => (float[1,1,2] y) {{ {outputs} = MaxPool <kernel_shape = [1]> (x) }}"""
    made = onnxgrad.gradient(parser.parse_model(text), "x")
    ones = np.ones((1, 1, 2), np.float32)
    assert results_of(made, x=ones, y_grad=ones)["x_grad"].ravel().tolist() == [0, 1]


def test_a_gradient_ends_at_the_detach_of_a_pytorch_module(tmp_path):
    """As far as the exporter has noted it, which it does without its optimization."""

    class Partner(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = torch.tanh(self.first(x))
            return self.second(h) * h.detach() + self.second(h).detach()

    torch.manual_seed(0)
    module, x = Partner(), torch.randn(4, 3)
    export(module, x, path := tmp_path / "m.onnx")
    target = torch.zeros(4, 3)
    trainer = onnxgrad.Trainer(path, onnxgrad.losses.MSE("y"), onnxgrad.optim.SGD(lr=0.1))
    trainer.step({"x": x.numpy(), "target": target.numpy()})
    torch.nn.functional.mse_loss(module(x), target).backward()
    for name, parameter in module.named_parameters():
        np.testing.assert_allclose(trainer.gradients[name], parameter.grad, rtol=1e-5, atol=1e-7)
