"""distributed's calls that wait: one call of C where nothing but the op is needed."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx

import torch_c10d_ext
import torch_c10d_ext.distributed as ours
from tests.harness import run
from tests.test_entry import Functions, Marked, Ops
from torch_c10d_ext import _groups, functional
from torch_c10d_ext._async import work_of
from torch_c10d_ext.distributed import _collectives

SUM = dist.ReduceOp.SUM
GATHER, SCATTER = "all_gather_into_tensor", "reduce_scatter_tensor"
EXCHANGE, BROADCAST = "all_to_all_single", "broadcast"


class Case(NamedTuple):
    """One call. What it is given is made anew each time, and has nothing to do with the others."""

    function: str
    arguments: Callable[[], tuple[Any, ...]]
    named: dict[str, Any] = {}  # noqa: RUF012 (nobody writes it)

    def __str__(self) -> str:
        return f"{self.function}{self.arguments()} {self.named}"

    def call(self, inside: Any = contextlib.nullcontext) -> tuple[Any, list[Any]]:
        """What it returns or raises, and what became of its tensors."""
        arguments = self.arguments()
        with inside():
            try:
                returned = getattr(ours, self.function)(*arguments, **self.named)
            except Exception as error:
                returned = (type(error), str(error))
        return returned, [_state(t) for t in arguments if isinstance(t, Tensor)]


def _state(t: Tensor) -> Any:
    if t.is_meta or t.is_nested or t.is_sparse:
        return t.shape if t.is_meta else None
    return type(t), t._version, t.grad_fn, t.is_leaf, (t.detach() + 0).resolve_conj().tolist()


@contextlib.contextmanager
def _by_the_long_way() -> Iterator[None]:
    """Python checks all that it is given, and looks up the group by its name."""
    with contextlib.ExitStack() as patches:

        def refuse(name: str, **how: Any) -> None:
            patches.enter_context(mock.patch.object(_collectives, name, **how))

        for name in ("_write_all_gather", "_write_reduce_scatter", "_write_all_to_all"):
            refuse(name, return_value=False)
        refuse("place_in", return_value=None)
        # broadcast asks once more, at the end of that way.
        broadcast = _collectives._broadcast_
        refuse("_broadcast_", wraps=broadcast, side_effect=[False, mock.DEFAULT])
        yield


def _is_short(case: Case, inside: Any = contextlib.nullcontext) -> bool:
    with mock.patch.object(_collectives, "member", wraps=_groups.member) as member:
        case.call(inside)
    return not member.called  # the first that the long way asks for


def _world() -> tuple[int, int, Any]:
    return dist.get_world_size(), dist.get_rank(), dist.group.WORLD


# --- where it is open ----------------------------------------------------------------------------


def _one_of_each(*more: Any, **named: Any) -> list[Case]:
    """Four plain calls of the default group, with `more` behind all other arguments."""
    n, rank, _ = _world()
    x = torch.arange(4.0 * n) + 100 * rank
    return [
        Case(GATHER, lambda: (torch.zeros(4 * n), x[:4].clone(), *more), named),
        Case(SCATTER, lambda: (torch.zeros(4), x.clone(), SUM, *more), named),
        Case(EXCHANGE, lambda: (torch.zeros(4 * n), x.clone(), None, None, *more), named),
        Case(BROADCAST, lambda: (x.clone(), n - 1, *more), named),
    ]


def _plain_cases() -> list[Case]:
    n, rank, whole = _world()
    x = torch.arange(4.0 * n) + 100 * rank
    z = torch.complex(x, x + 1)
    spaced = torch.arange(4.0 * n)[::2] + rank
    leaf = torch.nn.Parameter

    def gather_in_place() -> tuple[Tensor, Tensor]:
        out = torch.zeros(4 * n)
        part = out[4 * rank : 4 * rank + 4]
        part.copy_(x[:4])
        return out, part

    def exchange_in_place() -> tuple[Tensor, Tensor]:
        out = x.clone()
        return out, out

    return [
        *_one_of_each(),
        *_one_of_each(None),
        *_one_of_each(whole),
        Case(GATHER, lambda: (torch.zeros(n, 4), x[:4].clone())),
        Case(GATHER, lambda: (torch.zeros(n), x[0].clone())),
        Case(GATHER, lambda: (torch.zeros(3, 2 * n * n).t(), spaced.view(-1, 1).expand(-1, 3))),
        Case(GATHER, lambda: (torch.zeros(0), x[:0])),
        Case(GATHER, lambda: (leaf(torch.zeros(4 * n)), leaf(x[:4].clone()))),
        Case(GATHER, lambda: (torch.zeros(4 * n, dtype=z.dtype).conj(), z[:4])),
        Case(GATHER, lambda: (torch.zeros(4 * n, dtype=z.dtype), z[:4].conj())),
        Case(GATHER, gather_in_place),
        Case(SCATTER, lambda: (torch.zeros(2, 2), x.view(n, 2, 2))),
        Case(SCATTER, lambda: (torch.zeros(2), spaced)),
        Case(SCATTER, lambda: (torch.zeros(4), x, dist.ReduceOp.MAX)),
        Case(SCATTER, lambda: (torch.zeros(4), x, dist.ReduceOp.AVG)),
        Case(SCATTER, lambda: (torch.zeros(4), x, "product")),
        Case(SCATTER, lambda: (leaf(torch.zeros(4)), leaf(x.clone()))),
        Case(EXCHANGE, lambda: (torch.zeros(n, 4), x.view(n, 4))),
        Case(EXCHANGE, lambda: (torch.zeros(2 * n), spaced)),
        Case(EXCHANGE, lambda: (leaf(torch.zeros(4 * n)), leaf(x.clone()))),
        Case(EXCHANGE, exchange_in_place),
        Case(BROADCAST, lambda: (x.clone(), None), {"group_src": n - 1}),
        Case(BROADCAST, lambda: (x.clone()[::2], 0)),
        Case(BROADCAST, lambda: (torch.tensor(1.0 + rank), 0)),
        Case(BROADCAST, lambda: (leaf(x.clone()), 0)),
    ]


def _same_values() -> None:
    for case in _plain_cases():
        assert _is_short(case), case
        assert not _is_short(case, _by_the_long_way), case
        returned, tensors = case.call()
        assert (returned, tensors) == case.call(_by_the_long_way), case
        assert returned is None, case
        # The input is as it was; nothing is recorded.
        assert [t[1] for t in tensors] in ([1], [1, 0], [1, 1], [2, 2]), case
        assert all(grad_fn is None and is_leaf for _, _, grad_fn, is_leaf, _ in tensors), case
    assert torch_c10d_ext.pending_count() == 0


@pytest.mark.parametrize("size", (1, 2, 3, 4))
def test_plain_calls_take_it_to_the_same_values(size: int) -> None:
    for backend in ("gloo", "shm"):
        run(size, _same_values, backend=backend)


def _complete_on_return() -> None:
    n, rank, _ = _world()
    rows = torch.arange(1.0 * n * n).view(n, n)
    gathered, part, exchanged, sent = torch.zeros(n, n), torch.zeros(1), torch.zeros(n), rows[rank]
    ours.all_gather_into_tensor(gathered, rows[rank].clone())
    ours.reduce_scatter_tensor(part, rows[rank].clone())
    ours.all_to_all_single(exchanged, rows[rank].clone())
    ours.broadcast(sent, n - 1)
    assert [work_of(t) for t in (gathered, part, exchanged, sent)] == [None] * 4
    want = torch.arange(1.0 * n * n).view(n, n)
    assert torch.equal(gathered, want)
    assert torch.equal(part, want[:, rank].sum().view(1))
    assert torch.equal(exchanged, want[:, rank])
    assert torch.equal(sent, want[-1])


@pytest.mark.parametrize("size", (1, 2, 3))
def test_it_ends_with_the_call(size: int) -> None:
    for backend in ("gloo", "shm"):
        run(size, _complete_on_return, backend=backend)


def _of_a_part() -> None:
    """A group whose ranks count otherwise than the world's."""
    n, rank, _ = _world()
    group = dist.new_group([1, n - 1])
    if rank not in (1, n - 1):
        for case in _one_of_each(group):
            with pytest.warns(UserWarning, match=f"Running {case.function}"):
                returned, tensors = case.call()
            assert returned is None and all(version == 0 for _, version, *_ in tensors)
        return
    for src, group_src in ((1, 0), (n - 1, 1)):
        for place in ((src, group), (None, group, False, group_src)):
            x = torch.tensor([1.0 * rank])
            case = Case(BROADCAST, lambda x=x, place=place: (x, *place))
            assert _is_short(case)
            assert x.item() == src
    out = torch.zeros(2)
    ours.all_gather_into_tensor(out, torch.tensor([1.0 * rank]), group)
    assert out.tolist() == [1, n - 1]
    dist.destroy_process_group(group)


