# SPDX-License-Identifier: Apache-2.0
"""One process as a member of a world: it answers roll calls, takes a lost rank's place, and leaves.

The one rule (docs/fault_tolerance.md): all that all ranks do together happens within one
generation. A rank that misses a deadline there is not in the next generation, or has no connections
in it. A process that finds that it is no member raises `Evicted`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from datetime import timedelta
from functools import partial
from threading import Event

from torch.distributed import DistNetworkError, Store

from commrt.elastic.next_generation import (
    PATIENCE_S,
    Attendance,
    Terms,
    next_generation,
    require_quorum,
)
from commrt.elastic.processes import HEALTHY_S, Processes
from commrt.elastic.records import OPEN, RUNNING, Arrival, Head
from commrt.elastic.roster import ROLL_CALL, Roster, arrival_key, wake_key
from commrt.errors import DeadlineExceeded, Evicted, Place, QuorumLost, TransportError, UsageError
from commrt.runtime.generation import Generation, Loss
from commrt.store.client import ANSWER_S, TimedStore, ask, call_store, clone_connection
from commrt.threads.deadline import Deadline
from commrt.threads.starting import start_thread

POLL_S = 0.0005
POLL_MOST_S = 0.05
POLL_CROWD_S = 1.0
"""Between two reads of the store: the first pause, and the longest; each is twice as long as the
one before.

