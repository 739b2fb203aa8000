"""lora(): adds low-rank adapters to some weights of a model (Hu et al. 2021), which are trained in their place."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.edit.targets import Target, choose, find_targets
from onnxgrad.graph.adapters import CONV, EMBEDDING, LINEAR, Adapter, adapters_of, note_adapters
from onnxgrad.graph.files import as_given, expect_weights, load
from onnxgrad.graph.initializers import add_initializer
from onnxgrad.graph.new_node import new_node
from onnxgrad.graph.replace import put_behind
from onnxgrad.passes.convert_opset import convert_opset
from onnxgrad.passes.draft import Draft
from onnxgrad.passes.prepare import RESTORE
from onnxgrad.tensor_types import Array

TARGETS = "*query*|*value*"  # those that the paper adapts
ADDS_ANY_SHAPES = 7  # the first opset where Add and Mul broadcast without being told
DROPS_BY_INPUT = 12  # the first opset where the ratio of Dropout is an input


def lora(
    model: Any,
    targets: str | Sequence[str] = TARGETS,
    rank: int = 8,
    alpha: float = 16,
    dropout: float = 0,
    seed: int = 0,
    *,
    as_inputs: bool = False,
) -> Any:
    """Returns the model with LoRA adapters on the weights that `targets` selects; before training its results are the
    same.

    - `model`: a path, an onnx.ModelProto or an onnx_ir.Model; it is not changed. For an onnx_ir.Model the result is one
      too.
    - `targets`: patterns of the names of weights, layers or nodes, separated by `|`, or the ends of such names
      (`q_proj`). Weights of MatMul, Gemm, Conv, Gather and MatMulNBits can have adapters, whether floating-point or
      quantized; they stay unchanged.
    - `rank`, `alpha`: an adapter adds x·A·B · alpha / rank to the output of the layer for the input x. A is random,
      drawn with `seed`, and B is 0.
    - `dropout`: the share of the inputs of an adapter that training drops.
    - `as_inputs`: makes the adapters inputs with default values, so that stock onnxruntime can switch adapters (see
      save_adapter).

    A Trainer of the result trains only the adapters and what its `trainable` names.
    """
    _expect(rank, alpha, dropout)
    loaded = loaded_for_adapters(model, "lora", dropout)
    if adapters_of(loaded):
        raise ValueError("lora: the model has adapters already: train these, or merge them first (merge_lora)")
    chosen = choose(find_targets(loaded.graph), targets, rank, "lora")
    adapters = []
    for number, target in enumerate(chosen):
        arrays = _initial(target, rank, np.random.default_rng([seed, number]))
        adapters.append(add_adapter(loaded.graph, target, *arrays, scale=alpha / rank, dropout=dropout))
    return finished(loaded, adapters, model, as_inputs)


def loaded_for_adapters(model: Any, caller: str, dropout: float) -> ir.Model:
    """The model with the names that its author knows, of an opset that adapters can be written in."""
    loaded = load(model, caller)
    expect_weights(loaded, caller)
    draft = Draft(loaded, caller).run(RESTORE)
    oldest = DROPS_BY_INPUT if dropout else ADDS_ANY_SHAPES
    if draft.graph.opset_imports.get("", oldest) < oldest:
        convert_opset(draft)
    return draft.model  # type: ignore[no-any-return]


def finished(model: ir.Model, adapters: Sequence[Adapter], given: Any, as_inputs: bool) -> Any:
    """A model of the kind that was given, which says what adapters it has."""
    note_adapters(model, adapters)
    if as_inputs:
        for adapter in adapters:
            model.graph.inputs.extend(model.graph.initializers[name] for name in (adapter.A, adapter.B))
    return as_given(model, given)


def _expect(rank: Any, alpha: Any, dropout: Any) -> None:
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ValueError(f"lora: rank is {rank!r}, expected a whole number of at least 1")
    if not isinstance(alpha, (int, float)) or not math.isfinite(alpha) or alpha <= 0:
        raise ValueError(f"lora: alpha is {alpha!r}, expected a number above 0")
    if not isinstance(dropout, (int, float)) or not 0 <= dropout < 1:
        raise ValueError(f"lora: dropout is {dropout!r}, expected a number of at least 0 and under 1")


def shapes_of(target: Target, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of A and B."""
    inputs, outputs = target.sizes
    if target.kind == CONV:  # inputs of one group
        window = target.shape[2:]
        return (rank, inputs, *window), (outputs, rank // target.groups, *(1 for _ in window))
    return (inputs, rank), (rank, outputs)


def _initial(target: Target, rank: int, random: np.random.Generator) -> tuple[Array, Array]:
    """As PEFT has them: of an embedding it is A that is 0, as each row is looked up seldom."""
    a, b = shapes_of(target, rank)
    if target.kind == EMBEDDING:
        return np.zeros(a, np.float32), random.normal(size=b).astype(np.float32)
    inputs = math.prod(a[1:]) if target.kind == CONV else a[0]
    bound = inputs**-0.5  # kaiming_uniform_ with a = √5
    return random.uniform(-bound, bound, a).astype(np.float32), np.zeros(b, np.float32)


def add_adapter(graph: ir.Graph, target: Target, a: Array, b: Array, *, scale: float, dropout: float) -> Adapter:
    """Puts an adapter beside a weight, wherever it is used."""
    ending = "embedding_" if target.kind == EMBEDDING else ""
    suffix = "" if target.kind == EMBEDDING else ".weight"
    rank = a.shape[0] if target.kind == CONV else a.shape[1]
    written = _Written(graph, target)
    down = written.initializer(f"lora_{ending}A{suffix}", a, target.dtype)
    up = written.initializer(f"lora_{ending}B{suffix}", b, target.dtype)
    factor = written.initializer("lora_scale", np.array(scale), target.dtype)
    dropout = 0.0 if target.kind == EMBEDDING else dropout
    ratio = written.initializer("lora_dropout", np.array(dropout), ir.DataType.FLOAT) if dropout else None
    for node in target.nodes:
        written.beside(node, down, up, factor, ratio)
    return Adapter(target.module, target.kind, str(down.name), str(up.name), rank, scale, dropout)


class _Written:
    """Initializers and nodes, named after a layer."""

    def __init__(self, graph: ir.Graph, target: Target) -> None:
        self._graph, self._target = graph, target
        self._taken = {
            str(v.name) for node in graph.all_nodes() for v in (*node.outputs, *node.inputs) if v is not None
        }
        self._taken |= {str(v.name) for v in graph.inputs} | set(graph.initializers)

    def _free(self, name: str) -> str:
        wanted = f"{self._target.module}.{name}"
        number = 1
        while (found := wanted if number == 1 else f"{wanted}_{number}") in self._taken:
            number += 1
        self._taken.add(found)
        return found

    def initializer(self, name: str, array: Array, dtype: ir.DataType) -> ir.Value:
        return add_initializer(self._graph, self._free(name), array, dtype)

    def _node(self, op_type: str, inputs: Sequence[ir.Value | None], attributes: Any = None) -> ir.Value:
        node = new_node(op_type, inputs, self._free(f"lora_{op_type.lower()}"), attributes)
        node.metadata_props.update(self._base.metadata_props)  # which module it is in
        self._added.append(node)
        return node.outputs[0]

    def beside(self, node: ir.Node, down: ir.Value, up: ir.Value, factor: ir.Value, ratio: ir.Value | None) -> None:
        """The node's result plus what the adapter makes of its input."""
        self._base, self._added = node, list[ir.Node]()
        target, result = self._target, node.outputs[0]
        x = node.inputs[1 if target.kind == EMBEDDING else 0]
        if ratio is not None:
            x = self._node("Dropout", [x, ratio])
        if target.kind == LINEAR:
            is_transposed = node.attributes.get_int("transA", 0)
            low = self._node("Gemm", [x, down], {"transA": 1}) if is_transposed else self._node("MatMul", [x, down])
        elif target.kind == CONV:
            low = self._node("Conv", [x, down], node.attributes)
        else:
            low = self._node("Gather", [down, x])
        low = self._node("Mul", [low, factor])
        if target.kind == CONV:
            high = self._node("Conv", [low, up], {"group": target.groups})
        else:
            high = self._node("MatMul", [low, up])
        total = self._node("Add", [result, high])
        owner = node.graph
        assert owner is not None
        owner.insert_after(node, self._added)
        put_behind(result, self._added[-1], f"{result.name}_without_adapter")
        total.shape = result.shape
