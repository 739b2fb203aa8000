"""Lets onnxruntime-training 1.19.2 make artifacts of small models and train them, for tests/ort_training.

    .venv-peer/bin/python tests/data/make_artifacts.py

artifacts_1_19_2/<model>_<loss>_<optimizer>/ holds training_model.onnx, eval_model.onnx, optimizer_model.onnx and
checkpoint as generate_artifacts writes them, and expected.npz, which says what 1.19.2 makes of them:

    input/<name>      five batches of each input; step k takes batch k % 5
    rate              the learning rate
    initial/<name>    what each parameter was, trained or not, as in checkpoint
    gradient/<name>   of each trained parameter, after the first batch, before the first update
    losses            of 50 steps: module(batch), optimizer.step(), module.lazy_reset_grad()
    evaluated         the loss of each batch after that, in eval mode; not of the cnn: 1.19.2 refuses its eval_model,
                      whose BatchNormalization is not in train mode any more, but has the outputs of one that is
    parameter/<name>  what each parameter has become, trained or not

All models have the input x and the output scores, and operators that its builder of gradients can do: no
LayerNormalization, which it makes itself, no AveragePool of a batch of any size, recurrent layers with initial states.
"""

import shutil
import sys
import types
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import numpy_helper, parser

# The package imports PyTorch for what nobody needs here: a bare one of its name leads to its modules.
package = types.ModuleType("onnxruntime.training")
package.__path__ = [str(Path(onnxruntime.__file__).parent / "training")]
sys.modules["onnxruntime.training"] = package
from onnxruntime.training import artifacts, onnxblock  # noqa: E402
from onnxruntime.training.api import CheckpointState, Module, Optimizer  # noqa: E402

