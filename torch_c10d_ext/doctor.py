"""What a bug report needs, and what would make this package fast here.

``python -m torch_c10d_ext.doctor`` prints the versions and the machine, then one line for each
thing that it looked at, with the command that mends what is wrong, and at last what an all_reduce
of 8 B takes between two processes on shm and on gloo. It exits with 1 where shm does not work.
"""

from __future__ import annotations

import argparse
import array
import ctypes
import fcntl
import mmap
import os
import platform
import re
import resource
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

import torch_c10d_ext
from torch_c10d_ext import _C, _backends
from torch_c10d_ext._built_with import TORCH_VERSION
from torch_c10d_ext._meeting import own_build
from torch_c10d_ext.run import is_entry_point_installed
from torch_c10d_ext_autoload import SHM, SWITCH

_DISABLE = "TORCH_C10D_EXT_SHM_DISABLE"
_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
# Below these a line says so.
_MIN_DESCRIPTORS = 4096
_MIN_KERNEL = (5, 16)
# Of whole groups on this machine, for the memory that they take.
_GROUPS = 8
_MEASURE_DEADLINE = 120.0


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at: "ok", "slow" (it works, but) or "broken", and the remedy."""

    verdict: str
    what: str
    fix: str = ""


@dataclass(frozen=True)
class Machine:
    """What the findings are derived from."""

    cores: int = 1
    cpu_quota: float | None = None  # in cores, of the control group
    threads: int = 1  # torch's, in one process
    memory: int = 1 << 34  # bytes available
    descriptors: int = 1 << 16
    kernel: tuple[int, int] = (6, 1)
    huge_pages: str = "madvise"
    seccomp: bool = False
    cannot_share: str = ""  # why two processes cannot share memory
    entry_point: bool = True
    torch: str = TORCH_VERSION
    built_with: str = TORCH_VERSION
    environment: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def here() -> Machine:
        """This one."""
        return Machine(
            cores=len(os.sched_getaffinity(0)),
            cpu_quota=_cpu_quota(),
            threads=torch.get_num_threads(),
            memory=_available_memory(),
            descriptors=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            kernel=_kernel(),
            huge_pages=_chosen(_read("/sys/kernel/mm/transparent_hugepage/enabled")),
            seccomp=bool(re.search(r"^Seccomp:\s*[12]", _read("/proc/self/status"), re.MULTILINE)),
            cannot_share=_cannot_share(),
            entry_point=is_entry_point_installed(),
            torch=torch.__version__,
            environment=dict(os.environ),
        )


def findings(machine: Machine) -> Iterator[Finding]:
    """What to tell of a machine, the same on every call."""
    same = machine.torch == machine.built_with
    yield Finding(
        "ok" if same else "slow",
        f"torch {machine.torch}, built with {machine.built_with}",
        "" if same else "pip install --no-build-isolation --force-reinstall .",
    )
    yield from _of_sharing(machine)
    yield from _of_settings(machine)
    yield from _of_speed(machine)


def _of_sharing(machine: Machine) -> Iterator[Finding]:
    if not machine.cannot_share:
        yield Finding("ok", "processes share memory (memfd_create, sealed, sent over a socket)")
        return
    fix = "run on Linux 3.17 or later, outside of a sandbox that forbids memfd_create"
    if machine.seccomp:
        fix = "docker run --security-opt seccomp=unconfined ...  # or allow what it names"
    yield Finding(
        "broken", f"processes cannot share memory: {machine.cannot_share}; groups use gloo", fix
    )


def _of_settings(machine: Machine) -> Iterator[Finding]:
    environment = machine.environment
    if not machine.entry_point:
        yield Finding(
            "broken",
            "`import torch` does not know this package: its entry point is not installed",
            "make build  # or: pip install --no-build-isolation .",
        )
    elif environment.get(_AUTOLOAD, "1") != "1":
        yield Finding(
            "broken",
            f"`import torch` does not know this package: {_AUTOLOAD}={environment[_AUTOLOAD]}",
            f"unset {_AUTOLOAD}",
        )
    else:
        yield Finding("ok", '`import torch` knows the backend "shm"')
    switch = environment.get(SWITCH, "")
    if switch not in ("", "0", "1"):
        yield Finding("broken", f"{SWITCH} must be 0 or 1, got {switch!r}", f"export {SWITCH}=1")
    elif switch == "1":
        yield Finding("ok", f"{SWITCH}=1: groups that say gloo are served by shm")
    else:
        yield Finding(
            "slow", "groups that say gloo, or nothing, stay on gloo", f"export {SWITCH}=1"
        )
    disabled = environment.get(_DISABLE, "")
    if disabled not in ("", "0"):
        yield Finding("broken", f"{_DISABLE}={disabled}: all groups use gloo", f"unset {_DISABLE}")
    else:
        try:
            settings = _backends.shm_settings(environment)
        except ValueError as error:
            name = str(error).partition(":")[0]
            yield Finding("broken", str(error), f"unset {name}")
            return
        needed = _C.shm_mapping_bytes(machine.cores, settings["arena"]) * _GROUPS
        enough = needed <= machine.memory / 2
        yield Finding(
            "ok" if enough else "slow",
            f"{_GROUPS} groups of {machine.cores} ranks take {needed >> 20} MiB of "
            f"{machine.memory >> 20} MiB available",
            "" if enough else f"export TORCH_C10D_EXT_SHM_ARENA={_C.SHM_MIN_ARENA}",
        )


def _of_speed(machine: Machine) -> Iterator[Finding]:
    usable = machine.cores if machine.cpu_quota is None else min(machine.cores, machine.cpu_quota)
    if machine.cpu_quota is not None and machine.cpu_quota < machine.cores:
        yield Finding(
            "slow",
            f"{machine.cores} cores, but the control group allows the time of "
            f"{machine.cpu_quota:g}: ranks are stopped while others wait for them",
            f"docker update --cpus {machine.cores} <container>",
        )
    else:
        yield Finding("ok", f"{machine.cores} cores for this process, a rank each")
    few = usable >= 2
    if not few:
        yield Finding("slow", "ranks share one core, and take turns", "taskset -c 0-1 ...")
    if machine.threads > 1 and "OMP_NUM_THREADS" not in machine.environment:
        yield Finding(
            "slow",
            f"each rank computes with {machine.threads} threads: more than cores with every "
            "further rank (torchrun sets 1)",
            "export OMP_NUM_THREADS=1",
        )
    enough = machine.descriptors >= _MIN_DESCRIPTORS
    yield Finding(
        "ok" if enough else "slow",
        f"{machine.descriptors} file descriptors"
        + ("" if enough else ": many groups of many ranks need more"),
        "" if enough else "ulimit -n 65536",
    )
    new = machine.kernel >= _MIN_KERNEL
    version = ".".join(map(str, machine.kernel))
    yield Finding(
        "ok" if new else "slow",
        f"Linux {version}"
        + ("" if new else ": that a rank was killed is noticed after 5 ms, not at once"),
        "" if new else "upgrade to Linux 5.16 or later",
    )
    used = machine.huge_pages in ("always", "madvise")
    yield Finding(
        "ok" if used else "slow",
        f"transparent huge pages: {machine.huge_pages or 'not there'}",
        "" if used else "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
    )


def facts() -> Iterator[tuple[str, str]]:
    """What a bug report needs."""
    yield "torch_c10d_ext", f"{own_build()}, {Path(torch_c10d_ext.__file__).parent}"
    yield "torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}"
    yield "built with", f"torch {TORCH_VERSION}, lazy tensors {'yes' if _C.has_lazy else 'no'}"
    yield (
        "backends",
        ", ".join(
            name for name in ("gloo", "nccl", "mpi", "ucc", SHM) if dist.is_backend_available(name)
        ),
    )
    yield "Python", f"{platform.python_version()} ({sys.executable})"
    yield "system", f"{platform.system()} {platform.release()} {platform.machine()}"
    yield "C library", " ".join(platform.libc_ver())
    yield "CPU", f"{_cpu()}, {os.cpu_count()} cores, {len(os.sched_getaffinity(0))} of them ours"
    yield "vectors", torch.backends.cpu.get_cpu_capability()
    yield "memory", f"{_available_memory() >> 20} MiB available"
    for name in sorted(os.environ):
        if name.startswith(("TORCH_C10D_EXT_", "TORCH_DISTRIBUTED_", "GLOO_", "NCCL_", "OMP_")):
            yield name, os.environ[name]


def main(args: Sequence[str] | None = None) -> int:
    """Prints it all; 1 where shm does not work here, otherwise 0."""
    parser = argparse.ArgumentParser(prog="torch_c10d_ext.doctor", description=__doc__)
    parser.add_argument("--no-measure", action="store_true", help="do not time an all_reduce")
    options = parser.parse_args(args)
    for name, value in facts():
        print(f"{name:15} {value}")
    print()
    found = list(findings(Machine.here()))
    for finding in found:
        print(f"{finding.verdict:6}  {finding.what}")
        if finding.fix:
            print(f"        -> {finding.fix}")
    if not options.no_measure:
        print()
        for line in _measured():
            print(line)
    return int(any(finding.verdict == "broken" for finding in found))


# --- Looking --------------------------------------------------------------------------------------


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _chosen(text: str) -> str:
    """Of "always [madvise] never"."""
    found = re.search(r"\[(\w+)\]", text)
    return found[1] if found else ""


def _cpu() -> str:
    found = re.search(r"^model name\s*:\s*(.*)$", _read("/proc/cpuinfo"), re.MULTILINE)
    return found[1] if found else platform.processor() or "unknown"


def _kernel() -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", platform.release())
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _available_memory() -> int:
    found = re.search(r"^MemAvailable:\s*(\d+) kB", _read("/proc/meminfo"), re.MULTILINE)
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    used = _read("/sys/fs/cgroup/memory.current").strip()
    available = int(found[1]) << 10 if found else 0
    if limit.isdigit() and used.isdigit():
        available = min(available, max(0, int(limit) - int(used)))
    return available


def _cpu_quota() -> float | None:
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").strip().partition(" ")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def _cannot_share() -> str:
    """What of sharing memory between processes is not allowed here; nothing where all is."""
    try:
        memory = os.memfd_create("torch_c10d_ext.doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        return f"memfd_create: {error.strerror}"
    try:
        os.posix_fallocate(memory, 0, mmap.PAGESIZE)
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        here, there = socket.socketpair(socket.AF_UNIX)
        with here, there:
            rights = array.array("i", [memory])
            here.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
            _, ancillary, _, _ = there.recvmsg(1, socket.CMSG_LEN(rights.itemsize))
            received = array.array("i", ancillary[0][2][: rights.itemsize])[0]
        with mmap.mmap(received, mmap.PAGESIZE) as mapping:
            mapping[0] = 1
        os.close(received)
    except (OSError, IndexError) as error:
        return f"a descriptor of sealed memory, sent over a socket: {error}"
    finally:
        os.close(memory)
    # What a rank sleeps in.
    word = ctypes.c_uint32(0)
    libc = ctypes.CDLL(None, use_errno=True)
    if platform.machine() == "x86_64" and libc.syscall(202, ctypes.byref(word), 1, 1, None) < 0:
        return f"futex: {os.strerror(ctypes.get_errno())}"
    return ""


# --- Measuring ------------------------------------------------------------------------------------

_RANK = """
import sys, time
import torch, torch.distributed as dist
import torch_c10d_ext
rank = int(sys.argv[1])
torch.set_num_threads(1)
store = dist.FileStore(sys.argv[2], 2)
dist.init_process_group("gloo", rank=rank, world_size=2, store=store)
groups = {"shm": dist.new_group(backend="shm"), "gloo": dist.group.WORLD}
x = torch.ones(2)
times = {name: [] for name in groups}
for _ in range(10):
    for name, group in groups.items():
        dist.barrier(group)
        start = time.perf_counter()
        for _ in range(50):
            dist.all_reduce(x, group=group)
        times[name].append((time.perf_counter() - start) / 50)
if rank == 0:
    for name, group in groups.items():
        took = sorted(times[name])[len(times[name]) // 2] * 1e6
        served = torch_c10d_ext.backend_of(group)
        print(f"{name:6}  {took:.1f} us for an all_reduce of 8 B between 2 processes"
              + ("" if served == name else f" (served by {served})"))
dist.barrier()
dist.destroy_process_group()
"""


def _measured() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="torch_c10d_ext-") as folder:
        yield from _measured_at(Path(folder, "store"))


def _measured_at(store: Path) -> Iterator[str]:
    environment = {**os.environ, SWITCH: "0"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK, str(rank), str(store)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=_MEASURE_DEADLINE) for rank in ranks]
    except subprocess.TimeoutExpired:
        yield f"broken  two processes did not measure it within {_MEASURE_DEADLINE:g} s"
        return
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for rank, (out, err) in zip(ranks, said, strict=True):
        if rank.returncode:
            yield f"broken  a process that measures failed:\n{err[-2000:]}"
            return
        yield from out.splitlines()


if __name__ == "__main__":
    sys.exit(main())
