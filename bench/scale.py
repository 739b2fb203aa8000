"""The cost of a step on many machines: a model of it, fed with what bench/ranks.py measures.

    step(n) = compute(examples of each) + update + all-reduce(parameters, n)

A ring sends 2(n-1)/n of the gradient in 2(n-1) messages; a tree all of it, 2·log2(n) times. Machines compute alike and
nothing overlaps, as in the trainer.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Network:
    """Seconds until a message arrives, and bytes a second from then on."""

    name: str
    latency: float
    bandwidth: float


# Latencies of one message between two hosts: TCP on 10 Gb/s Ethernet, RDMA on the others. Assumed, not measured.
NETWORKS = (
    Network("10 Gb/s", 30e-6, 1.25e9),
    Network("100 Gb/s", 5e-6, 12.5e9),
    Network("400 Gb/s", 2e-6, 50e9),
)
# Bandwidths by their makers, each way, for one GPU: NVLink 4 of an H100 or H200 joins the GPUs of a machine, a port of
# InfiniBand NDR for each GPU joins machines. Latencies are assumed.
NVLINK = Network("NVLink 4", 2e-6, 450e9)
INFINIBAND = Network("InfiniBand NDR", 2e-6, 50e9)
GPUS_OF_A_MACHINE = 8
# BERT-base on one H200: seconds of a step of 32 × 128 tokens, by our trainer, and bytes of its gradient in float32.
BERT_STEP, BERT_BYTES = 26e-3, 4 * 109.5e6
MACHINES = tuple(2**k for k in range(11))


def ring(size: float, ranks: int, network: Network) -> float:
    """Seconds of an all-reduce of `size` bytes: each sends a block to the next, twice round."""
    return 2 * (ranks - 1) * (network.latency + size / ranks / network.bandwidth)


def tree(size: float, ranks: int, network: Network) -> float:
    """Seconds of an all-reduce of `size` bytes: up to a root, and down again."""
    return 2 * math.ceil(math.log2(ranks)) * (network.latency + size / network.bandwidth) if ranks > 1 else 0.0


@dataclass(frozen=True)
class Costs:
    """What one machine takes: seconds for a step besides its examples, for each example, and for the update."""

    fixed: float
    per_example: float
    update: float
    parameter_bytes: float

    def compute(self, examples: float) -> float:
        """Seconds without communication."""
        return self.fixed + self.per_example * examples + self.update

    def step(self, examples: float, ranks: int, network: Network) -> float:
        """Seconds of a step of so many examples for each rank, by the quicker way to reduce."""
        reduce = min(ring(self.parameter_bytes, ranks, network), tree(self.parameter_bytes, ranks, network))
        return self.compute(examples) + reduce


def weak_table(costs: Costs, examples: int) -> str:
    """Same batch for each machine: the share of the time that is not spent on communication."""
    lines = ["| machines | " + " | ".join(f"{n.name} ring | {n.name} tree" for n in NETWORKS) + " |"]
    lines.append("|---:|" + "---:|" * (2 * len(NETWORKS)))
    for ranks in MACHINES:
        cells = []
        for network in NETWORKS:
            for way in (ring, tree):
                total = costs.compute(examples) + way(costs.parameter_bytes, ranks, network)
                cells.append(f"{costs.compute(examples) / total:.0%}")
        lines.append(f"| {ranks:,} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def strong_table(costs: Costs, batch: int) -> str:
    """The same batch cut over more and more machines: how many times as fast as one."""
    lines = [f"| machines | examples each | {' | '.join(n.name for n in NETWORKS)} |"]
    lines.append("|---:|---:|" + "---:|" * len(NETWORKS))
    alone = costs.compute(batch)
    for ranks in (n for n in MACHINES if n <= batch):
        gains = [f"{alone / costs.step(batch / ranks, ranks, network):.1f}×" for network in NETWORKS]
        lines.append(f"| {ranks:,} | {batch // ranks:,} | " + " | ".join(gains) + " |")
    return "\n".join(lines)


def stops_paying(costs: Costs, batch: int, network: Network) -> int:
    """The number of machines from which on twice as many are less than 1.5 times as fast, for one batch."""
    for ranks in MACHINES:
        gain = costs.step(batch / ranks, ranks, network) / costs.step(batch / ranks / 2, 2 * ranks, network)
        if gain < 1.5:
            return ranks
    return MACHINES[-1]


def gpu_table() -> str:
    """The same batch for each GPU: milliseconds of an all-reduce, and the share of the time not spent on it."""
    networks = (NVLINK, INFINIBAND)
    lines = ["| GPUs | " + " | ".join(f"{n.name}, ms | not in it" for n in networks) + " |"]
    lines.append("|---:|" + "---:|" * (2 * len(networks)))
    for ranks in MACHINES[1:]:
        cells = []
        for network in networks:
            if network is NVLINK and ranks > GPUS_OF_A_MACHINE:
                cells += ["–", "–"]
                continue
            seconds = min(way(BERT_BYTES, ranks, network) for way in (ring, tree))
            cells += [f"{1e3 * seconds:.1f}", f"{BERT_STEP / (BERT_STEP + seconds):.0%}"]
        lines.append(f"| {ranks:,} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