FOLDER = Path(__file__).parents[1] / "ort_training" / "artifacts_1_19_2"
BATCHES, BATCH, CLASSES, STEPS = 5, 8, 3, 50
NEWEST_IR = 10  # that 1.19.2 loads, and that the onnx of its time gave a new model
STATISTICS = ("bn.mean", "bn.variance")  # parameters that nothing trains

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mlp": (
        """
        <ir_version: 8, opset_import: ["" : 14]>
        mlp (float[batch, 6] x) => (float[batch, 3] scores) {
            a = Gemm <transB = 1> (x, fc1.weight, fc1.bias)
            h = Relu (a)
            scores = Gemm <transB = 1> (h, fc2.weight, fc2.bias)
        }
        """,
        {"fc1.weight": (12, 6), "fc1.bias": (12,), "fc2.weight": (3, 12), "fc2.bias": (3,)},
    ),
    "cnn": (
        """
        <ir_version: 8, opset_import: ["" : 15]>
        cnn (float[batch, 1, 8, 8] x) => (float[batch, 3] scores) {
            a = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x, conv1.weight, conv1.bias)
            b, mean, variance = BatchNormalization <training_mode = 1> (a, bn.weight, bn.bias, bn.mean, bn.variance)
            c = Relu (b)
            d = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (c)
            e = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (d, conv2.weight, conv2.bias)
            f = Relu (e)
            h = GlobalAveragePool (f)
            i = Flatten (h)
            scores = Gemm <transB = 1> (i, fc.weight, fc.bias)
        }
        """,
        {
            "conv1.weight": (4, 1, 3, 3), "conv1.bias": (4,), "bn.weight": (4,), "bn.bias": (4,), "bn.mean": (4,),
            "bn.variance": (4,), "conv2.weight": (6, 4, 3, 3), "conv2.bias": (6,), "fc.weight": (3, 6), "fc.bias": (3,),
        },
    ),
    "transformer": (
        """
        <ir_version: 8, opset_import: ["" : 16]>
        transformer (int64[batch, 5] x) => (float[batch, 3] scores)
        <int64[4] heads = {0, 0, 2, 4}, int64[3] joined = {0, 0, 8}, float scale = {0.5}, float half = {0.5},
         float one = {1}, float root = {1.41421356}, float two = {2}, float epsilon = {0.00001}>
        {
            tokens = Gather (embedding.weight, x)
            y = Add (tokens, position.weight)
            mean1 = ReduceMean <axes = [-1]> (y)
            centred1 = Sub (y, mean1)
            square1 = Pow (centred1, two)
            variance1 = ReduceMean <axes = [-1]> (square1)
            safe1 = Add (variance1, epsilon)
            deviation1 = Sqrt (safe1)
            standard1 = Div (centred1, deviation1)
            scaled1 = Mul (standard1, norm1.weight)
            n = Add (scaled1, norm1.bias)
            q = MatMul (n, query.weight)
            k = MatMul (n, key.weight)
            v = MatMul (n, value.weight)
            q4 = Reshape (q, heads)
            k4 = Reshape (k, heads)
            v4 = Reshape (v, heads)
            qh = Transpose <perm = [0, 2, 1, 3]> (q4)
            kh = Transpose <perm = [0, 2, 3, 1]> (k4)
            vh = Transpose <perm = [0, 2, 1, 3]> (v4)
            products = MatMul (qh, kh)
            scaled = Mul (products, scale)
            attention = Softmax <axis = -1> (scaled)
            mixed = MatMul (attention, vh)
            back = Transpose <perm = [0, 2, 1, 3]> (mixed)
            flat = Reshape (back, joined)
            out = MatMul (flat, out.weight)
            r = Add (y, out)
            mean2 = ReduceMean <axes = [-1]> (r)
            centred2 = Sub (r, mean2)
            square2 = Pow (centred2, two)
            variance2 = ReduceMean <axes = [-1]> (square2)
            safe2 = Add (variance2, epsilon)
            deviation2 = Sqrt (safe2)
            standard2 = Div (centred2, deviation2)
            scaled2 = Mul (standard2, norm2.weight)
            m = Add (scaled2, norm2.bias)
            up = MatMul (m, up.weight)
            upb = Add (up, up.bias)
            over = Div (upb, root)
            erf = Erf (over)
            erf1 = Add (erf, one)
            twice = Mul (upb, erf1)
            gelu = Mul (twice, half)
            down = MatMul (gelu, down.weight)
            s = Add (r, down)
            pooled = ReduceMean <axes = [1], keepdims = 0> (s)
            head = MatMul (pooled, head.weight)
            scores = Add (head, head.bias)
        }
        """,
        {
            "embedding.weight": (11, 8), "position.weight": (5, 8), "norm1.weight": (8,), "norm1.bias": (8,),
            "query.weight": (8, 8), "key.weight": (8, 8), "value.weight": (8, 8), "out.weight": (8, 8),
            "norm2.weight": (8,), "norm2.bias": (8,), "up.weight": (8, 16), "up.bias": (16,), "down.weight": (16, 8),
            "head.weight": (8, 3), "head.bias": (3,),
        },
    ),
    "gru": (
        """
        <ir_version: 8, opset_import: ["" : 14]>
        gru (float[5, batch, 4] x) => (float[batch, 3] scores)
        <int64[1] first = {0}, int64[1] second = {1}, int64[1] width = {6}>
        {
            shape = Shape (x)
            size = Gather (shape, second)
            dims = Concat <axis = 0> (second, size, width)
            h0 = ConstantOfShape (dims)
            all, last = GRU <hidden_size = 6, linear_before_reset = 1> (x, gru.weight, gru.recurrence, gru.bias, , h0)
            h = Squeeze (last, first)
            scores = Gemm <transB = 1> (h, fc.weight, fc.bias)
        }
        """,
        {
            "gru.weight": (1, 18, 4), "gru.recurrence": (1, 18, 6), "gru.bias": (1, 36), "fc.weight": (3, 6),
            "fc.bias": (3,),
        },
    ),
    "lstm": (
        """
        <ir_version: 8, opset_import: ["" : 14]>
        lstm (float[5, batch, 4] x) => (float[batch, 3] scores)
        <int64[1] first = {0}, int64[1] second = {1}, int64[1] width = {6}>
        {
            shape = Shape (x)
            size = Gather (shape, second)
            dims = Concat <axis = 0> (second, size, width)
            h0 = ConstantOfShape (dims)
            all, last, cell = LSTM <hidden_size = 6> (x, lstm.weight, lstm.recurrence, lstm.bias, , h0, h0)
            h = Squeeze (last, first)
            scores = Gemm <transB = 1> (h, fc.weight, fc.bias)
        }
        """,
        {
            "lstm.weight": (1, 24, 4), "lstm.recurrence": (1, 24, 6), "lstm.bias": (1, 48), "fc.weight": (3, 6),
            "fc.bias": (3,),
        },
    ),
}  # fmt: skip
LOSSES = {
    "ce": artifacts.LossType.CrossEntropyLoss,
    "mse": artifacts.LossType.MSELoss,
    "bce": artifacts.LossType.BCEWithLogitsLoss,
    "l1": artifacts.LossType.L1Loss,
}
# With its learning rate. Clipping comes with a block; a type has none.
OPTIMIZERS = {
    "adamw": (lambda: artifacts.OptimType.AdamW, 0.01),
    "sgd": (lambda: artifacts.OptimType.SGD, 0.1),
    "clipped": (lambda: onnxblock.optim.AdamW(weight_decay=0.01, clip_grad=onnxblock.optim.ClipGradNorm(0.1)), 0.01),
}


