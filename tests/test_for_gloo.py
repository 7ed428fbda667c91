"""shm in gloo's place: groups that say gloo are served by shm and look as before to everyone.

One file, for all of it turns one switch.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

import torch_c10d_ext
import torch_c10d_ext.distributed as ours
from tests.harness import run
from tools import develop
from torch_c10d_ext import _C, _for_gloo, backend_of, use_shm_for_gloo
from torch_c10d_ext.errors import InvalidArgument

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")
SWITCH = "TORCH_C10D_EXT_SHM_FOR_GLOO"
DISABLE = "TORCH_C10D_EXT_SHM_DISABLE"
TIMEOUT = dt.timedelta(seconds=20)

sizes = pytest.mark.parametrize("size", (1, 2, 3))


@contextlib.contextmanager
def switched(on: bool = True, /, **environment: str) -> Iterator[None]:
    """The switch thrown by a call, or by the variables alone."""
    old = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    if on:
        use_shm_for_gloo()
    try:
        yield
    finally:
        _for_gloo._asked = None
        _for_gloo._told.clear()
        for name, value in old.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class Log(logging.Handler):
    """What is logged meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self):  # type: ignore[no-untyped-def]
        logging.getLogger("torch_c10d_ext").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("torch_c10d_ext").removeHandler(self)


def total(group: Any = None) -> float:
    """The sum of 1, 2, 4, ... over the ranks of a group, by its backend."""
    x = torch.full((5,), 2.0 ** dist.get_rank(group))
    dist.all_reduce(x, group=group)
    return x[0].item()


