"""The collectives of torch.distributed as data: what each takes and gives, and how it is called.

A `DistOp` says, for every rank, the shapes of the tensors it passes and gets, computes all ranks'
results from all ranks' inputs in one process, and makes the call. Inputs and outputs differ by
element, rank and part, so that a permutation shows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.harness import values

Shape = tuple[int, ...]
Tensors = list[Tensor]

REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}


def all_gather_single(*args: Any, api: Any = dist) -> Any:
    """By the name of torch 2.13, which warns of the older one."""
    return getattr(api, "all_gather_single", api.all_gather_into_tensor)(*args)


def reduce_scatter_single(*args: Any, api: Any = dist) -> Any:
    return getattr(api, "reduce_scatter_single", api.reduce_scatter_tensor)(*args)


@dataclass(frozen=True)
class How:
    """The arguments of a call that are not tensors. `root` is a rank of the group."""

    reduce_op: str = "sum"
    factor: Any = None
    root: int = 0
    group: Any = None
    async_op: bool = False
    api: Any = dist  # a module with the functions of torch.distributed

    @property
    def op(self) -> Any:
        if self.reduce_op == "premul_sum":
            return dist._make_nccl_premul_sum(float(self.factor))
        return REDUCE_OPS[self.reduce_op]


@dataclass(frozen=True)
class DistOp:
    """A collective in one of its forms.

    `inputs(n, rank, shape, root)` and `outputs(...)` are the shapes of what a rank passes and gets;
    `reference(all ranks' inputs, how)` is what all ranks get. `shape` has at least one dimension
    for collectives that cut or join rows. In-place collectives have outputs that are the inputs.
    """

    name: str
    inputs: Callable[[int, int, Shape, int], list[Shape]]
    outputs: Callable[[int, int, Shape, int], list[Shape]]
    reference: Callable[[list[Tensors], How], list[Tensors]]
    call: Callable[[Tensors, Tensors, How], Any]
    reduces: bool = False
    rooted: bool = False
    inplace: bool = False
    scalars: bool = False  # takes tensors without dimensions
    replicated: bool = False  # the same result on every rank

    def __str__(self) -> str:
        return self.name


def reduced(xs: Tensors, how: How) -> Tensor:
    return values.reduce_reference(xs, how.reduce_op, how.factor)


def _one(n: int, rank: int, shape: Shape, root: int) -> list[Shape]:
    return [shape]


def _each(n: int, rank: int, shape: Shape, root: int) -> list[Shape]:
    return [shape] * n


def _joined(n: int, rank: int, shape: Shape, root: int) -> list[Shape]:
    return [(n * shape[0], *shape[1:])]


def _stacked(n: int, rank: int, shape: Shape, root: int) -> list[Shape]:
    return [(n, *shape)]


def _at_root(shapes: Any) -> Any:
    def at_root(n: int, rank: int, shape: Shape, root: int) -> list[Shape]:
        return shapes(n, rank, shape, root) if rank == root else []

    return at_root


def _rows(shape: Shape, more: int) -> Shape:
    return (shape[0] + more, *shape[1:])


def _split(p: int, q: int) -> int:
    """How many rows rank p sends to rank q in uneven exchanges: none, for some."""
    return (2 * p + q) % 3


def _sent(n: int, rank: int, shape: Shape, root: int) -> list[Shape]:
    return [(sum(_split(rank, q) for q in range(n)), *shape[1:])]


def _received(n: int, rank: int, shape: Shape, root: int) -> list[Shape]:
    return [(sum(_split(p, rank) for p in range(n)), *shape[1:])]


def _all_to_all_uneven_reference(xs: list[Tensors], how: How) -> list[Tensors]:
    n = len(xs)
    parts = [x.split([_split(p, q) for q in range(n)]) for p, (x,) in enumerate(xs)]
    return [[torch.cat([parts[p][q] for p in range(n)])] for q in range(n)]


def _all_to_all_uneven(xs: Tensors, outs: Tensors, how: How) -> Any:
    n, rank = how.api.get_world_size(how.group), how.api.get_rank(how.group)
    return how.api.all_to_all_single(
        outs[0],
        xs[0],
        [_split(p, rank) for p in range(n)],
        [_split(rank, q) for q in range(n)],
        group=how.group,
        async_op=how.async_op,
    )


def _reduce_scatter_tensor_reference(xs: list[Tensors], how: How) -> list[Tensors]:
    whole = reduced([x for (x,) in xs], how)
    return [[part] for part in whole.chunk(len(xs))]


def _ring(xs: Tensors, outs: Tensors, how: How) -> Any:
    """Every rank sends to the next."""
    n, rank = how.api.get_world_size(how.group), how.api.get_rank(how.group)
    there, here = (rank + 1) % n, (rank - 1) % n
    if n == 1:
        outs[0].copy_(xs[0])  # torch refuses to send to oneself
        return None
    return Works(
        [
            how.api.isend(xs[0], group=how.group, group_dst=there, tag=3),
            how.api.irecv(outs[0], group=how.group, group_src=here, tag=3),
        ]
    )


def _batch(xs: Tensors, outs: Tensors, how: How) -> Any:
    """Every rank sends to every other, in one batch."""
    n, rank = how.api.get_world_size(how.group), how.api.get_rank(how.group)
    outs[rank].copy_(xs[rank])
    others = [p for p in range(n) if p != rank]
    p2p = [how.api.P2POp(how.api.isend, xs[p], group=how.group, group_peer=p) for p in others]
    p2p += [how.api.P2POp(how.api.irecv, outs[p], group=how.group, group_peer=p) for p in others]
    return Works(how.api.batch_isend_irecv(p2p)) if p2p else None


class Works:
    """Several works waited for as one."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def _coalesced(xs: Tensors, outs: Tensors, how: How) -> Any:
    if how.api is not dist:
        return how.api.all_reduce_coalesced(outs, how.op, how.group, how.async_op)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return how.api.all_reduce_coalesced(outs, how.op, how.group, how.async_op)


