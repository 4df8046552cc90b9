# SPDX-License-Identifier: Apache-2.0
"""What ranks leave on the store when they go, for those who still wait for them.

Who closes had done its part in all exchanges that it counts; who gives up says no number, and did not.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from contextlib import suppress
from time import monotonic

from torch.distributed import Store

from commrt.errors import TransportError
from commrt.membership.store_client import (
    MALFORMED,
    STORE_ANSWER_S,
    call_store,
    clone_connection,
    parse_dict,
    parse_int,
    start_call,
)
from commrt.threads.answer import Answer

__all__ = ["Departures"]

AGAIN_S = 0.5
"""Between two questions: a GPU that is behind its host is not late, and all ranks ask one store."""

Counts = dict[int, int] | None
"""Exchanges with each peer; None for a rank that gave up."""


class Departures:
    """Of one clique. Questions are asked on the side: a store that does not answer holds up nobody."""

    def __init__(self, store: Store, rank: int) -> None:
        self._store, self._rank = clone_connection(store), rank
        self._known: dict[int, Counts] = {}
        self._question: Answer[dict[int, Counts]] | None = None
        self._again_s = 0.0

    def tell(self, counts: Mapping[int, int] | None) -> None:
        """This rank goes, after so many exchanges with each peer; None if it gives up. Waits `ANSWER_S` at most."""
        said = json.dumps(None if counts is None else {str(peer): count for peer, count in counts.items()})
        with suppress(RuntimeError, TransportError):  # the store is gone, and so are they
            call_store(lambda: self._store.set(f"left/{self._rank}", said), STORE_ANSWER_S)

    def known(self, peers: Collection[int]) -> dict[int, Counts]:
        """Which of `peers` have left, as far as the store has said; never waits, and asks again after `AGAIN_S`."""
        if self._question is None:
            if monotonic() >= self._again_s:
                self._again_s = monotonic() + AGAIN_S
                self._question = start_call(lambda: self._read(peers))
        elif self._question.given:
            with suppress(RuntimeError, *MALFORMED):  # of what is no word of theirs nothing is known
                self._known |= self._question.result()
            self._question = None
        return {peer: self._known[peer] for peer in peers if peer in self._known}

    def _read(self, peers: Collection[int]) -> dict[int, Counts]:
        keys = {peer: f"left/{peer}" for peer in peers}
        return {peer: _counts(self._store.get(key)) for peer, key in keys.items() if self._store.check([key])}


def _counts(said: bytes) -> Counts:
    if json.loads(said) is None:
        return None
    counts = parse_dict(said)
    return {int(peer): parse_int(count) for peer, count in counts.items()}
