"""quantize(): a model whose weights and activations are integers of a few bits."""

import fnmatch
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxgrad.edit.calibrate import insert_quantization
from onnxgrad.edit.round_weights import OPSET_OF_BLOCKS, round_weights, weights_of
from onnxgrad.graph.files import LARGEST, as_given, expect_weights, load, save, weight_files
from onnxgrad.graph.suggest import listed, suggestion
from onnxgrad.graph.validity import one_line
from onnxgrad.passes.convert_opset import convert_to
from onnxgrad.passes.draft import Draft, Pass
from onnxgrad.passes.finish import drop_dead
from onnxgrad.passes.name_nodes import name_nodes
from onnxgrad.passes.prepare import RESTORE, TO_NEW_OPSET
from onnxgrad.passes.stored_weights import stored_weights
from onnxgrad.passes.train_mode import to_inference_mode
from onnxgrad.schema import is_standard

WEIGHTS = ("int8", "uint8", "int4", "uint4")
ACTIVATIONS = ("uint8", "int8", "uint16", "int16")
FOUR_BITS = ("int4", "uint4")
OLDEST_IR_OF_FOUR_BITS = 10
# What onnxruntime puts before the names of weights that it makes of those of two layers.
FUSED = re.compile(r"^(Conv(Bn|Mul|Add)Fusion_((BN|Mul|Add)_)?[WB]_)+")


def quantize(
    model: Any,
    data: Iterable[Mapping[str, Any]] | None = None,
    weights: str = "int8",
    activations: str | None = "uint8",
    *,
    per_channel: bool = True,
    block_size: int = 32,
    exclude: str | Sequence[str] = (),
) -> Any:
    """Returns the quantized model, in the QDQ form that onnxruntime runs with integer kernels.

    - `model`: a path, an onnx.ModelProto or an onnx_ir.Model; it is not changed. For an onnx_ir.Model the result is one
      too.
    - `data`: dicts of arrays by input name for calibration, for example Batches; other names are ignored. onnxruntime's
      tools fold BatchNormalization into convolutions, run the model on all of `data`, and choose scales by the smallest
      and the largest number of every value.
    - `weights`: "int8", "uint8", "int4" or "uint4".
    - `activations`: "uint8", "int8", "uint16", "int16" or None. With None, only the weights of matrix products and
      convolutions are quantized, and no data is needed: the model computes in floating point, with weights of a quarter
      or an eighth of their size.
    - `per_channel`: one scale for each output channel of a layer, instead of one for the layer.
    - `block_size`: with 4-bit weights and no activations, how many weights of a sum share a scale.
    - `exclude`: names or patterns of nodes or weights to leave in floating point.

    A Trainer trains the result.
    """
    if weights not in WEIGHTS:
        raise ValueError(f"quantize: weights is {weights!r}, expected one of {listed(WEIGHTS)}")
    if activations is not None and activations not in ACTIVATIONS:
        raise ValueError(f"quantize: activations is {activations!r}, expected None or one of {listed(ACTIVATIONS)}")
    if activations is not None and data is None:
        raise ValueError(
            "quantize: data is missing: activations are calibrated on it; activations=None quantizes weights alone"
        )
    if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1:
        raise ValueError(f"quantize: block_size is {block_size!r}, expected a number of weights")
    loaded = load(model, "quantize")
    expect_weights(loaded, "quantize")
    if stored_weights(loaded.graph):
        raise ValueError("quantize: the model is quantized already: a Trainer trains it as it is")
    to_inference_mode(loaded)
    passes: list[Pass] = [*RESTORE, *TO_NEW_OPSET, name_nodes]
    draft = Draft(loaded, "quantize").run(passes)
    _transpose_weights(draft.graph)
    patterns = [exclude] if isinstance(exclude, str) else list(exclude)
    if activations is None:
        _to_opset(draft, OPSET_OF_BLOCKS if weights in FOUR_BITS else 0)
        round_weights(draft.graph, weights, per_channel, block_size, _excluded(draft.graph, patterns))
        drop_dead(draft)
    else:
        assert data is not None
        _insert(draft, data, weights, activations, per_channel, patterns)
    return as_given(draft.model, model)


