"""What each operator means: one file per forward operator, with shape rule, checks and definition in NumPy."""

import importlib
import pkgutil


def load_operators() -> None:
    """Imports every file of this folder, which declares every operator."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
