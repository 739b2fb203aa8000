"""Exports an architecture with PyTorch, trains the file here and the module there, and compares.

PyTorch's side runs twice, in float64 for reference and in float32: what float32 loses by itself, in PyTorch's own
kernels, is what our results may be off, times FACTOR, and not a tolerance chosen by hand.
"""

import ast
import copy
import logging
import re
import warnings
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import onnx
import onnx_ir
import onnxruntime
import torch
from tests.models.architectures import ARCHITECTURES, Architecture
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

import onnxgrad
from onnxgrad.graph.files import load
from onnxgrad.op import OPERATORS
from onnxgrad.passes.prepare import prepare
from onnxgrad.train import graphs

WAYS = ("recommended", "default", "legacy")
STEPS, MOMENTUM = 5, 0.9
STEP = 0.01  # the share of the loss that a step without momentum takes away, to first order
Arrays = dict[str, np.ndarray]

# A batch counts if PyTorch's float32 stays this close to its float64: at others a ReLU's input or a window's maximum
# rounds to the other side somewhere, and a fresh network with few examples for each BatchNorm makes much of it.
WELL_CONDITIONED = 1e-3
BATCHES = 12  # that are tried: of HRNet's, PyTorch's float32 is far off in two of three
# Kernels that add up in another order than PyTorch's lose as much as PyTorch's do, not the same.
FACTOR, ROUNDING = 8.0, 2e-6


# By default the exporter computes, for these, something from parameters alone: 1 + weight, exp(A_log), weight norm, or
# products of weights with positions. What it computed is trained in their place.
COMPUTED = {
    "beit", "clip", "convnext_v2", "deberta_v2", "eva02", "funnel", "gemma", "gemma2", "hubert", "mamba", "nfnet",
    "poolformer", "swin_v2", "wav2vec2", "whisper", "xcit", "xlnet",
}  # fmt: skip


class Run(NamedTuple):
    """What training for a few steps leaves."""

    losses: Arrays
    gradients: Arrays  # of the first step
    updates: Arrays  # of the parameters, from the first to the last step
    statistics: Arrays
    initial: Arrays
    rate: float  # of learning
    names: set[frozenset[str]]  # of the parameters; several for one that is shared
    remarks: list[str]  # of the trainer


class Deviation(NamedTuple):
    """How far a run is from another, as a part of the latter, at worst, and where."""

    worst: float
    name: str


def check(name: str, way: str, folder: Path, device: str = "cpu") -> list[str]:
    """Exports and trains an architecture, and expects what PyTorch does; what the trainer remarks."""
    return expect_same_training(ARCHITECTURES[name], way, folder, way == "default" and name in COMPUTED, device)


def expect_same_training(
    architecture: Architecture, way: str, folder: Path, is_computed: bool = False, device: str = "cpu"
) -> list[str]:
    """Trains a file and the module it was exported from, and expects the same results, for one of a few batches.

    A rule that is wrong is so for every batch. At some batch or other a number rounds to the other side of a kink here
    and not in PyTorch, or the reverse.

    `is_computed`: the exporter has computed something from parameters alone, which is then trained in their place. So
    these have no gradients to compare, and losses part after the first step.
    """
    path, target = folder / "model.onnx", target_of(architecture)
    export(architecture, way, path)
    found = []
    for number in range(BATCHES):
        batch = list(architecture.batch(number).values())
        reference, single = references(architecture, path, batch, target)
        run = train_here(architecture, path, batch, target, reference.rate, device)
        origins = computed_from(path, run)
        replaced = {name for names in origins.values() for name in names}
        assert bool(replaced) == is_computed, f"computed from {', '.join(sorted(replaced))} and trained in its place"
        if way != "legacy":  # which keeps no record of names
            expect_names(run, reference, origins)
        run, reference, single = (without(r, replaced) for r in (run, reference, single))
        allowed = {field: FACTOR * d.worst + ROUNDING for field, d in deviations(single, reference).items()}
        if max(allowed["losses"], allowed["gradients"]) > FACTOR * WELL_CONDITIONED:
            continue
        runs = {"": run}
        if way == "recommended" and device == "cpu":
            runs["in the graph for GPUs, "] = step_for_gpus(architecture, path, batch, target)
        wrong = [
            f"batch {number}: {where}{field} {d.name} off by {d.worst:.1e} of {allowed[field]:.1e}"
            for where, each in runs.items()
            for field, d in deviations(each, first_of(reference, len(each.losses["loss"]))).items()
            if not d.worst <= allowed[field]
        ]
        if not wrong:
            return run.remarks
        found += wrong
    raise AssertionError("; ".join(found) or "PyTorch's own float32 is far from its float64 in all batches")


