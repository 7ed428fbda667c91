from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

_T = TypeVar("_T")

torch_version: str
has_lazy: bool
SHM_MIN_ARENA: int

# The ops by name, called like torch.ops.c10d_ext.<name>.default, in eager code.
ops: dict[str, Callable[..., Any]]

# Those that start a collective: as `ops`, with each result as deliver() gives it.
starts: dict[str, Callable[..., Any]]

# Those that write their arguments, as write(async_op, *args, **kwargs) -> bool, with no gradient
# and complete on return unless async_op. False, and nothing has happened, where the backend may not
# write a tensor itself: under a mode, a transform or a trace, and for subclasses.
writes: dict[str, Callable[..., bool]]

def is_eager(output: torch.Tensor, input: torch.Tensor) -> bool: ...

# AsyncCollectiveTensor's other half, see csrc/frontend/async_tensor.h. Where they ask about a
# wrapper, one that was made in Python, around a fake or traced tensor, gets None.
def set_async_tensor_type(type: type, wait: Callable[[torch.Tensor], torch.Tensor]) -> None: ...
def deliver(result: torch.Tensor) -> torch.Tensor: ...
def deliver_complete(result: torch.Tensor) -> torch.Tensor: ...
def wrap_async(elem: torch.Tensor) -> Any: ...  # None: not a plain dense tensor
def elem_of(wrapper: torch.Tensor) -> torch.Tensor | None: ...
def set_elem(wrapper: torch.Tensor, elem: torch.Tensor) -> None: ...
def follow_elem(wrapper: torch.Tensor) -> None: ...
def finished_elem(wrapper: torch.Tensor) -> torch.Tensor | None: ...
def plain_of(wrapper: torch.Tensor) -> torch.Tensor | None: ...
def is_waited(wrapper: torch.Tensor) -> bool: ...

# Whose wait() hears of Ctrl-C, as torch's does not.
class Future(torch._C.Future[_T]):
    def then(self, callback: Callable[[Future[_T]], Any]) -> Future[Any]: ...

# Fails as `future` does, after `last`, whose result it has otherwise.
def followed(future: torch._C.Future[Any], last: Callable[[], _T]) -> Future[_T]: ...

class Work(dist.Work):
    def get_future(self) -> Future[list[torch.Tensor]]: ...
    def _get_sequence_number(self) -> int: ...

class ShmWork(dist.Work):
    def get_future(self) -> Future[list[torch.Tensor]]: ...
    def _get_sequence_number(self) -> int: ...

class CoalescedWork(dist.Work):
    def get_future(self) -> Future[list[torch.Tensor]]: ...
    def _get_sequence_number(self) -> int: ...

def work_of(tensor: torch.Tensor) -> Work | None: ...

# Of a collective's result: where it is over, a work that says so.
def work_behind(result: torch.Tensor) -> Work: ...

# Also of a collective that was over at once, of those that this thread started the last one.
def started_work_of(tensor: torch.Tensor) -> Work | None: ...

# From and into the tensors themselves. Peers are ranks of the group, -1 is any source.
def start_messages(
    tensors: list[torch.Tensor],
    peers: list[int],
    sends: list[bool],
    tags: list[int],
    group_name: str,
) -> list[Work]: ...

# Sends or receives one message, as start_messages, and returns once it is complete. False, and
# nothing has happened, where `writes` say so, and where what is asked for makes no sense.
def pass_message(
    tensor: torch.Tensor, peer: int, group: dist.ProcessGroup, tag: int, sends: bool, /
) -> bool: ...

# The message's tensor is one to wait for from now on.
def attach_message(message: Work) -> None: ...

# Calls that a block holds back, in lists: one that looks like the one before it takes a short way.
def remember(
    function: str = ...,
    op: object = ...,
    group: object = ...,
    ranks: int = ...,
    inputs: list[torch.Tensor] = ...,
    outputs: list[torch.Tensor] = ...,
    /,
) -> None: ...
def know_reduction(object: object, name: str) -> None: ...
def hold_again(
    function: str, op: object, group: object, input: object, output: object, /
) -> bool: ...
def check_held(
    op: str,
    group_name: str,
    reduce_op: str,
    factor: complex | None,
    input: torch.Tensor,
    output: torch.Tensor,
) -> None: ...

# The inputs and the outputs of a run of calls, then those of the next.
def check_apart(group_name: str, /, *tensors: list[torch.Tensor]) -> None: ...

# The calls of a block; as `writes`. Each output fits its input.
def write_all_gather_block(
    async_op: bool, inputs: list[torch.Tensor], outputs: list[torch.Tensor], group_name: str
) -> bool: ...
def write_reduce_scatter_block(
    async_op: bool,
    inputs: list[torch.Tensor],
    outputs: list[torch.Tensor],
    reduce_op: str,
    factor: complex | None,
    group_name: str,
) -> bool: ...

# Of the older vmap: the innermost level, the tensors without it, and where it was in each.
def peel_batch(
    tensors: list[torch.Tensor],
) -> tuple[int, list[torch.Tensor], list[int | None]]: ...
def add_batch(tensor: torch.Tensor, level: int, dim: int | None) -> torch.Tensor: ...
def sweep() -> None: ...
def pending_count() -> int: ...

