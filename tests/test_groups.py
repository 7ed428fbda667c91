"""Every way to name a group, subgroups, and groups that come and go."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import torch_c10d_ext.functional as F
from tests.harness import run
from tests.harness.crew import crew
from tests.harness.flight import single_rank_shortcut


def _x() -> Tensor:
    return torch.tensor([1.0, 10.0, 100.0]) * (dist.get_rank() + 1)


def _total(ranks: range | list[int]) -> Tensor:
    return torch.tensor([1.0, 10.0, 100.0]) * sum(rank + 1 for rank in ranks)


_WORLD: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "ProcessGroup": lambda: dist.group.WORLD,
    "name": lambda: dist.group.WORLD.group_name,  # type: ignore[union-attr]
    "ranks": lambda: list(range(dist.get_world_size())),
    "list of ranks": lambda: [list(range(dist.get_world_size()))],
    "mesh": lambda: init_device_mesh("cpu", (dist.get_world_size(),)),
    "mesh and dim": lambda: (init_device_mesh("cpu", (dist.get_world_size(),)), 0),
}


def _world_by(form: str) -> None:
    group = _WORLD[form]()
    for _ in range(2):
        y = F.all_reduce(_x(), "sum", group)
        assert torch.equal(y + 0, _total(range(dist.get_world_size())))


@pytest.mark.parametrize("size", (1, 2))
@pytest.mark.parametrize("form", _WORLD)
def test_world_by(form: str, size: int) -> None:
    run(size, _world_by, form)


def _every_function_takes_every_form() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    x = torch.arange(2.0 * n).reshape(n, 2) + 10 * rank
    for form in _WORLD.values():
        g = form()
        ring = [(m + 1) % n for m in range(n)]
        results = {
            "all_reduce": F.all_reduce(x, "sum", g),
            "all_reduce_coalesced": F.all_reduce_coalesced([x], "sum", g)[0],
            "all_gather_single": F.all_gather_single(x, 0, g),
            "all_gather_tensor": F.all_gather_tensor(x, 0, g),
            "all_gather_single_coalesced": F.all_gather_single_coalesced([x], g)[0],
            "reduce_scatter_single": F.reduce_scatter_single(x, "sum", 0, g),
            "reduce_scatter_tensor": F.reduce_scatter_tensor(x, "sum", 0, g),
            "reduce_scatter_single_coalesced": F.reduce_scatter_single_coalesced(
                [x], "sum", [0], g
            )[0],
            "all_to_all_single": F.all_to_all_single(x, None, None, g),
            "broadcast": F.broadcast(x, 0, g),
            "broadcast_coalesced": F.broadcast_coalesced([x], 0, g)[0],
            "reduce": F.reduce(x, "sum", 0, g),
            "gather": F.gather(x, 0, g),
            "scatter": F.scatter(x, 0, g),
            "permute_tensor": F.permute_tensor(x, ring, g),
            "barrier": F.barrier(x, g),
            "all_gather": F.all_gather(x, [n] * n, g),
            "reduce_scatter": F.reduce_scatter(x, "sum", [1] * n, g),
            "copy_to_group": F.copy_to_group(x, g),
            "reduce_from_group": F.reduce_from_group(x, g),
        }
        xs = [torch.arange(2.0 * n).reshape(n, 2) + 10 * r for r in range(n)]
        total, nothing = sum(xs[1:], xs[0]), torch.zeros(n, 2)
        wanted = {
            "all_reduce": total,
            "all_reduce_coalesced": total,
            "all_gather_single": torch.cat(xs),
            "all_gather_tensor": torch.cat(xs),
            "all_gather_single_coalesced": torch.cat(xs),
            "reduce_scatter_single": total[rank : rank + 1],
            "reduce_scatter_tensor": total[rank : rank + 1],
            "reduce_scatter_single_coalesced": total[rank : rank + 1],
            "all_to_all_single": torch.stack([each[rank] for each in xs]),
            "broadcast": xs[0],
            "broadcast_coalesced": xs[0],
            "reduce": total if rank == 0 else nothing,
            "gather": torch.cat(xs) if rank == 0 else nothing[:0],
            "scatter": xs[0][rank : rank + 1],
            "permute_tensor": xs[(rank - 1) % n],
            "barrier": x,
            "all_gather": torch.cat(xs),
            "reduce_scatter": total[rank : rank + 1],
            "copy_to_group": x,
            "reduce_from_group": total,
        }
        assert results.keys() == wanted.keys()
        for name, y in results.items():
            assert torch.equal(y + 0, wanted[name]), f"{name}: {y}, expected {wanted[name]}"


def test_every_function_takes_every_form_of_group() -> None:
    run(2, _every_function_takes_every_form)


def _mesh_dimensions() -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rows = [[0, 1], [2, 3]][rank // 2]
    columns = [[0, 2], [1, 3]][rank % 2]
    for group, members in (
        (mesh["tp"], rows),
        (mesh["dp"], columns),
        ((mesh, 1), rows),
        ((mesh, 0), columns),
        (mesh.get_group("tp"), rows),
        (mesh.get_group("dp").group_name, columns),
    ):
        assert torch.equal(F.all_reduce(_x(), "sum", group) + 0, _total(members))
        # Ranks of src count within the group.
        want = torch.tensor([1.0, 10.0, 100.0]) * (members[1] + 1)
        assert torch.equal(F.broadcast(_x(), 1, group) + 0, want)
        gathered = F.all_gather_single(_x(), 0, group)
        want = torch.cat([torch.tensor([1.0, 10.0, 100.0]) * (m + 1) for m in members])
        assert torch.equal(gathered + 0, want)
    # Both at once, results used in the other order.
    a, b = F.all_reduce(_x(), "sum", (mesh, 0)), F.all_reduce(_x(), "sum", (mesh, 1))
    assert torch.equal(b + 0, _total(rows))
    assert torch.equal(a + 0, _total(columns))


def test_a_group_per_mesh_dimension() -> None:
    run(4, _mesh_dimensions)


def _subgroups() -> None:
    rank = dist.get_rank()
    first, second = dist.new_group([0, 2]), dist.new_group([1])
    members = [0, 2] if rank in (0, 2) else [1]
    group = first if rank in (0, 2) else second
    assert torch.equal(F.all_reduce(_x(), "sum", group) + 0, _total(members))
    if rank in (0, 2):
        # Rank 1 of the group is rank 2 of the world.
        want = torch.tensor([1.0, 10.0, 100.0]) * 3
        assert torch.equal(F.broadcast(_x(), 1, first) + 0, want)
        y = F.gather(_x(), 1, first)
        assert y.shape == ((6,) if rank == 2 else (0,))
    dist.destroy_process_group(first) if rank in (0, 2) else dist.destroy_process_group(second)


def test_subgroups() -> None:
    run(3, _subgroups)


def _lists_of_ranks() -> None:
    """A list names one group, a list of lists the group among them that this rank is in."""
    rank = dist.get_rank()
    pair = [rank % 2, rank % 2 + 2]
    for _ in range(2):
        assert torch.equal(F.all_reduce(_x(), "sum", [[0, 2], [1, 3]]) + 0, _total(pair))
        assert torch.equal(F.all_reduce(_x(), "sum", [0, 1, 2, 3]) + 0, _total(range(4)))


def test_lists_of_ranks() -> None:
    run(4, _lists_of_ranks)


def _groups_come_and_go() -> None:
    n = dist.get_world_size()
    for _ in range(3):
        group = dist.new_group(list(range(n)))
        assert torch.equal(F.all_reduce(_x(), "sum", group) + 0, _total(range(n)))
        name = group.group_name
        dist.destroy_process_group(group)
        with pytest.raises(ValueError, match="group_name must name a process group"):
            torch.ops.c10d_ext.all_reduce(_x(), "sum", name)
    assert torch.equal(F.all_reduce(_x(), "sum", None) + 0, _total(range(n)))


def test_groups_come_and_go() -> None:
    run(2, _groups_come_and_go)


def _concurrent_groups() -> None:
    """Collectives of several groups in flight at once, waited for in another order."""
    n = dist.get_world_size()
    groups = [dist.new_group(list(range(n))) for _ in range(4)]
    xs = [_x() * 2.0**i for i in range(4)]
    ys = [F.all_reduce(x, "sum", g) for x, g in zip(xs, groups, strict=True)]
    for i in (2, 0, 3, 1):
        assert torch.equal(ys[i] + 0, _total(range(n)) * 2.0**i)
    for group in groups:
        dist.destroy_process_group(group)


def test_several_groups_at_once() -> None:
    run(3, _concurrent_groups)


def _not_a_group(what: str) -> None:
    n = dist.get_world_size()
    group, text = {
        "int": (7, "group"),
        "unknown name": ("nope", "'nope'"),
        "2-D mesh": (init_device_mesh("cpu", (n, 1)), "1-D|one dimension|1 dimension"),
        "mesh and bad dim": ((init_device_mesh("cpu", (n,)), 3), "dim|3"),
        "empty list": ([], "rank|empty|group"),
        "rank outside the world": ([0, n + 5], f"{n + 5}"),
        "repeated rank": ([0, 0], "0"),
        "dict": ({}, "group"),
    }[what]
    with pytest.raises((ValueError, TypeError), match=text):
        F.all_reduce(_x(), "sum", group)
    assert torch.equal(F.all_reduce(_x(), "sum", None) + 0, _total(range(n)))


@pytest.mark.parametrize(
    "what",
    [
        "int",
        "unknown name",
        "2-D mesh",
        "mesh and bad dim",
        "empty list",
        "rank outside the world",
        "repeated rank",
        "dict",
    ],
)
def test_rejects_what_is_not_a_group(what: str) -> None:
    run(2, _not_a_group, what)


def _not_a_member() -> None:
    group = dist.new_group([0])
    if dist.get_rank() == 1:
        with pytest.raises((ValueError, TypeError), match="group"):
            F.all_reduce(_x(), "sum", group)
    else:
        assert torch.equal(F.all_reduce(_x(), "sum", group) + 0, _total([0]))
        dist.destroy_process_group(group)


def test_rejects_a_group_this_rank_is_not_in() -> None:
    run(2, _not_a_member)


def _one_rank() -> None:
    for enabled in (True, False):
        with single_rank_shortcut(enabled):
            assert torch.equal(F.all_reduce(_x(), "avg", None) + 0, _total([0]))
            y = F.all_reduce(_x(), "premul_sum", None, factor=3.0)
            assert torch.equal(y + 0, 3 * _total([0]))


def test_world_size_one_with_and_without_the_backend() -> None:
    run(1, _one_rank)


def _a_wrong_setting_is_named() -> None:
    name = "TORCH_C10D_EXT_SINGLE_RANK_SHORTCUT"
    for wrong in ("x", "2", "01"):
        os.environ[name] = wrong
        with pytest.raises(ValueError, match=f"{name}: must be 0 or 1, got '{wrong}'"):
            F.all_reduce(_x(), "sum", None)
    os.environ[name] = ""
    assert torch.equal(F.all_reduce(_x(), "sum", None) + 0, _total([0]))


def test_a_wrong_setting_is_named() -> None:
    with crew(1, "gloo") as ranks:
        ranks.run(_a_wrong_setting_is_named)
