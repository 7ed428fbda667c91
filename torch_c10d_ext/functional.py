"""The functional collectives: a superset of ``torch.distributed._functional_collectives``.

Same names, same arguments. In eager a call returns at once, with an :class:`AsyncCollectiveTensor`
that waits on first use; under a trace it becomes plain graph nodes. Everything differentiates,
batches under ``torch.vmap``, compiles and exports.
"""

from torch.distributed._functional_collectives import allow_inflight_collective_as_graph_input_ctx

from torch_c10d_ext._async import AsyncCollectiveTensor, work_of
from torch_c10d_ext._groups import Group
from torch_c10d_ext.ops.all_gather import all_gather
from torch_c10d_ext.ops.all_gather_into_tensor import (
    all_gather_inplace,
    all_gather_into_tensor_coalesced,
    all_gather_single,
    all_gather_single_autograd,
    all_gather_single_coalesced,
    all_gather_tensor,
    all_gather_tensor_autograd,
    all_gather_tensor_inplace,
)
from torch_c10d_ext.ops.all_reduce import (
    all_reduce,
    all_reduce_coalesced,
    all_reduce_inplace,
)
from torch_c10d_ext.ops.all_to_all_single import (
    all_to_all_inplace,
    all_to_all_single,
    all_to_all_single_autograd,
)
from torch_c10d_ext.ops.barrier import barrier
from torch_c10d_ext.ops.batch_isend_irecv import (
    batch_isend_irecv,
    batch_p2p_ops_inplace,
    irecv_inplace,
    isend_inplace,
)
from torch_c10d_ext.ops.broadcast import broadcast, broadcast_coalesced, broadcast_inplace
from torch_c10d_ext.ops.copy_to_group import copy_to_group
from torch_c10d_ext.ops.gather import gather
from torch_c10d_ext.ops.permute_tensor import permute_tensor
from torch_c10d_ext.ops.reduce import reduce
from torch_c10d_ext.ops.reduce_from_group import reduce_from_group
from torch_c10d_ext.ops.reduce_scatter import reduce_scatter
from torch_c10d_ext.ops.reduce_scatter_tensor import (
    reduce_scatter_single,
    reduce_scatter_single_autograd,
    reduce_scatter_single_coalesced,
    reduce_scatter_tensor,
    reduce_scatter_tensor_autograd,
    reduce_scatter_tensor_coalesced,
    reduce_scatter_tensor_inplace,
)
from torch_c10d_ext.ops.scatter import scatter
from torch_c10d_ext.ops.wait_message import wait_message
from torch_c10d_ext.ops.wait_tensor import wait_tensor

__all__ = [
    "AsyncCollectiveTensor",
    "Group",
    "all_gather",
    "all_gather_inplace",
    "all_gather_into_tensor_coalesced",
    "all_gather_single",
    "all_gather_single_autograd",
    "all_gather_single_coalesced",
    "all_gather_tensor",
    "all_gather_tensor_autograd",
    "all_gather_tensor_inplace",
    "all_reduce",
    "all_reduce_coalesced",
    "all_reduce_inplace",
    "all_to_all_inplace",
    "all_to_all_single",
    "all_to_all_single_autograd",
    "allow_inflight_collective_as_graph_input_ctx",
    "barrier",
    "batch_isend_irecv",
    "batch_p2p_ops_inplace",
    "broadcast",
    "broadcast_coalesced",
    "broadcast_inplace",
    "copy_to_group",
    "gather",
    "irecv_inplace",
    "isend_inplace",
    "permute_tensor",
    "reduce",
    "reduce_from_group",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_autograd",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_autograd",
    "reduce_scatter_tensor_coalesced",
    "reduce_scatter_tensor_inplace",
    "scatter",
    "wait_message",
    "wait_tensor",
    "work_of",
]