def _manager(call: Callable[[Tensors, Tensors, How], Any]) -> Any:
    """The calls of each tensor within a coalescing manager."""

    def coalesced(xs: Tensors, outs: Tensors, how: How) -> Any:
        with how.api._coalescing_manager(how.group, async_ops=True) as works:
            for x, out in zip(xs, outs, strict=True):
                call([x], [out], how)
        return works

    return coalesced


def _three(shapes: Any) -> Any:
    """Three tensors of different sizes, the second one without elements."""

    def three(n: int, rank: int, shape: Shape, root: int) -> list[Shape]:
        given = [shape, (0, *shape[1:]), _rows(shape, 2)]
        return [s for each in given for s in shapes(n, rank, each, root)]

    return three


DIST_OPS = [
    DistOp(
        "all_reduce",
        _one,
        _one,
        lambda xs, how: [[reduced([x for (x,) in xs], how)]] * len(xs),
        lambda xs, outs, how: how.api.all_reduce(outs[0], how.op, how.group, how.async_op),
        reduces=True,
        inplace=True,
        scalars=True,
        replicated=True,
    ),
    DistOp(
        "all_reduce_coalesced",
        _three(_one),
        _three(_one),
        lambda xs, how: [[reduced(list(each), how) for each in zip(*xs, strict=True)]] * len(xs),
        _coalesced,
        reduces=True,
        inplace=True,
        replicated=True,
    ),
    DistOp(
        "all_reduce in a coalescing manager",
        _three(_one),
        _three(_one),
        lambda xs, how: [[reduced(list(each), how) for each in zip(*xs, strict=True)]] * len(xs),
        _manager(lambda xs, outs, how: how.api.all_reduce(outs[0], how.op, how.group)),
        reduces=True,
        inplace=True,
        replicated=True,
    ),
    DistOp(
        "reduce",
        _one,
        _one,
        lambda xs, how: [
            [reduced([x for (x,) in xs], how)] if rank == how.root else own
            for rank, own in enumerate(xs)
        ],
        lambda xs, outs, how: how.api.reduce(
            outs[0], op=how.op, group=how.group, async_op=how.async_op, group_dst=how.root
        ),
        reduces=True,
        rooted=True,
        inplace=True,
        scalars=True,
    ),
    DistOp(
        "broadcast",
        _one,
        _one,
        lambda xs, how: [xs[how.root]] * len(xs),
        lambda xs, outs, how: how.api.broadcast(
            outs[0], group=how.group, async_op=how.async_op, group_src=how.root
        ),
        rooted=True,
        inplace=True,
        scalars=True,
        replicated=True,
    ),
    DistOp(
        "all_gather",
        _one,
        _each,
        lambda xs, how: [[x for (x,) in xs]] * len(xs),
        lambda xs, outs, how: how.api.all_gather(outs, xs[0], how.group, how.async_op),
        scalars=True,
        replicated=True,
    ),
    DistOp(
        "all_gather uneven",
        lambda n, rank, shape, root: [_rows(shape, rank)],
        lambda n, rank, shape, root: [_rows(shape, p) for p in range(n)],
        lambda xs, how: [[x for (x,) in xs]] * len(xs),
        lambda xs, outs, how: how.api.all_gather(outs, xs[0], how.group, how.async_op),
        replicated=True,
    ),
    DistOp(
        "all_gather_into_tensor",
        _one,
        _joined,
        lambda xs, how: [[torch.cat([x for (x,) in xs])]] * len(xs),
        lambda xs, outs, how: all_gather_single(
            outs[0], xs[0], how.group, how.async_op, api=how.api
        ),
        replicated=True,
    ),
    DistOp(
        "all_gather_into_tensor stacked",
        _one,
        _stacked,
        lambda xs, how: [[torch.stack([x for (x,) in xs])]] * len(xs),
        lambda xs, outs, how: all_gather_single(
            outs[0], xs[0], how.group, how.async_op, api=how.api
        ),
        scalars=True,
        replicated=True,
    ),
    DistOp(
        "all_gather_into_tensor in a coalescing manager",
        _three(_one),
        _three(_joined),
        lambda xs, how: [[torch.cat(each) for each in zip(*xs, strict=True)]] * len(xs),
        _manager(lambda xs, outs, how: all_gather_single(outs[0], xs[0], how.group, api=how.api)),
        replicated=True,
    ),
    DistOp(
        "reduce_scatter",
        _each,
        _one,
        lambda xs, how: [[reduced(list(part), how)] for part in zip(*xs, strict=True)],
        lambda xs, outs, how: how.api.reduce_scatter(outs[0], xs, how.op, how.group, how.async_op),
        reduces=True,
        scalars=True,
    ),
    DistOp(
        "reduce_scatter uneven",
        lambda n, rank, shape, root: [_rows(shape, p) for p in range(n)],
        lambda n, rank, shape, root: [_rows(shape, rank)],
        lambda xs, how: [[reduced(list(part), how)] for part in zip(*xs, strict=True)],
        lambda xs, outs, how: how.api.reduce_scatter(outs[0], xs, how.op, how.group, how.async_op),
        reduces=True,
    ),
    DistOp(
        "reduce_scatter_tensor",
        _joined,
        _one,
        _reduce_scatter_tensor_reference,
        lambda xs, outs, how: reduce_scatter_single(
            outs[0], xs[0], how.op, how.group, how.async_op, api=how.api
        ),
        reduces=True,
    ),
    DistOp(
        "reduce_scatter_tensor stacked",
        _stacked,
        _one,
        lambda xs, how: [[part] for part in reduced([x for (x,) in xs], how)],
        lambda xs, outs, how: reduce_scatter_single(
            outs[0], xs[0], how.op, how.group, how.async_op, api=how.api
        ),
        reduces=True,
        scalars=True,
    ),
    DistOp(
        "reduce_scatter_tensor in a coalescing manager",
        _three(_joined),
        _three(_one),
        lambda xs, how: [
            [reduced(list(each), how).chunk(len(xs))[r] for each in zip(*xs, strict=True)]
            for r in range(len(xs))
        ],
        _manager(
            lambda xs, outs, how: reduce_scatter_single(
                outs[0], xs[0], how.op, how.group, api=how.api
            )
        ),
        reduces=True,
    ),
    DistOp(
        "all_to_all",
        _each,
        _each,
        lambda xs, how: [list(parts) for parts in zip(*xs, strict=True)],
        lambda xs, outs, how: how.api.all_to_all(outs, xs, how.group, how.async_op),
        scalars=True,
    ),
    DistOp(
        "all_to_all uneven",
        lambda n, rank, shape, root: [_rows(shape, _split(rank, q)) for q in range(n)],
        lambda n, rank, shape, root: [_rows(shape, _split(p, rank)) for p in range(n)],
        lambda xs, how: [list(parts) for parts in zip(*xs, strict=True)],
        lambda xs, outs, how: how.api.all_to_all(outs, xs, how.group, how.async_op),
    ),
    DistOp(
        "all_to_all_single",
        _joined,
        _joined,
        lambda xs, how: [
            [torch.cat(parts)] for parts in zip(*(x.chunk(len(xs)) for (x,) in xs), strict=True)
        ],
        lambda xs, outs, how: how.api.all_to_all_single(
            outs[0], xs[0], group=how.group, async_op=how.async_op
        ),
    ),
    DistOp(
        "all_to_all_single uneven",
        _sent,
        _received,
        _all_to_all_uneven_reference,
        _all_to_all_uneven,
    ),
    DistOp(
        "gather",
        _one,
        _at_root(_each),
        lambda xs, how: [[x for (x,) in xs] if r == how.root else [] for r in range(len(xs))],
        lambda xs, outs, how: how.api.gather(
            xs[0], outs or None, group=how.group, async_op=how.async_op, group_dst=how.root
        ),
        rooted=True,
        scalars=True,
    ),
    DistOp(
        "scatter",
        _at_root(_each),
        _one,
        lambda xs, how: [[part] for part in xs[how.root]],
        lambda xs, outs, how: how.api.scatter(
            outs[0], xs or None, group=how.group, async_op=how.async_op, group_src=how.root
        ),
        rooted=True,
        scalars=True,
    ),
    DistOp(
        "isend and irecv in a ring",
        _one,
        _one,
        lambda xs, how: [xs[rank - 1] for rank in range(len(xs))],
        _ring,
        scalars=True,
    ),
    DistOp(
        "batch_isend_irecv",
        _each,
        _each,
        lambda xs, how: [list(parts) for parts in zip(*xs, strict=True)],
        _batch,
        scalars=True,
    ),
]

BY_NAME = {collective.name: collective for collective in DIST_OPS}


def inputs_of(
    collective: DistOp, n: int, shape: Shape, dtype: torch.dtype, how: How, salt: int = 0
) -> list[Tensors]:
    """All ranks' inputs; arbitrary bits where the collective only moves them."""
    product = how.reduce_op == "product"
    return [
        [
            values.values(s, dtype, rank, salt=100 * salt + part, product=product)
            if collective.reduces
            else values.bits(s, dtype, rank, salt=100 * salt + part)
            for part, s in enumerate(collective.inputs(n, rank, shape, how.root))
        ]
        for rank in range(n)
    ]
