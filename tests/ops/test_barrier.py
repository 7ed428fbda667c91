"""barrier: every rank keeps its input, complete when all ranks have called."""

import datetime as dt
import itertools
import time
from collections.abc import Callable, Iterable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._inductor.utils import run_and_get_code

import torch_c10d_ext.distributed as ours
import torch_c10d_ext.functional as F
from tests.contract import FUNCTIONAL, ODD_SHAPES, Bad, Case, Collective, Contract, group, wait
from tests.harness import run
from torch_c10d_ext._groups import barrier_device

DEADLINE = dt.timedelta(seconds=30)
COMPILERS = ("aot_eager", "inductor")
PLACES = (("aot_eager", "gloo"), ("aot_eager", "shm"), ("inductor", "shm"))
# A rank that is not met by the others ends its test.
MEETING_DEADLINE = 100


class Barrier(Collective):
    stem = "barrier"
    forms = (FUNCTIONAL,)

    def cases(self, n: int) -> Iterable[Case]:
        yield Case.alike(n, (4, 3))
        yield Case(tuple((2 + rank, 3) for rank in range(n)), ((),) * n)

    def odd_cases(self, n: int) -> Iterable[Case]:
        return [Case.alike(n, shape) for shape in ((), *ODD_SHAPES)]

    def reference(self, case: Case, xs: list[Tensor]) -> list[Tensor]:
        return [x * 1 if x.requires_grad else x for x in xs]

    def bad_calls(self, n: int, rank: int) -> Iterable[Bad]:
        yield Bad(lambda ops, group: ops.barrier(torch.ones(2), "nope"), "got 'nope'")
        yield Bad(lambda ops, group: ops.barrier(torch.ones(()), ""), "got ''")


COLLECTIVE = Barrier()


class TestBarrier(Contract):
    pass


# --- who waits for whom --------------------------------------------------------------------------

_turns = itertools.count()


class _Late:
    """The last rank comes last, and says so in the store before it calls."""

    def __init__(self) -> None:
        self._store = dist.distributed_c10d._get_default_store()
        self._turn = f"tests/barrier/{next(_turns)}"
        self.is_me = dist.get_rank() == dist.get_world_size() - 1

    def say_started(self) -> None:
        """On the others: this rank has called, or is about to."""
        self._store.set(f"{self._turn}/{dist.get_rank()}", "")

    def come(self, later: float = 0.0) -> None:
        """On the last rank, when all the others have said it."""
        others = range(dist.get_world_size() - 1)
        self._store.wait([f"{self._turn}/{rank}" for rank in others], DEADLINE)
        time.sleep(later)
        self._store.set(f"{self._turn}/late", "")

    def has_come(self) -> bool:
        return bool(self._store.check([f"{self._turn}/late"]))


# A rank's tensor is its own business.
_SHAPES = ((0, 2), (), (2, 3), (1,))


def _late_rank_holds_the_others() -> None:
    rank = dist.get_rank()
    for turn in range(len(_SHAPES)):
        late, x = _Late(), torch.full(_SHAPES[(rank + turn) % len(_SHAPES)], rank + 1.0)
        if late.is_me:
            late.come()
            y = torch.ops.c10d_ext.barrier(x, group())
        else:
            y = torch.ops.c10d_ext.barrier(x, group())
            work = F.work_of(y)
            assert work is not None
            assert not work.is_completed()
            late.say_started()
        assert torch.equal(wait(y), x)
        assert late.has_come()


@pytest.mark.parametrize("backend", ("gloo", "shm"))
@pytest.mark.parametrize("size", (2, 3))
def test_a_late_rank_holds_the_others(backend: str, size: int) -> None:
    run(size, _late_rank_holds_the_others, backend=backend, deadline=MEETING_DEADLINE)


def _late_rank_holds_a_graph(compiler: str) -> None:
    def functional(x: Tensor) -> Tensor:
        return F.barrier(x * 2, None) + 1

    def imperative(x: Tensor) -> Tensor:
        ours.barrier()
        return x * 2 + 1

    def after_work(x: Tensor) -> Tensor:
        work = ours.barrier(async_op=True)
        y = x * 2 + 1
        work.wait()
        return y

    for f in (functional, imperative, after_work):
        compiled = torch.compile(f, backend=compiler, fullgraph=True)
        for _ in range(2):
            x = torch.arange(3.0)
            dist.barrier()  # compiled, from the second turn on
            late = _Late()
            if late.is_me:
                # Who does not wait is through by then.
                late.come(later=0.1)
            else:
                late.say_started()
            with torch.no_grad():
                assert torch.equal(compiled(x), x * 2 + 1)
            assert late.has_come(), f.__name__


@pytest.mark.parametrize("compiler", COMPILERS)
def test_a_late_rank_holds_a_graph(compiler: str) -> None:
    run(2, _late_rank_holds_a_graph, compiler, deadline=MEETING_DEADLINE)


