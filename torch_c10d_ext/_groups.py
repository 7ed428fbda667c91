"""Process groups by name: what every way of naming a group comes down to."""

from __future__ import annotations

import datetime as dt
import weakref
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from torch_c10d_ext import _C
from torch_c10d_ext.errors import InvalidArgument

_SUM = dist.ReduceOp.SUM

# A group as users name it: its ranks (one list, or one list per group of a mesh), a ProcessGroup, a
# 1-D DeviceMesh, a dimension of a mesh, a registered name, or None for the default group.
Group: TypeAlias = (
    list[int]
    | list[list[int]]
    | dist.ProcessGroup
    | DeviceMesh
    | tuple[DeviceMesh, int]
    | str
    | None
)


def group_name(group: Group, tag: str = "") -> str:
    """The registered name of ``group``.

    Args:
        group: see :data:`Group`.
        tag: tells groups of the same ranks apart where ``group`` is a list of ranks.

    Raises:
        ValueError: ``group`` names no group, a mesh of more than one dimension, or a pair that is
            not (DeviceMesh, int).
        TypeError: ``group`` is none of the types above.
    """
    if isinstance(group, str):
        return group
    if group is None:
        default = c10d._world.default_pg
        if default is None:
            raise InvalidArgument(
                "group: the default process group must be initialized, got None before "
                "torch.distributed.init_process_group"
            )
        return default.group_name
    if isinstance(group, dist.ProcessGroup):
        return group.group_name
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise InvalidArgument(
                f"group: a DeviceMesh must have one dimension, got {group.ndim}; "
                "pass (mesh, dim) to choose one"
            )
        return _mesh_group_name(group, 0)
    if isinstance(group, tuple):
        if (
            len(group) == 2
            and isinstance(group[0], DeviceMesh)
            and isinstance(group[1], int)
            and -group[0].ndim <= group[1] < group[0].ndim
        ):
            return _mesh_group_name(group[0], group[1])
        raise InvalidArgument(
            f"group: a tuple must be (DeviceMesh, dim) with a dimension of that mesh, got {group}"
        )
    if isinstance(group, list):
        return _name_by_ranks(group, tag)
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise InvalidArgument("group: this rank must be in the group, got a group of other ranks")
    raise TypeError(
        "group: must be a list of ranks, ProcessGroup, DeviceMesh, (DeviceMesh, dim), name or "
        f"None, got {type(group).__name__}"
    )


def places() -> str:
    """This rank in every group that it knows: what results of this rank depend on."""
    groups = c10d._world.pg_names.items()
    return ",".join(sorted(f"{name}:{pg.rank()}/{pg.size()}" for pg, name in groups))


def illegal_work() -> dist.Work:
    """The work of a call that its block still holds, which cannot be waited for."""
    return c10d._IllegalWork()


def member(op: str, group: Group) -> str | None:
    """The registered name of ``group``; None, with torch's warning, on ranks outside of it."""
    if group is None and (default := c10d._world.default_pg) is not None:
        return default.group_name
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        c10d._warn_not_in_group(op)
        return None
    return group_name(group)


def refuse_in_a_graph(op: str) -> None:
    """Raises where a tracer calls; without ``fullgraph=True`` Dynamo then leaves the graph."""
    if torch.compiler.is_compiling():
        raise RuntimeError(
            f"{op}: must be called outside compiled code, got a call that is being traced"
        )


def group_rank(name: str) -> int:
    """This rank in the group registered as ``name``."""
    return c10d._resolve_process_group(name).rank()


def root_of(op: str, role: str, name: str, rank: int | None, rank_in_group: int | None) -> int:
    """The rank in a group that is given by its rank in the world or in the group."""
    if (rank is None) == (rank_in_group is None):
        raise InvalidArgument(
            f"{op}: one of {role} and group_{role} must be given, got {rank} and {rank_in_group} "
            f"{where(name)}"
        )
    if rank_in_group is not None:
        return rank_in_group
    members = world_ranks(name)
    if rank not in members:
        raise InvalidArgument(
            f"{op}: {role} must be a rank of the group, {members}, got {rank} {where(name)}"
        )
    return members.index(rank)


def place_in(pg: Any, rank: Any) -> int | None:
    """The place of a rank of the world in a group; None where that takes more than a look."""
    if type(pg) is not dist.ProcessGroup or type(rank) is not int:
        return None
    return c10d._world.pg_group_ranks.get(pg, {}).get(rank)


def cpu_backend(pg: dist.ProcessGroup) -> dist.Backend:
    """What serves CPU tensors in a group."""
    return pg._get_backend(torch.device("cpu"))


def unwrapped(backend: Any) -> Any:
    """The backend itself, without what TORCH_DISTRIBUTED_DEBUG=DETAIL puts around it."""
    while isinstance(backend, c10d._ProcessGroupWrapper):
        backend = backend.wrapped_pg
    return backend


def has_own_backend(pg: dist.ProcessGroup) -> bool:
    """Whether a backend of this package serves CPU tensors in a group."""
    served = torch.device("cpu") in pg._device_types
    return served and isinstance(unwrapped(cpu_backend(pg)), _C.SplittableBackend)