def test_a_group_of_some_ranks() -> None:
    for backend in ("gloo", "shm"):
        run(3, _of_a_part, backend=backend)


# --- where it is not -----------------------------------------------------------------------------


def _watched() -> None:
    for case in _one_of_each():
        op = getattr(torch.ops.c10d_ext, case.function)
        want = case.call()
        for mode in (Functions(), Ops()):
            assert not _is_short(case, lambda mode=mode: mode)
            assert {op, op.default} & set(mode.seen), (case, mode.seen)
            assert case.call(lambda mode=mode: mode)[1][0][-1] == want[1][0][-1], case

        def function(*tensors: Tensor, case: Case = case) -> Tensor:
            rest = case.arguments()[len(tensors) :]
            getattr(ours, case.function)(*tensors, *rest)
            return tensors[0] + 0

        tensors = [t for t in case.arguments() if isinstance(t, Tensor)]
        graph = make_fx(function)(*[t.clone() for t in tensors]).graph
        assert op.default in {node.target for node in graph.nodes}, case
        rows = [torch.stack([t, t + 1]) for t in tensors]
        mapped = torch.vmap(function)(*rows)
        each = [function(*[row[i].clone() for row in rows]) for i in range(2)]
        assert torch.equal(mapped, torch.stack(each)), case
        with torch.autograd.forward_ad.dual_level():
            dual = [torch.autograd.forward_ad.make_dual(t.clone(), t) for t in tensors]
            assert torch.equal(function(*dual), torch.tensor(want[1][0][-1])), case


