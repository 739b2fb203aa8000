"""The command line: onnxgrad train, inspect, quantize, grad, check and ops."""

from onnxgrad.cli.gradients import check, grad
from onnxgrad.cli.group import main
from onnxgrad.cli.inspect import inspect
from onnxgrad.cli.listing import ops
from onnxgrad.cli.quantize import quantize
from onnxgrad.cli.training import train

__all__ = ["check", "grad", "inspect", "main", "ops", "quantize", "train"]
