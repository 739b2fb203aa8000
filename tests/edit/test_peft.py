"""LoRA against Hugging Face's PEFT: the same adapters, the same losses while they are trained, files both ways."""

import copy
import warnings
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from safetensors.torch import load_file
from tests.models import architectures  # which lets transformers find torchvision
from torch import nn

import onnxgrad

pytestmark = pytest.mark.slow
STEPS, CLOSE = 100, 1e-4
RANK, ALPHA, RATE = 4, 6, 3e-3
BATCH, LENGTH, WORDS, CLASSES = 8, 10, 50, 4


@pytest.fixture(scope="module")
def peft():
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import peft
    return peft


class Classifier(nn.Module):
    """A BERT and a head, which return logits alone."""

    def __init__(self) -> None:
        super().__init__()
        config = architectures.transformers.BertConfig(
            vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
            max_position_embeddings=16, num_labels=CLASSES, hidden_dropout_prob=0, attention_probs_dropout_prob=0,
        )  # fmt: skip
        self.bert = architectures.transformers.BertModel(config, add_pooling_layer=False)
        self.classifier = nn.Linear(32, CLASSES)

    def forward(self, tokens):
        return self.classifier(self.bert(tokens).last_hidden_state[:, 0])


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """The module, in evaluation mode, and its file."""
    torch.manual_seed(0)
    module, path = Classifier().eval(), tmp_path_factory.mktemp("bert") / "bert.onnx"
    export(module, path)
    return module, path


def export(module: nn.Module, path: Path) -> None:
    tokens = torch.zeros(2, LENGTH, dtype=torch.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module, (tokens,), str(path), input_names=["tokens"], output_names=["logits"],
            dynamic_shapes=({0: torch.export.Dim("batch")},), verbose=False,
        )  # fmt: skip


