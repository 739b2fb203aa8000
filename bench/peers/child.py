"""The other end of process.py: reads messages from stdin, answers on stdout; runs in .venv-peer as well."""

import os
import pickle
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from onnx import TensorProto, helper

from bench.clock import timed, wait_until_idle
from bench.training_steps import step_of

ELEMENT_TYPES = {
    "float16": TensorProto.FLOAT16,
    "float32": TensorProto.FLOAT,
    "float64": TensorProto.DOUBLE,
    "int32": TensorProto.INT32,
    "int64": TensorProto.INT64,
}

OTHER_DATA = 1 << 27  # bytes, more than caches hold


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
    """Holds one call at a time, ready to run."""

    def __init__(self) -> None:
        self._call: Callable[[], Any] | None = None
        self._other_data = np.zeros(OTHER_DATA, np.uint8)

    def version(self) -> str:
        return str(onnxruntime.__version__)

    def imported_from(self) -> Path:
        """The folder of the package onnxgrad."""
        import onnxgrad

        return Path(onnxgrad.__file__).resolve().parents[1]

    def prepare_node(self, **node: Any) -> list[Any]:
        """What a model of one node computes."""
        self._call = None
        model = OneNode(node)
        model.run()
        self._call = model.run
        return model.results()

    def prepare_call(self, function: str, arguments: list[Any], attributes: dict[str, Any], threads: int) -> None:
        """One of onnxgrad's functions on arrays."""
        import onnxgrad

        onnxgrad.set_num_threads(threads)
        call = getattr(onnxgrad, function)
        self._call = lambda: call(*arguments, **attributes)
        self._call()

    def prepare_training(self, steps: int, **what: Any) -> list[float]:
        """The losses of the first so many training steps."""
        self._call = None
        step = self._call = step_of(**what)
        return [step() for _ in range(steps)]

    def prepare_floor(self, what: str, threads: int) -> None:
        """A large product or a large copy."""
        from bench.step_floor import call_of

        self._call = None
        self._call = call_of(what, threads)
        self._call()

    def export_model(self, **what: Any) -> None:
        """The file of an architecture."""
        from bench import models

        models.export(**what)

    def prepare_model(self, steps: int, **what: Any) -> tuple[float, list[float]]:
        """Seconds to build an architecture's training step, and the losses of the first so many steps."""
        from bench import models

        self._call = None
        seconds, step = models.step_of(**what)
        self._call = step
        return seconds, [step() for _ in range(steps)]

    def run(self, calls: int) -> list[float]:
        """Seconds of so many calls on end."""
        assert self._call is not None
        seconds = timed(self._call, calls)
        wait_until_idle()
        return seconds

    def run_around(self, calls: int, pause: str, seconds: float, then: int) -> tuple[list[float], list[float]]:
        """Seconds of so many calls on end, and of some more after a pause of one of three kinds."""
        assert self._call is not None
        before = timed(self._call, calls)
        until = time.perf_counter() + seconds
        if pause == "asleep" and seconds:
            time.sleep(seconds)
        while pause == "busy" and time.perf_counter() < until:
            pass
        if pause == "other data":
            self._other_data += 1
        after = timed(self._call, then)
        wait_until_idle()
        return before, after


def main() -> None:
    # Answers have stdout to themselves; whatever a library prints goes to stderr.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    onnxruntime.set_default_logger_severity(4)
    server = Server()
    while True:
        try:
            method, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            reply = {"result": getattr(server, method)(**arguments)}
        except Exception as error:  # a peer's refusal is a result, and the next message may fare better
            reply = {"cannot": " ".join(str(error).split())}
        pickle.dump(reply, answers)
        answers.flush()


if __name__ == "__main__":
    main()
