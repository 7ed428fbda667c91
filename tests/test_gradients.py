"""Gradients beyond one op: parallel layers, composition, and every way autograd is used."""

from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import torch_c10d_ext.functional as F
from tests.contract import group, smooth_values, wait
from tests.harness import run, values
from tests.harness.flight import in_flight


def _xs(shape: tuple[int, ...], salt: int = 0) -> list[Tensor]:
    return [
        smooth_values(shape, torch.float64, r, salt=salt).requires_grad_()
        for r in range(dist.get_world_size())
    ]


def _assert_close(got: Tensor, want: Tensor, what: object = "") -> None:
    text = values.close(got.detach() + 0, want.detach().contiguous())
    assert not text, f"{what}: {text}"


def _any_dimension() -> None:
    """The functional forms with a dimension, against the whole world's computation."""
    n, rank = dist.get_world_size(), dist.get_rank()
    for dim in (0, 1, 2, -1):
        for name in ("gather", "gather_autograd", "scatter", "scatter_autograd", "tensor"):
            xs = _xs((2 * n, 3 * n, n))
            f: Any
            if name.startswith("gather"):
                f = F.all_gather_single_autograd if "autograd" in name else F.all_gather_single
                y = f(xs[rank], dim, None)
                ys = [torch.cat(xs, dim)] * n
            elif name.startswith("scatter"):
                plain = "autograd" not in name
                f = F.reduce_scatter_single if plain else F.reduce_scatter_single_autograd
                y = f(xs[rank], "sum", dim, None)
                ys = list(sum(xs[1:], xs[0]).chunk(n, dim))
            else:
                y = F.all_gather_tensor_autograd(xs[rank], dim, None)
                y = F.reduce_scatter_tensor_autograd(y, "avg", dim, None)
                ys = list(torch.cat(xs, dim).chunk(n, dim))
            gs = [smooth_values(tuple(t.shape), torch.float64, r, salt=4) for r, t in enumerate(ys)]
            want = torch.autograd.grad(ys, xs, gs)[rank]
            (got,) = torch.autograd.grad(y, xs[rank], gs[rank])
            _assert_close(got, want, f"{name} dim {dim}")


@pytest.mark.parametrize("size", (1, 2, 3))
def test_any_dimension(size: int) -> None:
    run(size, _any_dimension)


def _rooted_any_dimension() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    root, nothing = n - 1, 0
    for dim in (0, 1, -1):
        xs = _xs((2 * n, n))
        y = F.gather(xs[rank], root, None, gather_dim=dim)
        g = smooth_values(tuple(torch.cat(xs, dim).shape), torch.float64, 9)
        (got,) = torch.autograd.grad(y, xs[rank], g if rank == root else torch.empty_like(y))
        _assert_close(got, g.chunk(n, dim)[rank], f"gather dim {dim}")

        y = F.scatter(xs[rank], root, None, scatter_dim=dim)
        gs = [smooth_values(tuple(y.shape), torch.float64, r, salt=4) for r in range(n)]
        (got,) = torch.autograd.grad(y, xs[rank], gs[rank])
        want = torch.cat(gs, dim) if rank == root else torch.zeros_like(got) + nothing
        _assert_close(got, want, f"scatter dim {dim}")


@pytest.mark.parametrize("size", (1, 2, 3))
def test_gather_and_scatter_any_dimension(size: int) -> None:
    run(size, _rooted_any_dimension)


def _megatron_pair() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    xs = _xs((3, 2))
    gs = [smooth_values((3, 2), torch.float64, r, salt=4) for r in range(n)]
    y = F.copy_to_group(xs[rank], None)
    _assert_close(y, xs[rank], "copy_to_group")
    (got,) = torch.autograd.grad(y, xs[rank], gs[rank])
    _assert_close(got, sum(gs[1:], gs[0]), "copy_to_group's gradient")
    y = F.reduce_from_group(xs[rank], None)
    _assert_close(y, sum(xs[1:], xs[0]), "reduce_from_group")
    (got,) = torch.autograd.grad(y, xs[rank], gs[rank])
    _assert_close(got, gs[rank], "reduce_from_group's gradient")
    # The gradient is a sum over ranks, and differentiates as one.
    g = gs[rank].clone().requires_grad_()
    (got,) = torch.autograd.grad(F.copy_to_group(xs[rank], None), xs[rank], g, create_graph=True)
    hs = [smooth_values((3, 2), torch.float64, r, salt=5) for r in range(n)]
    (again,) = torch.autograd.grad(got, g, hs[rank])
    _assert_close(again, sum(hs[1:], hs[0]), "copy_to_group's second derivative")


