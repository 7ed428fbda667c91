"""The independent checker: whether a graph computes what another one does, within a budget.

It shares no code with the passes that it checks, nor, on purpose, the table of ops that they read
(``_op_info``): what is wrong there would be wrong here. Both graphs are evaluated symbolically: a
node is worth a term, equal terms are one number, and memory that is written has a version. Then

- the outputs, the inputs' memory, and all ordered effects must be worth the same in both graphs;
- every collective must be started in both graphs, but for those a rule below replaces;
- nothing may read what is still in flight, nor write what a collective in flight reads;
- a launch of several reductions needs a backend that gives each element the same bits anywhere;
- what is live at once must stay within the budget.

``_evaluation`` runs a graph with the terms of ``_terms``; ``_algebra``, ``_bytes`` and ``_parts``
have the rules; ``_memory`` counts what is live.

The rules by which different terms are equal (each is bitwise, or asks for ``in_rank_order``):

===========  =====================================================================================
landed       ``wait(x) = x``
coalesced    the k-th result of a launch of several is the collective of the k-th input
repeated     ``min(min(x)) = min(x)`` over one group; ``max``, ``band`` and ``bor`` alike
elementwise  ``f(move(x)) = move(f(x))`` for all_gather and broadcast; f a cast, or an exact op of
             one tensor and numbers
own part     the rows of ``all_gather(x)`` at this rank's place are x; only where all ranks do
             alike is promised: graphs must not be refused on some ranks alone
gathered     ``all_gather(reduce_scatter(x)) = all_reduce(x)`` over one group; asks
part of sum  the rows of ``all_reduce(x)`` at this rank's place are ``reduce_scatter(x)``; only
             where all ranks do alike is promised; asks
constant     ``all_reduce(c) = n c``, where all multiples of c up to n are exact; only where all
             ranks' constants are promised to be the same
bytes        a view of a view of the same shape, dtype and memory is the first;
             ``move(bytes of x) = bytes of move(x)`` for all_gather and broadcast
packed       columns of ``all_to_all(cat([rows of x, rows of y], 1))``, copied, are the bytes of
             ``all_to_all(x)`` and of ``all_to_all(y)``, where all parts are even
sums         ``all_reduce(a) + all_reduce(b) = all_reduce(a + b)``; only where rounding is allowed
in parts     rows of ``all_gather(x)``, and of ``all_gather(x) @ b``, from those of all rows of x;
             rows of ``all_reduce(a @ b)`` from those of a; columns of ``reduce_scatter(a @ b)``
             from those of b. Products of floats only where rounding is allowed; sums ask
===========  =====================================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph

from torch_c10d_ext.optimizer._checker._evaluation import CheckFailed, Evaluation
from torch_c10d_ext.optimizer._checker._memory import peak_bytes
from torch_c10d_ext.optimizer._checker._terms import ANY_ORDER, InRankOrder, Place, Terms

__all__ = ["CheckFailed", "check_rewrite", "peak_bytes"]


def check_rewrite(
    before: Graph,
    after: Graph,
    budget: float,
    in_rank_order: InRankOrder,
    bytes_of: Callable[[torch.Tensor], int] | None = None,
    rounding: bool = False,
    place: Place | None = None,
    spmd: bool = False,
) -> None:
    """Raises CheckFailed unless ``after`` may take the place of ``before``.

    Args:
        before: the graph as it was.
        after: the graph as it is.
        budget: bytes that ``after`` may hold at once.
        in_rank_order: asked with the group of each new bucket of reductions.
        rounding: whether sums may be made in another order.
        place: this rank's number in a group, and the group's size; for rules that ask for it.
        spmd: whether constants, and what is at a rank's place, are promised to be so on all ranks.
        bytes_of: the size of a fake tensor's storage; by default what the tensor says.
    """
    terms = Terms(rounding, in_rank_order, place, spmd)
    old = Evaluation(before, terms).run()
    new = Evaluation(after, terms).run()
    _same("the outputs", old.outputs, new.outputs, terms)
    _same("what inputs hold at the end", old.final, new.final, terms)
    _same("the number of effects", len(old.effects), len(new.effects), terms)
    for k, (a, b) in enumerate(zip(old.effects, new.effects, strict=True)):
        _same(f"effect {k}", a, b, terms)
    _same("which outputs share memory", old.shared, new.shared, terms)
    lost = set(old.collectives) - set(new.collectives)
    extra = set(new.collectives) - set(old.collectives)
    # A collective that another one replaces by a rule is none that somebody lost.
    instead: set[int] = set()

    def is_kept(term: int) -> bool:
        if term in new.collectives:
            return True
        parts = new.parts.of.get(term)
        if parts and all(part in new.collectives for part in parts):
            instead.update(parts)
            return True
        made = old.algebra.replaced.get(term, set())
        instead.update(made)
        return bool(made) and all(is_kept(each) for each in made)

    lost = {term for term in lost if not is_kept(term)}
    extra -= instead
    for term in sorted(lost | extra):
        name = old.collectives.get(term) or new.collectives.get(term)
        where = "the old graph" if term in lost else "the new graph"
        raise CheckFailed(f"{name} is in {where} alone")
    for bucket, (node, op, group, dtypes, space) in new.buckets.items():
        if bucket in old.buckets:
            continue
        if len(dtypes) != 1:
            raise CheckFailed(f"{node} holds dtypes {sorted(map(str, dtypes))}")
        dtype = next(iter(dtypes))
        exact = op in (None, *ANY_ORDER) or (
            op == "sum" and not dtype.is_floating_point and not dtype.is_complex
        )
        if not exact and not in_rank_order(group):
            raise CheckFailed(
                f"{node} merges {space} {op} of {dtype} in group '{group}', whose sums depend on "
                "an element's place in a message"
            )
    peak = peak_bytes(after, bytes_of or (lambda t: int(t.untyped_storage().nbytes())))
    if peak > budget * (1 + 1e-9):
        raise CheckFailed(f"it holds {peak:,.0f} bytes, more than the budget of {budget:,.0f}")


def _same(what: str, a: Any, b: Any, terms: Terms) -> None:
    if a != b:
        raise CheckFailed(f"{what} differ: {terms.show(a)} and {terms.show(b)}")
