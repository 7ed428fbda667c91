"""What ``torch.compile`` takes, made when it is asked for: the compilers are slow to import."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch_c10d_ext.optimizer._settings import Settings


def communication_options(
    options: Mapping[str, Any] | None = None, *, explain: bool = False, **settings: Any
) -> dict[str, Any]:
    """Options for ``torch.compile`` that run the optimizer on every graph that Inductor compiles.

    Forward and backward alike, with Inductor's caches. Passes of the user's, in ``options`` or in
    ``torch._inductor.config``, run first.

    Args:
        options: the user's own options, which are taken over.
        explain: prints a report of each graph.
        settings: those of :func:`torch_c10d_ext.optimize`.

    Returns:
        A dict for ``torch.compile(..., options=...)``.

    Raises:
        ValueError, TypeError: as :func:`torch_c10d_ext.optimize`.

    Example, on every rank::

        link = torch_c10d_ext.Link(20e-6, 10e9)
        step = torch.compile(step, options=torch_c10d_ext.communication_options(link=link))
    """
    from torch_c10d_ext.optimizer import _inductor

    return _inductor.make_options(dict(options or {}), _settings(settings), explain)


def communication_backend(*, explain: bool = False, **settings: Any) -> Callable[..., Any]:
    """A backend for ``torch.compile`` that runs the optimizer, and then the graphs as they are.

    What ``backend="aot_eager"`` is, with the optimizer between AOTAutograd and the run.

    Args:
        explain: prints a report of each graph.
        settings: those of :func:`torch_c10d_ext.optimize`.

    Raises:
        ValueError, TypeError: as :func:`torch_c10d_ext.optimize`.

    Example, on every rank::

        step = torch.compile(step, backend=torch_c10d_ext.communication_backend())
    """
    from torch_c10d_ext.optimizer import _dynamo

    return _dynamo.make_backend(_settings(settings), explain)


def _settings(given: dict[str, Any]) -> Settings:
    given = dict(given)
    return Settings.of(given.pop("links", None), given.pop("sizes", None), **given)