@pytest.mark.parametrize("size", (1, 2, 3))
def test_megatron_pair(size: int) -> None:
    run(size, _megatron_pair)


def _sequence_parallel_block() -> None:
    """Norm on sequence shards, tensor-parallel MLP between: gradients of one process's block."""
    n, rank = dist.get_world_size(), dist.get_rank()
    x = smooth_values((2 * n, 6), torch.float64, 1)
    w1, w2 = (
        smooth_values((6, 4 * n), torch.float64, 2),
        smooth_values((4 * n, 6), torch.float64, 3),
    )
    gain = smooth_values((6,), torch.float64, 4)

    leaves = [t.clone().requires_grad_() for t in (x, w1, w2, gain)]
    h = torch.nn.functional.layer_norm(leaves[0], (6,), leaves[3])
    whole = (leaves[0] + (h @ leaves[1]).relu() @ leaves[2]).square().sum()
    want = torch.autograd.grad(whole, leaves)

    mine = [
        x.chunk(n)[rank].clone().requires_grad_(),
        w1.chunk(n, 1)[rank].clone().requires_grad_(),
        w2.chunk(n)[rank].clone().requires_grad_(),
        gain.clone().requires_grad_(),
    ]
    h = torch.nn.functional.layer_norm(mine[0], (6,), mine[3])
    h = F.all_gather_single(h, 0, None)
    h = F.reduce_scatter_single((h @ mine[1]).relu() @ mine[2], "sum", 0, None)
    part = (mine[0] + h).square().sum()
    _assert_close(F.all_reduce(part.detach(), "sum", None), whole, "loss")
    got = list(torch.autograd.grad(part, mine))
    got[3] = F.all_reduce(got[3], "sum", None)  # replicated parameters sum over the sequence
    for name, g, w in zip(
        ("x", "w1", "w2", "gain"),
        got,
        (want[0].chunk(n)[rank], want[1].chunk(n, 1)[rank], want[2].chunk(n)[rank], want[3]),
        strict=True,
    ):
        _assert_close(g, w, name)


@pytest.mark.parametrize("size", (1, 2, 4))
def test_sequence_parallel_block(size: int) -> None:
    run(size, _sequence_parallel_block)


def _chain_and_reuse() -> None:
    """A result used twice, collectives of collectives, and a branch that needs no gradient."""
    n, rank = dist.get_world_size(), dist.get_rank()
    xs = _xs((n, 2))
    gs = [smooth_values((n, 2), torch.float64, r, salt=4) for r in range(n)]

    def local(x: Tensor) -> Tensor:
        a = F.all_reduce(x * x, "sum", None)
        b = F.all_to_all_single(a * x, None, None, None)
        c = F.broadcast(b + a, n - 1, None)
        with torch.no_grad():
            F.all_reduce(c, "max", None)
        return c * a + F.permute_tensor(b, [(m + 1) % n for m in range(n)], None)

    def whole() -> list[Tensor]:
        a = sum(x * x for x in xs)
        sent = [a * x for x in xs]
        b = [torch.stack([s[r] for s in sent]) for r in range(n)]
        c = b[n - 1] + a
        return [c * a + b[(r - 1) % n] for r in range(n)]

    ys = whole()
    want = torch.autograd.grad(ys, xs, gs)[rank]
    leaf = xs[rank].detach().clone().requires_grad_()
    y = local(leaf)
    _assert_close(y, ys[rank], "value")
    (got,) = torch.autograd.grad(y, leaf, gs[rank])
    _assert_close(got, want, "gradient")
    leaf.grad = None
    checkpoint(local, leaf, use_reentrant=False).backward(gs[rank])
    _assert_close(leaf.grad, want, "gradient under checkpoint")


@pytest.mark.parametrize("size", (1, 2, 3))
def test_composition(size: int) -> None:
    run(size, _chain_and_reuse)


