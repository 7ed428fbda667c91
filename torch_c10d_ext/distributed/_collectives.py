"""The collectives of ``torch.distributed``, each a few lines over an op, which a tracer walks into.

A call starts the op and ends in :mod:`_delivery`: in eager the backend writes the caller's tensors,
in a graph a fresh tensor is copied into them after its wait.

One file, for its functions are of one shape: a name of torch's with its signature, checks, the
backend's own call where there is one, else the op.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from torch_c10d_ext import _C
from torch_c10d_ext._async import LESS_THAN_A_BYTE
from torch_c10d_ext._groups import (
    Group,
    barrier_device,
    group_name,
    group_rank,
    group_size,
    has_own_backend,
    illegal_work,
    member,
    place_in,
    process_group,
    reduction_of,
    refuse_in_a_graph,
    root_of,
    where,
)
from torch_c10d_ext.distributed import _delivery, _lists
from torch_c10d_ext.distributed._coalescing import hold as _hold
from torch_c10d_ext.distributed._coalescing import open_blocks as _open_blocks
from torch_c10d_ext.errors import InvalidArgument

_hold_again = _C.hold_again
_ops = torch.ops.c10d_ext
_SUM = dist.ReduceOp.SUM
_is_compiling = torch.compiler.is_compiling
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling

# In eager the backend writes the caller's tensors: False where it may not.
_all_reduce_ = _C.writes["all_reduce_"]
_all_reduce_coalesced_ = _C.writes["all_reduce_coalesced_"]
_broadcast_ = _C.writes["broadcast_"]
_reduce_ = _C.writes["reduce_"]
_all_gather_into_tensor_out = _C.writes["all_gather_into_tensor_out"]
_reduce_scatter_tensor_out = _C.writes["reduce_scatter_tensor_out"]
_all_to_all_single_out = _C.writes["all_to_all_single_out"]
# The same of a call that waits, before any check in Python.
_write_all_gather = _C.write_all_gather
_write_reduce_scatter = _C.write_reduce_scatter
_write_all_to_all = _C.write_all_to_all


def _check_tensor(op: str, name: str, value: Any, group: str) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: {name} must be a Tensor, got {type(value).__name__} {where(group)}")


def _check_tensors(op: str, name: str, values: Any, group: str, like: Tensor | None = None) -> None:
    if not isinstance(values, list | tuple) or not all(isinstance(v, Tensor) for v in values):
        raise TypeError(
            f"{op}: {name} must be a list of Tensors, got {type(values).__name__} {where(group)}"
        )
    if not values:
        raise InvalidArgument(
            f"{op}: {name} must hold at least one tensor, got none {where(group)}"
        )
    wanted = (values[0] if like is None else like).dtype
    for value in values:
        if value.dtype != wanted:
            raise InvalidArgument(
                f"{op}: {name} must have one dtype, {wanted}, got {value.dtype} {where(group)}"
            )


def _check_one_per_rank(op: str, name: str, values: Sequence[Tensor], group: str) -> None:
    if len(values) != group_size(group):
        raise InvalidArgument(
            f"{op}: {name} must hold one tensor per rank, {group_size(group)}, got "
            f"{len(values)} {where(group)}"
        )


def _check_same_dtype(op: str, output: Tensor, input: Tensor, group: str) -> None:
    if output.dtype != input.dtype:
        raise InvalidArgument(
            f"{op}: the output must have the input's dtype, {input.dtype}, got {output.dtype} "
            f"{where(group)}"
        )


def _check_numel(
    op: str, tensor: Tensor, numel: int, of: str, group: str, what: str = "the output"
) -> None:
    if tensor.numel() != numel:
        raise InvalidArgument(
            f"{op}: {what} must have {of}, {numel}, got {tensor.numel()} {where(group)}"
        )


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    dtype = tensors[0].dtype
    if dtype in LESS_THAN_A_BYTE:
        return torch.cat([t.view(torch.uint8).reshape(-1) for t in tensors]).view(dtype)
    return torch.cat([t.reshape(-1) for t in tensors])


def all_reduce(tensor: Tensor, op: Any = _SUM, group: Group = None, async_op: bool = False) -> Any:
    """Replaces ``tensor`` on every rank by its reduction over the ranks of a group.

    Args:
        tensor: any shape, strides and dtype, the same shape and dtype on every rank. Outside of
            graphs, sparse COO tensors of as many non-zeros as a rank likes, as the backend has it.
        op: a ``ReduceOp`` with a meaning for the dtype, ``PREMUL_SUM`` included, or its name.
        group: None is the default group; see :data:`torch_c10d_ext.functional.Group`.
        async_op: return at once; the values are there after ``wait()`` of what is returned.

    Returns:
        A Work where ``async_op`` is set, else None; None on ranks that are not in the group.

    Raises:
        TypeError: no tensor; ``op`` has no meaning for its dtype.
        ValueError: unknown ``op`` or group.

    Gradient:
        None: see :mod:`torch_c10d_ext.distributed`.

    Example, 2 ranks::

        x = torch.tensor([1.0 + rank])
        all_reduce(x)  # x is [3.] on both

    Source: csrc/ops/all_reduce.cpp
    """
    if _open_blocks:
        if not _is_dynamo_compiling() and _hold_again("all_reduce", op, group, tensor, tensor):
            return illegal_work() if async_op else None
    elif not (async_op or _is_compiling()) and _all_reduce_(
        False, tensor, op, c10d._world.default_pg if group is None else group
    ):
        return None  # the op has checked what is checked below
    name = member("all_reduce", group)
    if name is None:
        return None
    _check_tensor("all_reduce", "tensor", tensor, name)
    if tensor.is_sparse and not _is_compiling():
        reduce_op = getattr(dist.ReduceOp, op.upper(), op) if isinstance(op, str) else op
        if not tensor.is_complex():
            return dist.all_reduce(tensor, reduce_op, process_group(name), async_op)
        # Torch's function would reduce a copy in its place.
        options = dist.AllreduceOptions()
        options.reduceOp, options.asyncOp = reduce_op, async_op
        work = process_group(name).allreduce([tensor], options)
        if not async_op and work is not None:
            work.wait()
        return work if async_op else None
    reduction, factor = reduction_of(op)
    if name in _open_blocks:
        _hold(name, "all_reduce", op, group, tensor, tensor, reduction, factor)
        return illegal_work() if async_op and not _is_compiling() else None
    if not _is_compiling() and _all_reduce_(async_op, tensor, reduction, name, factor=factor):
        return _delivery.work_of([tensor]) if async_op else None
    with torch.no_grad():
        started = _ops.all_reduce(tensor, reduction, name, factor=factor)
        return _delivery.spread([started], [[tensor]], async_op)


def all_reduce_coalesced(
    tensors: list[Tensor], op: Any = _SUM, group: Group = None, async_op: bool = False
) -> Any:
    """Replaces each of several tensors by its reduction over a group, in one message.

    Args:
        tensors: of one dtype on one device, any shapes.
        op, group, async_op: as for :func:`all_reduce`.

    Returns:
        As :func:`all_reduce`.

    Raises:
        TypeError, ValueError: as :func:`all_reduce`; mixed dtypes or devices.

    Gradient:
        None: see :mod:`torch_c10d_ext.distributed`.

    Example, 2 ranks::

        xs = [torch.ones(2), torch.full((3,), float(rank))]
        all_reduce_coalesced(xs)  # [2, 2] and [1, 1, 1] on both

    Source: csrc/ops/all_reduce.cpp
    """
    name = member("all_reduce_coalesced", group)
    if name is None:
        return None
    tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    _check_tensors("all_reduce_coalesced", "tensors", tensors, name)
    reduction, factor = reduction_of(op)
    if not _is_compiling() and _all_reduce_coalesced_(
        async_op, tensors, reduction, name, factor=factor
    ):
        return _delivery.work_of(tensors) if async_op else None
    with torch.no_grad():
        started = _ops.all_reduce_coalesced(tensors, reduction, name, factor=factor)
        return _delivery.spread(list(started), [[t] for t in tensors], async_op)


def broadcast(
    tensor: Tensor,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Any:
    """Replaces ``tensor`` on every rank of a group by that of one rank.

    Args:
        tensor: what the source sends, and where every other rank finds it.
        src: the source by its rank in the world; or
        group_src: by its rank in the group.
        group, async_op: as for :func:`all_reduce`.

    Returns:
        As :func:`all_reduce`.

    Raises:
        TypeError: no tensor.
        ValueError: both or neither of the source's ranks, or one that is not in the group.

    Gradient:
        None: see :mod:`torch_c10d_ext.distributed`.

    Example, 2 ranks::

        x = torch.tensor([1.0 + rank])
        broadcast(x, 1)  # x is [2.] on both

    Source: csrc/ops/broadcast.cpp
    """
    if (src is None or group_src is None) and not (async_op or _is_compiling()):
        pg = c10d._world.default_pg if group is None else group
        place = place_in(pg, src) if group_src is None else group_src
        if _broadcast_(False, tensor, place, pg):
            return None
    name = member("broadcast", group)
    if name is None:
        return None
    _check_tensor("broadcast", "tensor", tensor, name)
    root = root_of("broadcast", "src", name, src, group_src)
    if not _is_compiling() and _broadcast_(async_op, tensor, root, name):
        return _delivery.work_of([tensor]) if async_op else None
    with torch.no_grad():
        return _delivery.spread([_ops.broadcast(tensor, root, name)], [[tensor]], async_op)


def reduce(
    tensor: Tensor,
    dst: int | None = None,
    op: Any = _SUM,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Any:
    """Replaces ``tensor`` on one rank by its reduction over the ranks of a group.

    Args:
        tensor: what every rank contributes; left untouched on all ranks but the destination.
        dst: the destination by its rank in the world; or
        group_dst: by its rank in the group.
        op, group, async_op: as for :func:`all_reduce`.

    Returns:
        As :func:`all_reduce`.

    Raises:
        TypeError, ValueError: as :func:`all_reduce` and, for the destination, :func:`broadcast`.

    Gradient:
        None: see :mod:`torch_c10d_ext.distributed`.

    Example, 2 ranks::

        x = torch.tensor([1.0 + rank])
        reduce(x, 0)  # x is [3.] on rank 0, [2.] on rank 1

    Source: csrc/ops/reduce.cpp
    """
    name = member("reduce", group)
    if name is None:
        return None
    _check_tensor("reduce", "tensor", tensor, name)
    root = root_of("reduce", "dst", name, dst, group_dst)
    reduction, factor = reduction_of(op)
    if not _is_compiling() and _reduce_(async_op, tensor, reduction, root, name, factor=factor):
        return _delivery.work_of([tensor]) if async_op else None
    targets = [tensor] if group_rank(name) == root else []
    with torch.no_grad():
        started = _ops.reduce(tensor, reduction, root, name, factor=factor)
        return _delivery.spread([started], [targets], async_op)


@torch.no_grad()
def all_gather(
    tensor_list: list[Tensor], tensor: Tensor, group: Group = None, async_op: bool = False
) -> Any:
    """Fills ``tensor_list`` on every rank with the tensors of all ranks.

    Args:
        tensor_list: one tensor per rank, with as many elements as that rank's ``tensor``.
        tensor: what this rank sends; left untouched.
        group, async_op: as for :func:`all_reduce`.

    Returns:
        As :func:`all_reduce`.

    Raises:
        TypeError: not tensors.
        ValueError: not one tensor per rank, mixed dtypes, or sizes that do not fit.

    Gradient:
        None: see :mod:`torch_c10d_ext.distributed`.

    Example, 2 ranks::

        xs = [torch.empty(1), torch.empty(1)]
        all_gather(xs, torch.tensor([1.0 + rank]))  # xs is [[1.], [2.]] on both

    Source: csrc/ops/all_gather.cpp
    """
    name = member("all_gather", group)
    if name is None:
        return None
    _check_tensor("all_gather", "tensor", tensor, name)
    _check_tensors("all_gather", "tensor_list", tensor_list, name, like=tensor)
    _check_one_per_rank("all_gather", "tensor_list", tensor_list, name)
    if own := _lists.backend(name, [tensor, *tensor_list]):
        options = _lists.options(c10d.AllgatherOptions(), async_op)
        return _lists.written(tensor_list, own.allgather([tensor_list], [tensor], options))
    sizes = [t.numel() for t in tensor_list]
    started = _ops.all_gather(tensor.reshape(-1), sizes, name)
    return _delivery.spread([started], [tensor_list], async_op)


@torch.no_grad()
def all_gather_coalesced(
    output_tensor_lists: list[list[Tensor]],
    input_tensor_list: list[Tensor],
    group: Group = None,
    async_op: bool = False,
) -> Any:
    """Gathers several tensors of all ranks on every rank, in one message.

    Args:
        output_tensor_lists: one list per rank, for that rank's inputs in their order.
        input_tensor_list: what this rank sends, the same shapes and dtype on every rank.
        group, async_op: as for :func:`all_reduce`.

    Returns:
        As :func:`all_reduce`.

    Raises:
        TypeError: not tensors.
        ValueError: not one list per rank, not one tensor per input, mixed dtypes.

    Gradient:
        None: see :mod:`torch_c10d_ext.distributed`.

    Example, 2 ranks::

        outs = [[torch.empty(1), torch.empty(2)] for _ in range(2)]
        all_gather_coalesced(outs, [torch.ones(1), torch.full((2,), float(rank))])
        # [[[1.], [0., 0.]], [[1.], [1., 1.]]] on both

    Source: csrc/ops/all_gather_into_tensor.cpp
    """
    function = "all_gather_coalesced"
    name = member(function, group)
    if name is None:
        return None
    _check_tensors(function, "input_tensor_list", input_tensor_list, name)
    _check_one_per_rank(function, "output_tensor_lists", output_tensor_lists, name)  # type: ignore
    for outs in output_tensor_lists:
        _check_tensors(function, "output_tensor_lists", outs, name, like=input_tensor_list[0])
        if [o.numel() for o in outs] != [x.numel() for x in input_tensor_list]:
            raise InvalidArgument(
                f"{function}: output_tensor_lists must hold the inputs' sizes for every rank, "
                f"{[x.numel() for x in input_tensor_list]}, got {[o.numel() for o in outs]} "
                f"{where(name)}"
            )
    outputs = [t for outs in output_tensor_lists for t in outs]
    if own := _lists.backend(name, [*input_tensor_list, *outputs]):
        options = _lists.options(c10d.AllgatherOptions(), async_op)
        work = own.allgather_coalesced(output_tensor_lists, input_tensor_list, options)
        return _lists.written(outputs, work)
    started = _ops.all_gather_into_tensor_coalesced(
        [x.reshape(-1) for x in input_tensor_list], group_size(name), name
    )
    targets = [[outs[i] for outs in output_tensor_lists] for i in range(len(input_tensor_list))]
    return _delivery.spread(list(started), targets, async_op)


def all_gather_into_tensor(
    output_tensor: Tensor, input_tensor: Tensor, group: Group = None, async_op: bool = False
) -> Any:
    """Fills ``output_tensor`` on every rank with the tensors of all ranks, one after the other.

    Args:
        output_tensor: N times input's elements: shape ``(N * rows, ...)`` or ``(N, rows, ...)``.
        input_tensor: what this rank sends; left untouched.
        group, async_op: as for :func:`all_reduce`.

    Returns:
        As :func:`all_reduce`.

    Raises:
        TypeError: not tensors.
        ValueError: other dtypes or sizes.

    Gradient:
        None: see :mod:`torch_c10d_ext.distributed`.

    Example, 2 ranks::

        out = torch.empty(2)
        all_gather_into_tensor(out, torch.tensor([1.0 + rank]))  # out is [1., 2.] on both

    Source: csrc/ops/all_gather_into_tensor.cpp
    """
    function = "all_gather_into_tensor"
    if _open_blocks:
        if not _is_dynamo_compiling() and _hold_again(
            function, None, group, input_tensor, output_tensor
        ):
            return illegal_work() if async_op else None
    elif not (async_op or _is_compiling()) and _write_all_gather(
        output_tensor, input_tensor, c10d._world.default_pg if group is None else group
    ):
        return None
    name = member(function, group)
    if name is None:
        return None
    _check_tensor(function, "output_tensor", output_tensor, name)
    _check_tensor(function, "input_tensor", input_tensor, name)
    _check_same_dtype(function, output_tensor, input_tensor, name)
    ranks = group_size(name)
    _check_numel(function, output_tensor, ranks * input_tensor.numel(), "N times the input's", name)
    if name in _open_blocks:
        _hold(name, function, None, group, input_tensor, output_tensor)
        return illegal_work() if async_op and not _is_compiling() else None
    if not _is_compiling() and _all_gather_into_tensor_out(
        async_op, input_tensor, ranks, name, out=output_tensor
    ):
        return _delivery.work_of([output_tensor]) if async_op else None
    with torch.no_grad():
        started = _ops.all_gather_into_tensor(input_tensor, ranks, name)
        return _delivery.spread([started], [[output_tensor]], async_op)


@torch.no_grad()
def reduce_scatter(
    output: Tensor,
    input_list: list[Tensor],
    op: Any = _SUM,
    group: Group = None,
    async_op: bool = False,
) -> Any:
    """Gives rank r the reduction of all ranks' r-th tensors.

    Args:
        output: as many elements as this rank's tensor in every ``input_list``.
        input_list: one tensor per rank, left untouched; their sizes may differ.
        op, group, async_op: as for :func:`all_reduce`.

    Returns:
        As :func:`all_reduce`.

    Raises:
        TypeError, ValueError: as :func:`all_reduce`; not one tensor per rank, mixed dtypes, sizes
            that do not fit.

    Gradient:
        None: see :mod:`torch_c10d_ext.distributed`.

    Example, 2 ranks::

        out = torch.empty(1)
        reduce_scatter(out, [torch.ones(1), torch.full((1,), 2.0)])  # [2.] on 0, [4.] on 1

    Source: csrc/ops/reduce_scatter.cpp
    """
    name = member("reduce_scatter", group)
    if name is None:
        return None
    _check_tensor("reduce_scatter", "output", output, name)
    _check_tensors("reduce_scatter", "input_list", input_list, name, like=output)
    _check_one_per_rank("reduce_scatter", "input_list", input_list, name)
    own = input_list[group_rank(name)].numel()
    _check_numel("reduce_scatter", output, own, "the size of this rank's input", name)
    reduction, factor = reduction_of(op)
    reduce_op = _lists.reduce_op(op)
    if reduce_op is not None and (own := _lists.backend(name, [output, *input_list])):
        options = _lists.options(c10d.ReduceScatterOptions(), async_op, reduceOp=reduce_op)
        return _lists.written([output], own.reduce_scatter([output], [input_list], options))
    sizes = [t.numel() for t in input_list]
    started = _ops.reduce_scatter(_flat(input_list), reduction, sizes, name, factor=factor)
    return _delivery.spread([started], [[output]], async_op)


def reduce_scatter_tensor(
    output: Tensor, input: Tensor, op: Any = _SUM, group: Group = None, async_op: bool = False
) -> Any:
    """Gives rank r the r-th equal part of the reduction of all ranks' inputs.

    Args:
        output: an N-th of input's elements.
        input: shape ``(N * rows, ...)`` or ``(N, rows, ...)``; left untouched.
        op, group, async_op: as for :func:`all_reduce`.

    Returns:
        As :func:`all_reduce`.

    Raises:
        TypeError, ValueError: as :func:`all_reduce`; other dtypes or sizes.

    Gradient:
        None: see :mod:`torch_c10d_ext.distributed`.

    Example, 2 ranks::

        out = torch.empty(1)
        reduce_scatter_tensor(out, torch.tensor([1.0, 2.0]))  # [2.] on rank 0, [4.] on rank 1

    Source: csrc/ops/reduce_scatter_tensor.cpp
    """
    function = "reduce_scatter_tensor"
    if _open_blocks:
        if not _is_dynamo_compiling() and _hold_again(function, op, group, input, output):
            return illegal_work() if async_op else None
    elif not (async_op or _is_compiling()) and _write_reduce_scatter(
        output, input, op, c10d._world.default_pg if group is None else group
    ):
        return None
    name = member(function, group)
    if name is None:
        return None
    _check_tensor(function, "output", output, name)
    _check_tensor(function, "input", input, name)
    _check_same_dtype(function, output, input, name)
    ranks = group_size(name)
    if output.numel() * ranks != input.numel():
        raise InvalidArgument(
            f"{function}: the input must have N times the output's elements, "
            f"{output.numel() * ranks}, got {input.numel()} {where(name)}"
        )
    reduction, factor = reduction_of(op)
    # The rows of a rank are one row to the op: any shape of the same elements will do.
    rows = input.reshape(ranks, -1) if input.dim() == 0 or input.shape[0] % ranks else input
    if name in _open_blocks:
        _hold(name, function, op, group, rows, output, reduction, factor)
        return illegal_work() if async_op and not _is_compiling() else None
    if not _is_compiling() and _reduce_scatter_tensor_out(
        async_op, rows, reduction, ranks, name, factor=factor, out=output
    ):
        return _delivery.work_of([output]) if async_op else None
    with torch.no_grad():
        started = _ops.reduce_scatter_tensor(rows, reduction, ranks, name, factor=factor)
        return _delivery.spread([started], [[output]], async_op)


@torch.no_grad()
def gather(
    tensor: Tensor,
    gather_list: list[Tensor] | None = None,
    dst: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Any:
    """Fills ``gather_list`` on one rank with the tensors of all ranks.

    Args:
        tensor: what this rank sends, the same number of elements on every rank; left untouched.
        gather_list: on the destination one tensor per rank; None elsewhere.
        dst, group_dst: the destination, rank 0 of the world by default; as for :func:`reduce`.
        group, async_op: as for :func:`all_reduce`.

    Returns:
        As :func:`all_reduce`.

    Raises:
        TypeError: not tensors.
        ValueError: ``gather_list`` missing on the destination, given elsewhere, or not one tensor
            of tensor's size per rank; the destination's rank as for :func:`reduce`.

    Gradient:
        None: see :mod:`torch_c10d_ext.distributed`.

    Example, 2 ranks::

        xs = [torch.empty(1), torch.empty(1)] if rank == 0 else None
        gather(torch.tensor([1.0 + rank]), xs)  # xs is [[1.], [2.]] on rank 0

    Source: csrc/ops/gather.cpp
    """
    name = member("gather", group)
    if name is None:
        return None
    _check_tensor("gather", "tensor", tensor, name)
    if dst is None and group_dst is None:
        dst = 0
    root = root_of("gather", "dst", name, dst, group_dst)
    targets: list[Tensor] = []
    if group_rank(name) == root:
        if not gather_list:
            raise InvalidArgument(
                f"gather: gather_list must be given on the destination, got {gather_list} "
                f"{where(name)}"
            )
        _check_tensors("gather", "gather_list", gather_list, name, like=tensor)
        _check_one_per_rank("gather", "gather_list", gather_list, name)
        for target in gather_list:
            size = tensor.numel()
            _check_numel("gather", target, size, "the input's size", name, "each of gather_list")
        targets = gather_list
    elif gather_list:
        raise InvalidArgument(
            "gather: gather_list must be given on the destination alone, got a list of "
            f"{len(gather_list)} {where(name)}"
        )
    if own := _lists.backend(name, [tensor, *targets]):
        options = _lists.options(c10d.GatherOptions(), async_op, rootRank=root)
        return _lists.written(targets, own.gather([targets] if targets else [], [tensor], options))
    started = _ops.gather(tensor.reshape(-1), root, name)
    return _delivery.spread([started], [targets], async_op)


@torch.no_grad()
def scatter(
    tensor: Tensor,
    scatter_list: list[Tensor] | None = None,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Any:
    """Fills ``tensor`` on rank r with the r-th tensor of one rank.

    Args:
        tensor: where this rank finds its part, the same number of elements on every rank.
        scatter_list: on the source one tensor per rank; None elsewhere.
        src, group_src: the source, rank 0 of the world by default; as for :func:`broadcast`.
        group, async_op: as for :func:`all_reduce`.

    Returns:
        As :func:`all_reduce`.

    Raises:
        TypeError: not tensors.
        ValueError: ``scatter_list`` missing on the source, given elsewhere, or not one tensor of
            tensor's size per rank; the source's rank as for :func:`broadcast`.

    Gradient:
        None: see :mod:`torch_c10d_ext.distributed`.

    Example, 2 ranks::

        x = torch.empty(1)
        scatter(x, [torch.ones(1), torch.zeros(1)] if rank == 0 else None)  # [1.] on 0, [0.] on 1

    Source: csrc/ops/scatter.cpp
    """
    name = member("scatter", group)
    if name is None:
        return None
    _check_tensor("scatter", "tensor", tensor, name)
    if src is None and group_src is None:
        src = 0
    root = root_of("scatter", "src", name, src, group_src)
    if group_rank(name) == root:
        if not scatter_list:
            raise InvalidArgument(
                f"scatter: scatter_list must be given on the source, got {scatter_list} "
                f"{where(name)}"
            )
        _check_tensors("scatter", "scatter_list", scatter_list, name, like=tensor)
        _check_one_per_rank("scatter", "scatter_list", scatter_list, name)
        for part in scatter_list:
            size = tensor.numel()
            _check_numel("scatter", part, size, "the output's size", name, "each of scatter_list")
    elif scatter_list:
        raise InvalidArgument(
            "scatter: scatter_list must be given on the source alone, got a list of "
            f"{len(scatter_list)} {where(name)}"
        )
    sources = scatter_list or []
    if own := _lists.backend(name, [tensor, *sources]):
        options = _lists.options(c10d.ScatterOptions(), async_op, rootRank=root)
        return _lists.written(
            [tensor], own.scatter([tensor], [sources] if sources else [], options)
        )
    whole = _flat(scatter_list) if scatter_list else tensor.new_empty(0)
    started = _ops.scatter(whole, root, name, size=tensor.numel())
    return _delivery.spread([started], [[tensor]], async_op)


@torch.no_grad()
def all_to_all(
    output_tensor_list: list[Tensor],
    input_tensor_list: list[Tensor],
    group: Group = None,
    async_op: bool = False,
) -> Any:
    """Sends the r-th input to rank r and fills the r-th output with what rank r sent.

    Args:
        output_tensor_list: one tensor per rank, of the size of what comes from it.
        input_tensor_list: one tensor per rank; left untouched.
        group, async_op: as for :func:`all_reduce`.

    Returns:
        As :func:`all_reduce`.

    Raises:
        TypeError: not tensors.
        ValueError: not one tensor per rank, mixed dtypes.

    Gradient:
        None: see :mod:`torch_c10d_ext.distributed`.

    Example, 2 ranks::

        outs = [torch.empty(1), torch.empty(1)]
        all_to_all(outs, [torch.tensor([10.0 * rank]), torch.tensor([10.0 * rank + 1])])
        # [[0.], [10.]] on rank 0, [[1.], [11.]] on rank 1

    Source: csrc/ops/all_to_all_single.cpp
    """
    name = member("all_to_all", group)
    if name is None:
        return None
    _check_tensors("all_to_all", "input_tensor_list", input_tensor_list, name)
    _check_one_per_rank("all_to_all", "input_tensor_list", input_tensor_list, name)
    like = input_tensor_list[0]
    _check_tensors("all_to_all", "output_tensor_list", output_tensor_list, name, like=like)
    _check_one_per_rank("all_to_all", "output_tensor_list", output_tensor_list, name)
    rank = group_rank(name)
    own, size = output_tensor_list[rank], input_tensor_list[rank].numel()
    of, what = "the size of its input to itself", "the output from the rank itself"
    _check_numel("all_to_all", own, size, of, name, what)
    if own := _lists.backend(name, [*output_tensor_list, *input_tensor_list]):
        options = _lists.options(c10d.AllToAllOptions(), async_op)
        work = own.alltoall(output_tensor_list, input_tensor_list, options)
        return _lists.written(output_tensor_list, work)
    started = _ops.all_to_all_single(
        _flat(input_tensor_list),
        [t.numel() for t in output_tensor_list],
        [t.numel() for t in input_tensor_list],
        name,
    )
    return _delivery.spread([started], [output_tensor_list], async_op)


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: Group = None,
    async_op: bool = False,
) -> Any:
    """Sends rows of ``input`` to every rank and fills ``output`` with the rows they sent.

    Args:
        output: dimension 0 as long as the sum of its split sizes.
        input: left untouched.
        output_split_sizes, input_split_sizes: rows from and to each rank; None or empty: equal.
        group, async_op: as for :func:`all_reduce`.

    Returns:
        As :func:`all_reduce`.

    Raises:
        TypeError: not tensors.
        ValueError: other dtypes; split sizes that do not fit.

    Gradient:
        None: see :mod:`torch_c10d_ext.distributed`.

    Example, 2 ranks::

        out = torch.empty(2)
        all_to_all_single(out, torch.tensor([1.0, 2.0]) + 10 * rank)
        # [1., 11.] on rank 0, [2., 12.] on rank 1

    Source: csrc/ops/all_to_all_single.cpp
    """
    function = "all_to_all_single"
    if (
        output_split_sizes is None
        and input_split_sizes is None
        and not (async_op or _is_compiling())
        and _write_all_to_all(output, input, c10d._world.default_pg if group is None else group)
    ):
        return None
    name = member(function, group)
    if name is None:
        return None
    _check_tensor(function, "output", output, name)
    _check_tensor(function, "input", input, name)
    _check_same_dtype(function, output, input, name)
    to = _splits(function, "output", output, output_split_sizes, name)
    of = _splits(function, "input", input, input_split_sizes, name)
    if not _is_compiling() and _all_to_all_single_out(async_op, input, to, of, name, out=output):
        return _delivery.work_of([output]) if async_op else None
    with torch.no_grad():
        started = _ops.all_to_all_single(input, to, of, name)
        return _delivery.spread([started], [[output]], async_op)


def barrier(
    group: Group = None,
    async_op: bool = False,
    device_ids: list[int] | None = None,
    timeout: dt.timedelta | None = None,
) -> Any:
    """Returns when every rank of a group has called it.

    Ranks that trace it and ranks that call it, or torch's, in eager meet.

    Args:
        group, async_op: as for :func:`all_reduce`.
        device_ids: nccl's device.
        timeout: of this call alone, in eager; in a graph the group's own counts.

    Returns:
        As :func:`all_reduce`.

    Raises:
        ValueError: unknown group.

    Gradient:
        None.

    Example::

        barrier()

    Source: csrc/ops/barrier.cpp
    """
    if not torch.compiler.is_compiling():
        more = {} if timeout is None else {"timeout": timeout}
        if group is not None and group is not dist.GroupMember.NON_GROUP_MEMBER:
            group = process_group(group_name(group))
        return dist.barrier(group, async_op, device_ids, **more)  # type: ignore[arg-type]
    name = member("barrier", group)
    if name is None:
        return None
    with torch.no_grad():
        # Uninitialized, or a compiler may take two barriers, being equal, for one.
        token = torch.empty(1, device=barrier_device(name, device_ids))
        return _delivery.spread([_ops.barrier(token, name)], [[]], async_op)


def monitored_barrier(
    group: Group = None, timeout: dt.timedelta | None = None, wait_all_ranks: bool = False
) -> None:
    """Returns when every rank of a group has called it, and names those that do not come.

    On gloo torch's own, on shm this package's; not traced.

    Args:
        group: as for :func:`all_reduce`.
        timeout: how long to wait for the others, by default half an hour as in torch.
        wait_all_ranks: name all ranks that are missing instead of the first.

    Raises:
        RuntimeError: a rank did not come; the text names it.
        ValueError: unknown group, or one on another backend.

    Gradient:
        None.

    Example::

        monitored_barrier(timeout=datetime.timedelta(seconds=10))

    Source: csrc/backends/shm/requests.cpp
    """
    refuse_in_a_graph("monitored_barrier")
    name = member("monitored_barrier", group)
    if name is None:
        return
    pg = process_group(name)
    if not has_own_backend(pg):
        dist.monitored_barrier(pg, timeout, wait_all_ranks)
        return
    pg.monitored_barrier(timeout or c10d.default_pg_timeout, wait_all_ranks)


def _splits(
    function: str, side: str, tensor: Tensor, sizes: list[int] | None, group: str
) -> list[int]:
    if sizes:
        return list(sizes)
    ranks = group_size(group)
    if tensor.dim() == 0 or tensor.shape[0] % ranks != 0:
        raise InvalidArgument(
            f"{function}: {side}'s dimension 0 must be a multiple of the group's size, {ranks}, "
            f"where no split sizes are given, got shape {tuple(tensor.shape)} {where(group)}"
        )
    return [tensor.shape[0] // ranks] * ranks
