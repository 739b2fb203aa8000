"""save_adapter() and load_adapter(): adapters in separate files, in the formats of PEFT and onnxruntime."""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import onnx_ir as ir
from safetensors import safe_open
from safetensors.numpy import save_file

from onnxgrad.edit.lora import add_adapter, finished, loaded_for_adapters, shapes_of
from onnxgrad.edit.targets import find_targets
from onnxgrad.graph.adapters import CONV, EMBEDDING, Adapter, adapters_of, array_of, names_of
from onnxgrad.graph.files import as_given, expect_folder, expect_place, load, replaced, replaced_together
from onnxgrad.graph.initializers import set_numbers
from onnxgrad.graph.suggest import listed, suggestion
from onnxgrad.graph.tensor import is_float
from onnxgrad.runtime.register import require_onnxruntime
from onnxgrad.tensor_types import Array

SAFETENSORS, OF_ONNXRUNTIME = ".safetensors", ".onnx_adapter"
ADAPTER_FILES = (SAFETENSORS, OF_ONNXRUNTIME)
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"  # PEFT's files in a folder
PREFIX = "base_model.model."  # of PEFT's names
SETTINGS = "adapter_config"  # in the metadata of a file without a folder
_PART = re.compile(r"^(.*)\.lora_(?:embedding_)?([AB])(?:\.default)?(?:\.weight)?$")


@runtime_checkable
class Trained(Protocol):
    """A Trainer."""

    def write(self, writer: Callable[[ir.Model, dict[str, Array]], list[Path]]) -> list[Path]:
        """Calls a function with the original model and what training changed of it, by name."""


def is_adapter_path(path: Path) -> bool:
    """Whether save_adapter() writes there, and nothing else does: a folder, or a file with the ending of adapters."""
    return path.is_dir() or path.suffix in ("", *ADAPTER_FILES)


def save_adapter(model: Any, path: str | Path) -> list[Path]:
    """Writes the adapters of a model or a Trainer, and returns the written files.

    - `model`: a Trainer, a path, an onnx.ModelProto or an onnx_ir.Model.
    - `path`: without an ending, a folder with the files of Hugging Face PEFT, adapter_model.safetensors and
      adapter_config.json, which PEFT loads into a PyTorch model whose layers have the same names. With the ending
      .safetensors, one file with the settings in its metadata. With the ending .onnx_adapter, a file in the format of
      onnxruntime, for models from `onnxgrad.lora(…, as_inputs=True)`.

    A folder or .safetensors file also contains other weights that the Trainer has trained, such as a new head.
    """
    target = Path(path)
    if not is_adapter_path(target):
        raise ValueError(
            f"save_adapter: {target.name!r} ends with {target.suffix!r}, expected {SAFETENSORS}, {OF_ONNXRUNTIME} or "
            "the name of a folder"
        )
    if isinstance(model, Trained):
        return model.write(lambda original, arrays: _write(original, arrays, target))
    return _write(load(model, "save_adapter"), {}, target)


def _write(model: ir.Model, trained: Mapping[str, Array], path: Path) -> list[Path]:
    adapters = adapters_of(model)
    if not adapters:
        raise ValueError("save_adapter: the model has no adapters, expected one that onnxgrad.lora() made")
    own = {name: trained.get(name, array_of(model.graph, name)) for name in names_of(adapters)}
    others = {name: array for name, array in trained.items() if name not in own}
    if path.suffix == OF_ONNXRUNTIME:
        return _write_for_onnxruntime(model.graph, own, others, path)
    named = {PREFIX + name: array for name, array in _as_in_peft(adapters, own).items()}
    modules = _modules_to_save(model.graph, others)
    for name in dict.fromkeys([*others, *_of_modules(model.graph, modules)]):
        array = others[name] if name in others else array_of(model.graph, name)
        named[PREFIX + name] = _turned(model.graph, name, array)
    arrays = {name: np.ascontiguousarray(_wide(array)) for name, array in named.items()}
    settings = json.dumps(_settings(adapters, modules), indent=2)
    if path.suffix == SAFETENSORS:
        expect_place(path)
        with replaced(path) as draft:
            save_file(arrays, draft, metadata={"format": "pt", SETTINGS: settings})
        return [path]
    expect_folder(path)
    path.mkdir(exist_ok=True)
    with replaced_together(path / CONFIG) as folder:
        save_file(arrays, folder / WEIGHTS, metadata={"format": "pt"})
        (folder / CONFIG).write_text(settings + "\n")
    return [path / WEIGHTS, path / CONFIG]


