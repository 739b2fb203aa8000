"""Learning rates by layer: the layers of models that others wrote, and training with them as in PyTorch."""

import warnings

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from tests.checks import raises
from tests.torch_export import export
from tests.train.two_layers import batch, mlp, weights

from onnxgrad.graph.files import load
from onnxgrad.passes.draft import Draft
from onnxgrad.passes.prepare import RESTORE, prepare
from onnxgrad.train import losses, optim
from onnxgrad.train.layers import depths
from onnxgrad.train.trainer import Trainer


def layers_of(model):
    """As a trainer finds them."""
    return depths(prepare(Draft(load(model, "test"), "test").run(RESTORE).model, "test").graph)


def layers_of_chain(*names, transposed=()):
    """The layers of these square weights, by which a model multiplies in turn; some are transposed first."""
    nodes = [helper.make_node("Transpose", [name], [f"{name}_t"]) for name in transposed]
    for k, name in enumerate(names):
        nodes.append(helper.make_node("MatMul", [f"y{k}", f"{name}_t" if name in transposed else name], [f"y{k + 1}"]))
    ends = "y0", f"y{len(names)}"
    first, last = (helper.make_tensor_value_info(y, onnx.TensorProto.FLOAT, ["N", 2]) for y in ends)
    initializers = [numpy_helper.from_array(np.ones((2, 2), np.float32), name) for name in names]
    graph = helper.make_graph(nodes, "chain", [first], [last], initializers)
    found = layers_of(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9))
    return [found[name] for name in names]


@pytest.mark.parametrize("names, expected", [
    (("embed.weight", "h.0.up.weight", "h.0.down.weight", "h.1.up.weight", "norm.weight", "head.weight"),
     [0, 1, 1, 2, 3, 3]),
    (("conv1.weight", "layer1.0.conv1.weight", "layer1.1.conv1.weight", "layer2.0.conv1.weight", "fc.weight"),
     [0, 1, 2, 3, 4]),
    (("patch.weight", "encoder.block_0.mlp.0.weight", "encoder.block_0.mlp.3.weight", "encoder.block_1.mlp.0.weight"),
     [0, 1, 1, 2]),
    (("stem.0.weight", "stages.0.blocks.0.w", "stages.0.blocks.1.w", "stages.1.down.0.w", "stages.1.blocks.0.w",
      "head.fc.weight"), [0, 1, 2, 3, 3, 4]),
    (("conv0.weight", "dense1.a.weight", "dense1.b.weight", "dense2.a.weight", "classifier.weight"), [1, 2, 2, 3, 4]),
    (("a", "b", "c"), [1, 2, 3]),  # nothing counts: each weight is a layer
    (("val_7", "val_9"), [1, 2]),
])  # fmt: skip
def test_layers_by_name(names, expected):
    assert layers_of_chain(*names) == expected
    assert layers_of_chain(*names, transposed=names[-1:]) == expected


