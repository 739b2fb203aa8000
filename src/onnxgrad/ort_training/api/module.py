"""Module: runs the training and the evaluation model of artifacts in stock onnxruntime."""

import ctypes
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from onnxgrad.cpu.core.memory import give_back
from onnxgrad.graph.files import save
from onnxgrad.ort_training.api.checkpoint_state import CheckpointState
from onnxgrad.ort_training.graphs import Graph, evaluation_graph, load_evaluation, training_graph
from onnxgrad.passes.draft import Draft
from onnxgrad.passes.finish import drop_dead
from onnxgrad.passes.infer import infer
from onnxgrad.runtime.interrupts import run
from onnxgrad.tensor_types import Array
from onnxgrad.train.batches import BatchChecker
from onnxgrad.train.devices import Device, device_of
from onnxgrad.train.session import Session

STRING = "tensor(string)"


class Module:
    """A model that is trained and evaluated on batches; `training` says which of both a call does.

    `train_model_uri` and `eval_model_uri` are paths of artifacts, `state` holds the parameters, `device` is "cpu",
    "cuda" or "cuda:1". `session_options`, onnxruntime's, are used for both models, with our operators added.
    """

    training: bool

    def __init__(
        self,
        train_model_uri: str | os.PathLike[str],
        state: CheckpointState,
        eval_model_uri: str | os.PathLike[str] | None = None,
        device: str = "cpu",
        session_options: Any = None,
    ) -> None:
        if not isinstance(state, CheckpointState):
            raise TypeError(f"Module: state is a {type(state).__name__}, expected a CheckpointState")
        self.training = True
        kind, _, number = device.partition(":")
        self._device: Device = device_of(kind, int(number) if number else None, "Module")
        self._state = state
        memory = state._memory
        known = memory.file.parameters
        on_cpu = kind == "cpu"
        self._graph = training_graph(train_model_uri, known, on_cpu, self._device.own_products)
        self._expect_fitting()
        self._buffers = memory.place(self._graph.shapes, self._device)
        self._chunks = self._buffers.chunks({part.name: 0 for part in self._buffers.slices})
        self._accumulates = False  # whether the next gradients are added to those that are there
        self._more: Any = None  # where gradients go that are to be added
        self._following = {
            out: self._device.from_numpy(np.zeros(self._graph.shapes[name], known[name].dtype))
            for name, out in self._graph.statistics.items()
        }
        # Outputs of one number, as losses are, are bound: so a step neither binds nor asks for anything that stays.
        self._numbers = _numbers(self._graph)
        self._bound_to: Any = self._buffers.grad
        self._train_session = _Session(
            self._graph, self._inputs(self._graph), self._outputs(), self._device, session_options
        )
        self._eval_path = None if eval_model_uri is None else Path(eval_model_uri)
        self._eval_graph: Graph | None = None
        if self._eval_path is not None:
            self._eval_graph = evaluation_graph(self._eval_path, known, on_cpu)
            inputs = self._inputs(self._eval_graph)
            self._eval_session = _Session(self._eval_graph, inputs, {}, self._device, session_options)
        give_back()  # the graphs that sessions were made from

    def _expect_fitting(self) -> None:
        """Raises one sentence if the checkpoint does not fit the training model."""
        file, graph = self._state._memory.file, self._graph
        for name, parameter in file.parameters.items():
            if parameter.requires_grad and name not in graph.shapes:
                raise ValueError(
                    f"Module: the training model lacks the parameter {name!r}, which the checkpoint has to be trained: "
                    "they are not of the same artifacts"
                )
        for name, shape in graph.shapes.items():
            parameter = file.parameters[name]
            if not file.nominal and parameter.shape != shape:
                raise ValueError(
                    f"Module: the checkpoint has the parameter {name!r} of shape {list(parameter.shape)}, the training "
                    f"model has {list(shape)}: they are not of the same artifacts"
                )
            if parameter.requires_grad and name not in graph.gradients:
                raise ValueError(f"Module: the training model has no gradient of the parameter {name!r}")

    def _inputs(self, graph: Graph) -> dict[str, Any]:
        known = self._state._memory.file.parameters
        return {name: known[name].data for name in graph.shapes}

    def _outputs(self) -> dict[str, Any]:
        """Where the training session writes to."""
        views = self._buffers.views(self._bound_to)
        gradients = {out: views[name] for name, out in self._graph.gradients.items() if name in views}
        return {**gradients, **self._following, **self._numbers}

    def __call__(self, *user_inputs: Any) -> Any:
        """Runs a batch, and returns the model's outputs, one alone or a tuple.

        In training the gradients are computed as well, and added to those that are there unless `lazy_reset_grad` was
        called. Inputs are arrays or OrtValues; results are OrtValues if all inputs are.
        """
        if not self.training and self._eval_graph is None:
            raise RuntimeError("Module: no evaluation model was given, which eval() needs: pass eval_model_uri")
        self._expect_parameters()
        session = self._train_session if self.training else self._eval_session
        given = session.named(user_inputs)
        with self._device.at_work():
            if self.training:
                self._bind_gradients()
            values = session.run_values(given)
            if self.training:
                self._finish_step()
        as_values = all(hasattr(value, "_ortvalue") for value in user_inputs)
        found = [self._result(name, values, as_values) for name in self._current().outputs]
        return found[0] if len(found) == 1 else tuple(found)

    def _result(self, name: str, values: Mapping[str, Any], as_value: bool) -> Any:
        """An output of the last call, as an OrtValue or as an array."""
        if name in values:
            return values[name] if as_value else values[name].numpy()
        from onnxruntime import OrtValue

        found = self._numbers[name].copy()
        return OrtValue.ortvalue_from_numpy(found) if as_value else found

    def _bind_gradients(self) -> None:
        """Has the session write gradients to their place, or beside it if they are to be added."""
        if self._accumulates and self._more is None:
            self._more = self._buffers.new()
        target = self._more if self._accumulates else self._buffers.grad
        if target is not self._bound_to:
            self._bound_to = target
            self._train_session.bind_outputs(self._outputs())

    def _finish_step(self) -> None:
        if self._accumulates:
            self._device.run("add", self._chunks, self._buffers.grad, self._more)
        self._accumulates = True
        known = self._state._memory.file.parameters
        for name, out in self._graph.statistics.items():
            self._device.copy(known[name].data, self._following[out])

    def _expect_parameters(self) -> None:
        if self._state._memory.file.nominal:
            raise RuntimeError(
                "Module: the checkpoint is nominal: load all parameters first, by copy_buffer_to_parameters"
            )

    def train(self, mode: bool = True) -> "Module":
        """Lets calls train, or evaluate if `mode` is false; returns the module."""
        self.training = mode
        return self

    def eval(self) -> "Module":
        """Lets calls evaluate; returns the module."""
        return self.train(False)

    def lazy_reset_grad(self) -> None:
        """Has the next call in training overwrite the gradients instead of adding to them."""
        self._accumulates = False

    def get_contiguous_parameters(self, trainable_only: bool = False) -> Any:
        """A copy of all parameters, or those to train, one after the other in the order of the model's inputs.

        It is onnxruntime's OrtValue, the inner one as in 1.19.2, on the module's device.
        """
        from onnxruntime import OrtValue

        self._expect_parameters()
        memory = self._state._memory
        parts = [memory.to_numpy(memory.file.parameters[name].data).reshape(-1) for name in self._names(trainable_only)]
        for part in parts:
            if part.dtype != np.float32:
                raise TypeError(f"Module: contiguous parameters are float32, and one of the parameters is {part.dtype}")
        if self._device.name != "cpu":
            number = memory.file.parameters[self._names(trainable_only)[0]].data.device.index or 0  # type: ignore[union-attr]
            return OrtValue.ortvalue_from_numpy(np.concatenate(parts), self._device.name, number)._ortvalue
        value = OrtValue.ortvalue_from_shape_and_type([sum(map(len, parts))], np.float32)
        np.concatenate(parts, out=_memory_of(value))
        return value._ortvalue

    def _names(self, trainable_only: bool) -> list[str]:
        known = self._state._memory.file.parameters
        return [name for name in self._graph.shapes if known[name].requires_grad or not trainable_only]

    def get_parameters_size(self, trainable_only: bool = True) -> int:
        """How many numbers the parameters to train have, or all parameters."""
        return sum(int(np.prod(self._graph.shapes[name])) for name in self._names(trainable_only))

    def copy_buffer_to_parameters(self, buffer: Any, trainable_only: bool = True) -> None:
        """Sets parameters to what get_contiguous_parameters gave, of this module or of another one of its kind.

        A module with a nominal checkpoint gets its parameters in this way, all of them.
        """
        memory = self._state._memory
        if trainable_only and memory.file.nominal:
            raise ValueError("Module: a nominal checkpoint needs all parameters: pass trainable_only=False")
        numbers = buffer.numpy() if hasattr(buffer, "numpy") else np.asarray(buffer)
        size = self.get_parameters_size(trainable_only)
        if numbers.dtype != np.float32 or numbers.size != size:
            raise ValueError(
                f"Module: the buffer has {numbers.size} numbers of {numbers.dtype}, expected {size} of float32"
            )
        numbers, at = numbers.reshape(-1), 0
        for name in self._names(trainable_only):
            shape = self._graph.shapes[name]
            stop = at + int(np.prod(shape))
            memory.write(name, numbers[at:stop].reshape(shape))
            at = stop
        memory.file.nominal = False

    def export_model_for_inferencing(
        self, inference_model_uri: str | os.PathLike[str], graph_output_names: Sequence[str]
    ) -> None:
        """Writes the evaluation model up to the values that are named, with the parameters as they are now."""
        self._expect_parameters()
        if self._eval_path is None:
            raise RuntimeError(
                "Module: no evaluation model was given, which the export is made of: pass eval_model_uri"
            )
        if not graph_output_names:
            raise ValueError("Module: graph_output_names is empty, expected names of values of the model")
        memory, model = self._state._memory, load_evaluation(self._eval_path)
        graph = model.graph
        values = {str(v.name): v for v in (*graph.inputs, *(v for node in graph for v in node.outputs))}
        for name in graph_output_names:
            if name not in values:
                raise ValueError(f"Module: the evaluation model has no value {name!r} to be an output")
        graph.outputs[:] = [values[name] for name in graph_output_names]
        Draft(model, "Module").run([drop_dead, infer])
        for value in list(graph.inputs):
            parameter = memory.file.parameters.get(str(value.name))
            if parameter is not None or not (value.uses() or value.is_graph_output()):
                graph.inputs.remove(value)
            if parameter is not None and value.uses():
                value.const_value = ir.Tensor(np.array(memory.to_numpy(parameter.data)), name=value.name)
                graph.register_initializer(value)
        path = Path(inference_model_uri)
        save(model, path, None if memory.file.apart else path)

    def input_names(self) -> list[str]:
        """The names of what a call takes, in training or in evaluation, whichever is on."""
        return list(self._current().inputs)

    def output_names(self) -> list[str]:
        """The names of what a call returns, in training or in evaluation, whichever is on."""
        return list(self._current().outputs)

    def _current(self) -> Graph:
        graph = self._graph if self.training else self._eval_graph
        if graph is None:
            raise RuntimeError("Module: no evaluation model was given: pass eval_model_uri")
        return graph