def _forward_mode() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    x = smooth_values((n, 2), torch.float64, rank)
    ts = [smooth_values((n, 2), torch.float64, r, salt=3) for r in range(n)]
    total = sum(ts[1:], ts[0])
    calls = {
        "all_reduce": (lambda x: F.all_reduce(x, "sum", None), total),
        "avg": (lambda x: F.all_reduce(x, "avg", None), total / n),
        "all_gather_single": (lambda x: F.all_gather_single(x, 0, None), torch.cat(ts)),
        "reduce_scatter_single": (
            lambda x: F.reduce_scatter_single(x, "sum", 0, None),
            total.chunk(n)[rank],
        ),
        "broadcast": (lambda x: F.broadcast(x, n - 1, None), ts[n - 1]),
        "copy_to_group": (lambda x: F.copy_to_group(x, None), ts[rank]),
        "reduce_from_group": (lambda x: F.reduce_from_group(x, None), total),
    }
    for name, (f, want) in calls.items():
        with forward_ad.dual_level():
            y = f(forward_ad.make_dual(x, ts[rank]))
            tangent = forward_ad.unpack_dual(y).tangent
            assert tangent is not None, f"{name} drops the tangent"
            _assert_close(tangent, want, name)


@pytest.mark.parametrize("size", (1, 2))
def test_forward_mode(size: int) -> None:
    run(size, _forward_mode)


def _in_place_keeps_history() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    xs = _xs((3,))
    gs = [smooth_values((3,), torch.float64, r, salt=4) for r in range(n)]
    y = xs[rank] * 2
    z = y[:2]  # a view taken before, read after
    torch.ops.c10d_ext.all_reduce_(y, "sum", group())
    wait(y)
    total = 2 * sum(xs[1:], xs[0])
    _assert_close(y, total)
    _assert_close(z, total[:2])
    assert y._version == 1
    (got,) = torch.autograd.grad(z, xs[rank], gs[rank][:2])
    want = 2 * sum(gs[1:], gs[0])
    want[2] = 0
    _assert_close(got, want)
    # Written through a view, and read through it.
    ops = torch.ops.c10d_ext
    for op, rest in ((ops.all_reduce_, ("sum", group())), (ops.broadcast_, (0, group()))):
        view = (xs[rank] * 2).view(3, 1)
        op(view, *rest)
        (got,) = torch.autograd.grad(wait(view), xs[rank], gs[rank].view(3, 1))
        counts = op is ops.all_reduce_ or rank == 0
        _assert_close(got, 2 * sum(gs[1:], gs[0]) * counts, op)


@pytest.mark.parametrize("size", (1, 2))
def test_in_place_rebases_history(size: int) -> None:
    run(size, _in_place_keeps_history)


def _in_place_lists() -> None:
    """A list's gradients travel in one message; tensors that are views have a node each."""
    n = dist.get_world_size()
    leaves = [x.requires_grad_() for x in (*_xs((2, 3))[:1], *_xs((4,), 1)[:1])]
    weights = [_xs((2, 3), 2)[0], _xs((4,), 3)[0]]

    def gradients(temporaries: list[Tensor]) -> tuple[Tensor, ...]:
        ys = torch.ops.c10d_ext.all_reduce_coalesced_(temporaries, "sum", group())
        loss = sum((wait(y).reshape(w.shape) * w).sum() for y, w in zip(ys, weights, strict=True))
        return torch.autograd.grad(loss, leaves)

    plain = [x * 1 for x in leaves]
    for grad, weight in zip(gradients(plain), weights, strict=True):
        _assert_close(grad, n * weight)
    assert plain[0].grad_fn is plain[1].grad_fn
    views = [(x * 1).view(-1) for x in leaves]
    for grad, weight in zip(gradients(views), weights, strict=True):
        _assert_close(grad, n * weight)
    # Where only one is differentiable, the others stay plain.
    mixed = [leaves[0] * 1, torch.ones(4, dtype=torch.float64)]
    torch.ops.c10d_ext.all_reduce_coalesced_(mixed, "sum", group())
    assert wait(mixed[0]).requires_grad
    assert not wait(mixed[1]).requires_grad
    _assert_close(torch.autograd.grad(mixed[0].sum(), leaves[0])[0], torch.full_like(leaves[0], n))


@pytest.mark.parametrize("size", (1, 2))
def test_in_place_lists(size: int) -> None:
    run(size, _in_place_lists)