@pytest.mark.parametrize("size", (1, 2))
def test_modes_and_transforms_see_the_op(size: int) -> None:
    run(size, _watched)


def _long() -> None:
    """Calls with more to do."""
    n, rank, _ = _world()
    for group in (list(range(n)), init_device_mesh("cpu", (n,))):
        for case in _one_of_each(group):
            assert not _is_short(case), case
            assert case.call() == case.call(_by_the_long_way), case
    for case in _one_of_each():
        marked = Case(
            case.function,
            lambda case=case: tuple(
                a.as_subclass(Marked) if isinstance(a, Tensor) else a for a in case.arguments()
            ),
        )
        assert not _is_short(marked), case
        assert marked.call()[1][0][-1] == case.call()[1][0][-1]
        later = case._replace(named={"async_op": True})
        assert not _is_short(later), case
        work = getattr(ours, case.function)(*(arguments := case.arguments()), async_op=True)
        assert work.wait()
        assert arguments[0].tolist() == case.call()[1][0][-1]
    x = torch.arange(4.0 * n)
    twice = dist._make_nccl_premul_sum(2.0)

    def result(count: int = 4 * n) -> Tensor:
        return functional.all_reduce(x[:count].clone(), "sum", dist.group.WORLD)

    for case in (
        Case(GATHER, lambda: (torch.zeros(4 * n), result(4))),
        Case(SCATTER, lambda: (torch.zeros(4), result())),
        Case(EXCHANGE, lambda: (torch.zeros(4 * n), result())),
        Case(BROADCAST, lambda: (result(), 0)),
        Case(SCATTER, lambda: (torch.zeros(4), x, twice)),
        Case(EXCHANGE, lambda: (torch.zeros(4 * n), x, [4] * n, [4] * n)),
        Case(EXCHANGE, lambda: (torch.zeros(4 * n), x, [], [])),
    ):
        assert not _is_short(case), case
        assert case.call() == case.call(_by_the_long_way), case
    if n > 1:
        # Rows of any shape.
        case = Case(SCATTER, lambda: (torch.zeros(4), x.view(1, -1)))
        assert not _is_short(case)
        assert case.call()[1][0][-1] == (n * x[4 * rank :][:4]).tolist()


