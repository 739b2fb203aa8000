"""onnxgrad.torch.Module: ONNX models beside PyTorch's own layers, and what it refuses."""

import copy
import pickle
import threading

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from tests.checks import raises
from tests.gpu import TORCH_DEVICE
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional

from onnxgrad.torch import Module

HAS_CUDA = "CUDAExecutionProvider" in onnxruntime.get_available_providers()
DEVICE = TORCH_DEVICE if TORCH_DEVICE == "cpu" or HAS_CUDA else "cpu"

MLP = """
<ir_version: 9, opset_import: ["" : 18]>
mlp (TYPE[n, 4] x) => (TYPE[n, 3] y) {
    a = MatMul(x, body.0.weight)
    b = Add(a, body.0.bias)
    h = Tanh(b)
    y = MatMul(h, head.weight)
}
"""
SHAPES = {"body.0.weight": (4, 5), "body.0.bias": (5,), "head.weight": (5, 3)}


def model(text, weights, dtype=np.float32):
    """A model of onnx's text, whose names have underscores for dots, with random weights."""
    kind = {np.float32: "float", np.float64: "double"}[dtype]
    dotted = {name.replace(".", "_"): name for name in weights}
    for plain, name in dotted.items():
        text = text.replace(name, plain)
    proto = onnx.parser.parse_model(text.replace("TYPE", kind))
    random = np.random.default_rng(0)
    for node in proto.graph.node:
        for k, name in enumerate(node.input):
            node.input[k] = dotted.get(name, name)
    for name, shape in weights.items():
        array = random.standard_normal(shape).astype(dtype) if isinstance(shape, tuple) else np.asarray(shape)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return proto


def mlp(dtype=np.float32, **settings):
    return Module(model(MLP, SHAPES, dtype), device=DEVICE, **settings)


def numbers(*shape, dtype=torch.float32, grad=False):
    values = np.random.default_rng(1).standard_normal(shape)
    return torch.tensor(values, dtype=dtype, device=DEVICE, requires_grad=grad)


def by_torch(module, x):
    """What the MLP computes, from the module's own parameters."""
    weight, bias, head = (module.get_parameter(name) for name in SHAPES)
    return torch.tanh(x @ weight + bias) @ head


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_parameters_are_in_modules_by_their_names():
    module = mlp()
    assert [name for name, _ in module.named_parameters()] == list(SHAPES)
    assert module.body.get_submodule("0").weight is module.get_parameter("body.0.weight")
    assert list(module.state_dict()) == list(SHAPES) and module.training
    assert repr(module).splitlines()[1] == "  'x' -> 'y'"


def test_gradients_are_those_of_pytorch():
    module, x = mlp(), numbers(6, 4, grad=True)
    wrt = [x, *module.parameters()]
    close(module(x), by_torch(module, x))
    found = torch.autograd.grad(module(x).square().sum(), wrt)
    close(found, torch.autograd.grad(by_torch(module, x).square().sum(), wrt))


def test_gradients_of_any_order():
    module, x = mlp(np.float64), numbers(2, 4, dtype=torch.float64, grad=True)

    def run(x, *weights):
        return torch.func.functional_call(module, dict(zip(SHAPES, weights, strict=True)), x)

    given = [x, *(p.detach().clone().requires_grad_() for p in module.parameters())]
    assert gradcheck(run, given) and gradgradcheck(run, given)
    found, expected = [], []
    for values, function in ((found, run), (expected, lambda x, w, b, h: torch.tanh(x @ w + b) @ h)):
        y = function(*given).square().sum()
        for _ in range(3):
            (gradient,) = torch.autograd.grad(y, x, create_graph=True)
            y = gradient.pow(3).sum()
            values.append(gradient)
    torch.testing.assert_close(found, expected)


def test_a_scalar_takes_its_cotangent():
    text = '<ir_version: 9, opset_import: ["" : 18]> m (float[n] x) => (float y) { y = ReduceSum <keepdims = 0> (x) }'
    x = numbers(3, grad=True)
    (3 * Module(onnx.parser.parse_model(text), device=DEVICE)(x)).backward()
    assert x.grad.tolist() == [3, 3, 3]