def names_of(group: dist.ProcessGroup) -> dict[str, Any]:
    """What clients ask a group about its backend."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the function is to be deprecated
        default_device = c10d._get_pg_default_device(group)
    return {
        "get_backend": dist.get_backend(group),
        "config": dist.get_backend_config(group),
        "devices": sorted(map(str, group._device_types)),
        "object device": str(default_device),
        "objects": str(c10d._get_object_coll_device(group)),
        "timeout": group._get_backend(CPU).options._timeout,
        "options": type(group._get_backend(CPU).options.global_ranks_in_group),
    }


# --- names, and what serves -----------------------------------------------------------------------


def _calls_itself_gloo() -> None:
    n = dist.get_world_size()
    for backend in ("gloo", "cpu:gloo", "GLOO", None):
        plain = dist.new_group(backend=backend, timeout=TIMEOUT)
        with switched():
            served = dist.new_group(backend=backend, timeout=TIMEOUT)
        assert names_of(served) == names_of(plain), backend
        assert (backend_of(plain), backend_of(served)) == ("gloo", "shm"), backend
        assert isinstance(served._get_backend(CPU), _C.ShmBackend)
        assert total(served) == total(plain) == 2**n - 1
        for group in (plain, served):
            dist.destroy_process_group(group)


@sizes
def test_calls_itself_gloo(size: int) -> None:
    run(size, _calls_itself_gloo)


def _leaves_other_devices_alone() -> None:
    def create(*args: Any) -> Any:
        return dist.ProcessGroupGloo(*args)

    if "plugged" not in dist.Backend.backend_list:
        dist.Backend.register_backend("plugged", create, devices=["cuda"])
    with switched():
        group = dist.new_group(backend="cpu:gloo,cuda:plugged")
        others = dist.new_group(backend="cuda:plugged")
    assert dist.get_backend(group) == dist.get_backend_config(group) == "cpu:gloo,cuda:plugged"
    assert (backend_of(group), backend_of(group, "cuda")) == ("shm", "gloo")
    assert group._get_backend(CPU) is not group._get_backend(torch.device("cuda"))
    assert backend_of(others) == "gloo"
    assert total(group) == 3
    DDP(nn.Linear(2, 2), process_group=group)(torch.ones(1, 2)).sum().backward()
    for made in (group, others):
        dist.destroy_process_group(made)


def test_leaves_other_devices_alone() -> None:
    run(2, _leaves_other_devices_alone)


def _does_what_gloo_alone_does() -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    with switched():
        group = dist.new_group(backend="gloo", timeout=TIMEOUT)
    dist.monitored_barrier(group)
    objects: list[Any] = [None] * n
    dist.all_gather_object(objects, {"rank": rank}, group=group)
    assert objects == [{"rank": r} for r in range(n)]
    c10d._set_pg_timeout(dt.timedelta(seconds=7), group)
    assert group._get_backend(CPU).options._timeout == dt.timedelta(seconds=7)
    plain = dist.new_group(backend="gloo", timeout=TIMEOUT)
    c10d._set_pg_timeout(dt.timedelta(seconds=8), plain)
    assert plain._get_backend(CPU).options._timeout == dt.timedelta(seconds=8)
    # int16 is what gloo cannot do.
    x = torch.arange(4, dtype=torch.int16) + rank
    dist.all_reduce(x, group=group)
    assert x.tolist() == [n * i + n * (n - 1) // 2 for i in range(4)]
    if rank == 0:
        with pytest.raises(ValueError, match="must be from 0 to 292000 years"):
            c10d._set_pg_timeout(dt.timedelta(seconds=-1), group)
    for made in (group, plain):
        dist.destroy_process_group(made)


@sizes
def test_does_what_gloo_alone_does(size: int) -> None:
    run(size, _does_what_gloo_alone_does)


def _serves_groups_of_every_kind() -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    with switched():
        part = dist.new_group([0, n - 1], backend="gloo")
        local = dist.new_group([rank], backend="gloo", use_local_synchronization=True)
        own, every = dist.new_subgroups(1)
        mesh = init_device_mesh("cpu", (n, 1), mesh_dim_names=("data", "model"))
        whole = dist.new_group(backend="gloo")
        split = ours.split_group(whole, [list(range(n - 1)), [n - 1]])
    if rank in (0, n - 1):
        assert (backend_of(part), dist.get_backend(part)) == ("shm", "gloo")
        assert total(part) == 2 ** len({0, n - 1}) - 1
    else:
        assert part is dist.GroupMember.NON_GROUP_MEMBER
    for group in (local, own, mesh.get_group("model"), whole, split):
        assert (backend_of(group), dist.get_backend(group)) == ("shm", "gloo")
    assert backend_of(mesh["model"]) == backend_of((mesh, 1)) == "shm"
    assert total(split) == 2 ** (n - 1 if rank < n - 1 else 1) - 1
    smaller = None
    if rank < n - 1:
        smaller = ours.shrink_group([n - 1], group=whole)
        assert backend_of(smaller) == "shm"
        assert total(smaller) == 2 ** (n - 1) - 1
    assert len(every) == n
    for group in (part, local, own, split, smaller):
        if isinstance(group, dist.ProcessGroup):
            dist.destroy_process_group(group)


@pytest.mark.parametrize("size", (2, 3))
def test_serves_groups_of_every_kind(size: int) -> None:
    run(size, _serves_groups_of_every_kind)


def _is_taken_back() -> None:
    with switched():
        first = dist.new_group(backend="gloo")
        use_shm_for_gloo(False)
        second = dist.new_group(backend="gloo")
    with switched(False, **{SWITCH: "1"}):
        third = dist.new_group(backend="gloo")
        use_shm_for_gloo(False)
        fourth = dist.new_group(backend="gloo")
    groups = (first, second, third, fourth)
    assert [backend_of(group) for group in groups] == ["shm", "gloo", "shm", "gloo"]
    assert type(second._get_backend(CPU)) is dist.ProcessGroupGloo
    for group in groups:
        assert total(group) == 3
        dist.destroy_process_group(group)


def test_is_taken_back() -> None:
    run(2, _is_taken_back)


def _works_in_detail_mode() -> None:
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        with switched():
            group = dist.new_group(backend="gloo")
    finally:
        dist.set_debug_level(before)
    assert type(group._get_backend(CPU)).__name__ == "_ProcessGroupWrapper"
    assert (backend_of(group), dist.get_backend(group)) == ("shm", "gloo")
    assert total(group) == 3
    dist.destroy_process_group(group)


def test_works_in_detail_mode() -> None:
    run(2, _works_in_detail_mode)


def _names_the_backend_in_ddps_log(backend: str) -> None:
    with switched(backend == "gloo"):
        group = dist.new_group(backend=backend)
    ddp = DDP(nn.Linear(2, 2), process_group=group)
    ddp(torch.ones(1, 2)).sum().backward()
    assert ddp._get_ddp_logging_data()["backend_name"] == backend == dist.get_backend(group)
    dist.destroy_process_group(group)


@pytest.mark.parametrize("backend", ("gloo", "shm"))
def test_names_the_backend_in_ddps_log(backend: str) -> None:
    run(2, _names_the_backend_in_ddps_log, backend)


def _removes_ddps_hooks(backend: str) -> None:
    with switched(backend == "gloo"):
        group = dist.new_group(backend=backend)
    torch.manual_seed(0)
    ddp = DDP(nn.Linear(2, 1), process_group=group)
    x = torch.full((1, 2), float(dist.get_rank()))
    ddp(x).sum().backward()
    assert ddp.module.weight.grad.tolist() == [[0.5, 0.5]]  # the mean over the ranks
    assert ddp._get_ddp_logging_data()["num_parameter_tensors"] == 2
    ddp._remove_autograd_hooks()
    ddp.zero_grad()
    ddp.module(x).sum().backward()
    assert torch.equal(ddp.module.weight.grad, x)
    dist.destroy_process_group(group)


@pytest.mark.parametrize("backend", ("gloo", "shm"))
def test_removes_ddps_hooks(backend: str) -> None:
    run(2, _removes_ddps_hooks, backend)


def _needs_an_accelerator_on_gloo_too() -> list[list[str]]:
    from torch.distributed.optim import _apply_optimizer_in_backward
    from torch.nn.parallel.distributed import _MixedPrecision

    def in_mixed_precision(group: Any) -> None:
        half = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        DDP(nn.Linear(2, 2), process_group=group, mixed_precision=half)(torch.ones(1, 2))

    def optimizer_in_backward(group: Any) -> None:
        ddp = DDP(nn.Linear(2, 2), process_group=group)
        _apply_optimizer_in_backward(torch.optim.SGD, ddp.parameters(), {"lr": 0.1})
        ddp(torch.ones(1, 2)).sum().backward()

    said = []
    for backend in ("gloo", "shm"):
        group = dist.new_group(backend=backend)
        texts = []
        for feature in (in_mixed_precision, optimizer_in_backward):
            with pytest.raises(RuntimeError) as caught:
                feature(group)
            texts.append(str(caught.value).splitlines()[0])
        said.append(texts)
        dist.destroy_process_group(group)
    return said


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_needs_an_accelerator_on_gloo_too() -> None:
    """DDP's own mixed precision and its optimizer in the backward pass, in torch 2.13 on CPUs."""
    for gloo, shm in run(1, _needs_an_accelerator_on_gloo_too):
        assert gloo == shm