def reconnects(backend: dist.Backend) -> bool:
    """Whether fewer ranks need nothing but a store to connect anew: torch's gloo cannot shrink."""
    return isinstance(unwrapped(backend), dist.ProcessGroupGloo)


# How many groups were made of a group's ranks. Its ranks count alike, so they agree on a name; that
# torch derives from the number of groups on a rank differs where only some ranks were in others.
_made: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


# Names that all ranks of a group share where torch gave it one that they do not.
_agreed: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()


def _next_name(parent: dist.ProcessGroup, what: str, ranks: list[int]) -> str:
    count = _made[parent] = _made.get(parent, 0) + 1
    name = _agreed.get(parent, parent.group_name)
    return f"{name}/{what}{count}:{'.'.join(map(str, ranks))}"


def split_off(
    parent: dist.ProcessGroup,
    ranks: list[int],
    backend: str,
    timeout: dt.timedelta | None,
    options: Any | None,
    description: str | None,
) -> dist.ProcessGroup | None:
    """A group of ``ranks`` of ``parent``, which all ranks of ``parent`` call with lists of theirs.

    As ``new_group`` makes it, under a name that depends on nothing but ``parent``; None on a rank
    that is not in ``ranks``.
    """
    name = _next_name(parent, "split", [])
    if parent.rank() not in ranks:
        return None
    members = [world_ranks(parent.group_name)[rank] for rank in ranks]
    name += ".".join(map(str, ranks))
    pg, _ = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(parent.rank()),
        members,
        dist.Backend(backend),
        c10d._get_default_store(),
        name,
        backend_options=options,
        timeout=timeout or c10d._get_default_timeout(dist.Backend(backend)),
        group_desc=description,
    )
    c10d._world.pg_group_ranks[pg] = {member: rank for rank, member in enumerate(members)}
    return pg


def shrunk(
    pg: dist.ProcessGroup, ranks_to_exclude: list[int], flags: int, options: Any | None
) -> dist.ProcessGroup:
    """What torch's ``shrink_group`` does, with the backend of the CPU; gloo has no ``shrink``."""
    c10d._validate_shrink_inputs(ranks_to_exclude, flags)
    about = c10d._prepare_shrink_target_group(pg)
    about["pg_options_override"] = options
    gone = c10d._validate_and_process_excluded_ranks(ranks_to_exclude, about)
    backend = cpu_backend(pg)
    if not reconnects(backend):
        rest = backend.shrink(sorted(gone), flags, options)
        return c10d._finalize_shrunk_group(about, gone, rest)
    if flags == c10d.SHRINK_ABORT:
        backend.abort()
    left = [rank for rank in range(pg.size()) if rank not in gone]
    name = _next_name(pg, "shrink", left)
    store = dist.PrefixStore(name, c10d._get_default_store())
    timeout = (options or backend.options)._timeout
    rest = dist.ProcessGroupGloo(store, left.index(pg.rank()), len(left), timeout=timeout)
    rest._set_sequence_number_for_group()
    smaller = c10d._finalize_shrunk_group(about, gone, rest)
    _agreed[smaller] = name
    return smaller


def device_of(name: str) -> str:
    """The type of a device that a group communicates with, the CPU if it can."""
    kinds = [device.type for device in c10d._resolve_process_group(name)._device_types]
    return "cpu" if "cpu" in kinds or not kinds else kinds[0]


def barrier_device(name: str, device_ids: list[int] | None) -> str:
    """Where ``torch.distributed.barrier`` communicates, whose ranks a traced barrier must meet."""
    accelerator = torch.accelerator.current_accelerator()
    if device_ids and accelerator is not None:
        return f"{accelerator.type}:{device_ids[0]}"
    bound = c10d._resolve_process_group(name).bound_device_id
    return device_of(name) if bound is None else str(bound)


def world_ranks(name: str) -> list[int]:
    """The ranks of a group, as ranks of the world."""
    return dist.get_process_group_ranks(c10d._resolve_process_group(name))


# These objects may stand for their names where C++ reads the arguments of an op.
for _reduction in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"):
    _C.know_reduction(getattr(dist.ReduceOp, _reduction), _reduction.lower())


def reduction_of(op: Any) -> tuple[str, complex | None]:
    """The name of a ``ReduceOp``, or of a name, and the factor of ``PREMUL_SUM``."""
    if op is _SUM:  # by far the most frequent one
        return "sum", None
    if isinstance(op, str):
        return op, None
    if type(op) is dist.ReduceOp.RedOpType:
        return op.name.lower(), None
    if type(op) is _TracedPremulSum:
        return "premul_sum", op.factor
    return _reduction_with_factor(op)


class _TracedPremulSum:
    """``PREMUL_SUM`` made while Dynamo traces, which cannot make torch's."""

    def __init__(self, factor: Any) -> None:
        self.factor = factor


def premul_sum(factor: Any) -> Any:
    """A ``PREMUL_SUM`` of ``factor``, as torch's ``_make_nccl_premul_sum``, in a graph too."""
    if torch.compiler.is_dynamo_compiling():
        return _TracedPremulSum(_exact(factor))
    return dist._make_nccl_premul_sum(factor)