NORM = """
<ir_version: 9, opset_import: ["" : 18]>
norm (float[n, 4, m] x) => (float[n, 4, m] y) {
    y = BatchNormalization <momentum = 0.8> (x, norm.weight, norm.bias, norm.running_mean, norm.running_var)
}
"""
STATISTICS = {"norm.running_mean": np.zeros(4, np.float32), "norm.running_var": np.ones(4, np.float32)}


def norm(**settings):
    proto = model(NORM, {"norm.weight": (4,), "norm.bias": (4,), **STATISTICS})
    proto.producer_name = "pytorch"  # whose running variance is that of a sample
    return Module(proto, device=DEVICE, **settings)


def norm_of_torch(module):
    expected = nn.BatchNorm1d(4, momentum=0.2, device=DEVICE)
    expected.load_state_dict({**module.norm.state_dict(), "num_batches_tracked": torch.tensor(0)})
    return expected


def test_batch_normalization_measures_in_train_mode():
    module = norm()
    expected, x = norm_of_torch(module), numbers(5, 4, 3, grad=True)
    assert [name for name, _ in module.named_buffers()] == list(STATISTICS)
    for mode in (True, True, False):
        module.train(mode), expected.train(mode)
        y, wanted = module(x), expected(x)
        close(y, wanted)
        results = (y.square() * x).sum(), (wanted.square() * x).sum()
        close(*(torch.autograd.grad(r, [x, *m.parameters()]) for r, m in zip(results, (module, expected), strict=True)))
        close(module.norm.running_mean, expected.running_mean)
        close(module.norm.running_var, expected.running_var)


def test_second_gradients_of_a_measured_batch():
    module = norm()
    expected, x = norm_of_torch(module), numbers(5, 4, 3, grad=True)
    seconds = []
    for function in (module, expected):
        first = torch.autograd.grad(function(x).pow(3).sum(), [x, *function.parameters()], create_graph=True)
        seconds.append(torch.autograd.grad(sum(g.square().sum() for g in first), [x, *function.parameters()]))
    torch.testing.assert_close(*seconds, rtol=1e-4, atol=1e-3)


def test_statistics_that_are_frozen_stay():
    module, x = norm(freeze=["*.running_*"]), numbers(5, 4, 3)
    expected = norm_of_torch(module).eval()
    close(module(x), expected(x))
    assert module.norm.running_mean.tolist() == [0] * 4


DROPOUT = """
<ir_version: 9, opset_import: ["" : 18]>
drop (float[n, m] x) => (float[n, m] y) { y = Dropout (x, ratio) }
"""


def test_dropout_follows_torchs_seed():
    module = Module(model(DROPOUT, {"ratio": np.float32(0.4)}), device=DEVICE)
    x = (numbers(50, 40).abs() + 0.1).requires_grad_()
    torch.manual_seed(3)
    first, second = module(x), module(x)
    torch.manual_seed(3)
    assert torch.equal(first, module(x)) and not torch.equal(first, second)
    assert 0.35 < (first == 0).float().mean() < 0.45
    first.sum().backward()
    close(x.grad, first.detach() / x.detach())  # what was dropped has no gradient
    assert torch.equal(module.eval()(x), x)


def test_nothing_is_kept_where_nothing_requires_a_gradient():
    module, x = mlp(), numbers(3, 4)
    with torch.no_grad():
        assert not module(x).requires_grad
    with torch.inference_mode():
        assert not module(x).requires_grad
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    assert not module(x).requires_grad
    close(module(x), by_torch(module, x))


def test_parameters_to_train():
    def trained(**settings):
        return [name for name, p in mlp(**settings).named_parameters() if p.requires_grad]

    assert trained(trainable="head.*") == ["head.weight"]
    assert trained(freeze=["body.0.bias", "head.*"]) == ["body.0.weight"]
    module, x = mlp(freeze="body.*"), numbers(3, 4)
    module(x).sum().backward()
    assert module.get_parameter("body.0.weight").grad is None
    close(module.head.weight.grad, torch.tanh(x @ module.get_parameter("body.0.weight")
          + module.get_parameter("body.0.bias")).sum(0)[:, None].expand(5, 3))  # fmt: skip


