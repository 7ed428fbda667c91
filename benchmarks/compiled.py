"""A tensor-parallel MLP, forward and backward under torch.compile, in two ways to write it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import _torch as theirs
from benchmarks._measure import Case, Timings, measure
from torch_c10d_ext import functional as ours

TORCH, OURS = "torch", "ours"
TORCH_EAGER, OURS_EAGER = "torch eager", "ours eager"
LAYERS, TOKENS, WIDTH, HIDDEN = 2, 64, 128, 512

Collective = Callable[[Tensor], Tensor]


class _CopyToGroup(torch.autograd.Function):
    """Megatron's f with torch's functional collectives."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, group: str) -> Tensor:
        ctx.group = group
        return input.view_as(input)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return theirs.all_reduce(grad, "sum", ctx.group), None


class _ReduceFromGroup(torch.autograd.Function):
    """Megatron's g with torch's functional collectives."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, group: str) -> Tensor:
        return theirs.all_reduce(input, "sum", group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def steps(seconds: float, device: str, quick: bool) -> list[Timings]:
    """The step with all_reduce at both ends of an MLP, and with its rows spread over the ranks.

    ``quick`` leaves the second out: compiling costs more than measuring.
    """
    group = dist.group.WORLD
    assert group is not None
    name = group.group_name
    cases = [
        _case(
            "tensor-parallel MLP",
            TOKENS,
            device,
            (lambda x: _CopyToGroup.apply(x, name), lambda x: _ReduceFromGroup.apply(x, name)),
            (lambda x: ours.copy_to_group(x, name), lambda x: ours.reduce_from_group(x, name)),
        ),
        _case(
            "sequence-parallel MLP",
            TOKENS // group.size(),
            device,
            (
                lambda x: theirs.all_gather_single_autograd(x, 0, name),
                lambda x: theirs.reduce_scatter_single_autograd(x, "sum", 0, name),
            )
            if theirs.can_all_gather(device)
            else None,
            (
                lambda x: ours.all_gather_single(x, 0, name),
                lambda x: ours.reduce_scatter_single(x, "sum", 0, name),
            ),
        ),
    ]
    return measure(cases[:1] if quick else cases, seconds, device)


def _case(
    name: str,
    tokens: int,
    device: str,
    torchs: tuple[Collective, Collective] | None,
    mine: tuple[Collective, Collective],
) -> Case:
    torch.manual_seed(0)
    hidden = HIDDEN // dist.get_world_size()
    x = torch.randn(tokens, WIDTH, device=device, requires_grad=True)
    weights = [
        (torch.randn(a, b, device=device) / b**0.5).requires_grad_()
        for _ in range(LAYERS)
        for a, b in ((WIDTH, hidden), (hidden, WIDTH))
    ]

    def step_of(ends: tuple[Collective, Collective], compiled: bool) -> Callable[[], list[Tensor]]:
        enter, leave = ends

        def loss_of(x: Tensor, weights: list[Tensor]) -> Tensor:
            for up, down in zip(weights[::2], weights[1::2], strict=True):
                x = x + leave(torch.nn.functional.gelu(enter(x) @ up) @ down)
            return x.square().mean()

        forward = torch.compile(loss_of, fullgraph=True) if compiled else loss_of

        def step() -> list[Tensor]:
            loss = forward(x, weights)
            return [loss, *torch.autograd.grad(loss, [x, *weights])]

        return step

    peers = {OURS: step_of(mine, True), OURS_EAGER: step_of(mine, False)}
    if torchs is not None:
        peers |= {TORCH: step_of(torchs, True), TORCH_EAGER: step_of(torchs, False)}
    return Case(name, peers, f"{LAYERS} x {tokens} x {WIDTH} x {hidden}")
