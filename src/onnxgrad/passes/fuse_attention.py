"""Attention as FlashAttention: softmax(scale · Q · Kᵀ + mask) · V, in the forms that exporters write, as one node.

Neither it nor its gradient holds the matrix of scores. Transposes from [batch, length, heads, numbers] and back, and
factors that are constant numbers, go into the node.
"""

import functools
import math
from collections.abc import Container, Mapping
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.builder import RANDOM, Builder, evaluate, op
from onnxgrad.graph.cast import in_type
from onnxgrad.graph.node import subgraphs, values_read
from onnxgrad.graph.replace import take_place
from onnxgrad.graph.tensor import Tensor
from onnxgrad.passes.draft import Draft
from onnxgrad.passes.fuse_gelu import only_user
from onnxgrad.passes.sink_transposes import is_transpose, permutation
from onnxgrad.rules.registry import RULES
from onnxgrad.schema import MICROSOFT, OWN, is_standard
from onnxgrad.tensor_types import Array

LONGEST_HEAD = 256  # numbers; kernels on a GPU take no more
# A score is nothing beside a number as low as this: it makes no difference whether that is added or put in its place.
LOW = -1e8
TYPES = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
LAYOUT = [0, 2, 1, 3]  # from [batch, heads, length, numbers] to [batch, length, heads, numbers], and back
MOST_READ = 1 << 24  # numbers of a mask that are looked at
TRIALS = (2, 5)  # sizes of a batch
UNKNOWN = -(2**62)  # in place of a dimension


class _Operand(NamedTuple):
    """A value, the permutation that makes matrices of it, and the number that they are multiplied with."""

    value: ir.Value
    perm: list[int]
    factor: float = 1.0
    split: list[Any] | None = None  # the shape to give it first, in which batch and heads are two axes

    @property
    def dims(self) -> list[Any]:
        """Once permuted."""
        dims = self.split or _dims(self.value)
        return [dims[k] for k in self.perm]


class _Mask(NamedTuple):
    """What is added to scores: a value, or one of two numbers, where its truth values are true and where not.

    One that `replaces` puts the number that is not 0 in the place of the scores.
    """

    value: ir.Value
    chosen: tuple[float, float] | None = None
    replaces: bool = False

    @property
    def replaces_by_number(self) -> bool:
        return self.replaces and self.chosen is not None and -math.inf not in self.chosen


class _Scores(NamedTuple):
    """The product of Q and K, what it is multiplied with, and the masks."""

    product: ir.Node
    factor: float
    masks: list[_Mask]


