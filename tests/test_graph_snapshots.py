"""The graphs that AOTAutograd hands to a compiler for each function of torch_c10d_ext.distributed.

``EXPECTTEST_ACCEPT=1`` writes what is found into this file.
"""

from __future__ import annotations

import functools
import textwrap
from typing import Any

import expecttest
import torch
import torch.distributed as dist
from torch import Tensor

import torch_c10d_ext.distributed as ours
from tests.backends.dist_ops import BY_NAME, DIST_OPS, How, inputs_of
from tests.harness import run

COLLECTIVES = [collective.name for collective in DIST_OPS if "isend" not in collective.name]


_WRAP: Any = {"subsequent_indent": "    ", "break_long_words": False, "break_on_hyphens": False}


def _text(graph: torch.fx.Graph) -> str:
    """A line for each call: its name, its op, its arguments; then what is returned."""
    lines = []
    for node in graph.nodes:
        if node.op == "call_function":
            given = [str(arg) for arg in node.args] + [f"{k}={v}" for k, v in node.kwargs.items()]
            lines.append(f"{node.name} = {node.target}({', '.join(given)})")
        elif node.op == "output":
            lines.append(f"return {node.args[0]}")
    text = "".join(textwrap.fill(line, 98, **_WRAP) + "\n" for line in lines)
    return text.replace(", pin_memory=False", "")


def _barriers(x: Tensor) -> Tensor:
    ours.all_reduce(x)
    ours.barrier()
    work = ours.barrier(async_op=True)
    ours.all_reduce(x)
    work.wait()
    return x * 2


