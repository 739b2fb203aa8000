"""The one harness for rules: a node's gradient against central differences, once and twice, and in onnxruntime."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, defs, helper, numpy_helper, parser
from tests.left_out import leave_out

import onnxgrad
from onnxgrad.autodiff.check import evaluator, has_ours, session_if_possible
from onnxgrad.passes.infer import infer_shapes

OPSET = 21
EXACT = 2e-6  # relative error of a central difference in float64, with room for curvature
SINGLE = 2e-4  # of float32 against float64, relative to the largest number


def daily(cases: Iterable[str], *chosen: str) -> list[Any]:
    """Parameters: those chosen run with `make test`, the others, which vary them, with the slow tests."""
    every = list(cases)
    assert set(chosen) < set(every), set(chosen) - set(every)
    return [case if case in chosen else pytest.param(case, marks=pytest.mark.slow) for case in every]


def model_of_node(
    op_type: str,
    inputs: Sequence[Any],
    outputs: int = 1,
    *,
    attributes: dict[str, Any] | None = None,
    domain: str = "",
    opset: int = OPSET,
    static: bool = True,
    fixed: Sequence[int] = (),
    dtype: Any = np.float64,
) -> tuple[onnx.ModelProto, dict[str, Any]]:
    """A model of one node and what to feed it; dimensions unknown unless `static`, inputs in `fixed` initializers."""
    names, infos, initializers, feeds = [], [], [], {}
    for k, given in enumerate(inputs):
        names.append("" if given is None else f"in_{k}")
        if given is None:
            continue
        array = np.asarray(given)
        array = array.astype(dtype) if array.dtype.kind == "f" and not _float32_only(op_type, domain, k) else array
        if k in fixed:
            initializers.append(numpy_helper.from_array(array, names[-1]))
            continue
        kind = helper.np_dtype_to_tensor_dtype(array.dtype)
        infos.append(helper.make_tensor_value_info(names[-1], kind, array.shape if static else [None] * array.ndim))
        feeds[names[-1]] = array
    results = [f"out_{k}" for k in range(outputs)]
    node = helper.make_node(op_type, names, results, name="node", domain=domain, **(attributes or {}))
    empty = [helper.make_empty_tensor_value_info(r) for r in results]
    graph = helper.make_graph([node], "graph", infos, empty, initializers)
    imports = [helper.make_opsetid("", opset)] + ([helper.make_opsetid(domain, 1)] if domain else [])
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    inferred = infer_shapes(model)
    for output in inferred.graph.output:
        assert output.type.tensor_type.elem_type, f"the type of {output.name} is not inferred"
    if any(not o.type.tensor_type.HasField("shape") for o in inferred.graph.output):
        _declare_ranks(inferred, feeds)
    return inferred, feeds


def _float32_only(op_type: str, domain: str, k: int) -> bool:
    """Whether the operator takes this input in no other type, as Resize takes its scales."""
    inputs = defs.get_schema(op_type, domain=domain).inputs if defs.has(op_type, domain) else []
    return k < len(inputs) and inputs[k].type_str == "tensor(float)"


def _declare_ranks(model: onnx.ModelProto, feeds: dict[str, Any]) -> None:
    """An output must have a number of dimensions, which inference does not always find."""
    for output, result in zip(model.graph.output, evaluate(model, feeds), strict=True):
        if not output.type.tensor_type.HasField("shape"):
            output.type.tensor_type.shape.SetInParent()
            for _ in range(result.ndim):
                output.type.tensor_type.shape.dim.add()


def check_rule(
    op_type: str,
    *inputs: Any,
    outputs: int = 1,
    of: Sequence[int] | None = None,
    wrt: Sequence[int] | None = None,
    fixed: Sequence[int] = (),
    domain: str = "",
    opset: int = OPSET,
    twice: bool = True,
    exact: float = EXACT,
    **attributes: Any,
) -> None:
    """A node's gradient is right: known and unknown shapes, once and twice, in float32 in onnxruntime too.

    `inputs` are arrays (None: left out); `of` and `wrt` choose outputs and inputs by position, by default all of
    floating point; `fixed` inputs are initializers, all others graph inputs. `twice=False` where a second derivative
    is not defined.
    """
    smooth = [k for k, x in enumerate(inputs) if x is not None and np.asarray(x).dtype.kind == "f" and k not in fixed]
    chosen = [f"in_{k}" for k in (smooth if wrt is None else wrt)]
    for static in (True, False):
        model, feeds = model_of_node(
            op_type, inputs, outputs, attributes=attributes, domain=domain, opset=opset, static=static, fixed=fixed
        )
        kinds = [o.type.tensor_type.elem_type for o in model.graph.output]
        results = [k for k in range(outputs) if kinds[k] == TensorProto.DOUBLE] if of is None else of
        named = [f"out_{k}" for k in results]
        checked = onnxgrad.check_gradient(model, feeds, chosen, named)
        assert checked.worst < exact, f"{op_type}, {'known' if static else 'unknown'} shapes:\n{checked}"
        check_single(op_type, inputs, outputs, attributes, domain, opset, static, fixed, chosen, named)
        if twice:
            once = onnxgrad.gradient(model, chosen, named)
            seeds = feeds_for_seeds(once, model, feeds)
            again = [o.name for o in once.graph.output[outputs:]]
            depends = [*chosen, *seeds]
            if not _depends(once, depends, again):
                depends = [n for n in depends if _depends(once, [n], again)]
            if not depends:  # linear, and seeded with 1
                continue
            checked = onnxgrad.check_gradient(once, {**feeds, **seeds}, depends, again)
            assert checked.worst < 10 * exact, f"{op_type} twice, {'known' if static else 'unknown'} shapes:\n{checked}"


def parsed(text: str) -> onnx.ModelProto:
    """A model in onnx's own text format, for what takes more than one node."""
    return parser.parse_model(f'<ir_version: 9, opset_import: ["" : 18]>\n{text}')