@pytest.mark.parametrize("size", (1, 2, 3))
def test_calls_with_more_to_do_do_it(size: int) -> None:
    run(size, _long, backend="shm")


def _in_a_block() -> None:
    n, rank, _ = _world()
    x = torch.arange(1.0 * n) + 10 * rank
    gathered, parts = torch.full((2, n * n), -1.0), torch.full((2, 1), -1.0)
    exchanged, sent = torch.zeros(n), x.clone()
    with ours.coalescing_manager():
        for row, part in zip(gathered, parts, strict=True):
            ours.all_gather_into_tensor(row, x)
            ours.reduce_scatter_tensor(part, x)
        ours.all_to_all_single(exchanged, x)
        ours.broadcast(sent, n - 1)
        assert exchanged.tolist() == [10.0 * r + rank for r in range(n)]
        assert sent.tolist() == [10.0 * (n - 1) + r for r in range(n)]
        assert (gathered == -1).all() and (parts == -1).all()
    assert gathered.tolist() == [[10.0 * r + i for r in range(n) for i in range(n)]] * 2
    assert parts.tolist() == [[sum(10.0 * r + rank for r in range(n))]] * 2


@pytest.mark.parametrize("size", (1, 2))
def test_blocks_hold_what_they_held(size: int) -> None:
    run(size, _in_a_block, backend="shm")


# --- errors --------------------------------------------------------------------------------------


def _nested(parts: list[Tensor]) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls them a prototype
        return torch.nested.nested_tensor(parts)