def first_of(run: Run, steps: int) -> Run:
    """With the losses of the first steps alone."""
    return run._replace(losses={"loss": run.losses["loss"][:steps]})


def step_for_gpus(architecture: Architecture, path: Path, batch: list[torch.Tensor], target: torch.Tensor) -> Run:
    """The first step of the graph that a GPU gets, with the functions of its operators, in onnxruntime on the CPU."""
    prepared = prepare(load(path, "test"), "test")
    arrays = {name: v.const_value.numpy() for name, v in prepared.graph.initializers.items() if v.const_value}
    with mock.patch.object(graphs, "fuse_elementwise", lambda *_: None):  # into what has no function
        step = graphs.step_graph(prepared, loss_of(architecture, path), on_cpu=False)
    give_each_a_mask(step.model.graph)
    names = [i.name for i in onnx.load(path, load_external_data=False).graph.input]
    arrays |= {**{n: x.numpy() for n, x in zip(names, batch, strict=True)}, "target": target.numpy()}
    model = onnxgrad.add_functions(onnx_ir.to_proto(step.model))
    options = onnxgrad.register()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    wanted = [step.loss, *step.gradients.values()]
    loss, *gradients = session.run(wanted, {i.name: arrays[i.name] for i in session.get_inputs()})
    initial = {name: arrays[name] for name in step.gradients}
    found = dict(zip(step.gradients, gradients, strict=True))
    return Run({"loss": np.atleast_1d(loss)}, found, {}, {}, initial, 0.0, set(), [])


def give_each_a_mask(graph: onnx_ir.Graph) -> None:
    """As functions, operators of attention need one in every node or in none: here one that hides nothing."""
    nodes = [
        (n, [i.name for i in OPERATORS[n.op_type].inputs].index("mask")) for n in graph if "Attention" in n.op_type
    ]
    masks = [n.inputs[k] for n, k in nodes if len(n.inputs) > k and n.inputs[k] is not None]
    if not 0 < len(masks) < len(nodes):
        return
    is_chosen = masks[0].dtype == onnx_ir.DataType.BOOL
    nothing = np.ones((1, 1), bool) if is_chosen else np.zeros((1, 1), np.float32)
    constant = onnx_ir.node("Constant", [], {"value": onnx_ir.tensor(nothing)})
    graph.insert_before(graph[0], constant)
    for node, k in nodes:
        if len(node.inputs) <= k:
            node.resize_inputs(k + 1)
        if node.inputs[k] is None:
            node.replace_input_with(k, constant.outputs[0])


def references(
    architecture: Architecture, path: Path, batch: list[torch.Tensor], target: torch.Tensor
) -> tuple[Run, Run]:
    """PyTorch's runs in float64 and in float32."""
    nodes = onnx.load(path, load_external_data=False).graph.node
    kept = {v.rpartition(".")[0] for n in nodes if n.op_type == "BatchNormalization" for v in n.input}

    def module() -> nn.Module:
        return folded(architecture.made(), batch, kept)

    reference = train_there(architecture, module(), batch, target, torch.float64)
    return reference, train_there(architecture, module(), batch, target, torch.float32, reference.rate)


def computed_from(path: Path, run: Run) -> dict[str, list[str]]:
    """What the exporter says that it computed initializers from, of those that are trained."""
    record, found = "pkg.onnxscript.optimizer.folded_from", {}
    initializers = onnx_ir.load(path).graph.initializers
    for trained in run.gradients:
        module, _, own = trained.rpartition(".")
        for name in initializers.keys() & {trained, own}:
            if (text := initializers[name].metadata_props.get(record)) is not None:
                # One that modules shared has the module before its name, once for each.
                names = ast.literal_eval(text)
                found[trained] = names if name == trained else [f"{module}.{n.rpartition('.')[2]}" for n in names]
    return found


def without(run: Run, replaced: set[str]) -> Run:
    """Without what cannot be compared if some parameters are replaced."""
    if not replaced:
        return run
    gradients = {name: array for name, array in run.gradients.items() if name not in replaced}
    return run._replace(losses={"loss": run.losses["loss"][:1]}, gradients=gradients, updates={}, statistics={})


