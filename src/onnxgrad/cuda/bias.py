"""BiasGrad on CUDA: the sums of columns."""

import torch

from onnxgrad.cuda.core.columns import add_up_columns
from onnxgrad.cuda.core.indices import BadIndex


def bias_grad(dY: torch.Tensor, dB: torch.Tensor, bad: BadIndex) -> None:
    """No index can be bad."""
    if dB.numel() > 0:
        add_up_columns(dY.view(-1), dY.numel() // dB.numel(), [dB])
