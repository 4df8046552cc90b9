# SPDX-License-Identifier: Apache-2.0
"""Questions to all ranks of a world, numbered alike on each, so that none is taken for another."""

from __future__ import annotations

import json
from collections.abc import Mapping

from torch.distributed import PrefixStore, Store

from commrt.membership.agreement import TOPIC, agree, announce_leaving, find_disagreement
from commrt.runtime.comparison import Comparison
from commrt.runtime.elastic import Elastic
from commrt.transport.media import Media

__all__ = ["Questions"]


class Questions:
    """Of one world. They are asked on the store, or on the transport where a rank may be lost meanwhile."""

    def __init__(self, transport: Media, elastic: Elastic, comparison: Comparison) -> None:
        self._transport, self._elastic, self._comparison = transport, elastic, comparison
        self._latest = (0, 0)  # a generation, and how many there were in it

    def ask(self, store: Store, topic: str, claim: Mapping[str, str]) -> None:
        """See `commrt.membership.agreement.agree`, of those who are left."""
        if self._elastic.is_elastic:
            self._compare(topic, json.dumps({TOPIC: topic, **claim}, sort_keys=True))
            return
        self._latest = self._next()
        members, timeout_s = self._elastic.generation.ranks, self._transport.timeout_s
        agree(store, self._transport.rank, members, topic, claim, timeout_s, self.shelf)

    @property
    def shelf(self) -> str:
        """A name that belongs to the latest question."""
        return _named(self._latest)

    def end_next(self, store: Store, reason: BaseException) -> None:
        """For the others: this rank will not come to it."""
        announce_leaving(PrefixStore(_named(self._next()), store), self._transport.rank, reason)

    def _compare(self, topic: str, claim: str) -> None:
        """With all who are left, whoever is lost meanwhile."""
        elastic = self._elastic
        claims = elastic.together(lambda: elastic.submit(lambda: self._claims(claim)).result())
        self._latest = self._next()
        if error := find_disagreement(topic, {rank: _taken_apart(said) for rank, said in claims.items()}):
            raise error

    def _claims(self, claim: str) -> dict[int, str]:
        members = self._elastic.generation.ranks
        return dict(zip(members, self._comparison.claims_now(claim, members), strict=True))

    def _next(self) -> tuple[int, int]:
        """One that a lost rank can no longer reach, and who came later counts from the same."""
        generation, (latest, number) = self._elastic.generation.number, self._latest
        return generation, number + 1 if generation == latest else 1


def _taken_apart(claim: str) -> dict[str, str]:
    """What was put together to `claim`; all of it, where it was not."""
    try:
        return {name: str(said) for name, said in json.loads(claim).items()}
    except (ValueError, AttributeError):
        return {TOPIC: claim}


def _named(question: tuple[int, int]) -> str:
    return "agreement {}.{}".format(*question)
