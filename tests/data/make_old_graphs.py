"""Lets onnxruntime-training 1.19.2 write the gradient of every operator that it can, and run it on the CPU.

    .venv-peer/bin/python tests/data/make_old_graphs.py

Each model is one operator, or the few that its optimizer makes one of, of weights `u`, `v` and `w` and constants, times
x, and the mean of that. old_graphs.npz and old_graphs.json are as make_old_operators.py has them, where `model` is
training_model.onnx, and the gradients are outputs, too.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from make_artifacts import artifacts
from make_golden import floats, ints, sentence
from make_old_operators import Store, run
from onnx import TensorProto, helper, numpy_helper, parser

FILE = Path(__file__).with_name("old_graphs.npz")
Arrays = dict[str, np.ndarray]


def number(content: float) -> np.ndarray:
    return np.array(content, np.float32)


def models() -> Iterator[tuple[str, str, dict[str, Any], Arrays, int]]:
    """A name, nodes that make y, the shapes of weights, constants, and the opset."""

    def model(nodes: str, weights: dict[str, Any], constants: Arrays | None = None, opset: int = 17, name: str = ""):
        first = nodes.split("= ")[1].split("(")[0].split("<")[0].strip()
        return name or f"{first} {list(weights.values())}", nodes, weights, constants or {}, opset

    for operator in [
        "Abs",
        "Cos",
        "Erf",
        "Exp",
        "Flatten",
        "Identity",
        "LeakyRelu",
        "Neg",
        "Reciprocal",
        "Relu",
        "Sigmoid",
        "Sin",
        "Tanh",
    ]:
        yield model(f"y = {operator}(w)", {"w": (2, 3, 4)})
    for operator in ("Log", "Sqrt"):
        yield model(f"a = Exp(w) \n y = {operator}(a)", {"w": (2, 3)}, name=operator)
    yield model("a = Cast <to = 11> (w) \n y = Cast <to = 1> (a)", {"w": (2, 3)})
    yield model("y = GlobalAveragePool(w)", {"w": (2, 3, 4, 4)})
    for operator in ("Softmax", "LogSoftmax"):
        for axis, opset in ((0, 17), (1, 17), (-1, 17), (0, 12), (1, 12), (2, 12)):
            nodes = f"a = {operator} <axis = {axis}> (w) \n y = Mul(a, k)"
            constants = {"k": floats("softmax", 2, 3, 4)}
            yield model(nodes, {"w": (2, 3, 4)}, constants, opset, f"{operator} {axis} of opset {opset}")
    for operator in ["Add", "Sub", "Mul", "Div", "Min", "Max"]:
        yield model(f"y = {operator}(w, v)", {"w": (2, 3), "v": (2, 3)})
        if operator not in ("Min", "Max"):
            yield model(f"y = {operator}(w, v)", {"w": (2, 3), "v": (3,)})
            yield model(f"y = {operator}(w, v)", {"w": (2, 1), "v": (1, 3)})
    yield model("y = Pow(w, k)", {"w": (2, 3)}, {"k": number(3)})
    yield model("y = Where(k, w, v)", {"w": (2, 3), "v": (3,)}, {"k": floats("where", 2, 3) > 0})
    yield model("y = Clip(w, a, b)", {"w": (3, 5)}, {"a": number(-0.5), "b": number(0.7)})
    for w, v in (((3, 4), (4, 5)), ((2, 3, 4), (4, 5)), ((2, 3, 4), (2, 4, 5))):
        yield model("y = MatMul(w, v)", {"w": w, "v": v})
    for a, b in ((0, 0), (0, 1), (1, 0), (1, 1)):
        nodes = f"y = Gemm <transA = {a}, transB = {b}, alpha = 0.5, beta = 2.0> (w, v, u)"
        yield model(nodes, {"w": (4, 3) if a else (3, 4), "v": (5, 4) if b else (4, 5), "u": (5,)})
    yield model("y = com.microsoft.ScaledSum <scale_0 = 0.5, scale_1 = 2.0> (w, v)", {"w": (2, 3), "v": (2, 3)})
    for keep in (0, 1):
        yield model(
            f"a = ReduceMean <axes = [1], keepdims = {keep}> (w) \n y = Mul(a, a)",
            {"w": (2, 3, 4)},
            name=f"ReduceMean {keep}",
        )
        nodes = f"a = ReduceSum <keepdims = {keep}> (w, k) \n y = Mul(a, a)"
        yield model(nodes, {"w": (2, 3, 4)}, {"k": ints([1])}, name=f"ReduceSum {keep}")
    yield model("a = ReduceSum <axes = [1]> (w) \n y = Mul(a, a)", {"w": (2, 3, 4)}, {}, 12, "ReduceSum of opset 12")
    for operator in ("ReduceLogSumExp", "ReduceL2"):
        yield model(f"a = {operator} <axes = [1]> (w) \n y = Mul(a, a)", {"w": (2, 3, 4)}, name=operator)
    yield from rearranging(model)
    yield from layers(model)


def rearranging(model: Any) -> Iterator[Any]:
    def squared(nodes: str, weights: dict[str, Any], constants: Arrays | None = None, opset: int = 17):
        return model(f"{nodes} \n y = Mul(a, a)", weights, constants, opset)

    yield squared("a = Concat <axis = 1> (w, v)", {"w": (2, 3), "v": (2, 1)})
    yield squared("a, l = com.microsoft.ConcatTraining <axis = 0> (w, v)", {"w": (2, 3), "v": (1, 3)})
    yield squared("b, c = Split <axis = 1> (w, k) \n a = Mul(b, c)", {"w": (2, 4)}, {"k": ints([2, 2])})
    yield squared("a = Reshape(w, k)", {"w": (2, 3)}, {"k": ints([3, -1])})
    yield squared("a = Transpose <perm = [2, 0, 1]> (w)", {"w": (2, 3, 4)})
    yield squared("a = Squeeze(w, k)", {"w": (2, 1, 3)}, {"k": ints([1])})
    yield squared("a = Unsqueeze(w, k)", {"w": (2, 3)}, {"k": ints([1])})
    yield model("a = Squeeze <axes = [1]> (w) \n y = Mul(a, a)", {"w": (2, 1, 3)}, {}, 12, "Squeeze of opset 12")
    yield model("a = Unsqueeze <axes = [1]> (w) \n y = Mul(a, a)", {"w": (2, 3)}, {}, 12, "Unsqueeze of opset 12")
    yield squared("a = Gather(w, k)", {"w": (5, 3)}, {"k": ints([0, 2, 2])})
    yield squared("a = Gather <axis = 1> (w, k)", {"w": (3, 5)}, {"k": ints([[0, 2], [2, 1]])})
    yield squared("a = com.microsoft.ShrunkenGather(w, k)", {"w": (5, 3)}, {"k": ints([0, 2])})
    yield squared("a = GatherND(w, k)", {"w": (3, 4)}, {"k": ints([[0, 1], [2, 3], [0, 1]])})
    yield squared("a = GatherND <batch_dims = 1> (w, k)", {"w": (2, 3, 4)}, {"k": ints([[[1], [1]], [[0], [2]]])})
    yield squared("a = GatherElements <axis = 1> (w, k)", {"w": (3, 4)}, {"k": ints([[0, 1], [2, 3], [1, 1]])})
    constants = {"b": ints([1]), "e": ints([5]), "k": ints([1]), "s": ints([2])}
    yield squared("a = Slice(w, b, e, k, s)", {"w": (5, 6)}, constants)
    yield squared("a = Expand(w, k)", {"w": (2, 1)}, {"k": ints([2, 3])})
    yield squared("a, i = TopK <axis = 1> (w, k)", {"w": (3, 5)}, {"k": ints([2])})
    yield squared("a = Tile(w, k)", {"w": (2, 3)}, {"k": ints([2, 2])})
    yield squared("a = Pad(w, k)", {"w": (2, 3)}, {"k": ints([1, 0, 0, 2])})
    yield squared("a = ScatterND(w, k, v)", {"w": (4, 3), "v": (2, 3)}, {"k": ints([[0], [2]])})
    yield squared("a = ScatterElements <axis = 1> (w, k, v)", {"w": (2, 4), "v": (2, 2)}, {"k": ints([[0, 2], [1, 3]])})
    yield squared("a = com.microsoft.Trilu <upper = 0> (w)", {"w": (3, 3)})


def layers(model: Any) -> Iterator[Any]:
    def squared(nodes: str, weights: dict[str, Any], constants: Arrays | None = None, name: str = ""):
        return model(f"{nodes} \n y = Mul(a, a)", weights, constants, name=name)

    yield squared("a = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (w)", {"w": (2, 3, 5, 4)})
    nodes = "a = MaxPool <kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]> (w)"
    yield squared(nodes, {"w": (2, 3, 5, 4)}, name="MaxPool with pads")
    yield squared("a = MaxPool <kernel_shape = [3]> (w)", {"w": (2, 3, 7)})
    nodes = "a = AveragePool <kernel_shape = [2, 3], strides = [2, 1], pads = [0, 1, 0, 1]> (w)"
    yield squared(nodes, {"w": (2, 3, 6, 4)})
    nodes = "a = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1], strides = [2, 1]> (v, w, u)"
    yield squared(nodes, {"w": (4, 3, 3, 3), "v": (2, 3, 6, 5), "u": (4,)})
    yield squared("a = Conv <kernel_shape = [3], group = 2> (v, w)", {"w": (4, 2, 3), "v": (2, 4, 6)})
    nodes = "a = ConvTranspose <kernel_shape = [3, 3], strides = [2, 2]> (v, w, u)"
    yield squared(nodes, {"w": (3, 4, 3, 3), "v": (2, 3, 4, 4), "u": (4,)})
    yield squared(
        'a = Resize <mode = "linear"> (w, , k)', {"w": (1, 2, 3, 4)}, {"k": np.array([1, 1, 2, 2], np.float32)}
    )
    labels, weight = ints([0, 2, 1, 1]), {"k": np.abs(floats("classes", 3))}
    for reduction in ("mean", "sum", "none"):
        nodes = f'y, l = SoftmaxCrossEntropyLoss <reduction = "{reduction}", ignore_index = 1> (w, i, k)'
        yield model(nodes, {"w": (4, 3)}, {"i": labels, **weight}, name=f"SoftmaxCrossEntropyLoss {reduction}")
    one_hot = {"k": np.eye(3, dtype=np.float32)[labels]}
    yield model("y, l = com.microsoft.SoftmaxCrossEntropy(w, k)", {"w": (4, 3)}, one_hot)
    yield squared("a, m = Dropout(w, r, t)", {"w": (4, 5)}, {"r": number(0), "t": np.array(True)})
    constants = {"k": number(1.702), "r": number(2**0.5), "o": number(1), "h": number(0.5), "cubic": number(0.044715)}
    constants |= {"s": number((2 / np.pi) ** 0.5), "t": number(3), "two": number(2), "e": number(1e-5)}
    yield model("b = Mul(w, k) \n c = Sigmoid(b) \n y = Mul(w, c)", {"w": (2, 3)}, constants, name="QuickGelu")
    gelu = "b = Div(z, r) \n c = Erf(b) \n d = Add(c, o) \n f = Mul(z, d) \n y = Mul(f, h)"
    yield model(gelu.replace("z", "w"), {"w": (3, 4)}, constants, name="Gelu")
    yield model(f"z = Add(w, v) \n {gelu}", {"w": (3, 4), "v": (4,)}, constants, name="BiasGelu")
    nodes = "b = Pow(w, t) \n d = Mul(b, cubic) \n f = Add(w, d) \n g = Mul(f, s) \n i = Tanh(g) \n j = Add(i, o)"
    nodes += " \n l = Mul(w, j) \n y = Mul(l, h)"
    yield model(nodes, {"w": (3, 4)}, constants, name="FastGelu")
    yield squared("a, m, i = LayerNormalization(w, v, u)", {"w": (3, 4), "v": (4,), "u": (4,)})
    nodes = "b = Pow(w, two) \n c = ReduceMean <axes = [-1]> (b) \n d = Add(c, e) \n f = Sqrt(d) \n g = Div(w, f)"
    yield squared(f"{nodes} \n a = Mul(g, v)", {"w": (3, 4), "v": (4,)}, constants, "SimplifiedLayerNormalization")
    constants = {"m": floats("mean", 4), "s": np.abs(floats("variance", 4))}
    nodes = "a, n, t = BatchNormalization <training_mode = 1> (w, v, u, m, s)"
    yield squared(nodes, {"w": (3, 4, 2), "v": (4,), "u": (4,)}, constants)
    nodes = "a, m = com.microsoft.FakeQuant(w, s, z)"
    yield squared(nodes, {"w": (3, 4)}, {"s": number(0.005), "z": number(100)})
    constants = {"k": floats("sequence", 5, 2, 3), "h": floats("state", 1, 2, 4)}
    nodes = "b, a = GRU <hidden_size = 4> (k, w, v, u, , h)"
    yield squared(nodes, {"w": (1, 12, 3), "v": (1, 12, 4), "u": (1, 24)}, constants)
    nodes = "b, a, c = LSTM <hidden_size = 4> (k, w, v, u, , h, h)"
    yield squared(nodes, {"w": (1, 16, 3), "v": (1, 16, 4), "u": (1, 32)}, constants)


def training_model(nodes: str, weights: Arrays, constants: Arrays, opset: int) -> onnx.ModelProto:
    """The graph of generate_artifacts, with the gradients as outputs, too."""
    model = parser.parse_model(f"""<ir_version: 8, opset_import: ["" : {opset}, "com.microsoft" : 1]>
    g (float[1] x) => (float loss) {{
        {nodes}
        scaled = Mul(y, x)
        loss = ReduceMean <keepdims = 0> (scaled)
    }}""")
    for name, array in {**weights, **constants}.items():
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    with tempfile.TemporaryDirectory() as folder:
        artifacts.generate_artifacts(model, requires_grad=list(weights), artifact_directory=folder)
        made = onnx.load(Path(folder) / "training_model.onnx")
    for name, array in weights.items():
        made.graph.output.append(helper.make_tensor_value_info(f"{name}_grad", TensorProto.FLOAT, array.shape))
    return made


def main() -> None:
    store, index, cannot = Store(), [], {}
    for name, nodes, shapes, constants, opset in models():
        weights = {w: np.asarray(floats(f"{name} {w}", *shape) * 1.5) for w, shape in shapes.items()}
        try:
            model = training_model(nodes, weights, constants, opset)
            feeds = {"x": np.array([1.5], np.float32), **weights, "lazy_reset_grad": np.array([True])}
            feeds |= {f"{w}_grad.accumulation.buffer": np.zeros_like(a) for w, a in weights.items()}
            results = dict(zip([o.name for o in model.graph.output], run(model, feeds), strict=True))
        except Exception as error:
            cannot[name] = sentence(str(error))
            continue
        index.append({
            "name": name,
            "model": store.put(np.frombuffer(model.SerializeToString(), np.uint8)),
            "inputs": {n: store.put(a) for n, a in feeds.items()},
            "outputs": {n: store.put(a) for n, a in results.items()},
        })  # fmt: skip
    print(len(index), "graphs; could not run:", cannot)
    store.write(FILE, index, cannot)


if __name__ == "__main__":
    main()
