"""LinearLRScheduler: a learning rate that grows and falls linearly, as 1.19.2 computes it in Python."""

import numpy as np

from onnxgrad.ort_training.api.optimizer import Optimizer


class LinearLRScheduler:
    """Sets the optimizer's learning rate, at once and at every `step`, by the number of updates made.

    In Python, 1.19.2 takes its two numbers for each other, and scripts rely on what comes of it: the rate grows from 0
    to `initial_lr` over `total_step_count` updates, and is 0 afterwards if `warmup_step_count` is not larger.
    """

    def __init__(self, optimizer: Optimizer, warmup_step_count: int, total_step_count: int, initial_lr: float) -> None:
        self._optimizer, self._total, self._warmup = optimizer, warmup_step_count, total_step_count
        optimizer._group.initial_lr = float(np.float32(initial_lr))
        self.step()

    def step(self) -> None:
        """Sets the rate for the next update; call it after every update."""
        made = self._optimizer._group.step
        if made < self._warmup:
            factor = np.float32(made) / np.float32(max(1, self._warmup))
        else:
            left, falling = self._total - made, self._total - self._warmup
            factor = max(np.float32(0), np.float32(left) / np.float32(max(1, falling)))
        self._optimizer.set_learning_rate(float(np.float32(self._optimizer._group.initial_lr) * factor))
