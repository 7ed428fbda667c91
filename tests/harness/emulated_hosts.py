"""Hosts on one machine: namespaces with an Ethernet switch between them, for tests and benchmarks.

Each host has its own network, host name, process numbers, ``/dev/shm`` and boot id, so that neither
this package nor an MPI takes two of them for one. Needs root, ``ip``, ``unshare``, ``nsenter``,
``/dev/net/tun`` and a C++ compiler.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import signal
import subprocess
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

# The C++ compiler, as setup.py takes it.
COMPILER = os.environ.get("CXX", "g++")
DEADLINE = 30.0
# Set where a machine must have all that is needed: what is missing there is a failure.
REQUIRED = "TORCH_C10D_EXT_REQUIRE_NAMESPACES"
_MTU = "9000"
_SPACE = re.compile(r"c10dext(\d+)(try|h\d+)")  # the process that made it, and what for
# Whatever the machine is set to. Linux's default, cubic, cannot be set in a namespace, and differs
# from this on long links.
_CONGESTION = "net.ipv4.tcp_congestion_control=reno"

_INIT = """
hostname {name}
mount -t tmpfs none /dev/shm
echo {boot} > /dev/shm/.boot
mount --bind /dev/shm/.boot /proc/sys/kernel/random/boot_id
echo "127.0.0.1 localhost" > /dev/shm/.hosts
{hosts}
mount --bind /dev/shm/.hosts /etc/hosts
echo ready
exec cat > /dev/null
"""


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True, timeout=DEADLINE)


@functools.cache
def why_not() -> str:
    """What keeps this machine from emulating hosts; nothing: it can."""
    for tool in ("ip", "unshare", "nsenter", COMPILER):
        if shutil.which(tool) is None:
            return f"no `{tool}`"
    if not os.path.exists("/dev/net/tun"):
        return "no /dev/net/tun"
    name = f"c10dext{os.getpid()}try"
    try:
        _run("ip", "netns", "add", name)
        _run("ip", "netns", "exec", name, "unshare", "--uts", "--ipc", "--mount", "true")
    except subprocess.CalledProcessError as error:
        return f"no namespaces: {error.stderr.strip() or error}"
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True, timeout=20)
    return ""


class Hosts:
    """Some hosts that are there, and what was started on them."""

    def __init__(self, spaces: Sequence[str], inits: Sequence[int], switch: subprocess.Popen[str]):
        self._spaces = spaces
        self._inits = inits
        self._switch = switch
        self._started: list[subprocess.Popen[bytes]] = []

    def address(self, host: int) -> str:
        """Of a host, for the others."""
        return f"10.213.77.{host + 1}"

    def give_address(self, host: int, address: str) -> None:
        """One more, with its network: "10.214.0.1/24"."""
        _run("ip", "-n", self._spaces[host], "address", "add", address, "dev", "eth0")

    def take_address(self, host: int, address: str) -> None:
        """Undoes ``give_address``."""
        _run("ip", "-n", self._spaces[host], "address", "del", address, "dev", "eth0")

    def start(
        self,
        host: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: IO[bytes] | int,
    ) -> subprocess.Popen[bytes]:
        """A process on a host, which ends with the hosts."""
        # nsenter forks: the child is in the host's process numbers.
        words = ["nsenter", "-t", str(self._inits[host]), "-n", "-u", "-i", "-m", "-p", *command]
        process = subprocess.Popen(words, env=dict(environment), stdout=log, stderr=log)
        self._started.append(process)
        return process

    def first_process(self, host: int) -> int:
        """The number, on this machine, of a process that is there as long as a host is."""
        return self._inits[host]

    def signal(self, process: subprocess.Popen[bytes], number: signal.Signals) -> None:
        """To the process that was started on a host."""
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        for child in children:
            os.kill(int(child), number)

    def cut(self, host: int) -> None:
        """Nothing comes over a host's cable any more."""
        self._say(f"down {host}")

    def mend(self, host: int) -> None:
        """Undoes ``cut``."""
        self._say(f"up {host}")

    def part(self, host: int, other: int) -> None:
        """Nothing goes from one host to the other any more, nor back."""
        self._say(f"part {host} {other}")

    def lose(self, percent: float) -> None:
        """From now on so many frames are lost."""
        self._say(f"loss {percent}")

    def _say(self, line: str) -> None:
        assert self._switch.stdin is not None and self._switch.stdout is not None
        self._switch.stdin.write(line + "\n")
        self._switch.stdin.flush()
        self._switch.stdout.readline()

    def stop_all(self) -> None:
        """Ends what was started."""
        for process in self._started:
            if process.poll() is None:
                with contextlib.suppress(OSError):
                    self.signal(process, signal.SIGKILL)
                process.kill()
            process.wait(DEADLINE)


