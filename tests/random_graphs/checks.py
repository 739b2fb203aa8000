"""What must hold for every graph: its gradient, its results, its training, its second order, and its file."""

import math
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper
from onnxruntime.capi.onnxruntime_pybind11_state import Fail
from tests.random_graphs.growth import FLOATS, REFUSED, Case, nodes_of, open_plain
from tests.random_graphs.oracle import as_torch, run_model

import onnxgrad

# Relative to the largest number of an array: what rounding makes of ONE operator, and of how many roundings
# PyTorch's own float32 may be off by, where a graph amplifies them.
PRECISION = {np.dtype(np.float32): 1e-4, np.dtype(np.float64): 1e-9}
AMPLIFIED = 40
CANCELLED = 1e-2  # as if the largest number was at least so large: sums of terms of about 1 may be 0
RATE = 0.01
FOLDED_WRONGLY = re.compile("Missing Input: _inlfunc_|ShapeInferenceError")


class WrongError(AssertionError):
    """A check that failed, with what it found."""


class Oracle:
    """What PyTorch says of a case: results, gradients and products with the Hessian."""

    def __init__(self, case: Case, seed: int = 0, wide: Any = torch.float64) -> None:
        self.case, self.wide = case, wide
        self.weights = {t.name: numpy_helper.to_array(t) for t in case.model.graph.initializer}
        self.sources = {n: as_torch(a, wide) for n, a in {**self.weights, **case.feeds}.items()}
        for source in self.sources.values():
            if source.is_floating_point():
                source.requires_grad_()
        self.values = run_model(case.model, self.sources, wide)
        rng = np.random.default_rng(seed)
        shapes = {n: tuple(self.values[n].shape) for n in case.of}
        self.seeds = {n: rng.standard_normal(s) if s else np.ones(()) for n, s in shapes.items()}

    def results(self) -> dict[str, Any]:
        return {o.name: self.values[o.name].detach().numpy() for o in self.case.model.graph.output}

    def total(self) -> Any:
        return sum((self.values[n] * as_torch(s, self.wide)).sum() for n, s in self.seeds.items())

    def floats(self) -> dict[str, Any]:
        return {n: s for n, s in self.sources.items() if s.is_floating_point()}

    def gradients(self) -> dict[str, Any]:
        """By name; None of what the outputs do not depend on."""
        floats = self.floats()
        total = self.total()
        if not total.requires_grad:
            return dict.fromkeys(floats)
        found = torch.autograd.grad(total, list(floats.values()), allow_unused=True, retain_graph=True)
        return {n: None if g is None else g.numpy() for n, g in zip(floats, found, strict=True)}

    def hvp(self, vectors: dict[str, Any]) -> dict[str, Any]:
        """Products of the Hessian of what `vectors` are for with them."""
        chosen = [self.sources[n] for n in vectors]
        first = torch.autograd.grad(self.total(), chosen, create_graph=True, allow_unused=True)
        pairs = [
            (g * as_torch(v, self.wide)).sum() for g, v in zip(first, vectors.values(), strict=True) if g is not None
        ]
        whole = sum(pairs)
        if not isinstance(whole, torch.Tensor) or not whole.requires_grad:
            return {n: np.zeros(v.shape) for n, v in vectors.items()}
        found = torch.autograd.grad(whole, chosen, allow_unused=True)
        return {
            n: np.zeros(v.shape) if g is None else g.numpy() for (n, v), g in zip(vectors.items(), found, strict=True)
        }


