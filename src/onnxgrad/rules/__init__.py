"""How gradients flow: one entry per operator, one line per input, in the files of this folder, which are all read here.

So every rule of onnxgrad is there before anybody can add or replace one.
"""

import importlib
import pkgutil

from onnxgrad.graph.builder import op
from onnxgrad.rules.registry import RULES, Rule, by_rewriting, no_gradient, nondiff, todo, vjp

__all__ = ["RULES", "Rule", "by_rewriting", "no_gradient", "nondiff", "op", "todo", "vjp"]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