def expect_names(run: Run, reference: Run, origins: dict[str, list[str]]) -> None:
    """The same parameters are trained; one that several modules share may have the name of either."""
    mine = {_canonical(origin) for name in run.gradients for origin in (name, *origins.get(name, ()))}
    expected = [{_canonical(name) for name in names} for names in reference.names if names & reference.gradients.keys()]
    missing = [min(names) for names in expected if not names & mine]
    assert origins or not missing, f"not trained: {', '.join(sorted(missing))}"
    others = {_canonical(name) for name in run.gradients if name not in origins} - set().union(*expected)
    assert not others, f"trained, and no parameters: {', '.join(sorted(others))}"


def _canonical(name: str) -> str:
    """ONNX has one weight for both directions of a recurrent layer, and one for its two biases."""
    return re.sub(r"bias_[ih]h_l", "bias_l", name).removesuffix("_reverse")


def export(architecture: Architecture, way: str, path: Path) -> None:
    """Writes the file: as docs/getting-started.md says, or as people do it, or with the exporter of old."""
    module, batch = architecture.made(), architecture.batch()
    arguments = tuple(batch.values())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporters, about themselves
        logging.disable(logging.WARNING)
        try:
            if way == "recommended":
                torch.onnx.export(
                    module, arguments, path, input_names=list(batch), output_names=["y"], dynamo=True, optimize=False,
                    dynamic_shapes=tuple({0: "batch"} for _ in batch), verbose=False,
                )  # fmt: skip
            elif way == "default":
                torch.onnx.export(module, arguments, path, dynamo=True, verbose=False)
            else:
                torch.onnx.export(module, arguments, path, dynamo=False)
        finally:
            logging.disable(logging.NOTSET)


def target_of(architecture: Architecture) -> torch.Tensor:
    """What the output should be: classes, or numbers; always the same."""
    with torch.no_grad():
        shape = list(architecture.made()(*architecture.batch().values()).shape)
    torch.manual_seed(2)
    if architecture.loss == "mse":
        return torch.randn(shape)
    classes = shape.pop(architecture.axis)
    return torch.randint(classes, shape)


def train_there(
    architecture: Architecture,
    module: nn.Module,
    batch: list[torch.Tensor],
    target: torch.Tensor,
    dtype: torch.dtype,
    rate: float | None = None,
) -> Run:
    """PyTorch's side, in the modes that the modules are in; by default with a learning rate that suits the network."""
    module = module.to(dtype)
    inputs = [x.to(dtype) if x.is_floating_point() else x for x in batch]
    target = target.to(dtype) if target.is_floating_point() else target
    trained = [p for p in module.parameters() if p.requires_grad]
    named = dict(module.named_parameters(remove_duplicate=False))
    initial = {name: p.detach().numpy().copy() for name, p in named.items()}
    optimizer, losses, gradients = None, [], {}
    for _ in range(STEPS):
        module.zero_grad()
        y = module(*inputs)
        if architecture.loss == "mse":
            loss = nn.functional.mse_loss(y, target)
        else:
            loss = nn.functional.cross_entropy(y.movedim(architecture.axis, 1), target)
        loss.backward()
        gradients = gradients or {n: p.grad.numpy().copy() for n, p in named.items() if p.grad is not None}
        losses.append(loss.item())
        if optimizer is None:
            squares = sum(float((p.grad**2).sum()) for p in trained if p.grad is not None)
            rate = rate or STEP * loss.item() / squares
            optimizer = torch.optim.SGD(trained, rate, MOMENTUM)
        optimizer.step()
    updates = {n: named[n].detach().numpy() - initial[n] for n in gradients}
    names = {frozenset(n for n, other in named.items() if other is p) for p in module.parameters()}
    statistics = {n: b.numpy() for n, b in module.named_buffers() if n.endswith(("running_mean", "running_var"))}
    return Run({"loss": np.array(losses)}, gradients, updates, statistics, initial, rate or 0.0, names, [])


def train_here(
    architecture: Architecture,
    path: Path,
    batch: list[torch.Tensor],
    target: torch.Tensor,
    rate: float,
    device: str = "cpu",
) -> Run:
    """Ours, with the defaults."""
    graph = onnx.load(path, load_external_data=False).graph
    trainer = onnxgrad.Trainer(
        path, loss_of(architecture, path), onnxgrad.optim.SGD(lr=rate, momentum=MOMENTUM), device=device
    )

    def arrays_of(given: Any) -> Arrays:
        return {name: trainer.on_host(array).copy() for name, array in given.items()}

    initial = arrays_of(trainer.parameters)
    inputs = zip([i.name for i in graph.input], batch, strict=True)
    arrays = {**{n: x.numpy() for n, x in inputs}, "target": target.numpy()}
    losses = [float(trainer.step(arrays))]
    gradients = arrays_of(trainer.gradients)
    losses += [float(trainer.step(arrays)) for _ in range(STEPS - 1)]
    updates = {name: array - initial[name] for name, array in arrays_of(trainer.parameters).items()}
    statistics, remarks = arrays_of(trainer.statistics), list(trainer.remarks)
    return Run({"loss": np.array(losses)}, gradients, updates, statistics, initial, rate, set(), remarks)