def _inplace_functions() -> None:
    """They write directly where nothing is recorded, and differentiate where it is."""
    n, rank = dist.get_world_size(), dist.get_rank()
    leaf = _xs((2 * n, 3))[rank].requires_grad_()
    total = n * torch.ones(2 * n, 3, dtype=torch.float64)
    outs = {
        "all_reduce": F.all_reduce_inplace(leaf * 1, "sum", None),
        "all_gather": F.all_gather_tensor_inplace(leaf.new_empty(2 * n * n, 3), leaf, None),
        "all_to_all": F.all_to_all_inplace(leaf.new_empty(2 * n, 3), leaf, None, None, None),
    }
    wants = {"all_reduce": total, "all_gather": total, "all_to_all": total / n}
    for name, out in outs.items():
        _assert_close(torch.autograd.grad(out.sum(), leaf)[0], wants[name], name)
    out = F.reduce_scatter_tensor_inplace(leaf.new_empty(2, 3), leaf, "sum", None)
    _assert_close(torch.autograd.grad(out.sum(), leaf)[0], total / n)
    out = F.broadcast_inplace(leaf * 1, 0, None)
    _assert_close(torch.autograd.grad(out.sum(), leaf)[0], total * (rank == 0))
    with torch.no_grad():
        assert not F.all_reduce_inplace(leaf * 1, "sum", None).requires_grad
    with pytest.raises(RuntimeError, match="leaf"):
        F.all_reduce_inplace(leaf, "sum", None)


@pytest.mark.parametrize("size", (1, 2))
def test_inplace_functions(size: int) -> None:
    run(size, _inplace_functions)


def _saved_tensors_are_checked() -> None:
    """A value saved for backward and then overwritten by a collective is noticed."""
    x = smooth_values((3,), torch.float64, dist.get_rank()).requires_grad_()
    y = x * 2
    z = y * y
    wait(torch.ops.c10d_ext.all_reduce_(y, "sum", group()))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


def test_overwriting_a_saved_value_is_noticed() -> None:
    run(2, _saved_tensors_are_checked)


def _bitwise_has_no_gradient() -> None:
    x = torch.arange(4)
    y = F.all_reduce(x, "bor", None)
    assert not y.requires_grad
    name = group()
    for dtype in (torch.int64, torch.bool, torch.uint8):
        z = wait(torch.ops.c10d_ext.all_reduce(torch.ones(3, dtype=dtype), "band", name))
        assert not z.requires_grad


def test_integers_need_no_gradient() -> None:
    run(2, _bitwise_has_no_gradient)


def _out_refuses_gradients() -> None:
    n = dist.get_world_size()
    x = torch.ones(n, requires_grad=True)
    with pytest.raises(RuntimeError, match="all_reduce_out"):
        torch.ops.c10d_ext.all_reduce_out(x, "sum", group(), out=torch.empty(n))
    with torch.no_grad():
        out = torch.empty(n)
        wait(torch.ops.c10d_ext.all_reduce_out(x, "sum", group(), out=out))
        assert torch.equal(out, torch.full((n,), float(n)))


def test_out_forms_refuse_gradients() -> None:
    run(2, _out_refuses_gradients)


def _backward_is_asynchronous_and_in_order() -> None:
    """Backward collectives of independent branches run in one order on all ranks."""
    n, rank = dist.get_world_size(), dist.get_rank()
    x = smooth_values((4,), torch.float64, rank).requires_grad_()
    ws = [smooth_values((4,), torch.float64, r, salt=8) for r in range(10)]
    with in_flight() as gate:
        gate.open_after(0.05)
        ys = [F.all_reduce(x * w, "sum", None) for w in ws]
        loss = sum((y * (i + 1)).sum() for i, y in enumerate(reversed(ys)))
        loss.backward()
    want = sum(n * (10 - i) * w for i, w in enumerate(ws))
    _assert_close(x.grad, want)


def test_backward_of_many_branches() -> None:
    run(2, _backward_is_asynchronous_and_in_order)


def _low_precision_gradients() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        x = values.values((8,), dtype, rank).requires_grad_()
        gs = [values.values((8,), dtype, r, salt=3) for r in range(n)]
        y = F.all_reduce(x, "sum", None)
        (got,) = torch.autograd.grad(y, x, gs[rank])
        text = values.mismatch(got + 0, values.reduce_reference(gs, "sum"))
        assert not text, f"{dtype}: {text}"


@pytest.mark.parametrize("size", (2, 3))
def test_low_precision_gradients_accumulate_wide(size: int) -> None:
    run(size, _low_precision_gradients)