def compare(what: str, got: Any, wanted: Any, narrow: Any = None) -> float:
    """The error relative to what rounding may make of it: at most 1."""
    got, wanted = np.asarray(got), np.asarray(wanted)
    if got.shape != wanted.shape:
        raise WrongError(f"{what} has shape {got.shape}, expected {wanted.shape}")
    if wanted.dtype.kind != "f":
        if not np.array_equal(got, wanted):
            raise WrongError(f"{what} is {got.tolist()}, expected {wanted.tolist()}")
        return 0.0
    if not np.isfinite(wanted).all():  # of the exponent, where the base is negative
        return 0.0
    if narrow is not None and not np.isfinite(narrow).all():  # float32 does not hold what is on the way
        return 0.0
    noise = 0.0 if narrow is None else float(np.abs(np.asarray(narrow, np.float64) - wanted).max())
    room = PRECISION[got.dtype] * max(float(np.abs(wanted).max()), CANCELLED) + AMPLIFIED * noise
    error = float(np.abs(got.astype(np.float64) - wanted).max())
    if not error <= room:
        raise WrongError(f"{what} is off by {error:.3g}, of at most {room:.3g}:\n{got}\nexpected\n{wanted}")
    return error / room


def check_all(case: Case, thorough: bool) -> list[str]:
    """Runs the checks; names what has been checked. `thorough`: the ones that take long, too."""
    onnx.checker.check_model(case.model, full_check=True)
    done = []
    for name, check in CHECKS.items():
        if thorough or name not in LONG:
            done += [name] if check(case) else []
    return done


def check_results(case: Case) -> bool:
    """The model itself computes what the oracle does; else nothing else is worth a look."""
    session = open_plain(case.model)
    wide, narrow = Oracle(case), Oracle(case, wide=torch.float32)
    for info, got in zip(case.model.graph.output, session.run(None, _fed(case)), strict=True):
        compare(f"onnxruntime: {info.name}", got, wide.results()[info.name], narrow.results()[info.name])
    return True


def _fed(case: Case) -> dict[str, Any]:
    """What the session takes: where weights are inputs, they may be left out."""
    return dict(case.feeds)


def run(model: onnx.ModelProto, feeds: dict[str, Any], ours: bool = False) -> list[Any]:
    """The results, without optimization where onnxruntime 1.31 loses values of an If whose constants it folds."""
    try:
        return list(open_plain(model, ours).run(None, feeds))
    except Fail as error:
        if ours or not model.functions or not FOLDED_WRONGLY.search(str(error)):
            raise
        REFUSED["gradients of which onnxruntime folds an If wrongly"] += 1
        return list(open_plain(model, is_optimized=False).run(None, feeds))


def differentiated(case: Case) -> onnx.ModelProto | None:
    """The model with its gradient; None if it depends on nothing."""
    try:
        return onnxgrad.gradient(case.model, "*", case.of)
    except ValueError as error:
        if "depends on nothing that" in str(error):
            return None
        raise


def check_gradient(case: Case) -> bool:
    """Results and gradients, in plain onnxruntime and with our kernels."""
    wide, narrow = Oracle(case), Oracle(case, wide=torch.float32)
    wanted, noisy = wide.gradients(), narrow.gradients()
    made = differentiated(case)
    if made is None:
        _expect_no_gradient(wanted)
        return False
    onnx.checker.check_model(made, full_check=True)
    names = [o.name for o in made.graph.output]
    declared = {o.name: o.type.tensor_type.elem_type for o in made.graph.output}
    feeds = {**_fed(case), **seed_feeds(case, made, wide)}
    for ours in (False, True):
        if ours and not made.functions:
            break
        found = dict(zip(names, run(made, feeds, ours), strict=True))
        how = "with our kernels" if ours else "plain"
        for name, result in wide.results().items():
            compare(f"{how}: {name}", found[name], result, narrow.results()[name])
        for name, gradient in wanted.items():
            if f"{name}_grad" not in found:
                _expect_no_gradient({name: gradient})
                continue
            zero = np.zeros(wide.sources[name].shape)
            assert declared[f"{name}_grad"] in FLOATS
            compare(
                f"{how}: gradient of {name}", found[f"{name}_grad"],
                zero if gradient is None else gradient, zero if noisy[name] is None else noisy[name],
            )  # fmt: skip
    return True


def _expect_no_gradient(wanted: dict[str, Any]) -> None:
    for name, gradient in wanted.items():
        if gradient is not None and np.abs(gradient).max() > 1e-12:
            raise WrongError(f"{name} has no gradient, expected {gradient}")


