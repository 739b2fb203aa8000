"""Transfer learning with artifacts: the base of a small MobileNetV2 stays as it is, its new classifier learns.

The base has random weights here, and is wide enough that a classifier on top of it tells digits apart.
"""

import argparse
import sys
from pathlib import Path

import digits
import numpy as np
import onnx

from onnxgrad.ort_training import artifacts
from onnxgrad.ort_training.api import CheckpointState, Module, Optimizer

BUILD = Path(__file__).parents[2] / "build" / "ort_training_transfer"
EPOCHS, WIDTH = 4, 48
STRIDES = (1, 2, 1)  # of the inverted residual blocks


def mobilenet() -> tuple[onnx.ModelProto, list[str]]:
    """The model, and the names of its classifier's weights."""
    random, lines, weights = np.random.default_rng(0), [], {}

    def conv(name: str, x: str, shape: tuple[int, ...], stride: int = 1, group: int = 1, relu: bool = True) -> str:
        """A convolution, its BatchNormalization, and a Relu6."""
        pads, channels = [shape[-1] // 2] * 4, shape[0]
        weights[f"{name}.weight"] = random.standard_normal(shape) * np.sqrt(2 / np.prod(shape[1:]))
        for kind, value in {"scale": 1, "shift": 0, "mean": 0, "var": 1}.items():
            weights[f"{name}.{kind}"] = np.full(channels, value)
        lines.append(f'"{name}.c" = Conv <pads = {pads}, strides = [{stride}, {stride}], group = {group}> '
                     f'({x}, "{name}.weight")')  # fmt: skip
        statistics = ", ".join(f'"{name}.{kind}"' for kind in ("scale", "shift", "mean", "var"))
        lines.append(f'"{name}.n" = BatchNormalization ("{name}.c", {statistics})')
        if not relu:
            return f'"{name}.n"'
        lines.append(f'"{name}.y" = Clip ("{name}.n", zero, six)')
        return f'"{name}.y"'

    lines += ["zero = Constant <value_float = 0.0> ()", "six = Constant <value_float = 6.0> ()"]
    lines += ["shape = Constant <value_ints = [-1, 1, 8, 8]> ()", "image = Reshape (picture, shape)"]
    x = conv("stem", "image", (WIDTH, 1, 3, 3))
    for k, stride in enumerate(STRIDES):
        wide = 2 * WIDTH
        y = conv(f"block{k}.expand", x, (wide, WIDTH, 1, 1))
        y = conv(f"block{k}.depthwise", y, (wide, 1, 3, 3), stride, group=wide)
        y = conv(f"block{k}.project", y, (WIDTH, wide, 1, 1), relu=False)
        if stride == 1:
            lines.append(f'"block{k}.sum" = Add ({x}, {y})')
            y = f'"block{k}.sum"'
        x = y
    lines += [f"features = Flatten ({x})", 'logits = Gemm (features, "classifier.weight", "classifier.bias")']
    weights |= {"classifier.weight": np.zeros((16 * WIDTH, 10)), "classifier.bias": np.zeros(10)}
    body = "\n".join(lines)
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 15]>\n'
        f"mobilenet (float[batch, 64] picture) => (float[batch, 10] logits) {{\n{body}\n}}"
    )
    for name, array in weights.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), name))
    return model, [name for name in weights if name.startswith("classifier.")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--out", type=Path, default=BUILD, help="folder for the artifacts and the trained model")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    model, trained = mobilenet()
    artifacts.generate_artifacts(
        model,
        requires_grad=trained,
        frozen_params=[t.name for t in model.graph.initializer if t.name not in trained],
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.AdamW,
        artifact_directory=options.out,
        additional_output_names=["logits"],
    )

    examples, held_out = digits.load()
    state = CheckpointState.load_checkpoint(options.out / "checkpoint")
    module = Module(options.out / "training_model.onnx", state, options.out / "eval_model.onnx")
    optimizer = Optimizer(options.out / "optimizer_model.onnx", module)
    print(
        f"{module.get_parameters_size():,} of {module.get_parameters_size(trainable_only=False):,} weights are trained"
    )
    before = {name: parameter.data for name, parameter in state.parameters}
    random = np.random.default_rng(1)
    for epoch in range(options.epochs):
        order = random.permutation(len(examples[1]))
        module.train()
        for start in range(0, len(order), digits.BATCH):
            chosen = order[start : start + digits.BATCH]
            module(examples[0][chosen], examples[1][chosen])
            optimizer.step()
            module.lazy_reset_grad()
        loss, logits = module.eval()(*held_out)
        right = np.mean(logits.argmax(1) == held_out[1])
        print(f"epoch {epoch + 1}: loss {float(loss):.3f}, {right:.1%} of held-out pictures right")

    changed = {name.rpartition(".")[2] for name, p in state.parameters if (p.data != before[name]).any()}
    print(f"changed: {', '.join(sorted(changed))}")  # mean and var are running statistics of the base
    module.export_model_for_inferencing(options.out / "trained.onnx", ["logits"])
    print(f"{digits.accuracy(options.out / 'trained.onnx', held_out):.1%} right in plain onnxruntime")
    return 0


if __name__ == "__main__":
    sys.exit(main())
