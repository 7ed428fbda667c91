"""What collectives and computations cost."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch_c10d_ext._op_info import traffic_of


@dataclass(frozen=True)
class Link:
    """What a collective costs: ``latency + hops * hop + wire bytes / bandwidth``.

    Before that the rank itself is busy for ``overhead + wire bytes * overhead_per_byte`` and does
    not compute: it makes the call, and a processor that moves the bytes itself, as on ``shm``, has
    less for the computation beside (the o and O of LogGOPS; Hoefler, Schneider and Lumsdaine 2010).

    The postal model with a count of messages (Thakur, Rabenseifner and Gropp 2005). Of n ranks an
    all_reduce takes 2 (n - 1) hops as a ring and 2 ceil(log2 n) as a tree; a permutation takes one;
    every other collective half of what an all_reduce takes.

    Args:
        latency: seconds per call, whatever its size.
        bandwidth: bytes per second into, and at the same time out of, one rank.
        hop: seconds per message that must wait for another rank's.
        algorithm: ``"ring"`` or ``"tree"``: what ``hop`` is counted by.
        overhead: seconds of the rank per call.
        overhead_per_byte: seconds of the rank per byte on the wire.
        shared: the name of the wire. Collectives of groups whose links have one name take turns on
            it; without a name every group has a wire of its own.
    """

    latency: float = 10e-6
    bandwidth: float = 50e9
    hop: float = 0.0
    algorithm: str = "ring"
    shared: str = ""
    overhead: float = 0.0
    overhead_per_byte: float = 0.0

    def __post_init__(self) -> None:
        if not (self.latency >= 0 and self.bandwidth > 0):
            raise ValueError(
                "Link: latency must be 0 or more and bandwidth positive, got latency "
                f"{self.latency} and bandwidth {self.bandwidth}"
            )
        if not self.hop >= 0:
            raise ValueError(f"Link: hop must be 0 or more, got {self.hop}")
        if not (self.overhead >= 0 and self.overhead_per_byte >= 0):
            raise ValueError(
                "Link: overhead and overhead_per_byte must be 0 or more, got overhead "
                f"{self.overhead} and overhead_per_byte {self.overhead_per_byte}"
            )
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

    def busy_seconds(self, wire_bytes: float) -> float:
        """How long the rank is busy with a call, before the collective is on the link."""
        return self.overhead + wire_bytes * self.overhead_per_byte


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
