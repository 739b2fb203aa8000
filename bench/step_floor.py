"""The floor of a training step: what it takes if products run at the machine's peak and all else at memory speed.

Products are those that PyTorch counts in a step of its own, forward and backward. The peak is the best rate that any
side reaches on one large product. Of an ideally fused step only this goes through memory: the result of each product
is written once, read by what follows and once more backward, and its gradient is written and read (five times its
bytes); AdamW reads and writes each parameter and its two slots, and its gradient is written and read (eight times).
Peak and speed of memory are measured in the same run, on the same threads. What stays in the caches is faster still.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from bench.peers import OURS, TORCH
from bench.peers.process import Process

SIZE = 2048  # of the matrices that the peak is measured with
COPIED = 1 << 26  # numbers that are copied to measure the memory: 256 MB, more than caches hold
ROUNDS, CALLS = 4, 3
COPY = "copy"
PER_RESULT, PER_PARAMETER = 5, 8  # how often a number goes through memory


class Work(NamedTuple):
    """Floating-point operations of a step's products, and the bytes that go through memory."""

    flops: float
    bytes: float


class Speed(NamedTuple):
    """Floating-point operations and bytes a second."""

    flops: float
    bytes: float

    def milliseconds(self, work: Work) -> float:
        return 1e3 * (work.flops / self.flops + work.bytes / self.bytes)

    def describe(self, work: Work) -> str:
        return (
            f"{work.flops / 1e9:.3g} GFLOP at {self.flops / 1e9:.3g} a second, "
            f"{work.bytes / 1e6:.3g} MB at {self.bytes / 1e9:.3g} GB a second"
        )


def work_of(module: Any, batch: Mapping[str, Any]) -> Work:
    """What a step of a module of PyTorch's has to do."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import flop_registry

    class Count(TorchDispatchMode):
        flops = results = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if (count := flop_registry.get(func.overloadpacket)) is not None:
                self.flops += count(*args, **(kwargs or {}), out_val=out)
                self.results += sum(x.numel() for x in torch.utils._pytree.tree_leaves(out) if x is not None)
            return out

    with Count() as forward:
        predicted = module(torch.from_numpy(batch["x"]))
        loss = torch.nn.functional.cross_entropy(predicted, torch.from_numpy(batch["target"]))
    with Count() as backward:
        loss.backward()
    parameters = sum(p.numel() for p in module.parameters())
    numbers = PER_RESULT * forward.results + PER_PARAMETER * parameters
    return Work(forward.flops + backward.flops, 4.0 * numbers)


def speed_of(processes: Mapping[str, Process], threads: int) -> Speed:
    """The peak of products that the sides reach by turns, and how fast PyTorch copies."""
    sides = [side for side in (OURS, TORCH) if side in processes]
    product = min(_seconds(processes[side], side, threads) for _ in range(ROUNDS) for side in sides)
    copy = min(_seconds(processes[TORCH], COPY, threads) for _ in range(ROUNDS))
    return Speed(2 * SIZE**3 / product, 2 * 4 * COPIED / copy)


def _seconds(process: Process, what: str, threads: int) -> float:
    process.ask("prepare_floor", what=what, threads=threads)
    return min(process.run(CALLS))


def call_of(what: str, threads: int) -> Callable[[], Any]:
    """A large product by one of the sides, or a large copy."""
    if what == OURS:
        import onnxgrad

        onnxgrad.set_num_threads(threads)
        a, b, c = _matrices()
        return lambda: onnxgrad.permuted_mat_mul.into(c, a, b)
    import torch

    torch.set_num_threads(threads)
    if what == COPY:
        source, target = torch.ones(COPIED), torch.zeros(COPIED)
        return lambda: target.copy_(source)
    left, right, product = map(torch.from_numpy, _matrices())
    return lambda: torch.mm(left, right, out=product)


def _matrices() -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((SIZE, SIZE), np.float32) for _ in range(2))
    return a, b, np.zeros_like(a)
