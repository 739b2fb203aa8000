"""What a caller passed, turned into what an operator declared: arrays of known types, or one clear sentence."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np

from onnxgrad.schema import MOST_DIMENSIONS, Attribute, Input
from onnxgrad.tensor_types import Array

NATIVE_INT64 = np.dtype(np.int64)


def bind(
    order: Sequence[str], by_position: int, defaults: Mapping[str, Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Sequence[Any]:
    """The arguments in their order; what is missing, unknown or given twice is named in the error."""
    if len(args) == len(order) == by_position and not kwargs:
        return args
    if not args and len(kwargs) == len(order):  # everything by name, quickly
        try:
            return [kwargs[name] for name in order]
        except KeyError:
            pass  # said below
    if len(args) > by_position:
        names = ", ".join(order[:by_position])
        raise TypeError(f"takes at most {by_position} arguments ({names}), got {len(args)}")
    values = dict(zip(order, args, strict=False))
    for name, value in kwargs.items():
        if name not in order:
            raise TypeError(f"has no argument {name!r}, expected one of {', '.join(order)}")
        if name in values:
            raise TypeError(f"got {name} twice, by position and by name")
        values[name] = value
    for name in order:
        if name not in values:
            if name not in defaults:
                raise TypeError(f"{name} is missing")
            values[name] = defaults[name]
    return [values[name] for name in order]


def to_arrays(declared: Sequence[Input], values: Sequence[Any]) -> list[Array | None]:
    """Each input as an array of a type its constraint allows; inputs that share a type variable share the type."""
    arrays: list[Array | None] = []
    chosen: dict[str, tuple[str, np.dtype[Any]]] = {}
    from_python: list[int] = []  # lists and ints have no width of their own: they take that of their companions
    for position, entry in enumerate(declared):
        value, constraint = values[position], entry.constraint
        if constraint.name == "I":
            arrays.append(_to_shape(entry, value))
            continue
        if value is None:
            _refuse_absent(entry)
            arrays.append(None)
            continue
        array = _to_array(entry, value)
        arrays.append(array)
        if not isinstance(value, (np.ndarray, np.generic)):
            from_python.append(position)
        elif constraint.name not in chosen:
            chosen[constraint.name] = (entry.name, array.dtype)
        elif chosen[constraint.name][1] != array.dtype:
            first, dtype = chosen[constraint.name]
            raise TypeError(f"{entry.name} is {array.dtype}, expected {dtype} as {first} is")
    for position in from_python:
        given, entry = arrays[position], declared[position]
        wanted = chosen.get(entry.constraint.name, ("", entry.constraint.dtypes[-1]))[1]
        if given is not None and given.dtype != wanted:
            if given.size and not np.array_equal(given, given.astype(wanted)):
                raise ValueError(f"{entry.name} holds values that do not fit {wanted}")
            arrays[position] = given.astype(wanted)
    return arrays


def _refuse_absent(entry: Input) -> None:
    if not entry.optional:
        raise TypeError(f"{entry.name} is None, expected an array of {list_types(entry)}")


def _to_array(entry: Input, value: Any) -> Array:
    constraint = entry.constraint
    if isinstance(value, (np.ndarray, np.generic)):
        array: Array = np.asarray(value)  # a subclass (matrix, masked) would index by rules of its own
    elif constraint.dtypes[0].kind == "i":
        return _one_dimension(entry, _integers(entry.name, value))  # its width is settled by its companions
    else:
        raise TypeError(f"{entry.name} is a {type(value).__name__}, expected a NumPy array of {list_types(entry)}")
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    array = _one_dimension(entry, array)
    if array.dtype not in constraint.dtypes and not (constraint.name == "I" and array.dtype.kind in "iu"):
        raise TypeError(f"{entry.name} is {array.dtype}, expected {list_types(entry)}")
    return array


def _one_dimension(entry: Input, array: Array) -> Array:
    """Shape-like inputs are vectors; a single number is one of length 1."""
    if not entry.constraint.on_host or array.ndim == 1:
        return array
    if array.ndim > 1:
        raise ValueError(f"{entry.name} has shape {array.shape}, expected one dimension")
    return array.reshape(1)


def _to_shape(entry: Input, value: Any) -> Array:
    """A shape as int64, whatever integers it came in."""
    array: Array
    if value.__class__ is np.ndarray:  # the usual cases, quickly
        if value.dtype is NATIVE_INT64 and value.ndim == 1:
            array, dims = value, value.tolist()
            if not dims or min(dims) >= 0:
                return array
    elif value.__class__ is list or value.__class__ is tuple:
        try:
            array = np.array(value)
            if array.dtype is NATIVE_INT64 and array.ndim == 1 and min(value) >= 0:
                return array
        except ValueError:
            pass  # ragged: said below
    if value is None:
        _refuse_absent(entry)
    array = _to_array(entry, value)
    if array.dtype != NATIVE_INT64:
        if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
            raise ValueError(f"{entry.name} holds values that do not fit int64")
        array = array.astype(np.int64)
    dims = array.tolist()
    if dims and min(dims) < 0:
        spelled = dims if len(dims) <= MOST_DIMENSIONS else f"{len(dims)} numbers, {min(dims)} among them"
        raise ValueError(f"{entry.name} is {spelled}, expected no negative dimension")
    return array


def _integers(name: str, value: Any) -> Array:
    """A list, tuple, range or int as an int64 array."""
    if not isinstance(value, (list, tuple, range, int)) or isinstance(value, bool):
        raise TypeError(f"{name} is a {type(value).__name__}, expected integers: a NumPy array, a list or an int")
    try:
        array = np.array(value)
    except ValueError:
        raise ValueError(f"{name} is a ragged list, expected integers of one shape") from None
    if array.size == 0:
        return np.empty(array.shape, np.int64)
    if array.dtype.kind != "i":
        # Python's integers have no limit; NumPy makes unsigned numbers, floats or objects of those that are too large.
        if all(isinstance(v, int) and not isinstance(v, bool) for v in np.array(value, object).ravel().tolist()):
            raise ValueError(f"{name} holds values that do not fit int64")
        raise TypeError(f"{name} holds {array.dtype} values, expected integers")
    return array


def to_attribute(declared: Attribute, value: Any) -> Any:
    """The attribute in its declared Python type."""
    if value is None and declared.default is None:
        return None
    if declared.is_list:
        is_list = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
        if not is_list and not (isinstance(value, np.ndarray) and value.ndim == 1):
            raise TypeError(f"{declared.name} is a {type(value).__name__}, expected a list of {declared.kind.__name__}")
        return [_scalar(declared, v) for v in value]
    return _scalar(declared, value)


def _scalar(declared: Attribute, value: Any) -> Any:
    accepted = {int: (int, np.integer), float: (float, int, np.floating, np.integer), str: (str,)}[declared.kind]
    if not isinstance(value, accepted) or isinstance(value, bool):
        raise TypeError(f"{declared.name} is {value!r}, expected {declared.kind.__name__}")
    return declared.kind(value)


def to_output_names(value: Any, names: Sequence[str]) -> frozenset[str] | None:
    """The outputs a caller named; None stands for all."""
    if value is None:
        return None
    if not isinstance(value, (str, Sequence, Set)):
        raise TypeError(f"outputs is {value!r}, expected some of {', '.join(names)}")
    asked = (value,) if isinstance(value, str) else tuple(value)
    for name in asked:
        if name not in names:
            raise ValueError(f"outputs names {name!r}, expected some of {', '.join(names)}")
    return frozenset(asked)


def check_size(name: str, shape: Sequence[int]) -> None:
    """Refuses a shape no array can have."""
    if len(shape) < 32 and max(shape, default=0) ** len(shape) < 2**59:  # the usual case, quickly
        return
    if math.prod(d for d in shape if d) >= 2**59:  # zeros aside, as NumPy reckons: strides must fit too
        raise ValueError(f"{name} would have shape {list(shape)}, too large for any memory")


def check_out(
    out: Sequence[Array | None],
    names: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[np.dtype[Any]],
    wanted: frozenset[str] | None,
    inputs: Sequence[Array | None],
) -> tuple[Array | None, ...]:
    """The caller's own result arrays, if they can serve."""
    if isinstance(out, str) or not isinstance(out, Sequence):
        raise TypeError(f"out is a {type(out).__name__}, expected an array, or one for each of {', '.join(names)}")
    if len(out) != len(names):
        raise ValueError(f"out has {len(out)} arrays, expected {len(names)}: {', '.join(names)}")
    for array, name, shape, dtype in zip(out, names, shapes, dtypes, strict=True):
        if array is None:
            if wanted is None or name in wanted:
                raise ValueError(f"out has no array for {name}")
            continue
        if not isinstance(array, np.ndarray):
            raise TypeError(f"out for {name} is a {type(array).__name__}, expected an array")
        if array.shape != tuple(shape) or array.dtype != dtype:
            raise ValueError(f"out for {name} is {array.dtype}{list(array.shape)}, expected {dtype}{list(shape)}")
        if not array.flags.c_contiguous or not array.flags.writeable:
            raise ValueError(f"out for {name} is not a writeable C-contiguous array")
        if not array.flags.aligned:
            raise ValueError(f"out for {name} is not aligned to its type")
        if any(x is not None and np.may_share_memory(array, x) for x in inputs):
            raise ValueError(f"out for {name} shares memory with an input")
        for other, before in zip(names, out, strict=True):
            if other == name:
                break
            if before is not None and np.may_share_memory(array, before):
                raise ValueError(f"out for {name} shares memory with {other}")
    return tuple(a if wanted is None or n in wanted else None for a, n in zip(out, names, strict=True))


