"""The other end of ort_training_peer.py: runs in .venv-peer, reads messages from stdin, answers on stdout."""

import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from onnx import TensorProto, helper

from bench.training_steps import ort_training_step
from bench.turn import take_turn, wait_until_idle

ELEMENT_TYPES = {
    "float16": TensorProto.FLOAT16,
    "float32": TensorProto.FLOAT,
    "float64": TensorProto.DOUBLE,
    "int32": TensorProto.INT32,
    "int64": TensorProto.INT64,
}


class OneNode:
    """A model of one node with its inputs and preallocated outputs bound: the fastest way to run it."""

    def __init__(self, message: dict[str, Any]) -> None:
        inputs = [(name, array) for name, array in message["inputs"] if array is not None]
        outputs = message["outputs"]
        for dtype in [str(array.dtype) for _, array in inputs] + [dtype for _, _, dtype in outputs]:
            if dtype not in ELEMENT_TYPES:
                raise ValueError(f"onnxruntime-training 1.19.2 takes no NumPy array of {dtype}")
        node = helper.make_node(
            message["operator"],
            ["" if array is None else name for name, array in message["inputs"]],
            [name for name, _, _ in outputs],
            domain=message["domain"],
            **message["attributes"],
        )
        graph = helper.make_graph(
            [node],
            "one_node",
            [helper.make_tensor_value_info(n, ELEMENT_TYPES[str(a.dtype)], a.shape) for n, a in inputs],
            [helper.make_tensor_value_info(n, ELEMENT_TYPES[d], s) for n, s, d in outputs],
        )
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
        options = onnxruntime.SessionOptions()
        if message["registers"]:
            import onnxgrad

            onnxgrad.register(options)
        options.intra_op_num_threads = message["threads"]
        self._session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        self._binding = self._session.io_binding()
        # The values only point at the arrays: both must live as long as the binding.
        self._inputs = [array for _, array in inputs]
        self._outputs = [np.ones(shape, dtype) for _, shape, dtype in outputs]
        for name, array in inputs:
            self._binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(array))
        for (name, _, _), array in zip(outputs, self._outputs, strict=True):
            self._binding.bind_ortvalue_output(name, onnxruntime.OrtValue.ortvalue_from_numpy(array))

    def run(self) -> None:
        self._session.run_with_iobinding(self._binding)

    def results(self) -> list[Any]:
        return [value.numpy() for value in self._binding.get_outputs()]


class Server:
    """Holds one model at a time, ready to run."""

    def __init__(self) -> None:
        self._run: Callable[[], Any] | None = None

    def answer(self, message: dict[str, Any]) -> Any:
        if message["do"] == "version":
            return onnxruntime.__version__
        if message["do"] == "prepare":
            self._run = None
            model = OneNode(message)
            model.run()
            self._run = model.run
            return model.results()
        if message["do"] == "prepare training":
            self._run = None
            self._run = ort_training_step(Path(message["model"]), message["batch"], message["threads"])
            return [self._run() for _ in range(message["steps"])]
        assert self._run is not None
        turn = take_turn(self._run, message["seconds"])
        wait_until_idle()
        return tuple(turn)


def main() -> None:
    # Answers have stdout to themselves; whatever a library prints goes to stderr.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    onnxruntime.set_default_logger_severity(4)
    server = Server()
    while True:
        try:
            message = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            reply = {"result": server.answer(message)}
        except Exception as error:  # a peer's refusal is a result, and the next message may fare better
            reply = {"cannot": " ".join(str(error).split())}
        pickle.dump(reply, answers)
        answers.flush()


if __name__ == "__main__":
    main()
