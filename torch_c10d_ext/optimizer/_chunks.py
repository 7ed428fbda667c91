"""Products of matrices and the collectives beside them, made in parts that overlap.

==============================  ====================================================================
site                            what becomes of it, in parts j
==============================  ====================================================================
``all_gather(x) @ b``           ``all_gather(x[rows j]) @ b``; the parts' rows are interleaved by
                                rank
``reduce_scatter(a @ b)``       ``reduce_scatter(a @ b[:, columns j])``, side by side
``all_reduce(a @ b)``           ``all_reduce(a[rows j] @ b)``, one below the other
==============================  ====================================================================

Nothing is cut where it is summed over, so each element is the same sum. A BLAS may yet add in
another order for another number of rows or columns, so that floats need ``numerics="rounding"``.

Which sites are made in parts, and in how many, is a matter of the whole schedule: parts bring
launches and copies. Only where the schedule without parts stands still for a site is it tried.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from torch_c10d_ext._op_info import SILENT, op_info
from torch_c10d_ext.optimizer._algebra import _is_wait, _storages, _written_storages
from torch_c10d_ext.optimizer._collectives import Collective, op_of, value_of
from torch_c10d_ext.optimizer._costs import Costs
from torch_c10d_ext.optimizer._problem import Problem

aten = torch.ops.aten

# How many parts are tried.
PARTS = (2, 4, 8)

_PRODUCTS = (aten.mm.default, aten.addmm.default)
_BATCHED = (aten.bmm.default, aten.baddbmm.default)
_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
_KINDS = {
    "all_gather_into_tensor": "all_gather before a product",
    "reduce_scatter_tensor": "reduce_scatter of a product",
    "all_reduce": "all_reduce of a product",
}


@dataclass(frozen=True, eq=False)
class Site:
    """A collective and the products that it may be made in parts with.

    Attributes:
        start: the number of the collective's node.
        collective: the record of it.
        wait: the one node that waits for it.
        products: ``mm`` and ``addmm`` nodes.
        size: rows or columns that are cut.
    """

    start: int
    collective: Collective
    wait: Node
    products: tuple[Node, ...]
    size: int

    @property
    def what(self) -> str:
        return _KINDS[self.collective.kind]

    def parts(self) -> list[int]:
        """In how many equal parts it may be made."""
        return [n for n in PARTS if self.size % n == 0]


@dataclass
class Sites:
    """The sites of a graph, and why others are none, with how often."""

    found: list[Site] = field(default_factory=list)
    missed: dict[tuple[str, str], int] = field(default_factory=dict)

    def miss(self, what: str, why: str) -> None:
        self.missed[what, why] = self.missed.get((what, why), 0) + 1

    def lines(self) -> list[str]:
        return [f"{n} {what} in parts: {why}" for (what, why), n in self.missed.items()]


class _No(Exception):
    """Why a place is no site."""


def find_sites(p: Problem, graph: Graph, numerics: str, same_bits: Callable[..., bool]) -> Sites:
    """The places of a graph that could be made in parts, in its order.

    Args:
        p: the problem that the graph is.
        graph: whose nodes are the problem's.
        numerics: ``"rounding"`` lets floats be summed in another order.
        same_bits: whether a collective's sums do not depend on where an element stands.
    """
    sites = Sites()
    written = _written_storages(graph)
    why_none = _why_none(p)
    for i, c in p.collectives.items():
        if c.kind not in _KINDS or c.ranks < 2:
            continue
        try:
            site = _site(i, c)
            if site is None:
                continue
            if why_none:
                raise _No(why_none)
            _check(site, written, numerics, same_bits)
        except _No as why:
            sites.miss(_KINDS[c.kind], str(why))
        else:
            sites.found.append(site)
    return sites


def _why_none(p: Problem) -> str:
    if p.fixed_order:
        return "ranks move different sizes, so that the order is kept"
    for i, node in enumerate(p.nodes):
        op = op_of(node)
        form = op_info(op) if op is not None else None
        if form is None or form.kind == "wait_tensor" or form.kind in SILENT:
            continue
        if i not in p.collectives:
            return f"no collective passes {node.name}"
    return ""


def _site(i: int, c: Collective) -> Site | None:
    """The site of a collective; None where no product is beside it."""
    waits = [u for u in c.node.users if _is_wait(u)]
    if c.kind == "all_gather_into_tensor":
        products, near = _products_of(waits[0]) if waits else ([], "")
        if not products:
            if near:
                raise _No(near)
            return None
    else:
        product = _behind_views(c.inputs[0]) if c.inputs else None
        if product is None or product.target in _BATCHED:
            if product is not None:
                raise _No("products of batches of matrices are not cut")
            return None
        products = [product]
    if c.form.coalesced or c.form.written:
        raise _No("its collective writes where it is told to")
    if len(waits) != 1 or len(c.node.users) != 1 or c.node.args[0] is not c.inputs[0]:
        raise _No("one wait must end it, and nothing else use it in flight")
    shapes = [value_of(n).shape for n in (c.inputs[0], waits[0], *products)]
    if any(type(size) is not int for shape in shapes for size in shape):
        raise _No("its sizes are not numbers in the graph")
    rows, columns = value_of(products[0]).shape
    if c.kind == "all_gather_into_tensor":
        return Site(i, c, waits[0], tuple(products), rows // c.ranks)
    size = columns if c.kind == "reduce_scatter_tensor" else rows
    return Site(i, c, waits[0], tuple(products), size)


def _products_of(wait: Node) -> tuple[list[Node], str]:
    """Products whose first factor is what was waited for; else why those beside it are none."""
    found: list[Node] = []
    near = ""
    width = value_of(wait).shape[-1] if value_of(wait).dim() else 0
    for user in wait.users:
        same = user.target in _VIEWS and value_of(user).shape[-1:] == (width,)
        for node, given in [(user, wait), *((u, user) for u in user.users if same)]:
            if node.target in _PRODUCTS:
                if _factors(node)[1] is given and _factors(node)[2] is not given:
                    if given.target in _VIEWS or value_of(wait).dim() == 2:
                        found.append(node)
                    continue
                near = "its rows are summed over"
            elif node.target in _BATCHED:
                near = "products of batches of matrices are not cut"
        if user.target in (aten.t.default, aten.permute.default, aten.transpose.int):
            for node in user.users:
                if node.target in _PRODUCTS and not near:
                    first = _factors(node)[1] is user
                    near = "its rows are summed over" if first else "it is the second factor"
    return found, near


def _behind_views(node: Node) -> Node | None:
    """The product that a node is, or is a view of with the same columns."""
    if node.target in _VIEWS and isinstance(node.args[0], Node):
        inner = node.args[0]
        if inner.target in _PRODUCTS and value_of(inner).shape[-1:] == value_of(node).shape[-1:]:
            return inner
        return inner if inner.target in _BATCHED else None
    return node if node.target in (*_PRODUCTS, *_BATCHED) else None


def _factors(product: Node) -> tuple[Any, Any, Any]:
    """Bias, if any, and the two factors."""
    if product.target is aten.addmm.default:
        return product.args[0], product.args[1], product.args[2]
    return None, product.args[0], product.args[1]


def _check(site: Site, written: set[int], numerics: str, same_bits: Callable[..., bool]) -> None:
    c = site.collective
    dtype = value_of(site.products[0]).dtype
    if (dtype.is_floating_point or dtype.is_complex) and numerics != "rounding":
        raise _No("floats need numerics='rounding'")
    if c.kind != "all_gather_into_tensor" and not same_bits(c):
        raise _No("sums depend on an element's place, which numerics='rounding' allows")
    nodes = [c.node, site.wait, *c.inputs, *site.products]
    for product in site.products:
        bias, *factors = _factors(product)
        nodes += [n for n in (bias, *factors) if isinstance(n, Node)]
        if product.kwargs:
            raise _No("its product is scaled")
        if bias is not None and value_of(bias).dim() != 1:
            raise _No("what is added to its product is a matrix")
    # What the caller holds may be written behind the products, as by an optimizer's update.
    if any(_storages(node) & written for node in nodes if node.op != "placeholder"):
        raise _No("its memory is written")
    if c.kind == "all_gather_into_tensor":
        if not value_of(c.inputs[0]).is_contiguous():
            raise _No("what is gathered is not contiguous")
    else:
        (product,) = site.products
        sent = c.inputs[0]
        if len(product.users) != 1 or len(sent.users) != 1:
            raise _No("its product is used elsewhere, too")
        if c.kind == "reduce_scatter_tensor" and value_of(sent).dim() < 2:
            raise _No("its product is no matrix when it is sent")
    if not site.parts():
        raise _No(f"{site.size} rows or columns do not make two equal parts")


def gain(p: Problem, costs: Costs, site: Site, parts: int) -> float:
    """Seconds that parts save where nothing else runs beside a site; 0 or less for none."""
    number = {node: i for i, node in enumerate(p.nodes)}
    computed = sum(p.seconds[number[product]] for product in site.products)
    sent = p.sent[site.start]
    in_parts = sent + (parts - 1) * p.latency[site.start]
    copied = sum(costs.copy_seconds(value_of(n)) for n in _joined(site))
    copied += (parts - 1) * p.overhead[site.start]
    overlapped = max(computed, in_parts) + min(computed, in_parts) / parts
    return computed + sent - overlapped - copied


def _joined(site: Site) -> list[Node]:
    """The nodes whose results are put together from parts."""
    if site.collective.kind != "all_gather_into_tensor":
        return [site.wait]
    return [*site.products, *([site.wait] if _needs_whole(site) else [])]


def _needs_whole(site: Site) -> bool:
    """Whether more than the products needs what is gathered."""
    taken = set(site.products)
    return any(
        user not in taken and not (user.target in _VIEWS and set(user.users) <= taken)
        for user in site.wait.users
    )


def write_parts(graph: Graph, chosen: Sequence[tuple[Site, int]]) -> None:
    """Rewrites sites in so many parts."""
    for site, parts in chosen:
        if site.collective.kind == "all_gather_into_tensor":
            _Writer(graph, site, parts).gather()
        else:
            _Writer(graph, site, parts).reduce()


class _Writer:
    def __init__(self, graph: Graph, site: Site, parts: int) -> None:
        self.graph, self.site, self.parts = graph, site, parts
        each = site.size // parts
        self.ranges = [(j * each, (j + 1) * each) for j in range(parts)]

    def gather(self) -> None:
        site, graph, n = self.site, self.graph, self.site.collective.ranks
        start, wait = site.collective.node, site.wait
        source = site.collective.inputs[0]
        width = value_of(source).shape[-1]
        with graph.inserting_before(start):
            if value_of(source).dim() != 2:
                source = self._view(source, [site.size, width])
            starts = [
                self._made(
                    start.target,
                    (self._slice(source, 0, a, b), *start.args[1:]),
                    start.kwargs,
                    (n * (b - a), width),
                    source,
                )
                for a, b in self.ranges
            ]
        with graph.inserting_before(wait):
            waits = [self._alias(wait.target, (s,), value_of(s)) for s in starts]
        views = {u for u in wait.users if u.target in _VIEWS and set(u.users) <= {*site.products}}
        for product in site.products:
            bias, first, second = _factors(product)
            columns = value_of(product).shape[1]
            with graph.inserting_before(product):
                made = [self._product(product, bias, w, second) for w in waits]
                self._interleave(product, made, columns)
            if not first.users and first in views:
                graph.erase_node(first)
        if wait.users:
            with graph.inserting_before(wait):
                self._interleave(wait, waits, width)
        else:
            graph.erase_node(wait)
        graph.erase_node(start)

    def _interleave(self, old: Node, parts: list[Node], columns: int) -> None:
        """Takes a node's place by the rows of parts, which hold each rank's in turn."""
        n, rows = self.site.collective.ranks, self.site.size
        each = [self._view(part, [n, rows // self.parts, columns]) for part in parts]
        whole = self._made(aten.cat.default, (each, 1), {}, (n, rows, columns), old)
        self._replace(old, whole)

    def reduce(self) -> None:
        site, graph = self.site, self.graph
        start, wait = site.collective.node, site.wait
        (product,) = site.products
        bias, first, second = _factors(product)
        scatter = site.collective.kind == "reduce_scatter_tensor"
        rows, columns = value_of(product).shape
        made = []
        with graph.inserting_before(product):
            for a, b in self.ranges:
                if scatter:
                    cut = None if bias is None else self._slice(bias, 0, a, b)
                    made.append(self._product(product, cut, first, self._slice(second, 1, a, b)))
                else:
                    made.append(self._product(product, bias, self._slice(first, 0, a, b), second))
        if scatter:
            rows //= site.collective.ranks
        with graph.inserting_before(start):
            starts = [
                self._made(
                    start.target,
                    (m, *start.args[1:]),
                    start.kwargs,
                    (rows, b - a) if scatter else (b - a, columns),
                    m,
                )
                for m, (a, b) in zip(made, self.ranges, strict=True)
            ]
        with graph.inserting_before(wait):
            waits = [self._alias(wait.target, (s,), value_of(s)) for s in starts]
            whole = self._made(aten.cat.default, (waits, int(scatter)), {}, (rows, columns), wait)
            self._replace(wait, whole)
        sent = site.collective.inputs[0]
        graph.erase_node(start)
        if sent is not product:
            graph.erase_node(sent)
        graph.erase_node(product)

    # --- nodes ---------------------------------------------------------------------------------

    def _product(self, old: Node, bias: Any, first: Node, second: Node) -> Node:
        shape = (value_of(first).shape[0], value_of(second).shape[1])
        args = (first, second) if bias is None else (bias, first, second)
        return self._made(old.target, args, {}, shape, old)

    def _slice(self, node: Node, dim: int, begin: int, end: int) -> Node:
        value = value_of(node)
        with _mode(value):
            part = value.narrow(dim, begin, end - begin)
        return self._alias(aten.slice.Tensor, (node, dim, begin, end), part)

    def _view(self, node: Node, shape: list[int]) -> Node:
        value = value_of(node)
        with _mode(value):
            seen = value.view(shape)
        return self._alias(aten.view.default, (node, shape), seen)

    def _alias(self, target: Any, args: tuple[Any, ...], value: Any) -> Node:
        node = self.graph.call_function(target, args)
        node.meta["val"] = value
        return node

    def _made(
        self, target: Any, args: tuple[Any, ...], kwargs: Any, shape: Sequence[int], like: Node
    ) -> Node:
        node = self.graph.call_function(target, args, dict(kwargs))
        value = value_of(like)
        with _mode(value):
            node.meta["val"] = value.new_empty(tuple(shape))
        return node

    def _replace(self, old: Node, new: Node) -> None:
        shape = list(value_of(old).shape)
        assert math.prod(shape) == math.prod(value_of(new).shape)
        if list(value_of(new).shape) != shape:
            new = self._view(new, shape)
        old.replace_all_uses_with(new)
        self.graph.erase_node(old)


def _mode(value: Any) -> Any:
    return getattr(value, "fake_mode", None) or contextlib.nullcontext()