def _gives_groups_a_default_backend() -> None:
    for backend, name in (("cpu:gloo", "gloo"), ("cpu:shm", "custom")):
        group = dist.new_group(backend=backend)
        assert group._get_backend_name() == name
        assert not group._has_hooks()
        dist.destroy_process_group(group)


def test_gives_groups_a_default_backend(capfd: pytest.CaptureFixture[str]) -> None:
    run(2, _gives_groups_a_default_backend)


# --- ranks that do not agree ----------------------------------------------------------------------


def _uses_gloo_where_a_rank_has_no_switch(without: list[int]) -> list[str]:
    with Log() as log, switched(dist.get_rank() not in without):
        groups = [dist.new_group(backend="gloo", timeout=TIMEOUT) for _ in range(2)]
    for group in groups:
        assert backend_of(group) == "gloo"
        assert type(group._get_backend(CPU)) is dist.ProcessGroupGloo
        assert total(group) == 2 ** dist.get_world_size() - 1
        dist.destroy_process_group(group)
    return log.lines


@pytest.mark.parametrize(("size", "without"), ((2, [0]), (2, [1]), (3, [0, 2])))
def test_uses_gloo_where_a_rank_has_no_switch(size: int, without: list[int]) -> None:
    said = run(size, _uses_gloo_where_a_rank_has_no_switch, without)
    teller = min(set(range(size)) - set(without))
    assert [len(lines) for lines in said] == [int(rank == teller) for rank in range(size)]
    ranks = f"on rank{'s' if len(without) > 1 else ''} {', '.join(map(str, without))}"
    assert ranks in said[teller][0]
    assert SWITCH in said[teller][0]


