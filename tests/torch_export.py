"""export(): a module as one of PyTorch's two exporters writes it."""

import logging
import warnings
from pathlib import Path
from typing import Any

import onnx
import torch


def export(
    module: torch.nn.Module, x: torch.Tensor, path: Path, *, dynamo: bool = True, dynamic: bool = True, **how: Any
) -> onnx.ModelProto:
    """Writes the file, input "x" and output "y"; the first dimension is free if it is `dynamic`."""
    logging.disable(logging.WARNING)
    settings: dict[str, Any] = {"input_names": ["x"], "output_names": ["y"], "verbose": False, **how}
    if dynamo:
        batch = {0: torch.export.Dim("batch")}
        settings = {"optimize": False, "dynamic_shapes": (batch,) if dynamic else None, **settings}
    else:
        axes = {"x": {0: "batch"}, "y": {0: "batch"}} if dynamic else None
        settings = {"dynamic_axes": axes, "do_constant_folding": False, "opset_version": 18, **settings}
        settings = {"training": torch.onnx.TrainingMode.PRESERVE, **settings}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporters, about themselves
        torch.onnx.export(module, (x,), str(path), dynamo=dynamo, **settings)
    return onnx.load(path)
