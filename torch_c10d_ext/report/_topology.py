"""What collectives cost on hosts of several ranks, by each algorithm."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch_c10d_ext import _C
from torch_c10d_ext._op_info import Pattern, traffic_of
from torch_c10d_ext.report._costs import Link


def _steps(pattern: Pattern, members: int) -> int:
    """From one member to the next, one after the other."""
    if pattern in (Pattern.ALL_REDUCE, Pattern.ALL_GATHER, Pattern.REDUCE_SCATTER):
        return (2 if pattern is Pattern.ALL_REDUCE else 1) * (members - 1)
    return 1 if pattern is Pattern.ALL_TO_ALL else math.ceil(math.log2(members))


def _steps_on_rails(pattern: Pattern, hosts: int) -> int:
    """The same between hosts. Few send to each other at once, or in a ring whose steps overlap."""
    if hosts <= _C.MOST_LEADERS and pattern in (Pattern.ALL_GATHER, Pattern.REDUCE_SCATTER):
        return 1
    return _steps(pattern, hosts)


def _parts(pattern: Pattern, ranks: int, hosts: int, size: int) -> int:
    """Of a collective that are in different steps at once."""
    if pattern is Pattern.ALL_REDUCE:
        return _C.all_reduce_parts(size, hosts)
    if pattern in (Pattern.ALL_GATHER, Pattern.REDUCE_SCATTER):
        part = size // ranks
        if hosts <= _C.MOST_LEADERS and _C.pays_round(part, hosts):
            return hosts * _C.round_parts(part)
    if pattern is Pattern.REDUCE_SCATTER:
        apart = 1 < hosts <= _C.MOST_LEADERS and _C.reduces_rows_apart(size, hosts)
        rows = hosts - 1 if apart else 1
        return rows * _C.reduce_scatter_parts(size)
    return _C.chain_parts(size) if pattern is Pattern.BROADCAST else _C.all_gather_parts(size)


def _overlapped(a: float, b: float, parts: int) -> float:
    """Seconds of two things that each part has to go through, one after the other."""
    return max(a, b) + min(a, b) / parts


@dataclass(frozen=True)
class Topology:
    """Hosts with a link each to one switch, and ranks that fill one host after the other.

    It is a :class:`Link` to :func:`communication_report`, whose collectives take what the fastest
    algorithm takes, or the one that is named here.

    ``"flat"`` is a ring over all ranks, of which each host's link carries one rank's part.
    ``"rails"`` reduces and gathers inside each host, and has one group for each place in a host
    between them, in up to 8 parts at once, of a reduce_scatter for each host. On up to 16 hosts
    data goes on it from each rank to each other one, but for all_reduces of 2 MiB and more, and on
    more than two for all_gathers and reduce_scatters with 512 KiB and more of each rank, on more
    than 4 with 128 KiB for each host: these go from host to host, in up to 4 parts. A large
    broadcast does so in up to 64, a small one goes by a tree. ``"leaders"`` has one rank of each
    host between them, as an all_reduce of up to 128 KiB has on up to 16 hosts. ``"whole"`` is an
    all_reduce inside and then one of everything on every rail, as it is of up to 16 KiB on more
    hosts. Before each of these the ranks agree at rank 0, a round trip.
    ``"piggyback"`` is data that travels with the calls: from host to host on up to 16, up to 256
    KiB of all ranks, 1 MiB divided by those of a host beyond 4, and of an all_to_all or scatter up
    to as much for each host; of an all_reduce and a reduce_scatter, which leaders reduce (of single
    precision and more), as much as if each host were one rank. Else to rank 0 and from there to all
    ranks, up to 32 KiB, 256 KiB divided by all ranks beyond 8.

    Args:
        ranks_per_host: as many on every host; the last one may have fewer.
        inside: the cost inside a host; ``bandwidth`` is one rank's.
        between: the cost between hosts; ``bandwidth`` is one host's, in each direction.
        algorithm: ``"flat"``, ``"rails"``, ``"leaders"``, ``"whole"`` or ``"piggyback"``; none: the
            fastest.
        shared: as :attr:`Link.shared`.
        per_rank: seconds that rank 0, or a leader, takes for each other rank of an agreement.
        host_bandwidth: bytes per second that all ranks of a host send to other hosts and receive
            from them together, at most: where processors are what they wait for, and not the link.
        per_step: seconds that a step takes beside its data, of a collective that does not travel
            with the calls: one inside a host, or one from host to host, of which a ring has many.
    """

    ranks_per_host: int
    inside: Link = Link()
    between: Link = Link()
    algorithm: str | None = None
    shared: str = ""
    per_rank: float = 0.0
    host_bandwidth: float = math.inf
    per_step: float = 0.0

    def __post_init__(self) -> None:
        for name in ("per_rank", "per_step"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"Topology: {name} must be 0 or more, got {getattr(self, name)}")
        if not self.host_bandwidth > 0:
            raise ValueError(
                f"Topology: host_bandwidth must be positive, got {self.host_bandwidth}"
            )
        if self.ranks_per_host < 1:
            raise ValueError(
                f"Topology: ranks_per_host must be 1 or more, got {self.ranks_per_host}"
            )
        if self.algorithm not in (None, "flat", "rails", "leaders", "whole", "piggyback"):
            raise ValueError(
                "Topology: algorithm must be 'flat', 'rails', 'leaders', 'whole' or 'piggyback', "
                f"got {self.algorithm!r}"
            )

    def hosts(self, ranks: int) -> int:
        """How many hosts a group of so many ranks is on."""
        return math.ceil(ranks / self.ranks_per_host)

    def times(self, op: str, ranks: int, size: float) -> dict[str, float]:
        """Seconds of each algorithm.

        Args:
            op: ``"all_reduce"``, say.
            ranks: the size of the group.
            size: the bytes of a rank's larger buffer: of an all_gather what comes out, of an
                exchange what goes to all ranks together.

        Returns:
            Seconds by name. On one host there is ``"flat"`` alone.

        Example, 16 MiB on hosts of 8 ranks with 100 Gbit/s each::

            between = Link(latency=20e-6, hop=10e-6, bandwidth=12.5e9)
            hosts = Topology(8, inside=Link(latency=5e-6, bandwidth=10e9), between=between)
            hosts.times("all_reduce", 4096, 16 << 20)
        """
        hosts, here = self.hosts(ranks), min(ranks, self.ranks_per_host)
        traffic = traffic_of(op)
        if hosts == 1:
            return {"flat": self.inside.seconds(op, ranks, traffic.wire_of_larger(ranks, size))}
        far, near = self.between, self.inside
        # Bytes over one host's link.
        across = traffic.wire_of_larger(hosts, size)
        if traffic.pattern is Pattern.ALL_TO_ALL:
            across *= here
            flat = across
        else:
            flat = traffic.wire_of_larger(ranks, size)
        agreement = 2 * far.latency + (ranks - 1) * self.per_rank
        steps = _steps(traffic.pattern, ranks) * self.per_step
        times = {"flat": agreement + steps + self._between(op, ranks, flat, 2 * flat)}
        travels = self._travels_with_calls(traffic.pattern, ranks, size)
        if travels is not None:
            times["piggyback"] = agreement + travels
        if here == 1 or traffic.pattern is Pattern.MESSAGE:
            return times
        between = self._between(op, hosts, across, 2 * across)
        inside = near.seconds(op, here, traffic.wire_of_larger(here, size))
        begin = agreement + self.per_step
        on_rails = begin + _steps_on_rails(traffic.pattern, hosts) * self.per_step
        parts = _parts(traffic.pattern, ranks, hosts, int(size))
        if traffic.pattern is Pattern.ALL_REDUCE:
            whole = self._between(op, hosts, across * here, 2 * across * here)
            times["whole"] = on_rails + inside + whole
            begin += self.per_step  # inside, another time
            steps, between = self._all_reduce_between(ranks, size, here)
            times["rails"] = begin + steps + _overlapped(between, inside, parts)
            steps, between = self._all_reduce_between(ranks, size, 1)
            times["leaders"] = begin + steps + between + 2 * near.seconds("broadcast", here, size)
        elif traffic.pattern is Pattern.ALL_TO_ALL:
            times["rails"] = on_rails + max(between, inside)
        elif traffic.pattern in (Pattern.ALL_GATHER, Pattern.REDUCE_SCATTER):
            times["rails"] = on_rails + _overlapped(between, inside, parts)
        elif traffic.pattern is Pattern.BROADCAST:
            tree, chain = math.ceil(math.log2(hosts)), 1 + (hosts - 2) / parts
            if parts == 1 or tree <= chain:
                parts, chain = 1, tree
            # A host on the way takes in everything and passes it on.
            moved = min(hosts - 1, 2) * size
            between = self._between(op, hosts, chain * size, moved)
            times["rails"] = on_rails + between + inside / parts
        else:
            times["rails"] = on_rails + between + inside
        return times

    def _travels_with_calls(self, pattern: Pattern, ranks: int, size: float) -> float | None:
        """Seconds beside those of the agreement at rank 0; none where the data is not little."""
        hosts, here = self.hosts(ranks), min(ranks, self.ranks_per_host)
        by_leaders = hosts <= _C.MOST_LEADERS
        most = usual = _C.usual_piggyback(here if by_leaders else ranks, by_leaders)
        exchanges = pattern in (Pattern.ALL_TO_ALL, Pattern.REDUCE_SCATTER, Pattern.SCATTER)
        of_root = pattern in (Pattern.BROADCAST, Pattern.SCATTER)
        # Leaders reduce what their ranks give, and tell them what came of all.
        reduces = by_leaders and pattern in (Pattern.ALL_REDUCE, Pattern.REDUCE_SCATTER)
        # What is given in all, and what of it one rank takes.
        given, result = pattern.buffers(ranks, size)
        data = given * (1 if of_root else hosts if reduces else ranks)
        taken = result if reduces else data / ranks if exchanges else data
        if exchanges and by_leaders:
            most *= hosts
        if pattern is Pattern.MESSAGE or data > most or result > usual:
            return None
        if not by_leaders:
            return (ranks - here) * taken / self.between.bandwidth  # from rank 0
        # A leader says to each other host what its own gives, and hears what that gives; a root's
        # hears nothing.
        share = 1.0 if of_root else 1 / hosts if reduces else here / ranks
        said = share * data / (hosts if exchanges else 1)
        heard = 0.0 if of_root else said
        link = max(said, heard) * (hosts - 1)
        moved = (said + heard) * (hosts - 1)
        seconds = max(link / self.between.bandwidth, moved / self.host_bandwidth)
        # The ranks of its host say it theirs before, and hear of it after that: each copies it.
        told = (0.0 if of_root else given) + taken
        seconds += 2 * told * (here - 1) / self.inside.bandwidth
        return seconds - self.between.latency

    def _all_reduce_between(self, ranks: int, size: float, rails: int) -> tuple[float, float]:
        """Seconds of the steps of one by so many rails, and of what goes over the links."""
        hosts = self.hosts(ranks)
        steps = _steps(Pattern.ALL_REDUCE, hosts)
        sent = traffic_of("all_reduce").wire_of_larger(hosts, size)
        is_even = ranks % self.ranks_per_host == 0
        if is_even and hosts <= _C.MOST_LEADERS and size < _C.ALL_REDUCE_BY_MESSAGES:
            steps = 2
            if _C.goes_at_once(int(size / rails), hosts):
                steps, sent = 1, (hosts - 1) * size
        return steps * self.per_step, self._between("all_reduce", hosts, sent, 2 * sent)

    def _between(self, op: str, members: int, wire: float, moved: float) -> float:
        """Seconds of what goes between hosts: by the link, or by the processors of a host."""
        seconds = self.between.seconds(op, members, wire)
        return max(seconds, self.between.latency + moved / self.host_bandwidth)

    def seconds(self, op: str, ranks: int, wire_bytes: float) -> float:
        """How long a collective takes that has the links for itself, as :meth:`Link.seconds`."""
        one = traffic_of(op).wire_of_larger(ranks, 1.0)
        times = self.times(op, ranks, wire_bytes / one if one else 0.0)
        return times.get(self.algorithm or "", min(times.values()))

    def busy_seconds(self, wire_bytes: float) -> float:
        """How long the rank is busy with a call: the longer of :meth:`Link.busy_seconds`."""
        return max(self.inside.busy_seconds(wire_bytes), self.between.busy_seconds(wire_bytes))
