"""Route tokens to experts on other ranks, with sizes known only from the data, compiled.

    python -m torch.distributed.run --standalone --nproc-per-node 2 examples/uneven_all_to_all.py

A mixture of experts in small: rank e holds expert e, which multiplies by e + 10. Each rank sorts
its tokens by the expert they want, tells the others how many they will get, sends them with an
uneven all_to_all, lets its own expert work, and sends the results back the same way. The split
sizes are read from a tensor inside the compiled function, so one graph serves every routing.

Expected output (token t of rank r has the value 10 r + t; two routings, one compilation):

    [rank 0] sent [3, 1] received [3, 2] tokens [0, 1, 2, 3] -> [0, 10, 20, 33]
    [rank 1] sent [2, 2] received [1, 2] tokens [10, 11, 12, 13] -> [100, 110, 132, 143]
    [rank 0] sent [0, 4] received [0, 1] tokens [0, 1, 2, 3] -> [0, 11, 22, 33]
    [rank 1] sent [1, 3] received [4, 3] tokens [10, 11, 12, 13] -> [100, 121, 132, 143]
    [rank 0] compiled graphs: 1
    [rank 1] compiled graphs: 1
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from reporting import print_by_rank
from torch._dynamo.testing import CompileCounterWithBackend

import torch_c10d_ext.functional as fc

torch._dynamo.config.capture_scalar_outputs = True  # let .tolist() be part of a graph


def route(tokens: torch.Tensor, expert: torch.Tensor, rank: int, world: int):
    """Return (every token's result, tokens sent to each rank, tokens received from each)."""
    order = expert.argsort(stable=True)
    sent = F.one_hot(expert, world).sum(0)
    received = fc.wait_tensor(fc.all_to_all_single(sent, None, None, group=None))
    send, receive = sent.tolist(), received.tolist()

    arrived = fc.all_to_all_single(tokens[order], receive, send, group=None)
    worked = arrived * (rank + 10)
    returned = fc.all_to_all_single(worked, send, receive, group=None)

    return torch.empty_like(tokens).index_copy(0, order, returned), sent, received


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    inductor = CompileCounterWithBackend("inductor")
    compiled = torch.compile(route, fullgraph=True, backend=inductor)
    tokens = torch.arange(4.0) + 10 * rank
    for routing in ([[0, 0, 0, 1], [0, 0, 1, 1]], [[1, 1, 1, 1], [0, 1, 1, 1]]):
        expert = torch.tensor(routing[rank])
        result, sent, received = compiled(tokens, expert, rank, world)
        print_by_rank(
            f"sent {sent.tolist()} received {received.tolist()} "
            f"tokens {tokens.int().tolist()} -> {result.int().tolist()}"
        )
    print_by_rank(f"compiled graphs: {inductor.frame_count}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