class _Constants:
    """What values are, whatever the batch is: exporters compute scales and masks from shapes."""

    def __init__(self, builder: Builder, trained: Container[Any], sizes: Mapping[Any, int] | None = None) -> None:
        """`trained` are names of initializers that are no constants, `sizes` numbers for dimensions that have names."""
        self.builder, self.trained, self._sizes = builder, trained, sizes or {}
        self._found: dict[ir.Value, Array | None] = {}
        self._trials: dict[Any, list[_Constants]] = {}

    def number(self, value: ir.Value | None) -> float | None:
        """The one number that a value always is."""
        if value is None or any(d != 1 for d in _dims(value)):
            return None
        array = self.array(value)
        return float(array.item()) if array is not None and array.size == 1 and array.dtype != bool else None

    def array(self, value: ir.Value) -> Array | None:
        """The numbers of a value, if they are not too many."""
        if value not in self._found:
            size = math.prod(d if isinstance(d, int) else MOST_READ + 1 for d in self._dims(value))
            found = None if value.shape is None or size > MOST_READ else self._compute(value)
            self._found[value] = None if found is not None and _is_unknown(found) else found
        return self._found[value]

    def whatever_the_batch(self, value: ir.Value, batch: Any) -> Array | None:
        """The numbers of one that depends on the size of a batch alone: if all examples have the same, those of one."""
        if not isinstance(batch, str) or not _dims(value) or _dims(value)[0] != batch:
            return self.array(value)
        if batch not in self._trials:
            self._trials[batch] = [_Constants(self.builder, self.trained, {batch: size}) for size in TRIALS]
        found = [trial.array(value) for trial in self._trials[batch]]
        rows = [row for array in found if array is not None for row in array]
        is_same = len(rows) == sum(TRIALS) and all(np.array_equal(rows[0], row) for row in rows)
        return rows[0][None] if is_same else None

    def _dims(self, value: ir.Value) -> list[Any]:
        return [self._sizes.get(d, d) for d in _dims(value)]

    def _compute(self, value: ir.Value) -> Array | None:
        node = value.producer()
        if node is None:
            is_fixed = not value.is_graph_input() and value.name not in self.trained
            return value.const_value.numpy() if is_fixed and value.const_value is not None else None
        if not is_standard(node.domain) or node.op_type in RANDOM or subgraphs(node):
            return None
        if node.op_type == "CastLike" and node.inputs[0] is not None and value.dtype is not None:
            array = self.array(node.inputs[0])
            return None if array is None else array.astype(value.dtype.numpy())
        if node.op_type == "Shape":
            return self._shape(value)
        if node.op_type in ("Slice", "Gather") and node.inputs[0] is not None:
            inputs = [self._shape(node.inputs[0]), *(None if v is None else self.array(v) for v in node.inputs[1:])]
        else:
            inputs = [None if v is None else self.array(v) for v in node.inputs]
        if any(array is None and v is not None for array, v in zip(inputs, node.inputs, strict=True)):
            return None
        try:
            found: Array = evaluate(node, inputs, self.builder.opsets)[value.index() or 0]
        except Exception:  # of any type: a node that is wrong stays, and onnxruntime says what is wrong with it
            return None
        return found

    def _shape(self, value: ir.Value) -> Array | None:
        """What a part is taken of: a shape need not be known whole."""
        node = value.producer()
        if node is None or node.op_type != "Shape" or node.inputs[0] is None:
            return self.array(value)
        part, dims = slice(_attribute(node, "start", 0), _attribute(node, "end", None)), self._dims(node.inputs[0])
        return np.array([d if isinstance(d, int) else UNKNOWN for d in dims[part]], np.int64) if dims else None


def _is_unknown(array: Array) -> bool:
    return array.dtype == np.int64 and bool((array == UNKNOWN).any())


def fuse_attention(draft: Draft, trained: Container[Any] | None = None) -> int:
    """Replaces each attention that drops nothing and whose mask is not trained; how many were found.

    `trained` are names of initializers that are; without them, all that look like parameters.
    """
    if trained is None:
        trained = {name for name, role in draft.roles.items() if role.is_parameter}
    known = _Constants(Builder(draft.graph), trained)
    found = 0
    for softmax in [n for n in draft.graph if n.op_type == "Softmax" and is_standard(n.domain)]:
        found += _replace(known, softmax)
    if found:
        draft.graph.sort()
    return found


