# SPDX-License-Identifier: Apache-2.0
"""Who the members of the next generation are: functions of what one rank sees.

They touch nothing: no store, no clock, no thread. ``tests/test_next_generation.py`` looks at every
small case. Several ranks may decide at once, and differently, as they see different instants: a
compare-and-set on the store lets one of them decide for all (`Roster.change`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from commrt.elastic.records import Arrival
from commrt.errors import DeadlineExceeded, Place, QuorumLost
from commrt.runtime.generation import Generation, Loss
from commrt.threads.deadline import Timeouts

PATIENCE_S = 0.2
"""For so long backup workers wait for ranks that they can do without; healthy ones are faster."""
MAKE_A_STEP = "whose gradients make a step"


@dataclass(frozen=True, slots=True)
class Attendance:
    """What a rank sees while it waits for the members of `generation`, in a roll call or where a
    collective begins.
    """

    generation: Generation
    here: Mapping[int, Arrival]
    """The members that have come, this rank among them, and also those that came and died."""
    departed: Sequence[Loss] = ()
    """Of the others, those that have left, or whose processes are gone; of those that have come,
    at least the ones that somebody does not reach.
    """
    joining: Mapping[int, int] = field(default_factory=dict)
    """Processes that take the places of lost ranks now, by rank."""
    is_running: bool = False
    """A collective runs; its work needs all members."""
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Terms:
    """What a rank asks of the next generation."""

    rank: int
    """The one that asks."""
    timeout_s: float
    why: str
    """A member that has not come by then is evicted for this reason."""
    needed: int = 0
    """So many ranks make a step of backup workers."""
    may_be_silent: bool = False
    """True where members that do not come in time may stay, without connections."""


def next_generation(seen: Attendance, terms: Terms) -> Generation | None:
    """Return the generation to propose, or None while others may come, or reach each other.

    Raises `QuorumLost` if too few would be left without those that departed, `DeadlineExceeded` if
    they would without those that are waited for.
    """
    generation = seen.generation
    lost = [*seen.departed]
    ended = {loss.rank for loss in lost} | seen.joining.keys()
    # one that died after it had come is not waited for, although nobody reaches it
    here = {rank: arrival for rank, arrival in seen.here.items() if rank not in ended}
    come = {*here, *seen.joining}
    away = {loss.rank for loss in lost} | come
    silent = [rank for rank in generation.members if rank not in away]
    leaving = cut_off({rank: arrival.unreached for rank, arrival in here.items()})
    is_patient = seen.is_running or seen.waited_s < _patience_s(generation, silent, terms)
    if leaving or (silent and (is_patient or not _are_enough(come, generation, terms.needed))):
        if seen.waited_s < terms.timeout_s:
            return None
        evicted = [Loss(rank, 0, terms.why) for rank in silent]
        evicted += [Loss(rank, 0, _apart(peers, terms)) for rank, peers in leaving.items()]
        if not _are_enough(come - leaving.keys(), generation, terms.needed, lost):
            raise _too_few(seen, terms, evicted)
        lost += evicted
        silent = []
    start = max(arrival.step for arrival in here.values())
    losses = [loss._replace(step=start, by=terms.rank) for loss in lost]
    after = generation.successor(losses, start, silent=silent, joined=seen.joining)
    if not _are_enough(after.ranks, generation, terms.needed, losses):
        raise _quorum_lost(generation, losses, terms.needed, Place(terms.rank, step=start))
    return after


def _patience_s(generation: Generation, silent: Collection[int], terms: Terms) -> float:
    """Return how long to wait for those that are `silent`.

    Longer for one that still has connections, if others have none: two ranks that are slow to
    answer would leave out each other for ever.
    """
    if not terms.may_be_silent:
        return inf
    if generation.silent and not {*silent} <= {*generation.silent}:
        return Timeouts.of(terms.timeout_s).probe_s
    return min(PATIENCE_S, terms.timeout_s)


def _are_enough(
    ranks: Collection[int], generation: Generation, needed: int, departed: Sequence[Loss] = ()
) -> bool:
    """Return True if `ranks` may go on after `generation`: at least half of it, and enough for a
    step.

    Those that finished do not count as lost.
    """
    finished = sum(loss.finished for loss in departed)
    before = sum(loss.finished for loss in generation.lost)
    is_half = 2 * (len(ranks) + finished) >= len(generation.members)
    return is_half and len(ranks) + finished + before >= needed


def require_quorum(
    generation: Generation, departed: Sequence[Loss], needed: int, place: Place
) -> None:
    """Raise `QuorumLost`, of the rank and step of `place`, if too few ranks of `generation` are
    left without those that have `departed`.
    """
    gone = {loss.rank for loss in departed}
    left = [rank for rank in generation.ranks if rank not in gone]
    if not _are_enough(left, generation, needed, departed):
        raise _quorum_lost(generation, departed, needed, place)


def _quorum_lost(
    generation: Generation, departed: Sequence[Loss], needed: int, place: Place
) -> QuorumLost:
    """Return the error of `place` where those that have `departed` leave too few of `generation`.

    Ranks that have ended by this error themselves count as left: it says the same on all ranks.
    """
    ended = {loss.rank for loss in departed if MAKE_A_STEP in loss.why}
    gone = {loss.rank for loss in departed} - ended
    left = [rank for rank in generation.ranks if rank not in gone]
    losses = [*generation.lost, *departed]
    lost = [loss for loss in losses if not loss.finished]
    last = ([loss for loss in lost if loss.rank not in ended] or lost)[-1]
    if len(left) + len(losses) - len(lost) < needed:
        what = (
            f"{last}. Ranks {left} are left, fewer than the {needed} {MAKE_A_STEP}: start again"
            " from a checkpoint, with more backups or fewer ranks"
        )
    else:
        what = (
            f"{last}. Ranks {left} are left, fewer than half of {[*generation.ranks]}: start again"
            " from a checkpoint"
        )
    return QuorumLost(what, Place(place.rank, peer=last.rank, step=place.step))


def _too_few(seen: Attendance, terms: Terms, missing: Sequence[Loss]) -> DeadlineExceeded:
    least = max(terms.needed, -(-len(seen.generation.members) // 2))
    return DeadlineExceeded(
        f"ranks {[loss.rank for loss in missing]} are missing ({missing[0].why}), and without them"
        f" fewer than {least} ranks are left: look at their output, or raise timeout_s",
        Place(terms.rank, peer=missing[0].rank, step=seen.here[terms.rank].step),
    )


def _apart(peers: Sequence[int], terms: Terms) -> str:
    return (
        f"it and ranks {[*peers]} did not reach each other within {terms.timeout_s:g} s, in a roll"
        " call: look at the network between them (a broken link, a firewall, large packets that"
        " are dropped)"
    )


def cut_off(unreached: Mapping[int, Collection[int]]) -> dict[int, list[int]]:
    """Return the ranks that must leave so that all others reach each other, and whom they do not
    reach.

    `unreached` has, for each rank, those that do not reach it, in the order in which the ranks have
    answered. As long as a link is broken, the rank with most broken links leaves; of several, the
    one that answered last, as it may have been stopped, and have been tried too late. One end is
    enough to say so.

    >>> cut_off({0: [], 1: [3], 2: [], 3: [1]}), cut_off({0: [], 3: [1], 2: [], 1: []})
    ({3: [1]}, {1: [3]})
    >>> cut_off({0: [1], 1: [], 2: [1], 3: [1]})
    {1: [0, 2, 3]}
    """
    broken: dict[int, set[int]] = {rank: set() for rank in unreached}
    place = {rank: number for number, rank in enumerate(unreached)}
    for rank, peers in unreached.items():
        for peer in broken.keys() & set(peers) - {rank}:
            broken[rank].add(peer)
            broken[peer].add(rank)
    leaving = {}
    while any(broken.values()):
        rank = max(broken, key=lambda each: (len(broken[each]), place[each]))
        leaving[rank] = sorted(broken.pop(rank))
        for peers in broken.values():
            peers.discard(rank)
    return leaving
