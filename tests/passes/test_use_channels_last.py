"""Channels last in training steps: what is changed, what is left to transpose, and that steps compute the same."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import numpy_helper, parser

from onnxgrad import add_functions
from onnxgrad.graph.files import load
from onnxgrad.passes.prepare import prepare
from onnxgrad.train import graphs, losses
from onnxgrad.train.graphs import Selection, StepGraph, step_graph

CLASSES = 10


def network(channels: int = 16) -> onnx.ModelProto:
    """A residual block, a pool, and two branches that are put together."""
    random = np.random.default_rng(0)
    statements = (
        "a = Conv<pads = [1, 1, 1, 1], strides = [2, 2]>(x, w0)  b = BatchNormalization(a, s0, b0, m0, v0)  c = Relu(b)"
        "d = MaxPool<kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]>(c)"
        "e = Conv<pads = [1, 1, 1, 1]>(d, w1)  f = BatchNormalization(e, s1, b1, m1, v1)  g = Add(f, d)  h = Relu(g)"
        "i = Conv(h, w2, bias)  j = Sigmoid(i)  k = Mul(j, factor)  l = Concat<axis = 1>(h, k)"
        "n = GlobalAveragePool(l)  o = Flatten(n)  y = Gemm<transB = 1>(o, head)"
    )
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21], producer_name: "pytorch">'
        f" m (float[N, 3, 20, 18] x) => (float[N, {CLASSES}] y) {{ {statements} }}"
    )
    kernels = {"w0": (channels, 3, 3, 3), "w1": (channels, channels, 3, 3), "w2": (channels, channels, 1, 1)}
    shapes = {
        **kernels,
        **{f"{name}{k}": (channels,) for name in "sbmv" for k in (0, 1)},
        "bias": (channels,),
        "factor": (channels, 1, 1),
        "head": (CLASSES, 2 * channels),
    }
    for name, shape in shapes.items():
        values = random.uniform(0.5, 1, shape) if name[0] in "sv" else random.standard_normal(shape) / 4
        model.graph.initializer.append(numpy_helper.from_array(values.astype(np.float32), name))
    return model


def steps_of(model: Any, monkeypatch: pytest.MonkeyPatch, **how: Any) -> tuple[StepGraph, StepGraph]:
    """With the pass, and without; with none after it that would fuse what it leaves."""

    def step() -> StepGraph:
        return step_graph(prepare(load(model, "test"), "test"), losses.CrossEntropy("y"), on_cpu=False, **how)

    with monkeypatch.context() as patched:
        patched.setattr(graphs, "fuse_elementwise", lambda *_: None)
        patched.setattr(graphs, "use_permuted_matmul", lambda draft, **_: None)
        changed = step()
        patched.setattr(graphs, "use_channels_last", lambda draft: 0)
        return changed, step()


def kinds(step: StepGraph) -> Counter[str]:
    return Counter(node.op_type for node in step.model.graph)


def results(step: StepGraph, model: Any) -> dict[str, np.ndarray]:
    """Of the step as ONNX functions, in stock onnxruntime."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    proto = add_functions(ir.to_proto(step.model)).SerializeToString()
    session = onnxruntime.InferenceSession(proto, options, providers=["CPUExecutionProvider"])
    weights, random, feeds = load(model, "test").graph.initializers, np.random.default_rng(0), {}
    for given in session.get_inputs():
        if given.name in weights:
            feeds[given.name] = weights[given.name].const_value.numpy()  # type: ignore[union-attr]
        elif "int64" in given.type:
            feeds[given.name] = random.integers(0, CLASSES, [d if isinstance(d, int) else 4 for d in given.shape])
        else:
            feeds[given.name] = random.standard_normal((4, *given.shape[1:])).astype(np.float32)
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def assert_same(changed: StepGraph, plain: StepGraph, model: Any) -> None:
    """Losses, statistics and gradients; some of these are nothing but rounding, where normalization takes them away."""
    ours, theirs = results(changed, model), results(plain, model)
    assert theirs.keys() - ours.keys() == {s.unread for s in plain.statistics if s.unread is not None}
    largest = max(np.abs(theirs[name]).max() for name in plain.gradients.values())
    for name in ours:
        wanted = theirs[name]
        scale = largest if name in plain.gradients.values() else 1
        np.testing.assert_allclose(ours[name], wanted, rtol=1e-4, atol=1e-5 * scale, err_msg=name)


