"""What the optimizer is told, and what it tells of a graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch.fx import Node

from torch_c10d_ext._groups import (
    group_name,
)
from torch_c10d_ext.errors import InvalidArgument
from torch_c10d_ext.optimizer._costs import Costs
from torch_c10d_ext.report import Compute, Link

# What a schedule may hold where nothing is said: so many times what the graph's own order holds.
DEFAULT_MEMORY = 1.1

_MEBI = 1024 * 1024


@dataclass(frozen=True)
class Settings:
    """What :func:`optimize` and ``communication_options`` take; see there."""

    link: Link = field(default_factory=lambda: Link(shared="network"))
    links: tuple[tuple[str, Link], ...] = ()
    compute: Compute | Callable[[Node], float] = field(default_factory=Compute)
    sizes: tuple[tuple[str, int], ...] = ()
    memory_budget: int | None = None
    bucket_bytes: int = 64 * _MEBI
    numerics: str = "bitwise"
    overlap: bool = True
    bucket: bool = True
    algebra: bool = True
    chunk: bool = True
    agree: str = "every"
    spmd: bool = False

    def __post_init__(self) -> None:
        if self.numerics not in ("bitwise", "rounding"):
            raise InvalidArgument(
                f"optimize: numerics must be 'bitwise' or 'rounding', got {self.numerics!r}"
            )
        if self.agree not in ("every", "first", "never"):
            raise InvalidArgument(
                f"optimize: agree must be 'every', 'first' or 'never', got {self.agree!r}"
            )
        if self.bucket_bytes <= 0:
            raise InvalidArgument(
                f"optimize: bucket_bytes must be positive, got {self.bucket_bytes}"
            )
        if self.memory_budget is not None and self.memory_budget < 0:
            raise InvalidArgument(
                f"optimize: memory_budget must be 0 or more, got {self.memory_budget}"
            )

    @staticmethod
    def of(
        links: Mapping[Any, Link] | None, sizes: Mapping[str, int] | None, **rest: Any
    ) -> Settings:
        """Settings from arguments as users give them; None is the default."""
        named = tuple(sorted((group_name(g), cost) for g, cost in (links or {}).items()))
        given = {k: v for k, v in rest.items() if v is not None}
        return Settings(links=named, sizes=tuple(sorted((sizes or {}).items())), **given)

    def without_agreement(self) -> Settings:
        return replace(self, agree="never")

    def key(self) -> str | None:
        """What a cache may tell these settings from others by; None where nothing does."""
        return repr(self) if isinstance(self.compute, Compute) else None

    def costs(self) -> Costs:
        return Costs(self.link, dict(self.links), self.compute, dict(self.sizes))


@dataclass
class Optimization:
    """What was done with a graph; ``str`` makes a text of it.

    Attributes:
        changed: whether the graph is another one.
        reason: why it is not.
        done: what was done, a line each.
        missed: what was not, and why.
        seconds_before, seconds: of a run, by the cost model.
        peak_before, peak: bytes held at once by results of the graph's nodes.
        launches_before, launches: collectives that are started.
        hidden_before, hidden: the share of what computation can hide that it does.
        plan: by group, the launches in their order, as the ranks compare them.
        order: launches and waits, as :func:`find_deadlock` takes them.
        work: steps that it took to decide.
    """

    changed: bool = False
    reason: str = ""
    done: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    seconds_before: float = 0.0
    seconds: float = 0.0
    peak_before: float = 0.0
    peak: float = 0.0
    launches_before: int = 0
    launches: int = 0
    hidden_before: float = 1.0
    hidden: float = 1.0
    plan: dict[str, list[str]] = field(default_factory=dict)
    order: list[tuple[str, str, str]] = field(default_factory=list)
    work: int = 0

    def __str__(self) -> str:
        lines = []
        if self.changed:
            lines.append(
                f"step {self.seconds_before * 1e6:,.1f} -> {self.seconds * 1e6:,.1f} us, "
                f"hidden {self.hidden_before:.0%} -> {self.hidden:.0%}, launches "
                f"{self.launches_before} -> {self.launches}"
            )
            lines.append(f"peak {self.peak_before:,.0f} -> {self.peak:,.0f} bytes")
        else:
            lines.append(f"unchanged: {self.reason}")
        lines += [f"done: {line}" for line in self.done]
        lines += [f"not: {line}" for line in self.missed]
        return "\n".join(lines)