def _graphs() -> dict[str, str]:
    n, rank, found = dist.get_world_size(), dist.get_rank(), {}
    graphs: list[str] = []

    def keep(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(_text(gm.graph))
        return gm.forward

    backend = torch._dynamo.backends.common.aot_autograd(fw_compiler=keep)
    for name in [*COLLECTIVES, "barrier", "barriers", "all_reduce async"]:
        torch._dynamo.reset()
        graphs.clear()
        if name == "barrier":
            torch.compile(lambda x: (ours.barrier(), x * 2)[1], backend=backend, fullgraph=True)(
                torch.ones(2)
            )
        elif name == "barriers":
            torch.compile(_barriers, backend=backend, fullgraph=True)(torch.ones(2))
        else:
            collective = BY_NAME[name.removesuffix(" async")]
            how = How(root=1, async_op=name.endswith("async"), api=ours)
            xs = inputs_of(collective, n, (2, 3), torch.float32, how)[rank]
            shapes = collective.outputs(n, rank, (2, 3), how.root)
            outs = xs if collective.inplace else [torch.zeros(shape) for shape in shapes]

            def program(xs: list[Tensor], outs: list[Tensor], how: How = how) -> list[Tensor]:
                work = collective.call(xs, outs, how)  # noqa: B023
                between = [x * 2 for x in xs]
                if work is not None:
                    work.wait()
                return between

            torch.compile(program, backend=backend, fullgraph=True)(xs, outs)
        found[name] = "---\n".join(graphs)
    return found


@functools.cache
def _found() -> list[dict[str, str]]:
    return run(2, _graphs, deadline=150)


def _method(name: str) -> str:
    return "test_" + name.replace(" ", "_")


class TestGraphs(expecttest.TestCase):
    """Rank 1 of 2, which is the root."""

    maxDiff = None

    def test_every_collective_is_here(self) -> None:
        names = {_method(name) for name in _found()[1]}
        assert names <= set(dir(self))

    def test_ranks_have_the_same_graphs_but_for_the_root(self) -> None:
        zero, one = _found()
        rooted = {"reduce", "gather", "scatter", "all_gather uneven", "reduce_scatter uneven"}
        rooted |= {"all_to_all uneven", "all_to_all_single uneven"}
        assert [name for name in zero if zero[name] != one[name] and name not in rooted] == []

    def expect(self, name: str, text: str) -> None:
        self.assertExpectedInline(_found()[1][name], text, skip=1)

    def test_all_reduce(self) -> None:
        self.expect(
            "all_reduce",
            """\
all_reduce = c10d_ext.all_reduce.default(arg0_1, sum, 0)
wait_tensor = _c10d_functional.wait_tensor.default(all_reduce)
view = aten.view.default(wait_tensor, [2, 3])
copy = aten.copy.default(arg0_1, view)
mul = aten.mul.Tensor(copy, 2)
return (copy, mul)
""",
        )

    def test_all_reduce_coalesced(self) -> None:
        self.expect(
            "all_reduce_coalesced",
            """\
all_reduce_coalesced = c10d_ext.all_reduce_coalesced.default([arg0_1, arg1_1, arg2_1], sum, 0)
getitem = <built-in function getitem>(all_reduce_coalesced, 0)
getitem_1 = <built-in function getitem>(all_reduce_coalesced, 1)
getitem_2 = <built-in function getitem>(all_reduce_coalesced, 2)
wait_tensor = _c10d_functional.wait_tensor.default(getitem)
view = aten.view.default(wait_tensor, [2, 3])
copy = aten.copy.default(arg0_1, view)
wait_tensor_1 = _c10d_functional.wait_tensor.default(getitem_1)
view_1 = aten.view.default(wait_tensor_1, [0, 3])
copy_1 = aten.copy.default(arg1_1, view_1)
wait_tensor_2 = _c10d_functional.wait_tensor.default(getitem_2)
view_2 = aten.view.default(wait_tensor_2, [4, 3])
copy_2 = aten.copy.default(arg2_1, view_2)
mul = aten.mul.Tensor(copy, 2)
mul_1 = aten.mul.Tensor(copy_1, 2)
mul_2 = aten.mul.Tensor(copy_2, 2)
return (copy, copy_1, copy_2, mul, mul_1, mul_2)
""",
        )

    def test_all_reduce_in_a_coalescing_manager(self) -> None:
        self.expect(
            "all_reduce in a coalescing manager",
            """\
all_reduce_coalesced = c10d_ext.all_reduce_coalesced.default([arg0_1, arg1_1, arg2_1], sum, 0)
getitem = <built-in function getitem>(all_reduce_coalesced, 0)
getitem_1 = <built-in function getitem>(all_reduce_coalesced, 1)
getitem_2 = <built-in function getitem>(all_reduce_coalesced, 2)
mul = aten.mul.Tensor(arg0_1, 2)
mul_1 = aten.mul.Tensor(arg1_1, 2)
mul_2 = aten.mul.Tensor(arg2_1, 2)
wait_tensor = _c10d_functional.wait_tensor.default(getitem)
view = aten.view.default(wait_tensor, [2, 3])
copy = aten.copy.default(arg0_1, view)
wait_tensor_1 = _c10d_functional.wait_tensor.default(getitem_1)
view_1 = aten.view.default(wait_tensor_1, [0, 3])
copy_1 = aten.copy.default(arg1_1, view_1)
wait_tensor_2 = _c10d_functional.wait_tensor.default(getitem_2)
view_2 = aten.view.default(wait_tensor_2, [4, 3])
copy_2 = aten.copy.default(arg2_1, view_2)
return (copy, copy_1, copy_2, mul, mul_1, mul_2)
""",
        )

    def test_reduce(self) -> None:
        self.expect(
            "reduce",
            """\
reduce = c10d_ext.reduce.default(arg0_1, sum, 1, 0)
wait_tensor = _c10d_functional.wait_tensor.default(reduce)
view = aten.view.default(wait_tensor, [2, 3])
copy = aten.copy.default(arg0_1, view)
mul = aten.mul.Tensor(copy, 2)
return (copy, mul)
""",
        )

    def test_broadcast(self) -> None:
        self.expect(
            "broadcast",
            """\
broadcast = c10d_ext.broadcast.default(arg0_1, 1, 0)
wait_tensor = _c10d_functional.wait_tensor.default(broadcast)
view = aten.view.default(wait_tensor, [2, 3])
copy = aten.copy.default(arg0_1, view)
mul = aten.mul.Tensor(copy, 2)
return (copy, mul)
""",
        )

    def test_all_gather(self) -> None:
        self.expect(
            "all_gather",
            """\
view = aten.view.default(arg0_1, [-1])
all_gather = c10d_ext.all_gather.default(view, [6, 6], 0)
wait_tensor = _c10d_functional.wait_tensor.default(all_gather)
view_1 = aten.view.default(wait_tensor, [-1])
split_with_sizes = aten.split_with_sizes.default(view_1, [6, 6])
getitem = <built-in function getitem>(split_with_sizes, 0)
getitem_1 = <built-in function getitem>(split_with_sizes, 1)
view_2 = aten.view.default(getitem, [2, 3])
copy = aten.copy.default(arg1_1, view_2)
view_3 = aten.view.default(getitem_1, [2, 3])
copy_1 = aten.copy.default(arg2_1, view_3)
mul = aten.mul.Tensor(arg0_1, 2)
return (copy, copy_1, mul)
""",
        )

    def test_all_gather_uneven(self) -> None:
        self.expect(
            "all_gather uneven",
            """\
view = aten.view.default(arg0_1, [-1])
all_gather = c10d_ext.all_gather.default(view, [6, 9], 0)
wait_tensor = _c10d_functional.wait_tensor.default(all_gather)
view_1 = aten.view.default(wait_tensor, [-1])
split_with_sizes = aten.split_with_sizes.default(view_1, [6, 9])
getitem = <built-in function getitem>(split_with_sizes, 0)
getitem_1 = <built-in function getitem>(split_with_sizes, 1)
view_2 = aten.view.default(getitem, [2, 3])
copy = aten.copy.default(arg1_1, view_2)
view_3 = aten.view.default(getitem_1, [3, 3])
copy_1 = aten.copy.default(arg2_1, view_3)
mul = aten.mul.Tensor(arg0_1, 2)
return (copy, copy_1, mul)
""",
        )

    def test_all_gather_into_tensor(self) -> None:
        self.expect(
            "all_gather_into_tensor",
            """\
all_gather_into_tensor = c10d_ext.all_gather_into_tensor.default(arg1_1, 2, 0)
wait_tensor = _c10d_functional.wait_tensor.default(all_gather_into_tensor)
view = aten.view.default(wait_tensor, [4, 3])
copy = aten.copy.default(arg0_1, view)
mul = aten.mul.Tensor(arg1_1, 2)
return (copy, mul)
""",
        )

    def test_all_gather_into_tensor_stacked(self) -> None:
        self.expect(
            "all_gather_into_tensor stacked",
            """\
all_gather_into_tensor = c10d_ext.all_gather_into_tensor.default(arg1_1, 2, 0)
wait_tensor = _c10d_functional.wait_tensor.default(all_gather_into_tensor)
view = aten.view.default(wait_tensor, [2, 2, 3])
copy = aten.copy.default(arg0_1, view)
mul = aten.mul.Tensor(arg1_1, 2)
return (copy, mul)
""",
        )

    def test_all_gather_into_tensor_in_a_coalescing_manager(self) -> None:
        self.expect(
            "all_gather_into_tensor in a coalescing manager",
            """\
all_gather_into_tensor_coalesced = c10d_ext.all_gather_into_tensor_coalesced.default([arg1_1,
    arg3_1, arg5_1], 2, 0)
getitem = <built-in function getitem>(all_gather_into_tensor_coalesced, 0)
getitem_1 = <built-in function getitem>(all_gather_into_tensor_coalesced, 1)
getitem_2 = <built-in function getitem>(all_gather_into_tensor_coalesced, 2)
mul = aten.mul.Tensor(arg1_1, 2)
mul_1 = aten.mul.Tensor(arg3_1, 2)
mul_2 = aten.mul.Tensor(arg5_1, 2)
wait_tensor = _c10d_functional.wait_tensor.default(getitem)
view = aten.view.default(wait_tensor, [4, 3])
copy = aten.copy.default(arg0_1, view)
wait_tensor_1 = _c10d_functional.wait_tensor.default(getitem_1)
view_1 = aten.view.default(wait_tensor_1, [0, 3])
copy_1 = aten.copy.default(arg2_1, view_1)
wait_tensor_2 = _c10d_functional.wait_tensor.default(getitem_2)
view_2 = aten.view.default(wait_tensor_2, [8, 3])
copy_2 = aten.copy.default(arg4_1, view_2)
return (copy, copy_1, copy_2, mul, mul_1, mul_2)
""",
        )

    def test_reduce_scatter(self) -> None:
        self.expect(
            "reduce_scatter",
            """\
view = aten.view.default(arg1_1, [-1])
view_1 = aten.view.default(arg2_1, [-1])
cat = aten.cat.default([view, view_1])
reduce_scatter = c10d_ext.reduce_scatter.default(cat, sum, [6, 6], 0)
wait_tensor = _c10d_functional.wait_tensor.default(reduce_scatter)
view_2 = aten.view.default(wait_tensor, [2, 3])
copy = aten.copy.default(arg0_1, view_2)
mul = aten.mul.Tensor(arg1_1, 2)
mul_1 = aten.mul.Tensor(arg2_1, 2)
return (copy, mul, mul_1)
""",
        )

    def test_reduce_scatter_uneven(self) -> None:
        self.expect(
            "reduce_scatter uneven",
            """\
view = aten.view.default(arg1_1, [-1])
view_1 = aten.view.default(arg2_1, [-1])
cat = aten.cat.default([view, view_1])
reduce_scatter = c10d_ext.reduce_scatter.default(cat, sum, [6, 9], 0)
wait_tensor = _c10d_functional.wait_tensor.default(reduce_scatter)
view_2 = aten.view.default(wait_tensor, [3, 3])
copy = aten.copy.default(arg0_1, view_2)
mul = aten.mul.Tensor(arg1_1, 2)
mul_1 = aten.mul.Tensor(arg2_1, 2)
return (copy, mul, mul_1)
""",
        )

    def test_reduce_scatter_tensor(self) -> None:
        self.expect(
            "reduce_scatter_tensor",
            """\
reduce_scatter_tensor = c10d_ext.reduce_scatter_tensor.default(arg1_1, sum, 2, 0)
wait_tensor = _c10d_functional.wait_tensor.default(reduce_scatter_tensor)
view = aten.view.default(wait_tensor, [2, 3])
copy = aten.copy.default(arg0_1, view)
mul = aten.mul.Tensor(arg1_1, 2)
return (copy, mul)
""",
        )

    def test_reduce_scatter_tensor_stacked(self) -> None:
        self.expect(
            "reduce_scatter_tensor stacked",
            """\
reduce_scatter_tensor = c10d_ext.reduce_scatter_tensor.default(arg1_1, sum, 2, 0)
wait_tensor = _c10d_functional.wait_tensor.default(reduce_scatter_tensor)
view = aten.view.default(wait_tensor, [2, 3])
copy = aten.copy.default(arg0_1, view)
mul = aten.mul.Tensor(arg1_1, 2)
return (copy, mul)
""",
        )

    def test_reduce_scatter_tensor_in_a_coalescing_manager(self) -> None:
        self.expect(
            "reduce_scatter_tensor in a coalescing manager",
            """\
reduce_scatter_tensor_coalesced = c10d_ext.reduce_scatter_tensor_coalesced.default([arg1_1,
    arg3_1, arg5_1], sum, 2, 0)
getitem = <built-in function getitem>(reduce_scatter_tensor_coalesced, 0)
getitem_1 = <built-in function getitem>(reduce_scatter_tensor_coalesced, 1)
getitem_2 = <built-in function getitem>(reduce_scatter_tensor_coalesced, 2)
mul = aten.mul.Tensor(arg1_1, 2)
mul_1 = aten.mul.Tensor(arg3_1, 2)
mul_2 = aten.mul.Tensor(arg5_1, 2)
wait_tensor = _c10d_functional.wait_tensor.default(getitem)
view = aten.view.default(wait_tensor, [2, 3])
copy = aten.copy.default(arg0_1, view)
wait_tensor_1 = _c10d_functional.wait_tensor.default(getitem_1)
view_1 = aten.view.default(wait_tensor_1, [0, 3])
copy_1 = aten.copy.default(arg2_1, view_1)
wait_tensor_2 = _c10d_functional.wait_tensor.default(getitem_2)
view_2 = aten.view.default(wait_tensor_2, [4, 3])
copy_2 = aten.copy.default(arg4_1, view_2)
return (copy, copy_1, copy_2, mul, mul_1, mul_2)
""",
        )

    def test_all_to_all(self) -> None:
        self.expect(
            "all_to_all",
            """\
view = aten.view.default(arg0_1, [-1])
view_1 = aten.view.default(arg1_1, [-1])
cat = aten.cat.default([view, view_1])
all_to_all_single = c10d_ext.all_to_all_single.default(cat, [6, 6], [6, 6], 0)
wait_tensor = _c10d_functional.wait_tensor.default(all_to_all_single)
view_2 = aten.view.default(wait_tensor, [-1])
split_with_sizes = aten.split_with_sizes.default(view_2, [6, 6])
getitem = <built-in function getitem>(split_with_sizes, 0)
getitem_1 = <built-in function getitem>(split_with_sizes, 1)
view_3 = aten.view.default(getitem, [2, 3])
copy = aten.copy.default(arg2_1, view_3)
view_4 = aten.view.default(getitem_1, [2, 3])
copy_1 = aten.copy.default(arg3_1, view_4)
mul = aten.mul.Tensor(arg0_1, 2)
mul_1 = aten.mul.Tensor(arg1_1, 2)
return (copy, copy_1, mul, mul_1)
""",
        )

    def test_all_to_all_uneven(self) -> None:
        self.expect(
            "all_to_all uneven",
            """\
view = aten.view.default(arg0_1, [-1])
view_1 = aten.view.default(arg1_1, [-1])
cat = aten.cat.default([view, view_1])
all_to_all_single = c10d_ext.all_to_all_single.default(cat, [9, 6], [12, 6], 0)
wait_tensor = _c10d_functional.wait_tensor.default(all_to_all_single)
view_2 = aten.view.default(wait_tensor, [-1])
split_with_sizes = aten.split_with_sizes.default(view_2, [9, 6])
getitem = <built-in function getitem>(split_with_sizes, 0)
getitem_1 = <built-in function getitem>(split_with_sizes, 1)
view_3 = aten.view.default(getitem, [3, 3])
copy = aten.copy.default(arg2_1, view_3)
view_4 = aten.view.default(getitem_1, [2, 3])
copy_1 = aten.copy.default(arg3_1, view_4)
mul = aten.mul.Tensor(arg0_1, 2)
mul_1 = aten.mul.Tensor(arg1_1, 2)
return (copy, copy_1, mul, mul_1)
""",
        )

    def test_all_to_all_single(self) -> None:
        self.expect(
            "all_to_all_single",
            """\
all_to_all_single = c10d_ext.all_to_all_single.default(arg1_1, [2, 2], [2, 2], 0)
wait_tensor = _c10d_functional.wait_tensor.default(all_to_all_single)
view = aten.view.default(wait_tensor, [4, 3])
copy = aten.copy.default(arg0_1, view)
mul = aten.mul.Tensor(arg1_1, 2)
return (copy, mul)
""",
        )

    def test_all_to_all_single_uneven(self) -> None:
        self.expect(
            "all_to_all_single uneven",
            """\
all_to_all_single = c10d_ext.all_to_all_single.default(arg1_1, [1, 0], [2, 0], 0)
wait_tensor = _c10d_functional.wait_tensor.default(all_to_all_single)
view = aten.view.default(wait_tensor, [1, 3])
copy = aten.copy.default(arg0_1, view)
mul = aten.mul.Tensor(arg1_1, 2)
return (copy, mul)
""",
        )

    def test_gather(self) -> None:
        self.expect(
            "gather",
            """\
view = aten.view.default(arg1_1, [-1])
gather = c10d_ext.gather.default(view, 1, 0)
wait_tensor = _c10d_functional.wait_tensor.default(gather)
view_1 = aten.view.default(wait_tensor, [-1])
split_with_sizes = aten.split_with_sizes.default(view_1, [6, 6])
getitem = <built-in function getitem>(split_with_sizes, 0)
getitem_1 = <built-in function getitem>(split_with_sizes, 1)
view_2 = aten.view.default(getitem, [2, 3])
copy = aten.copy.default(arg0_1, view_2)
view_3 = aten.view.default(getitem_1, [2, 3])
copy_1 = aten.copy.default(arg2_1, view_3)
mul = aten.mul.Tensor(arg1_1, 2)
return (copy, copy_1, mul)
""",
        )

    def test_scatter(self) -> None:
        self.expect(
            "scatter",
            """\
view = aten.view.default(arg0_1, [-1])
view_1 = aten.view.default(arg2_1, [-1])
cat = aten.cat.default([view, view_1])
scatter = c10d_ext.scatter.default(cat, 1, 0, size=6)
wait_tensor = _c10d_functional.wait_tensor.default(scatter)
view_2 = aten.view.default(wait_tensor, [2, 3])
copy = aten.copy.default(arg1_1, view_2)
mul = aten.mul.Tensor(arg0_1, 2)
mul_1 = aten.mul.Tensor(arg2_1, 2)
return (copy, mul, mul_1)
""",
        )

    def test_barrier(self) -> None:
        self.expect(
            "barrier",
            """\
empty = aten.empty.memory_format([1], device=cpu)
barrier = c10d_ext.barrier.default(empty, 0)
wait_tensor = _c10d_functional.wait_tensor.default(barrier)
mul = aten.mul.Tensor(arg0_1, 2)
return (mul,)
""",
        )

    def test_barriers(self) -> None:
        self.expect(
            "barriers",
            """\
all_reduce = c10d_ext.all_reduce.default(arg0_1, sum, 0)
wait_tensor = _c10d_functional.wait_tensor.default(all_reduce)
view = aten.view.default(wait_tensor, [2])
copy = aten.copy.default(arg0_1, view)
empty = aten.empty.memory_format([1], device=cpu)
barrier = c10d_ext.barrier.default(empty, 0)
wait_tensor_1 = _c10d_functional.wait_tensor.default(barrier)
empty_1 = aten.empty.memory_format([1], device=cpu)
barrier_1 = c10d_ext.barrier.default(empty_1, 0)
all_reduce_1 = c10d_ext.all_reduce.default(copy, sum, 0)
wait_tensor_2 = _c10d_functional.wait_tensor.default(all_reduce_1)
view_1 = aten.view.default(wait_tensor_2, [2])
copy_1 = aten.copy.default(copy, view_1)
wait_tensor_3 = _c10d_functional.wait_tensor.default(barrier_1)
mul = aten.mul.Tensor(copy_1, 2)
return (copy_1, mul)
""",
        )

    def test_all_reduce_async(self) -> None:
        self.expect(
            "all_reduce async",
            """\
all_reduce = c10d_ext.all_reduce.default(arg0_1, sum, 0)
mul = aten.mul.Tensor(arg0_1, 2)
wait_tensor = _c10d_functional.wait_tensor.default(all_reduce)
view = aten.view.default(wait_tensor, [2, 3])
copy = aten.copy.default(arg0_1, view)
return (copy, mul)
""",
        )
