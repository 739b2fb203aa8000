"""The command line: onnxgrad train, inspect, merge, grad, check and ops."""

from onnxgrad.cli.gradients import check, grad
from onnxgrad.cli.group import main
from onnxgrad.cli.inspect import inspect
from onnxgrad.cli.listing import ops
from onnxgrad.cli.merging import merge
from onnxgrad.cli.training import train

__all__ = ["check", "grad", "inspect", "main", "merge", "ops", "train"]
