"""Batching rules: under ``torch.vmap`` a collective stays one collective over the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_c10d_ext import _C
from torch_c10d_ext._op_info import OUT, forms_of

Rule = Callable[..., tuple[Any, Any]]


def any_dim(op: Any, *, local: bool = False) -> Rule:
    """The rule of an op that treats every element alike: the batch goes first.

    It could stay where it is, but then ranks that batch along different dimensions would combine
    elements that do not belong together.

    Args:
        op: the op overload; its first argument is a tensor or a list of tensors.
        local: nothing is sent, so the batch stays.
    """

    def first(t: Tensor, dim: int | None) -> Tensor:
        return t if not dim else t.movedim(dim, 0)

    def rule(
        info: Any, in_dims: tuple[Any, ...], input: Any, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        dims = in_dims[0]
        if local:
            return op(input, *args, **kwargs), dims
        if isinstance(input, (list, tuple)):
            outs = op([first(t, d) for t, d in zip(input, dims, strict=True)], *args, **kwargs)
            return outs, [None if d is None else 0 for d in dims]
        return op(first(input, dims), *args, **kwargs), 0

    return rule


def by_rows(op: Any, *, keeps_scalar: bool = False) -> Rule:
    """The rule of an op that splits or concatenates rows: the batch goes behind them, to dim 1.

    Args:
        op: the op overload; its first argument is a tensor or a list of tensors.
        keeps_scalar: a scalar input counts as one row.
    """

    def move(t: Tensor, dim: int | None) -> Tensor:
        if dim is None:
            return t
        if t.dim() == 1:
            # A batch of scalars: one row of B. An op that needs rows refuses scalars before this.
            return t.unsqueeze(0) if keeps_scalar else t
        return t.movedim(dim, 1)

    def rule(
        info: Any, in_dims: tuple[Any, ...], input: Any, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        dims = in_dims[0]
        if isinstance(input, (list, tuple)):
            outs = op([move(t, d) for t, d in zip(input, dims, strict=True)], *args, **kwargs)
            return outs, [None if d is None else 1 for d in dims]
        if not keeps_scalar and input.dim() == 1:
            raise ValueError(
                f"{op.name().split('::')[1]}: input must have at least one dimension, got a batch "
                "of scalars"
            )
        return op(move(input, dims), *args, **kwargs), 1

    return rule


# What is_grads_batched and vectorize of torch.autograd are built on.
_older_vmap = torch.library.Library("c10d_ext", "IMPL", "Batched")


def register_forms(kind: str, rule_of: Callable[..., Rule], **options: Any) -> None:
    """Registers ``rule_of(op, **options)`` for the forms of a collective, but that into ``out``."""
    for form, op in forms_of(kind).items():
        if form != OUT:
            register(kind + form, rule_of(op, **options))


def register(name: str, rule: Rule) -> None:
    """Makes ``rule`` the batching rule of ``c10d_ext::<name>``, under either vmap of torch."""

    def older(input: Any, *args: Any, **kwargs: Any) -> Any:
        listed = isinstance(input, (list, tuple))
        level, tensors, dims = _C.peel_batch(input if listed else [input])
        if listed:
            outs, dims = rule(None, (dims,), tensors, *args, **kwargs)
            return [_C.add_batch(out, level, dim) for out, dim in zip(outs, dims, strict=True)]
        out, dim = rule(None, tuple(dims), tensors[0], *args, **kwargs)
        return _C.add_batch(out, level, dim)

    torch.library.register_vmap(f"c10d_ext::{name}", rule)
    _older_vmap.impl(name, older)
