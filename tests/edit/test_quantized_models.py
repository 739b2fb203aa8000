"""Networks of torchvision and transformers, quantized by onnxruntime's own functions and by ours, are trained."""

import copy

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnxruntime import quantization
from tests.models.architectures import models, transformers
from tests.torch_export import export

import onnxgrad
from onnxgrad.edit.calibrate import quiet

pytestmark = pytest.mark.slow
LOSS = onnxgrad.losses.CrossEntropy("y")


class Bert(torch.nn.Module):
    """A classifier of two layers, of sequences of 8 words."""

    def __init__(self):
        super().__init__()
        config = transformers.BertConfig(
            vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
            max_position_embeddings=8, num_labels=10, attn_implementation="eager",
        )  # fmt: skip
        self.bert = transformers.BertForSequenceClassification(config)

    def forward(self, x):
        return self.bert(x).logits


def measured(module):
    """A fresh network whose running statistics are those of a batch, or its numbers fade out."""
    module.train()
    for _ in range(20):
        module(torch.randn(16, 3, 32, 32))
    return module.eval()


NETWORKS = {
    "resnet": lambda: measured(models.resnet18(num_classes=10)),
    "mobilenet": lambda: measured(models.mobilenet_v3_small(num_classes=10, dropout=0.0)),
    "bert": lambda: Bert().eval(),
}


def network(name, folder):
    """A file, as torch's exporter writes it without being asked for anything, and a batch."""
    torch.manual_seed(0)
    path, is_text = folder / "m.onnx", name == "bert"
    x = torch.randint(0, 50, (16, 8)) if is_text else torch.randn(16, 3, 32, 32)
    export(NETWORKS[name](), x[:2], path, optimize=True, external_data=False)
    return path, {"x": x.numpy(), "target": np.random.default_rng(0).integers(0, 10, 16)}


class Reader(quantization.CalibrationDataReader):
    def __init__(self, batch):
        self.batches = iter([{"x": batch["x"]}])

    def get_next(self):
        return next(self.batches, None)


def static(path, batch, output):
    prepared = output.with_name("prepared.onnx")
    with quiet():
        quantization.quant_pre_process(path, prepared)
        kinds = {"activation_type": quantization.QuantType.QUInt8, "weight_type": quantization.QuantType.QInt8}
        quantization.quantize_static(prepared, output, Reader(batch), **kinds)


def dynamic(path, batch, output):
    prepared = output.with_name("prepared.onnx")
    with quiet():
        quantization.quant_pre_process(path, prepared)
        quantization.quantize_dynamic(prepared, output)


def ours(path, batch, output):
    onnx.save(onnxgrad.quantize(path, [batch]), output)


def weights_alone(path, batch, output):
    onnx.save(onnxgrad.quantize(path, weights="int4", activations=None), output)


@pytest.mark.parametrize(
    ("name", "way"),
    [("resnet", static), ("resnet", dynamic), ("resnet", ours), ("mobilenet", ours), ("bert", weights_alone),
     ("bert", static), ("bert", dynamic), ("bert", ours)],
    ids=lambda given: given if isinstance(given, str) else given.__name__,
)  # fmt: skip
def test_training(name, way, tmp_path):
    """The loss falls, and stock onnxruntime predicts what the trainer does, in the same operators as before."""
    path, batch = network(name, tmp_path)
    quantized, trained = tmp_path / "quantized.onnx", tmp_path / "trained.onnx"
    way(path, batch, quantized)
    trainer = onnxgrad.Trainer(quantized, LOSS, onnxgrad.optim.Adam(5e-4))
    float_trainer = onnxgrad.Trainer(path, LOSS, onnxgrad.optim.SGD())
    # The exporter makes one of all biases that are 0, and only ours knows how to part them.
    assert len(trainer.parameters) >= (0.4 if way in (static, dynamic) else 1) * len(float_trainer.parameters)
    start = trainer.evaluate([batch])["loss"]
    assert start == pytest.approx(float_trainer.evaluate([batch])["loss"], rel=0.2)
    for _ in range(8):
        trainer.step(batch)
    predicted = {}
    end = trainer.evaluate([batch], {"": lambda outputs, _: predicted.update(copy.deepcopy(outputs)) or 0.0})["loss"]
    assert end < start
    trainer.export(trained)
    before, after = onnx.load(quantized), onnx.load(trained)
    assert [n.op_type for n in before.graph.node] == [n.op_type for n in after.graph.node]
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    (found,) = onnxruntime.InferenceSession(str(trained), options).run(None, {"x": batch["x"]})
    kinds = {t.name: onnx.numpy_helper.to_array(t) for t in after.graph.initializer if t.name == "y_scale"}
    # A number that rounds to the other side in one layer is an integer more in some of the next.
    far = 0.5 * kinds["y_scale"] if kinds else 0.01 * abs(found).max()
    assert abs(found - predicted["y"]).mean() <= far