def check_model(
    model: onnx.ModelProto, feeds: dict[str, Any], wrt: list[str], of: Any = None, twice: bool = True
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A model's gradient is right, once and twice; it is valid and runs in float32 in onnxruntime without our kernels.

    Returns all results in float32, by name, and what the inputs for seeds were given.
    """
    outputs = [o.name for o in model.graph.output if o.name in (of or [o.name])]
    checked = onnxgrad.check_gradient(model, feeds, wrt, outputs)
    assert checked.worst < EXACT, f"\n{checked}"
    once = onnxgrad.gradient(model, wrt, outputs)
    onnx.checker.check_model(once, full_check=True)
    seeds = feeds_for_seeds(once, model, _single(feeds))
    session = onnxruntime.InferenceSession(once.SerializeToString(), providers=["CPUExecutionProvider"])
    results = session.run(None, _single({**feeds, **seeds}))
    if twice:
        grads = [f"{name}_grad" for name in wrt]
        checked = onnxgrad.check_gradient(once, {**feeds, **seeds}, [*wrt, *seeds], grads)
        assert checked.worst < 10 * EXACT, f"twice\n{checked}"
    return dict(zip([o.name for o in once.graph.output], results, strict=True)), seeds


def _single(feeds: dict[str, Any]) -> dict[str, Any]:
    return {n: np.asarray(a, np.float32) if np.asarray(a).dtype.kind == "f" else a for n, a in feeds.items()}


def feeds_for_seeds(differentiated: onnx.ModelProto, model: onnx.ModelProto, feeds: dict[str, Any]) -> dict[str, Any]:
    """Random numbers for the inputs that take an output's gradient."""
    rng = np.random.default_rng(7)
    results = dict(zip(names(model.graph.output), evaluate(model, feeds), strict=True))
    there = {i.name for i in model.graph.input}
    new = [i.name for i in differentiated.graph.input if i.name not in there]
    return {n: rng.standard_normal(results[n.removesuffix("_grad")].shape) for n in new}


def evaluate(model: onnx.ModelProto, feeds: dict[str, Any]) -> list[Any]:
    """In onnxruntime, or in onnx.reference where that has no kernel for float64."""
    return evaluator(model)(feeds)


def names(values: Iterable[onnx.ValueInfoProto]) -> list[str]:
    return [v.name for v in values]


def results_of(model: onnx.ModelProto, **feeds: Any) -> dict[str, np.ndarray]:
    """By name, of a model that the checker takes."""
    onnx.checker.check_model(model, full_check=True)
    return dict(zip(names(model.graph.output), evaluate(model, feeds), strict=True))


def check_single(
    op_type: str, inputs: Any, outputs: int, attributes: Any, domain: str, opset: int, static: bool, fixed: Any,
    chosen: list[str], named: list[str],
) -> None:  # fmt: skip
    """Checker, strict inference, and float32 in onnxruntime with and without our kernels."""
    how = {"attributes": attributes, "domain": domain, "opset": opset, "static": static, "fixed": fixed}
    model, feeds = model_of_node(op_type, inputs, outputs, dtype=np.float32, **how)
    once = onnxgrad.gradient(model, chosen, named)
    if _is_valid(model):
        onnx.checker.check_model(once, full_check=True)
    else:
        leave_out(f"{op_type}: onnx's checker does not take the node itself")
    infer_shapes(once, check_type=True, strict_mode=True)
    forward = session_if_possible(model)
    if forward is None:
        leave_out(f"{op_type}: onnxruntime has no kernel in float32")
        return
    wide, wide_feeds = model_of_node(op_type, inputs, outputs, **how)
    shapes = {o.name: r.shape for o, r in zip(forward.get_outputs(), forward.run(None, feeds), strict=True)}
    rng = np.random.default_rng(3)
    seeds = {f"{n}_grad": rng.standard_normal(shapes[n]) for n in named}
    there = {i.name for i in once.graph.input}
    seeds = {n: s for n, s in seeds.items() if n in there}
    expected = evaluate(onnxgrad.gradient(wide, chosen, named), {**wide_feeds, **seeds})[outputs:]
    ours = has_ours(once)  # if not, there is nothing that kernels would change
    for options in [_quiet(onnxruntime.SessionOptions()), *([_quiet(onnxgrad.register())] if ours else [])]:
        session = onnxruntime.InferenceSession(once.SerializeToString(), options, providers=["CPUExecutionProvider"])
        narrow = {n: s.astype(np.float32) for n, s in seeds.items()}
        for got, wanted in zip(session.run(None, {**feeds, **narrow})[outputs:], expected, strict=True):
            assert got.shape == wanted.shape, f"{op_type}: shape {got.shape}, expected {wanted.shape}"
            scale = max(1e-6, float(np.max(np.abs(wanted), initial=0)))
            assert np.allclose(got, wanted, rtol=SINGLE, atol=SINGLE * scale), f"{op_type} in float32: {got} {wanted}"


def _is_valid(model: onnx.ModelProto) -> bool:
    """Whether onnx's checker takes the node itself: it does not take some that onnx has."""
    try:
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError):
        return False
    return True


def _quiet(options: Any) -> Any:
    options.log_severity_level = 4
    return options


def _depends(model: onnx.ModelProto, on: list[str], of: list[str]) -> bool:
    try:
        onnxgrad.gradient(model, on, of)
    except ValueError as error:
        if "does not depend on" in str(error) or "depends on nothing" in str(error):
            return False
        raise
    return True