def _write_for_onnxruntime(
    graph: ir.Graph, own: Mapping[str, Array], others: Mapping[str, Array], path: Path
) -> list[Path]:
    if others:
        raise ValueError(
            f"save_adapter: {path.name!r} can hold adapters alone, and {listed(others)} changed in training, too: "
            f"train adapters alone (freeze='*' leaves statistics), or write a {SAFETENSORS} file"
        )
    onnxruntime = require_onnxruntime("save_adapter")
    expect_place(path)
    values = {}
    for name, array in own.items():
        kind = graph.initializers[name].const_value.dtype  # type: ignore[union-attr]
        narrow = np.ascontiguousarray(array.astype(kind.numpy()))
        if kind == ir.DataType.BFLOAT16:  # which NumPy itself does not have
            make = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type
            values[name] = make(narrow.view(np.int16), kind.value)
        else:
            values[name] = onnxruntime.OrtValue.ortvalue_from_numpy(narrow)
    adapter = onnxruntime.AdapterFormat()
    adapter.set_adapter_version(1)
    adapter.set_model_version(1)
    adapter.set_parameters(values)
    with replaced(path.absolute()) as draft:
        adapter.export_adapter(str(draft))
    return [path]


def _wide(array: Array) -> Array:
    """In float32, as PEFT keeps adapters; whoever loads them rounds."""
    return array if array.dtype in (np.float32, np.float64) else array.astype(np.float32)


def _as_in_peft(adapters: Sequence[Adapter], arrays: Mapping[str, Array]) -> dict[str, Array]:
    """PyTorch has the weights of linear layers transposed."""
    found = {}
    for adapter in adapters:
        for part, name in (("A", adapter.A), ("B", adapter.B)):
            array = arrays[name]
            key = f"lora_embedding_{part}" if adapter.kind == EMBEDDING else f"lora_{part}.weight"
            found[f"{adapter.module}.{key}"] = array if adapter.kind == CONV else array.T
    return found


def _modules_to_save(graph: ir.Graph, others: Mapping[str, Array]) -> list[str]:
    """Layers that were trained as a whole, which PEFT keeps beside the old ones; norms of batches it does not."""
    found = []
    for name in others:
        users = {use.node.op_type for use in graph.initializers[name].uses()}
        module = name.rpartition(".")[0]
        if module and "BatchNormalization" not in users:
            found.append(module)
    return list(dict.fromkeys(found))


def _of_modules(graph: ir.Graph, modules: Sequence[str]) -> list[str]:
    """All weights of layers."""
    return [name for name in graph.initializers if name.rpartition(".")[0] in modules and ".lora_" not in name]


def _turned(graph: ir.Graph, name: str, array: Array) -> Array:
    """A weight as PyTorch has it, or one of PyTorch's as the model has it."""
    for use in graph.initializers[name].uses():
        by_product = use.node.op_type == "MatMul" or (
            use.node.op_type == "Gemm" and not use.node.attributes.get_int("transB", 0)
        )
        if by_product and use.idx == 1 and array.ndim == 2:
            return array.T
    return array


def _settings(adapters: Sequence[Adapter], modules: Sequence[str]) -> dict[str, Any]:
    """PEFT's, with the rank and alpha that most layers have, and those of the others."""
    ranks, alphas = ({a.module: f(a) for a in adapters} for f in (lambda a: a.rank, _alpha))
    rank, alpha = (Counter(each.values()).most_common(1)[0][0] for each in (ranks, alphas))
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": max(a.dropout for a in adapters),
        "target_modules": [a.module for a in adapters],
        "modules_to_save": list(modules) or None,
        "rank_pattern": {module: r for module, r in ranks.items() if r != rank},
        "alpha_pattern": {module: a for module, a in alphas.items() if a != alpha},
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
    }


def _alpha(adapter: Adapter) -> float:
    alpha = round(adapter.scale * adapter.rank, 9)
    return int(alpha) if alpha == int(alpha) else alpha


