"""wait_tensor: ends a collective; on any other tensor it does nothing."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import torch_c10d_ext
from tests.contract import Report, calls_in, group, verify, wait
from tests.harness import run, values
from tests.harness.flight import in_flight


def _returns_its_argument() -> None:
    for dtype in values.DTYPES:
        for shape in ((), (0,), (2, 3)):
            x = values.bits(shape, dtype, 0)
            for layout in values.layouts(dtype, shape):
                y = values.lay_out(x, layout)
                before, version = values.memory(y), y._version
                z = wait(y)
                assert z.data_ptr() == y.data_ptr()
                assert (z.shape, z.stride()) == (y.shape, y.stride())
                assert values.memory(y) == before
                assert y._version == version
                assert (z.is_conj(), z.is_neg()) == (y.is_conj(), y.is_neg())
    assert torch_c10d_ext.pending_count() == 0


def test_does_nothing_to_a_finished_tensor() -> None:
    run(1, _returns_its_argument)


def _waits_for_the_storage() -> None:
    x = torch.arange(6.0) + dist.get_rank()
    n = dist.get_world_size()
    want = n * torch.arange(6.0) + n * (n - 1) / 2
    with in_flight() as gate:
        y = torch.ops.c10d_ext.all_reduce(x, "sum", group())
        gate.open_after(0.02)
        wait(y[2:4])  # a view of the result
        assert torch.equal(y, want)
    with in_flight() as gate:
        a = torch.ops.c10d_ext.all_reduce(x, "sum", group())
        b = torch.ops.c10d_ext.all_reduce(x, "max", group())
        gate.open_after(0.02)
        assert torch.equal(wait(b), torch.arange(6.0) + n - 1)
        assert torch.equal(wait(a), want)
        assert torch.equal(wait(a), want)


def test_waits_for_whatever_writes_the_storage() -> None:
    run(2, _waits_for_the_storage)


def _two_collectives_on_one_storage() -> None:
    """Halves of one tensor reduced in place: one wait ends both."""
    rank, n = dist.get_rank(), dist.get_world_size()
    with in_flight() as gate:
        x = torch.arange(8.0) + rank
        torch.ops.c10d_ext.all_reduce_(x[:4], "sum", group())
        torch.ops.c10d_ext.all_reduce_(x[4:], "max", group())
        gate.open_after(0.02)
        wait(x)
        want = torch.cat((n * torch.arange(4.0) + n * (n - 1) / 2, torch.arange(4.0, 8.0) + n - 1))
        assert torch.equal(x, want)
    assert torch_c10d_ext.pending_count() == 0


def test_one_wait_ends_every_collective_on_a_storage() -> None:
    run(2, _two_collectives_on_one_storage)


def _differentiable() -> None:
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    y = wait(x * 2)
    g = torch.randn(3, dtype=torch.float64)
    (got,) = torch.autograd.grad(y, x, g)
    assert torch.equal(got, 2 * g)
    assert torch.equal(torch.func.grad(lambda x: (wait(x) * g).sum())(x.detach()), g)
    assert torch.equal(torch.func.jvp(wait, (x.detach(),), (g,))[1], g)
    assert torch.equal(torch.func.vmap(wait)(torch.ones(2, 3)), torch.ones(2, 3))


def test_is_the_identity_to_autograd() -> None:
    run(1, _differentiable)


def _opcheck() -> object:
    report = Report()
    for x in (torch.randn(3), torch.randn(2, 3).t(), torch.randn((), requires_grad=True)):
        with report.attempt(f"opcheck of {tuple(x.shape)} strides {x.stride()}"):
            torch.library.opcheck(torch.ops.c10d_ext.wait_tensor.default, (x,))
            report.expect("ran", False)
    return report.result()


def test_opcheck() -> None:
    verify(1, _opcheck)


def _traced() -> None:
    def f(x: Tensor) -> Tensor:
        y = torch.ops.c10d_ext.all_reduce(x, "sum", group())
        return wait(y)

    x = torch.arange(3.0) + dist.get_rank()
    n = dist.get_world_size()
    want = n * torch.arange(3.0) + n * (n - 1) / 2
    for mode in ("real", "fake", "symbolic"):
        traced = make_fx(f, tracing_mode=mode)(x)
        calls = calls_in(traced.graph)
        assert len(calls) == 2 and "wait_tensor" in calls[1], calls
        # Dead code elimination must not take the wait away: its effect is what counts.
        traced.graph.eliminate_dead_code()
        assert torch.equal(traced(x), want)
    with FakeTensorMode():
        assert wait(torch.empty(2, 3).t()).stride() == (1, 3)


@pytest.mark.parametrize("size", (1, 2))
def test_is_recorded_by_tracers(size: int) -> None:
    run(size, _traced)
