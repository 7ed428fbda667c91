"""Plans of several ranks: compared when they first run, and checked for deadlocks without a run.

A plan is the list of a rank's launches and waits in their order. Ranks of a group must start the
group's collectives in one order. The optimizer decides alike on ranks that run one program; where
programs differ after all, the first run of the graph says so, before anything of it is sent.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import os
import tempfile
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_c10d_ext._groups import (
    group_store,
    group_timeout,
    has_cpu,
    is_fake,
    process_group,
    sums_in_rank_order,
)
from torch_c10d_ext.errors import CollectiveMismatch, CollectiveTimeout

# A plan: by group name, what is started there, in order.
Launches = Mapping[str, Sequence[str]]

# Gives what all ranks of a group gave, in their order.
Exchange = Callable[[bytes], list[bytes]]

_LINE = 512  # bytes of a launch's description in an error
_NOTHING = "nothing more"

# Of how many runs a rank's records are kept; no rank gets that far ahead of another one.
_WINDOW = 512
_NAME = 8  # bytes of a plan's name
_SUM = 4  # and of a record's checksum


def pack_plan(launches: Launches) -> str:
    """A plan as a short string, the same for the same plan on every rank."""
    text = json.dumps({k: list(v) for k, v in launches.items()}, sort_keys=True)
    return base64.b85encode(zlib.compress(text.encode(), 9)).decode()


@functools.lru_cache(maxsize=64)
def unpack_plan(plan: str) -> dict[str, list[str]]:
    return json.loads(zlib.decompress(base64.b85decode(plan)))  # type: ignore[no-any-return]


def compare(
    lines: Sequence[str], rank: int, exchange: Exchange, where: str = "", group: str = ""
) -> None:
    """Raises on every rank of a group unless all of them start the same collectives.

    Three rounds at most: a digest; where they differ, one of each launch; and the launches that
    differ first.

    Args:
        lines: this rank's launches in the group.
        rank: this rank in the group.
        exchange: gathers bytes of one length from all ranks.
        where: the end of the error.
        group: its name, for the error.

    Raises:
        CollectiveMismatch: the ranks' launches differ; the text names the first that does.
    """
    seen = exchange(_digest(lines))
    if len(set(seen)) == 1:
        return
    longest = max(int.from_bytes(each[32:], "little") for each in seen)
    marks = exchange(_marks(lines).ljust(16 * longest, b"\0"))
    first = next(k for k in range(longest) if len({_mark(m, k) for m in marks}) > 1)
    line = lines[first] if first < len(lines) else _NOTHING
    texts = [
        text.rstrip(b"\0").decode(errors="replace")
        for text in exchange(line.encode()[:_LINE].ljust(_LINE, b"\0"))
    ]
    apart = [r for r, m in enumerate(marks) if _mark(m, first) != _mark(marks[0], first)]
    raise _mismatch(first, texts, apart, rank, where, group)


def _mismatch(
    first: int, texts: Sequence[str], apart: list[int], rank: int, where: str, group: str
) -> CollectiveMismatch:
    """What is raised where launch number ``first`` is not the same on all ranks."""
    by_text: dict[str, list[int]] = {}
    for r, text in enumerate(texts):
        by_text.setdefault(text, []).append(r)
    said = "; ".join(
        f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}: {text}"
        for text, ranks in by_text.items()
    )
    return CollectiveMismatch(
        "optimize: the ranks of a group must start the same collectives in the same order, got "
        f"as number {first} of the graph: {said} {where}".rstrip(),
        ranks=apart,
        op=texts[rank].split("(")[0],
        seq=first,
        group=group,
    )


def _digest(lines: Sequence[str]) -> bytes:
    return hashlib.sha256("\n".join(lines).encode()).digest() + len(lines).to_bytes(8, "little")


def _marks(lines: Sequence[str]) -> bytes:
    return b"".join(hashlib.sha256(line.encode()).digest()[:16] for line in lines)


def _mark(marks: bytes, line: int) -> bytes:
    return marks[16 * line : 16 * line + 16]


# --- exchanges -----------------------------------------------------------------------------------


def exchange_by_collective(group: str) -> Exchange:
    """By an all_gather of the group, where the group itself tells collectives apart."""

    def exchange(data: bytes) -> list[bytes]:
        given = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        n = process_group(group).size()
        gathered = torch.ops.c10d_ext.all_gather_into_tensor(given, n, group)
        rows = torch.ops.c10d_ext.wait_tensor(gathered).reshape(n, len(data))
        return [row.numpy().tobytes() for row in rows]

    return exchange


class _InStore:
    """The records of a group's ranks, in keys of its store that are overwritten."""

    def __init__(self, store: Any, name: str, rank: int) -> None:
        self._store, self._name, self._rank = store, name, rank

    def write(self, slot: int, record: bytes) -> None:
        self._store.set(f"{self._name}/rank/{self._rank}/{slot}", record)

    def read(self, rank: int, slot: int) -> bytes:
        key = f"{self._name}/rank/{rank}/{slot}"
        # Not wait(): it would keep the store from every other thread.
        return bytes(self._store.get(key)) if self._store.check([key]) else b""


