"""The implementations that ours is compared with, one adapter per file."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from bench.clock import timed, wait_until_idle

Array = npt.NDArray[Any]
Inputs = Mapping[str, Array | None]
Call = Callable[[], Any]

OURS, ORT_TRAINING, TORCH, NUMPY = "onnxgrad", "onnxruntime-training", "PyTorch", "NumPy"
OURS_BF16, TORCH_BF16 = "onnxgrad bf16", "PyTorch bf16 autocast"
STOCK = "onnxruntime alone"  # with the files of export_step()
MODULE = "onnxgrad.ort_training"  # with the artifacts of onnxruntime-training


class OutputType(NamedTuple):
    """What is known of an output beforehand."""

    name: str
    shape: tuple[int, ...]
    dtype: str


class CannotRunError(Exception):
    """This peer has no way to do this work; the message says why."""


class Side(Protocol):
    """One contestant, ready to run the same call again and again."""

    def run(self, calls: int) -> list[float]:
        """Seconds of each of so many calls on end."""


@dataclass(frozen=True)
class HereSide:
    """A contestant of this process."""

    call: Call

    def run(self, calls: int) -> list[float]:
        seconds = timed(self.call, calls)
        wait_until_idle()
        return seconds


class Peer(Protocol):
    """An implementation to compare with."""

    name: str

    def version(self) -> str:
        """The version, or CannotRunError with the way to get it."""

    def prepare(
        self, operator: str, inputs: Inputs, attributes: Mapping[str, Any], outputs: Sequence[OutputType]
    ) -> tuple[Side, list[Array | None]]:
        """The contestant for an operator and what it computes, None for an output that it defines differently.

        CannotRunError if there is no such contestant.
        """

    def close(self) -> None:
        """Gives back what the peer holds."""


def is_half(dtype: np.dtype[Any]) -> bool:
    """float16 or bfloat16."""
    return dtype.itemsize == 2
