"""How gradients flow: one entry per operator, one line per input. All files of this folder are read by load_rules()."""

import functools
import importlib
import pkgutil

from onnxgrad.graph.builder import op
from onnxgrad.rules.registry import RULES, Rule, no_gradient, nondiff, todo, vjp

__all__ = ["RULES", "Rule", "load_rules", "no_gradient", "nondiff", "op", "todo", "vjp"]


@functools.cache
def load_rules() -> None:
    """Imports every file of rules, once."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
