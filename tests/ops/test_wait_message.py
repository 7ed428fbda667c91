"""wait_message: takes what a ticket stands for, once."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist

from tests.harness import run
from torch_c10d_ext.functional import batch_isend_irecv, wait_message


def _once() -> None:
    peer = 1 - dist.get_rank()
    x, y = torch.arange(3.0) + 5 * dist.get_rank(), torch.empty(3)
    sent, received = batch_isend_irecv([x, y], [peer, peer], [True, False])
    for stranger in (torch.zeros(1, dtype=torch.int64), copy.deepcopy(received)):
        with pytest.raises(ValueError, match="wait_message: ticket must be.*got another tensor"):
            wait_message(stranger)
    view = received.view(1, 1)  # the storage counts
    assert torch.equal(wait_message(view, y)[0], torch.arange(3.0) + 5 * peer)
    with pytest.raises(ValueError, match="got one for the second time"):
        wait_message(received, y)
    wait_message(sent)


def test_a_ticket_serves_once() -> None:
    run(2, _once)


def _of_another_shape() -> None:
    peer = 1 - dist.get_rank()
    x = torch.ones(4)
    for like in (torch.empty(2, 2), torch.empty(4, dtype=torch.int32)):
        sent, received = batch_isend_irecv([x, x], [peer, peer], [True, False])
        wait_message(sent)
        with pytest.raises(ValueError, match=r"must be those of the message, \[4\]"):
            wait_message(received, like)


def test_the_message_has_one_shape() -> None:
    run(2, _of_another_shape)