def _replace(known: _Constants, softmax: ir.Node) -> bool:
    builder = known.builder
    last, start = _product_with_values(known, softmax), softmax.inputs[0]
    scores = None if last is None or start is None else _scores(known, start)
    if last is None or scores is None:
        return False
    dims = _dims(scores.product.outputs[0])
    if None in dims or dims != _dims(softmax.outputs[0]):  # or a mask has more queries, which share one score
        return False
    q, k, v = (
        _operand(known, value, is_transposed)
        for value, is_transposed in (
            (scores.product.inputs[0], False),
            (scores.product.inputs[1], not _attribute(scores.product, "transB", 0)),
            (last.inputs[1], False),
        )
    )
    if q is None or k is None or v is None or not _fit(q, k, v):
        return False
    if any(_is_trained(mask.value, known.trained) for mask in scores.masks):
        return False
    end, perm = last, list(range(len(q.perm)))
    while (after := only_user(end)) is not None and is_transpose(after):
        end, perm = after, [perm[axis] for axis in permutation(after)]
    before = len(builder.graph)
    with builder.at_work(last.name or ""):
        masks, is_causal = _needed(known, scores.masks, q.dims[0], (q.dims[-2], k.dims[-2]))
        queries, *others = (_in_layout(builder, operand) for operand in (q, k, v))
        queries = _without_blind(known, queries, masks, q.dims[0], len(perm))
        inputs = [queries, *others, _one_mask(builder, masks, len(perm))]
        attributes = {"scale": scores.factor * q.factor * k.factor, "is_causal": 1 if is_causal else None}
        y = builder.node("FlashAttention", inputs, attributes, domain=OWN)[0]
        attention, y = y.value.producer(), y * v.factor
        if len(perm) == 3:
            y = op.Squeeze(y, [2])
        else:
            perm = [LAYOUT[axis] for axis in perm]
        result = y if perm == sorted(perm) else op.Transpose(y, perm=perm)
    take_place(result.value, end.outputs[0])
    # Patterns of names and of modules that stood for the Softmax stand for the new nodes.
    assert attention is not None
    attention.name, softmax.name = softmax.name, f"{softmax.name}_replaced"
    for node in list(builder.graph)[before:]:
        node.metadata_props.update(last.metadata_props)
    return True


def _product_with_values(known: _Constants, softmax: ir.Node) -> ir.Node | None:
    """The MatMul that a Softmax along the keys goes into, by way of nodes that leave its numbers as they are."""
    axis, node = _attribute(softmax, "axis", -1), softmax
    if axis not in (-1, _rank(softmax.outputs[0]) - 1):
        return None
    while True:
        value = node.outputs[0]
        after = _without_nan(known, value) or only_user(node)
        if after is None or not is_standard(after.domain):
            return None
        if after.op_type == "MatMul":
            return after if after.inputs[0] is value and after.inputs[1] is not value else None
        if after.op_type not in ("Identity", "Where") or (after.op_type == "Where" and len(value.uses()) == 1):
            return None
        node = after


def _without_nan(known: _Constants, value: ir.Value) -> ir.Node | None:
    """Where(IsNaN(x), 0, x): a query that sees no key gets zeros, as FlashAttention has it."""
    users = {user.op_type: user for user, _ in value.uses()}
    if value.is_graph_output() or len(value.uses()) != 2 or set(users) != {"IsNaN", "Where"}:
        return None
    condition, zero, other = users["Where"].inputs
    is_so = condition is users["IsNaN"].outputs[0] and other is value and known.number(zero) == 0
    return users["Where"] if is_so else None


def _scores(known: _Constants, value: ir.Value, factor: float = 1.0) -> _Scores | None:
    """How scores are made, from the last node on; `factor` is that of the nodes behind."""
    node = value.producer()
    numbers = [user for user, k in value.uses() if user.op_type != "CastLike" or k == 0]
    if node is None or value.is_graph_output() or len(numbers) != 1:
        return None
    if _is_product(node):
        return _Scores(node, factor * _attribute(node, "alpha", 1.0), [])
    if (scaled := _scaled(known, node)) is not None:
        return _scores(known, scaled[0], factor * scaled[1])
    if factor != 1 or not is_standard(node.domain) or node.op_type not in ("Add", "Where"):
        return None
    *_, first, second = node.inputs
    for one, other in ((first, second), (second, first)):
        found = None if one is None or other is None else _scores(known, one)
        if found is None or other is None:
            continue
        mask = _Mask(other)
        if node.op_type == "Where":
            low, condition = known.number(other), node.inputs[0]
            if condition is None or low is None or low > LOW:
                return None
            mask = _Mask(condition, (0.0, low) if one is first else (low, 0.0), replaces=True)
        return found._replace(masks=[*found.masks, mask])
    return None


