"""Look at the communication of a run on 1,000 ranks, in one process and without memory for it.

    python examples/communication_of_a_big_run.py

One step of a Megatron-style block on a mesh of 125 x 8 ranks: the weights are cut over tp, the
batch over dp. Gradients travel while those of the earlier layer are computed.

Expected output:

    op          group      ranks  input                   wire bytes  comm us  hidden us  overlapped
    all_reduce  9 mesh_tp      8  bfloat16 (8192, 4096)  117,440,512    266.0        0.0  no
    all_reduce  9 mesh_tp      8  bfloat16 (8192, 4096)  117,440,512    266.0        0.0  no
    all_reduce  9 mesh_tp      8  bfloat16 (8192, 4096)  117,440,512    266.0        0.0  no
    all_reduce  1 mesh_dp    125  bfloat16 (4096, 2048)   33,285,997    685.7      685.7  4 ops
    all_reduce  1 mesh_dp    125  bfloat16 (2048, 4096)   33,285,997    685.7      378.6  4 ops
    all_reduce  1 mesh_dp    125  bfloat16 (4096, 2048)   33,285,997    685.7        0.0  no
    all_reduce  1 mesh_dp    125  bfloat16 (2048, 4096)   33,285,997    685.7        0.0  no

    total op    group      calls   wire bytes  comm us  hidden us
    all_reduce  9 mesh_tp      3  352,321,536    797.9        0.0
    all_reduce  1 mesh_dp      4  133,143,986  2,742.9    1,064.3

    step 6,412.6 us: 3,936.2 computing, 2,476.5 waiting
    communication 3,540.8 us: 1,064.3 hidden by computation
    memory 469,762,048 bytes at most
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

import torch_c10d_ext
import torch_c10d_ext.functional as fc

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1000)
mesh = init_device_mesh("cpu", (125, 8), mesh_dim_names=("dp", "tp"))
tp, dp = mesh["tp"], mesh["dp"]


def layer(x, columns, rows):
    hidden = torch.relu(fc.copy_to_group(x, tp) @ columns)
    return fc.reduce_from_group(hidden @ rows, tp)


def start_averaging(gradients):
    name = dp.get_group().group_name
    return [torch.ops.c10d_ext.all_reduce(gradient, "avg", name) for gradient in gradients]


def step(x, first, second):
    h = layer(x, *first)
    y = layer(h, *second)
    grad_h, *grads = torch.autograd.grad(y, [h, *second], torch.ones_like(y))
    in_flight = start_averaging(grads)
    in_flight += start_averaging(torch.autograd.grad(h, first, grad_h))
    return [fc.wait_tensor(gradient) for gradient in in_flight]


def weights():
    shapes = [(4096, 2048), (2048, 4096)]  # a rank's eighth
    return [torch.empty(s, dtype=torch.bfloat16, device="meta", requires_grad=True) for s in shapes]


tokens = torch.empty(8192, 4096, dtype=torch.bfloat16, device="meta")
graph = make_fx(step)(tokens, weights(), weights())
report = torch_c10d_ext.communication_report(
    graph,
    link=torch_c10d_ext.Link(latency=20e-6, bandwidth=50e9),  # the network
    links={tp: torch_c10d_ext.Link(latency=5e-6, bandwidth=450e9)},  # within a machine
    compute=torch_c10d_ext.Compute(memory_bandwidth=3e12, flops=400e12),
)
print(report)  # report.save("step.svg") draws it
dist.destroy_process_group()