class _InFiles:
    """The records in a file for each rank, beside that of a FileStore, which forgets nothing.

    As that store does, each access opens the file anew: so file systems of several hosts show what
    was written. The store itself says where the files are.
    """

    def __init__(self, store: Any, name: str, rank: int, size: int, beside: Path) -> None:
        self._store, self._name = store, name
        made, path = tempfile.mkstemp(prefix=f"{beside.name}.", dir=beside.parent)
        os.close(made)
        self._paths = {rank: path}
        self._own = path
        store.set(f"{name}/file/{rank}", path)
        # Ranks that are still to read what this one wrote may come long after it has gone.
        self.end = weakref.finalize(self, _remove_files, os.getpid(), store, name, size, beside)

    def write(self, slot: int, record: bytes) -> None:
        file = os.open(self._own, os.O_WRONLY)
        try:
            os.pwrite(file, record, slot * len(record))
        finally:
            os.close(file)

    def read(self, rank: int, slot: int) -> bytes:
        if rank not in self._paths:
            key = f"{self._name}/file/{rank}"
            if not self._store.check([key]):
                return b""
            self._paths[rank] = self._store.get(key).decode()
        file = os.open(self._paths[rank], os.O_RDONLY)
        try:
            return os.pread(file, _RECORD, slot * _RECORD)
        finally:
            os.close(file)


def _remove_files(pid: int, store: Any, name: str, size: int, beside: Path) -> None:
    """Called by each rank at its end, and by its forks; the last rank finds that all are done."""
    # A FileStore waits for minutes for a folder that is gone.
    if pid == os.getpid() and beside.exists() and store.add(f"{name}/ended", 1) == size:
        for rank in range(size):
            Path(store.get(f"{name}/file/{rank}").decode()).unlink(missing_ok=True)


_RECORD = 8 + _NAME + _SUM


def _records(store: Any, name: str, rank: int, size: int) -> _InStore | _InFiles:
    inner = store
    while isinstance(inner, dist.PrefixStore):
        inner = inner.underlying_store
    if isinstance(inner, dist.FileStore):
        return _InFiles(store, name, rank, size, Path(inner.path))
    return _InStore(store, name, rank)


