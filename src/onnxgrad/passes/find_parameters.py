"""find_parameters: which initializers of a model are its parameters, and why the others are not.

Files of torch's exporter say it. Elsewhere, and for weights that the exporter folded, it follows from the use: weights
of products, convolutions, norms, embeddings and recurrent operators, and what is added to or multiplies what these
computed. Scalars, masks, tables of sines and scales of quantization are not parameters, nor is what only reaches shapes
or masks. Where a model has adapters, they are its parameters.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.adapters import adapters_of, names_of
from onnxgrad.graph.quantization import OF_INTEGERS
from onnxgrad.graph.tensor import is_float
from onnxgrad.graph.torch_export import (
    PARAMETER,
    PRODUCER,
    Folding,
    Input,
    folding_of,
    inputs_of_call,
    is_constant_of_script,
    is_made_by_code,
    is_of_state_dict,
    kind_of,
    module_of,
    signature,
)
from onnxgrad.passes.draft import Draft, Role
from onnxgrad.schema import MICROSOFT, is_standard
from onnxgrad.tensor_types import Array

# Roles, by operator and position of the input.
_WEIGHTS: dict[str, dict[int, str]] = {
    "MatMul": {0: "weight", 1: "weight"},
    "Gemm": {0: "weight", 1: "weight", 2: "bias"},
    "Einsum": {0: "weight", 1: "weight", 2: "weight"},
    "Conv": {1: "weight", 2: "bias"},
    "ConvTranspose": {1: "weight", 2: "bias"},
    "DeformConv": {1: "weight", 3: "bias"},
    "BatchNormalization": {1: "scale", 2: "bias"},
    "InstanceNormalization": {1: "scale", 2: "bias"},
    "GroupNormalization": {1: "scale", 2: "bias"},
    "LayerNormalization": {1: "scale", 2: "bias"},
    "RMSNormalization": {1: "scale"},
    "PRelu": {1: "slope"},
    "Gather": {0: "embedding"},
    "LSTM": {1: "weight", 2: "weight", 3: "bias", 7: "weight"},
    "GRU": {1: "weight", 2: "weight", 3: "bias"},
    "RNN": {1: "weight", 2: "weight", 3: "bias"},
}
_MICROSOFT: dict[str, dict[int, str]] = {
    "FusedMatMul": {0: "weight", 1: "weight"},
    "FusedGemm": {0: "weight", 1: "weight", 2: "bias"},
    "FusedConv": {1: "weight", 2: "bias"},
    "Attention": {1: "weight", 2: "bias"},
    "MultiHeadAttention": {3: "bias"},
    "MatMulNBits": {5: "bias"},
    "BiasGelu": {1: "bias"},
    "FastGelu": {1: "bias"},
    "SkipLayerNormalization": {2: "scale", 3: "bias", 4: "bias"},
    "SimplifiedLayerNormalization": {1: "scale"},
    "SkipSimplifiedLayerNormalization": {2: "scale", 3: "bias"},
    "EmbedLayerNormalization": {2: "embedding", 3: "embedding", 4: "embedding", 5: "scale", 6: "bias"},
}
COMBINED = {"Add": "bias", "Sub": "bias", "Sum": "bias", "Mul": "scale", "Div": "scale", "Concat": "token"}
_STATISTICS = {"BatchNormalization": (3, 4)}
_SHAPES = {"Shape", "Size", "ConstantOfShape", "Range", "NonZero", "EyeLike"}  # nothing of their inputs' numbers
# Most often their scales were measured, and a step of the optimizer's could make one negative; LSQ has to name them.
_QUANTIZATIONS = {"QuantizeLinear", "DequantizeLinear"}

ADAPTER = "adapter"  # the role of LoRA's weights
MASKED = -100.0  # masks add this or less
MOST_LOOKED_AT = 1 << 20  # numbers of a tensor


def find_parameters(draft: Draft) -> None:
    """Fills in `draft.roles`."""
    graph = draft.graph
    uses, inputs = _Uses(graph), signature(graph)
    is_script = draft.model.producer_name == PRODUCER and not inputs
    found = {str(v.name): _role(v, uses, inputs, is_script) for v in graph.initializers.values() if is_float(v)}
    if is_script:
        _leave_constants(found)
    if inputs:
        _ask_the_modules(graph, uses, inputs, found)
    elif not any(role.is_parameter for role in found.values()):
        # A formula without products: its numbers are what there is to train.
        for name, role in found.items():
            if role.kind in ("factor", "scalar", "table") and not _is_setting(uses, graph.initializers[name]):
                found[name] = Role("weight", True, "the model has no other weights")
    for name, role in found.items():
        if not role.is_parameter and is_made_by_code(graph.initializers[name], inputs):
            found[name] = role._replace(is_made=True)
    draft.roles = found
    if adapters := names_of(adapters_of(draft.model)):
        _freeze_all_but(draft.roles, set(adapters))


def _leave_constants(roles: dict[str, Role]) -> None:
    """Leaves tensors that forward makes, a state of zeros say, which the exporter on TorchScript writes as Constants.

    Parameters are initializers there. Only of a frozen script, which has none, they are Constants, too.
    """
    parameters = [name for name, role in roles.items() if role.is_parameter]
    constants = [name for name in parameters if is_constant_of_script(name)]
    if len(constants) < len(parameters):
        for name in constants:
            roles[name] = Role("constant", False, "a constant in the code of the PyTorch module")


def _is_setting(uses: "_Uses", value: ir.Value) -> bool:
    """Whether it is nothing but the exponent of powers, whose bases may be negative, or a scale of quantization."""
    found = uses.of.get(value, [])
    if value in uses.quantization or any(use.node.op_type in OF_INTEGERS for use in found):
        return True
    return bool(found) and all(use.node.op_type == "Pow" and use.node.inputs[0] is not value for use in found)


def _freeze_all_but(roles: dict[str, Role], adapters: set[str]) -> None:
    for name, role in roles.items():
        if name in adapters:
            roles[name] = Role(ADAPTER, True, "a part of an adapter")
        elif role.is_parameter:
            roles[name] = Role(role.kind, False, "frozen: the model has adapters")


def role_at(node: ir.Node, at: int) -> str | None:
    """What weights at a position of a node are; None if weights are not all that may be there."""
    table = _WEIGHTS if is_standard(node.domain) else _MICROSOFT if node.domain == MICROSOFT else {}
    return table.get(node.op_type, {}).get(at)


@dataclass
class _Use:
    """One way in which an initializer reaches what is computed from inputs."""

    node: ir.Node
    role: str
    strong: bool  # a position that only weights have
    fed: bool = True  # what it is combined with was computed by weights


class _Uses:
    """How initializers are used, also through nodes that compute from initializers alone."""

    def __init__(self, graph: ir.Graph) -> None:
        self.of: dict[ir.Value, list[_Use]] = {}
        self.statistics: set[ir.Value] = set()
        self.quantization: set[ir.Value] = set()  # scales
        self.angles: set[ir.Value] = set()  # what sines and cosines are computed of, without an input
        self._origins: dict[ir.Value, tuple[ir.Value, ...]] = {
            v: (v,) if is_float(v) else () for v in graph.initializers.values()
        }
        self._fed: set[ir.Value] = set()  # by weights
        for node in graph.all_nodes():
            self._read(node)

    def _read(self, node: ir.Node) -> None:
        inner = [v for a in node.attributes.values() if a.type == ir.AttributeType.GRAPH for v in a.value.outputs]
        inputs = node.inputs
        if node.op_type in _QUANTIZATIONS:
            self.quantization.update(o for v in inputs[1:2] if v is not None for o in self._origins.get(v, ()))
            inputs = inputs[:1]
        elif node.op_type == "Resize":
            inputs = inputs[:1]  # the others say how large and where
        read = [v for v in inputs if v is not None]
        if node.op_type in _SHAPES or not read + inner:
            self._origins |= dict.fromkeys(node.outputs, ())
            return
        if not inner and all(v in self._origins for v in read):  # of initializers alone
            origins = dict.fromkeys(o for v in read for o in self._origins[v])
            if node.op_type in ("Sin", "Cos"):
                self.angles.update(origins)
            self._origins |= dict.fromkeys(node.outputs, tuple(origins))
            return
        for at in _STATISTICS.get(node.op_type, ()):
            if at < len(node.inputs) and (value := node.inputs[at]) is not None:
                self.statistics.update(self._origins.get(value, ()))
        strong, unchanged = False, _unchanged(node)
        for at, inside in unchanged.items():
            if (given := inputs[at]) is not None and given in self._origins:
                self._origins[inside] = self._origins[given]
        for at, value in enumerate(inputs):
            if value is None or at in unchanged or not self._origins.get(value):
                continue
            use = self._use(node, at, value)
            strong |= use.strong
            for origin in self._origins[value]:
                self.of.setdefault(origin, []).append(use)
        if strong or inner or any(v in self._fed for v in read):
            self._fed.update(node.outputs)

    def _use(self, node: ir.Node, at: int, value: ir.Value) -> _Use:
        role = role_at(node, at)
        others = [v for k, v in enumerate(node.inputs) if k != at and v is not None and v not in self._origins]
        if role is not None:
            # A product of frequencies with positions (rotary tables) is none of weights.
            is_odd = node.op_type in ("MatMul", "Einsum") and value.shape is not None and len(value.shape) != 2
            strong = not is_odd or any(v in self._fed for v in others) or any(_comes_as_float(v) for v in others)
            return _Use(node, role if strong else "factor", strong, fed=strong)
        fed = any(v in self._fed for v in others)
        role = COMBINED.get(node.op_type, "constant") if is_standard(node.domain) else "constant"
        return _Use(node, role, strong=False, fed=fed)


def _unchanged(node: ir.Node) -> dict[int, ir.Value]:
    """What steps know inputs of a Loop or Scan as that every step is given as they are, or a slice of."""
    if node.op_type not in ("Loop", "Scan") or not is_standard(node.domain):
        return {}
    body = node.attributes["body"].as_graph()
    scans = node.attributes["num_scan_inputs"].as_int() if node.op_type == "Scan" else 0
    before = 0 if node.op_type == "Scan" else 2  # inputs that are not states: the number of steps and the condition
    results = [None] * before + list(body.outputs)[1 if before else 0 :]
    states = len(node.inputs) - scans
    return {
        k: inside for k, (value, inside) in enumerate(zip(node.inputs, body.inputs, strict=False))
        if value is not None and k >= before and (k >= states or _before_identities(results[k]) is inside)
    }  # fmt: skip


def _before_identities(value: ir.Value | None) -> ir.Value | None:
    while value is not None and (node := value.producer()) is not None and node.op_type == "Identity":
        value = node.inputs[0]
    return value


def _comes_as_float(value: ir.Value) -> bool:
    """Whether a value is computed from inputs without a cast from integers."""
    seen, waiting = set(), [value]
    while waiting:
        at = waiting.pop()
        if at in seen:
            continue
        seen.add(at)
        producer = at.producer()
        if producer is None:
            if at.is_graph_input() and is_float(at):
                return True
        elif producer.op_type != "Cast" and producer.op_type not in _SHAPES:
            waiting += [v for v in producer.inputs if v is not None]
    return False


def _role(value: ir.Value, uses: _Uses, inputs: Mapping[str, Input], is_script: bool) -> Role:
    """By what the file says of it, else by its uses.

    Scalars are mostly constants of the code. The exporter on TorchScript writes those as Constants, and as initializers
    what the module has: a temperature, a gate.
    """
    told = kind_of(value) or next((i.kind for i in inputs.values() if i.name == value.name), None)
    tensor = value.const_value
    found = uses.of.get(value, [])
    if value in uses.statistics:
        return Role("statistic", False, "a running statistic")
    if not found and value in uses.quantization:
        why = "a parameter of the PyTorch module" if told == PARAMETER else "a scale of quantization"
        return Role("scale", told == PARAMETER, why)
    if not found:
        return Role("unused", False, "reaches shapes and indices alone")
    if tensor is None:
        return Role("constant", False, "has no value in the file")
    strong = next((use for use in found if use.strong), None)
    if told is not None and told != PARAMETER:
        return Role("buffer", False, f"a {told.lower().replace('_', ' ')} of the PyTorch module")
    is_own = told == PARAMETER or (is_script and is_of_state_dict(str(value.name), [use.node for use in found]))
    if not is_own and (len(tensor.shape) == 0 or (tensor.size == 1 and strong is None and not _is_bias(found))):
        return Role("scalar", False, "a scalar")
    if _is_table_of_sines(tensor):
        return Role("table", False, "a table of sines and cosines")
    if _counts(tensor):
        return Role("table", False, "counts from 0, as the bins of a distribution do")
    if told == PARAMETER:
        return Role(strong.role if strong else found[0].role, True, "a parameter of the PyTorch module")
    if strong is not None:
        return Role(strong.role, True, f"the {strong.role} of {strong.node.op_type}")
    if not _is_finite(tensor):
        return Role("mask", False, "has numbers that are not finite")
    if value in uses.angles:
        return Role("table", False, "the angles of a table of sines and cosines")
    return _combined(tensor, found)


def _is_bias(uses: Sequence[_Use]) -> bool:
    """Whether one of the uses adds to what a product computed, as a layer with one output does."""
    products = ("MatMul", "Gemm", "Conv", "ConvTranspose")
    before = [v.producer() for use in uses if use.node.op_type == "Add" for v in use.node.inputs if v is not None]
    return any(node is not None and node.op_type in products for node in before)


def _combined(tensor: Any, uses: Sequence[_Use]) -> Role:
    """Of an initializer that is only added, multiplied or appended."""
    use = max(uses, key=lambda u: (u.role in ("bias", "scale", "token"), u.fed))
    if use.role == "constant":
        return Role("constant", False, f"an input of {use.node.op_type}")
    if is_mask(tensor):
        return Role("mask", False, "has the numbers of a mask")
    varies = sum(d > 1 for d in tensor.shape.numpy())
    if use.role == "scale" and varies > 1:
        return Role("table", False, f"a table that {use.node.op_type} is given")
    if use.role == "token" and not _numbers(tensor).any():
        return Role("constant", False, f"zeros that {use.node.op_type} is given")
    if not use.fed:
        return Role("factor", False, f"{use.node.op_type} applies it to an input, as normalization does")
    return Role(use.role, True, f"{use.node.op_type} applies it to what weights computed")


def _numbers(tensor: Any) -> Array:
    """The first numbers of a tensor, which tell a mask or a table from a weight; none if its file is not there."""
    if isinstance(tensor, ir.ExternalTensor) and not Path(tensor.path).is_file():
        return np.zeros(0, np.float32)
    numbers: Array = tensor.numpy().reshape(-1)[:MOST_LOOKED_AT].astype(np.float32, copy=False)
    return numbers


def _is_finite(tensor: Any) -> bool:
    return bool(np.isfinite(_numbers(tensor)).all())


def is_mask(tensor: Any) -> bool:
    """Nothing but 0 and a large negative number, or 0 and 1, in more than one dimension."""
    numbers = _numbers(tensor)
    if not numbers.size or sum(d > 1 for d in tensor.shape.numpy()) < 2:
        return False
    low, high = numbers.min(), numbers.max()
    if not ((numbers == low) | (numbers == high)).all():
        return False
    return bool(low <= MASKED or (low == 0 and high == 1))


def _is_table_of_sines(tensor: Any) -> bool:
    """Whether every row is pairs of a sine and a cosine: its squares add up to half its length."""
    shape = tensor.shape.numpy()
    if len(shape) < 2 or shape[-1] < 4 or shape[-1] % 2:
        return False
    numbers = _numbers(tensor)
    rows = numbers[: numbers.size // shape[-1] * shape[-1]].reshape(-1, shape[-1])[:64]
    squares = (rows.astype(np.float64) ** 2).sum(1)
    squares = squares[squares > 0]
    return len(squares) > 1 and bool(np.allclose(squares, shape[-1] / 2, rtol=1e-3))


def _counts(tensor: Any) -> bool:
    """Whether it is a vector of 0, 1, 2 …: what detectors take the mean of distances with, in a frozen convolution."""
    size = tensor.size
    if size < 4 or size not in tensor.shape.numpy():
        return False
    return np.array_equal(_numbers(tensor), np.arange(min(size, MOST_LOOKED_AT), dtype=np.float32))


def _ask_the_modules(graph: ir.Graph, uses: _Uses, inputs: Mapping[str, Input], found: dict[str, Role]) -> None:
    """Decides about what torch's exporter computed beforehand: it is trained if a parameter of its module is gone."""
    gone = parameters_gone(graph, inputs)
    known = {i.name for i in inputs.values()}
    for name, role in found.items():
        value = graph.initializers[name]
        tensor: Any = value.const_value
        if kind_of(value) is not None or name in known or role.kind in ("unused", "statistic", "mask"):
            continue
        if value not in uses.of:  # a scale of quantization
            continue
        folding = folding_of(value, inputs)
        if role.kind == "scalar" and (folding is None or not folding.parameters):
            continue
        mine = uses.of[value]
        strong = next((use for use in mine if use.strong), None)
        if folding is not None:
            if not _is_table_of_sines(tensor):
                found[name] = _folded(folding, (strong or mine[0]).role)
            continue
        if strong is not None:
            given = inputs_of_call(strong.node, inputs)
            if given and all(i.kind != PARAMETER for i in given):
                found[name] = Role("buffer", False, "a buffer of the PyTorch module")
            continue
        if is_mask(tensor) or not _numbers(tensor).any():
            found[name] = Role("mask", False, "has the numbers of a mask")
            continue
        near = [p for use in mine for p in gone if is_inside(p, module_of(use.node))]
        if near:
            near = list(dict.fromkeys(near))
            found[name] = Role(mine[0].role, True, f"computed from {' or '.join(near[:3])} of the PyTorch module")
        else:
            found[name] = Role("table", False, "computed from no parameter of its PyTorch module")


