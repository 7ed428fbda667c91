"""Reductions of little data on several hosts, whose leaders reduce what their ranks give."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
import torch.distributed as dist

from torch_c10d_ext import functional


def reductions() -> bool:
    """Each host's values are reduced in the order of its ranks, and then those of hosts: whether
    they travel with the calls, or cannot, as something is in flight."""
    n, rank = dist.get_world_size(), dist.get_rank()
    groups = dist.group.WORLD._get_backend(torch.device("cpu")).inner.hosts
    folds = {"sum": torch.add, "avg": torch.add, "product": torch.mul, "max": torch.maximum}

    def given(of: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * of + len(shape))
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        return (x * 10.0 ** torch.randint(-3, 4, shape, generator=generator)).to(dtype)

    def reduced(xs: list[torch.Tensor], op: str) -> torch.Tensor:
        of_hosts = [functools.reduce(folds[op], [xs[r] for r in ranks]) for ranks in groups]
        total = functools.reduce(folds[op], of_hosts)
        return total / n if op == "avg" else total

    def is_same(got: torch.Tensor, want: torch.Tensor) -> bool:
        return torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))

    def scattered(parts: torch.Tensor, op: str) -> torch.Tensor:
        out = torch.empty(uneven[rank], dtype=parts.dtype)
        dist.reduce_scatter(out, list(parts.split(uneven)), getattr(dist.ReduceOp, op.upper()))
        return out

    uneven = [(r + 1) % 3 for r in range(n)]
    begin = sum(uneven[:rank])
    for op in folds:
        for dtype in (torch.float32, torch.float64):
            few, many = [
                [given(r, (n * k, 3), dtype) for r in range(n)] for k in (1, 1 + 2048 // n)
            ]
            parts = [given(r, (sum(uneven),), dtype) for r in range(n)]
            wanted = [reduced(few, op), reduced(many, op)]
            shares = [w.view(n, -1, 3)[rank] for w in wanted]
            share = reduced(parts, op)[begin : begin + uneven[rank]]

            def all_of(op: str, xs: list[list[torch.Tensor]]) -> Iterator[torch.Tensor]:
                few, many, parts = (x[rank] for x in xs)
                strided = torch.stack([few, few], -1)[..., 1]
                yield functional.all_reduce(few, op, None)
                yield functional.all_reduce(strided.t(), op, None)
                yield functional.all_reduce(many, op, None)
                yield from functional.all_reduce_coalesced([few, many], op, None)
                yield functional.reduce_scatter_tensor(few, op, 0, None)
                yield functional.reduce_scatter_tensor(many, op, 0, None)
                yield from functional.reduce_scatter_tensor_coalesced([few, many], op, [0, 0], None)
                yield scattered(parts, op)
                yield functional.reduce_scatter(parts, op, uneven, None)

            expected = [wanted[0], wanted[0].t(), wanted[1], *wanted]
            expected += [*shares, *shares, share, share]
            early = [y + 0 for y in all_of(op, [few, many, parts])]
            slow = dist.all_reduce(torch.ones(1 << 20), async_op=True)
            late = list(all_of(op, [few, many, parts]))
            for i, want in enumerate(expected):
                assert is_same(early[i], want), (op, dtype, i)
                assert is_same(late[i] + 0, want), (op, dtype, i)
            slow.wait()
    # Of halves all ranks' values are added at once, and rounded once.
    x = torch.tensor([256.0 if rank == 0 else 1.0]).to(torch.bfloat16)
    dist.all_reduce(x)
    assert x == torch.tensor(256.0 + n - 1).to(torch.bfloat16)
    dist.barrier()
    dist.destroy_process_group()
    return True
