"""Optimizers that PyTorch does not have, as it would have them; they compute in float64."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class _OfMoments(torch.optim.Optimizer):
    """Moves by the means of gradients and of their squares."""

    def __init__(self, params: Iterable[Tensor], **settings: float) -> None:
        super().__init__(params, {"beta1": 0.9, "beta2": 0.999, **settings})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["beta1"], group["beta2"]
            for p in group["params"]:
                g = p.grad.double()
                m, v, t = self.state.setdefault(p, {"kept": (0.0, 0.0, 0)})["kept"]
                m, v, t = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g**2, t + 1
                self.state[p]["kept"] = m, v, t
                p.copy_(self.moved(p.double(), m, v, 1 - beta1**t, 1 - beta2**t, group))

    def moved(self, p: Tensor, m: Tensor, v: Tensor, first: float, second: float, group: Any) -> Tensor:
        raise NotImplementedError


class Lamb(_OfMoments):
    """You et al. 2020, with the corrections of Adam."""

    def __init__(self, params: Iterable[Tensor], lr: float, decay: float = 0.01) -> None:
        super().__init__(params, lr=lr, eps=1e-6, decay=decay)

    def moved(self, p: Tensor, m: Tensor, v: Tensor, first: float, second: float, group: Any) -> Tensor:
        direction = m / first / ((v / second).sqrt() + group["eps"]) + group["decay"] * p
        size, length = p.norm(), direction.norm()
        return p - group["lr"] * (size / length if size > 0 and length > 0 else 1.0) * direction


class HuggingFaceAdamW(_OfMoments):
    """As transformers had it: eps beside the uncorrected root, and the decay last."""

    def moved(self, p: Tensor, m: Tensor, v: Tensor, first: float, second: float, group: Any) -> Tensor:
        p = p - group["lr"] * second**0.5 / first * m / (v.sqrt() + group["eps"])
        return p - group["lr"] * group["decay"] * p