def _refuses_a_switch_without_meaning(odd: int) -> str:
    here = dist.get_rank() == odd
    with switched(not here, **{SWITCH: "yes" if here else ""}):
        with pytest.raises(InvalidArgument) as caught:
            dist.new_group(backend="gloo", timeout=TIMEOUT)
        # Groups of another backend are none of its business.
        group = dist.new_group(backend="shm", timeout=TIMEOUT)
        assert total(group) == 2 ** dist.get_world_size() - 1
    dist.destroy_process_group(group)
    return str(caught.value)


@pytest.mark.parametrize(("size", "odd"), ((1, 0), (2, 1), (3, 0)))
def test_refuses_a_switch_without_meaning(size: int, odd: int) -> None:
    for rank, said in enumerate(run(size, _refuses_a_switch_without_meaning, odd)):
        assert f"{SWITCH}: must be 0 or 1, got 'yes' on rank {odd} (rank {rank}/{size}, " in said


def _uses_gloo_where_memory_cannot_be_shared(why: str) -> list[str]:
    from torch_c10d_ext import _backends

    _backends._told.clear()
    is_odd = dist.get_rank() == 1
    odd = {DISABLE: "1"} if is_odd and why == "disabled" else {}
    build = "2 (c0ffee)" if is_odd and why == "another build" else "1 (facade)"
    with (
        Log() as log,
        switched(**odd),
        mock.patch.object(_backends, "own_build", return_value=build),
    ):
        groups = [dist.new_group(backend="gloo", timeout=TIMEOUT) for _ in range(2)]
    for group in groups:
        # gloo itself, not shm's collectives over it.
        assert type(group._get_backend(CPU)) is dist.ProcessGroupGloo
        assert (backend_of(group), dist.get_backend(group)) == ("gloo", "gloo")
        assert group._get_backend(CPU).options.global_ranks_in_group == [0, 1]
        assert group._get_backend(CPU).options._timeout == TIMEOUT
        assert total(group) == 3
        dist.destroy_process_group(group)
    return log.lines


@pytest.mark.parametrize(
    ("why", "text"),
    [
        ("disabled", f"rank 1: {DISABLE}=1"),
        ("another build", "rank 1: runs the build 2 (c0ffee), rank 0 1 (facade)"),
    ],
)
def test_uses_gloo_where_memory_cannot_be_shared(why: str, text: str) -> None:
    said = run(2, _uses_gloo_where_memory_cannot_be_shared, why)
    assert [len(lines) for lines in said] == [1, 0]
    assert text in said[0][0]


def _is_forbidden_by_the_environment() -> list[str]:
    with Log() as log, switched(**{SWITCH: "0"}):
        groups = [dist.new_group(backend="gloo") for _ in range(2)]
    assert [backend_of(group) for group in groups] == ["gloo", "gloo"]
    for group in groups:
        dist.destroy_process_group(group)
    return log.lines


def test_is_forbidden_by_the_environment() -> None:
    for lines in run(2, _is_forbidden_by_the_environment):
        assert len(lines) == 1
        assert f"{SWITCH}=0 forbids it" in lines[0]