@dataclass
class _File:
    """What a file of adapters holds."""

    path: Path
    settings: Mapping[str, Any] | None  # PEFT's; None if there are none
    pairs: dict[str, dict[str, Array]] = field(default_factory=dict)  # A and B, by layer, as PEFT has them
    weights: dict[str, Array] = field(default_factory=dict)  # others, by name

    def scale(self, module: str, rank: int) -> float | None:
        """By which a layer's adapter is multiplied."""
        if self.settings is None:
            return None
        alpha = self.settings.get("lora_alpha", rank)
        for pattern, other in (self.settings.get("alpha_pattern") or {}).items():
            if re.fullmatch(rf"(.*\.)?({pattern})", module):
                alpha = other
        return float(alpha / (rank**0.5 if self.settings.get("use_rslora") else rank))


def load_adapter(model: Any, path: str | Path, *, as_inputs: bool = False) -> Any:
    """Returns the model with the adapters of a file, from save_adapter() or PEFT.

    - `model`: a path, an onnx.ModelProto or an onnx_ir.Model; it is not changed. For an onnx_ir.Model the result is one
      too.
    - `path`: a PEFT folder, or a .safetensors file.
    - `as_inputs`: as in lora().

    If the model has the same adapters already, they get the numbers of the file. Other weights in the file, such as a
    head that was trained with the adapters, replace those of the model.
    """
    file = _read(Path(path))
    dropout = float((file.settings or {}).get("lora_dropout", 0))
    loaded = loaded_for_adapters(model, "load_adapter", dropout)
    adapters = adapters_of(loaded)
    if adapters:
        _fill(loaded.graph, adapters, file)
    else:
        adapters = _add(loaded.graph, file, dropout)
    for name, array in file.weights.items():
        _set_weight(loaded.graph, name, array, file)
    if adapters_of(loaded):
        return as_given(loaded, model)
    return finished(loaded, adapters, model, as_inputs)


def _read(path: Path) -> _File:
    found = path / WEIGHTS if path.is_dir() else path
    if not found.is_file():
        bin_file = path / "adapter_model.bin"
        if bin_file.is_file():
            raise ValueError(
                f"load_adapter: {str(bin_file)!r} is a pickle of PyTorch, expected {WEIGHTS}: save it by PEFT again, "
                "with safe_serialization=True"
            )
        raise FileNotFoundError(
            f"load_adapter: {str(found)!r} does not exist, expected a PEFT folder or a .safetensors file"
        )
    try:
        with safe_open(found, framework="numpy") as opened:
            metadata = opened.metadata() or {}
            arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118, it is not a dict
    except Exception as error:  # of safetensors, or of NumPy, which does not have all types
        raise ValueError(f"load_adapter: {str(found)!r} is not a safetensors file: {error}") from None
    file = _File(found, _read_settings(found, metadata))
    for name, array in arrays.items():
        _sort_in(file, name.removeprefix(PREFIX), array)
    if not file.pairs:
        raise ValueError(f"load_adapter: {str(found)!r} holds no adapter, such as 'encoder.query.lora_A.weight'")
    for module, pair in file.pairs.items():
        if len(pair) != 2:
            raise ValueError(f"load_adapter: {str(found)!r} has only lora_{next(iter(pair))} of {module!r}")
    return file


def _read_settings(path: Path, metadata: Mapping[str, str]) -> Mapping[str, Any] | None:
    beside = path.with_name(CONFIG)
    text = metadata.get(SETTINGS) or (beside.read_text() if beside.is_file() else None)
    if text is None:
        return None
    try:
        settings: dict[str, Any] = json.loads(text)
    except ValueError as error:
        raise ValueError(f"load_adapter: {str(beside)!r} is not JSON: {error}") from None
    if settings.get("peft_type", "LORA") != "LORA":
        raise ValueError(f"load_adapter: {str(path)!r} is {settings['peft_type']}, expected LORA")
    for name in ("use_dora", "use_qalora"):
        if settings.get(name):
            raise ValueError(f"load_adapter: {str(path)!r} was trained with {name}, which adds more than A and B do")
    return settings