def seed_feeds(case: Case, made: onnx.ModelProto, oracle: Oracle) -> dict[str, Any]:
    kind = helper.tensor_dtype_to_np_dtype(
        next(o.type.tensor_type.elem_type for o in case.model.graph.output if o.name == case.of[0])
    )
    there = {i.name for i in made.graph.input}
    return {f"{n}_grad": s.astype(kind) for n, s in oracle.seeds.items() if f"{n}_grad" in there}


def check_differences(case: Case) -> bool:
    """PyTorch's gradient is a derivative: two central differences of its results, in a random direction."""
    oracle = Oracle(case)
    gradients = {n: g for n, g in oracle.gradients().items() if g is not None and np.isfinite(g).all()}
    rng = np.random.default_rng(5)
    directions = {n: rng.standard_normal(g.shape) for n, g in gradients.items()}
    size = math.sqrt(sum(float((d**2).sum()) for d in directions.values())) or 1.0
    directions = {n: d / size for n, d in directions.items()}
    expected = sum(float((g * directions[n]).sum()) for n, g in gradients.items())
    found = []
    for step in (1e-5, 3e-5):
        ends = []
        for sign in (1, -1):
            moved = {n: s.detach() for n, s in oracle.sources.items()}
            moved |= {n: moved[n] + sign * step * as_torch(d) for n, d in directions.items()}
            values = run_model(case.model, moved)
            ends.append(sum(float((values[n] * as_torch(s)).sum()) for n, s in oracle.seeds.items()))
        found.append((ends[0] - ends[1]) / (2 * step))
    scale = max(1e-2, abs(expected), math.sqrt(sum(float((g**2).sum()) for g in gradients.values())))
    if min(abs(f - expected) for f in found) > 1e-5 * scale:
        raise WrongError(f"oracle: differences {found}, expected {expected}")
    return True


def check_training(case: Case) -> bool:
    """Three steps of a Trainer have the losses of three steps by hand."""
    if case.feeds[next(iter(case.feeds))].dtype != np.float32:
        return False
    if any(node.op_type == "Dropout" for node in nodes_of(case.model.graph)):
        return False  # which drops
    model, loss = with_loss(case)
    whole = Case(model, case.feeds, [loss])
    statistics = [t.name for t in model.graph.initializer if t.name.startswith(("mean", "variance"))]
    oracle = Oracle(whole)
    trained = [
        n
        for n, g in oracle.gradients().items()
        if n in oracle.weights
        and g is not None
        and n not in statistics
        and np.isfinite(g).all()  # it is not for an exponent whose base is negative
    ]
    if not trained:
        return False
    trainer = onnxgrad.Trainer(
        model, loss, onnxgrad.optim.SGD(RATE), trained, freeze="mean*" if statistics else (), clip_norm=1.0
    )
    trainer_losses = [trainer.step(case.feeds) for _ in range(3)]
    by_hand, noisy = (_losses(whole, trained, wide) for wide in (torch.float64, torch.float32))
    for k in range(3):
        compare(f"loss of step {k + 1}", np.float32(trainer_losses[k]), by_hand[0][k], noisy[0][k])
    for name, array in trainer.parameters.items():
        compare(f"{name} after 3 steps", array, by_hand[1][name], noisy[1][name])
    return True


def _losses(case: Case, trained: Sequence[str], wide: Any) -> tuple[list[Any], dict[str, Any]]:
    """The losses of steps of gradient descent, and the weights after them."""
    oracle = Oracle(case, wide=wide)
    weights = {n: oracle.sources[n].detach() for n in trained}
    losses = []
    for _ in range(3):
        now = {n: s.detach() for n, s in oracle.sources.items()} | {n: w.requires_grad_() for n, w in weights.items()}
        loss = run_model(case.model, now, wide)[case.of[0]]
        losses.append(np.asarray(loss.detach().numpy()))
        found = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
        norm = math.sqrt(sum(float(g.square().sum()) for g in found if g is not None))
        rate = RATE * min(1.0, 1.0 / norm) if norm else RATE
        weights = {
            n: (w if g is None else w - rate * g).detach() for (n, w), g in zip(weights.items(), found, strict=True)
        }
    return losses, {n: w.numpy() for n, w in weights.items()}


