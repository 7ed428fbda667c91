"""What collectives and computations cost."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch_c10d_ext._op_info import traffic_of


@dataclass(frozen=True)
class Link:
    """What a collective costs: ``latency + hops * hop + wire bytes / bandwidth``.

    The postal model with a count of messages (Thakur, Rabenseifner and Gropp 2005). Of n ranks an
    all_reduce takes 2 (n - 1) hops as a ring and 2 ceil(log2 n) as a tree; a permutation takes one;
    every other collective half of what an all_reduce takes.

    Args:
        latency: seconds per call, whatever its size.
        bandwidth: bytes per second into, and at the same time out of, one rank.
        hop: seconds per message that must wait for another rank's.
        algorithm: ``"ring"`` or ``"tree"``: what ``hop`` is counted by.
        shared: the name of the wire. Collectives of groups whose links have one name take turns on
            it; without a name every group has a wire of its own.
    """

    latency: float = 10e-6
    bandwidth: float = 50e9
    hop: float = 0.0
    algorithm: str = "ring"
    shared: str = ""

    def __post_init__(self) -> None:
        if not (self.latency >= 0 and self.bandwidth > 0):
            raise ValueError(
                "Link: latency must be 0 or more and bandwidth positive, got latency "
                f"{self.latency} and bandwidth {self.bandwidth}"
            )
        if not self.hop >= 0:
            raise ValueError(f"Link: hop must be 0 or more, got {self.hop}")
        if self.algorithm not in ("ring", "tree"):
            raise ValueError(f"Link: algorithm must be 'ring' or 'tree', got {self.algorithm!r}")

    def hops(self, op: str, ranks: int) -> int:
        """How many messages of a collective must wait for one another."""
        if ranks == 1:
            return 0
        steps = ranks - 1 if self.algorithm == "ring" else math.ceil(math.log2(ranks))
        return traffic_of(op).pattern.passes * steps or 1

    def seconds(self, op: str, ranks: int, wire_bytes: float) -> float:
        """How long a collective takes that has the link for itself.

        Args:
            op: ``"all_reduce"``, say.
            ranks: the size of the group.
            wire_bytes: the bytes over the busiest rank's link.
        """
        return self.latency + self.hops(op, ranks) * self.hop + wire_bytes / self.bandwidth


@dataclass(frozen=True)
class Compute:
    """What a computation costs: ``max(bytes moved / memory_bandwidth, operations / flops)``.

    The roofline model (Williams, Waterman and Patterson 2009). Inputs and results are moved once.
    Operations are counted in products of matrices, attention and convolutions, as
    ``torch.utils.flop_counter`` counts them: a product of matrices takes 2 × elements of the result
    × length of the contracted dimension.

    Args:
        memory_bandwidth: bytes per second.
        flops: floating-point operations per second.
    """

    memory_bandwidth: float = 3e12
    flops: float = 400e12

    def __post_init__(self) -> None:
        if not (self.memory_bandwidth > 0 and self.flops > 0):
            raise ValueError(
                "Compute: memory_bandwidth and flops must be positive, got memory_bandwidth "
                f"{self.memory_bandwidth} and flops {self.flops}"
            )