def test_several_calls_before_one_backward_pass():
    module, x = mlp(), numbers(3, 4)
    (module(x) * module(2 * x) + module(x[:1])).sum().backward()
    found = [p.grad for p in module.parameters()]
    expected = (by_torch(module, x) * by_torch(module, 2 * x) + by_torch(module, x[:1])).sum()
    close(found, list(torch.autograd.grad(expected, list(module.parameters()))))


def test_a_graph_may_be_retained():
    module, x = mlp(), numbers(3, 4, grad=True)
    y = module(x).sum()
    y.backward(retain_graph=True)
    first = x.grad.clone()
    y.backward()
    close(x.grad, 2 * first)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.backward()


def test_a_weight_that_is_changed_before_the_backward_pass():
    module = mlp()
    y = module(numbers(3, 4)).sum()
    with torch.no_grad():
        module.head.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


TWO = """
<ir_version: 9, opset_import: ["" : 18]>
two (float[n, 4] x, int64[k] places) => (float[n, 4] same, float[k, 4] rows, int64[k] next, float[n, 4] x_again) {
    same = Mul(x, scale)
    rows = Gather(same, places)
    one = Constant <value_int: int = 1> ()
    next = Add(places, one)
    x_again = Identity(x)
}
"""


def test_several_outputs_and_inputs_by_name():
    module, x = Module(model(TWO, {"scale": (4,)}), trainable="scale", device=DEVICE), numbers(3, 4, grad=True)
    places = torch.tensor([2, 0], device=DEVICE)
    found = module(places=places, x=x)
    assert found._fields == ("same", "rows", "next", "x_again") and not found.next.requires_grad
    assert torch.equal(found.rows, (x * module.scale)[places]) and found.next.tolist() == [3, 1]
    assert torch.equal(found.x_again, x)
    found.rows.sum().backward()  # the others are not used
    expected = torch.zeros_like(x)
    expected[places] = module.scale.detach()
    assert torch.equal(x.grad, expected)
    assert torch.equal(pickle.loads(pickle.dumps(module(x.detach(), places).next)), found.next)


def test_training_within_layers_of_torch():
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), mlp(), nn.Linear(3, 1)).to(DEVICE)
    theirs = copy.deepcopy(ours)
    theirs[2].forward = lambda x: by_torch(theirs[2], x)
    x, target = numbers(16, 2), numbers(16, 1)
    for network in (ours, theirs):
        optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
        losses = []
        for _ in range(5):
            optimizer.zero_grad()
            loss = functional.mse_loss(network(x), target)
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), 0.5)
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0]
    close(list(ours.parameters()), list(theirs.parameters()))


