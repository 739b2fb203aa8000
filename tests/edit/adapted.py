"""Small models of every kind that can have adapters, and adapters that do something."""

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
from onnx import numpy_helper

import onnxgrad

INPUTS, HIDDEN, OUTPUTS = 6, 8, 4


def model_of(text: str, opset: int = 21, **weights: np.ndarray) -> onnx.ModelProto:
    """The nodes of a graph from x to y, with weights by name; `__` stands for a dot."""
    names = {name: name.replace("__", ".") for name in weights}
    header = f'<ir_version: 10, opset_import: ["" : {opset}, "com.microsoft" : 1]> g ({{}}) => ({{}} y)'
    x, y = ("int64[n] x", "float[n, m]") if "Gather" in text else ("float[n, c, h, w] x", "float[n, k, p, q]")
    if "Conv" not in text and "Gather" not in text:
        x, y = f"float[n, {INPUTS}] x", "float[n, m]"
    if any(a.dtype == np.float16 for a in weights.values()):
        x, y = x.replace("float", "float16"), y.replace("float", "float16")
    model = onnx.parser.parse_model(header.format(x, y) + "{" + text + "}")
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
    model.graph.initializer.extend(_tensor(a, names[name]) for name, a in weights.items())
    return model


def _tensor(array: np.ndarray, name: str) -> onnx.TensorProto:
    if array.dtype in (ml_dtypes.int4, ml_dtypes.uint4, ml_dtypes.bfloat16):
        return ir.to_proto(ir.Tensor(array, name=name))
    return numpy_helper.from_array(array, name)