class _Described(NamedTuple):
    """An input of a session, whose dimensions have no names: onnxruntime does not compare those either."""

    name: str
    type: str
    shape: list[int | None]


class _Session(Session):
    """A session whose inputs come one after the other."""

    def __init__(
        self, graph: Graph, inputs: Mapping[str, Any], outputs: Mapping[str, Any], device: Device, options: Any
    ) -> None:
        self._names, self._strings = graph.inputs, set[str]()
        super().__init__(graph.model, inputs, outputs, device, options=options, caller="Module")

    def _checker(self, free_inputs: Sequence[Any]) -> BatchChecker:
        self._strings = {i.name for i in free_inputs if i.type == STRING}
        numbers = [
            _Described(i.name, i.type, [d if isinstance(d, int) else None for d in i.shape])
            for i in free_inputs
            if i.name not in self._strings
        ]
        return BatchChecker(numbers, on_gpu=self._device.name == "cuda")

    def run_values(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        if not self._strings:
            return super().run_values(arrays)
        return self._run_unbound(arrays)

    def _run_unbound(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """The same without binding anything, as onnxruntime binds no strings: gradients are copied."""
        from onnxruntime import OrtValue

        read = {name: a if isinstance(a, np.ndarray) else self._device.to_numpy(a) for name, a in self._read.items()}
        given = {name: a.numpy() if hasattr(a, "_ortvalue") else a for name, a in arrays.items()}
        names = [*self._bound, *self._free]
        found = dict(zip(names, run(self._session.run, names, {**read, **given}), strict=True))
        for name in self._bound:
            self._device.copy(self._written[name], found[name])
        return {name: OrtValue.ortvalue_from_numpy(found[name]) for name in self._free}

    def named(self, given: Sequence[Any]) -> dict[str, Any]:
        """The inputs of a call by name, as arrays that fit, or as the OrtValues that they are."""
        if len(given) != len(self._names):
            raise ValueError(f"Module: the call has {len(given)} inputs, expected {', '.join(self._names)}")
        return dict(self._arrays(given))

    def _arrays(self, given: Sequence[Any]) -> Iterator[tuple[str, Any]]:
        for name, value in zip(self._names, given, strict=True):
            if hasattr(value, "_ortvalue"):
                yield name, value
            elif name in self._strings:
                yield name, np.asarray(value, object)  # as onnxruntime wants its strings
            else:
                yield name, self._check.one(name, value)


def _numbers(graph: Graph) -> dict[str, Array]:
    """An array for each of the user's outputs that is known to be one number."""
    found = {}
    for value in graph.model.graph.outputs:
        if value.name in graph.outputs and value.dtype is not None and value.shape is not None and not len(value.shape):
            found[str(value.name)] = np.zeros((), value.dtype.numpy())
    return found


def _memory_of(value: Any) -> Array:
    """The numbers of an OrtValue of float32 on the CPU, to be written."""
    (size,) = value.shape()
    address: Any = (ctypes.c_float * size).from_address(value.data_ptr())
    return np.frombuffer(address, np.float32)
