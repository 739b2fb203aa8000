"""The command line: onnxgrad train, report, step, inspect, cut, join, merge, quantize, grad, check, ops and warmup."""

from onnxgrad.cli.gradients import check, grad
from onnxgrad.cli.group import main
from onnxgrad.cli.inspect import inspect
from onnxgrad.cli.listing import ops
from onnxgrad.cli.merging import merge
from onnxgrad.cli.parts import cut, join
from onnxgrad.cli.quantize import quantize
from onnxgrad.cli.reporting.command import report
from onnxgrad.cli.step import step
from onnxgrad.cli.training import train
from onnxgrad.cli.warmup import warmup

__all__ = [
    "check", "cut", "grad", "inspect", "join", "main", "merge", "ops", "quantize", "report", "step", "train", "warmup",
]  # fmt: skip
