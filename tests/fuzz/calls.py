"""A call of an operator, all of it drawn from one number; many of them are wrong in some way."""

from typing import Any, NamedTuple

import numpy as np
from tests.fuzz.draw import WILD_FLOATS, Draw
from tests.fuzz.families import draw_calls

from onnxgrad.op import OPERATORS
from onnxgrad.ops import load_operators

LARGE_NUMBERS = (-1, 0, 1, 2, 3, 100, 10**6, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1, -(2**31), -(2**63))
# A loop runs this often for each element; a large number would be no error but take for ever.
COUNTS = {"sampling_ratio", "output_height", "output_width"}


class Call(NamedTuple):
    """What an operator is called with; `wrong` says that anything was changed after a right call was drawn."""

    op: Any
    inputs: list[Any]
    settings: dict[str, Any]
    wrong: tuple[str, ...]

    def __str__(self) -> str:
        inputs = [f"{e.name}={_spell(a)}" for e, a in zip(self.op.inputs, self.inputs, strict=True)]
        settings = [f"{name}={value!r}" for name, value in self.settings.items()]
        wrong = f" ({'; '.join(self.wrong)})" if self.wrong else ""
        return f"{self.op.name}({', '.join(inputs + settings)}){wrong}"


def _spell(value: Any) -> str:
    if not isinstance(value, np.ndarray):
        return repr(value)
    if value.ndim == 1 and value.size < 7 and value.dtype.kind in "iu":
        return f"{value.dtype}{value.tolist()}"
    return f"{value.dtype}{list(value.shape)}" + ("" if value.flags.c_contiguous else f" strides {value.strides}")


def operators(pattern: str = "") -> list[Any]:
    """Those with a kernel for the CPU, as far as their name contains the pattern."""
    load_operators()
    return [op for name, op in sorted(OPERATORS.items()) if op.has_kernel("cpu") and (pattern.lower() in name.lower())]


def draw_call(op: Any, seed: int) -> Call:
    """One call."""
    d = Draw(seed, 1)
    drawn = draw_calls(op, d)
    settings, inputs, wrong = dict(drawn.attributes), drawn.make_inputs(), []
    if op.chooses_outputs and d.chance(0.4):
        settings["outputs"] = [n for n in op.output_names if d.chance(0.5)]
    if d.chance(0.15):
        inputs = [d.wild(a) if _is_float(a) else a for a in inputs]
        wrong.append("extreme numbers")
    while d.chance(0.3 if not wrong else 0.2):
        wrong.append(d.one(CHANGES)(op, d, inputs, settings))
    return Call(op, [d.guarded(a) for a in inputs], settings, tuple(wrong))


def _is_float(array: Any) -> bool:
    return isinstance(array, np.ndarray) and array.dtype.kind not in "iub"


def _arrays(inputs: list[Any]) -> list[int]:
    return [k for k, a in enumerate(inputs) if isinstance(a, np.ndarray)] or [0]


def _other_size(op: Any, d: Draw, inputs: list[Any], settings: dict[str, Any]) -> str:
    k = d.one(_arrays(inputs))
    array = inputs[k]
    if not isinstance(array, np.ndarray) or not array.ndim:
        return "nothing"
    shape = list(array.shape)
    axis = d.number(0, array.ndim)
    shape[axis] = max(0, d.one((shape[axis] + 1, shape[axis] - 1, 0, 1, 2 * shape[axis], d.size(100))))
    if 0 in shape and d.chance(0.5):  # where nothing is stored, the other dimensions have no limit
        shape = [d.one((n, n, 2**31, 2**40)) if n else 0 for n in shape]
    if np.prod([n or 1 for n in shape], dtype=object) >= (2**58 if 0 in shape else 2**20):
        shape = list(array.shape)
    inputs[k] = np.resize(array, shape) if array.size else np.zeros(shape, array.dtype)
    return f"{op.inputs[k].name} has another size"