def test_biases_belong_to_their_weights():
    assert layers_of(mlp()) == {"fc0.weight": 1, "fc0.bias": 1, "fc1.weight": 2, "fc1.bias": 2}
    plain = mlp()
    for initializer, name in zip(plain.graph.initializer, ("w", "b", "v", "c"), strict=True):
        for node in plain.graph.node:
            node.input[:] = [name if n == initializer.name else n for n in node.input]
        initializer.name = name
    assert layers_of(plain) == {"w": 1, "b": 1, "v": 2, "c": 2}


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_training_is_that_of_torchs_groups(kind):
    """Layer decay and a group's own factor and settings, which come together."""
    groups = {"*.bias": {"lr_factor": 0.5, "weight_decay": 0.0}}
    how = {"lr": 0.05, "weight_decay": 0.1}
    mine = Trainer(mlp(), losses.CrossEntropy("logits"), getattr(optim, kind)(**how, groups=groups), layer_decay=0.3)
    assert mine.remarks[-1] == (
        "layer decay: 2 layers; 'fc0.weight' has 0.3 of the learning rate, 'fc1.bias' has 1 of it"
    )
    tensors = {name: torch.tensor(a, requires_grad=True) for name, a in weights().items()}
    rates = {"fc0.weight": 0.3, "fc0.bias": 0.15, "fc1.weight": 1.0, "fc1.bias": 0.5}
    peer = getattr(torch.optim, kind)([
        {"params": [tensors[name]], "lr": 0.05 * rate, "weight_decay": 0.0 if "bias" in name else 0.1}
        for name, rate in rates.items()
    ])  # fmt: skip
    for k in range(10):
        given = batch(k)
        hidden = torch.tanh(torch.tensor(given["x"]) @ tensors["fc0.weight"].T + tensors["fc0.bias"])
        logits = hidden @ tensors["fc1.weight"].T + tensors["fc1.bias"]
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor(given["target"]))
        peer.zero_grad()
        loss.backward()
        peer.step()
        assert mine.step(given) == pytest.approx(loss.item(), rel=1e-5)
    for name, tensor in tensors.items():
        assert np.allclose(mine.parameters[name], tensor.detach().numpy(), rtol=1e-5, atol=1e-5), name


def test_what_is_refused():
    for wrong in (0, 1.5, -1):
        with raises(ValueError, f"Trainer: layer_decay is {wrong}, expected a factor above 0 and at most 1"):
            Trainer(mlp(), losses.CrossEntropy("logits"), optim.SGD(), layer_decay=wrong)
    with raises(ValueError, "SGD: lr_factor is -1, expected a number of at least 0"):
        optim.SGD(groups={"*": {"lr_factor": -1}})


SMALL_SWIN = {"img_size": 56, "depths": (2, 2), "embed_dim": 24, "num_heads": (1, 2), "window_size": 7}


@pytest.mark.slow
@pytest.mark.parametrize("name, how, dynamo", [
    ("vit_tiny_patch16_224", {"img_size": 32, "depth": 3}, True),
    ("vit_tiny_patch16_224", {"img_size": 32, "depth": 3}, False),
    ("convnext_atto", {"depths": (2, 1, 2, 1)}, False),
    ("resnet18", {}, False),
    ("swin_tiny_patch4_window7_224", SMALL_SWIN, False),
])  # fmt: skip
def test_as_in_timm(name, how, dynamo, tmp_path):
    from tests.models.architectures import timm
    from timm.optim import param_groups_layer_decay

    module = timm.create_model(name, num_classes=5, **how)
    size = how.get("img_size", 64)
    export(module, torch.randn(2, 3, size, size), tmp_path / "model.onnx", dynamo=dynamo)
    found = layers_of(tmp_path / "model.onnx")
    last = max(found.values())
    groups = param_groups_layer_decay(module, layer_decay=0.5)
    theirs = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    compared = 0
    for parameter, tensor in module.named_parameters():
        if parameter in found and not parameter.startswith("norm."):  # which timm adds to the last block
            assert theirs[id(tensor)] == 0.5 ** (last - found[parameter]), parameter
            compared += 1
    assert compared > 20
    assert not dynamo or {0, last} < set(found.values())


@pytest.mark.slow
@pytest.mark.parametrize("dynamo", [True, False])
def test_bert(dynamo, tmp_path):
    from tests.models.architectures import transformers

    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 100}
    config = transformers.BertConfig(num_hidden_layers=3, num_labels=3, **sizes)
    module = transformers.BertForSequenceClassification(config).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module, (torch.ones(2, 8, dtype=torch.int64),), str(tmp_path / "b.onnx"), dynamo=dynamo, verbose=False
        )
    found = layers_of(tmp_path / "b.onnx")
    for name, _ in module.named_parameters():
        of_block = int(name.split(".")[3]) + 1 if ".layer." in name else None
        assert found[name] == (0 if ".embeddings." in name else 4 if of_block is None else of_block), name
