"""Makes the page that trains a network in the browser: `make web`, then open it from a web server.

A small convolutional network with random weights becomes a training step (onnxgrad.export_step); beside it go
scikit-learn's handwritten digits, the page, and onnxruntime-web as npm has it.
"""

import argparse
import shutil
from pathlib import Path

import numpy as np
import onnx
from sklearn.datasets import load_digits

import onnxgrad

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
RUNTIME = ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")
NETWORK = """
<ir_version: 10, opset_import: ["" : 21]>
digits (float[batch, 1, 8, 8] x) => (float[batch, 10] logits) {
    c1 = Conv <pads = [1, 1, 1, 1]> (x, conv1_weight, conv1_bias)
    r1 = Relu(c1)
    c2 = Conv <pads = [1, 1, 1, 1]> (r1, conv2_weight, conv2_bias)
    r2 = Relu(c2)
    p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (r2)
    f = Flatten(p)
    h = Gemm(f, hidden_weight, hidden_bias)
    r3 = Relu(h)
    d = Dropout(r3, dropped)
    logits = Gemm(d, head_weight, head_bias)
}
"""
SHAPES = {"conv1": (16, 1, 3, 3), "conv2": (32, 16, 3, 3), "hidden": (512, 64), "head": (64, 10)}


def network() -> onnx.ModelProto:
    """The model, with weights by He's rule."""
    model, random = onnx.parser.parse_model(NETWORK), np.random.default_rng(0)
    arrays = {"dropped": np.float32(0.25)}
    for name, shape in SHAPES.items():
        inputs, outputs = (np.prod(shape[1:]), shape[0]) if len(shape) == 4 else shape
        arrays[f"{name}_weight"] = random.standard_normal(shape) * np.sqrt(2 / inputs)
        arrays[f"{name}_bias"] = np.zeros(outputs)
    for name, array in arrays.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(array, np.float32), name))
    onnx.checker.check_model(model)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "web", help="folder for the page")
    parser.add_argument(
        "--runtime", type=Path, default=ROOT / "build" / "npm" / "node_modules" / "onnxruntime-web" / "dist",
        help="folder of onnxruntime-web",
    )  # fmt: skip
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    files = onnxgrad.export_step(
        network(), options.out / "step.onnx", onnxgrad.losses.CrossEntropy("logits"), onnxgrad.optim.AdamW(lr=2e-3)
    )
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    rows = np.concatenate([digits.target[order, None], digits.data[order]], axis=1).astype(np.uint8)
    (options.out / "digits.bin").write_bytes(rows.tobytes())
    for path in (HERE / "index.html", HERE / "training-step.mjs", *(options.runtime / name for name in RUNTIME)):
        shutil.copy(path, options.out)
    sizes = sum(path.stat().st_size for path in files)
    print(f"{options.out}: the page; the step takes {sizes:,} bytes. python -m http.server -d {options.out} shows it.")


if __name__ == "__main__":
    main()