def with_loss(case: Case) -> tuple[onnx.ModelProto, str]:
    """The model with the mean of squares of its outputs as another output."""
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    parts = []
    for name in case.of:
        model.graph.node.append(helper.make_node("Mul", [name, name], [f"{name}_square"], name=f"{name}_square"))
        parts.append(f"{name}_mean")
        model.graph.node.append(
            helper.make_node("ReduceMean", [f"{name}_square"], [f"{name}_mean"], name=f"{name}_mean", keepdims=0)
        )
    model.graph.node.append(helper.make_node("Sum", parts, ["whole_loss"], name="whole_loss"))
    kind = next(o.type.tensor_type.elem_type for o in model.graph.output if o.name == case.of[0])
    model.graph.output.append(helper.make_tensor_value_info("whole_loss", kind, []))
    return model, "whole_loss"


def check_hvp(case: Case) -> bool:
    """Products of the Hessian with a vector."""
    oracle, narrow = Oracle(case), Oracle(case, wide=torch.float32)
    depends = [n for n, g in oracle.gradients().items() if g is not None and g.any()]
    if not depends:
        return False
    chosen = depends[:3]
    try:
        made = onnxgrad.hvp(case.model, chosen, case.of)
    except ValueError as error:
        if "the number of steps must be known, and not 0" not in str(error):
            raise
        REFUSED["second derivative of a recurrent operator, of unknown length"] += 1
        return False
    onnx.checker.check_model(made, full_check=True)
    rng = np.random.default_rng(9)
    vectors = {n: rng.standard_normal(oracle.sources[n].shape) for n in chosen}
    kind = case.feeds[next(iter(case.feeds))].dtype
    feeds = {**_fed(case), **seed_feeds(case, made, oracle)}
    feeds |= {f"{n}_vector": v.astype(kind) for n, v in vectors.items()}
    found = dict(zip([o.name for o in made.graph.output], run(made, feeds), strict=True))
    wanted, noisy = oracle.hvp(vectors), narrow.hvp(vectors)
    largest = max(float(np.abs(w).max()) for w in wanted.values())
    for name in chosen:  # they are of one Hessian, whose large entries round away small ones
        if largest < WORTH_A_LOOK:
            compare(f"hvp of {name}", found[f"{name}_hvp"], wanted[name], noisy[name])
    return True


WORTH_A_LOOK = 1e4  # second derivatives of deep graphs run away


def check_file(case: Case) -> bool:
    """What is saved and loaded gives the same gradient, bit for bit."""
    made = differentiated(case)
    if made is None:
        return False
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        copy = onnx.ModelProto()  # which saving changes
        copy.CopyFrom(case.model)
        onnx.save(copy, path, save_as_external_data=True, location="weights", size_threshold=0)
        again = onnxgrad.gradient(str(path), "*", case.of)
        onnx.save(made, Path(folder) / "gradient.onnx")
        loaded = onnx.load(Path(folder) / "gradient.onnx")
        feeds = {**_fed(case), **seed_feeds(case, made, Oracle(case))}
        first = run(loaded, feeds)
        onnx.load_external_data_for_model(again, folder)
        for info, a, b in zip(made.graph.output, first, run(again, feeds), strict=True):
            if not np.array_equal(a, b, equal_nan=True):
                raise WrongError(f"{info.name} from a file is {b}, expected {a}")
    return True


CHECKS: dict[str, Callable[[Case], bool]] = {
    "results": check_results, "differences": check_differences, "gradient": check_gradient, "hvp": check_hvp,
    "file": check_file, "training": check_training,
}  # fmt: skip
LONG = {"hvp", "file", "training"}