def _folded(folding: Folding, role: str) -> Role:
    if not folding.parameters:
        return Role("table", False, "computed from no parameter of the PyTorch module")
    return Role(role, True, f"computed from {' and '.join(folding.parameters[:3])} of the PyTorch module")


def parameters_gone(graph: ir.Graph, inputs: Mapping[str, Input]) -> list[str]:
    """Parameters of the module that the file does not have, under their name or under one that they share."""
    gone = [i.name for i in inputs.values() if i.kind == PARAMETER and i.name not in graph.initializers]
    shared = _shared(graph, inputs, set(gone)) if gone else set()
    return [name for name in gone if name not in shared]


def _shared(graph: ir.Graph, inputs: Mapping[str, Input], gone: set[str]) -> set[str]:
    """Those that other parameters are, too, as a table of embeddings that the last layer shares: a call reads them."""
    found = set()
    for node in graph:
        given = [i.name for i in inputs_of_call(node, inputs) if i.kind == PARAMETER]
        read = [v for v in node.inputs if v is not None and v.is_initializer() and kind_of(v) == PARAMETER]
        if len(given) == 1 and read:
            found |= gone & set(given)
    return found


def is_inside(parameter: str, module: str | None) -> bool:
    """Whether a parameter is a module's own, or of a layer in it that has no layers."""
    if module is None or (module and not parameter.startswith(f"{module}.")):
        return False
    return parameter.removeprefix(f"{module}." if module else "").count(".") <= 1
