"""One training step, forward, backward and AdamW, as each side does it; runs in the peers' environment as well."""

import contextlib
import os
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench.peers import MODULE, ORT_TRAINING, OURS, OURS_BF16, STOCK, TORCH, TORCH_BF16

LEARNING_RATE, EPS, DECAY = 1e-4, 1e-8, 0.01
Step = Callable[[], float]  # the loss before the update


def step_of(side: str, folder: Path, case: str, size: str, threads: int) -> Step:
    """A side's training step of a network, whose models and batches are in a folder."""
    with np.load(folder / f"{case}-{size}.npz") as archive:
        batch = {name: archive[name] for name in archive.files}
    if side in (TORCH, TORCH_BF16):
        from bench.training_cases import CASES

        chosen = next(c for c in CASES if c.name == case)
        return torch_step(chosen.module(getattr(chosen, size)), batch, threads, side == TORCH_BF16)
    if side == MODULE:  # with the files that onnxruntime-training has written before
        return module_step((folder / f"{case}-{size}-{ORT_TRAINING}.onnx").with_suffix(".artifacts"), batch, threads)
    if side in (OURS, OURS_BF16):
        precision = "bf16" if side == OURS_BF16 else "float32"
        return onnxgrad_step(folder / f"{case}-{size}-{OURS}.onnx", batch, threads, precision)
    if side == STOCK:
        return stock_step(folder / f"{case}-{size}-{OURS}.onnx", batch, threads)
    return ort_training_step(folder / f"{case}-{size}-{side}.onnx", batch, threads)


def onnxgrad_step(model: Path, batch: dict[str, Any], threads: int, precision: str = "float32") -> Step:
    """Ours."""
    import onnxgrad

    onnxgrad.set_num_threads(threads)
    loss = onnxgrad.losses.CrossEntropy("logits")
    optimizer = onnxgrad.optim.AdamW(lr=LEARNING_RATE, eps=EPS, weight_decay=DECAY)
    trainer = onnxgrad.Trainer(model, loss, optimizer, precision=precision)
    return lambda: trainer.step(batch)


def stock_step(model: Path, batch: dict[str, Any], threads: int) -> Step:
    """The files of export_step() in onnxruntime as it is, in the loop of docs/anywhere.md."""
    import json

    import onnxruntime
    from safetensors.numpy import load_file

    import onnxgrad

    loss = onnxgrad.losses.CrossEntropy("logits")
    optimizer = onnxgrad.optim.AdamW(lr=LEARNING_RATE, eps=EPS, weight_decay=DECAY)
    files = onnxgrad.export_step(model, model.with_suffix(".step.onnx"), loss, optimizer)
    described = json.loads(files.description.read_text())
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(files.step, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    state, rate = load_file(files.initial), np.array(LEARNING_RATE, np.float32)

    def step() -> float:
        nonlocal state
        found = dict(zip(names, session.run(None, {**batch, **state, "learning_rate": rate}), strict=True))
        state = {entry["input"]: found[entry["output"]] for entry in described["state"]}
        return float(found[described["loss"]])

    return step


def module_step(artifacts: Path, batch: dict[str, Any], threads: int) -> Step:
    """Ours, with the artifacts of onnxruntime-training."""
    import onnxgrad
    from onnxgrad.ort_training import api

    onnxgrad.set_num_threads(threads)
    return _step_with(api, artifacts, None, batch)


def torch_step(module: Any, batch: dict[str, Any], threads: int, autocasts: bool = False) -> Step:
    """PyTorch, eager."""
    import torch

    torch.set_num_threads(threads)
    optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, eps=EPS, weight_decay=DECAY)
    x, target = torch.from_numpy(batch["x"]), torch.from_numpy(batch["target"])

    def step() -> float:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
            predicted = module(x)
        loss = torch.nn.functional.cross_entropy(predicted.float(), target)
        loss.backward()
        optimizer.step()
        return float(loss.item())

    return step


def ort_training_step(model: Path, batch: dict[str, Any], threads: int) -> Step:
    """The on-device training module of onnxruntime-training; its files go beside the model."""
    import onnx
    import onnxruntime

    artifacts, api, onnxblock = _ort_training()
    proto, folder = onnx.load(model), model.with_suffix(".artifacts")
    folder.mkdir(exist_ok=True)
    weights = [i.name for i in proto.graph.initializer if i.data_type == onnx.TensorProto.FLOAT and len(i.dims)]
    frozen = [name for name in weights if "running_" in name]  # statistics of BatchNormalization
    trained = [name for name in weights if name not in frozen]
    with _quiet():
        artifacts.generate_artifacts(
            proto, requires_grad=trained, frozen_params=frozen, loss=artifacts.LossType.CrossEntropyLoss,
            optimizer=onnxblock.optim.AdamW(eps=EPS, weight_decay=DECAY), artifact_directory=folder,
        )  # fmt: skip
        # The optimizer's model is written in the newest format that onnx has, which 1.19.2 does not read.
        update = onnx.load(folder / "optimizer_model.onnx")
        update.ir_version = proto.ir_version
        onnx.save(update, folder / "optimizer_model.onnx")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return _step_with(api, folder, options, batch)


def _step_with(api: Any, folder: Path, options: Any, batch: dict[str, Any]) -> Step:
    """A step of artifacts, by the module api of either side."""
    with _quiet():
        state = api.CheckpointState.load_checkpoint(folder / "checkpoint")
        module = api.Module(folder / "training_model.onnx", state, device="cpu", session_options=options)
        optimizer = api.Optimizer(folder / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(LEARNING_RATE)
    module.train()
    x, target = batch["x"], batch["target"]

    def step() -> float:
        loss = module(x, target)
        optimizer.step()
        module.lazy_reset_grad()
        return float(loss)

    return step


def _ort_training() -> tuple[Any, Any, Any]:
    """Its modules; the package around them would import PyTorch, for parts that have no part in this."""
    import onnxruntime

    package = types.ModuleType("onnxruntime.training")
    package.__path__ = [str(Path(onnxruntime.__file__).parent / "training")]
    sys.modules.setdefault("onnxruntime.training", package)
    from onnxruntime.training import api, artifacts, onnxblock

    return artifacts, api, onnxblock


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without stderr: building the graph logs a line for every pass over it, whatever the level."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
