"""Optimizers: SGD, Adam, AdamW, Adagrad, RMSprop and Lamb, as in PyTorch where it has them.

An optimizer is a small value: its settings, and `groups`, other settings for parameters whose names match a pattern.
Its state for a model is an `OptimizerState`, which the trainer makes with `optimizer.start(buffers)`.
"""

import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import numpy as np

from onnxgrad.tensor_types import Array
from onnxgrad.train.arithmetic import square_root
from onnxgrad.train.buffers import Buffers
from onnxgrad.train.distributed.ranks import Ranks

Groups = Mapping[str, Mapping[str, Any]]
AVERAGE = "average"  # a slot that is no optimizer's: the moving average of the parameters
FACTOR = "lr_factor"  # a setting that only groups have


@dataclass(frozen=True)
class Optimizer:
    """The settings of all optimizers: the learning rate `lr` and `weight_decay`.

    `groups` maps patterns of parameter names to other settings, `{"*.bias": {"weight_decay": 0.0}}`; the first match
    wins. `lr_factor` in a group multiplies the learning rate.
    """

    slots: ClassVar[tuple[str, ...]] = ()  # arrays kept for every parameter
    lr: float = 1e-3
    weight_decay: float = 0.0
    groups: Groups = field(default_factory=dict, kw_only=True)

    def __post_init__(self) -> None:
        settings = {f.name for f in fields(self)} - {"groups"} | {FACTOR}
        if not isinstance(self.groups, Mapping):
            raise TypeError(f"{self.name}: groups is {self.groups!r}, expected settings by pattern, as a dict of dicts")
        for pattern, changed in self.groups.items():
            for name in changed:
                if name not in settings:
                    expected = ", ".join(sorted(settings))
                    raise ValueError(f"{self.name}: groups[{pattern!r}] has {name!r}, expected some of {expected}")
        for numbers in ({}, *self.groups.values()):
            self._check({**self.numbers, **numbers})

    def _check(self, numbers: Mapping[str, Any]) -> None:
        for name in ("lr", FACTOR, "weight_decay", "eps", "momentum", "alpha"):
            if name in numbers and not (isinstance(numbers[name], (int, float)) and 0 <= numbers[name] < math.inf):
                raise ValueError(f"{self.name}: {name} is {numbers[name]!r}, expected a number of at least 0")
        betas = numbers.get("betas", (0, 0))
        if not (isinstance(betas, Sequence) and len(betas) == 2 and all(0 <= beta < 1 for beta in betas)):
            raise ValueError(f"{self.name}: betas are {betas!r}, expected two numbers of at least 0 and under 1")

    @property
    def name(self) -> str:
        """For messages."""
        return type(self).__name__

    @property
    def numbers(self) -> dict[str, Any]:
        """Its settings, without the groups."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "groups"}

    def start(
        self,
        buffers: Buffers,
        ranks: Ranks | None = None,
        factors: Mapping[str, float] | None = None,
        decay: float | None = None,
    ) -> "OptimizerState":
        """The state before the first step; with `ranks`, of this rank's shard of the parameters alone.

        `factors` of the learning rate are by name of parameter. With `decay` there is a moving average of parameters.
        """
        return OptimizerState(self, buffers, ranks, factors or {}, decay)

    def hyper(self, numbers: Mapping[str, Any], lr: Any, step: Any) -> tuple[Any, ...]:
        """The hyperparameters as the kernel takes them: a row of numbers, of float64 values where these are of a graph.

        `lr` is the learning rate and `step` the number of the update, from 1.
        """
        raise NotImplementedError

    def update(self, state: "OptimizerState", hyper: Array) -> None:
        """Runs the kernel."""
        raise NotImplementedError

    def initial(self, slot: str) -> float:
        """The initial value of a slot."""
        return 0.0

    def needs(self, slot: str) -> bool:
        """Whether its settings, or those of a group, use a slot."""
        return True

    def _has(self, setting: str) -> bool:
        return any({**self.numbers, **changed}[setting] for changed in ({}, *self.groups.values()))


class OptimizerState:
    """The state of an optimizer for a model: its arrays, and the number of updates made.

    `data` are the parameters that it updates and `grad` their gradients; with `ranks` one shard of them, as the slots.
    `copies` of `data` in a half type, one or none, are written by every update on a GPU.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        buffers: Buffers,
        ranks: Ranks | None,
        factors: Mapping[str, float],
        decay: float | None,
    ) -> None:
        self.optimizer, self.buffers, self.steps, self._ranks, self._decay = optimizer, buffers, 0, ranks, decay
        self.data, self.grad = buffers.data, buffers.grad
        self.copies: list[Any] = []
        if ranks is not None:
            self.data = buffers.data[ranks.rank * buffers.shard : (ranks.rank + 1) * buffers.shard]
            self.grad = self.new()
        self.slots = {slot: self.new(optimizer.initial(slot)) for slot in optimizer.slots if optimizer.needs(slot)}
        if decay is not None:
            self.slots[AVERAGE] = self.new()
        self._nothing = buffers.device.zeros(0, buffers.dtype)
        patterns = list(optimizer.groups)
        unused = [p for p in patterns if not any(fnmatch.fnmatchcase(part.name, p) for part in buffers.slices)]
        if unused:
            raise ValueError(f"{optimizer.name}: groups has {unused[0]!r}, which no parameter's name matches")
        settings = [*optimizer.groups.values(), {}]
        group_of: dict[str, int] = {}
        kinds: dict[tuple[int, float], int] = {}  # groups, by pattern and factor
        for part in buffers.slices:  # the first pattern that matches; the last one has the rest
            matching = (k for k, pattern in enumerate(patterns) if fnmatch.fnmatchcase(part.name, pattern))
            kind = next(matching, len(patterns)), factors.get(part.name, 1.0)
            group_of[part.name] = kinds.setdefault(kind, len(kinds))
        self.chunks = buffers.chunks(group_of, None if ranks is None else ranks.rank)
        self.all_chunks = self.chunks if ranks is None else buffers.chunks(group_of)
        self.numbers = [_with_rate({**optimizer.numbers, **settings[k]}, factor) for k, factor in kinds]
        self.numbers_of = {name: self.numbers[k] for name, k in group_of.items()}  # by parameter
        self.workspace: dict[str, Any] = {}  # of a kernel

    def new(self, fill: float = 0.0) -> Any:
        """A new array as long as `data`."""
        if self._ranks is None:
            return self.buffers.new(fill)
        result = self.buffers.device.zeros(self.buffers.shard, self.buffers.dtype)
        if fill:
            result[...] = fill
        return result

    def of_all_chunks(self, of_mine: Any) -> Any:
        """Rows for the chunks of all ranks, from the rows for this rank's chunks."""
        if self._ranks is None:
            return of_mine
        device = self.buffers.device
        return device.from_numpy(self._ranks.all_gather_rows(device.to_numpy(of_mine)))

    def step(self, rate: float = 1.0) -> None:
        """One update by the gradients in the buffers; `rate` is the schedule's factor of the learning rates."""
        self.steps += 1
        rows = [self.optimizer.hyper(n, n["lr"] * rate, self.steps) for n in self.numbers]
        self.optimizer.update(self, np.array(rows, np.float64))
        if self._decay is not None:  # the first average is what the first update made, as PyTorch's is
            weight = 1.0 if self.steps == 1 else 1 - self._decay
            self.buffers.device.run("average", self.chunks, self.data, self.slots[AVERAGE], weight)

    def start_average(self) -> None:
        """Before the first update the average is what the parameters are."""
        if AVERAGE in self.slots:
            self.buffers.device.copy(self.slots[AVERAGE], self.data)

    def launch(self, kernel: str, hyper: Array, *rest: Any) -> None:
        """Runs a kernel that updates all parameters, with the slots, empty where not needed, and other arguments."""
        slots = [self.slots.get(slot, self._nothing) for slot in self.optimizer.slots]
        self.buffers.device.run(kernel, self.chunks, hyper, self.data, self.grad, *slots, *rest, *self.copies)


