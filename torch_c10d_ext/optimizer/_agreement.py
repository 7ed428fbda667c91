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
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
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
    counts = [int.from_bytes(each[32:], "little") for each in seen]
    longest = max(counts)
    marks = b"".join(hashlib.sha256(line.encode()).digest()[:16] for line in lines)
    everyone = exchange(marks.ljust(16 * longest, b"\0"))
    first = 0
    while first < longest:
        at = {m[16 * first : 16 * first + 16] for m in everyone}
        if len(at) > 1 or any(count <= first for count in counts):
            break
        first += 1
    line = lines[first] if first < len(lines) else "nothing more"
    texts = [
        text.rstrip(b"\0").decode(errors="replace")
        for text in exchange(line.encode()[:_LINE].ljust(_LINE, b"\0"))
    ]
    apart = [r for r in range(len(texts)) if _mark(everyone, r, first) != _mark(everyone, 0, first)]
    by_text: dict[str, list[int]] = {}
    for r, text in enumerate(texts):
        by_text.setdefault(text, []).append(r)
    said = "; ".join(
        f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}: {text}"
        for text, ranks in by_text.items()
    )
    raise CollectiveMismatch(
        "optimize: the ranks of a group must start the same collectives in the same order, got "
        f"as number {first} of the graph: {said} {where}".rstrip(),
        ranks=apart,
        op=line.split("(")[0],
        seq=first,
        group=group,
    )


def _digest(lines: Sequence[str]) -> bytes:
    return hashlib.sha256("\n".join(lines).encode()).digest() + len(lines).to_bytes(8, "little")


def _mark(marks: Sequence[bytes], rank: int, line: int) -> bytes:
    return marks[rank][16 * line : 16 * line + 16]


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


def exchange_by_store(
    store: Any, rank: int, size: int, name: str, timeout: float, where: str = ""
) -> Exchange:
    """By a store, which hears of no collective: for groups that cannot tell them apart.

    Raises:
        CollectiveTimeout: a rank gave nothing in time.
    """
    rounds = [0]

    def exchange(data: bytes) -> list[bytes]:
        rounds[0] += 1
        prefix = f"{name}/{rounds[0]}"
        store.set(f"{prefix}/{rank}", data)
        deadline = time.monotonic() + timeout
        pause = 0.0005
        found: list[bytes] = []
        while len(found) < size:
            key = f"{prefix}/{len(found)}"
            # Not wait(): it would keep the store from every other thread.
            if store.check([key]):
                found.append(bytes(store.get(key)))
                continue
            if time.monotonic() > deadline:
                raise CollectiveTimeout(
                    f"optimize: every rank must compare its plan within {timeout:g} s, got none "
                    f"of rank {len(found)} {where}".rstrip(),
                    ranks=[len(found)],
                    op="optimize",
                )
            time.sleep(pause)
            pause = min(0.05, pause * 1.5)
        return found

    return exchange


# --- when a graph runs ---------------------------------------------------------------------------

_lock = threading.Lock()
# By plan: the groups that agreed on it. And by group: how many plans were compared there.
_agreed: dict[str, list[Any]] = {}
_compared: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def agree(plan: str, every: bool) -> None:
    """Compares a plan with the other ranks'.

    Args:
        plan: see :func:`pack_plan`.
        every: at every run; else only at the first one with these groups.
    """
    launches = unpack_plan(plan)
    # In the order of the names, which all ranks share, so that no two ranks wait for each other.
    names = sorted(launches)
    groups = [process_group(name) for name in names]
    with _lock:
        known = _agreed.get(plan, ())
    first = len(known) != len(groups) or any(
        ref() is not pg for ref, pg in zip(known, groups, strict=False)
    )
    for name, pg in zip(names, groups, strict=True):
        if pg.size() == 1 or is_fake(name):
            continue
        where = f"(rank {pg.rank()}/{pg.size()}, group '{name}')"
        if has_cpu(name) and (every or sums_in_rank_order(name)):
            # By the group itself: a rank whose plan is new to it, as its compiler was called once
            # more, then meets those who run one that they know.
            if (every or first) and not _all_alike(plan, name, pg.size()):
                compare(launches[name], pg.rank(), exchange_by_collective(name), where, name)
        elif first:
            with _lock:
                number = _compared[pg] = _compared.get(pg, 0) + 1
            key = f"c10d_ext/plan/{name}/{number}"
            store, timeout = group_store(name), group_timeout(name)
            exchange = exchange_by_store(store, pg.rank(), pg.size(), key, timeout, where)
            compare(launches[name], pg.rank(), exchange, where, name)
    if first:
        with _lock:
            _agreed[plan] = [weakref.ref(pg) for pg in groups]


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
_library.define("agree(str plan, bool every) -> ()")
_library.define("agree_before_(Tensor(a!) tensor, str plan, bool every) -> ()")


def _agree_before(tensor: Tensor, plan: str, every: bool) -> None:
    # The tensor is left as it is: that it may be written keeps compilers from moving the call
    # behind the collective that reads it.
    agree(plan, every)


def _fake_agree(plan: str, every: bool) -> None: ...


def _fake_agree_before(tensor: Tensor, plan: str, every: bool) -> None: ...


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
