"""What nodes cost: seconds of computation, seconds on a link, bytes of memory.

All of it from shapes, so that ranks that run one program come to the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from torch_c10d_ext.optimizer._collectives import tensors_in, value_of
from torch_c10d_ext.report import Compute, Link
from torch_c10d_ext.report._flops import flops

# Stands for every size that is not known when the graph is made. What was traced with may differ
# between ranks, and so must not decide anything.
UNKNOWN_SIZE = 1024


@dataclass
class Costs:
    """The cost model of one run of the optimizer.

    Args:
        link: what a collective costs on a group that ``links`` does not name.
        links: by group name.
        compute: rates, or a function of a node in seconds.
        sizes: values of symbolic sizes by name.
    """

    link: Link = field(default_factory=Link)
    links: Mapping[str, Link] = field(default_factory=dict)
    compute: Compute | Callable[[Node], float] = field(default_factory=Compute)
    sizes: Mapping[str, int] = field(default_factory=dict)
    _known: dict[Any, int] = field(default_factory=dict)

    def size(self, value: Any) -> int:
        """A number for a size."""
        if type(value) is int:
            return value
        if isinstance(value, torch.SymInt):
            if value.node.is_constant() if hasattr(value.node, "is_constant") else False:
                return int(value)
            expression = value.node.expr
            if expression not in self._known:
                numbers = {s: self.sizes.get(s.name, UNKNOWN_SIZE) for s in expression.free_symbols}
                self._known[expression] = max(0, int(expression.subs(numbers)))
            return self._known[expression]
        return int(value)

    def elements(self, tensor: torch.Tensor) -> int:
        count = 1
        for size in tensor.shape:
            count *= size if type(size) is int else self.size(size)
        return count

    def bytes_of(self, value: Any) -> int:
        return sum(self.elements(t) * t.dtype.itemsize for t in tensors_in(value))

    def storage_bytes(self, tensor: torch.Tensor) -> int:
        """Bytes of the memory behind a tensor, which may be larger than the tensor."""
        size = tensor.untyped_storage().nbytes()
        return size if type(size) is int else self.size(size)

    def link_of(self, group: str) -> Link:
        return self.links.get(group, self.link)

    def lane_of(self, group: str) -> str:
        """The name of the resource that the group's collectives take turns on."""
        link = self.link_of(group)
        return f"link {link.shared}" if link.shared else f"group {group}"

    def seconds(self, node: Node, op: Any) -> float:
        """How long the rank computes."""
        if not isinstance(self.compute, Compute):
            return float(self.compute(node))
        moved = self.bytes_of(value_of(node))
        for given in node.all_input_nodes:
            moved += self.bytes_of(value_of(given))
        return max(moved / self.compute.memory_bandwidth, self.flops(node, op) / self.compute.flops)

    def copy_seconds(self, value: Any) -> float:
        """How long a copy of a result takes."""
        rates = self.compute if isinstance(self.compute, Compute) else Compute()
        return 2 * self.bytes_of(value) / rates.memory_bandwidth

    def flops(self, node: Node, op: Any) -> float:
        """Floating-point operations of products, attention and convolutions."""
        return flops(node, op, value_of, self.size)