# --- eager and compiled --------------------------------------------------------------------------


def _step(x: Tensor) -> Tensor:
    ours.all_reduce(x)
    ours.barrier()
    ours.barrier()
    ours.all_reduce(x)
    return x * x


def _ways(compiler: str) -> list[Callable[[], object]]:
    compiled = torch.compile(lambda x: (ours.barrier(), x * 2)[1], backend=compiler, fullgraph=True)
    return [
        dist.barrier,
        ours.barrier,
        lambda: compiled(torch.ones(2)),
        lambda: F.barrier(torch.arange(3) + dist.get_rank()) + 0,
    ]


def _eager_meets_compiled(compiler: str) -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    ways = _ways(compiler)
    for turn in range(2 * len(ways)):
        ways[(turn + rank) % len(ways)]()
        # The ranks still count alike.
        total = torch.tensor([rank + 1])
        dist.all_reduce(total)
        assert total.item() == n * (n + 1) // 2
    compiled = torch.compile(_step, backend=compiler, fullgraph=True)
    for turn in range(4):
        x = torch.full((3,), rank + 1.0)
        y = (_step if turn % n == rank else compiled)(x)
        total = torch.full((3,), n * n * (n + 1) / 2)
        assert torch.equal(x, total)
        assert torch.equal(y, total * total)


@pytest.mark.parametrize(("compiler", "backend"), PLACES)
def test_eager_meets_compiled(compiler: str, backend: str) -> None:
    run(3, _eager_meets_compiled, compiler, backend=backend, deadline=MEETING_DEADLINE)


def _eager_meets_training(compiler: str) -> None:
    """With gradients other compiler passes run, that could merge, drop or repeat a barrier."""
    n, rank = dist.get_world_size(), dist.get_rank()

    def loss(x: Tensor) -> Tensor:
        y = x.sin()
        ours.barrier()
        ours.barrier()
        return (y * F.barrier(y, None)).sum()

    compiled = torch.compile(loss, backend=compiler, fullgraph=True)
    for turn in range(4):
        x = torch.arange(3.0).requires_grad_()
        (loss if turn % n == rank else compiled)(x).backward()
        torch.testing.assert_close(x.grad, 2 * x.sin().detach() * x.cos().detach())
        dist.all_reduce(torch.ones(1))  # which no barrier meets
    if compiler != "inductor":
        return
    torch._dynamo.reset()
    x = torch.arange(3.0).requires_grad_()
    fresh = torch.compile(loss, fullgraph=True)
    _, codes = run_and_get_code(lambda: fresh(x).backward())
    calls = [code.count("= torch.ops.c10d_ext.barrier.default(") for code in codes]
    assert sorted(calls) == [0, 3], calls


@pytest.mark.parametrize(("compiler", "backend"), PLACES)
def test_eager_meets_training(compiler: str, backend: str) -> None:
    run(2, _eager_meets_training, compiler, backend=backend, deadline=MEETING_DEADLINE)


def _torchs_device() -> None:
    """A traced barrier is sent where torch's is: to the device that the group is bound to."""
    world = dist.group.WORLD
    assert world is not None
    assert barrier_device(group(), None) == "cpu"
    try:
        world.bound_device_id = torch.device("cuda", 1)
        assert barrier_device(group(), None) == "cuda:1"
        cuda = torch.device("cuda")
        with mock.patch("torch.accelerator.current_accelerator", return_value=cuda):
            assert barrier_device(group(), [3]) == "cuda:3"
    finally:
        world.bound_device_id = None


def test_meets_on_torchs_device() -> None:
    run(1, _torchs_device)


def _in_a_coalescing_block() -> None:
    """The block holds torch's calls back, but not an op, which may be waited for within."""
    x = torch.ones(2)
    with dist._coalescing_manager(device=torch.device("cpu")):
        wait(torch.ops.c10d_ext.barrier(x, group()))
        dist.all_reduce(x)
    assert torch.equal(x, torch.full((2,), 2.0))


def test_starts_at_once_in_a_coalescing_block() -> None:
    run(2, _in_a_coalescing_block, backend="shm", deadline=MEETING_DEADLINE)


# --- derivatives ---------------------------------------------------------------------------------


def _tangents_are_apart() -> None:
    x, t = torch.arange(3.0), torch.ones(3)

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.wait_tensor(F.barrier(x, None))
        y.mul_(3)
        return y, x * 1

    values, tangents = torch.func.jvp(f, (x,), (t,))
    assert torch.equal(values[0], 3 * x)
    assert torch.equal(values[1], x)
    assert torch.equal(tangents[0], 3 * t)
    assert torch.equal(tangents[1], t)


def test_tangents_of_result_and_input_are_apart() -> None:
    run(2, _tangents_are_apart)
