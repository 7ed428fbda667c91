"""Ranks that meet to make a group: who they are, where they meet, and how long they wait."""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

import torch_c10d_ext_autoload
from torch_c10d_ext import _C, __version__
from torch_c10d_ext._built_with import SOURCES

# What clocks can count.
_LONGEST = dt.timedelta(days=365)
# How long rank 0 waits for the others to have read why the group cannot be made.
_HEARING = dt.timedelta(seconds=2)


class Meeting(NamedTuple):
    """One rank's part in the making of a group, in the order in which ``_C`` takes it.

    Args:
        global_ranks: where the ranks are in the world, a ``_C.GlobalRanks``.
    """

    store: Any
    rank: int
    size: int
    timeout: dt.timedelta
    name: str
    global_ranks: Any

    @classmethod
    def of(cls, options: Any) -> Meeting:
        """That of what torch gives who creates a backend."""
        # torch gives no ranks for the group of all of them, which is the first one.
        everyone = [] if dist.is_initialized() else list(range(options.group_size))
        return cls(
            options.store,
            options.group_rank,
            options.group_size,
            options.timeout,
            options.group_id,
            _C.GlobalRanks(options.store, options.global_ranks_in_group or everyone),
        )

    @property
    def where(self) -> str:
        """The end of texts."""
        return f"(rank {self.rank}/{self.size}, group '{self.name}')"

    def checked(self, backend: str) -> Meeting:
        """The same, with a timeout that clocks can count.

        Raises:
            ValueError: it is negative.
        """
        if self.timeout < dt.timedelta():
            # Also what torch makes of timedelta.max, which its microseconds cannot hold.
            raise ValueError(
                f"{backend}: the timeout must be from 0 to 292000 years, got "
                f"{self.timeout.total_seconds():g} s {self.where}"
            )
        return self.bounded()

    def bounded(self) -> Meeting:
        """The same, with a timeout that clocks can count."""
        return self._replace(timeout=min(self.timeout, _LONGEST))

    def below(self, prefix: str) -> Meeting:
        """The same at other keys of the store."""
        return self._replace(store=dist.PrefixStore(prefix, self.store))

    def of_part(self, ranks: Sequence[int]) -> Meeting:
        """That of some of the ranks, this one among them."""
        return self._replace(
            rank=ranks.index(self.rank),
            size=len(ranks),
            global_ranks=_C.part_of_global_ranks(self.global_ranks, list(ranks)),
        )

    def rendezvous(self, backend: str) -> _C.Rendezvous:
        """What tells whether the others still come to make a group of ``backend``."""
        store, rank, size, _, name, global_ranks = self
        return _C.Rendezvous(store, rank, size, name, global_ranks, backend)


@functools.cache
def own_build() -> str:
    """Names what is installed here: ranks of different builds may not understand each other."""
    autoload = Path(str(torch_c10d_ext_autoload.__file__))
    return f"{__version__} ({digest_of(Path(__file__).parent, SOURCES, autoload)})"


def digest_of(package: Path, compiled: str, *others: Path) -> str:
    """Hashes a package's Python, other files, and a text that stands for what was compiled."""
    sources = {path.relative_to(package).as_posix(): path for path in package.rglob("*.py")}
    sources |= {path.name: path for path in others}
    digest = hashlib.sha256(compiled.encode())
    for name, path in sorted(sources.items()):
        # An editor's; or of the torch that it was built for, which may differ.
        if any(part.startswith(".") for part in name.split("/")) or name == "_built_with.py":
            continue
        try:
            content = path.read_bytes()
        except OSError as error:
            content = str(error.errno).encode()  # ranks are to refuse each other, not to hang
        digest.update(b"\0" + name.encode() + b"\0" + content)
    return digest.hexdigest()[:12]


def let_all_hear(watched: Any, rank: int, size: int) -> None:
    """Waits, on rank 0, until all ranks know why they will raise. All of them call it.

    The store may end with rank 0's process.
    """
    with contextlib.suppress(dist.DistError):  # who does not come will not know why
        watched.set(f"heard/{rank}", "")
        if rank == 0:
            watched.wait([f"heard/{other}" for other in range(size)], _HEARING)


def other_build(said: Sequence[Mapping[str, Any]]) -> str:
    """What keeps ranks that say this of themselves from understanding each other, if anything."""
    builds = [each.get("build", "an earlier one") for each in said]
    for rank, build in enumerate(builds):
        if build != builds[0]:
            return (
                f"all ranks must run the same build of torch_c10d_ext, got {builds[0]} on rank 0, "
                f"{build} on rank {rank}"
            )
    return ""