def _sort_in(file: _File, name: str, array: Array) -> None:
    match = _PART.match(name)
    if match is not None:
        file.pairs.setdefault(match[1], {})[match[2]] = array
    elif ".lora_" in name:
        raise ValueError(
            f"load_adapter: {str(file.path)!r} has {name!r}, expected lora_A and lora_B alone: merge it in PEFT before "
            "exporting the model"
        )
    else:
        file.weights[name.replace(".base_layer.", ".")] = array


def _matching(name: str, known: Sequence[str]) -> str | None:
    """The name itself, or the only one that ends with it, or that it ends with: wrappers put names in front."""
    if name in known:
        return name
    ends = [k for k in known if k.endswith(f".{name}") or name.endswith(f".{k}")]
    return ends[0] if len(ends) == 1 else None


def _add(graph: ir.Graph, file: _File, dropout: float) -> list[Adapter]:
    """Adapters as the file has them."""
    targets = {t.module: t for t in find_targets(graph) if not t.refused}
    adapters = []
    for module, pair in file.pairs.items():
        found = _matching(module, list(targets))
        if found is None:
            raise ValueError(
                f"load_adapter: {str(file.path)!r} has an adapter of {module!r}, which is not a layer of the model"
                f"{suggestion(module, targets)}"
            )
        target = targets[found]
        a, b = _as_here(target.kind, pair)
        rank = a.shape[0] if target.kind == CONV else a.shape[-1]
        scale = file.scale(module, rank)
        if scale is None:
            raise ValueError(
                f"load_adapter: {str(file.path)!r} does not say its alpha: {CONFIG} belongs beside it, in one folder"
            )
        _expect_shapes(file, module, (a, b), shapes_of(target, rank))
        adapters.append(add_adapter(graph, target, a, b, scale=scale, dropout=dropout))
    return adapters


def _as_here(kind: str, pair: Mapping[str, Array]) -> tuple[Array, Array]:
    """A and B as the model has them."""
    a, b = pair["A"], pair["B"]
    return (a, b) if kind == CONV else (a.T, b.T)


def _expect_shapes(
    file: _File, module: str, given: tuple[Array, Array], wanted: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    for part, array, shape in zip("AB", given, wanted, strict=True):
        if array.shape != shape:
            raise ValueError(
                f"load_adapter: {str(file.path)!r} has {part} of {module!r} in the shape {list(array.shape)}, expected "
                f"{list(shape)} as ONNX has it"
            )


def _fill(graph: ir.Graph, adapters: Sequence[Adapter], file: _File) -> None:
    """Gives adapters that are there the file's numbers."""
    there = {adapter.module: adapter for adapter in adapters}
    found = {module: _matching(module, list(there)) for module in file.pairs}
    missing = [module for module, match in found.items() if match is None] + sorted(there.keys() - found.values())
    if missing:
        raise ValueError(
            f"load_adapter: the model has adapters already, beside other layers than {str(file.path)!r}: "
            f"{listed(missing)}; load it into the model without adapters"
        )
    for module, match in found.items():
        adapter = there[str(match)]
        a, b = _as_here(adapter.kind, file.pairs[module])
        shapes = array_of(graph, adapter.A).shape, array_of(graph, adapter.B).shape
        _expect_shapes(file, module, (a, b), shapes)
        scale = file.scale(module, adapter.rank)
        set_numbers(graph.initializers[adapter.A], a)
        set_numbers(graph.initializers[adapter.B], b if scale is None else b * b.dtype.type(scale / adapter.scale))


def _set_weight(graph: ir.Graph, name: str, array: Array, file: _File) -> None:
    floats = [n for n, v in graph.initializers.items() if is_float(v)]
    found = _matching(name, floats)
    if found is None:
        raise ValueError(
            f"load_adapter: {str(file.path)!r} has {name!r}, which is not a weight of the model"
            f"{suggestion(name, floats)}"
        )
    turned = _turned(graph, found, array)
    if turned.shape != (shape := array_of(graph, found).shape):
        raise ValueError(
            f"load_adapter: {str(file.path)!r} has {name!r} in the shape {list(turned.shape)}, expected "
            f"{list(shape)} as ONNX has it"
        )
    set_numbers(graph.initializers[found], turned)
