"""Runs onnxruntime-training 1.19.2 on operators that we have no kernels for, and stores what it gives.

    .venv-peer/bin/python tests/data/make_old_operators.py

old_operators.npz holds all numbers end to end, one flat array per type; those of uint8 are the bytes of models of one
node. old_operators.json says what they are: for every case its model, inputs and outputs, each with type, shape and
offset, or a list of such for a sequence. "peer_cannot" names what has no kernel for the CPU: tests have definitions in
NumPy for that.
"""

import itertools
import json
import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from make_golden import floats, ints, sentence
from onnx import TensorProto, helper

FILE = Path(__file__).with_name("old_operators.npz")
F4, F8, I4, I8, BOOL = np.float32, np.float64, np.int32, np.int64, np.bool_
Case = tuple[str, onnx.ModelProto, dict[str, Any]]


def kind_of(dtype: Any) -> int:
    return helper.np_dtype_to_tensor_dtype(np.dtype(dtype))


def info(name: str, given: Any) -> onnx.ValueInfoProto:
    """Of an array, of a list of arrays, or of a result: a type, [a type], or a type and a shape."""
    if isinstance(given, list):
        dtype = given[0].dtype if isinstance(given[0], np.ndarray) else given[0]
        return helper.make_tensor_sequence_value_info(name, kind_of(dtype), None)
    if isinstance(given, np.ndarray):
        return helper.make_tensor_value_info(name, kind_of(given.dtype), given.shape)
    dtype, shape = given if isinstance(given, tuple) else (given, None)
    return helper.make_tensor_value_info(name, kind_of(dtype), shape)


