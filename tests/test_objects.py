"""The object collectives, as torch has them and with weights_only=True."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torch_c10d_ext
import torch_c10d_ext.distributed as ours
from tests.harness import run

OBJECTS = [name for name in dir(ours) if "_object" in name and not name.startswith("_")]


class Foreign:
    """What weights_only=True does not read; it tells when it is unpickled."""

    read = 0

    def __setstate__(self, state: Any) -> None:
        Foreign.read += 1

    def __getstate__(self) -> dict[str, int]:
        return {"a": 1}


def _value(rank: int) -> dict[str, Any]:
    """Of another size on every rank."""
    return {"rank": rank, "x": torch.arange(3.0 + 5 * rank), "text": "é" * rank, "none": [None, 1j]}


def _call(name: str, objects: list[Any], more: dict[str, Any]) -> tuple[list[Any], Any]:
    """What this rank gets when every rank passes `objects`, one for each rank; and the result."""
    n, rank, root = dist.get_world_size(), dist.get_rank(), dist.get_world_size() - 1
    function: Callable[..., Any] = getattr(ours, name)
    slots: list[Any] = [None] * n
    if name == "all_gather_object":
        return slots, function(slots, objects[rank], **more)
    if name == "gather_object":
        here = slots if rank == root else None
        return here or [], function(objects[rank], here, root, **more)
    if name == "broadcast_object_list":
        slots = list(objects) if rank == root else slots
        return slots, function(slots, root, **more)
    if name == "scatter_object_list":
        return slots[:1], function(slots[:1], objects if rank == root else None, root, **more)
    raise AssertionError(name)


def _scattered(objects: list[Any], more: dict[str, Any]) -> list[Any]:
    n, rank = dist.get_world_size(), dist.get_rank()
    slots = [None, "kept"]
    ours.scatter_object_list(slots, objects if rank == n - 1 else None, n - 1, **more)
    return slots


def _moves_objects() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    objects = [_value(r) for r in range(n)]
    pair = ours.new_group(sorted({0, n - 1}))
    for more in ({}, {"weights_only": True}, {"weights_only": False, "group": dist.group.WORLD}):
        for name, want in (
            ("all_gather_object", objects),
            ("gather_object", objects if rank == n - 1 else []),
            ("broadcast_object_list", objects),
        ):
            got, result = _call(name, objects, more)
            assert str(got) == str(want), f"{name} {more}: {got}"
            assert result is None
        assert str(_scattered(objects, more)) == str([objects[rank], "kept"])
        if n > 1 and rank == 0:
            for use_batch in (False, True):
                ours.send_object_list(objects, n - 1, use_batch=use_batch, **more)
        if n > 1 and rank == n - 1:
            for use_batch in (False, True):
                slots: list[Any] = [None] * n
                assert ours.recv_object_list(slots, 0, use_batch=use_batch, **more) == 0
                assert str(slots) == str(objects)
    # From anyone, in a group whose ranks count otherwise.
    if n > 1 and rank == 0:
        ours.send_object_list([7], group=pair, group_dst=1, weights_only=True)
    elif n > 1 and rank == n - 1:
        one: list[Any] = [None]
        assert ours.recv_object_list(one, group=pair, weights_only=True) == 0
        assert one == [7]
    if rank in (0, n - 1):
        both: list[Any] = [None] * len({0, n - 1})
        ours.all_gather_object(both, rank, pair, weights_only=True)
        assert both == sorted({0, n - 1})
    else:
        with pytest.warns(UserWarning, match="all_gather_object"):
            ours.all_gather_object([], rank, pair, weights_only=True)
    ours.barrier()


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_objects_arrive(backend: str) -> None:
    run(1, _moves_objects, backend=backend)
    run(3, _moves_objects, backend=backend)


def _refuses_code() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    more = {"weights_only": True}
    objects = [1, Foreign()]  # of rank 1, where every rank has its own
    here = rf"\(rank {rank}/{n}, group '0'\)"
    text = rf"'tests.test_objects.Foreign' from rank 1 {here}"
    for name, receivers in (
        ("all_gather_object", (0, 1)),
        ("gather_object", (1,)),
        ("broadcast_object_list", (0,)),
        ("scatter_object_list", (1,)),
    ):
        if rank in receivers:
            with pytest.raises(pickle.UnpicklingError, match=f"{name}: .*weights_only.*{text}"):
                _call(name, objects, more)
        else:
            _call(name, objects, more)
    if rank == 1:
        ours.send_object_list(objects, 0, weights_only=True)
    else:
        with pytest.raises(pickle.UnpicklingError, match=f"recv_object_list: .*{text}"):
            ours.recv_object_list([None, None], 1, weights_only=True)
    assert Foreign.read == 0
    # The group is as it was, and without the keyword torch's pickles are read.
    got: list[Any] = [None, None]
    ours.all_gather_object(got, Foreign())
    assert Foreign.read == 2
    with torch.serialization.safe_globals([Foreign]):
        ours.all_gather_object(got, Foreign(), weights_only=True)
    assert Foreign.read == 4
    # A pickle of torch's own is no more read than anything else. Not both ways at once: the sizes
    # and the bytes travel in the same calls.
    if rank == 1:
        dist.send_object_list([Foreign()], 0)
    else:
        with pytest.raises(pickle.UnpicklingError, match="recv_object_list: "):
            ours.recv_object_list([None], 1, weights_only=True)
    assert Foreign.read == 4
    Foreign.read = 0


def test_weights_only_refuses_code_on_the_rank_that_receives_it() -> None:
    run(2, _refuses_code)


def _bad_input() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    here = rf"\(rank {rank}/{n}, group '0'\)"
    for call, text in (
        (lambda: ours.all_gather_object([None], 1, weights_only=True), "one object per rank, 2"),
        (lambda: ours.gather_object(1, [0], weights_only=True), "gather_li"),
        (lambda: ours.broadcast_object_list([], 0, weights_only=True), "at least one object"),
        (lambda: ours.scatter_object_list([], [1, 2], 0, weights_only=True), "at least one obj"),
        (lambda: ours.send_object_list([], 0, weights_only=True), "at least one object"),
        (lambda: ours.recv_object_list([], 0, weights_only=True), "at least one object"),
        (lambda: ours.broadcast_object_list([1], n, weights_only=True), "src must be a rank"),
    ):
        with pytest.raises(ValueError, match=f"{text}.*{here}"):
            call()
    if rank == 0:
        with pytest.raises(ValueError, match="scatter_object_input_list must hold one"):
            ours.scatter_object_list([None], [1], 0, weights_only=True)


def test_bad_input_is_refused() -> None:
    run(2, _bad_input)


def _outside_graphs() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what Dynamo finds outside the graph
        _breaks_graphs()


def _breaks_graphs() -> None:
    rank = dist.get_rank()

    def gathers(x: torch.Tensor) -> torch.Tensor:
        objects: list[Any] = [None, None]
        ours.all_gather_object(objects, rank)
        return x + objects[1]

    text = "all_gather_object: must be called outside compiled code"
    with pytest.raises(Exception, match=text):
        torch.compile(gathers, backend="eager", fullgraph=True)(torch.ones(2))
    # Where a graph may end, it does.
    torch._dynamo.reset()
    assert torch.equal(
        torch.compile(gathers, backend="eager")(torch.ones(2)), torch.full((2,), 2.0)
    )

    def theirs(x: torch.Tensor) -> torch.Tensor:
        objects: list[Any] = [None, None]
        dist.all_gather_object(objects, rank)
        return x + objects[1]

    with torch_c10d_ext.installed():
        with pytest.raises(Exception, match=text):
            torch.compile(theirs, backend="eager", fullgraph=True)(torch.ones(2))
        torch._dynamo.reset()
        y = torch.compile(theirs, backend="eager")(torch.ones(2))
        assert torch.equal(y, torch.full((2,), 2.0))


def test_objects_stay_outside_graphs() -> None:
    run(2, _outside_graphs)
