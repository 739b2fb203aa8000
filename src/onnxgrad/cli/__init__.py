"""The command line: onnxgrad train, inspect, grad, check, ops and warmup."""

from onnxgrad.cli.gradients import check, grad
from onnxgrad.cli.group import main
from onnxgrad.cli.inspect import inspect
from onnxgrad.cli.listing import ops
from onnxgrad.cli.training import train
from onnxgrad.cli.warmup import warmup

__all__ = ["check", "grad", "inspect", "main", "ops", "train", "warmup"]