def case(
    operator: str, name: str, inputs: dict[str, Any], outputs: dict[str, Any], domain: str = "com.microsoft",
    opset: int = 17, **attributes: Any,
) -> Case:  # fmt: skip
    """A node; None among the inputs is one left out, and so is None among the outputs."""
    given = {n: a for n, a in inputs.items() if a is not None}
    made = {n: a for n, a in outputs.items() if a is not None}
    node = helper.make_node(
        operator,
        [n if n in given else "" for n in inputs],
        [n if n in made else "" for n in outputs],
        name="it",
        domain=domain,
        **attributes,
    )
    graph = helper.make_graph(
        [node], "one", [info(n, a) for n, a in given.items()], [info(n, a) for n, a in made.items()]
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return f"{operator}: {name}", helper.make_model(graph, opset_imports=opsets, ir_version=8), given


def some(name: str, *shapes: tuple[int, ...], dtype: Any = F4) -> list[np.ndarray]:
    return [np.asarray(floats(f"{name} {k}", *shape, dtype=dtype)) for k, shape in enumerate(shapes)]


def true(*shape: int) -> np.ndarray:
    return np.ones(shape, BOOL)


def accumulation() -> Iterator[Case]:
    a, b, s = *some("sums", (2, 3), (2, 3)), floats("single")
    for signal in (None, true(1), ~true(1)):
        named = "no signal" if signal is None else f"signal {signal[0]}"
        inputs = {"old_sum": a, "value": b, "update_signal": signal}
        yield case("InPlaceAccumulator", named, inputs, {"new_sum": F4})
        inputs = {"accumulation_buffer": a, "value": b, "overwrite_flag": signal}
        outputs = {"updated_flag": BOOL, "accumulation_buffer_out": F4}
        yield case("InPlaceAccumulatorV2", named, inputs, outputs)
        inputs = {"accumulation_buffer": s, "value": s, "overwrite_flag": signal}
        yield case("InPlaceAccumulatorV2", f"{named}, scalars", inputs, outputs)
    yield case("ZeroGradient", "floats", {"old_gradient": a, "reset_signal": true(1)}, {"zero_gradient": F4})
    yield case("Group", "several", {"a": a, "b": true(2), "c": ints([1])}, {"done": BOOL})
    yield case("PassThrough", "several", {"a": a, "b": ints([1])}, {"x": F4, "y": I8})
    for T, S in itertools.product((F4, F8), (F4, F8, I4, I8)):
        for down in (0, 1):
            inputs = {"input": a.astype(T), "scale": np.array([3], S)}
            name = f"{np.dtype(T)} {np.dtype(S)} {down}"
            yield case("Scale", name, inputs, {"output": T}, scale_down=down)
    yield case("ReduceAllL2", "one", {"a": a}, {"Y": F4})
    yield case("ReduceAllL2", "several", {"a": a, "b": floats("b", 7), "c": s}, {"Y": F4})


def optimizers() -> Iterator[Case]:
    shapes = ((2, 3), (4,), ())
    w, g, m1 = (some(name, *shapes) for name in ("weights", "gradients", "moments"))
    m2 = [np.asarray(np.abs(m)) for m in some("second", *shapes)]
    rate, step = np.array([0.1], F4), ints([3])
    for signal, mode, bias in itertools.product((None, true(1), ~true(1)), (0, 1), (0, 1)):
        if mode == 0 and not bias:
            continue  # which it refuses
        inputs = {"lr": rate, "step": step, "weights": w, "gradients": g, "momentums_1": m1, "momentums_2": m2}
        outputs = {"flag": BOOL, "new": [F4], "new_1": [F4], "new_2": [F4]}
        name = f"mode {mode}, bias {bias}, " + ("no signal" if signal is None else f"signal {signal[0]}")
        settings = {"adam_mode": mode, "correct_bias": bias, "weight_decay": 0.02 * bias, "alpha": 0.8}
        yield case("AdamWOptimizer", name, inputs | {"update_signal": signal}, outputs, **settings)
    for first in (1, 2, 1000):
        inputs = {"lr": rate, "step": ints([first]), "weights": w, "gradients": g, "momentums_1": m1, "momentums_2": m2}
        yield case("AdamWOptimizer", f"defaults, step {first}", inputs, outputs)
    for signal in (None, true(1), ~true(1)):
        inputs = {"lr": rate, "weights": w, "gradients": g, "update_signal": signal}
        name = "no signal" if signal is None else f"signal {signal[0]}"
        yield case("SGDOptimizerV2", name, inputs, {"flag": BOOL, "new": [F4]})
    for norm in (0.5, 100.0):
        yield case("InplaceClipGradNorm", f"to {norm}", {"gradients": g}, {"clipped": [F4]}, max_norm=norm)
    inputs = {"ETA": np.array([0.3], F4), "W": w[0], "G": g[0]}
    yield case("SGDOptimizer", "both", inputs, {"NW": F4, "NG": F4})
    yield case("SGDOptimizer", "weights", inputs, {"NW": F4})
    for mode, bias, first in itertools.product((0, 1), (0, 1), (0, 1, 7)):
        inputs = {"R": rate, "T": ints([first]), "w": w[0], "g": g[0], "m1": m1[0], "m2": m2[0]}
        outputs = {"new_T": I8, "new_1": F4, "new_2": F4, "new_w": F4, "new_g": F4}
        settings = {"weight_decay_mode": mode, "do_bias_correction": bias, "lambda": 0.05}
        yield case("AdamOptimizer", f"mode {mode}, bias {bias}, step {first}", inputs, outputs, **settings)


def rearranging() -> Iterator[Case]:
    x = floats("rearranged", 4, 3)
    for axis in (0, -1):
        parts = {"a": x, "b": floats("more", 4, 3), "c": floats("most", 4, 3)}
        yield case("ConcatTraining", f"axis {axis}", parts, {"joined": F4, "lengths": I8}, axis=axis)
    yield case("ConcatTraining", "without lengths, int64", {"a": ints([1, 2]), "b": ints([3])}, {"joined": I8}, axis=0)
    outputs = {"a": F4, "b": F4}
    yield case("SplitTraining", "rows", {"input": x, "split": ints([1, 3])}, outputs, axis=0)
    yield case("SplitTraining", "columns", {"input": x, "split": ints([2, 1])}, outputs, axis=-1)
    for T in (F4, F8, I4, I8):
        data = (floats("summed", 2, 3, 4) * 9).astype(T)
        for axes, keep, noop in (([1], 1, 0), ([0, -1], 0, 0), ([], 1, 1), ([], 1, 0)):
            inputs = {"data": data, "axes": ints(axes)}
            settings = {"keepdims": keep, "noop_with_empty_axes": noop}
            yield case("ReduceSumTraining", f"{np.dtype(T)} {axes} {keep} {noop}", inputs, {"reduced": T}, **settings)
    inputs = {"data": x, "indices": ints([2, 0, 2])}
    yield case("ShrunkenGather", "rows", inputs, {"output": F4})
    yield case("ShrunkenGather", "columns", {"data": x, "indices": ints([2, 0], I4)}, {"output": F4}, axis=1)
    for T in (F4, F8):
        inputs = {"shape": ints([3, 4]), "indices": ints([[0], [2], [0]]), "update": floats("a", 3, 4, dtype=T)}
        yield case("GatherNDGrad", f"{np.dtype(T)} rows", inputs, {"output": T})
        inputs = {"shape": ints([3, 4]), "indices": ints([[0, 1], [2, 3], [0, 1]]), "update": floats("b", 3, dtype=T)}
        yield case("GatherNDGrad", f"{np.dtype(T)} elements", inputs, {"output": T})
        inputs = {"shape": ints([2, 3, 4]), "indices": ints([[[1], [1]], [[0], [2]]])}
        inputs["update"] = floats("c", 2, 2, 4, dtype=T)
        yield case("GatherNDGrad", f"{np.dtype(T)} in batches", inputs, {"output": T}, batch_dims=1)


def gradients() -> Iterator[Case]:
    for T in (F4, F8):
        y = np.exp(floats("softmax", 2, 3, 4, dtype=T))
        for axis in (0, 1, 2, -1, -2):
            size = y.shape[axis if axis >= 0 else 3 + axis :]
            total = y.reshape(-1, int(np.prod(size))).sum(1)
            soft = (y.reshape(-1, int(np.prod(size))) / total[:, None]).reshape(y.shape)
            inputs = {"dY": floats("dY", 2, 3, 4, dtype=T), "Y": soft}
            yield case("SoftmaxGrad", f"{np.dtype(T)} axis {axis}", inputs, {"dX": T}, axis=axis)
            inputs = {"dY": inputs["dY"], "Y": np.log(soft)}
            yield case("LogSoftmaxGrad", f"{np.dtype(T)} axis {axis}", inputs, {"dX": T}, axis=axis)
        for a, b in (((2, 3), (2, 3)), ((2, 3), (3,)), ((1, 3), (2, 1)), ((2, 3), ())):
            inputs = {"dY": floats("g", *np.broadcast_shapes(a, b), dtype=T), "A": floats("A", *a, dtype=T)}
            inputs["B"] = np.asarray(floats("B", *b, dtype=T) + np.array(2, T))
            yield case("DivGrad", f"{np.dtype(T)} {a} {b}", inputs, {"dA": T, "dB": T})
        inputs = {"Y_grad": floats("g", 4, 6, dtype=T), "Y": floats("Y", 4, 6, dtype=T)}
        inputs |= {"scale": floats("s", 6, dtype=T) + np.array(2, T), "bias": floats("b", 6, dtype=T)}
        inputs["inv_std_var"] = np.abs(floats("i", 4, 1, dtype=T)) + np.array(1, T)
        outputs = {"X_grad": T, "scale_grad": T, "bias_grad": T}
        yield case("InvertibleLayerNormalizationGrad", f"{np.dtype(T)}", inputs, outputs, axis=-1)
    for shape, out, at, kernel in (
        ((1, 2, 4, 4), (1, 2, 2, 2), [0, 3, 8, 15, 16, 18, 24, 31], [2, 2]),
        ((1, 1, 6), (1, 1, 4), [1, 1, 3, 4], [3]),
    ):
        inputs = {"dY": floats("dY", *out), "Indices": ints(at).reshape(out)}
        yield case("MaxPoolGrad", f"{shape}", inputs, {"dX": (F4, shape)}, domain="", kernel_shape=kernel)
    for pad, include in itertools.product((0, 1), (0, 1)):
        settings = {"kernel_shape": [3, 2], "strides": [1, 2], "pads": [pad, 0, pad, 0], "count_include_pad": include}
        inputs = {"dY": floats(f"average {pad}", 2, 1, 3 + 2 * pad, 2)}
        yield case(
            "AveragePoolGrad",
            f"pad {pad}, counted {include}",
            inputs,
            {"dX": (F4, (2, 1, 5, 4))},
            domain="",
            **settings,
        )
    settings = {"kernel_shape": [3], "strides": [2]}
    yield case("AveragePoolGrad", "1-D", {"dY": floats("1-D", 2, 2, 3)}, {"dX": (F4, (2, 2, 7))}, domain="", **settings)


def losses() -> Iterator[Case]:
    x, label, n = floats("logits", 4, 3) * 3, np.eye(3, dtype=F4)[[0, 2, 1, 1]], ints([0, 2, 1, 1])
    log_prob = x - np.log(np.exp(x).sum(1, keepdims=True))
    dY, weight = np.array(0.7, F4), np.abs(floats("weight", 4))
    for reduction in ("mean", "sum"):
        outputs, how = {"Y": F4, "log_prob": F4}, {"reduction": reduction}
        yield case("SoftmaxCrossEntropy", reduction, {"logits": x, "label": label}, outputs, **how)
        inputs = {"dY": dY, "log_prob": log_prob, "label": label}
        yield case("SoftmaxCrossEntropyGrad", reduction, inputs, {"d_logits": F4}, **how)
        for w in (None, weight):
            name = f"{reduction}{'' if w is None else ', weighted'}"
            inputs = {"logits": x, "label": n} | ({} if w is None else {"weight": w})
            yield case("SparseSoftmaxCrossEntropy", name, inputs, outputs, domain="", **how)
            inputs = {"dY": dY, "log_prob": log_prob, "label": n} | ({} if w is None else {"weight": w})
            yield case("SparseSoftmaxCrossEntropyGrad", name, inputs, {"d_logits": F4}, domain="", **how)
    for reduction, ignored, weighted in itertools.product(("none", "mean", "sum"), (None, 1), (False, True)):
        scores = floats("scores", 3, 4, 2) * 2
        lp = scores - np.log(np.exp(scores).sum(1, keepdims=True))
        labels = ints([[0, 3], [1, 1], [2, 0]])
        shared = {
            "weight": np.abs(floats("classes", 4)) if weighted else None,
            "ignore_index": None if ignored is None else ints(ignored),
        }
        name = f"{reduction}, ignored {ignored}, weighted {weighted}"
        g = floats("g", 3, 2) if reduction == "none" else dY
        inputs = {"dY": g, "log_prob": lp, "label": labels, **shared}
        yield case("SoftmaxCrossEntropyLossInternalGrad", name, inputs, {"d_logits": F4}, reduction=reduction)
        inputs |= {"bias": floats("bias", 3, 4, 2)}
        name += ", bias"
        yield case("SoftmaxCrossEntropyLossInternalGrad", name, inputs, {"d_logits": F4}, reduction=reduction)
        for opset, operator in ((12, "NegativeLogLikelihoodLossInternal"), (17, "NegativeLogLikelihoodLossInternal2")):
            inputs = {"input": lp, "target": labels, **shared}
            name = f"{reduction}, ignored {ignored}, weighted {weighted}"
            yield case(operator, name, inputs, {"loss": F4}, opset=opset, reduction=reduction)


def others() -> Iterator[Case]:
    for shape in ((4, 3), (2, 3, 2, 2)):
        inputs = {"X": floats("X", *shape), **{k: floats(k, 3) + 1 for k in ("scale", "B", "mean", "variance")}}
        outputs = {"Y": F4, "running_mean": F4, "running_var": F4, "saved_mean": F4, "saved_inv_std": F4}
        inputs = {k: a.astype(F4) for k, a in inputs.items()}
        settings = {"epsilon": 1e-3, "momentum": 0.7}
        yield case("BatchNormInternal", f"training {shape}", inputs, outputs, training_mode=1, **settings)
        yield case("BatchNormInternal", f"inference {shape}", inputs, {"Y": F4}, training_mode=0, **settings)
    x = floats("quantized", 3, 5) * 40
    for zero, low, high in ((0, 0, 255), (3, -128, 127), (100, 0, 255)):
        inputs = {"input": x, "scale": np.array(0.15, F4), "zero_point": np.array(zero, F4)}
        settings = {"quant_min": low, "quant_max": high}
        yield case("FakeQuant", f"{zero} {low} {high}", inputs, {"output": F4, "mask": BOOL}, **settings)
    yield case("FakeQuantGrad", "mask", {"dY": x, "gradient_mask": x > 0}, {"dX": F4})
    for inputs, outputs, operator, settings in cuda_only(x):
        yield case(operator, "any", inputs, outputs, **settings)


def cuda_only(x: np.ndarray) -> Iterator[tuple[Any, Any, str, Any]]:
    """Operators that should have no CPU kernel: if one has, it turns up in the file and not in the report."""
    bits = np.array([5], np.uint32)
    g, image = floats("g", 1, 1, 4, 4), floats("image", 1, 1, 2, 2)
    yield {"S": np.array(2, F4), "a": x}, {"y": F4}, "MixedPrecisionScale", {"to": TensorProto.FLOAT}
    yield {"X": x}, {"Y": BOOL}, "IsFinite", {}
    yield {"X": x}, {"Y": BOOL}, "IsAllFinite", {}
    yield {"X": x > 0}, {"Y": BOOL}, "All", {}
    yield {"input": x, "a": ints([2, 3]), "b": ints([9])}, {"y": F4, "z": F4}, "View", {}
    yield {"dy": x, "mask": bits}, {"dx": F4}, "BitmaskDropoutGrad", {}
    yield {"data": x}, {"y": F4, "mask": np.uint32}, "BitmaskDropout", {}
    yield {"data": x, "bias": x}, {"y": F4, "mask": BOOL}, "BiasDropout", {}
    yield {"data": x, "bias": x}, {"y": F4, "mask": np.uint32}, "BitmaskBiasDropout", {}
    outputs = {"y": F4, "mask": BOOL, "softmax": F4}
    yield {"data": x, "bias": x}, outputs, "BiasSoftmaxDropout", {"is_inner_broadcast": 0}
    yield {"dy": x, "mask": x > 0, "softmax_y": x}, {"dx": F4}, "SoftmaxDropoutGrad", {"axis": 1}
    yield {"dY": g, "X": image}, {"dX": F4}, "ResizeGrad", {"mode": "linear"}
    yield {"dY": g, "X": g, "W": image[:, :, :1, :1]}, {"dX": F4, "dW": F4}, "ConvTransposeGrad", {}
    yield {"input": x, "indices": ints([0, 1, 5]), "dims": ints([2, 3])}, {"y": F4}, "PadAndUnflatten", {}
    yield {"input": x, "indices": ints([0, 7])}, {"y": F4, "dims": I8}, "FlattenAndUnpad", {}
    yield {"a": x, "b": x}, {"y": F4}, "ScaledSum", {"scale_0": 1.0, "scale_1": 2.0}
    yield {"a": x}, {"y": F4, "z": F4}, "BatchScale", {"scale_0": 1.0, "scale_1": 2.0}
    yield {"X": x}, {"Y": BOOL}, "GistBinarizeEncoder", {}
    yield {"X": x > 0}, {"Y": F4}, "GistBinarizeDecoder", {"to": TensorProto.FLOAT}
    yield {"X": x}, {"Y": np.uint8}, "GistPack1Encoder", {}
    yield {"X": x}, {"Y": np.float16}, "GistPack16Encoder", {}
    inputs = {"u": None, "l": None, "n": None, "R": np.array(1, F4), "s": ints([1]), "w": x, "g": x, "m": x, "v": x}
    yield inputs, {"t": I8, "w2": F4, "g2": F4, "m2": F4, "v2": F4}, "LambOptimizer", {}


def run(model: onnx.ModelProto, given: dict[str, Any]) -> list[Any]:
    """On one thread: the same bits every time. Copies go in, since kernels write into what they get."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    copies = {n: [t.copy() for t in a] if isinstance(a, list) else a.copy() for n, a in given.items()}
    return session.run(None, copies)


def attempt(model: onnx.ModelProto, given: dict[str, Any]) -> list[Any] | str:
    """The outputs, or why there are none; in a process of its own, because some cases kill it."""
    receiver, sender = multiprocessing.Pipe(duplex=False)

    def child() -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            sender.send(run(model, given))
        except Exception as error:
            sender.send(sentence(str(error)))

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        process.join()
        return f"the process dies, exit code {process.exitcode}"


class Store:
    """Arrays end to end, by type."""

    def __init__(self) -> None:
        self.parts: dict[str, list[np.ndarray]] = {}

    def put(self, given: Any) -> list[Any]:
        """Where an array is now, or each of a list."""
        if isinstance(given, list):
            return [self.put(array) for array in given]
        array = np.asarray(given)
        parts = self.parts.setdefault(array.dtype.name, [])
        parts.append(array.ravel())
        return [array.dtype.name, list(array.shape), sum(part.size for part in parts[:-1])]

    def write(self, file: Path, index: list[dict[str, Any]], cannot: dict[str, str]) -> None:
        assert len({entry["name"] for entry in index}) == len(index), "two cases of one name"
        np.savez_compressed(file, **{name: np.concatenate(parts) for name, parts in self.parts.items()})
        lines = ",\n".join(json.dumps(entry) for entry in index)
        peer = f"onnxruntime-training {onnxruntime.__version__}"
        file.with_suffix(".json").write_text(
            f'{{"peer": "{peer}", "cases": [\n{lines}\n], "peer_cannot": {json.dumps(cannot, indent=1)}}}\n'
        )


def main() -> None:
    assert onnxruntime.__version__ == "1.19.2", onnxruntime.__version__
    store, index, cannot = Store(), [], {}
    makers = accumulation(), optimizers(), rearranging(), gradients(), losses(), others()
    for name, model, given in itertools.chain(*makers):
        result = attempt(model, given)
        if isinstance(result, str):
            cannot[name] = result
            continue
        outputs = zip([o.name for o in model.graph.output], result, strict=True)
        index.append({
            "name": name,
            "model": store.put(np.frombuffer(model.SerializeToString(), np.uint8)),
            "inputs": {n: store.put(a) for n, a in given.items()},
            "outputs": {n: store.put(a) for n, a in outputs},
        })  # fmt: skip
    store.write(FILE, index, cannot)
    print(len(index), "cases; could not run:")
    for name, reason in cannot.items():
        print(f"{name:60} {reason[:120]}")


if __name__ == "__main__":
    main()