def test_copies_are_on_their_own():
    module, x = mlp(), numbers(3, 4)
    before = module(x)
    copies = [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
    with torch.no_grad():
        module.head.weight.zero_()
    assert not module(x).any()
    for other in copies:
        assert torch.equal(other(x), before)
        other.load_state_dict(module.state_dict())
        assert not other(x).any() and other.head.weight is not module.head.weight


def test_a_module_is_saved_whole(tmp_path):
    module, x = norm(), numbers(5, 4, 3)
    module(x)
    torch.save(module, tmp_path / "module.pt")
    found = torch.load(tmp_path / "module.pt", weights_only=False)
    assert torch.equal(found.eval()(x), module.eval()(x))


def test_export_writes_the_weights_as_they_are(tmp_path):
    module, x = norm(), numbers(5, 4, 3)
    module(x)
    with torch.no_grad():
        module.norm.weight.mul_(2)
    path = tmp_path / "trained.onnx"
    assert pickle.loads(pickle.dumps(module)).export(path) == module.export(path) == [path]
    (found,) = onnxruntime.InferenceSession(path).run(None, {"x": x.cpu().numpy()})
    close(torch.from_numpy(found), module.eval()(x).detach().cpu())


def test_weights_in_a_file_of_their_own(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    onnx.save(model(MLP, SHAPES), tmp_path / "here" / "model.onnx", save_as_external_data=True, size_threshold=0)
    module = Module(tmp_path / "here" / "model.onnx", device=DEVICE)
    (tmp_path / "here").rename(tmp_path / "away")
    monkeypatch.chdir(tmp_path)
    x = numbers(3, 4)
    close(module(x), by_torch(module, x))
    close(pickle.loads(pickle.dumps(module))(x), by_torch(module, x))


def test_threads_may_share_a_module():
    module, found = mlp(), {}

    def work(k):
        x = numbers(4 + k, 4, grad=True)
        module(x).square().sum().backward(inputs=[x])
        found[k] = x, x.grad

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for x, gradient in found.values():
        close(gradient, torch.autograd.grad(by_torch(module, x).square().sum(), x)[0])
    assert len(found) == 4


def test_hooks_and_recomputing():
    module, x, seen = mlp(), numbers(3, 4, grad=True), []
    module.register_forward_hook(lambda m, given, y: seen.append(tuple(y.shape)))
    module.register_full_backward_hook(lambda m, dx, dy: seen.append(tuple(dx[0].shape)))
    y = torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False)
    y.sum().backward()
    assert seen == [(3, 3), (3, 4)]
    with torch.autograd.graph.save_on_cpu():
        y = module(x)
    close(torch.autograd.grad(y.sum(), x)[0], x.grad)


def test_a_batch_of_one_size_only_becomes_any():
    text = MLP.replace("TYPE[n, 4]", "float[2, 4]").replace("TYPE[n, 3]", "float[2, 3]")
    module, x = Module(model(text, SHAPES), device=DEVICE), numbers(5, 4)
    close(module(x), by_torch(module, x))


def test_autocast_around_it_changes_its_inputs_alone():
    layer, module = nn.Linear(4, 4).to(DEVICE), mlp()
    with torch.autocast(DEVICE, torch.bfloat16):
        y = module(layer(numbers(3, 4)))
    assert y.dtype == torch.float32
    y.sum().backward()
    assert layer.weight.grad.dtype == torch.float32


def test_views_and_empty_batches():
    module, x = mlp(), numbers(4, 3)
    close(module(x.T), by_torch(module, x.T))
    assert module(x.T[:0]).shape == (0, 3)


NAMES = """
<ir_version: 9, opset_import: ["" : 18]>
odd (float[n, 4] x) => (float[n, 4] y) {
    a = MatMul(x, forward)
    b = MatMul(a, w)
    c = MatMul(b, w_inner)
    y = MatMul(c, last)
}
"""


def test_names_that_no_parameter_can_have():
    proto = model(NAMES, dict.fromkeys(("forward", "w", "w_inner", "last"), (4, 4)))
    names = {"w_inner": "w.inner", "last": "..::last"}
    for tensor in proto.graph.initializer:
        tensor.name = names.get(tensor.name, tensor.name)
    for node in proto.graph.node:
        node.input[1] = names.get(node.input[1], node.input[1])
    module, x = Module(proto, device=DEVICE), numbers(2, 4)
    assert list(module.state_dict()) == ["weight_0", "w", "w_inner", "__::last"]
    expected = x
    for weight in module.parameters():
        expected = expected @ weight
    close(module(x), expected)


X = numbers(3, 4)


@pytest.mark.parametrize(
    ("error", "text", "args", "inputs"),
    [
        (TypeError, "Module: the input 'x' is not given, expected 'x'", (), {}),
        (TypeError, "Module: 2 inputs are given, expected 1: 'x'", (X, X), {}),
        (TypeError, "Module: the model has no input 'z'; available: 'x'", (), {"z": X}),
        (TypeError, "Module: the input 'x' is given twice, by place and by name", (X,), {"x": X}),
        (TypeError, "Module: the input 'x' is a ndarray, expected a torch.Tensor", (np.zeros((3, 4)),), {}),
        (TypeError, "Module: the input 'x' holds float64, expected float32", (X.double(),), {}),
        (ValueError, "Module: the input 'x' has shape [3], expected 2 dimensions", (X[:, 0],), {}),
        (ValueError, "Module: the input 'x' has shape [3, 3], expected ['any', 4]", (X[:, :3],), {}),
    ],
)
def test_calls_that_are_refused(error, text, args, inputs):
    with raises(error, text):
        mlp()(*args, **inputs)


def test_sizes_that_differ():
    text = '<ir_version: 9, opset_import: ["" : 18]> m (float[n] a, float[n] b) => (float[n] y) { y = Mul(a, b) }'
    with raises(ValueError, "Module: the input 'b' has shape [3], but n is 2 in 'a'"):
        Module(onnx.parser.parse_model(text))(torch.ones(2), torch.ones(3))


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda module: module.half(), "float16"),
        (lambda module: module.to(torch.float64), "float64"),
        (lambda module: nn.Sequential(module).bfloat16(), "bfloat16"),
    ],
)
def test_types_are_the_models(change, kind):
    module = mlp()
    with raises(
        TypeError,
        f"Module: a weight would be {kind}, but the model computes in float32: convert the .onnx file, and keep "
        ".half(), .double() and .to(dtype) for the layers around it",
    ):
        change(module)
    assert all(p.dtype == torch.float32 for p in module.parameters())


