"""The command line: onnxgrad train, inspect, cut, join, grad, check and ops."""

from onnxgrad.cli.gradients import check, grad
from onnxgrad.cli.group import main
from onnxgrad.cli.inspect import inspect
from onnxgrad.cli.listing import ops
from onnxgrad.cli.parts import cut, join
from onnxgrad.cli.training import train

__all__ = ["check", "cut", "grad", "inspect", "join", "main", "ops", "train"]