class Register:
    """Which plan each rank of a group runs, in a store: for groups that take one collective for
    another, and for those without CPU tensors.

    Whether a graph is new differs between ranks: a compiler was called again on one, or knew the
    graph on another. So every rank says of every run what it is about to do, which takes a few
    microseconds, and only ranks whose graph is new wait for what the others say.

    A record stands until its rank is ``_WINDOW`` runs further, and a rank gets that far only once
    all others have come past the run: so what a rank ran is known whatever the ranks' pace is.
    """

    def __init__(self, store: Any, rank: int, size: int, name: str) -> None:
        self.store, self.rank, self.size, self.name = store, rank, size, name
        self.runs = 0
        self._ask_at = _WINDOW
        self._records = _records(store, name, rank, size)
        self._given: set[bytes] = set()

    def run(
        self, lines: Sequence[str], wait: bool, timeout: float, where: str = "", group: str = ""
    ) -> None:
        """Says what the next run is, and compares it with the others'.

        Args:
            lines: this rank's launches in the group.
            wait: whether this rank waits for the others and compares.
            timeout: seconds for that, and for ranks that are half a window behind.
            where: the end of errors.
            group: its name, for errors.

        Raises:
            CollectiveMismatch: as :func:`compare`.
            CollectiveTimeout: ranks did not come to a run in time.
        """
        mine = hashlib.sha256("\n".join(lines).encode()).digest()[:_NAME]
        if mine not in self._given:
            # Before its name is, so that who finds the name finds the text.
            self.store.set(f"{self.name}/plan/{mine.hex()}", pack_plan({"": lines}))
            self._given.add(mine)
        number = self.runs + 1
        if number >= self._ask_at:
            # Up to the next time, no record is overwritten whose run some rank has yet to come to.
            self._names_of(number - _WINDOW // 2, mine, timeout, where)
            self._ask_at = number + _WINDOW // 2
        self.runs = number
        said = number.to_bytes(8, "little") + mine
        self._records.write(number % _WINDOW, said + zlib.crc32(said).to_bytes(_SUM, "little"))
        if not wait:
            return
        names = self._names_of(number, mine, timeout, where)
        if len(set(names)) == 1:
            return
        plans = [self._lines_of(name) for name in names]
        longest = max(map(len, plans))
        rows = ([p[k] if k < len(p) else _NOTHING for p in plans] for k in range(longest))
        first, texts = next((k, row) for k, row in enumerate(rows) if len(set(row)) > 1)
        apart = [r for r, text in enumerate(texts) if text != texts[0]]
        raise _mismatch(first, [t[:_LINE] for t in texts], apart, self.rank, where, group)

    def _names_of(self, run: int, mine: bytes, timeout: float, where: str) -> list[bytes]:
        """The names of the plans that the ranks run as a run, once all have come to it."""
        deadline = time.monotonic() + timeout
        pause = 0.0005
        names = {self.rank: mine}
        while True:
            for rank in range(self.size):
                if rank not in names and (name := self._name_of(rank, run)):
                    names[rank] = name
            if len(names) == self.size:
                return [names[rank] for rank in range(self.size)]
            if time.monotonic() > deadline:
                late = [rank for rank in range(self.size) if rank not in names]
                ranks = f"{'rank' if len(late) == 1 else 'ranks'} {', '.join(map(str, late))}"
                raise CollectiveTimeout(
                    f"optimize: every rank must say within {timeout:g} s what it runs, got "
                    f"nothing of {ranks} for run {run} {where}".rstrip(),
                    ranks=late,
                    op="optimize",
                )
            time.sleep(pause)
            pause = min(0.05, pause * 1.5)

    def _name_of(self, rank: int, run: int) -> bytes:
        """The name of the plan that a rank runs as a run; nothing: it has not come to it."""
        record = self._records.read(rank, run % _WINDOW)
        said, checksum = record[:-_SUM], record[-_SUM:]
        # Files are read while they are written.
        if len(record) < _RECORD or zlib.crc32(said) != int.from_bytes(checksum, "little"):
            return b""
        # It is this run's while this rank compares it: the other one is less than a window ahead.
        return said[8:] if int.from_bytes(said[:8], "little") >= run else b""

    def _lines_of(self, name: bytes) -> list[str]:
        text = bytes(self.store.get(f"{self.name}/plan/{name.hex()}")).decode()
        return unpack_plan(text)[""]


# --- when a graph runs ---------------------------------------------------------------------------

_lock = threading.Lock()
# By plan, and by graph: the groups that agreed on it.
_agreed: dict[str, list[Any]] = {}
_registers: weakref.WeakKeyDictionary[Any, Register] = weakref.WeakKeyDictionary()


def agree(plan: str, every: bool, graph: str) -> None:
    """Compares a plan with the other ranks'.

    Args:
        plan: see :func:`pack_plan`.
        every: at every run; else only at the first one with these groups.
        graph: tells graphs of one plan apart, where groups compare by their store.
    """
    launches = unpack_plan(plan)
    # In the order of the names, which all ranks share, so that no two ranks wait for each other.
    names = sorted(launches)
    groups = [process_group(name) for name in names]
    known_plan, known_graph = _is_known(plan, groups), _is_known(graph + plan, groups)
    for name, pg in zip(names, groups, strict=True):
        if pg.size() == 1 or is_fake(name):
            continue
        where = f"(rank {pg.rank()}/{pg.size()}, group '{name}')"
        if has_cpu(name) and (every or sums_in_rank_order(name)):
            # By the group itself: a rank whose plan is new to it, as its compiler was called once
            # more, then meets those who run one that they know.
            if (every or not known_plan) and not _all_alike(plan, name, pg.size()):
                compare(launches[name], pg.rank(), exchange_by_collective(name), where, name)
        else:
            # Not by what the rank knows of the plan: it may come from another graph, while other
            # ranks have none like it, and wait.
            timeout = group_timeout(name)
            _register(pg, name).run(launches[name], not known_graph, timeout, where, name)
    with _lock:
        for key, known in ((plan, known_plan), (graph + plan, known_graph)):
            if not known:
                _agreed[key] = [weakref.ref(pg) for pg in groups]


def _is_known(key: str, groups: Sequence[Any]) -> bool:
    with _lock:
        known = _agreed.get(key, ())
    return len(known) == len(groups) and all(
        ref() is pg for ref, pg in zip(known, groups, strict=True)
    )


def _register(pg: Any, name: str) -> Register:
    with _lock:
        if pg not in _registers:
            key = f"c10d_ext/optimizer/{name}"
            _registers[pg] = Register(group_store(name), pg.rank(), pg.size(), key)
        return _registers[pg]


@functools.lru_cache(maxsize=256)
def _digests(plan: str, name: str, ranks: int) -> tuple[Tensor, Tensor]:
    """The digest of a group's launches, and what all ranks' digests are where they agree."""
    digest = _digest(unpack_plan(plan)[name])
    one = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
    return one, one.repeat(ranks)


def _all_alike(plan: str, name: str, ranks: int) -> bool:
    """Whether all ranks run one plan: the one round of :func:`compare` that every run takes.

    Where one rank differs, no rank finds its own digest everywhere, so that all go on to compare.
    """
    mine, everyone = _digests(plan, name, ranks)
    with torch.no_grad():
        gathered = torch.ops.c10d_ext.all_gather_into_tensor(mine, ranks, name)
        return torch.equal(torch.ops.c10d_ext.wait_tensor(gathered), everyone)


_library = torch.library.Library("c10d_ext_optimizer", "DEF")
_library.define("agree(str plan, bool every, str graph) -> ()")
_library.define("agree_before_(Tensor(a!) tensor, str plan, bool every, str graph) -> ()")


def _agree_before(tensor: Tensor, plan: str, every: bool, graph: str) -> None:
    # The tensor is left as it is: that it may be written keeps compilers from moving the call
    # behind the collective that reads it.
    agree(plan, every, graph)


def _fake_agree(plan: str, every: bool, graph: str) -> None: ...


def _fake_agree_before(tensor: Tensor, plan: str, every: bool, graph: str) -> None: ...


_library.impl("agree", agree, "CompositeExplicitAutograd")
_library.impl("agree_before_", _agree_before, "CompositeExplicitAutograd")
torch.library.register_fake("c10d_ext_optimizer::agree", _fake_agree, lib=_library)
torch.library.register_fake("c10d_ext_optimizer::agree_before_", _fake_agree_before, lib=_library)
torch.fx.node.has_side_effect(torch.ops.c10d_ext_optimizer.agree.default)
torch.fx.node.has_side_effect(torch.ops.c10d_ext_optimizer.agree_before_.default)


# --- without a run -------------------------------------------------------------------------------


def find_deadlock(plans: Sequence[Sequence[tuple[str, str, str]]]) -> str | None:
    """What keeps a world of ranks from coming to the end of their plans; None if nothing does.

    Each rank starts and waits in order; a collective is done when all of its group's ranks have
    started it; a wait returns when its collective is done.

    Args:
        plans: by rank of the world, in order: ``("start", group, what)``, and ``("wait", group,
            k)`` for a wait for the k-th start in that group, counted from 0.

    Returns:
        The first ranks that differ, or wait for each other, and what for.
    """
    return _Replay(plans).run()


class _Replay:
    def __init__(self, plans: Sequence[Sequence[tuple[str, str, str]]]) -> None:
        self.plans = plans
        self.members: dict[str, list[int]] = {}
        for rank, plan in enumerate(plans):
            for _, group, _ in plan:
                ranks = self.members.setdefault(group, [])
                if not ranks or ranks[-1] != rank:
                    ranks.append(rank)

    def run(self) -> str | None:
        at = [0] * len(self.plans)
        started: dict[tuple[str, int], list[str]] = {}  # by rank
        moved = True
        while moved:
            moved = False
            for rank, plan in enumerate(self.plans):
                while at[rank] < len(plan):
                    kind, group, text = plan[at[rank]]
                    mine = started.setdefault((group, rank), [])
                    if kind == "start":
                        number = len(mine)
                        for other in self.members[group]:
                            theirs = started.get((group, other), [])
                            if number < len(theirs) and theirs[number] != text:
                                return (
                                    f"collective {number} of group '{group}' is {text} on rank "
                                    f"{rank} and {theirs[number]} on rank {other}"
                                )
                        mine.append(text)
                    else:
                        number = int(text)
                        ready = all(
                            len(started.get((group, other), [])) > number
                            for other in self.members[group]
                        )
                        if not ready:
                            break
                    at[rank] += 1
                    moved = True
        for rank, plan in enumerate(self.plans):
            if at[rank] < len(plan):
                _, group, text = plan[at[rank]]
                number = int(text)  # nothing but a wait stops a rank
                late = [
                    r for r in self.members[group] if len(started.get((group, r), [])) <= number
                ]
                return (
                    f"rank {rank} waits for collective {number} of group '{group}', which ranks "
                    f"{late} do not come to start"
                )
        for group, ranks in self.members.items():
            counts = {rank: len(started.get((group, rank), [])) for rank in ranks}
            if len(set(counts.values())) > 1:
                return f"the ranks of group '{group}' start {counts} collectives"
        return None