def _odd_tensors() -> dict[str, list[tuple[Any, ...]]]:
    n, rank, _ = _world()
    x = torch.arange(4.0 * n) + rank
    sparse = x.to_sparse()
    return {
        GATHER: [
            (torch.zeros(4 * n), x[:4].double()),
            (torch.zeros(4 * n), x[:3]),
            (torch.zeros(4 * n + 1), x[:4]),
            (torch.zeros(4 * n, 1), x[:4]),
            (torch.zeros(1).expand(4 * n), x[:4]),
            (torch.zeros(4 * n, device="meta"), x[:4]),
            (torch.zeros(4 * n), torch.zeros(4, device="meta")),
            (torch.zeros(16 * n * n), sparse),
            (sparse, x[:4]),
            (torch.zeros(4 * n), _nested([x[:1], x[1:4]])),
            ([torch.zeros(4)] * n, x[:4]),
            (torch.zeros(4 * n), None),
        ],
        SCATTER: [
            (torch.zeros(4), x.double()),
            (torch.zeros(3), x),
            (torch.zeros(2, 2), x),
            (torch.zeros(4), x.view(-1, 1, 1)),
            (torch.zeros(1).expand(4), x),
            (torch.zeros(4, device="meta"), x),
            (torch.zeros(4), sparse),
            (torch.zeros(4), _nested([x[:-1], x[-1:]])),
            (torch.zeros(4), [x] * n),
            (None, x),
            (torch.zeros(()), torch.zeros(())),
            *[
                (torch.zeros(4), x, op)
                for op in (dist.group.WORLD, 3, None, "median", "premul_sum", dist.ReduceOp.BAND)
            ],
            (torch.zeros(4).int(), x.int(), dist.ReduceOp.AVG),
        ],
        EXCHANGE: [
            (torch.zeros(4 * n), x.double()),
            (torch.zeros(4 * n + 1), x),
            (torch.zeros(4 * n), x[1:]),
            (torch.zeros(4 * n, 1), x),
            (torch.zeros(8 * n), x),
            (torch.zeros(1).expand(4 * n), x),
            (torch.zeros(4 * n, device="meta"), x),
            (torch.zeros(4 * n), sparse),
            (_nested([x, x]), _nested([x, x])),
            (torch.zeros(()), torch.zeros(())),
            (torch.zeros(4 * n), None),
        ],
        BROADCAST: [
            (torch.zeros(1).expand(4), 0),
            (sparse, 0),
            (torch.zeros(4, device="meta"), 0),
            ([x], 0),
            (None, 0),
            (x,),
            *[(x, src) for src in (n, -1, "a", [0], 2**70, True, 0.0)],
            *[(x, None, None, False, place) for place in (n, -1, "a", [0], 2**70, True, 0.0)],
            (x, 0, None, False, 0),
        ],
    }


def _odd_cases() -> list[Case]:
    gone = dist.new_group()
    dist.destroy_process_group(gone)
    groups: tuple[Any, ...] = ("nobody", SUM, 3, gone, torch.ones(1), [], (dist.group.WORLD, 0))
    return [
        *[case for group in groups for case in _one_of_each(group)],
        *[
            Case(BROADCAST, lambda group=group: (torch.ones(2), None, group, False, 0))
            for group in groups
        ],
        *[
            Case(function, lambda function=function, i=i: _odd_tensors()[function][i])
            for function, calls in _odd_tensors().items()
            for i in range(len(calls))
        ],
    ]


# How the errors of some of them begin.
_TEXTS = (
    "all_gather_into_tensor: the output must have N times the input's, {3n}, got {4n} ",
    "all_gather_into_tensor: the output must have the input's dtype, torch.float64, got ",
    "all_gather_into_tensor: out must have shape [{4n}] or [{n}, 4], got [{4n}, 1] ",
    "reduce_scatter_tensor: the input must have N times the output's elements, {3n}, got {4n} ",
    "reduce_scatter_tensor: the output must have the input's dtype, torch.float64, got ",
    "op: must be a ReduceOp or its name, got ProcessGroup",
    "reduce_scatter_tensor: reduce_op must be one of ",
    "all_to_all_single: the output must have the input's dtype, torch.float64, got ",
    "broadcast: src must be a rank of the group, [0",
    "broadcast: src must be a rank of the group, 0 to ",
    "broadcast: one of src and group_src must be given, got 0 and 0 ",
    "group: must be a list of ranks, ProcessGroup, DeviceMesh, (DeviceMesh, dim), name or None",
    "group_size: group_name must name a process group of this process (known: ",
)


def _same_errors() -> None:
    n = dist.get_world_size()
    said = []
    for case in _odd_cases():
        short, long = case.call(), case.call(_by_the_long_way)
        assert str(short) == str(long), (str(case), short, long)
        if short[0] is not None:
            said.append(short[0][1].partition("\n")[0])
    for text in _TEXTS:
        for times in ("", "3", "4"):
            text = text.replace(f"{{{times}n}}", str(int(times or 1) * n))
        assert any(one.startswith(text) for one in said), (text, said)


@pytest.mark.parametrize("size", (1, 2, 3))
def test_errors_are_those_of_the_long_way(size: int) -> None:
    run(size, _same_errors)