# Memory that collectives have given back, and that is kept for those to come: bytes at most.
def most_kept() -> int: ...
def idle_result_bytes() -> int: ...
def release_idle_results() -> None: ...
def group_size(name: str) -> int: ...
def where(name: str) -> str: ...
def set_single_rank_shortcut(enabled: bool) -> None: ...
def set_group_names_provider(provider: Callable[[], str]) -> None: ...
def connect_shm(
    store: dist.Store,
    rank: int,
    size: int,
    timeout: timedelta,
    group_name: str,
    global_ranks: GlobalRanks,
    *,
    arena: int,
    spin_time: timedelta,
    inline_time: timedelta,
    progress_thread: bool,
    strict: int,
    algorithms: str,
    build: str,
) -> tuple[dist.Backend | None, str, str]: ...

class SplittableBackend(dist.Backend):
    @property
    def options(self) -> Any: ...
    def _set_default_timeout(self, timeout: timedelta) -> None: ...

class ShmBackend(SplittableBackend): ...

def set_call_site_provider(provider: Callable[[], str]) -> None: ...

# Collectives and messages of this process by backend: calls, bytes of this rank's inputs, seconds
# in which at least one was in flight. Counted from start_tally() on.
def start_tally(backends: list[str]) -> None: ...
def tally() -> dict[str, tuple[int, int, float]]: ...

class GlobalRanks:
    def __init__(self, store: dist.Store, global_ranks: list[int]) -> None: ...

class Rendezvous:
    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        group_name: str,
        global_ranks: GlobalRanks,
        backend: str,
    ) -> None: ...
    def look(self) -> None: ...
    def check(self) -> None: ...
    def watched_store(self, prefix: str) -> dist.Store: ...

class CheckedBackend(SplittableBackend):
    def __init__(
        self,
        inner: dist.Backend,
        store: dist.Store,
        timeout: timedelta,
        group_name: str,
        global_ranks: GlobalRanks,
        strict: int,
        name: str,
        connect: Callable[..., dist.Backend] | None = None,
        counted_as: str = "",
        piggyback: int | None = None,
    ) -> None: ...
    @property
    def inner(self) -> dist.Backend: ...

class MpiBackend(dist.Backend): ...

class HierarchicalBackend(dist.Backend):
    def __init__(
        self,
        rank: int,
        size: int,
        group_name: str,
        hosts: list[list[int]],
        local: dist.Backend | None,
        rail: dist.Backend | None,
        flat: dist.Backend,
        title: str,
    ) -> None: ...
    @property
    def title(self) -> str: ...
    @property
    def engine(self) -> dist.Backend: ...
    @property
    def hosts(self) -> list[list[int]]: ...

def this_host() -> str: ...
def part_of_global_ranks(global_ranks: GlobalRanks, ranks: list[int]) -> GlobalRanks: ...
def connect_mpi(
    store: dist.Store,
    rank: int,
    size: int,
    timeout: timedelta,
    group_name: str,
    global_ranks: GlobalRanks,
    largest: int,
) -> MpiBackend: ...
def version_of_mpi(path: str) -> tuple[str, str, bool]: ...
def start_mpi(path: str, timeout: timedelta) -> tuple[int, int, str, str]: ...
def serve_pmi(store: dist.Store, rank: int, size: int) -> int: ...
def pmi_process_mapping(hosts: list[str]) -> str: ...
def broadcast_in_mpi_world(text: str, timeout: timedelta) -> str: ...
def finalize_mpi(grace: timedelta) -> bool: ...
def close_shm_groups(grace: timedelta) -> None: ...
def close_checked_groups(grace: timedelta) -> None: ...
def usual_piggyback(told: int, by_leaders: bool) -> int: ...
def all_reduce_parts(bytes: int, hosts: int) -> int: ...
def all_gather_parts(bytes: int) -> int: ...
def reduce_scatter_parts(bytes: int) -> int: ...
def reduces_rows_apart(bytes: int, hosts: int) -> bool: ...
def chain_parts(bytes: int) -> int: ...
def goes_at_once(bytes: int, hosts: int) -> bool: ...

MOST_PIGGYBACK: int
LITTLE_MESSAGE: int  # bytes
MOST_LEADERS: int
ALL_REDUCE_BY_MESSAGES: int  # less than so many bytes
ALL_REDUCE_BY_LEADERS: int  # bytes

def shm_mapping_bytes(size: int, arena: int) -> int: ...

class Capabilities:
    @property
    def sums_in_rank_order(self) -> bool: ...
    @property
    def moves_nothing(self) -> bool: ...

def capabilities_of(backend: dist.Backend) -> Capabilities: ...
def register_backend_capabilities(
    name: str,
    *,
    methods: list[str] | None,
    futures: bool,
    reduces_avg: bool,
    reduces_low_precision: bool,
    reduces_bitwise: bool,
    gathers_uneven: bool,
    keeps_inputs: bool,
    sends_any_tensor: bool,
    starts_messages_together: bool,
    has_blocking_messages: bool,
) -> None: ...
