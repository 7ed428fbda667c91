"""What the backends of others can do, as those who bring one tell it."""

from __future__ import annotations

from collections.abc import Collection

from torch_c10d_ext import _C


def register_backend_capabilities(
    name: str,
    *,
    methods: Collection[str] | None = None,
    futures: bool = False,
    reduces_avg: bool = False,
    reduces_low_precision: bool = False,
    reduces_bitwise: bool = True,
    gathers_uneven: bool = False,
    keeps_inputs: bool = False,
    sends_any_tensor: bool = False,
    starts_messages_together: bool = False,
    has_blocking_messages: bool = False,
) -> None:
    """Tell what a ``c10d`` backend can do, so that the ops make the rest of what it has.

    For a plug-in, beside ``torch.distributed.Backend.register_backend``; every rank registers the
    same. A backend that nobody registers is taken to have all of c10d's methods and nothing else;
    gloo, nccl and fake are known. The last registration of a name counts.

    Args:
        name: What the backend's ``getBackendName`` returns.
        methods: The methods that the backend implements, of ``allreduce``,
            ``allreduce_coalesced``, ``reduce``, ``broadcast``, ``allgather`` (into lists),
            ``all_gather_into_tensor``, ``all_gather_into_tensor_coalesced``,
            ``reduce_scatter_tensor``, ``all_to_all_single``, ``gather``, ``scatter``, ``barrier``,
            ``send`` and ``recv``. None: all but the coalesced ones. ``all_to_all_single`` alone is
            enough for every collective; messages need ``send`` and ``recv``.
        futures: ``Work.get_future`` works. If not, a result is completed by who waits for it.
        reduces_avg: It reduces with ``ReduceOp.AVG``. If not, sums are divided here.
        reduces_low_precision: It accumulates float16 and bfloat16 in float32. If not, they travel
            as float32.
        reduces_bitwise: It reduces with ``BAND``, ``BOR`` and ``BXOR``. If not, all values are
            gathered and reduced here.
        gathers_uneven: ``allgather`` takes parts of different sizes.
        keeps_inputs: It keeps a collective's inputs alive until that is complete.
        sends_any_tensor: Messages may have any dtype and strides. If not, bytes are sent.
        starts_messages_together: A message is not done before its peer's has started, so that
            several are to start between ``startCoalescing`` and ``endCoalescing``.
        has_blocking_messages: The work of a message can only be waited for, by one thread.

    Raises:
        ValueError: For a method that there is not.

    Example:
        >>> dist.Backend.register_backend("mine", create, devices=["cpu"])
        >>> register_backend_capabilities("mine", methods=["all_to_all_single"], futures=True)
    """
    _C.register_backend_capabilities(
        name,
        methods=None if methods is None else sorted(methods),
        futures=futures,
        reduces_avg=reduces_avg,
        reduces_low_precision=reduces_low_precision,
        reduces_bitwise=reduces_bitwise,
        gathers_uneven=gathers_uneven,
        keeps_inputs=keeps_inputs,
        sends_any_tensor=sends_any_tensor,
        starts_messages_together=starts_messages_together,
        has_blocking_messages=has_blocking_messages,
    )