The k-th rank reads up to k times less often, so that many ranks do not keep the store busy; none
less often than the third number says.
"""
WATCH_LIMIT = timedelta(days=7)
"""One wait of the watcher thread."""


class Member:
    """One process of `rank`, and the generation in which it exchanges.

    With backup workers ``needed(m)`` of `m` ranks make a step, and at least ``needed(0)`` must be
    left after an eviction. Without `needed` no new process becomes a member.

    On the communication thread: `roll_call` and `adopt`. On the training thread: the methods that
    join, `begin_collective` and `propose_without_absent`. On the thread that closes the world:
    `stay_while`. On any thread: the others. The watcher, a thread of this object, calls
    `on_roll_call` with the number of the generation that others want to form, as often as they do.

    It talks to others by the store, and moves no connection: `ElasticMembership` does that, which
    also writes `generation` where a checkpoint is loaded, and replaces ``store.connection`` when
    all has ended.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        founders: Generation,
        timeout_s: Callable[[], float],
        *,
        host: str | None = None,
        needed: Callable[[int], int] | None = None,
        on_roll_call: Callable[[int], None] = lambda _: None,
    ) -> None:
        # A connection of its own, as the first one may wait long for peers to connect.
        self.store = TimedStore(clone_connection(store, timeout_s()), rank, timeout_s)
        self.roster = Roster(self.store, rank, founders)
        self.processes = Processes(self.store, rank, host, timeout_s)
        self.rank = rank
        self.timeout_s = timeout_s
        self.generation = founders
        """The one in which this rank exchanges.

        Written by `adopt`; by the training thread where nothing is exchanged: when this process
        joins, and in `ElasticMembership.restart_at_step`.
        """
        self.collective = 0
        """How many collectives this rank has come to; written by the training thread only."""
        self._admits = needed is not None
        self.needed = needed(0) if needed else 0
        self._needed = needed
        self._founders = founders.ranks
        self._on_roll_call = on_roll_call
        self._closed = Event()
        self._watcher: threading.Thread | None = None
        # the generation whose roll call the watcher waits for; its own once it has begun
        self._watched = 0

    # what is current

    @property
    def has_begun(self) -> bool:
        """True once this process was a member."""
        return self._watched > 0

    def current(self) -> Generation:
        """Return the current generation; raise `Evicted` if this process is not a member."""
        return self.head().generation

    def head(self) -> Head:
        """Return what the store says is current (`Head`); raise `Evicted` if this process is not a
        member of its generation.
        """
        return self.require_member(self.roster.head())

    def require_member(self, head: Head) -> Head:
        """Return `head`; raise `Evicted` if this process is not a member of its generation, which
        also ends its watcher.
        """
        generation = head.generation
        if generation.members.get(self.rank) != self.processes.incarnation:
            self._closed.set()
            taken = Loss(self.rank, 0, "another process has taken its place")
            loss = next((loss for loss in generation.lost if loss.rank == self.rank), taken)
            raise Evicted(loss.why, Place(self.rank), generation.number, loss.by)
        return head

    def needed_in(self, generation: Generation) -> int:
        """Return how many gradients make a step of `generation`: more than `needed` once ranks have
        come.
        """
        return 0 if self._needed is None else self._needed(len(generation.connected))

    def begin_collective(self) -> None:
        """Count one more collective to which this rank comes."""
        self.collective += 1

    # who is there

    def absent(self, generation: Generation, here: Collection[int]) -> tuple[list[Loss], list[int]]:
        """Return the members of `generation` that are not `here`: those that left or are gone, and
        those that live.
        """
        away = {rank: each for rank, each in generation.members.items() if rank not in here}
        if not away:
            return [], []
        departed = self.roster.departed(away)
        unknown = {rank: each for rank, each in away.items() if rank not in departed}
        for rank in self.processes.gone(unknown):
            departed[rank] = Loss(rank, 0, "its process is gone")
        living = [rank for rank in away if rank not in departed]
        return [departed[rank] for rank in sorted(departed)], living

    def gone(self, ranks: Collection[int]) -> set[int]:
        """Return those of `ranks` that were evicted, or whose processes do not live."""
        members = self.generation.members
        found = {*self.processes.gone({rank: members[rank] for rank in ranks if rank in members})}
        finished = {loss.rank for loss in self.generation.lost if loss.finished}
        others = {*ranks}.difference(members)
        return found | {
            rank for rank in others if rank not in finished or not self.processes.answers(rank)
        }

    def call_if_gone(self, ranks: Collection[int]) -> None:
        """Let the members form the next generation if a process of one of `ranks` is gone; blocks
        for about a probe's time.
        """
        generation = self.generation
        members = generation.members
        if self.processes.gone({rank: members[rank] for rank in ranks if rank in members}):
            self.roster.call_members(generation)

    def next_member(self, ranks: Sequence[int]) -> int:
        """Return the rank that follows this one in the ring of `ranks`."""
        return next((rank for rank in ranks if rank > self.rank), ranks[0])

    def has_lost_neighbor(self, generation: Generation) -> bool:
        """Return True if the next member does not live; each rank probes one, so that all are
        probed.
        """
        others = {*generation.ranks} - {self.next_member(generation.ranks)}
        return bool(self.absent(generation, others)[0])

    def ranks_in_collective(self, generation: Generation) -> Mapping[int, Arrival]:
        """Return the members that have come to the next collective,
        and wait there for this rank.
        """
        return self.roster.arrivals(arrival_key(generation, self.collective + 1))

    def ranks_alive(self, *, in_training: bool = False) -> Sequence[int]:
        """Return the other members that have not departed, and live; `in_training` those that wait
        in no collective.
        """
        generation = self.roster.head().generation
        waiting = self.ranks_in_collective(generation) if in_training else ()
        return self.absent(generation, {self.rank, *waiting})[1]

    def stay_while(self, others: Callable[[], Sequence[int]]) -> None:
        """Wait while there are `others`, at most a whole timeout in which the store does not
        change.
        """
        limit = Deadline(self.timeout_s())
        keys = -1
        while others() and limit.left_s > 0:
            Event().wait(POLL_MOST_S)
            known = keys
            keys = self.store.num_keys()
            limit = limit if known == keys else Deadline(self.timeout_s())

    def require_enough(
        self, generation: Generation, step: int, departed: Sequence[Loss] = ()
    ) -> None:
        """Raise `QuorumLost` if too few ranks are left when these of the generation have
        `departed`.

        Raises `Evicted` instead if the others went on without this rank.
        """
        try:
            require_quorum(generation, departed, self.needed, Place(self.rank, step=step))
        except QuorumLost:
            self.current()
            raise

    # the next generation

    def roll_call(self, step: int, require_open: Callable[[], None]) -> Generation:
        """Form the next generation with the members that answer, and return it.

        `step` is the first one in which this rank has not exchanged; the generation starts at the
        latest of all. `require_open` is called now and then, and may raise. See `next_generation`
        for who is waited for, and how long. Raises what that does, and `Evicted` if the others form
        it without this rank.
        """
        before = self.generation
        key = arrival_key(before, ROLL_CALL)
        self.roster.call_members(before)
        why = f"it did not answer a roll call within {self.timeout_s():g} s"
        terms = self._terms(why, may_be_silent=self.needed > 0)
        limit = Deadline(self.timeout_s())
        with closing(self.processes.check_links(before.members)) as links:
            unreached = links.look(HEALTHY_S)
            written = None
            for pause_s in self.pauses(limit, PATIENCE_S / 4):
                if unreached != written:
                    self.roster.arrive(key, Arrival(step, unreached=sorted(unreached)))
                    written = unreached
                head = self.head()
                here = self.roster.arrivals(key)
                if head.generation.number > before.number:
                    break
                require_open()
                if not self._propose(head, here, terms, limit):
                    Event().wait(pause_s)
                    unreached = links.look()
        return head.generation

    def propose_without_absent(
        self, head: Head, here: Mapping[int, Arrival], what: str, limit: Deadline
    ) -> bool:
        """Propose a generation without those that do not come to the collective `what`, once they
        are lost or `limit` is over; return False before.
        """
        why = f"it did not come to {what} within {self.timeout_s():g} s"
        return self._propose(head, here, self._terms(why, may_be_silent=False), limit)

    def _terms(self, why: str, *, may_be_silent: bool) -> Terms:
        return Terms(self.rank, self.timeout_s(), why, self.needed, may_be_silent)

    def _propose(
        self, head: Head, here: Mapping[int, Arrival], terms: Terms, limit: Deadline
    ) -> bool:
        """Propose what follows the generation of `head`, or return False if it is too early.

        Another rank may have proposed one first.
        """
        joining = self._joining(head)
        unreached = {peer for arrival in here.values() for peer in arrival.unreached}
        reached = {*here} - unreached
        departed, _ = self.absent(head.generation, {self.rank, *reached, *joining})
        seen = Attendance(
            head.generation, here, departed, joining, head.phase == RUNNING, limit.waited_s
        )
        after = next_generation(seen, terms)
        if after is None:
            return False
        if self.roster.change(head, head._replace(generation=after)).generation == after:
            self.roster.call_members(head.generation)
        return True

    def _joining(self, head: Head) -> dict[int, int]:
        """Return the living processes that want to come now, by rank."""
        if not self._admits:
            return {}
        found = self.roster.joining(head)
        gone = self.processes.gone(found)
        return {rank: process for rank, process in found.items() if rank not in gone}

    def adopt(self, generation: Generation) -> None:
        """Exchange in `generation` from now on, and let the watcher wait for the next one.

        Wake-ups may be missing: a rank may die between its proposal and the wake-up.
        """
        first = min(self.generation.number + 1, generation.number)
        self.generation = generation
        self.roster.wake_own(first, generation.number)

    def pauses(self, limit: Deadline, most_s: float = POLL_CROWD_S) -> Iterator[float]:
        """Yield the seconds to wait between two reads of the store, at most `most_s`."""
        ranks = self.generation.ranks
        place = 1 + ranks.index(self.rank) if self.rank in ranks else 1
        pause_s = POLL_S
        most_s = min(POLL_MOST_S * place, most_s, limit.poll_s)
        while True:
            yield pause_s
            pause_s = min(2 * pause_s, most_s)

    # to come and to leave

    def join_first_generation(self) -> None:
        """Become a member of generation 0, as all first processes do."""
        self.processes.register()
        self._start()

    def join_as_replacement(self, fetch_state: Callable[[], bool]) -> None:
        """Become a member in place of a dead or evicted rank, between two collectives; for a new
        process.

        `fetch_state` copies the state of a member and returns True if that member was in a step:
        then it has made all collectives of earlier steps. Raises `UsageError` if the rank's process
        lives or no other member is left, `DeadlineExceeded` if the others do not come out of a
        collective.
        """
        members = self.roster.head().generation.members
        if self.rank in members and self.processes.answers(self.rank):
            raise UsageError(
                f"a process of rank {self.rank} is a member and answers: another can take its place"
                " once it has ended or was evicted; if nobody meant that, two processes were"
                " started with one rank's variables"
            )
        self.processes.replace(is_new=self.rank not in self._founders)
        limit = Deadline(self.timeout_s())
        while missing := self._try_to_join(fetch_state, limit):
            if limit.left_s <= 0:
                what = (
                    f"the other ranks did not admit this process within {self.timeout_s():g} s: in"
                    f" its last try {missing}; look at their output, or raise timeout_s"
                )
                raise DeadlineExceeded(what, Place(self.rank))
            Event().wait(POLL_MOST_S)
        self._start()

    def _try_to_join(self, fetch_state: Callable[[], bool], limit: Deadline) -> str:
        """Take the state of others, and ask to join; return what was missing, "" if this process is
        a member.
        """
        self.processes.require_latest()
        head = self.roster.head()
        self.generation = head.generation  # liveness checks of sources need the processes of now
        if not self.absent(head.generation, [self.rank])[1]:
            raise UsageError(
                f"this process takes the place of rank {self.rank}, but all others have finished or"
                " are gone"
            )
        if head.phase != OPEN:
            return self._what_runs(head)
        if not fetch_state():
            return "no rank gave its state in a backward pass"
        now = self.roster.head()
        self.generation = now.generation
        if (now.collective, now.phase) != (head.collective, head.phase):  # the state lacks one
            return "they began a collective after they gave their state"
        self.collective = head.collective
        self.roster.ask_to_join(now, self.processes.incarnation)
        self.roster.call_members(self.generation)
        for pause_s in self.pauses(limit):
            after = self.roster.head().generation
            if after.number > self.generation.number or limit.left_s <= 0:
                break
            Event().wait(pause_s)
        if after.members.get(self.rank) == self.processes.incarnation:
            return ""
        if after.number == self.generation.number:
            return "they did not answer its request for a roll call"
        return "they formed a generation without it"

    def _what_runs(self, head: Head) -> str:
        """Say who has come to the collective of `head`."""
        come = self.roster.arrivals(arrival_key(head.generation, head.collective))
        calls = sorted({arrival.what for arrival in come.values()})
        return f"ranks {sorted(come)} were in a collective ({', '.join(calls)})"

    def _start(self) -> None:
        self._watched = self.generation.number + 1
        name = f"commrt-rank{self.rank}-membership"
        store = clone_connection(self.store.connection, self.timeout_s())
        self._watcher = start_thread(self._watch, name, store)

    def _watch(self, store: Store) -> None:
        """Call `on_roll_call` for each generation that other ranks want to form."""
        while not self._closed.is_set():
            try:
                ask(partial(store.wait, [wake_key(self.rank, self._watched)], WATCH_LIMIT))
            except DistNetworkError:
                return  # the store is gone: the threads that need it raise that
            except RuntimeError:
                continue
            if not self._closed.is_set():
                self._on_roll_call(self._watched)
                self._watched += 1

    def depart(self, why: str, *, finished: bool = False) -> None:
        """Tell the others not to wait for this rank any more. Safe to call twice."""
        if self.has_begun and not self._closed.is_set():
            self._closed.set()
            with suppress(RuntimeError, TransportError):  # the store is gone, and so are they
                self.roster.depart(self.processes.incarnation, why, finished=finished)

    def close(self) -> None:
        """End the watcher, and count as gone; call it after `depart`, twice if you like.

        The store still answers.
        """
        self._closed.set()
        if self._watcher is not None and self._watcher is not threading.current_thread():
            with suppress(RuntimeError, TransportError):
                own = wake_key(self.rank, self._watched)
                call_store(lambda: self.store.connection.set(own, "0"), rank=self.rank)
            self._watcher.join(ANSWER_S)
            self._watcher = None
        self.processes.close()
