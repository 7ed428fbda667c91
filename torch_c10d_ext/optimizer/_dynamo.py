"""The optimizer between AOTAutograd and the run of its graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import GraphModule

from torch_c10d_ext.optimizer._optimize import Settings, optimized_graph


def make_backend(settings: Settings, explain: bool) -> Callable[..., Any]:
    """A backend that optimizes forward and backward graphs, and runs them by FX."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    def compile_graph(module: GraphModule, inputs: Any) -> Any:
        _, about = optimized_graph(module.graph, settings, in_place=True)
        module.recompile()
        if explain:
            print(about)
        return make_boxed_func(module.forward)

    return aot_autograd(fw_compiler=compile_graph)  # type: ignore[no-any-return]
