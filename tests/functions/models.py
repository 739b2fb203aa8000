"""Models that call operators of onnxgrad, every way to run one that carries them as functions, and what to expect."""

from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import helper
from onnx.reference import ReferenceEvaluator
from tests.checks import assert_close, expect, result_dtypes, same_bits

from onnxgrad import add_functions

FLOATS = [np.float16, np.float32, np.float64]  # what the functions run in on stock onnxruntime


def node_of(op: Any, arguments: tuple[Any, ...], attributes: dict[str, Any], label: str, wanted: Any = None) -> Any:
    """A node that calls the operator, and {name: array} of its inputs."""
    feeds = {f"{i.name}{label}": a for i, a in zip(op.inputs, arguments, strict=False) if a is not None}
    inputs = [f"{i.name}{label}" if a is not None else "" for i, a in zip(op.inputs, arguments, strict=False)]
    outputs = [f"{o.name}{label}" if wanted is None or o.name in wanted else "" for o in op.outputs]
    while not inputs[-1]:
        inputs.pop()
    while not outputs[-1]:
        outputs.pop()
    return helper.make_node(op.name, inputs, outputs, domain=op.domain, **attributes), feeds


def model_of(nodes: list[Any], feeds: dict[str, np.ndarray], opset: int = 21, functions: Any = ()) -> Any:
    """A model of these nodes, with the types and shapes of its results inferred."""
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in feeds.items()
    ]
    outputs = [onnx.ValueInfoProto(name=name) for node in nodes for name in node.output if name]
    graph = helper.make_graph(nodes, "g", inputs, outputs)
    versions = {"": opset, "com.microsoft": 1, "onnxgrad": 1, **{f.domain: 1 for f in functions}}
    imports = [helper.make_opsetid(domain, version) for domain, version in versions.items()]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10, functions=functions)
    return onnx.shape_inference.infer_shapes(model)


def session(model: onnx.ModelProto, options: Any = None) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run_everywhere(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> dict[str, Any]:
    """{runtime: {output: array}} of a model that every check lets through."""
    onnx.checker.check_model(model, full_check=True)
    onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)
    names = [o.name for o in model.graph.output]
    runtimes = {"onnxruntime": session(model), "onnx.reference": ReferenceEvaluator(model)}
    return {what: dict(zip(names, r.run(names, feeds), strict=True)) for what, r in runtimes.items()}


def check_functions(op: Any, *calls: Any, wanted: Any = None, **how: Any) -> onnx.ModelProto:
    """One model with all the calls gives what the definition does; `calls` are (arguments, attributes)."""
    made = [node_of(op, a, kw, f"_{k}", wanted) for k, (a, kw) in enumerate(calls)]
    feeds = {name: array for _, some in made for name, array in some.items()}
    plain = model_of([node for node, _ in made], feeds, **how)
    model = add_functions(plain)
    assert [f.name for f in model.functions] == [op.name]
    for results in run_everywhere(model, feeds).values():
        for k, (arguments, attributes) in enumerate(calls):
            expected, bounds = expect(op, *arguments, **attributes)
            dtypes = result_dtypes(op, arguments, attributes)
            for output, value, bound, dtype in zip(op.outputs, expected, bounds, dtypes, strict=True):
                if wanted is not None and output.name not in wanted:
                    continue
                actual = results[f"{output.name}_{k}"]
                assert actual.dtype == dtype
                if bound is None:
                    assert same_bits(actual, value), f"{output.name}: {actual} is not {value}"
                else:
                    assert_close(actual, value, bound, output.name)
    return model