def _forget_the_dead() -> None:
    """Removes namespaces of processes that were killed; whatever ran there has ended with them."""
    spaces = Path("/run/netns")
    for name in os.listdir(spaces) if spaces.is_dir() else ():
        made = _SPACE.fullmatch(name)
        if made and not Path(f"/proc/{made[1]}").exists():
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _program(folder: Path) -> Path:
    source = Path(__file__).resolve().with_name("network.cpp")
    program = folder / "network"
    _run(COMPILER, "-O2", "-std=c++20", "-o", str(program), str(source))
    return program


@contextlib.contextmanager
def emulated_hosts(
    count: int, mbit: float = 0, delay_us: int = 0, loss: float = 0
) -> Iterator[Hosts]:
    """Hosts with a cable each to one switch. What runs there ends with this process.

    Args:
        mbit: rate of each cable, in Mbit/s, in each direction; 0: what the machine gives.
        delay_us: from one host to another, one way, in microseconds.
        loss: of frames, in percent.
    """
    names = [f"c10dext{os.getpid()}h{i}" for i in range(count)]
    inits: list[subprocess.Popen[str]] = []
    _forget_the_dead()
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.callback(
                subprocess.run, ["ip", "netns", "del", name], check=False, capture_output=True
            )
            _run("ip", "netns", "add", name)
        spaces = [f"/run/netns/{name}" for name in names]
        with tempfile.TemporaryDirectory(prefix="c10d_ext-") as folder:
            switch = _started(
                [str(_program(Path(folder))), str(mbit), str(delay_us), str(loss), *spaces], stack
            )
        lines = "\n".join(
            f"echo '10.213.77.{i + 1} host{i}' >> /dev/shm/.hosts" for i in range(count)
        )
        for i, name in enumerate(names):
            _run("ip", "-n", name, "address", "add", f"10.213.77.{i + 1}/24", "dev", "eth0")
            _run("ip", "-n", name, "link", "set", "eth0", "mtu", _MTU, "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "netns", "exec", name, "sysctl", "-qw", _CONGESTION)
            script = _INIT.format(name=f"host{i}", boot=uuid.uuid4(), hosts=lines)
            unshare = ["unshare", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child"]
            command = ["ip", "netns", "exec", name, *unshare, "--mount-proc", "sh", "-ec", script]
            inits.append(_started(command, stack))
        # `ip netns exec` becomes unshare, whose child is the first process of the host.
        firsts = [
            int(Path(f"/proc/{init.pid}/task/{init.pid}/children").read_text().split()[0])
            for init in inits
        ]
        hosts = Hosts(names, firsts, switch)
        stack.callback(hosts.stop_all)
        yield hosts


def _started(command: Sequence[str], stack: contextlib.ExitStack) -> subprocess.Popen[str]:
    """A program that says that it is ready, and ends with its input: when this process does."""
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    stack.callback(_end, process)
    assert process.stdout is not None
    if (line := process.stdout.readline()) != "ready\n":
        raise RuntimeError(f"{command[0]}: must say that it is ready, got {line!r} of {command}")
    return process


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait(DEADLINE)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