def _is_product(node: ir.Node) -> bool:
    if node.domain == MICROSOFT and node.op_type == "FusedMatMul":
        return not any(_attribute(node, name, 0) for name in ("transA", "transBatchA", "transBatchB"))
    return is_standard(node.domain) and node.op_type == "MatMul"


def _operand(known: _Constants, value: ir.Value | None, is_transposed: bool) -> _Operand | None:
    """What matrices of queries, keys or values, a row for each, are made of."""
    if value is None or _rank(value) not in (3, 4):
        return None
    perm = list(range(_rank(value)))
    if is_transposed:
        perm[-2:] = perm[:-3:-1]
    operand = _Operand(value, perm)
    while (node := operand.value.producer()) is not None and node.inputs and node.inputs[0] is not None:
        source, axes = node.inputs[0], None
        if is_transpose(node):
            axes = permutation(node)
        elif (swapped := _swapped(node)) is not None:
            source, axes = swapped, [0, 1, 3, 2]
        if axes is not None:
            operand = operand._replace(value=source, perm=[axes[k] for k in operand.perm])
        elif (scaled := _scaled(known, node)) is not None:
            operand = operand._replace(value=scaled[0], factor=operand.factor * scaled[1])
        else:
            return _split(operand, node)
    return operand


def _split(operand: _Operand, reshape: ir.Node) -> _Operand:
    """The same without Transposes before a Reshape of [batch · heads, …], as torch's MultiheadAttention has them."""
    value, whole = reshape.inputs[0], _dims(reshape.outputs[0])
    if reshape.op_type != "Reshape" or value is None or len(whole) != 4 or None in whole[2:]:
        return operand
    if _dims(value)[1:] != whole[2:]:
        return operand
    perm = [0, 1, 2]
    while (node := value.producer()) is not None and is_transpose(node) and node.inputs[0] is not None:
        value, perm = node.inputs[0], [permutation(node)[axis] for axis in perm]
    at = perm[0]  # of the axis that batch and heads have in common
    dims = [*_dims(value)[:at], *whole[:2], *_dims(value)[at + 1 :]]
    if perm == [0, 1, 2] or sum(not isinstance(d, int) for d in dims) > 1:
        return operand
    axes = [at, at + 1, *(axis + (axis > at) for axis in perm[1:])]
    return operand._replace(value=value, perm=[axes[k] for k in operand.perm], split=dims)


def _swapped(node: ir.Node) -> ir.Value | None:
    """x, if the node swaps its last two axes by way of a tensor of three dimensions, as torch's exporter writes it."""
    inner = node.inputs[0].producer() if node.op_type == "Reshape" and node.inputs[0] is not None else None
    if inner is None or not is_transpose(inner) or permutation(inner) != [0, 2, 1] or inner.inputs[0] is None:
        return None
    first = inner.inputs[0].producer()
    x = None if first is None or first.op_type != "Reshape" else first.inputs[0]
    if x is None or _rank(x) != 4 or None in (*_dims(x)[1:], *_dims(inner.inputs[0])[1:]):
        return None
    dims, result = _dims(x), _dims(node.outputs[0])
    is_so = _dims(inner.inputs[0])[1:] == dims[2:] and result == [*dims[:2], dims[3], dims[2]]
    return x if is_so else None


def _fit(*operands: _Operand) -> bool:
    """Whether Q, K and V have the shapes that FlashAttention takes."""
    q = operands[0]
    if len({len(o.perm) for o in operands}) != 1 or {o.value.dtype for o in operands} - {q.value.dtype}:
        return False
    batches, numbers = {o.dims[0] for o in operands}, {o.dims[-1] for o in operands}
    heads = [o.dims[1] if len(o.perm) == 4 else 1 for o in operands]
    are_shared = all(isinstance(h, int) for h in heads) and heads[1] > 0 and heads[0] % heads[1] == 0
    return (
        q.value.dtype in TYPES
        and not {None} & {*batches, *heads}
        and len(batches) == len(numbers) == 1
        and heads[1] == heads[2]
        and (heads[0] == heads[1] or are_shared)
        and all(isinstance(d, int) and 0 < d <= LONGEST_HEAD for d in numbers)
    )