def variants() -> Iterator[tuple[str, str, str]]:
    """Every model with every loss; optimizers take turns, so that each meets all models and losses."""
    for m, model in enumerate(MODELS):
        for k, loss in enumerate(LOSSES):
            yield model, loss, list(OPTIMIZERS)[(m + k) % len(OPTIMIZERS)]


def random(name: str) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(name.encode()))


def model_of(name: str) -> onnx.ModelProto:
    text, shapes = MODELS[name]
    # The parser takes no dots in names.
    dotted = {parameter.replace(".", "__"): parameter for parameter in shapes}
    for plain, parameter in dotted.items():
        text = text.replace(parameter, plain)
    model = parser.parse_model(text)
    for node in model.graph.node:
        node.name = f"{node.op_type}_{node.output[0]}"
        node.input[:] = [dotted.get(i, i) for i in node.input]
    for parameter, shape in shapes.items():
        numbers = random(f"{name} {parameter}").uniform(-0.5, 0.5, shape).astype(np.float32)
        if len(shape) == 1 and ("norm" in parameter or "bn" in parameter) and "bias" not in parameter:
            numbers += 1
        model.graph.initializer.append(numpy_helper.from_array(numbers, parameter))
    return model


def inputs_of(name: str, loss: str, model: onnx.ModelProto) -> dict[str, np.ndarray]:
    kind = model.graph.input[0].type.tensor_type
    dims = [BATCHES, *(d.dim_value or BATCH for d in kind.shape.dim)]
    draw = random(f"{name} {loss} x")
    x = (
        draw.integers(0, 11, dims)
        if kind.elem_type == onnx.TensorProto.INT64
        else draw.standard_normal(dims, np.float32)
    )
    draw = random(f"{name} {loss} target")
    if loss == "ce":
        return {"x": x, "labels": draw.integers(0, CLASSES, (BATCHES, BATCH))}
    target = draw.standard_normal((BATCHES, BATCH, CLASSES), np.float32)
    return {"x": x, "target": (target > 0).astype(np.float32) if loss == "bce" else target}


def train(folder: Path, inputs: dict[str, np.ndarray], rate: float) -> dict[str, Any]:
    """What 1.19.2 makes of its artifacts."""
    # One thread: the same bits every time.
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    evaluation = None if folder.name.startswith("cnn") else folder / "eval_model.onnx"
    module = Module(folder / "training_model.onnx", state, evaluation, session_options=options)
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(rate)
    found: dict[str, Any] = {f"input/{name}": array for name, array in inputs.items()} | {"rate": np.float32(rate)}
    found |= {f"initial/{name}": p.data.copy() for name, p in state.parameters}
    batches = [[array[k] for array in inputs.values()] for k in range(BATCHES)]
    losses = []
    for step in range(STEPS):
        losses.append(module(*batches[step % BATCHES]))
        if step == 0:
            found |= {f"gradient/{name}": p.grad.copy() for name, p in state.parameters if p.requires_grad}
        optimizer.step()
        module.lazy_reset_grad()
    found["losses"] = np.array(losses)
    if evaluation is not None:
        module.eval()
        found["evaluated"] = np.array([module(*batch) for batch in batches])
    return found | {f"parameter/{name}": p.data.copy() for name, p in state.parameters}


def main() -> None:
    assert onnxruntime.__version__ == "1.19.2", onnxruntime.__version__
    shutil.rmtree(FOLDER, ignore_errors=True)
    for name, loss, kind in variants():
        model, (optimizer, rate) = model_of(name), OPTIMIZERS[kind]
        folder = FOLDER / f"{name}_{loss}_{kind}"
        folder.mkdir(parents=True)
        parameters = list(MODELS[name][1])
        artifacts.generate_artifacts(
            model,
            requires_grad=[p for p in parameters if p not in STATISTICS],
            frozen_params=[p for p in parameters if p in STATISTICS],
            loss=LOSSES[loss],
            optimizer=optimizer(),
            artifact_directory=folder,
        )
        written = onnx.load(folder / "optimizer_model.onnx")
        written.ir_version = NEWEST_IR
        onnx.save(written, folder / "optimizer_model.onnx")
        expected = train(folder, inputs_of(name, loss, model), rate)
        np.savez_compressed(folder / "expected.npz", **expected)
        sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
        print(f"{folder.name:24} {expected['losses'][0]:8.5f} -> {expected['losses'][-1]:8.5f}", sizes)


if __name__ == "__main__":
    main()
