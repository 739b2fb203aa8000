"""CheckpointState: parameters, gradients, the optimizer's state and properties, shared by Module and Optimizer."""

import dataclasses
import numbers
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrad.ort_training.checkpoint_file import Checkpoint, OptimizerGroup, read_checkpoint, write_checkpoint
from onnxgrad.tensor_types import Array
from onnxgrad.train.buffers import Buffers
from onnxgrad.train.devices import Cpu, Device

INT64 = np.iinfo(np.int64)
TRAINED = {np.dtype(np.float32), np.dtype(np.float64)}


class Memory:
    """Where the arrays of a state are: as they were read until a Module places them on its device.

    The parameters to train are then views of one array, and so are their gradients.
    """

    def __init__(self, file: Checkpoint) -> None:
        self.file = file
        self.device: Device = Cpu()
        self.buffers: Buffers | None = None
        self.gradients: dict[str, Any] = {}

    def place(self, shapes: Mapping[str, tuple[int, ...]], device: Device) -> Buffers:
        """Puts the parameters of these shapes on a device; gradients begin as zeros."""
        known = self.file.parameters
        trained = {name: shape for name, shape in shapes.items() if known[name].requires_grad}
        kinds = {np.dtype(known[name].dtype) for name in trained} or {np.dtype(np.float32)}
        if len(kinds) > 1 or not kinds <= TRAINED:
            found = ", ".join(sorted(map(str, kinds)))
            raise TypeError(f"Module: parameters to train are of {found}, expected all of float32 or all of float64")
        fits = self.buffers is not None and self.device.name == device.name
        if not fits or {s.name: s.shape for s in self.buffers.slices} != trained:  # type: ignore[union-attr]
            buffers = Buffers(trained, kinds.pop(), device)
            views = buffers.views(buffers.data)
            for name, shape in shapes.items():
                view = views.get(name)
                if view is None:
                    view = device.from_numpy(np.zeros(shape, known[name].dtype))
                if known[name].data is not None:
                    device.copy(view, self.to_numpy(known[name].data))
                known[name].data, known[name].shape = view, shape
            self.device, self.buffers = device, buffers
        assert self.buffers is not None
        self.buffers.grad[...] = 0
        self.gradients = self.buffers.views(self.buffers.grad)
        return self.buffers

    def to_numpy(self, array: Any) -> Array:
        """An array of the device, in the CPU's memory."""
        return array if isinstance(array, np.ndarray) else self.device.to_numpy(array)

    def write(self, name: str, value: Any) -> None:
        """Gives a parameter other values."""
        target, given = self.file.parameters[name].data, np.asarray(value)
        assert target is not None
        wanted = np.dtype(self.file.parameters[name].dtype)
        if given.shape != tuple(target.shape) or given.dtype != wanted:
            raise ValueError(
                f"the parameter {name!r} is {wanted}{list(target.shape)}, and cannot become "
                f"{given.dtype}{list(given.shape)}"
            )
        self.device.copy(target, given)

    def on_host(self, include_optimizer_state: bool) -> Checkpoint:
        """What a file is to hold."""
        parameters = {
            name: dataclasses.replace(p, data=None if p.data is None or self.file.nominal else self.to_numpy(p.data))
            for name, p in self.file.parameters.items()
        }
        groups = {
            name: OptimizerGroup(
                group.step,
                group.initial_lr,
                {p: {m: self.to_numpy(a) for m, a in of_one.items()} for p, of_one in group.momenta.items()},
            )
            for name, group in self.file.groups.items()
        }
        return dataclasses.replace(self.file, parameters=parameters, groups=groups if include_optimizer_state else {})


class Parameter:
    """A weight of a model, by its name; `data` and `grad` are copies, and setting `data` changes the weight."""

    def __init__(self, name: str, memory: Memory) -> None:
        self._name, self._memory = name, memory

    @property
    def name(self) -> str:
        return self._name

    @property
    def data(self) -> Array:
        return np.array(self._memory.to_numpy(self._memory.file.parameters[self._name].data))

    @data.setter
    def data(self, value: Array) -> None:
        self._memory.write(self._name, value)

    @property
    def grad(self) -> Array | None:
        """None if it is not trained, or nothing trains it yet."""
        found = self._memory.gradients.get(self._name)
        return None if found is None else np.array(self._memory.to_numpy(found))

    @property
    def requires_grad(self) -> bool:
        return self._memory.file.parameters[self._name].requires_grad

    def __repr__(self) -> str:
        return f"Parameter(name={self.name}, requires_grad={self.requires_grad})"


