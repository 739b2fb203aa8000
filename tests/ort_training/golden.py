"""What onnxruntime-training 1.19.2 made: artifacts and the numbers of their training, and checkpoints.

data/make_artifacts.py and data/make_checkpoints.py say what is in the files.
"""

import functools
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent
VARIANTS = sorted(path.name for path in (FOLDER / "artifacts_1_19_2").glob("*_*"))  # model_loss_optimizer
CHECKPOINTS = FOLDER / "checkpoints_1_19_2"
NETWORKS = ("cnn", "gru", "lstm", "mlp", "transformer")


def variant(start):
    """The one whose name begins so."""
    return next(name for name in VARIANTS if name.startswith(start))


def folder_of(name):
    return FOLDER / "artifacts_1_19_2" / name


@functools.cache
def expected(name):
    """All numbers of a variant."""
    with np.load(folder_of(name) / "expected.npz") as packed:
        return dict(packed)


@functools.cache
def numbers():
    """Those of the checkpoints."""
    with np.load(CHECKPOINTS / "numbers.npz") as packed:
        return dict(packed)


def batches(name):
    """The inputs of each batch of a variant, in the order that a Module takes them."""
    inputs = [array for key, array in expected(name).items() if key.startswith("input/")]
    return list(zip(*inputs, strict=True))