def batches(count: int):
    random = np.random.default_rng(1)
    for _ in range(count):
        tokens = random.integers(0, WORDS, (BATCH, LENGTH))
        yield {"tokens": tokens, "target": tokens[:, 0] * CLASSES // WORDS}


def config_of(peft, **settings):
    return peft.LoraConfig(
        **{"r": RANK, "lora_alpha": ALPHA, "target_modules": ["query", "value"], "lora_dropout": 0.0, **settings}
    )


def wrapped(peft, module, **settings):
    """A copy of a module with adapters of PEFT's that do something."""
    torch.manual_seed(1)
    model = peft.get_peft_model(copy.deepcopy(module), config_of(peft, **settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.2)
    return model.eval()


def trainer_of(model) -> onnxgrad.Trainer:
    """Of adapters and the head."""
    optimizer = onnxgrad.optim.AdamW(RATE, weight_decay=0.01)
    return onnxgrad.Trainer(model, onnxgrad.losses.CrossEntropy("logits"), optimizer, "classifier.*")


def curve(model) -> list[float]:
    """PyTorch's losses."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], RATE, weight_decay=0.01)
    losses = []
    for batch in batches(STEPS):
        loss = nn.functional.cross_entropy(model(torch.tensor(batch["tokens"])), torch.tensor(batch["target"]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def run(model, tokens):
    model = model if isinstance(model, (str, Path)) else model.SerializeToString()
    return onnxruntime.InferenceSession(model).run(None, {"tokens": tokens})[0]


@pytest.mark.parametrize("targets", [["query", "value"], ["query", "dense", "word_embeddings"]])
def test_files_of_peft(peft, bert, targets, tmp_path):
    """PEFT writes, we read and compute the same; we write, and PEFT reads what it wrote."""
    module, path = bert
    model = wrapped(peft, module, target_modules=targets)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # embeddings are saved, too
        model.save_pretrained(tmp_path / "theirs")
    adapted = onnxgrad.load_adapter(path, tmp_path / "theirs")
    tokens = next(batches(1))["tokens"]
    expected = model(torch.tensor(tokens)).detach().numpy()
    assert np.allclose(run(adapted, tokens), expected, atol=1e-5)
    assert not np.allclose(run(path, tokens), expected, atol=1e-2)
    assert np.allclose(run(onnxgrad.merge_lora(adapted), tokens), expected, atol=1e-5)
    onnxgrad.save_adapter(adapted, tmp_path / "ours")
    again = peft.PeftModel.from_pretrained(copy.deepcopy(module), tmp_path / "ours").eval()
    assert torch.equal(again(torch.tensor(tokens)), model(torch.tensor(tokens)))
    theirs, ours = (load_file(tmp_path / who / "adapter_model.safetensors") for who in ("theirs", "ours"))
    assert all(torch.equal(theirs[name], ours[name]) for name in ours) and len(ours) == len(theirs) - (
        sum(".base_layer." in name for name in theirs)
    )


def test_a_head_goes_along(peft, bert, tmp_path):
    module, path = bert
    trainer = onnxgrad.Trainer(
        onnxgrad.lora(path), onnxgrad.losses.CrossEntropy("logits"), onnxgrad.optim.Adam(1e-2), "classifier.*"
    )
    for batch in batches(5):
        trainer.step(batch)
    onnxgrad.save_adapter(trainer, tmp_path / "ours")
    model = peft.PeftModel.from_pretrained(copy.deepcopy(module), tmp_path / "ours").eval()
    tokens = next(batches(1))["tokens"]
    trainer.export(tmp_path / "trained.onnx")
    trained = run(tmp_path / "trained.onnx", tokens)
    assert np.allclose(model(torch.tensor(tokens)).detach().numpy(), trained, atol=1e-5)
    assert np.array_equal(run(onnxgrad.load_adapter(path, tmp_path / "ours"), tokens), trained)


@pytest.mark.parametrize("targets", [["query", "value"], ["query", "key", "value", "dense"]])
def test_losses_of_bert(peft, bert, targets, tmp_path):
    module, path = bert
    model = wrapped(peft, module, target_modules=targets, modules_to_save=["classifier"])
    model.save_pretrained(tmp_path / "start")
    adapted = onnxgrad.load_adapter(path, tmp_path / "start")
    trainer = trainer_of(adapted)
    assert len(trainer.parameters) == sum(p.requires_grad for p in model.parameters())
    found = [trainer.step(batch) for batch in batches(STEPS)]
    expected = curve(model)
    assert np.mean(expected[-10:]) < 0.8 * np.mean(expected[:10])
    assert np.abs(np.subtract(found, expected)).max() < CLOSE


def quantized(path: Path, out: Path) -> Path:
    """Its weights in int8, a scale for each column, behind DequantizeLinear."""
    model = onnx.load(path)
    tensors = {t.name: t for t in model.graph.initializer}
    for node in list(model.graph.node):
        weight = tensors.get(node.input[1]) if node.op_type == "MatMul" else None
        if weight is None:
            continue
        array = onnx.numpy_helper.to_array(weight)
        scale = np.abs(array).max(0) / 127
        levels = np.rint(array / scale).astype(np.int8)
        name = node.input[1]
        model.graph.initializer.remove(weight)
        for new, suffix in ((levels, "_quantized"), (scale, "_scale")):
            model.graph.initializer.append(onnx.numpy_helper.from_array(new, name + suffix))
        made = onnx.helper.make_node("DequantizeLinear", [name + "_quantized", name + "_scale"], [name])
        model.graph.node.insert(0, made)
    del model.graph.value_info[:]
    onnx.save(model, out)
    return out


def test_losses_of_a_bert_in_int8(peft, bert, tmp_path):
    """PyTorch gets the numbers that the integers stand for."""
    module, path = bert
    whole = onnxgrad.lora(path, "query|value", RANK, ALPHA)  # has the names of the module
    start = tmp_path / "start.onnx"
    onnx.save(onnxgrad.merge_lora(whole), start)
    small = quantized(start, tmp_path / "int8.onnx")
    wide = copy.deepcopy(module)
    tensors = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(small).graph.initializer}
    quantized_layers = {name for name, _ in wide.named_parameters() if f"{name}_quantized" in tensors}
    assert len(quantized_layers) == 12  # six of a layer
    for name, parameter in wide.named_parameters():
        if name in quantized_layers:
            parameter.data = torch.tensor((tensors[f"{name}_quantized"] * tensors[f"{name}_scale"]).T)
    model = wrapped(peft, wide, modules_to_save=["classifier"])
    model.save_pretrained(tmp_path / "adapter")
    adapted = onnxgrad.load_adapter(small, tmp_path / "adapter")
    trainer = trainer_of(adapted)
    assert len(trainer.parameters) == 10
    ours = [trainer.step(batch) for batch in batches(STEPS)]
    assert np.abs(np.subtract(ours, curve(model))).max() < CLOSE