class Parameters:
    """The weights by name, in alphabetical order; iterating gives pairs of name and Parameter."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def __getitem__(self, name: str) -> Parameter:
        self._expect(name)
        if self._memory.file.nominal:
            raise RuntimeError(
                f"the checkpoint is nominal and does not hold the parameter {name!r}: load all parameters first, by "
                "Module.copy_buffer_to_parameters"
            )
        return Parameter(name, self._memory)

    def __setitem__(self, name: str, value: Array) -> None:
        self._expect(name)
        if self._memory.file.nominal:
            raise RuntimeError(
                f"the checkpoint is nominal, so the parameter {name!r} cannot be set alone: load all "
                "parameters first, by Module.copy_buffer_to_parameters"
            )
        self._memory.write(name, value)

    def _expect(self, name: str) -> None:
        if name not in self:
            raise KeyError(f"the checkpoint has no parameter {name!r}")

    def __contains__(self, name: object) -> bool:
        return name in self._memory.file.parameters

    def __iter__(self) -> Iterator[tuple[str, Parameter]]:
        for name in sorted(self._memory.file.parameters):
            yield name, self[name]

    def __len__(self) -> int:
        return len(self._memory.file.parameters)

    def __repr__(self) -> str:
        return f"Parameters({sorted(self._memory.file.parameters)})"


class Properties:
    """Whole numbers, float32 numbers and strings that are saved with a checkpoint, by name."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def __getitem__(self, name: str) -> int | float | str:
        if name not in self:
            raise KeyError(f"the checkpoint has no property {name!r}")
        return self._memory.file.properties[name]

    def __setitem__(self, name: str, value: int | float | str) -> None:
        self._memory.file.properties[name] = _as_property(name, value)

    def __contains__(self, name: object) -> bool:
        return name in self._memory.file.properties

    def __iter__(self) -> Iterator[tuple[str, int | float | str]]:
        yield from sorted(self._memory.file.properties.items())

    def __len__(self) -> int:
        return len(self._memory.file.properties)

    def __repr__(self) -> str:
        return f"Properties({sorted(self._memory.file.properties)})"


def _as_property(name: str, value: Any) -> int | float | str:
    """The value as a file keeps it."""
    if isinstance(value, str):
        return value
    if isinstance(value, numbers.Integral) and INT64.min <= int(value) <= INT64.max:
        return int(value)
    if isinstance(value, numbers.Real):
        return float(np.float32(value))
    raise TypeError(f"the property {name!r} is a {type(value).__name__}, expected an int, a float or a str")


class CheckpointState:
    """The state of training, in memory; `load_checkpoint` makes one, and `save_checkpoint` writes it."""

    def __init__(self, state: Checkpoint) -> None:
        if not isinstance(state, Checkpoint):
            raise TypeError(
                f"CheckpointState: state is a {type(state).__name__}: CheckpointState.load_checkpoint makes one"
            )
        self._memory = Memory(state)
        self._parameters, self._properties = Parameters(self._memory), Properties(self._memory)

    @classmethod
    def load_checkpoint(cls, checkpoint_uri: str | os.PathLike[str]) -> "CheckpointState":
        """The state in a file, complete or nominal."""
        return cls(read_checkpoint(Path(checkpoint_uri)))

    @classmethod
    def save_checkpoint(
        cls, state: "CheckpointState", checkpoint_uri: str | os.PathLike[str], include_optimizer_state: bool = False
    ) -> None:
        """Writes parameters and properties, and the momenta and number of updates if asked for.

        The file is there, or replaced, only once it is complete.
        """
        write_checkpoint(Path(checkpoint_uri), state._memory.on_host(include_optimizer_state))

    @property
    def parameters(self) -> Parameters:
        """The weights."""
        return self._parameters

    @property
    def properties(self) -> Properties:
        """What else is saved."""
        return self._properties
