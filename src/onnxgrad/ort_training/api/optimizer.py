"""Optimizer: updates the parameters of a Module, as the optimizer's model of its artifacts says, by one kernel."""

import math
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx

from onnxgrad.ort_training.api.module import Module
from onnxgrad.ort_training.checkpoint_file import OptimizerGroup
from onnxgrad.schema import MICROSOFT
from onnxgrad.train.buffers import Buffers

GROUP = "group0"  # the one group of parameters that there is
CLIP_EPS = np.float32(1e-6)  # added to the norm
INPUTS = {
    "AdamWOptimizer": ["learning_rate", "step", "params", "gradients", "first_order_moments", "second_order_moments"],
    "SGDOptimizerV2": ["learning_rate", "params", "gradients"],
}
MOMENTA = {"AdamWOptimizer": ["momentum0", "momentum1"], "SGDOptimizerV2": ["momentum0"]}  # their names in a checkpoint


class Recipe(NamedTuple):
    """What an optimizer's model does."""

    kind: str  # the operator
    max_norm: float | None  # that gradients are clipped to
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 0.0
    corrects_bias: bool = True
    decays_first: bool = False  # PyTorch's AdamW, else that of Hugging Face


def read_recipe(path: str | os.PathLike[str]) -> Recipe:
    """Reads an optimizer's model; one of other nodes than generate_artifacts writes is refused."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"Optimizer: the file {str(path)!r} does not exist, expected an optimizer's model")
    try:
        nodes = list(onnx.load(path).graph.node)
    except Exception as error:  # of protobuf, or whatever reads the format
        raise ValueError(f"Optimizer: {str(path)!r} is not an ONNX model ({type(error).__name__})") from None
    gradients, max_norm = "gradients", None
    if nodes and (nodes[0].domain, nodes[0].op_type) == (MICROSOFT, "InplaceClipGradNorm"):
        clip = nodes.pop(0)
        if list(clip.input) == [gradients] and len(clip.output) == 1:
            gradients, max_norm = clip.output[0], float(_attributes(clip).get("max_norm", 1.0))
    if len(nodes) == 1 and nodes[0].domain == MICROSOFT and nodes[0].op_type in INPUTS:
        (node,) = nodes
        if list(node.input) == [gradients if name == "gradients" else name for name in INPUTS[node.op_type]]:
            return _recipe(node, max_norm)
    found = ", ".join(node.op_type for node in nodes) or "no node"
    raise ValueError(
        f"Optimizer: {str(path)!r} has {found}, expected AdamWOptimizer or SGDOptimizerV2 on the inputs that "
        "generate_artifacts gives it, and at most InplaceClipGradNorm before it"
    )


def _recipe(node: onnx.NodeProto, max_norm: float | None) -> Recipe:
    if node.op_type == "SGDOptimizerV2":
        return Recipe(node.op_type, max_norm)
    given = _attributes(node)
    return Recipe(
        node.op_type,
        max_norm,
        (given.get("alpha", 0.9), given.get("beta", 0.999)),
        given.get("epsilon", 1e-8),
        given.get("weight_decay", 1e-2),
        bool(given.get("correct_bias", 1)),
        given.get("adam_mode", 0) == 0,
    )


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}


class Optimizer:
    """Updates a Module's parameters by their gradients.

    `optimizer_uri` is the optimizer's model of the artifacts. Momenta and the number of updates are those of the
    module's state, if a checkpoint had them.
    """

    def __init__(self, optimizer_uri: str | os.PathLike[str], module: Module) -> None:
        if not isinstance(module, Module):
            raise TypeError(f"Optimizer: module is a {type(module).__name__}, expected a Module")
        self._recipe = read_recipe(optimizer_uri)
        self._memory = module._state._memory
        self._group = self._memory.file.groups.setdefault(GROUP, OptimizerGroup())
        self._ready: Buffers | None = None  # those that the momenta belong to
        if not self._memory.file.nominal:
            self._make_momenta()

    def _make_momenta(self) -> None:
        """One array of each kind, filled with what a checkpoint had."""
        memory = self._memory
        buffers = memory.buffers
        assert buffers is not None
        kinds, known = MOMENTA[self._recipe.kind], self._group.momenta
        self._flat = {kind: buffers.new() for kind in kinds}
        views = {kind: buffers.views(array) for kind, array in self._flat.items()}
        lacking = next((part.name for part in buffers.slices if known and part.name not in known), None)
        if lacking is not None:
            raise ValueError(f"Optimizer: the checkpoint has momenta, but none of the parameter {lacking!r}")
        for part in buffers.slices:
            for kind, saved in known.get(part.name, {}).items():
                if kind not in views or tuple(saved.shape) != part.shape:
                    raise ValueError(
                        f"Optimizer: the checkpoint has {kind!r} of the parameter {part.name!r} with the shape "
                        f"{list(saved.shape)}, expected {', '.join(kinds)} of {list(part.shape)}"
                    )
                memory.device.copy(views[kind][part.name], memory.to_numpy(saved))
            self._group.momenta[part.name] = {kind: views[kind][part.name] for kind in kinds}
        self._chunks = buffers.chunks({part.name: 0 for part in buffers.slices})
        self._sums = memory.device.zeros(len(self._chunks), np.float64)
        self._nothing = memory.device.zeros(0, buffers.dtype)
        self._ready = buffers

    def step(self) -> None:
        """One update; gradients stay as they are, or are clipped in place."""
        if self._memory.file.nominal:
            raise RuntimeError(
                "Optimizer: the checkpoint is nominal: load all parameters first, by Module.copy_buffer_to_parameters"
            )
        if self._ready is not self._memory.buffers:
            self._make_momenta()
        assert self._ready is not None
        device, buffers = self._memory.device, self._ready
        with device.at_work():
            if self._recipe.max_norm is not None:
                device.run("squares", self._chunks, buffers.grad, self._sums)
                norm = np.float32(math.sqrt(float(self._sums.sum())))
                factor = np.float32(self._recipe.max_norm) / (norm + CLIP_EPS)
                if not factor >= 1:
                    device.run("scale", self._chunks, buffers.grad, float(factor))
            if self._recipe.kind == "SGDOptimizerV2":
                hyper = np.array([[self._group.learning_rate, 0.0, 0.0, 0.0, 0.0]], np.float64)
                device.run("sgd", self._chunks, hyper, buffers.data, buffers.grad, self._nothing, False)
            else:
                hyper = np.array([self._adam_row(self._group.step + 1)], np.float64)
                device.run("adam", self._chunks, hyper, buffers.data, buffers.grad, *self._flat.values())
        self._group.step += 1

    def _adam_row(self, step: int) -> tuple[float, ...]:
        """The numbers that the kernel takes; in float32 where 1.19.2 rounds to it, which shows in the first steps."""
        recipe, one, lr = self._recipe, np.float32(1), self._group.learning_rate
        first = second = one
        if recipe.corrects_bias:
            first, second = (one - np.float32(float(np.float32(beta)) ** step) for beta in recipe.betas)
        root = np.sqrt(second)
        rate, decay = float(np.float32(lr) * (root / first)), lr * recipe.weight_decay
        if recipe.decays_first:  # there eps is added to the corrected root: both sides are multiplied by the correction
            return lr, *recipe.betas, recipe.eps * float(root), 0.0, 1 - decay, 0.0, rate
        return lr, *recipe.betas, recipe.eps, 0.0, 1.0, decay, rate

    def set_learning_rate(self, learning_rate: float) -> None:
        """Sets the rate of the updates to come."""
        self._group.learning_rate = float(np.float32(learning_rate))

    def get_learning_rate(self) -> float:
        """The rate of the next update."""
        return self._group.learning_rate
