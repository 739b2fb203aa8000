"""The loss scale of fp16: a larger loss, so that small gradients do not underflow in float16."""

from dataclasses import dataclass

LARGEST, SMALLEST = 2.0**24, 1.0
PATIENCE = 2000  # updates in a row, after which a larger scale is tried


@dataclass
class LossScale:
    """Doubles while all goes well, and halves after a step whose gradients were too large."""

    value: float = 2.0**16
    good: int = 0  # updates since it last changed

    def update(self, is_finite: bool) -> bool:
        """Takes in whether the gradients were finite; whether there is anything left to try if they were not."""
        if is_finite:
            self.good += 1
            if self.good >= PATIENCE:
                self.value, self.good = min(2 * self.value, LARGEST), 0
            return True
        self.value, self.good = self.value / 2, 0
        return self.value >= SMALLEST