def _is_trained(value: ir.Value, trained: Container[Any]) -> bool:
    """Whether a gradient flows from it to a parameter."""
    waiting, seen = [value], set()
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        if current.name in trained:
            return True
        node = current.producer()
        if node is not None and not ((rule := RULES.get((node.domain, node.op_type))) is not None and rule.is_zero):
            waiting += values_read(node)
    return False


def _in_layout(builder: Builder, operand: _Operand) -> Tensor:
    """[batch, length, heads, numbers]."""
    perm = operand.perm if len(operand.perm) == 3 else [operand.perm[axis] for axis in LAYOUT]
    x = builder.tensor(operand.value)
    if operand.split is not None:
        x = op.Reshape(x, [d if isinstance(d, int) else -1 for d in operand.split])
        x.value.shape = ir.Shape(operand.split)
    x = x if perm == sorted(perm) else op.Transpose(x, perm=perm)
    return op.Unsqueeze(x, [2]) if len(perm) == 3 else x


def _needed(known: _Constants, masks: list[_Mask], batch: Any, lengths: tuple[Any, Any]) -> tuple[list[_Mask], bool]:
    """The masks that hide anything, and whether queries see no keys after their own position, which then is none."""
    found: list[tuple[_Mask, Array | None]] = []
    for mask in map(functools.partial(_simplified, known), masks):
        numbers = _numbers(known, mask, batch)
        if numbers is None or numbers.any():
            found.append((mask, numbers))
    causal = [(m, n) for m, n in found if n is not None and _hides_what_follows(n, lengths)]
    others = [(m, n) for m, n in found if not any(m is other for other, _ in causal)]
    # Where another mask hides all the keys up to a query's position, a low number lets it see those after it.
    if all(n is not None and np.abs(n).max() < -LOW / 100 for _, n in others):
        return [m for m, _ in others], bool(causal)
    if any(m.replaces_by_number for m, _ in found):
        return [m for m, _ in found], False
    infinite = [m for m, n in causal if n is not None and n.min() == n[n != 0].max() == -math.inf]
    return [m for m, _ in found if not any(m is other for other in infinite)], bool(infinite)


def _numbers(known: _Constants, mask: _Mask, batch: Any) -> Array | None:
    array = known.whatever_the_batch(mask.value, batch)
    return array if array is None or mask.chosen is None else np.where(array, *mask.chosen)


def _one_mask(builder: Builder, masks: list[_Mask], rank: int) -> Tensor | None:
    """All masks in one: what the scores would be if all products were 0."""
    if masks and all(m.chosen is not None and sorted(m.chosen) == [-math.inf, 0] for m in masks):
        return functools.reduce(Tensor.__and__, (_seen(builder, m, rank) for m in masks))
    found: Tensor | None = None
    for mask in masks:
        x = _ranked(builder, mask, rank)
        if mask.chosen is None:
            x = in_type(x, ir.DataType.FLOAT)
        elif found is not None and mask.replaces:
            numbers = [builder.constant(n, ir.DataType.FLOAT) if n else found for n in mask.chosen]
            found = op.Where(x, *numbers)
            continue
        else:
            x = _choice(builder, x, *mask.chosen)
        found = x if found is None else found + x
    return found


