"""Groups on hosts that are namespaces of one machine, with a network between them that can fail."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import hosts as bench
from tests.harness import emulated_hosts as emulated
from torch_c10d_ext import Link, Topology

ROOT = Path(__file__).resolve().parent.parent.parent
DEADLINE = 120.0
# Of random ones; as many as there is time for.
CALLS = int(os.environ.get("C10D_EXT_RANDOM_CALLS", "200"))


@pytest.fixture(autouse=True)
def _needs_hosts() -> None:
    reason = emulated.why_not()
    if reason and os.environ.get(emulated.REQUIRED) == "1":
        pytest.fail(f"{emulated.REQUIRED}=1, and this machine cannot emulate hosts: {reason}")
    if reason:
        pytest.skip(f"this machine cannot emulate hosts: {reason}")


class _Ranks:
    """Ranks on hosts, and what they say."""

    def __init__(
        self,
        hosts: emulated.Hosts,
        places: Sequence[int],
        scenario: str,
        folder: Path,
        **settings: str,
    ) -> None:
        self.hosts, self.places = hosts, places
        self.logs = [folder / f"{rank}.log" for rank in range(len(places))]
        self.processes: list[subprocess.Popen[bytes]] = []
        for rank, host in enumerate(places):
            environment = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
                "OMP_NUM_THREADS": "1",
                "MASTER_ADDR": hosts.address(places[0]),
                "MASTER_PORT": "29500",
                "WORLD_SIZE": str(len(places)),
                "RANK": str(rank),
                "GLOO_SOCKET_IFNAME": "eth0",
                **settings,
            }
            with open(self.logs[rank], "wb") as log:
                command = [sys.executable, str(ROOT / "tests/hosts/rank.py"), scenario]
                self.processes.append(hosts.start(host, command, environment, log.fileno()))

    def text(self) -> str:
        return "\n".join(log.read_text() for log in self.logs)

    def await_ready(self) -> None:
        for rank in range(len(self.places)):
            self.await_word(rank, '"ready"')

    def await_word(self, rank: int, word: str) -> None:
        until = time.monotonic() + DEADLINE
        while word not in self.logs[rank].read_text():
            assert time.monotonic() < until and self.processes[rank].poll() is None, self.text()
            time.sleep(0.02)

    def kill(self, victim: int) -> dict[int, Any]:
        """Ends a rank; what the others say, all of which name it."""
        killed = time.time()
        self.hosts.signal(self.processes[victim], signal.SIGKILL)
        others = set(range(len(self.places))) - {victim}
        said = {rank: self.result(rank) for rank in others}
        for of in said.values():
            assert of["kind"] == "RankLost" and of["ranks"] == [victim], of
        last = max(of["at"] for of in said.values()) - killed
        print(f"killed rank {victim}: known after {last * 1000:.0f} ms")
        return said

    def result(self, rank: int, deadline: float = DEADLINE) -> Any:
        code = self.processes[rank].wait(deadline)
        said = self.logs[rank].read_text()
        assert code == 0, self.text()
        return json.loads(next(line for line in reversed(said.splitlines()) if line[:1] == "{"))


@contextlib.contextmanager
def _ranks(
    places: Sequence[int],
    scenario: str,
    folder: Path,
    loss: float = 0,
    **settings: str,
) -> Iterator[_Ranks]:
    with emulated.emulated_hosts(max(places) + 1, loss=loss) as hosts:
        yield _Ranks(hosts, places, scenario, folder, **settings)


@pytest.mark.parametrize("engine", ["gloo", "mpi"])
@pytest.mark.parametrize("places", [(0, 0, 1, 1), (0, 1, 1, 1), (0, 1, 2, 0, 1, 2)], ids=str)
def test_collectives_and_groups(places: tuple[int, ...], engine: str, tmp_path: Path) -> None:
    settings = {} if engine == "gloo" else {"TORCH_C10D_EXT_SHM_BETWEEN_HOSTS": engine}
    with _ranks(places, "collectives", tmp_path, 0, **settings) as ranks:
        hosts = [[r for r, at in enumerate(places) if at == h] for h in range(max(places) + 1)]
        for rank, at in enumerate(places):
            said = ranks.result(rank)
            assert said["backend"] == f"shm+{engine}"
            assert said["hosts"] == hosts
            # One rank of each host, and those of this one.
            assert said["groups"] == [engine] * (rank == hosts[at][0]) + ["shm"]


@pytest.mark.parametrize("places", [(0, 0, 1, 1), (0, 1, 1, 1), (0, 1, 2, 0, 1, 2)], ids=str)
def test_parts_for_each_rank_travel_with_the_calls(places: tuple[int, ...], tmp_path: Path) -> None:
    """Up to a limit, beyond which the engine is asked."""
    with _ranks(places, "exchanges", tmp_path) as ranks:
        said = [ranks.result(rank)["asked"] for rank in range(len(places))]
    for name in said[0]:
        assert [of[name][0] for of in said] == [0] * len(places), name
        assert sum(of[name][1] for of in said) > 0, name


@pytest.mark.parametrize("places", [(0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1, 1)], ids=str)
def test_leaders_reduce_the_values_of_their_hosts(places: tuple[int, ...], tmp_path: Path) -> None:
    """The same bits whether they travel with the calls or not."""
    with _ranks(places, "reductions", tmp_path) as ranks:
        assert all(ranks.result(rank)["done"] for rank in range(len(places)))


@pytest.mark.parametrize("places", [(0, 0, 1, 1, 1), (0, 1, 2), (0, 1, 2, 0, 1, 2)], ids=str)
def test_messages(places: tuple[int, ...], tmp_path: Path) -> None:
    """Little ones go with what is said of them, by rank 0 or over a line of the two."""
    with _ranks(places, "messages", tmp_path) as ranks:
        said = [ranks.result(rank) for rank in range(len(places))]
    hosts = max(places) + 1
    for of in said:
        # With one rank on each host all is counted as gloo's.
        assert (of["asked"][0] == 0) == (hosts < len(places)) and of["asked"][1] > 0
    if hosts < len(places):
        assert [of["between"][:2] for of in said] == [[0, 0]] * len(said)
        assert sum(of["between"][2] for of in said) > 0
    texts = [text for of in said for text in of["failures"]]
    assert len(texts) == 3 * hosts
    late = "send: the message with tag 0 must be done within 0.5 s"
    assert texts.count(late) == hosts, texts


def test_what_a_rank_has_sent_arrives_though_it_ends(tmp_path: Path) -> None:
    """On a link that takes a while for it."""
    with emulated.emulated_hosts(2, mbit=5) as hosts:
        ranks = _Ranks(hosts, (0, 0, 1, 1), "sends_and_ends", tmp_path)
        ended = [ranks.result(rank)["ended"] for rank in range(4)]
    # It did not wait until they had it.
    assert ended[3] < min(ended[:2])


def test_an_abort_ends_a_message_on_its_way(tmp_path: Path) -> None:
    with emulated.emulated_hosts(2, mbit=5) as hosts:
        ranks = _Ranks(hosts, (0, 0, 1, 1), "aborts_what_is_on_its_way", tmp_path)
        said = [ranks.result(rank)["texts"] for rank in range(4)]
    how = "the group must be alive, got an abort by rank 0"
    assert said == [[f"GroupClosed: send: {how}"] * 3, [], [], [f"GroupClosed: recv: {how}"] * 3]


@pytest.mark.parametrize("places", [(0, 0, 1, 1), (0, 1, 1, 1), (0, 1, 2, 0, 1, 2)], ids=str)
def test_ops_keep_the_contract(places: tuple[int, ...], tmp_path: Path) -> None:
    """Of every form: values, layouts, gradients, errors, vmap, compiled code."""
    with _ranks(places, "contract", tmp_path) as ranks:
        said = [ranks.result(rank, 280) for rank in range(len(places))]
    for rank, of in enumerate(said):
        assert not of["failures"], (rank, of["failures"][:20])
        assert of["digests"] == said[0]["digests"]
        assert of["forms"] > 25 and of["checked"] > 1000


def test_users_of_groups_on_two_hosts(tmp_path: Path) -> None:
    """DDP, FSDP2 (on a mesh of two dimensions, too), DTensor and tensor parallel modules."""
    with _ranks((0, 0, 1, 1), "clients", tmp_path) as ranks:
        for rank in range(4):
            assert len(ranks.result(rank)["done"]) == 7


@pytest.mark.parametrize("victim", [0, 1, 3])
def test_a_killed_rank_is_named_with_its_host(victim: int, tmp_path: Path) -> None:
    with _ranks((0, 0, 1, 1), "until_it_fails", tmp_path) as ranks:
        ranks.await_ready()
        for rank, said in ranks.kill(victim).items():
            assert "gone)" in said["text"]
            if rank // 2 != victim // 2:
                assert f"on host{victim // 2}, gone)" in said["text"]


@pytest.mark.parametrize("flat", [False, True], ids=["hosts", "flat"])
@pytest.mark.parametrize("engine", ["gloo", "mpi"])
@pytest.mark.parametrize("victim", [0, 1, 3])
def test_a_rank_killed_in_a_large_all_reduce(
    victim: int, engine: str, flat: bool, tmp_path: Path
) -> None:
    """Others have more to send to it, which with MPICH would end them, and ranks wait for those."""
    settings = {"TORCH_C10D_EXT_SHM_BETWEEN_HOSTS": engine, "TEST_LINGER": "2"}
    if flat:
        settings["TORCH_C10D_EXT_SHM_DISABLE"] = "1"
    with _ranks((0, 0, 1, 1), "large_until_it_fails", tmp_path, 0, **settings) as ranks:
        ranks.await_ready()
        time.sleep(0.5)  # in the middle of one
        ranks.kill(victim)


@pytest.mark.parametrize("ends", [0, 1, 3])
def test_what_a_rank_had_done_when_it_ended_is_done(ends: int, tmp_path: Path) -> None:
    with _ranks((0, 0, 1, 1), "ends_after_a_large_one", tmp_path, TEST_ENDS=str(ends)) as ranks:
        for rank in {0, 1, 2, 3} - {ends}:
            said = ranks.result(rank)
            assert said["kind"] == "RankLost" and said["ranks"] == [ends], said
            assert said["calls"] == 3


@pytest.mark.parametrize("engine", ["gloo", "mpi"])
@pytest.mark.parametrize("victim", [3, 4, 5])
def test_a_rank_killed_in_a_broadcast_from_host_to_host(
    victim: int, engine: str, tmp_path: Path
) -> None:
    """The root, the one between hosts that passes it on, and the one that hears it last."""
    settings = {} if engine == "gloo" else {"TORCH_C10D_EXT_SHM_BETWEEN_HOSTS": engine}
    with _ranks((0, 1, 2, 0, 1, 2), "broadcasts_until_it_fails", tmp_path, 0, **settings) as ranks:
        ranks.await_ready()
        time.sleep(0.5)  # in the middle of one
        ranks.kill(victim)


@pytest.mark.parametrize("engine", ["gloo", "mpi"])
@pytest.mark.parametrize("places", [(0, 0, 1, 1), (0, 1, 2, 0, 1, 2)], ids=["2x2", "round 3x2"])
@pytest.mark.parametrize("victim", [0, 3])
def test_a_rank_killed_where_rails_have_messages(
    victim: int, places: tuple[int, ...], engine: str, tmp_path: Path
) -> None:
    settings = {} if engine == "gloo" else {"TORCH_C10D_EXT_SHM_BETWEEN_HOSTS": engine}
    with _ranks(places, "shares_until_it_fails", tmp_path, 0, **settings) as ranks:
        ranks.await_ready()
        time.sleep(0.5)  # in the middle of one
        ranks.kill(victim)


def test_a_link_that_is_down_is_found_by_the_heartbeat(tmp_path: Path) -> None:
    with _ranks((0, 0, 1, 1), "until_it_fails", tmp_path) as ranks:
        ranks.await_ready()
        cut = time.time()
        ranks.hosts.cut(1)
        times = []
        for rank in range(4):
            said = ranks.result(rank)
            there = [2, 3] if rank < 2 else [0]
            assert said["kind"] == "RankLost" and said["ranks"] == there, said
            assert f"on host{1 - rank // 2}, unreachable)" in said["text"]
            times.append(said["at"] - cut)
        print(f"link down: known after {max(times):.2f} s")


@pytest.mark.parametrize("scenario", ["until_it_fails", "large_until_it_fails"])
def test_a_link_between_two_hosts_is_down_and_rank_0_reaches_both(
    scenario: str, tmp_path: Path
) -> None:
    """Their leaders find it out, whatever is under way, and say so to rank 0."""
    with _ranks((0, 0, 1, 1, 2, 2), scenario, tmp_path) as ranks:
        ranks.await_ready()
        time.sleep(0.5)  # in the middle of one
        parted = time.time()
        ranks.hosts.part(1, 2)
        times = []
        for rank in range(6):
            said = ranks.result(rank)
            assert said["kind"] == "RankLost" and said["ranks"] == [4], said
            assert "on host2, unreachable)" in said["text"], said
            times.append(said["at"] - parted)
        print(f"link down: known after {max(times):.2f} s")


def test_a_host_that_is_stopped_is_named_at_the_timeout(tmp_path: Path) -> None:
    with _ranks((0, 0, 1, 1), "until_it_fails", tmp_path, TEST_TIMEOUT="4") as ranks:
        ranks.await_ready()
        for rank in (2, 3):
            ranks.hosts.signal(ranks.processes[rank], signal.SIGSTOP)
        for rank in (0, 1):
            said = ranks.result(rank)
            assert said["kind"] == "CollectiveTimeout", said
            assert said["ranks"] == [2, 3], said
            assert "on host1, silent)" in said["text"], said


def test_an_interrupt_ends_a_wait_that_asks_whom_it_waits_for(tmp_path: Path) -> None:
    """The wait is over time, and rank 0, which has seconds to answer, does not."""
    stopped, scenario = tmp_path / "stopped", "waits_for_one_that_stops"
    with _ranks((0, 1), scenario, tmp_path, TEST_STOPPED=str(stopped)) as ranks:
        ranks.await_ready()
        ranks.hosts.signal(ranks.processes[0], signal.SIGSTOP)
        stopped.touch()
        ranks.await_word(1, "waiting")
        time.sleep(1.5)
        ranks.hosts.signal(ranks.processes[1], signal.SIGINT)
        said = ranks.result(1)
        # Before rank 0 has had its time.
        assert said["kind"] == "KeyboardInterrupt" and 1 < said["after"] < 5, said


def test_messages_of_a_rank_that_is_stopped_name_it(tmp_path: Path) -> None:
    """Neither it nor who waits for it is on rank 0's host."""
    scenario = "messages_with_one_that_stops"
    with _ranks((0, 1, 2), scenario, tmp_path, TEST_TIMEOUT="4") as ranks:
        said = ranks.result(1)["said"]
        assert [(one["kind"], one["ranks"]) for one in said] == [("CollectiveTimeout", [2])] * 4
        for tag, one in enumerate(said):
            assert f"the message with tag {tag} must be done within 4 s" in one["text"], one
            assert "on host2, silent)" in one["text"], one
        assert ranks.result(0) == {"over": True}


