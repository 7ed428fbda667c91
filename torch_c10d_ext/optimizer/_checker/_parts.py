"""The checker's rules of what is made in parts: rows and columns of collectives of products.

``in parts`` of the table in :mod:`torch_c10d_ext.optimizer._checker`.
"""

from __future__ import annotations

import math
from typing import Any

from torch.fx import Node

from torch_c10d_ext.optimizer._checker._nodes import value_of
from torch_c10d_ext.optimizer._checker._terms import Terms, Type, fits_shape, type_of


class Parts:
    """The rules, and of which collectives of one graph there are parts.

    Each gives the term of a node, or None where it does not hold.
    """

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.of: dict[int, set[int]] = {}  # which collectives are parts of one

    def joined(self, node: Node, key: Any) -> int | None:
        """The term of parts of one collective, put together."""
        terms, type_ = self.terms, type_of(value_of(node))
        if type_ is None or key[2] or not 1 <= len(key[1]) <= 2 or len(key[1][0]) < 2:
            return None
        dim = int(key[1][1][1]) if len(key[1]) == 2 else 0
        if not all(type(term) is int for term in key[1][0]):
            return None
        parts: list[int] = list(key[1][0])
        if dim == 1 and len(type_[0]) == 3:
            return self._gathered_rows(parts, key, type_, node.name)
        kinds = {0: "all_reduce", 1: "reduce_scatter_tensor"}
        if dim not in kinds or len(type_[0]) != 2:
            return None
        found: list[Any] = [terms.collective(term, kinds[dim]) for term in parts]
        if any(c is None or c[:3] != found[0][:3] for c in found):
            return None
        product = self._product_of_parts([c[3] for c in found], "rows" if dim == 0 else "columns")
        if product is None:
            return None
        rest = dict(found[0][2])
        rows, columns = terms.types[product][0]
        if dim == 1:
            size = int(rest["group_size"][1])
            if rows % size:
                return None
            rows //= size
        whole = (*found[0][:3], product)
        if (rows, columns) != type_[0] or not terms.keeps_bits(whole):
            return None
        term = terms.number(whole, node.name)
        terms.types.setdefault(term, type_)
        terms.products.add(term)
        self.of.setdefault(term, set()).update(parts)
        return term

    def _product_of_parts(self, parts: list[int], cut: str) -> int | None:
        """The product that parts are all rows or columns of, in order."""
        terms = self.terms
        found: list[Any] = [terms.product(term) for term in parts]
        if any(p is None or p[0] != found[0][0] for p in found):
            return None
        names, biases, firsts, seconds = zip(*found, strict=True)
        if cut == "rows":
            first, second = terms.whole(firsts, 0), seconds[0]
            same, bias = {*seconds}, biases[0]
            if len({*biases}) != 1:
                return None
        else:
            first, second = firsts[0], terms.whole(seconds, 1)
            same = {*firsts}
            bias = None if biases[0] is None else terms.whole(biases, 0)
            if biases[0] is not None and bias is None:
                return None
        if first is None or second is None or len(same) != 1:
            return None
        return self._product(names[0], bias, first, second, parts[0])

    def _product(
        self, name: str, bias: int | None, first: int, second: int, like: int
    ) -> int | None:
        terms = self.terms
        a, b = terms.shape(first), terms.shape(second)
        of_bias = (b[1],) if bias is None and b else terms.shape(bias) if bias is not None else None
        if a is None or b is None or len(a) != 2 or len(b) != 2 or a[1] != b[0]:
            return None
        if of_bias != (b[1],) or like not in terms.types:
            return None
        dtype = terms.types[like][1]
        if not terms.rounding and (dtype.is_floating_point or dtype.is_complex):
            return None
        values = (first, second) if bias is None else (bias, first, second)
        term = terms.number((name, values, ()), "product of parts")
        terms.types.setdefault(term, ((a[0], b[1]), dtype))
        return term

    def _gathered_rows(self, parts: list[int], key: Any, type_: Type, name: str) -> int | None:
        """The term of rows that ranks gave in parts, or of their product with a matrix."""
        terms = self.terms
        roots = [terms.roots.get(term, term) for term in parts]
        products: list[Any] = [terms.product(root) for root in roots]
        given = [root if p is None else p[2] for root, p in zip(roots, products, strict=True)]
        found: list[Any] = [terms.collective(term, "all_gather_into_tensor") for term in given]
        if any(c is None or c[:3] != found[0][:3] for c in found):
            return None
        if any((p is None) != (products[0] is None) for p in products):
            return None
        whole = terms.whole([c[3] for c in found], 0)
        if whole is None or whole not in terms.types:
            return None
        size = int(dict(found[0][2])["group_size"][1])
        shape, dtype = terms.types[whole]
        for term, c in zip(parts, found, strict=True):
            rows = (terms.shape(c[3]) or (0,))[0]
            if term not in terms.types or terms.types[term][0] != (size, rows, type_[0][2]):
                return None
        if len(shape) != 2 or type_[0][:2] != (size, shape[0]):
            return None
        # As a gather of what the rows are a view of.
        root = terms.roots.get(whole, whole)
        collective = terms.number((*found[0][:3], root), name)
        rooted = terms.types[root][0]
        made = ((rooted[0] * size, *rooted[1:]) if rooted else (size,), terms.types[root][1])
        terms.types.setdefault(collective, made)
        gathered = terms.as_root(collective, key, name, ((size * shape[0], shape[1]), dtype))
        self.of.setdefault(collective, set()).update(given)
        if products[0] is None:
            return terms.as_root(collective, key, name, type_) if type_[1] == dtype else None
        if any(p[:2] != products[0][:2] or p[3] != products[0][3] for p in products):
            return None
        target, bias, _, second = products[0]
        product = self._product(target, bias, gathered, second, roots[0])
        if product is None or terms.types[product][1] != type_[1]:
            return None
        return terms.as_root(product, key, name, type_)

    def seen_before(self, node: Node, source: int, values: Any, type_: Type) -> int | None:
        """The reduction of a view of a product, for a view of the reduction of a product."""
        terms = self.terms
        space, kind, rest, product = terms.keys[source]
        if len(values) != 2 or not fits_shape(values[1], type_[0]):
            return None
        shape, dtype = terms.types[source]
        if type_[1] != dtype or math.prod(shape) != math.prod(type_[0]):
            return None
        given = type_[0]
        if kind == "reduce_scatter_tensor":
            given = (given[0] * int(dict(rest)["group_size"][1]), *given[1:])
        view = terms.number(("bytes", product, (given, dtype)), node.name)
        terms.types.setdefault(view, (given, dtype))
        terms.roots[view] = product
        term = terms.number((space, kind, rest, view), node.name)
        terms.types.setdefault(term, type_)
        self.of.setdefault(term, set()).update(self.of[source])
        return term