def _with_rate(numbers: Mapping[str, Any], factor: float) -> dict[str, Any]:
    return {**numbers, "lr": numbers["lr"] * numbers.get(FACTOR, 1.0) * factor}


@dataclass(frozen=True)
class SGD(Optimizer):
    """Gradient descent, as PyTorch's: plain, with `momentum`, or with Nesterov momentum.

    `dampening` is the fraction of a gradient that does not go into the momentum.
    """

    lr: float = 1e-2
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    slots = ("momentum",)

    def needs(self, slot: str) -> bool:
        return self._has("momentum")

    def hyper(self, numbers: Mapping[str, Any], lr: Any, step: Any) -> tuple[Any, ...]:
        return lr, numbers["weight_decay"], numbers["momentum"], 1 - numbers["dampening"], float(numbers["nesterov"])

    def update(self, state: OptimizerState, hyper: Array) -> None:
        state.launch("sgd", hyper, state.steps == 1)


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam, as PyTorch's; weight decay is added to the gradient.

    `betas` are the decay rates of the means of gradients and of their squares; `eps` is added to the root.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    slots = ("m", "v")

    def hyper(self, numbers: Mapping[str, Any], lr: Any, step: Any) -> tuple[Any, ...]:
        rate, eps = self._corrected(numbers, lr, step)
        return lr, *numbers["betas"], eps, numbers["weight_decay"], 1.0, 0.0, rate

    def _corrected(self, numbers: Mapping[str, Any], lr: Any, step: Any) -> tuple[Any, Any]:
        """Rate and eps with the bias correction of means that start at 0.

        In (lr / first) · m / (√v / root + eps) both sides are multiplied by the root: one division less per number.
        """
        beta1, beta2 = numbers["betas"]
        first, root = 1 - beta1**step, square_root(1 - beta2**step)
        return lr * root / first, numbers["eps"] * root

    def update(self, state: OptimizerState, hyper: Array) -> None:
        state.launch("adam", hyper)


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay.

    `form`: "torch" decays first and adds eps to the corrected root; "huggingface", as transformers' AdamW did, adds eps
    to the root as it is and decays afterwards.
    """

    weight_decay: float = 0.01
    form: str = "torch"

    def _check(self, numbers: Mapping[str, Any]) -> None:
        super()._check(numbers)
        if numbers["form"] not in ("torch", "huggingface"):
            raise ValueError(f"AdamW: form is {numbers['form']!r}, expected 'torch' or 'huggingface'")

    def hyper(self, numbers: Mapping[str, Any], lr: Any, step: Any) -> tuple[Any, ...]:
        rate, eps = self._corrected(numbers, lr, step)
        decay = lr * numbers["weight_decay"]
        if numbers["form"] == "torch":
            return lr, *numbers["betas"], eps, 0.0, 1 - decay, 0.0, rate
        return lr, *numbers["betas"], numbers["eps"], 0.0, 1.0, decay, rate


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """Adagrad, as PyTorch's: each number's step is divided by the root of the sum of its squared gradients.

    That sum starts at `initial_accumulator_value`. At step n the rate is lr / (1 + (n - 1) · `lr_decay`).
    """

    lr: float = 1e-2
    lr_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10
    slots = ("sum",)

    def initial(self, slot: str) -> float:
        return self.initial_accumulator_value

    def hyper(self, numbers: Mapping[str, Any], lr: Any, step: Any) -> tuple[Any, ...]:
        return lr / (1 + (step - 1) * numbers["lr_decay"]), numbers["weight_decay"], numbers["eps"]

    def update(self, state: OptimizerState, hyper: Array) -> None:
        state.launch("adagrad", hyper)


@dataclass(frozen=True)
class RMSprop(Optimizer):
    """RMSprop, as PyTorch's: a step is divided by the root of a running mean of squared gradients, with decay `alpha`.

    `centered` subtracts the square of their mean; `momentum` is that of the steps.
    """

    lr: float = 1e-2
    alpha: float = 0.99
    eps: float = 1e-8
    momentum: float = 0.0
    centered: bool = False
    slots = ("square", "mean", "momentum")

    def needs(self, slot: str) -> bool:
        return {"square": True, "mean": self.centered, "momentum": self._has("momentum")}[slot]

    def hyper(self, numbers: Mapping[str, Any], lr: Any, step: Any) -> tuple[Any, ...]:
        return lr, numbers["weight_decay"], numbers["eps"], numbers["alpha"], numbers["momentum"]

    def update(self, state: OptimizerState, hyper: Array) -> None:
        state.launch("rmsprop", hyper, self.centered)


@dataclass(frozen=True)
class Lamb(Optimizer):
    """Lamb: Adam's step with weight decay, scaled for each parameter by the ratio of its norm to that of the step."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 0.01
    slots = ("m", "v")

    def hyper(self, numbers: Mapping[str, Any], lr: Any, step: Any) -> tuple[Any, ...]:
        beta1, beta2 = numbers["betas"]
        return lr, beta1, beta2, numbers["eps"], numbers["weight_decay"], 1 - beta1**step, 1 - beta2**step

    def update(self, state: OptimizerState, hyper: Array) -> None:
        device, (m, v) = state.buffers.device, (state.slots[slot] for slot in self.slots)
        if not state.workspace:
            sums = device.zeros(2 * len(state.chunks), np.float64).reshape(-1, 2)
            ratios = device.zeros(len(state.buffers.slices), np.float64)
            state.workspace = {"direction": state.new(), "sums": sums, "ratios": ratios}
        direction, sums, ratios = state.workspace.values()
        device.run("lamb_direction", state.chunks, hyper, state.data, state.grad, m, v, direction, sums)
        device.run("lamb_ratios", state.all_chunks, state.of_all_chunks(sums), ratios)
        device.run("lamb_move", state.chunks, hyper, state.data, direction, ratios, *state.copies)