@pytest.mark.parametrize(
    ("engine", "places"),
    [("gloo", (0, 1, 0, 1)), ("mpi", (0, 1, 0, 1)), ("gloo", (0, 1, 2, 0, 1, 2))],
    ids=["gloo", "mpi", "three hosts"],
)
def test_random_calls_over_a_network_that_loses_frames(
    engine: str, places: tuple[int, ...], tmp_path: Path
) -> None:
    settings = {"TEST_CALLS": str(CALLS), "TORCH_C10D_EXT_SHM_BETWEEN_HOSTS": engine}
    with _ranks(places, "random_calls", tmp_path, 1.0, **settings) as ranks:
        for rank in range(len(places)):
            assert ranks.result(rank, DEADLINE + 0.2 * CALLS) == {"done": CALLS}


def test_the_benchmarks_bound_is_that_of_the_model() -> None:
    """The link alone, without what ranks of a host do among themselves."""
    free = Link(latency=0, bandwidth=float("inf"))
    for hosts, here in ((2, 2), (4, 2), (4, 8)):
        topology = Topology(here, inside=free, between=Link(latency=1e-4, bandwidth=1e8))
        for collective, op in (
            ("all_gather", "all_gather_into_tensor"),
            ("reduce_scatter", "reduce_scatter_tensor"),
            ("all_to_all", "all_to_all_single"),
            ("broadcast", "broadcast"),
        ):
            times = topology.times(op, hosts * here, 1 << 24)
            bound = bench.bound(collective, 1 << 24, hosts, here, 1e8, 1e-4)
            # Behind the agreement, a round trip. A broadcast passes its last part on H - 2 times.
            last = (1 << 24) / 64 / 1e8
            passed_on = (hosts - 2) * last if collective == "broadcast" else 0
            assert times["rails"] - 2e-4 - passed_on == pytest.approx(bound)
        rails = topology.times("all_reduce", hosts * here, 1 << 24)["rails"]
        assert rails - 3e-4 == pytest.approx(
            bench.bound("all_reduce", 1 << 24, hosts, here, 1e8, 1e-4)
        )


