"""The optimizer between AOTAutograd and the run of its graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import GraphModule

from torch_c10d_ext.optimizer._optimize import optimized_graph
from torch_c10d_ext.optimizer._settings import Settings


def make_backend(settings: Settings, explain: bool) -> Callable[..., Any]:
    """A backend that optimizes forward and backward graphs, and runs them by FX."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def compile_graph(module: GraphModule, inputs: Any) -> Any:
        _, about = optimized_graph(module.graph, settings, in_place=True)
        module.recompile()
        if explain:
            print(about)
        return make_boxed_func(module.forward)

    # As aot_eager has it. The partitioner that is taken else copies collectives of the forward
    # graph into the backward one.
    return aot_autograd(  # type: ignore[no-any-return]
        fw_compiler=compile_graph,
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )
