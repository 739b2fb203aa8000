"""What an operator is: one typed NumPy function, and everything that follows from its signature."""

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType, NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Generic,
    ParamSpec,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import numpy as np

from onnxgrad import arguments
from onnxgrad.interop import is_foreign, is_on_gpu, to_framework, to_numpy
from onnxgrad.schema import MICROSOFT, Attribute, Input, Known, Output, register
from onnxgrad.tensor_types import Array

if TYPE_CHECKING:
    from onnx.reference.op_run import OpRun

P = ParamSpec("P")
R = TypeVar("R")

OPERATORS: dict[str, "Op[..., Any]"] = {}


class Op(Generic[P, R]):
    """An operator: called, it runs the kernel for the device its arrays live on; `.definition` runs the plain body."""

    def __init__(
        self,
        name: str,
        body: Callable[P, R],
        outputs: Sequence[str],
        shape: Callable[..., Any],
        longest: Callable[..., Any] | None,
        check_values: Callable[..., None] | None,
        domain: str,
        version: int,
    ) -> None:
        functools.update_wrapper(self, body)
        self.name, self.domain, self.version = name, domain, version
        self.body, self.shape_rule, self.longest, self.check_values = body, shape, longest, check_values
        self.function_name = body.__name__
        self.module = body.__module__.rsplit(".", 1)[-1]
        hints = get_type_hints(body, include_extras=True)  # slow, so once
        parameters = inspect.signature(body).parameters.values()
        self.inputs, self.attributes, self.chooses_outputs = _read_parameters(parameters, hints)
        self.outputs = _read_outputs(hints["return"], outputs)
        self.doc = inspect.getdoc(body) or ""
        self._order = tuple(p.name for p in parameters)  # inputs, attributes, and `outputs` if it has that
        self._by_position = sum(p.kind is not p.KEYWORD_ONLY for p in parameters)
        self._defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        self.output_names = [output.name for output in self.outputs]
        # Each output has the type of the first required input that shares its type variable; None: no input does.
        self._dtype_sources = [
            next(
                (k for k, i in enumerate(self.inputs) if i.constraint.name == o.constraint.name and not i.optional),
                None,
            )
            for o in self.outputs
        ]
        self.on_host_only = all(i.constraint.on_host for i in self.inputs)
        self._kernels: dict[str, Callable[..., Any]] = {}
        self._asked_for: dict[str, frozenset[str]] = {}
        self.schema = register(self)

    def __repr__(self) -> str:
        return f"<operator {self.domain}::{self.name}>"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs the operator on arrays of any framework, on the CPU or a GPU; the results are of the same kind.

        Besides its own arguments every operator takes two that say how to run on a GPU and change nothing on a CPU:
        `check=False` does not wait to learn whether an index was out of range (such an index is ignored), and
        `deterministic=False` allows a faster kernel whose sums may differ in their last bits from run to run.
        """
        return self._run(None, args, kwargs)

    def into(self, out: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        """Like a call, but writes into `out`: C-contiguous arrays of the right shape and type, one per output."""
        return self._run((out,) if isinstance(out, np.ndarray) or is_foreign(out) else out, args, kwargs)

    def definition(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs the NumPy body that says what the operator means, after the same checks as a call."""
        try:
            values = arguments.bind(self._order, self._by_position, self._defaults, args, kwargs)
            inputs = arguments.to_arrays(self.inputs, values)
            attributes, wanted = self.settings(values)
            self.checked_shapes(inputs, attributes)
            if self.chooses_outputs:
                attributes = {**attributes, "outputs": wanted}
            return self.body(*inputs, **attributes)  # type: ignore[arg-type]
        except (TypeError, ValueError, IndexError, MemoryError) as error:
            raise self.named(error) from None

    def _module(self, folder: str) -> ModuleType | None:
        """The file of that folder which has the same name as the operator's own, if there is one."""
        name = f"onnxgrad.{folder}.{self.module}"
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
            return None

    def kernel(self, backend: str) -> Callable[..., Any]:
        """The kernel for "cpu" or "cuda": the function of the same name in the backend's module of the same name."""
        if backend not in self._kernels:
            module = self._module(backend)
            if module is None:
                raise TypeError(
                    "has no kernel for GPUs, expected arrays in the CPU's memory"
                    if backend == "cuda"
                    else "has no kernel for the CPU, expected arrays on a GPU"
                )
            self._kernels[backend] = getattr(module, self.function_name)
            self._asked_for[backend] = frozenset(inspect.signature(self._kernels[backend]).parameters)
        return self._kernels[backend]

    def has_kernel(self, backend: str) -> bool:
        """Whether the backend has a file for the operator; none is loaded."""
        return importlib.util.find_spec(f"onnxgrad.{backend}.{self.module}") is not None

    @property
    def function(self) -> Callable[..., Any]:
        """What writes the operator as an ONNX function, found in functions/ as kernels are found in theirs.

        It maps a functions.body.Body, the inputs (None where absent) and those attributes that it declares to the list
        of outputs.
        """
        return getattr(self._module("functions"), self.function_name)  # type: ignore[no-any-return]

    def kernel_asks_for(self, backend: str, parameter: str) -> bool:
        """Whether that kernel takes an argument that is not part of the operator."""
        self.kernel(backend)
        return parameter in self._asked_for[backend]

    def _run(self, out: Sequence[Any] | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> R:
        try:
            how = (True, True)
            if kwargs:
                how, kwargs = _how_to_run(kwargs)
            values = arguments.bind(self._order, self._by_position, self._defaults, args, kwargs)
            like = None
            for value in values:
                if value.__class__ is not np.ndarray and is_foreign(value):
                    like = value
                    break
            results: tuple[Any, ...]
            if like is None:
                results = _caller("cpu")(self, out, values)
            elif not self.on_host_only and any(is_on_gpu(v) for v in values):
                results = self._run_on_gpu(out, values, *how)
            else:
                arrays = [to_numpy(v) if is_foreign(v) else v for v in values]
                given = None if out is None else [to_numpy(o) if is_foreign(o) else o for o in out]
                results = _caller("cpu")(self, given, arrays)
                results = tuple(
                    None if r is None else to_framework(r, like) if out is None else out[k]
                    for k, r in enumerate(results)
                )
        except (TypeError, ValueError, IndexError, MemoryError) as error:
            raise self.named(error) from None
        return results[0] if len(results) == 1 else results  # type: ignore[return-value]

    def _run_on_gpu(
        self, out: Sequence[Any] | None, values: Sequence[Any], check: bool, deterministic: bool
    ) -> tuple[Any, ...]:
        try:
            run = _caller("cuda")
        except ImportError as error:
            raise MissingLibraryError(
                f"arrays on a GPU need torch and triton: pip install 'onnxgrad[cuda]' ({error})"
            ) from None
        return run(self, out, values, *self.settings(values), check, deterministic)

    def named(self, error: Exception) -> Exception:
        """The same error, its sentence opening with the operator's name."""
        if isinstance(error, MemoryError):  # NumPy's prints the same whatever its arguments are
            return MemoryError(f"{self.name}: {error}")
        error.args = (f"{self.name}: {error.args[0] if error.args else type(error).__name__}",)
        return error

    def settings(self, values: Sequence[Any]) -> tuple[dict[str, Any], frozenset[str] | None]:
        """The attributes, and the outputs wanted."""
        attributes = {}
        if self.attributes:
            settings = zip(self.attributes, values[len(self.inputs) :], strict=False)
            attributes = {a.name: arguments.to_attribute(a, value) for a, value in settings}
        wanted = arguments.to_output_names(values[-1], self.output_names) if self.chooses_outputs else None
        return attributes, wanted

    def checked_shapes(self, inputs: Sequence[Array | None], attributes: Mapping[str, Any]) -> list[tuple[int, ...]]:
        known = [
            None if x is None else Known(x.shape, tuple(x.tolist()) if declared.constraint.on_host else None)
            for x, declared in zip(inputs, self.inputs, strict=True)
        ]
        shapes = self.output_shapes(known, attributes)
        if self.check_values is not None:
            self.check_values(*inputs, **attributes)
        return shapes

    def output_shapes(self, known: Sequence[Known | None], attributes: Mapping[str, Any]) -> list[tuple[int, ...]]:
        """The shapes of all outputs, for inputs whose own are known; raises where these contradict each other."""
        rule = self.shape_rule(*known, **attributes)
        shapes = [rule] if len(self.outputs) == 1 else list(rule)
        for name, shape in zip(self.output_names, shapes, strict=True):
            arguments.check_size(name, shape)
        return shapes

    def output_dtypes(self, of_inputs: Sequence[Any]) -> list[Any]:
        """The types of the outputs, given those of the inputs; a variable that no input has stands for one type."""
        return [
            output.constraint.dtypes[0] if source is None else of_inputs[source]
            for output, source in zip(self.outputs, self._dtype_sources, strict=True)
        ]


def operator_of(domain: str, op_type: str) -> Op[..., Any] | None:
    """The operator of ours that a node is of, if it is of one."""
    found = OPERATORS.get(op_type)
    return found if found is not None and found.domain == domain else None


@functools.cache
def _caller(backend: str) -> Callable[..., tuple[Any, ...]]:
    """What a backend runs an operator's call with; backends import the operators, so they are found by name."""
    return importlib.import_module(f"onnxgrad.{backend}.core.call").run  # type: ignore[no-any-return]


class MissingLibraryError(ImportError):
    """A device needs a library that is not installed."""


def _how_to_run(kwargs: Mapping[str, Any]) -> tuple[tuple[bool, bool], Mapping[str, Any]]:
    """(check, deterministic), and the other keyword arguments."""
    if "check" not in kwargs and "deterministic" not in kwargs:
        return (True, True), kwargs
    rest = dict(kwargs)
    how = rest.pop("check", True), rest.pop("deterministic", True)
    for name, value in zip(("check", "deterministic"), how, strict=True):
        if not isinstance(value, bool):
            raise TypeError(f"{name} is {value!r}, expected True or False")
    return how, rest


def op(
    name: str,
    *,
    outputs: str | Sequence[str],
    shape: Callable[..., Any],
    longest: Callable[..., Any] | None = None,
    check_values: Callable[..., None] | None = None,
    domain: str = MICROSOFT,
    version: int = 1,
) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Declares the decorated function as an operator.

    Parameters annotated with a tensor type are inputs, `| None` ones optional; the others are attributes, except
    `outputs`, which lets a caller name the results wanted. `outputs` names the results ("HFinal?" may be absent).
    `shape` maps what is known of the inputs (schema.Known) and the attributes to the outputs' shapes, and raises
    ValueError where they contradict each other; a call and onnx's shape inference both use it. Where shapes depend on
    values, `longest` maps the inputs to lengths that are enough for the outputs, which are vectors of int64, and the
    kernel returns the lengths it filled. `check_values` raises for values that no input may have.
    """

    def declare(body: Callable[P, R]) -> Op[P, R]:
        names = (outputs,) if isinstance(outputs, str) else tuple(outputs)
        declared = Op(name, body, names, shape, longest, check_values, domain, version)
        OPERATORS[name] = declared
        return declared

    return declare


def reference_ops() -> "list[type[OpRun]]":
    """Every operator as a class for `onnx.reference.ReferenceEvaluator(model, new_ops=onnxgrad.reference_ops())`."""
    from onnx.reference.op_run import OpRun

    def run(self: Any, *inputs: Any, **attributes: Any) -> tuple[Any, ...]:
        # onnx.reference wants an array for every output, so those that the node leaves out are computed too.
        result = OPERATORS[type(self).__name__].definition(*inputs, **attributes)
        everything = result if isinstance(result, tuple) else (result,)
        return everything[: len(self.onnx_node.output)]

    return [type(op.name, (OpRun,), {"op_domain": op.domain, "_run": run}) for op in OPERATORS.values()]


def _without_none(annotation: Any) -> tuple[Any, bool]:
    if get_origin(annotation) in (Union, UnionType):
        members = [m for m in get_args(annotation) if m is not NoneType]
        return members[0], len(members) < len(get_args(annotation))
    return annotation, False


def _read_parameters(
    parameters: Iterable[inspect.Parameter], hints: Mapping[str, Any]
) -> tuple[list[Input], list[Attribute], bool]:
    inputs: list[Input] = []
    attributes: list[Attribute] = []
    chooses_outputs = False
    for parameter in parameters:
        annotation, optional = _without_none(hints[parameter.name])
        if get_origin(annotation) is Annotated:
            inputs.append(Input(parameter.name, get_args(annotation)[1], optional))
        elif parameter.name == "outputs":
            chooses_outputs = True
        else:
            is_list = get_origin(annotation) is not None
            kind = get_args(annotation)[0] if is_list else annotation
            attributes.append(Attribute(parameter.name, kind, is_list, parameter.default))
    return inputs, attributes, chooses_outputs


def _read_outputs(result: Any, names: Sequence[str]) -> list[Output]:
    annotations = get_args(result) if get_origin(result) is tuple else (result,)
    return [
        Output(name.rstrip("?"), get_args(_without_none(annotation)[0])[1], name.endswith("?"))
        for name, annotation in zip(names, annotations, strict=True)
    ]
