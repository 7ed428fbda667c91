"""The programs that the optimizer is measured with, frozen before it was tuned.

By rule: the parallel forms that users of torch.distributed write (data, sharded, tensor, sequence,
expert, context and two-dimensional parallelism), forward and backward, at one width. Nothing here
is changed because of what the optimizer makes of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from torch_c10d_ext.functional import wait_tensor

ext = torch.ops.c10d_ext

WIDTH, TOKENS, HEADS, LAYERS = 512, 1024, 8, 6


def _reduce(x: Tensor, group: str, op: str = "sum") -> Tensor:
    return wait_tensor(ext.all_reduce(x, op, group))


def _gather(x: Tensor, n: int, group: str) -> Tensor:
    return wait_tensor(ext.all_gather_into_tensor(x, n, group))


def _scatter(x: Tensor, n: int, group: str) -> Tensor:
    return wait_tensor(ext.reduce_scatter_tensor(x, "sum", n, group))


def _exchange(x: Tensor, n: int, group: str) -> Tensor:
    even = [x.shape[0] // n] * n
    return wait_tensor(ext.all_to_all_single(x, even, even, group))


def _leaves(tensors: list[Tensor]) -> list[Tensor]:
    return [t.detach().requires_grad_() for t in tensors]


def _attention(x: Tensor, qkv: Tensor, out: Tensor, heads: int = HEADS) -> Tensor:
    q, k, v = (x @ qkv).reshape(x.shape[0], 3, heads, -1).permute(1, 2, 0, 3).unbind(0)
    scores = torch.softmax(q @ k.transpose(1, 2) / 8.0, -1)
    return (scores @ v).transpose(0, 1).reshape(x.shape[0], -1) @ out


def _block(x: Tensor, w: list[Tensor]) -> Tensor:
    x = x + _attention(F.layer_norm(x, x.shape[-1:]), w[0], w[1])
    return x + F.gelu(F.layer_norm(x, x.shape[-1:]) @ w[2]) @ w[3]


def _block_shapes() -> list[tuple[int, int]]:
    width = WIDTH
    return [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]


def ddp_mlp(n: int, group: str) -> tuple[Callable[..., Any], list[Any]]:
    """An all_reduce per gradient, at the end."""

    def step(x: Tensor, ws: list[Tensor]) -> list[Tensor]:
        ws = _leaves(ws)
        h = x
        for w in ws:
            h = torch.relu(h @ w)
        return [_reduce(g, group, "avg") for g in torch.autograd.grad(h.sum(), ws)]

    return step, [torch.empty(TOKENS, WIDTH), [torch.empty(WIDTH, WIDTH) for _ in range(24)]]


def ddp_transformer(n: int, group: str) -> tuple[Callable[..., Any], list[Any]]:
    """An all_reduce per gradient of a transformer."""

    def step(x: Tensor, ws: list[Tensor]) -> list[Tensor]:
        ws = _leaves(ws)
        h = x
        for k in range(LAYERS):
            h = _block(h, ws[4 * k : 4 * k + 4])
        return [_reduce(g, group, "avg") for g in torch.autograd.grad(h.sum(), ws)]

    shapes = _block_shapes() * LAYERS
    return step, [torch.empty(TOKENS, WIDTH), [torch.empty(s) for s in shapes]]


def _sharded(x: Tensor, shards: list[Tensor], n: int, group: str) -> Tensor:
    for k in range(0, len(shards), 4):
        x = _block(x, [_gather(s, n, group) for s in shards[k : k + 4]])
    return x


def _shard_shapes(n: int) -> list[tuple[int, int]]:
    return [(a // n, b) for a, b in _block_shapes()] * LAYERS


def fsdp_forward(n: int, group: str) -> tuple[Callable[..., Any], list[Any]]:
    """Each weight is gathered just before its layer."""
    shards = [torch.empty(s) for s in _shard_shapes(n)]
    return lambda x, ws: _sharded(x, ws, n, group), [torch.empty(TOKENS, WIDTH), shards]


def fsdp_step(n: int, group: str) -> tuple[Callable[..., Any], list[Any]]:
    """The same with its backward: a reduce_scatter per gradient."""

    def step(x: Tensor, shards: list[Tensor]) -> list[Tensor]:
        shards = _leaves(shards)
        y = _sharded(x, shards, n, group)
        return list(torch.autograd.grad(y.sum(), shards))

    shards = [torch.empty(s) for s in _shard_shapes(n)]
    return step, [torch.empty(TOKENS, WIDTH), shards]


def _tensor_parallel(x: Tensor, w: list[Tensor], n: int, group: str) -> Tensor:
    x = x + _reduce(_attention(F.layer_norm(x, x.shape[-1:]), w[0], w[1], HEADS // n), group)
    return x + _reduce(F.gelu(F.layer_norm(x, x.shape[-1:]) @ w[2]) @ w[3], group)


def _tp_shapes(n: int) -> list[tuple[int, int]]:
    w = WIDTH
    return [(w, 3 * w // n), (w // n, w), (w, 4 * w // n), (4 * w // n, w)] * LAYERS


def tp_forward(n: int, group: str) -> tuple[Callable[..., Any], list[Any]]:
    """Two all_reduces per layer, each of which the next computation needs."""

    def forward(x: Tensor, ws: list[Tensor]) -> Tensor:
        for k in range(0, len(ws), 4):
            x = _tensor_parallel(x, ws[k : k + 4], n, group)
        return x

    return forward, [torch.empty(TOKENS, WIDTH), [torch.empty(s) for s in _tp_shapes(n)]]


def tp_step(n: int, group: str) -> tuple[Callable[..., Any], list[Any]]:
    """The same with its backward, where products of weights can run beside."""

    def step(x: Tensor, ws: list[Tensor]) -> list[Tensor]:
        x, *ws = _leaves([x, *ws])
        y = x
        for k in range(0, len(ws), 4):
            y = _tensor_parallel(y, ws[k : k + 4], n, group)
        return list(torch.autograd.grad(y.sum(), [x, *ws]))

    return step, [torch.empty(TOKENS, WIDTH), [torch.empty(s) for s in _tp_shapes(n)]]


def sequence_parallel(n: int, group: str) -> tuple[Callable[..., Any], list[Any]]:
    """all_gather before, reduce_scatter behind each parallel region; norms on a part of a row."""

    def step(x: Tensor, ws: list[Tensor]) -> list[Tensor]:
        x, *ws = _leaves([x, *ws])
        y = x
        for k in range(0, len(ws), 4):
            w = ws[k : k + 4]
            h = _gather(F.layer_norm(y, y.shape[-1:]), n, group)
            y = y + _scatter(_attention(h, w[0], w[1], HEADS // n), n, group)
            h = _gather(F.layer_norm(y, y.shape[-1:]), n, group)
            y = y + _scatter(F.gelu(h @ w[2]) @ w[3], n, group)
        return list(torch.autograd.grad(y.sum(), [x, *ws]))

    return step, [torch.empty(TOKENS // n, WIDTH), [torch.empty(s) for s in _tp_shapes(n)]]


def moe_forward(n: int, group: str) -> tuple[Callable[..., Any], list[Any]]:
    """Experts on ranks: tokens and their weights travel there and back, beside a dense branch."""

    def forward(x: Tensor, ws: list[Tensor]) -> Tensor:
        for k in range(0, len(ws), 4):
            sent = _exchange(x, n, group)
            scale = _exchange(x.mean(1, keepdim=True), n, group)
            back = _exchange(F.gelu(sent @ ws[k]) @ ws[k + 1] * scale, n, group)
            x = x + F.gelu(x @ ws[k + 2]) @ ws[k + 3] + back
        return x

    shapes = [(WIDTH, 2 * WIDTH), (2 * WIDTH, WIDTH)] * 2 * LAYERS
    return forward, [torch.empty(TOKENS, WIDTH), [torch.empty(s) for s in shapes]]


def ring_attention(n: int, group: str) -> tuple[Callable[..., Any], list[Any]]:
    """Keys and values go around the ring while the last ones are used."""
    ring = [(r + 1) % n for r in range(n)]

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, top = torch.zeros_like(q), torch.zeros(q.shape[0], 1)
        for _ in range(2 * n):
            weights = torch.exp(q @ k.t() / 32.0)
            out, top = out + weights @ v, top + weights.sum(1, keepdim=True)
            k = wait_tensor(ext.permute_tensor(k, ring, group))
            v = wait_tensor(ext.permute_tensor(v, ring, group))
        return out / top

    return forward, [torch.empty(TOKENS, WIDTH) for _ in range(3)]


def zero1_update(n: int, group: str) -> tuple[Callable[..., Any], list[Any]]:
    """Gradients are scattered, shards updated, and parameters gathered."""

    def step(x: Tensor, ws: list[Tensor]) -> list[Tensor]:
        ws = _leaves(ws)
        h = x
        for w in ws:
            h = torch.relu(h @ w)
        updated = []
        for w, g in zip(ws, torch.autograd.grad(h.sum(), ws), strict=True):
            part = _scatter(g, n, group)
            updated.append(_gather(w.detach()[: w.shape[0] // n] - 0.1 * part, n, group))
        return updated

    return step, [torch.empty(TOKENS, WIDTH), [torch.empty(WIDTH, WIDTH) for _ in range(12)]]


def synchronized_norm(n: int, group: str) -> tuple[Callable[..., Any], list[Any]]:
    """Means and variances over all ranks: small, and needed at once; beside another branch."""

    def forward(x: Tensor, ws: list[Tensor]) -> Tensor:
        y = x
        for w in ws:
            mean, square = _reduce(x.mean(0), group, "avg"), _reduce((x * x).mean(0), group, "avg")
            y = torch.relu(y @ w)
            x = (x - mean) * torch.rsqrt(square - mean * mean + 1e-5) + y
        return x

    return forward, [torch.empty(TOKENS, WIDTH), [torch.empty(WIDTH, WIDTH) for _ in range(8)]]


def vocabulary_parallel(n: int, group: str) -> tuple[Callable[..., Any], list[Any]]:
    """A loss over parts of a vocabulary in chunks: a maximum and two sums each."""

    def forward(x: Tensor, w: Tensor) -> Tensor:
        losses = []
        for chunk in x.chunk(4):
            scores = chunk @ w
            top = _reduce(scores.amax(1), group, "max")
            total = _reduce(torch.exp(scores - top[:, None]).sum(1), group)
            picked = _reduce(scores[:, 0], group)
            losses.append((torch.log(total) + top - picked).sum())
        return torch.stack(losses).sum()

    return forward, [torch.empty(TOKENS, WIDTH), torch.empty(WIDTH, 8 * WIDTH)]


PROGRAMS: list[Callable[[int, str], tuple[Callable[..., Any], list[Any]]]] = [
    ddp_mlp,
    ddp_transformer,
    fsdp_forward,
    fsdp_step,
    tp_forward,
    tp_step,
    sequence_parallel,
    moe_forward,
    ring_attention,
    zero1_update,
    synchronized_norm,
    vocabulary_parallel,
]


def traced(program: Callable[..., Any], n: int, group: str) -> GraphModule:
    """The graph of a program, by fake tensors: nothing runs."""
    step, inputs = program(n, group)
    return make_fx(step, tracing_mode="fake")(*inputs)