def check_axis(axis: int, rank: int) -> int:
    """The axis counted from the front."""
    if not -rank <= axis < rank:
        raise ValueError(f"axis is {axis}, expected {-rank} to {rank - 1} for {rank} dimensions")
    return axis % rank


def check_indices(indices: Array, size: int) -> None:
    """Refuses the first index outside [-size, size-1]."""
    bad = (indices < -size) | (indices >= size)
    if bad.any():
        position = int(np.argmax(bad))
        raise index_error(indices.shape, position, indices.flat[position], size)


def index_error(shape: Sequence[int], position: int, value: int, size: int) -> IndexError:
    """The sentence for a bad index at a flat position of indices of that shape."""
    where = [int(i) for i in np.unravel_index(position, shape)]
    name = f"indices{where}" if where else "indices"
    if size == 0:
        return IndexError(f"{name} is {value}, expected none: the axis has no elements")
    return IndexError(f"{name} is {value}, expected {-size} to {size - 1}")


def label_error(shape: Sequence[int], position: int, value: int, classes: int, ignore_index: int) -> IndexError:
    """The sentence for a label that is no class, at a flat position of labels of that shape."""
    where = [int(i) for i in np.unravel_index(position, shape)]
    expected = f"0 to {classes - 1}" if classes else "none, as there are no classes,"
    return IndexError(f"label{where} is {value}, expected {expected} or ignore_index {ignore_index}")


def length_error(position: int, value: int, steps: int) -> ValueError:
    """The sentence for a bad length of a sequence."""
    return ValueError(f"SL[{position}] is {value}, expected 0 to {steps}, the number of steps")


def list_types(entry: Input) -> str:
    """The types an input may have, in words."""
    names = [str(d) for d in entry.constraint.dtypes]
    return " or ".join(names) if len(names) < 3 else ", ".join(names[:-1]) + " or " + names[-1]
