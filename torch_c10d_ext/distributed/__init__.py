"""A drop-in for ``torch.distributed`` whose collectives are ops that trace.

``import torch_c10d_ext.distributed as dist``, and nothing else changes: the same names, arguments
and results. Groups, stores, ranks and object collectives are torch's own, shared with every other
user of ``torch.distributed`` in the process. Collectives and messages are this package's ops: on
gloo they take every dtype, reduce op, stride and size, and ``torch.compile(fullgraph=True)``,
``make_fx`` and ``torch.export`` walk through them, ``async_op=True`` and ``wait()`` included.

Gradients: as in ``torch.distributed``, these calls are outside autograd, eager and traced alike. A
tensor keeps its history and gets new values; nothing flows back through the communication.
``torch_c10d_ext.functional`` holds the differentiable forms.
"""

# ruff: noqa: F403 - this is what the module is made of

from __future__ import annotations

from types import ModuleType as Module
from typing import Any

import torch.distributed as _torch
import torch.distributed.distributed_c10d as distributed_c10d
from torch.distributed import *
from torch.distributed.distributed_c10d import *

from torch_c10d_ext._groups import premul_sum as _premul_sum
from torch_c10d_ext.distributed._coalescing import CoalescingManager as CoalescingManager
from torch_c10d_ext.distributed._collectives import (
    all_gather as all_gather,
)
from torch_c10d_ext.distributed._collectives import (
    all_gather_coalesced as all_gather_coalesced,
)
from torch_c10d_ext.distributed._collectives import (
    all_gather_into_tensor as all_gather_into_tensor,
)
from torch_c10d_ext.distributed._collectives import (
    all_reduce as all_reduce,
)
from torch_c10d_ext.distributed._collectives import (
    all_reduce_coalesced as all_reduce_coalesced,
)
from torch_c10d_ext.distributed._collectives import (
    all_to_all as all_to_all,
)
from torch_c10d_ext.distributed._collectives import (
    all_to_all_single as all_to_all_single,
)
from torch_c10d_ext.distributed._collectives import (
    barrier as barrier,
)
from torch_c10d_ext.distributed._collectives import (
    broadcast as broadcast,
)
from torch_c10d_ext.distributed._collectives import (
    gather as gather,
)
from torch_c10d_ext.distributed._collectives import (
    monitored_barrier as monitored_barrier,
)
from torch_c10d_ext.distributed._collectives import (
    reduce as reduce,
)
from torch_c10d_ext.distributed._collectives import (
    reduce_scatter as reduce_scatter,
)
from torch_c10d_ext.distributed._collectives import (
    reduce_scatter_tensor as reduce_scatter_tensor,
)
from torch_c10d_ext.distributed._collectives import (
    scatter as scatter,
)
from torch_c10d_ext.distributed._messages import (
    P2POp as P2POp,
)
from torch_c10d_ext.distributed._messages import (
    batch_isend_irecv as batch_isend_irecv,
)
from torch_c10d_ext.distributed._messages import (
    irecv as irecv,
)
from torch_c10d_ext.distributed._messages import (
    isend as isend,
)
from torch_c10d_ext.distributed._messages import (
    recv as recv,
)
from torch_c10d_ext.distributed._messages import (
    send as send,
)
from torch_c10d_ext.distributed._objects import (
    all_gather_object as all_gather_object,
)
from torch_c10d_ext.distributed._objects import (
    broadcast_object_list as broadcast_object_list,
)
from torch_c10d_ext.distributed._objects import (
    gather_object as gather_object,
)
from torch_c10d_ext.distributed._objects import (
    recv_object_list as recv_object_list,
)
from torch_c10d_ext.distributed._objects import (
    scatter_object_list as scatter_object_list,
)
from torch_c10d_ext.distributed._objects import (
    send_object_list as send_object_list,
)
from torch_c10d_ext.distributed._subgroups import (
    shrink_group as shrink_group,
)
from torch_c10d_ext.distributed._subgroups import (
    split_group as split_group,
)

all_gather_single = _all_gather_base = all_gather_into_tensor
reduce_scatter_single = _reduce_scatter_base = reduce_scatter_tensor
coalescing_manager = _coalescing_manager = CoalescingManager
_make_nccl_premul_sum = _premul_sum

__all__ = sorted(
    {
        *(
            name
            for name, value in vars(_torch).items()
            if name[0] != "_" and type(value) is not Module
        ),
        *distributed_c10d.__all__,
        "coalescing_manager",
    }
)


def __getattr__(name: str) -> Any:
    """What ``torch.distributed`` has and this module does not is torch's."""
    return getattr(_torch, name)
