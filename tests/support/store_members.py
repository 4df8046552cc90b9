# SPDX-License-Identifier: Apache-2.0
"""Members of an elastic world on a store, without transports and without training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed import HashStore

from commrt.elastic.barrier import Barrier
from commrt.elastic.member import Member
from commrt.runtime.generation import Generation

__all__ = ["LONG_S", "member_of", "members_of"]

LONG_S = 20.0
"""The timeout: a test that waits for it has a clock of its own."""


def member_of(store, rank: int, ranks: int, needed: int = 0) -> Member:
    """Return the membership of one process of `rank`, which has joined nothing yet."""
    founders = Generation(0, dict.fromkeys(range(ranks), 0))
    known = (lambda _: needed) if needed else None
    member = Member(store, rank, founders, lambda: LONG_S, host="127.0.0.1", needed=known)
    member.calls = Barrier(member)
    return member


@contextmanager
def members_of(ranks: int, needed: int = 0) -> Iterator[list[Member]]:
    """Form the first generation of `ranks` members; whatever is in the list leaves the store at the end."""
    store = HashStore()
    found = [member_of(store, rank, ranks, needed) for rank in range(ranks)]
    for member in found:
        member.join_first_generation()
    yield found
    for member in found:
        member.depart("the test is over")
        member.close()