JOIN = """
import datetime as dt, os, sys
import torch.distributed as dist
import torch_c10d_ext
try:
    dist.init_process_group("shm", timeout=dt.timedelta(seconds=8))
except Exception as error:
    print(str(error).splitlines()[0], flush=True)
os._exit(0)
"""


def test_a_rank_of_a_third_network_is_told_which_address_was_tried(tmp_path: Path) -> None:
    """It reaches the store, and not the network on which the others are."""
    with emulated.emulated_hosts(3) as hosts:
        hosts.give_address(0, "10.214.0.1/24")
        hosts.give_address(2, "10.214.0.3/24")
        hosts.take_address(2, f"{hosts.address(2)}/24")
        processes, logs = [], []
        for rank, host in enumerate((0, 0, 2, 2)):
            environment = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
                "MASTER_ADDR": "10.214.0.1" if host == 2 else hosts.address(0),
                "MASTER_PORT": "29500",
                "WORLD_SIZE": "4",
                "RANK": str(rank),
            }
            logs.append(tmp_path / str(rank))
            with open(logs[rank], "wb") as log:
                command = [sys.executable, "-c", JOIN]
                processes.append(hosts.start(host, command, environment, log.fileno()))
        for process in processes:
            process.wait(DEADLINE)
        for rank in (2, 3):
            said = logs[rank].read_text()
            assert "every rank must join the group" in said, said
            assert (
                f"tried rank {rank - 2} at {hosts.address(0)} (Network is unreachable) "
                f"(rank {rank}/4, group '0')"
            ) in said, said


KILLED = """
import os, time
from tests.harness.emulated_hosts import emulated_hosts
with emulated_hosts(2) as hosts:
    hosts.start(0, ["sleep", "120"], os.environ, 1)
    print(hosts.first_process(0), flush=True)
    time.sleep(120)
"""


def test_nothing_is_left_of_hosts_whose_program_is_killed() -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", KILLED], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    with program:
        assert program.stdout is not None
        said = program.stdout.readline()
        first = Path(f"/proc/{int(said)}")
        assert first.exists()
        program.kill()
        program.wait(DEADLINE)
    until = time.monotonic() + DEADLINE
    while first.exists():  # with which all processes of a host end
        assert time.monotonic() < until
        time.sleep(0.01)
    space = Path(f"/run/netns/c10dext{program.pid}h0")
    assert space.exists()
    with emulated.emulated_hosts(2):
        assert not space.exists()
