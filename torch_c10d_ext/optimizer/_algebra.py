"""Rewrite rules."""

from __future__ import annotations

from collections.abc import Callable

from torch.fx import Graph

from torch_c10d_ext.optimizer._collectives import Collective
from torch_c10d_ext.optimizer._problem import Problem


def simplify(
    graph: Graph, p: Problem, numerics: str, same_bits: Callable[[Collective], bool]
) -> list[str]:
    return []
