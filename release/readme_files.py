"""Writes model.onnx and train.npz into the current folder: the files that the README's first example reads."""

import numpy as np
import onnx

model = onnx.parser.parse_model("""
<ir_version: 10, opset_import: ["" : 21]>
classifier (float[batch, 4] x) => (float[batch, 3] logits) {
    a = Gemm (x, fc1_weight, fc1_bias)
    h = Relu(a)
    logits = Gemm (h, fc2_weight, fc2_bias)
}
""")
random = np.random.default_rng(0)
for name, shape in {"fc1_weight": (4, 16), "fc1_bias": (16,), "fc2_weight": (16, 3), "fc2_bias": (3,)}.items():
    array = (random.standard_normal(shape) / 2).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
onnx.save(model, "model.onnx")

x = random.standard_normal((1000, 4)).astype(np.float32)
np.savez("train.npz", x=x, target=(x[:, 0] > 0).astype(np.int64) + (x[:, 1] > 0))