def test_a_network(monkeypatch):
    changed, plain = steps_of(network(), monkeypatch)
    found = kinds(changed)
    for kind, count in (("Convolution", 3), ("ConvGrad", 3), ("BatchNorm", 2), ("BatchNormGrad", 2)):
        assert found[f"Nhwc{kind}"] == count
    assert found["NhwcMaxPool"] == found["NhwcMaxPoolGrad"] == 1
    assert not {"Conv", "ConvGrad", "BatchNormInternal", "BatchNormalizationGrad", "MaxPool"} & {*found}
    assert not {"Relu", "ReluGrad"} & {*found}  # batch normalization has taken them in
    # The image, a factor of channels and its gradient, the head and its gradient.
    assert found["Transpose"] - kinds(plain)["Transpose"] <= 5
    assert_same(changed, plain, network())


def test_residuals_and_activations_are_taken_in(monkeypatch):
    changed, _ = steps_of(network(), monkeypatch)
    norms = [node for node in changed.model.graph if node.op_type == "NhwcBatchNorm"]
    assert [len(node.inputs) for node in norms] == [5, 6]
    assert all(node.attributes["activation"].as_string() == "Relu" for node in norms)
    gradients = [node for node in changed.model.graph if node.op_type == "NhwcBatchNormGrad"]
    assert [bool(node.outputs[3].name) if len(node.outputs) > 3 else False for node in gradients] == [True, False]


def test_half_numbers_stay_half(monkeypatch):
    changed, _ = steps_of(network(), monkeypatch, precision="bf16")
    for node in changed.model.graph:
        if node.op_type.startswith("Nhwc"):
            assert node.inputs[0].dtype == ir.DataType.BFLOAT16, node.op_type
    assert kinds(changed)["NhwcMaxPool"] == 1 and kinds(changed)["Relu"] == 0


def test_groups_of_half_numbers(monkeypatch):
    """There is no ConvTranspose of bfloat16, which the gradient of float32 has."""
    model = network()
    model.graph.node[4].attribute.append(onnx.helper.make_attribute("group", 2))
    kernel = next(tensor for tensor in model.graph.initializer if tensor.name == "w1")
    kernel.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(kernel)[:, :8], "w1"))
    changed, plain = steps_of(model, monkeypatch, precision="bf16")
    assert kinds(changed)["NhwcConvGrad"] == kinds(plain)["ConvGrad"] == 3
    assert not kinds(plain)["ConvTranspose"]


def test_a_pool_whose_last_window_reaches_past_the_image(monkeypatch):
    model = network()
    pool = model.graph.node[3]
    pool.attribute.append(onnx.helper.make_attribute("ceil_mode", 1))
    changed, plain = steps_of(model, monkeypatch)
    assert kinds(changed)["NhwcMaxPool"] == kinds(changed)["NhwcMaxPoolGrad"] == 1
    assert_same(changed, plain, model)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_frozen_statistics(precision, monkeypatch):
    frozen = Selection(freeze=["m?", "v?"])
    changed, plain = steps_of(network(), monkeypatch, selection=frozen, precision=precision)
    assert kinds(plain)["BatchNormalization"] == 2 and not kinds(changed)["BatchNormalization"]
    images = [n for n in changed.model.graph if n.op_type == "Transpose" and len(n.outputs[0].shape or ()) == 4]
    assert len(images) <= 4  # as with others, and of one pixel
    if precision == "float32":
        assert_same(changed, plain, network())


def test_networks_of_few_channels_are_left_alone(monkeypatch):
    changed, plain = steps_of(network(8), monkeypatch)
    assert kinds(changed) == kinds(plain)


def test_steps_on_the_cpu_are_left_alone():
    step = step_graph(prepare(load(network(), "test"), "test"), losses.CrossEntropy("y"), on_cpu=True)
    assert not any(kind.startswith("Nhwc") for kind in kinds(step))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "most"), [("resnet", 3), ("mobilenet_v2", 3), ("convnext", -15)])
def test_networks_of_torchvision(name, most, tmp_path: Path, monkeypatch):
    """`most` Transposes are added, or so many are taken away: those around LayerNormalization."""
    from tests.models.architectures import TORCHVISION
    from tests.torch_export import export

    network = TORCHVISION[name]
    path = tmp_path / "model.onnx"
    export(network.made(), next(iter(network.batch().values())), path)
    changed, plain = steps_of(path, monkeypatch)
    assert kinds(changed)["Transpose"] - kinds(plain)["Transpose"] <= most
    assert not {"Conv", "ConvGrad", "BatchNormInternal", "BatchNormalizationGrad"} & {*kinds(changed)}
    assert_same(changed, plain, path)