def weights(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def perturbed(model: onnx.ModelProto, size: float = 0.3) -> onnx.ModelProto:
    """The same with random numbers in all adapters."""
    random = np.random.default_rng(7)
    for k, tensor in enumerate(model.graph.initializer):
        if tensor.name.endswith(("lora_A.weight", "lora_B.weight", "lora_embedding_A", "lora_embedding_B")):
            array = numpy_helper.to_array(tensor)
            changed = (random.normal(size=array.shape) * size).astype(array.dtype)
            model.graph.initializer[k].CopyFrom(_tensor(changed, tensor.name))
    return model


def run(model: Any, x: np.ndarray) -> np.ndarray:
    return onnxgrad.session(model).run(None, {"x": x})[0]


def arrays(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}


def packed_bits(levels: np.ndarray, bits: int) -> np.ndarray:
    """[rows, numbers] as MatMulNBits has it: several in a byte, the first in the lowest bits."""
    parts = levels.reshape(len(levels), -1, 8 // bits).astype(np.uint8) << np.arange(0, 8, bits, dtype=np.uint8)
    return np.bitwise_or.reduce(parts, axis=-1).astype(np.uint8)


W, V = weights(INPUTS, HIDDEN), weights(HIDDEN, OUTPUTS, seed=1)
X = weights(5, INPUTS, seed=2)
IMAGES = weights(2, 4, 7, 6, seed=3)
LINEAR = "h = MatMul(x, first__weight) r = Relu(h) y = MatMul(r, second__weight)"


def linear(opset: int = 21) -> onnx.ModelProto:
    return model_of(LINEAR, opset, first__weight=W, second__weight=V)


def _levels(low: int, high: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(4).integers(low, high + 1, shape)


def quantized() -> dict[str, onnx.ModelProto]:
    """Weights of 8 and 4 bits, with scales of all kinds."""
    matmul = "y = MatMul(x, d)"
    int8, uint4 = _levels(-127, 127, INPUTS, HIDDEN).astype(np.int8), _levels(0, 15, INPUTS, HIDDEN)
    columns = np.linspace(0.01, 0.02, HIDDEN, dtype=np.float32)
    blocks = np.linspace(0.05, 0.2, 3 * HIDDEN, dtype=np.float32).reshape(3, HIDDEN)
    zeros = _levels(5, 10, 3, HIDDEN).astype(ml_dtypes.uint4)
    bits = _levels(0, 15, HIDDEN, 32)
    nbits = "y = com.microsoft.MatMulNBits <K = 6, N = 8, bits = 4, block_size = 32> (x, layer__weight_Q4, scale{})"
    points = packed_bits(np.stack([_levels(6, 9, HIDDEN), np.zeros(HIDDEN, int)], 1), 4)
    rows = np.linspace(0.1, 0.2, HIDDEN, dtype=np.float32)
    dequantize = "d = DequantizeLinear{}(layer__weight_quantized, scale{})"
    return {
        "one scale": model_of(
            dequantize.format("", "") + matmul, layer__weight_quantized=int8, scale=np.array(0.01, np.float32)
        ),
        "columns": model_of(dequantize.format("", "") + matmul, layer__weight_quantized=int8, scale=columns),
        "rows of a transposed weight": model_of(
            dequantize.format("<axis = 0>", "") + "t = Transpose<perm = [1, 0]>(d) y = MatMul(x, t)",
            layer__weight_quantized=np.ascontiguousarray(int8.T), scale=columns,
        ),
        "uint8 with zero points": model_of(
            dequantize.format("", ", zero") + matmul,
            layer__weight_quantized=_levels(0, 255, INPUTS, HIDDEN).astype(np.uint8), scale=columns,
            zero=_levels(100, 150, HIDDEN).astype(np.uint8),
        ),
        "int4 in blocks": model_of(
            dequantize.format("<axis = 0, block_size = 2>", "") + matmul,
            layer__weight_quantized=(uint4 - 8).astype(ml_dtypes.int4), scale=blocks,
        ),
        "uint4 in blocks with zero points": model_of(
            dequantize.format("<axis = 0, block_size = 2>", ", zero") + matmul,
            layer__weight_quantized=uint4.astype(ml_dtypes.uint4), scale=blocks, zero=zeros,
        ),
        "Gemm": model_of(
            dequantize.format("<axis = 0>", "") + "y = Gemm<transB = 1, alpha = 0.5>(x, d)",
            layer__weight_quantized=np.ascontiguousarray(int8.T), scale=columns,
        ),
        "MatMulNBits": model_of(
            nbits.format(""), layer__weight_Q4=packed_bits(bits, 4).reshape(HIDDEN, 1, 16), scale=rows
        ),
        "MatMulNBits with zero points": model_of(
            nbits.format(", zero"), layer__weight_Q4=packed_bits(bits, 4).reshape(HIDDEN, 1, 16), scale=rows,
            zero=points.reshape(-1),
        ),
    }  # fmt: skip


def floating() -> dict[str, tuple[onnx.ModelProto, np.ndarray]]:
    """Layers of every kind, with an input."""
    image = "y = Conv<{}>(x, layer__weight)"
    return {
        "MatMul": (linear(), X),
        "MatMul of a transposed weight": (
            model_of("t = Transpose(layer__weight) y = MatMul(x, t)", layer__weight=np.ascontiguousarray(W.T)), X
        ),
        "Gemm": (model_of("y = Gemm(x, layer__weight, b)", layer__weight=W, b=weights(HIDDEN)), X),
        "Gemm, transB and alpha": (
            model_of("y = Gemm<transB = 1, alpha = 0.5>(x, layer__weight)", layer__weight=np.ascontiguousarray(W.T)), X
        ),
        "Gemm, transA": (
            model_of("t = Transpose(x) y = Gemm<transA = 1>(t, layer__weight)", layer__weight=W), X
        ),
        "Conv": (
            model_of(image.format("pads = [1, 1, 1, 1], strides = [2, 1]"), layer__weight=weights(8, 4, 3, 3)), IMAGES
        ),
        "Conv in groups, dilated": (
            model_of(image.format("group = 2, dilations = [2, 1]"), layer__weight=weights(6, 2, 3, 2)), IMAGES
        ),
        "Gather": (model_of("y = Gather(layer__weight, x)", layer__weight=weights(9, 5)), np.array([3, 0, 3, 8])),
    }  # fmt: skip


def half(dtype: Any) -> onnx.ModelProto:
    return model_of("y = MatMul(x, layer__weight)", layer__weight=W.astype(dtype))