def _other_rank(op: Any, d: Draw, inputs: list[Any], settings: dict[str, Any]) -> str:
    k = d.one(_arrays(inputs))
    if isinstance(inputs[k], np.ndarray):
        array = inputs[k]
        first = array[0] if array.ndim and len(array) else array
        many = array.reshape((1,) * min(40, 64 - array.ndim) + array.shape)  # NumPy has no more than 64
        inputs[k] = d.one((array[None], array[..., None], array.reshape(-1), many, first))
        inputs[k] = np.asarray(inputs[k])
    return f"{op.inputs[k].name} has another rank"


def _other_type(op: Any, d: Draw, inputs: list[Any], settings: dict[str, Any]) -> str:
    k = d.one(_arrays(inputs))
    if isinstance(inputs[k], np.ndarray):
        with np.errstate(all="ignore"):
            inputs[k] = d.values(inputs[k].shape, d.any_dtype())
    return f"{op.inputs[k].name} has another type"


def _absent(op: Any, d: Draw, inputs: list[Any], settings: dict[str, Any]) -> str:
    k = d.number(0, len(inputs))
    inputs[k] = None
    return f"{op.inputs[k].name} is absent"


def _wild(op: Any, d: Draw, inputs: list[Any], settings: dict[str, Any]) -> str:
    k = d.one([k for k in _arrays(inputs) if not _is_float(inputs[k])] or _arrays(inputs))
    if isinstance(inputs[k], np.ndarray):
        inputs[k] = d.wild(inputs[k])
    return f"{op.inputs[k].name} has extreme numbers"


def _swapped(op: Any, d: Draw, inputs: list[Any], settings: dict[str, Any]) -> str:
    j, k = d.number(0, len(inputs)), d.number(0, len(inputs))
    inputs[j], inputs[k] = inputs[k], inputs[j]
    return f"{op.inputs[j].name} and {op.inputs[k].name} are swapped"


def _python_object(op: Any, d: Draw, inputs: list[Any], settings: dict[str, Any]) -> str:
    k = d.number(0, len(inputs))
    inputs[k] = d.one((3, -1, 2.5, [1, 2], [], [[1], [2, 3]], "text", (), {}, True, 2**70, [2**64], range(3), object))
    if isinstance(inputs[k], list | tuple | range) or d.chance(0.5):
        return f"{op.inputs[k].name} is an object of Python"
    inputs[k] = np.float32(2.5) if d.chance(0.5) else np.array(["text"])
    return f"{op.inputs[k].name} is an object of NumPy"


def _other_attribute(op: Any, d: Draw, inputs: list[Any], settings: dict[str, Any]) -> str:
    if not op.attributes:
        return "nothing"
    attribute = d.one(op.attributes)
    settings[attribute.name] = _value(attribute, d, settings.get(attribute.name))
    return f"{attribute.name} is another"


def _value(attribute: Any, d: Draw, now: Any) -> Any:
    if d.chance(0.1):
        return d.one((None, "text", 1.5, [1], True, [None], -1, {}, object))
    one = {
        int: lambda: d.number(-3, 10) if attribute.name in COUNTS else d.one(LARGE_NUMBERS),
        float: lambda: float(d.one((*WILD_FLOATS, 0.5, -1.0, 1.0))),
        str: lambda: d.one(("", "text", "SAME_UPPER", "VALID", "mean", "reverse", "Relu", "affine", "bfloat16", "é\n")),
    }[attribute.kind]
    if not attribute.is_list:
        return one()
    if isinstance(now, list) and now and d.chance(0.7):
        found = list(now)
        found[d.number(0, len(found))] = one()
        return found
    return [one() for _ in range(d.number(0, 7))]


def _other_outputs(op: Any, d: Draw, inputs: list[Any], settings: dict[str, Any]) -> str:
    if op.chooses_outputs:
        settings["outputs"] = d.one(([], "dX", ["dX", "dX"], ["nothing"], 3, op.output_names[-1], ()))
    return "other outputs"


CHANGES = (
    _other_size, _other_size, _other_rank, _other_type, _absent, _wild, _wild, _wild, _swapped, _python_object,
    _other_attribute, _other_attribute, _other_outputs,
)  # fmt: skip