def test_names_that_are_no_weights():
    with raises(ValueError, "Module: trainable names 'head.weigth', which is no weight of the model; did you mean "
                "'head.weight'?"):  # fmt: skip
        mlp(trainable="head.weigth")
    with raises(
        ValueError,
        "Module: freeze names 'tail.*', which is no weight of the model; available: 'body.0.weight', 'body.0.bias', "
        "'head.weight'",
    ):
        mlp(freeze=["tail.*"])


def test_a_number_that_has_no_gradient():
    with raises(ValueError, "Module: trainable names 'ratio', but no output has a gradient for it"):
        Module(model(DROPOUT, {"ratio": np.float32(0.4)}), trainable="ratio")


def test_devices_that_are_none():
    with raises(ValueError, "onnxgrad.torch: tensors are on the device 'meta', expected 'cpu' or 'cuda'"):
        mlp().to("meta")(X.to("meta"))
    with raises(ValueError, "Module: 'body.0.weight' is on cpu, but 'x' is on meta: move the input, or the module by "
                ".to()"):  # fmt: skip
        mlp().cpu()(X.to("meta"))


def test_files_that_are_none(tmp_path):
    with raises(
        FileNotFoundError, f"Module: the file {str(tmp_path / 'no.onnx')!r} does not exist, expected an ONNX model"
    ):
        Module(tmp_path / "no.onnx")
    with raises(TypeError, "Module: model is a Linear, expected a path, an onnx.ModelProto or an onnx_ir.Model"):
        Module(nn.Linear(1, 1))


def test_inputs_that_torch_has_no_tensors_of():
    text = '<ir_version: 9, opset_import: ["" : 18]> m (string[n] s) => (string[n] t) { t = Identity(s) }'
    with raises(TypeError, "Module: the model's input 's' holds string, which torch has no tensors of: let the model "
                "end with numbers, and begin with them"):  # fmt: skip
        Module(onnx.parser.parse_model(text))
    text = '<ir_version: 9, opset_import: ["" : 18]> m (float[n] x) => (seq(float[m]) y) { y = SequenceConstruct(x) }'
    with raises(TypeError, "Module: the model's output 'y' holds sequences or maps, which torch has no tensors of: let "
                "the model end with numbers, and begin with them"):  # fmt: skip
        Module(onnx.parser.parse_model(text))


def test_a_quantized_model_trains_and_is_written_as_integers(tmp_path):
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        g (float[N, 4] x) => (float[N, 2] y) <float scale = {0.01}, int8 zero = {0}, int8[4, 2] w_quantized =
        {10, -20, 30, 40, -50, 60, 70, 80}> {
          w = DequantizeLinear(w_quantized, scale, zero)
          y = MatMul(x, w)
        }""")
    module, x = Module(model), torch.eye(4)
    assert [n for n, _ in module.named_parameters()] == ["w"]
    before = module(x).detach()
    module(x).sum().backward()
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    assert torch.allclose(module(x), before - 0.1, atol=1e-6)
    module.export(tmp_path / "trained.onnx")
    written = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(tmp_path / "trained.onnx").graph.initializer}
    assert written["w_quantized"].dtype == np.int8
    assert written["w_quantized"].ravel().tolist() == [0, -30, 20, 30, -60, 50, 60, 70]