def loss_of(architecture: Architecture, path: Path) -> Any:
    """Of the file's first output."""
    name = onnx.load(path, load_external_data=False).graph.output[0].name
    if architecture.loss == "mse":
        return onnxgrad.losses.MSE(name)
    return onnxgrad.losses.CrossEntropy(name, axis=architecture.axis)


def deviations(run: Run, reference: Run) -> dict[str, Deviation]:
    """How far a run is off, for the losses, gradients, updates and statistics that both have.

    Some gradients are 0 but for rounding, that of a bias before a BatchNorm for example: they are measured by the
    largest.
    """
    return {
        field: _deviation(getattr(run, field), getattr(reference, field), run.initial, reference.initial)
        for field in ("losses", "gradients", "updates", "statistics")
    }


def _deviation(arrays: Arrays, reference: Arrays, mine: Arrays, its: Arrays) -> Deviation:
    norms = {name: float(np.linalg.norm(array)) for name, array in reference.items()}
    least = 1e-3 * max(norms.values(), default=0.0)
    worst = Deviation(0.0, "")
    for name in reference.keys() & arrays.keys():
        array, expected = arrays[name].astype(np.float64), reference[name]
        if name in mine and (array := _aligned(array, mine[name], its[name])) is None:
            continue
        off = float(np.linalg.norm(array - expected)) / max(norms[name], least, 1e-30)
        if not off <= worst.worst:
            worst = Deviation(off, name)
    return worst


def _aligned(array: np.ndarray, mine: np.ndarray, its: np.ndarray) -> np.ndarray | None:
    """What belongs to our weight, in the order of PyTorch's; None if these are not the same numbers.

    The exporter transposes the weight of a Linear. A table that it read has its rows in an order of its own, and those
    in use only; gates of recurrent layers are ONNX's.
    """
    if mine.shape == its.shape and np.allclose(mine, its):
        return array
    if mine.shape[::-1] == its.shape and np.allclose(mine.T, its):
        return array.T
    if mine.shape != its.shape or mine.ndim != 2:
        return None
    from_rows, to_rows = np.lexsort(mine.T), np.lexsort(its.T)
    aligned = np.empty_like(array)
    aligned[to_rows] = array[from_rows]
    return aligned if np.allclose(mine[from_rows], its[to_rows]) else None


def folded(module: nn.Module, inputs: list[torch.Tensor], kept: set[str]) -> nn.Module:
    """A copy with every BatchNorm folded into the convolution before it, save those that the file has kept.

    What is left of such a BatchNorm adds the bias, under whose name it is trained; others stay as they are.
    """
    module = copy.deepcopy(module)
    folds = {part for name, part in module.named_modules() if name not in kept}
    made: dict[int, tuple[nn.Module, torch.Tensor]] = {}  # a convolution's output, kept so that its id stays its own
    pairs: list[tuple[nn.Module, nn.Module]] = []

    def after_convolution(part: nn.Module, _: Any, y: torch.Tensor) -> None:
        made[id(y)] = part, y

    def before_norm(part: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        if id(given[0]) in made:
            pairs.append((made[id(given[0])][0], part))

    hooks = []
    for part in module.modules():
        if isinstance(part, nn.modules.conv._ConvNd):
            hooks.append(part.register_forward_hook(after_convolution))
        elif isinstance(part, nn.modules.batchnorm._BatchNorm) and part in folds:
            hooks.append(part.register_forward_pre_hook(before_norm))
    with torch.no_grad():
        copy_of_statistics = copy.deepcopy(module.state_dict())
        module(*inputs)
        module.load_state_dict(copy_of_statistics)
    for hook in hooks:
        hook.remove()
    for conv, norm in pairs:
        transposed = isinstance(conv, nn.modules.conv._ConvTransposeNd)
        conv.weight, bias = fuse_conv_bn_weights(
            conv.weight, conv.bias, norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias, transposed
        )
        conv.bias = None
        norm.eval()
        norm.eps = 0.0
        norm.reset_parameters()
        norm.weight.requires_grad = False
        norm.bias = nn.Parameter(bias.detach())
    return module
