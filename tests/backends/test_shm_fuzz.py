"""Random programs of collectives on shm, against a reference in one process.

A program is drawn here and run by all ranks: collectives, dtypes, reduce ops, shapes, strides,
groups that overlap, works waited for at once or later, in any order. In the second test one rank
departs from the program at one step: all ranks of that step's group must say so and go on with the
rest.

The programs are the same on every run. C10D_EXT_FUZZ_SECONDS=600 draws others, for that long.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.backends.dist_ops import BY_NAME, DIST_OPS, How, Shape, Tensors, inputs_of
from tests.contract import gaps
from tests.harness import run, values
from tests.harness.worker import FALLBACK
from torch_c10d_ext.errors import CollectiveMismatch

SIZE = 4
# Ranks of the groups, besides the world. The last one has the world's ranks once more.
GROUPS = ((0, 1, 2, 3), (0, 1), (1, 2, 3), (0, 3), (2,), (0, 1, 2, 3))

SECONDS = float(os.environ.get("C10D_EXT_FUZZ_SECONDS", "0"))
FUZZ = settings(
    max_examples=10**6 if SECONDS else 90,
    derandomize=not SECONDS,
    database=None,
    deadline=None,
    # A shorter program may need minutes to fail, where one of the ranks hangs.
    phases=(Phase.generate,),
    suppress_health_check=list(HealthCheck),
)


@dataclass(frozen=True)
class Step:
    """One call as all ranks of a group make it."""

    collective: str
    dtype: torch.dtype
    reduce_op: str
    factor: Any
    shape: Shape
    group: int
    root: int  # modulo the size of the group
    layout: int
    # How many further steps pass before the wait; None: not async.
    wait_after: int | None


@dataclass(frozen=True)
class Departure:
    """What one rank of a step's group does differently."""

    step: int
    member: int  # modulo the size of the group
    what: str


SHAPES = st.one_of(
    st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple),
    st.sampled_from(((257,), (1000, 3), (9001,), (40_003,), (3, 50_000))),
)
# Collectives for which ranks describe what they want to each other.
COLLECTIVES = [v for v in DIST_OPS if "send" not in v.name and "manager" not in v.name]


@st.composite
def steps(draw: Any, collectives: Any = tuple(DIST_OPS), smallest_group: int = 1) -> Step:
    collective = draw(st.sampled_from(collectives))
    dtype = draw(st.sampled_from(values.DTYPES))
    # dist.* lets through no others for complex numbers.
    ops = ("sum", "avg") if dtype in values.COMPLEX else values.meanings(dtype)
    op = draw(st.sampled_from(ops)) if collective.reduces else "sum"
    factor = draw(st.sampled_from(values.factors(dtype))) if op == "premul_sum" else None
    return Step(
        collective.name,
        dtype,
        op,
        factor,
        draw(SHAPES),
        draw(st.sampled_from([i for i, g in enumerate(GROUPS) if len(g) >= smallest_group])),
        draw(st.integers(0, 7)),
        draw(st.integers(0, 100)),
        draw(st.none() | st.integers(0, 4)),
    )


PROGRAMS = st.lists(steps(), min_size=1, max_size=12)

LAYOUTS = ("contiguous", "strided", "offset", "transposed", "expanded")


def _layout(shape: Shape, dtype: torch.dtype, index: int, written: bool) -> str:
    possible = [
        name
        for name in LAYOUTS
        if name in values.layouts(dtype, shape) and not (written and name == "expanded")
    ]
    return possible[index % len(possible)]


# --- on the worker -------------------------------------------------------------------------------

_groups: list[Any] = []


def groups() -> list[Any]:
    """Made once per worker."""
    if not _groups:
        _groups.extend(dist.new_group(list(ranks)) for ranks in GROUPS)
    return _groups


class Call:
    """A step on this rank: started, then finished."""

    def __init__(self, number: int, step: Step, departure: Departure | None) -> None:
        self.step, self.what = step, f"step {number}: {step}"
        members = GROUPS[step.group]
        self.n, self.rank = len(members), members.index(dist.get_rank())
        self.departs = departure is not None and departure.step == number
        asked = step
        if departure and self.departs:
            self.what += f", {departure}"
            if self.rank == departure.member % self.n:
                asked = depart(step, departure.what)
        collective = BY_NAME[asked.collective]
        how = How(
            asked.reduce_op,
            asked.factor,
            asked.root % self.n,
            groups()[asked.group],
            asked.wait_after is not None,
        )
        world = [
            [
                values.lay_out(
                    x,
                    _layout(tuple(x.shape), asked.dtype, asked.layout + r + i, collective.inplace),
                )
                for i, x in enumerate(xs)
            ]
            for r, xs in enumerate(
                inputs_of(collective, self.n, asked.shape, asked.dtype, how, salt=number)
            )
        ]
        plain = [[x.clone() for x in xs] for xs in world]
        self.xs = world[self.rank]
        self.outs = self.xs
        if not collective.inplace:
            self.outs = [
                values.empty_like(s, asked.dtype, _layout(s, asked.dtype, asked.layout - i, True))
                for i, s in enumerate(collective.outputs(self.n, self.rank, asked.shape, how.root))
            ]
        self.want: Tensors = [] if self.departs else collective.reference(plain, how)[self.rank]
        self.exact = not collective.reduces or (values.exact(asked.dtype, asked.reduce_op, self.n))
        self.around = [gaps(out) for out in self.outs]
        self.before = [values.memory(x) for x in (*self.xs, *self.outs)]
        self.inplace = collective.inplace
        self.start: Callable[[], Any] = lambda: collective.call(self.xs, self.outs, how)

    def begin(self) -> str:
        self.works: Any = None
        try:
            self.works = self.start()
        except CollectiveMismatch as error:
            return self._mismatch(error)
        return self.finish() if self.step.wait_after is None else ""

    def finish(self) -> str:
        """What is wrong, if anything."""
        try:
            for work in self.works if isinstance(self.works, list) else [self.works]:
                if work is not None:
                    work.wait()
        except CollectiveMismatch as error:
            return self._mismatch(error)
        if self.departs:
            return f"{self.what}: no CollectiveMismatch"
        for i, (out, want) in enumerate(zip(self.outs, self.want, strict=True)):
            wrong = values.mismatch(out, want, bitwise=self.exact, ulps=4)
            if wrong:
                return f"{self.what}, part {i}: {wrong}"
            if gaps(out) != self.around[i]:
                return f"{self.what}, part {i}: wrote between the elements"
        if not self.inplace and [values.memory(x) for x in self.xs] != self.before[: len(self.xs)]:
            return f"{self.what}: input changed"
        return ""

    def _mismatch(self, error: Exception) -> str:
        if not self.departs:
            return f"{self.what}: {error}"
        if [values.memory(x) for x in (*self.xs, *self.outs)] != self.before:
            return f"{self.what}: wrote something and then raised {error}"
        return ""