def _names_who_does_not_come() -> None:
    if dist.get_rank() == 0:
        with switched(), pytest.raises(dist.DistBackendError) as caught:
            dist.new_group([0, 1], backend="gloo", timeout=dt.timedelta(seconds=0.3))
        assert "got no rank 1 within 0.3 s (rank 0/2, group '" in str(caught.value)
    else:
        # torch's count of groups, which names the next one, is the same on all ranks.
        c10d._world.group_count += 1
    dist.barrier()


def test_names_who_does_not_come() -> None:
    run(2, _names_who_does_not_come)


def test_rejects_other_types() -> None:
    with pytest.raises(TypeError, match="enabled must be True or False, got str"):
        use_shm_for_gloo("yes")  # type: ignore[arg-type]
    assert _for_gloo._asked is None


def _says_what_serves_a_group() -> None:
    assert backend_of() == backend_of(dist.group.WORLD) == "gloo"
    assert backend_of(dist.group.WORLD.group_name, "cpu") == "gloo"
    with pytest.raises(InvalidArgument, match=r"must be one that the group serves, cpu, cuda, got"):
        backend_of(device="meta")
    with pytest.raises(InvalidArgument, match="this rank must be in the group"):
        backend_of(dist.GroupMember.NON_GROUP_MEMBER)
    os.environ[DISABLE] = "1"
    try:
        fallen = dist.new_group(backend="shm")
    finally:
        del os.environ[DISABLE]
    assert (backend_of(fallen), dist.get_backend(fallen)) == ("gloo", "shm")
    dist.destroy_process_group(fallen)


def test_says_what_serves_a_group() -> None:
    run(2, _says_what_serves_a_group)


