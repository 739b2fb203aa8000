"""onnxruntime-training's Python interface, as of 1.19.2, on stock onnxruntime: scripts change one import, or none.

`from onnxgrad.ort_training import artifacts, onnxblock` and `from onnxgrad.ort_training.api import Module` in place of
`onnxruntime.training`; or install(), or `python -m onnxgrad.ort_training script.py`, and a script stays as it is.
"""

import importlib
import pkgutil
import sys

OF_TRAINERS = ("load_checkpoint", "open_artifacts", "save_checkpoint")
PARTS = ("api", "artifacts", "onnxblock")  # imported when first asked for
ORIGINAL = "onnxruntime.training"
NOT_THERE = {
    "ORTModule": "export the module and train it with onnxgrad.Trainer, or use onnxgrad.torch within PyTorch",
    "ortmodule": "export the module and train it with onnxgrad.Trainer, or use onnxgrad.torch within PyTorch",
    "amp": "it served ORTTrainer, which 1.19.2 does not have any more",
    "optim": "its optimizers were for PyTorch: use torch.optim, or onnxgrad.optim with onnxgrad.Trainer",
}


def install() -> None:
    """Makes `onnxruntime.training` of this process the modules here, whatever the installed onnxruntime has there.

    onnxruntime.InferenceSession then opens graphs with operators of onnxruntime-training, too, as it did there.
    """
    import onnxruntime

    from onnxgrad.ort_training.sessions import open_old_graphs

    own = sys.modules[__name__]
    for found in pkgutil.walk_packages(own.__path__, f"{__name__}."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)
    for name, module in list(sys.modules.items()):
        if name == __name__ or name.startswith(f"{__name__}."):
            sys.modules[ORIGINAL + name.removeprefix(__name__)] = module
    onnxruntime.training = own
    open_old_graphs(onnxruntime.InferenceSession)


def __getattr__(name: str) -> object:
    if name in OF_TRAINERS:
        return getattr(importlib.import_module(f"{__name__}.trainers"), name)
    if name in PARTS:
        return importlib.import_module(f"{__name__}.{name}")
    if name in NOT_THERE:
        raise ImportError(f"onnxgrad.ort_training has no {name}: {NOT_THERE[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
