"""Handwritten digits, learned by the artifacts and the loop that on-device training with onnxruntime-training has.

The same script runs in onnxruntime-training 1.19.2 if `onnxgrad.ort_training` is `onnxruntime.training` in its imports,
and the artifacts it leaves are trained there, too: on phones, for example.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from sklearn.datasets import load_digits

from onnxgrad.ort_training import artifacts
from onnxgrad.ort_training.api import CheckpointState, LinearLRScheduler, Module, Optimizer

BUILD = Path(__file__).parents[2] / "build" / "ort_training_digits"
EPOCHS, BATCH, HELD_OUT = 5, 32, 360
NETWORK = """
<ir_version: 8, opset_import: ["" : 15]>
digits (float[batch, 64] picture) => (float[batch, 10] logits)
{
    a = Gemm <transB = 1> (picture, fc1_weight, fc1_bias)
    h = Relu(a)
    logits = Gemm <transB = 1> (h, fc2_weight, fc2_bias)
}
"""
WEIGHTS = {"fc1_weight": (128, 64), "fc1_bias": (128,), "fc2_weight": (10, 128), "fc2_bias": (10,)}
Examples = tuple[np.ndarray, np.ndarray]


def load() -> tuple[Examples, Examples]:
    """Pictures of 64 pixels and their digits, to learn from and held out; scikit-learn has them."""
    pictures, digits = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(digits))
    pictures, digits = (pictures[order] / 16).astype(np.float32), digits[order].astype(np.int64)
    return (pictures[HELD_OUT:], digits[HELD_OUT:]), (pictures[:HELD_OUT], digits[:HELD_OUT])


def network() -> onnx.ModelProto:
    """The model with random weights, as an exporter would give it."""
    model, random = onnx.parser.parse_model(NETWORK), np.random.default_rng(0)
    for name, shape in WEIGHTS.items():
        array = random.standard_normal(shape) / np.sqrt(shape[-1]) if len(shape) == 2 else np.zeros(shape)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), name))
    return model


def train(module: Module, optimizer: Optimizer, examples: Examples, random: np.random.Generator) -> float:
    """One epoch; the mean loss."""
    pictures, digits = examples
    order, losses = random.permutation(len(digits)), []
    module.train()
    for start in range(0, len(order), BATCH):
        chosen = order[start : start + BATCH]
        losses.append(float(module(pictures[chosen], digits[chosen])))
        optimizer.step()
        module.lazy_reset_grad()
    return float(np.mean(losses))


def accuracy(model: Path, examples: Examples) -> float:
    """Of an exported model, in plain onnxruntime."""
    pictures, digits = examples
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    (logits,) = session.run(["logits"], {"picture": pictures})
    return float(np.mean(logits.argmax(1) == digits))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--out", type=Path, default=BUILD, help="folder for the artifacts and the trained model")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)

    # Once, wherever Python is: four files, which is all that training needs.
    artifacts.generate_artifacts(
        network(),
        requires_grad=list(WEIGHTS),
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.AdamW,
        artifact_directory=options.out,
    )

    # On the device.
    examples, held_out = load()
    state = CheckpointState.load_checkpoint(options.out / "checkpoint")
    module = Module(options.out / "training_model.onnx", state, options.out / "eval_model.onnx")
    optimizer = Optimizer(options.out / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(3e-3)
    random = np.random.default_rng(1)
    for epoch in range(options.epochs):
        loss = train(module, optimizer, examples, random)
        held_out_loss = float(module.eval()(*held_out))
        print(f"epoch {epoch + 1}: loss {loss:.3f}, {held_out_loss:.3f} on held-out pictures")

    state.properties["epochs"] = options.epochs
    CheckpointState.save_checkpoint(state, options.out / "trained", include_optimizer_state=True)
    trained = options.out / "trained.onnx"
    module.export_model_for_inferencing(trained, ["logits"])
    print(f"{accuracy(trained, held_out):.1%} of held-out pictures right in plain onnxruntime")

    # A later run goes on from the checkpoint, with a rate that falls to nothing.
    state = CheckpointState.load_checkpoint(options.out / "trained")
    module = Module(options.out / "training_model.onnx", state, options.out / "eval_model.onnx")
    optimizer = Optimizer(options.out / "optimizer_model.onnx", module)
    updates = -(-len(examples[0]) // BATCH) * (options.epochs + 1)
    scheduler = LinearLRScheduler(optimizer, updates, 0, 3e-3)
    loss = train(module, optimizer, examples, random)
    scheduler.step()
    print(f"epoch {state.properties['epochs'] + 1}: loss {loss:.3f}, the rate now {optimizer.get_learning_rate():.1g}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