def depart(step: Step, what: str) -> Step:
    """The step as the rank that departs makes it."""
    if what == "shape":
        return replace(step, shape=(step.shape[0] + 1, *step.shape[1:]))
    if what == "dtype":
        other = torch.int32 if step.dtype != torch.int32 else torch.float32
        return replace(step, dtype=other, reduce_op="sum", factor=None)
    if what == "reduce op":
        return replace(step, reduce_op="max" if step.reduce_op != "max" else "min", factor=None)
    if what == "root":
        return replace(step, root=step.root + 1)
    assert what == "collective"
    other_collective = (
        "all_reduce" if step.collective.split(" ")[0] not in ("all_reduce",) else "all_gather"
    )
    return replace(step, collective=other_collective)


def execute(program: list[Step], departure: Departure | None = None) -> list[str]:
    """Run a program on this rank; what is wrong."""
    groups()
    wrong = []
    pending: list[tuple[int, Call]] = []
    for number, step in enumerate(program):
        due = [call for at, call in pending if at <= number]
        pending = [(at, call) for at, call in pending if at > number]
        wrong += [call.finish() for call in reversed(due)]
        if dist.get_rank() in GROUPS[step.group]:
            call = Call(number, step, departure)
            wrong.append(call.begin())
            if step.wait_after is not None and call.works is not None:
                pending.append((number + 1 + step.wait_after, call))
    wrong += [call.finish() for _, call in reversed(pending)]
    return [text for text in wrong if text]


# --- in the parent -------------------------------------------------------------------------------


def bounded(seconds: float) -> Callable[[], bool]:
    """Whether time is left; measured from the first question."""
    ends: list[float] = []

    def left() -> bool:
        if not ends:
            ends.append(time.monotonic() + seconds)
        return time.monotonic() < ends[0]

    return left


# shm itself, and its collectives over gloo where ranks cannot share memory.
everywhere = pytest.mark.parametrize("backend", ["shm", FALLBACK])
pytestmark = pytest.mark.long


@everywhere
@pytest.mark.timeout(max(300, 2 * SECONDS))
def test_random_programs(backend: str) -> None:
    left = bounded(SECONDS or (6 if backend == "shm" else 4))
    ran: list[list[Step]] = []

    @FUZZ
    @given(PROGRAMS)
    def programs_run(program: list[Step]) -> None:
        if left() or len(ran) < 3:
            ran.append(program)
            for rank, wrong in enumerate(run(SIZE, execute, program, backend=backend, deadline=60)):
                assert not wrong, f"rank {rank}: {wrong}\nof {program}"

    programs_run()
    assert len(ran) > 2


@st.composite
def departures(draw: Any) -> tuple[list[Step], Departure]:
    program = draw(PROGRAMS)
    step = draw(steps(tuple(COLLECTIVES), smallest_group=2))
    collective = BY_NAME[step.collective]
    kinds = ["dtype"]
    if 0 not in step.shape:  # sizes are what is compared, and they would be equal
        # Different numbers of tensors end the group: test_shm_faults.py.
        kinds += ["collective"] * ("coalesced" not in collective.name)
        kinds += ["shape"] * (collective.name != "all_to_all_single uneven")
    kinds += ["root"] * collective.rooted
    # Ops that take the place of this one where the dtype has them.
    others = {"max", "min"} <= set(values.meanings(step.dtype)) and collective.reduces
    kinds += ["reduce op"] * (others and step.reduce_op != "premul_sum")
    at = draw(st.integers(0, len(program)))
    program.insert(at, step)
    what = draw(st.sampled_from(kinds))
    return program, Departure(at, draw(st.integers(0, 7)), what)


@everywhere
@pytest.mark.timeout(max(300, 2 * SECONDS))
def test_random_programs_with_a_rank_that_departs(backend: str) -> None:
    left = bounded(SECONDS or (6 if backend == "shm" else 4))
    ran: list[tuple[list[Step], Departure]] = []

    @FUZZ
    @given(departures())
    def programs_run(drawn: tuple[list[Step], Departure]) -> None:
        if left() or len(ran) < 3:
            ran.append(drawn)
            for rank, wrong in enumerate(run(SIZE, execute, *drawn, backend=backend, deadline=60)):
                assert not wrong, f"rank {rank}: {wrong}\nof {drawn}"

    programs_run()
    assert len(ran) > 2
