# SPDX-License-Identifier: Apache-2.0
"""Which schedule of a collective ends soonest on a cluster, for the size of a message.

Runs nothing, and needs no torch. Schedules that a user has forced are taken whatever they cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, lru_cache, partial
from typing import NamedTuple

from commrt.algorithms.catalogue import candidates
from commrt.pricing.cluster import Cluster
from commrt.pricing.forced import require_candidate
from commrt.pricing.price import Price, Pricing
from commrt.pricing.slices import slots_of
from commrt.proof.replay import prove
from commrt.proof.spec import collective_of
from commrt.schedule import Schedule

KEPT = 4
"""Collectives and roots whose pricings are remembered: each is much larger than its price."""
PROVEN_RANKS = 256
"""A proof's time and memory go as ranks to the third (all_to_all: fourth): a second here."""


class Choice(NamedTuple):
    """A schedule of a collective, and its price."""

    name: str
    schedule: Schedule
    pricing: Pricing
    price: Price


class Candidate(NamedTuple):
    """A schedule of a collective, which can be priced for any size."""

    name: str
    schedule: Schedule
    pricing: Pricing


def choices(
    cluster: Cluster, collective: str, ranks: Sequence[int], piece_nbytes: float, root: int = 0
) -> list[Choice]:
    """Return the schedules of `collective` among `ranks` of a cluster, the soonest to end first.

    `piece_nbytes` is the size of what one rank has for, or gets from, one other; of the whole
    buffer for broadcast, reduce and all_reduce. Ties go to the schedule with fewer steps.
    """
    return _soonest_first(
        _priceable(cluster, ranks, collective, root),
        piece_nbytes * slots_of(collective, len(ranks)),
    )


def _priceable(
    cluster: Cluster, ranks: Sequence[int], collective: str, root: int
) -> list[Candidate]:
    world = max(ranks) + 1
    return [
        Candidate(name, schedule, Pricing(schedule.over(ranks, world), cluster))
        for name, schedule in candidates(collective, len(ranks), root).items()
    ]


def _soonest_first(tried: Sequence[Candidate], nbytes: float) -> list[Choice]:
    found = [Choice(*each, each.pricing.price(nbytes)) for each in tried]
    return sorted(found, key=lambda each: (round(1e9 * each.price.seconds), each.price.steps))


def size_class(piece_nbytes: int) -> int:
    """Return the bytes for which pieces of this size are priced: the next power of two.

    >>> [size_class(nbytes) for nbytes in (0, 1000, 1024, 1025)]
    [1, 1024, 1024, 2048]
    """
    return 1 << max(piece_nbytes - 1, 0).bit_length()


class Selection:
    """Chooses the schedules of a group of ranks, once per collective, root and size class.

    What is chosen is proven first, up to `PROVEN_RANKS` ranks; for classes see `size_class`. It
    remembers choices and nothing else, so groups of the same places share one, on all their
    threads: at worst two choose at once, and alike.
    `ranks` [group] are the places of the group's ranks in the cluster; `forced` names schedules to
    take whatever they cost, by collective. Raises `UsageError` for a cluster that is too small, and
    for schedules that take other numbers of ranks.
    """

    def __init__(
        self, cluster: Cluster, ranks: Sequence[int], forced: Mapping[str, str] | None = None
    ) -> None:
        cluster.require_capacity(max(ranks) + 1)
        for collective, name in (forced or {}).items():
            require_candidate(collective, name, len(ranks))
        self._ranks = ranks
        self._forced = forced or {}
        self._known = cache(self._choose)
        self._priced = lru_cache(KEPT)(partial(_priceable, cluster, ranks))

    def choose(self, collective: str, root: int, piece_nbytes: int) -> Schedule:
        """Return the schedule to take for pieces of `piece_nbytes`; see `choices`."""
        return self._known(collective, root, size_class(piece_nbytes))

    def _choose(self, collective: str, root: int, piece_nbytes: int) -> Schedule:
        ranks = len(self._ranks)
        if (forced := self._forced.get(collective)) is None:
            nbytes = piece_nbytes * slots_of(collective, ranks)
            schedule = _soonest_first(self._priced(collective, root), nbytes)[0].schedule
        else:
            schedule = require_candidate(collective, forced, ranks, root)
        if ranks <= PROVEN_RANKS:
            prove(schedule, collective_of(collective, ranks, schedule.chunks, root))
        return schedule