def _reduction_with_factor(op: Any) -> tuple[str, complex | None]:
    if not isinstance(op, dist.ReduceOp):
        raise TypeError(f"op: must be a ReduceOp or its name, got {type(op).__name__}")
    kind, factor = op.__getstate__()
    if isinstance(factor, torch.Tensor):
        factor = factor.item()
    return kind.name.lower(), _exact(factor)


def _exact(factor: Any) -> Any:
    """``factor``; torch keeps floats alone, integers have factors too."""
    return int(factor) if isinstance(factor, float) and factor.is_integer() else factor


def group_size(name: str) -> int:
    """The number of ranks of the group registered as ``name``."""
    return _C.group_size(name)


def process_group(name: str) -> dist.ProcessGroup:
    """The group registered as ``name``."""
    group_size(name)  # its error says which groups there are
    return c10d._resolve_process_group(name)


def where(name: str) -> str:
    """The end of an error text: this rank and the group."""
    return _C.where(name)


def _mesh_group_name(mesh: DeviceMesh, dim: int) -> str:
    # Not mesh.get_group(dim).group_name: Dynamo traces strings through, a ProcessGroup it may not.
    return mesh._dim_group_names[dim]


def _name_by_ranks(ranks: list[int] | list[list[int]], tag: str) -> str:
    if ranks and isinstance(ranks[0], list):
        rows: list[list[int]] = ranks  # type: ignore[assignment]
        if len({len(row) for row in rows}) != 1:
            raise InvalidArgument(f"group: the lists of ranks must have one size, got {rows}")
        here = [row for row in rows if dist.get_rank() in row]
        if len(here) != 1:
            raise InvalidArgument(
                f"group: rank {dist.get_rank()} must be in exactly one of the lists, got {rows}"
            )
        members = here[0]
    else:
        members = ranks  # type: ignore[assignment]
    world = range(dist.get_world_size())
    if not members or len(set(members)) != len(members) or not set(members) <= set(world):
        raise InvalidArgument(
            f"group: must list different ranks of the world, 0 to {world[-1]}, got {members}"
        )
    if dist.get_rank() not in members:
        raise InvalidArgument(
            f"group: this rank must be in the group, got ranks {members} on rank {dist.get_rank()}"
        )
    if c10d._find_pg_by_ranks_and_tag(tag, members) is None:
        # Its members create it on first use; the other ranks need not know.
        c10d._new_group_with_tag(members, pg_tag=tag or None, use_local_synchronization=True)
    return c10d._resolve_group_name_by_ranks_and_tag(members, tag)


def known_names() -> str:
    """The groups of this process, for error texts."""
    names = sorted(set(c10d._world.pg_names.values()))
    return ", ".join(f"'{name}'" for name in names) if names else "none"


# Dynamo asks once, while it traces: a group does not change under its name. (This is what
# torch.compiler.assume_constant_result does, which would import all of Dynamo here.)
_name_by_ranks._dynamo_marked_constant = True  # type: ignore[attr-defined]
group_size._dynamo_marked_constant = True  # type: ignore[attr-defined]
where._dynamo_marked_constant = True  # type: ignore[attr-defined]
group_rank._dynamo_marked_constant = True  # type: ignore[attr-defined]
world_ranks._dynamo_marked_constant = True  # type: ignore[attr-defined]
device_of._dynamo_marked_constant = True  # type: ignore[attr-defined]
barrier_device._dynamo_marked_constant = True  # type: ignore[attr-defined]
_reduction_with_factor._dynamo_marked_constant = True  # type: ignore[attr-defined]


def sums_in_rank_order(name: str) -> bool:
    """Whether the group adds the ranks' values in one order, wherever in a message they stand.

    Shared memory does. gloo's rings and nccl's do not; nor does what shm falls back to. A fake
    group stands for one that does, as no values depend on it.
    """
    pg = process_group(name)
    if torch.device("cpu") not in pg._device_types:
        return False
    return _C.capabilities_of(unwrapped(cpu_backend(pg))).sums_in_rank_order


def has_cpu(name: str) -> bool:
    """Whether the group communicates CPU tensors."""
    return torch.device("cpu") in process_group(name)._device_types


def is_fake(name: str) -> bool:
    """Whether the group is torch's fake one, whose collectives do nothing."""
    return any(
        _C.capabilities_of(unwrapped(process_group(name)._get_backend(device))).moves_nothing
        for device in process_group(name)._device_types
    )


def group_store(name: str) -> dist.Store:
    """The store that the ranks of a group met at."""
    return process_group(name).get_group_store()


def group_timeout(name: str) -> float:
    """Seconds that a group's ranks wait for each other."""
    timeout = c10d._get_default_timeout(dist.Backend("gloo"))
    pg = process_group(name)
    if torch.device("cpu") in pg._device_types:
        timeout = getattr(getattr(cpu_backend(pg), "options", None), "_timeout", timeout)
    return timeout.total_seconds()