def _without_blind(known: _Constants, queries: Tensor, masks: list[_Mask], batch: Any, rank: int) -> Tensor:
    """Zeros for queries all whose scores a low number replaces: Softmax makes the same of it, and no gradient flows."""
    replacing = [mask for mask in masks if mask.replaces]
    if not any(mask.replaces_by_number for mask in replacing):
        return queries
    arrays = [a for mask in replacing if (a := _numbers(known, mask, batch)) is not None]
    if len(arrays) == len(replacing) and (functools.reduce(np.add, arrays) == 0).any(-1).all():
        return queries  # each sees some key
    builder = known.builder
    seen = functools.reduce(Tensor.__and__, (_seen(builder, mask, rank) for mask in replacing))
    sees = op.ReduceMax(in_type(seen, ir.DataType.FLOAT), [-1], keepdims=1)
    if sees.rank < len(LAYOUT):
        sees = op.Unsqueeze(sees, list(range(len(LAYOUT) - sees.rank)))
    return queries * in_type(op.Transpose(sees, perm=LAYOUT), queries.dtype)


def _seen(builder: Builder, mask: _Mask, rank: int) -> Tensor:
    """Truth values, true where a query sees a key, of a mask that chooses."""
    x = _ranked(builder, mask, rank)
    return x if mask.chosen is not None and mask.chosen[0] == 0 else ~x


def _ranked(builder: Builder, mask: _Mask, rank: int) -> Tensor:
    x = builder.tensor(mask.value)
    return op.Unsqueeze(x, [1]) if rank == 3 and x.rank == 3 else x


def _choice(builder: Builder, condition: Tensor, yes: float, no: float) -> Tensor:
    return op.Where(condition, *(builder.constant(number, ir.DataType.FLOAT) for number in (yes, no)))  # type: ignore[no-any-return]


def _simplified(known: _Constants, mask: _Mask) -> _Mask:
    """By truth values where a mask chooses between two numbers, and without what is only there to broadcast it."""
    node = mask.value.producer()
    if node is None or not is_standard(node.domain):
        return mask
    if node.op_type == "Where" and mask.chosen is None:
        yes, no = (known.number(value) for value in node.inputs[1:])
        if yes is not None and no is not None and node.inputs[0] is not None:
            return _simplified(known, _Mask(node.inputs[0], (yes, no)))
    if node.op_type == "Expand" and node.inputs[0] is not None:
        return _simplified(known, mask._replace(value=node.inputs[0]))
    if node.op_type == "And" and mask.chosen is not None:
        for one, other in (node.inputs, node.inputs[::-1]):
            array = None if one is None else known.array(one)
            if other is not None and array is not None and array.all():
                return _simplified(known, mask._replace(value=other))
    return mask


def _hides_what_follows(numbers: Array, lengths: tuple[Any, Any]) -> bool:
    if numbers.shape[-2:] != lengths:
        return False
    allowed = np.tri(*lengths, dtype=bool)
    return bool(((numbers == 0) == allowed).all() and (numbers <= LOW)[..., ~allowed].all())


def _scaled(known: _Constants, node: ir.Node) -> tuple[ir.Value, float] | None:
    """A value and a number, if the node multiplies the one with the other or divides it, and changes no shape."""
    if not is_standard(node.domain) or node.op_type not in ("Mul", "Div", "Identity"):
        return None
    first, *others = node.inputs
    if first is None or not others:
        return None if first is None else (first, 1.0)
    (second,) = others
    if (number := known.number(second)) is not None and second is not None and _rank(second) <= _rank(first):
        return (first, number if node.op_type == "Mul" else 1 / number) if number else None
    if node.op_type == "Mul" and second is not None and _rank(first) <= _rank(second):
        number = known.number(first)
        return None if number is None else (second, number)
    return None


def _rank(value: ir.Value | None) -> int:
    """0 if it is not known, too."""
    return 0 if value is None or value.shape is None else len(value.shape)


def _dims(value: ir.Value) -> list[Any]:
    """Numbers and names; None where neither is known."""
    return [d if isinstance(d, int) else d.value for d in value.shape or ()]


def _attribute(node: ir.Node, name: str, default: float | None) -> Any:
    given = node.attributes.get(name)
    return default if given is None else given.value