# --- a program that has never heard of this package -----------------------------------------------


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A search path on which the package is installed as `make build` does it."""
    site = tmp_path_factory.mktemp("site")
    develop.install(site)
    return os.pathsep.join([str(site), str(ROOT)])


def program(text: str, path: str, tmp_path: Path, **environment: str) -> Any:
    """What a fresh interpreter says at its end, in JSON."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("TORCH_")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", text],
        cwd=tmp_path,
        env={**clean, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr == ""
    return json.loads(done.stdout)


UNMODIFIED = """
import json, sys
import torch, torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
def loaded():
    return sorted(m for m in sys.modules if m.split(".")[0].startswith("torch_c10d_ext"))
said = {"at import": loaded(), "available": dist.is_backend_available("shm"),
        "plug-ins": list(dist.Backend._plugins)}
store = dist.HashStore()
try:
    for backend in BACKENDS:
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        x = torch.ones(2)
        dist.all_reduce(x)
        served = dist.group.WORLD._get_backend(torch.device("cpu")).name()
        said[str(backend)] = [dist.get_backend(), served, bool(loaded()[1:])]
        dist.destroy_process_group()
except Exception as error:
    said["error"] = f"{type(error).__name__}: {error}"
print(json.dumps(said))
"""


def test_is_known_at_import_of_torch(installed: str, tmp_path: Path) -> None:
    text = UNMODIFIED.replace("BACKENDS", '["gloo", "cpu:gloo", "shm", "cpu:shm", None]')
    said = program(text, installed, tmp_path)
    assert said == {
        "at import": ["torch_c10d_ext_autoload"],
        "available": True,
        "plug-ins": [],
        # The extension is loaded with the first group that needs it.
        "gloo": ["gloo", "gloo", False],
        "cpu:gloo": ["cpu:gloo", "gloo", False],
        "shm": ["shm", "shm", True],
        "cpu:shm": ["cpu:shm", "shm", True],
        "None": ["undefined", "gloo", True],
    }


def test_serves_programs_that_are_not_modified(installed: str, tmp_path: Path) -> None:
    # The same store and names of groups again: what earlier groups have left there is old.
    text = UNMODIFIED.replace("BACKENDS", '["gloo", None, "cpu:gloo", "gloo"]')
    said = program(text, installed, tmp_path, **{SWITCH: "1"})
    assert said["at import"] == ["torch_c10d_ext_autoload"]
    assert said["gloo"] == ["gloo", "shm", True]
    assert said["None"] == ["undefined", "shm", True]
    assert said["cpu:gloo"] == ["cpu:gloo", "shm", True]


def test_autoload_can_be_turned_off(installed: str, tmp_path: Path) -> None:
    text = UNMODIFIED.replace("BACKENDS", '["gloo", "cpu:shm"]')
    off = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", SWITCH: "1"}
    said = program(text, installed, tmp_path, **off)
    assert (said["at import"], said["available"]) == ([], False)
    assert said["gloo"] == ["gloo", "gloo", False]
    assert "SHM" in said["error"]
    # Then the package's own import does the same.
    said = program("import torch_c10d_ext\n" + text, installed, tmp_path, **off)
    assert said["gloo"] == ["gloo", "shm", True]
    assert said["cpu:shm"] == ["cpu:shm", "shm", True]


# As much of accelerate as the entry point touches.
STATE = """
class PartialState:
    def _prepare_backend(self, cpu=False, sagemaker_dp=False, backend=None):
        if not cpu:
            return "nccl", "MULTI_GPU"
        if backend not in (None, "mpi", "gloo", "shm"):
            raise AssertionError(backend)
        return ("mpi" if backend == "mpi" else "gloo"), "MULTI_CPU"
"""

ASK = """
import json, sys
import torch
before = len(sys.meta_path)
from importlib.util import find_spec
assert find_spec("accelerate.state").origin  # to ask is not to import
import accelerate.state
import accelerate.state as again
ask = again.PartialState()._prepare_backend
print(json.dumps({
    "gone": before - len(sys.meta_path),
    "file": accelerate.state.__spec__.origin == accelerate.state.__file__,
    "answers": [ask(True, False, name) for name in ("shm", "gloo", None, "mpi", "cpu:shm")],
    "keywords": ask(cpu=True, backend="shm"),
    "elsewhere": ask(False, False, "shm"),
    "loaded": "torch_c10d_ext" in sys.modules,
}))
"""


def test_accelerate_takes_the_name(installed: str, tmp_path: Path) -> None:
    package = tmp_path / "accelerate"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "state.py").write_text(STATE)
    said = program(ASK, os.pathsep.join([installed, str(tmp_path)]), tmp_path)
    assert said == {
        "gone": 1,
        "file": True,
        "answers": [[n, "MULTI_CPU"] for n in ("shm", "gloo", "gloo", "mpi", "cpu:shm")],
        "keywords": ["shm", "MULTI_CPU"],
        "elsewhere": ["nccl", "MULTI_GPU"],
        "loaded": False,
    }


def _meets_again_at_the_same_store(path: str) -> list[str]:
    """Default groups of one name, as of a program that initializes again, on another store."""
    old = c10d._world.default_pg
    served = []
    store = dist.FileStore(path, 2)
    for on in (False, True, True):
        with switched(on):
            group, _ = c10d._new_process_group_helper(
                2, dist.get_rank(), [0, 1], "gloo", store, "again", timeout=TIMEOUT
            )
            c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
        served.append(backend_of(group))
        assert total(group) == 3
        dist.barrier()
        dist.destroy_process_group(group)
    assert c10d._world.default_pg is old
    return served


def test_meets_again_at_the_same_store(tmp_path: Path) -> None:
    served = ["gloo", "shm", "shm"]
    assert run(2, _meets_again_at_the_same_store, str(tmp_path / "store")) == [served] * 2


def test_package_names_are_documented() -> None:
    text = (ROOT / "docs" / "clients.md").read_text()
    for name in ("use_shm_for_gloo", "backend_of", SWITCH, "torch_c10d_ext.run"):
        assert name in text
    assert {"use_shm_for_gloo", "backend_of"} <= set(torch_c10d_ext.__all__)
