"""The functional collectives: a superset of ``torch.distributed._functional_collectives``.

Same names, same arguments. In eager a call returns at once, with an :class:`AsyncCollectiveTensor`
that waits on first use; under a trace it becomes plain graph nodes. Everything differentiates,
batches under ``torch.vmap``, compiles and exports.
"""

from torch.distributed._functional_collectives import (
    allow_inflight_collective_as_graph_input_ctx as allow_inflight_collective_as_graph_input_ctx,
)

from torch_c10d_ext._async import AsyncCollectiveTensor as AsyncCollectiveTensor
from torch_c10d_ext._async import work_of as work_of
from torch_c10d_ext._groups import Group as Group
from torch_c10d_ext.ops.all_gather import all_gather as all_gather
from torch_c10d_ext.ops.all_gather_into_tensor import all_gather_inplace as all_gather_inplace
from torch_c10d_ext.ops.all_gather_into_tensor import (
    all_gather_into_tensor_coalesced as all_gather_into_tensor_coalesced,
)
from torch_c10d_ext.ops.all_gather_into_tensor import all_gather_single as all_gather_single
from torch_c10d_ext.ops.all_gather_into_tensor import (
    all_gather_single_autograd as all_gather_single_autograd,
)
from torch_c10d_ext.ops.all_gather_into_tensor import (
    all_gather_single_coalesced as all_gather_single_coalesced,
)
from torch_c10d_ext.ops.all_gather_into_tensor import all_gather_tensor as all_gather_tensor
from torch_c10d_ext.ops.all_gather_into_tensor import (
    all_gather_tensor_autograd as all_gather_tensor_autograd,
)
from torch_c10d_ext.ops.all_gather_into_tensor import (
    all_gather_tensor_inplace as all_gather_tensor_inplace,
)
from torch_c10d_ext.ops.all_reduce import all_reduce as all_reduce
from torch_c10d_ext.ops.all_reduce import all_reduce_coalesced as all_reduce_coalesced
from torch_c10d_ext.ops.all_reduce import all_reduce_inplace as all_reduce_inplace
from torch_c10d_ext.ops.all_to_all_single import all_to_all_inplace as all_to_all_inplace
from torch_c10d_ext.ops.all_to_all_single import all_to_all_single as all_to_all_single
from torch_c10d_ext.ops.all_to_all_single import (
    all_to_all_single_autograd as all_to_all_single_autograd,
)
from torch_c10d_ext.ops.barrier import barrier as barrier
from torch_c10d_ext.ops.batch_isend_irecv import batch_isend_irecv as batch_isend_irecv
from torch_c10d_ext.ops.batch_isend_irecv import batch_p2p_ops_inplace as batch_p2p_ops_inplace
from torch_c10d_ext.ops.batch_isend_irecv import irecv_inplace as irecv_inplace
from torch_c10d_ext.ops.batch_isend_irecv import isend_inplace as isend_inplace
from torch_c10d_ext.ops.broadcast import broadcast as broadcast
from torch_c10d_ext.ops.broadcast import broadcast_coalesced as broadcast_coalesced
from torch_c10d_ext.ops.broadcast import broadcast_inplace as broadcast_inplace
from torch_c10d_ext.ops.copy_to_group import copy_to_group as copy_to_group
from torch_c10d_ext.ops.gather import gather as gather
from torch_c10d_ext.ops.permute_tensor import permute_tensor as permute_tensor
from torch_c10d_ext.ops.reduce import reduce as reduce
from torch_c10d_ext.ops.reduce_from_group import reduce_from_group as reduce_from_group
from torch_c10d_ext.ops.reduce_scatter import reduce_scatter as reduce_scatter
from torch_c10d_ext.ops.reduce_scatter_tensor import reduce_scatter_single as reduce_scatter_single
from torch_c10d_ext.ops.reduce_scatter_tensor import (
    reduce_scatter_single_autograd as reduce_scatter_single_autograd,
)
from torch_c10d_ext.ops.reduce_scatter_tensor import (
    reduce_scatter_single_coalesced as reduce_scatter_single_coalesced,
)
from torch_c10d_ext.ops.reduce_scatter_tensor import reduce_scatter_tensor as reduce_scatter_tensor
from torch_c10d_ext.ops.reduce_scatter_tensor import (
    reduce_scatter_tensor_autograd as reduce_scatter_tensor_autograd,
)
from torch_c10d_ext.ops.reduce_scatter_tensor import (
    reduce_scatter_tensor_coalesced as reduce_scatter_tensor_coalesced,
)
from torch_c10d_ext.ops.reduce_scatter_tensor import (
    reduce_scatter_tensor_inplace as reduce_scatter_tensor_inplace,
)
from torch_c10d_ext.ops.scatter import scatter as scatter
from torch_c10d_ext.ops.wait_message import wait_message as wait_message
from torch_c10d_ext.ops.wait_tensor import wait_tensor as wait_tensor

# Each name that is imported as itself is exported: to type checkers, and here.
__all__ = sorted(name for name in dir() if not name.startswith("_"))