def _transpose_weights(graph: ir.Graph) -> None:
    """Stores weights as products read them: integers of theirs would be those of what Transpose makes of them."""
    for node in list(graph):
        weight = node.inputs[0] if node.op_type == "Transpose" and is_standard(node.domain) else None
        if weight is None or not weight.is_initializer() or len(weight.uses()) > 1 or weight.const_value is None:
            continue
        numbers = np.ascontiguousarray(weight.const_value.numpy().transpose(node.attributes.get_ints("perm")))
        weight.const_value = ir.Tensor(numbers, dtype=weight.const_value.dtype, name=weight.name)
        weight.shape = ir.Shape(numbers.shape)
        node.outputs[0].replace_all_uses_with(weight, replace_graph_outputs=True)
        graph.remove(node, safe=True)


def _insert(
    draft: Draft,
    data: Iterable[Mapping[str, Any]],
    weights: str,
    activations: str,
    per_channel: bool,
    patterns: Sequence[str],
) -> None:
    """Has onnxruntime's tools fold layers, measure values, and insert nodes, all in files of a folder that goes."""
    size = sum(v.const_value.nbytes for v in draft.graph.initializers.values() if v.const_value is not None)
    if size > LARGEST:
        raise ValueError(
            f"quantize: the model has {size / 2**30:.1f} GB of weights, and onnxruntime's tools take 2 GB: without "
            "activations (None) its weights can be quantized"
        )
    _to_opset(draft, OPSET_OF_BLOCKS if "16" in activations or weights in FOUR_BITS else 0)
    with tempfile.TemporaryDirectory(prefix="onnxgrad-quantize-") as folder:
        path = Path(folder) / "model.onnx"
        save(draft.model, path, None if weight_files(draft.model) else path)
        folded = ir.from_proto(_folded(path))
        _own_names(folded)
        name_nodes(Draft(folded, draft.caller))
        excluded = _excluded(folded.graph, patterns)
        ir.save(folded, path)
        result = insert_quantization(path, data, weights, activations, per_channel, excluded)
    draft.model = ir.from_proto(result)
    draft.model.metadata_props.clear()
    used = {node.domain for node in draft.graph.all_nodes()}
    for domain in [d for d in draft.graph.opset_imports if d and d not in used]:  # onnxruntime names all that it knows
        del draft.graph.opset_imports[domain]
    if not any(node.op_type == "DequantizeLinear" for node in draft.graph.all_nodes()):
        raise ValueError("quantize: the model has nothing that onnxruntime quantizes")


def _folded(path: Path) -> onnx.ModelProto:
    """What onnxruntime's basic optimizations make of a model, without its own operators."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(path.with_name("folded.onnx"))
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    try:
        onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors have no type in common
        raise ValueError(f"quantize: onnxruntime does not run the model: {one_line(error)}") from None
    return onnx.shape_inference.infer_shapes(onnx.load(options.optimized_model_filepath))


def _own_names(model: ir.Model) -> None:
    """Gives weights that were folded the names again that the model's author knows, where these are free."""
    graph = model.graph
    taken = {v.name for node in graph.all_nodes() for v in node.outputs} | {v.name for v in graph.inputs}
    for name, value in list(graph.initializers.items()):
        short = FUSED.sub("", name)
        if short != name and short not in taken and short not in graph.initializers:
            graph.initializers.pop(name)
            value.name = short
            graph.register_initializer(value)


def _excluded(graph: ir.Graph, patterns: Sequence[str]) -> set[str]:
    """Nodes that patterns name, by their own name or that of a weight."""
    names = {str(node.name): {str(node.name), *(str(v.name) for v in weights_of(node))} for node in graph.all_nodes()}
    found = set()
    for pattern in patterns:
        matching = {node for node, known in names.items() if fnmatch.filter(known, pattern) or pattern in known}
        if not matching:
            every = list(dict.fromkeys(name for known in names.values() for name in sorted(known)))
            raise ValueError(
                f"quantize: exclude names {pattern!r}, which is neither a node nor a weight{suggestion(pattern, every)}"
            )
        found |= matching
    return found


def _to_opset(draft: Draft, opset: int) -> None:
    """Converts a model to an opset that has what is needed."""
    if draft.graph.opset_imports[""] < opset:
        convert_to(draft, opset, f"what was asked for needs {opset}")
        draft.model.ir_version = max(draft.model.ir_version, OLDEST_IR_OF_FOUR_BITS)
