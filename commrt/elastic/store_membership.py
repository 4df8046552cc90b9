# SPDX-License-Identifier: Apache-2.0
"""Membership of one rank: roll calls that form the next generation, eviction, and replacement of
lost ranks.

The one rule (docs/fault_tolerance.md): all that all ranks do together happens within one
generation. A rank that misses a deadline there is not in the next generation, or has no connections
in it. A process that finds that it is no member raises `Evicted`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from datetime import timedelta
from math import inf
from threading import Event
from typing import Any

from torch.distributed import DistNetworkError, Store

from commrt.elastic.generations import (
    HEAD,
    OPEN,
    ROLL_CALL,
    RUNNING,
    Arrival,
    Generation,
    Head,
    Processes,
    arrival_key,
    joining_key,
    wake_key,
)
from commrt.elastic.links import LOOK_S, cut_off
from commrt.errors import DeadlineExceeded, Evicted, Place, QuorumLost, TransportError, UsageError
from commrt.runtime.membership import Loss
from commrt.store.client import ANSWER_S, TimedStore, call_store, clone_connection
from commrt.store.parsing import parse, typed
from commrt.threads.deadline import Deadline
from commrt.threads.starting import start_thread

POLL_S = 0.002
POLL_MOST_S = 0.05
POLL_CROWD_S = 1.0
"""Between two reads of the store: the first pause, and the longest; each is twice as long as the
one before.

The k-th rank reads up to k times less often, so that many ranks do not keep the store busy; none
less often than the third number says.
"""
PATIENCE_S = 0.2
MOST_HASTE = 10
"""For so long a roll call of backup workers waits for ranks that it can do without; twice as long
after each `Generation.haste`, at most so often.
"""
DEPARTED = "departed"
MAKE_A_STEP = "whose gradients make a step"
"""The key under which each process that leaves writes a line: rank, incarnation, why, and whether
it has finished.
"""
WATCH_LIMIT = timedelta(days=7)
"""One wait of the watcher thread."""


class StoreMembership:
    """The membership of one rank. The communication thread changes generations, the training thread
    reads them.

    With backup workers ``needed(m)`` of `m` ranks make a step, and at least ``needed(0)`` must be
    left after an eviction. Without `needed` no new process becomes a member. A thread of this
    object calls `on_roll_call` with the number of the generation that other ranks want to form, as
    often as they do.
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
        self.store = TimedStore(clone_connection(store), rank, timeout_s)
        self.rank = rank
        self.timeout_s = timeout_s
        self.admits = needed is not None
        self._founders = founders.ranks
        self._needed = needed or (lambda _: 0)
        self.needed = self._needed(0)
        self._on_roll_call = on_roll_call
        self.generation = founders
        """The one in which this rank exchanges."""
        self._known = b"", Head(founders)  # the latest head that was read, also as text
        self.store.compare_set(HEAD, "", Head(founders).to_json())
        self.processes = Processes(self.store, rank, host, timeout_s)
        self.collective = 0
        """How many collectives this rank has come to."""
        self._closed = Event()
        self._watcher: threading.Thread | None = None
        self._watched = 0  # the generation whose roll call the watcher waits for

    @property
    def has_begun(self) -> bool:
        """True once this process was a member."""
        return self._watched > 0

    def needed_in(self, generation: Generation) -> int:
        """Return how many gradients make a step of `generation`: more than `needed` once ranks have
        come.
        """
        return self._needed(len(generation.connected))

    def join_first_generation(self) -> None:
        """Become a member of generation 0, as all first processes do."""
        self.processes.register()
        self._start()

    def _start(self) -> None:
        self._watched = self.generation.number + 1
        name = f"commrt-rank{self.rank}-membership"
        store = clone_connection(self.store.connection)
        self._watcher = start_thread(self._watch, name, store)

    def _watch(self, store: Store) -> None:
        """Call `on_roll_call` for each generation that other ranks want to form."""
        while not self._closed.is_set():
            try:
                store.wait([wake_key(self.rank, self._watched)], WATCH_LIMIT)
            except DistNetworkError:
                return  # the store is gone: the threads that need it raise that
            except RuntimeError:
                continue
            if not self._closed.is_set():
                self._on_roll_call(self._watched)
                self._watched += 1

    def current(self) -> Generation:
        """Return the current generation; raise `Evicted` if this process is not a member."""
        return self.head().generation

    def head(self) -> Head:
        """Return the head of the store; raise `Evicted` if this process is not a member of its
        generation.
        """
        generation = (head := self.latest()).generation
        if generation.members.get(self.rank) != self.processes.incarnation:
            self._closed.set()
            taken = Loss(self.rank, 0, "another process has taken its place")
            loss = next((loss for loss in generation.lost if loss.rank == self.rank), taken)
            raise Evicted(loss.why, Place(self.rank), generation.number, loss.by)
        return head

    def latest(self) -> Head:
        """Return the head of the store, also to a process that is no member; costs one store
        operation.
        """
        text = self.store.get(HEAD)
        known = self._known
        if text != known[0]:
            self._known = known = text, parse(HEAD, text, Head.from_json)
        return known[1]

    def change(self, head: Head, **fields: Any) -> bool:
        """Change `fields` of the head if `head` still stands; True if the result stands now."""
        after = head._replace(**fields).to_json()
        return bool(self.store.compare_set(HEAD, head.to_json(), after) == after.encode())

    def adopt(self, generation: Generation) -> None:
        """Exchange in `generation` from now on, and let the watcher wait for the next one.

        Wake-ups may be missing: a rank may die between its proposal and the wake-up.
        """
        first = min(self.generation.number + 1, generation.number)
        keys = [wake_key(self.rank, number) for number in range(first, generation.number + 1)]
        self.generation = generation
        self.store.multi_set(keys, ["1"] * len(keys))

    def roll_call(self, step: int, require_open: Callable[[], None]) -> Generation:
        """Form the next generation with all members that answer within the timeout, and return it.

        `step` is the first one in which this rank has not exchanged; the generation starts at the
        latest of all. `require_open` is called now and then, and may raise. Raises `Evicted` if the
        others form it without this rank. With backup workers it ends after `PATIENCE_S` if there
        are enough ranks for a step, or as soon as there are; after twice as long for each
        generation before that left out another rank, or ranks that are slow to answer would leave
        out each other for ever. Those that are silent then stay members, without connections; but
        in a collective, whose work needs all members, they are waited for, and evicted. So are
        ranks that answer, but do not reach each other (`cut_off`).
        """
        target = self.generation.number + 1
        key = arrival_key(self.generation, ROLL_CALL)
        self.call_members(self.generation)
        why = f"it did not answer a roll call within {self.timeout_s():g} s"
        limit = Deadline(self.timeout_s())
        patience_s = min(PATIENCE_S * 2 ** min(self.generation.haste, MOST_HASTE), self.timeout_s())
        with closing(self.processes.check_links(self.generation.members)) as links:
            unreached = links.look(LOOK_S)
            written = None
            for pause_s in self.pauses(limit, patience_s / 4):
                if unreached != written:
                    self.arrive(key, step, unreached=sorted(unreached))
                    written = unreached
                head = self.head()
                if head.generation.number >= target:
                    break
                require_open()
                if not self.evict_absent(
                    head, self.arrivals(key), why, limit, patience_s if self.needed else inf
                ):
                    Event().wait(pause_s)
                    unreached = links.look()
        return head.generation

    def evict_absent(
        self,
        head: Head,
        here: Mapping[int, Arrival],
        why: str,
        limit: Deadline,
        patience_s: float = inf,
    ) -> bool:
        """Propose the generation of the ranks that are `here`, and new processes; another rank may
        propose one first.

        Return False, and do nothing, while others may come, or reach each other, before `limit`.
        After `patience_s`, unless a collective runs, those that are silent stay members, and are
        not waited for, if the others are enough. Raises `DeadlineExceeded` if too few would stay
        though others live, `QuorumLost` if more than half have died.
        """
        generation = head.generation
        joined = self._joining(head)
        lost, silent = self.absent(generation, come := {*here, *joined})
        leaving = cut_off({rank: arrival.unreached for rank, arrival in here.items()})
        can_leave_silent = head.phase != RUNNING and limit.waited_s >= patience_s
        if leaving or (silent and not (can_leave_silent and self._are_enough(come, generation))):
            if limit.left_s > 0:
                return False
            missing = [Loss(rank, 0, why) for rank in silent]
            missing += [Loss(rank, 0, self._apart(peers)) for rank, peers in leaving.items()]
            come -= leaving.keys()
            if not self._are_enough(come, generation, lost):
                raise DeadlineExceeded(
                    f"ranks {[loss.rank for loss in missing]} are missing ({missing[0].why}), and"
                    f" without them fewer than {self._least(generation)} ranks are left: look at"
                    " their output, or raise timeout_s",
                    Place(self.rank, missing[0].rank, step=here[self.rank].step),
                )
            lost = [*lost, *missing]
            silent = []
        start = max(arrival.step for arrival in here.values())
        losses = [loss._replace(step=start, by=self.rank) for loss in lost]
        after = generation.successor(losses, start, silent=silent, joined=joined)
        if not (self.needed or self._are_enough(after.ranks, generation, losses)):
            raise self._quorum_lost(generation, after.ranks, losses, start)
        if self.change(head, generation=after):
            self.call_members(generation)
        return True

    def _least(self, generation: Generation) -> int:
        """Return how many of `generation` must stay: half of them, and with backup workers enough
        for a step.
        """
        return max(self.needed, -(-len(generation.members) // 2))

    def _are_enough(
        self, ranks: Collection[int], generation: Generation, departed: Sequence[Loss] = ()
    ) -> bool:
        """Return True if `ranks` may go on after `generation`; those that finished do not count as
        lost.
        """
        finished = sum(loss.finished for loss in departed)
        is_half = 2 * (len(ranks) + finished) >= len(generation.members)
        return (
            is_half
            and len(ranks) + finished + sum(loss.finished for loss in generation.lost)
            >= self.needed
        )

    def _apart(self, peers: Sequence[int]) -> str:
        return (
            f"it and ranks {[*peers]} did not reach each other within {self.timeout_s():g} s, in a"
            " roll call: look at the network between them (a broken link, a firewall, large"
            " packets that are dropped)"
        )

    def next_member(self, ranks: Sequence[int]) -> int:
        """Return the rank that follows this one in the ring of `ranks`."""
        return next((rank for rank in ranks if rank > self.rank), ranks[0])

    def absent(self, generation: Generation, here: Collection[int]) -> tuple[list[Loss], list[int]]:
        """Return the members of `generation` that are not `here`: those that left or are gone, and
        those that live.
        """
        away = {
            rank: incarnation
            for rank, incarnation in generation.members.items()
            if rank not in here
        }
        if not away:
            return [], []
        lines = self._lines(DEPARTED, int, int, str, bool)
        departed = {
            rank: Loss(rank, 0, why, finished)
            for rank, each, why, finished in lines
            if away.get(rank) == each
        }
        gone = self.processes.gone(
            {rank: each for rank, each in away.items() if rank not in departed}
        )
        departed |= {rank: Loss(rank, 0, "its process is gone") for rank in gone}
        return [departed[rank] for rank in sorted(departed)], [
            rank for rank in away if rank not in departed
        ]

    def gone(self, ranks: Collection[int]) -> set[int]:
        """Return those of `ranks` that were evicted, or whose processes do not live."""
        members = self.generation.members
        found = {*self.processes.gone({rank: members[rank] for rank in ranks if rank in members})}
        finished = {loss.rank for loss in self.generation.lost if loss.finished}
        others = {*ranks}.difference(members)
        return found | {
            rank for rank in others if rank not in finished or not self.processes.answers(rank)
        }

    def require_enough(
        self, generation: Generation, step: int, departed: Sequence[Loss] = ()
    ) -> None:
        """Raise `QuorumLost` if fewer than `needed` ranks are left when these of the generation
        have `departed`.

        Raises `Evicted` instead if the others went on without this rank.
        """
        gone = {loss.rank for loss in departed}
        left = [rank for rank in generation.ranks if rank not in gone]
        if not self._are_enough(left, generation, departed):
            # by this error, before this rank
            also_ended = {loss.rank for loss in departed if MAKE_A_STEP in loss.why}
            losses = [*generation.lost, *departed]
            first = [
                loss for loss in losses if not (loss.finished or loss.rank in also_ended)
            ] or losses
            left = [rank for rank in generation.ranks if rank not in gone - also_ended]
            self.current()
            raise self._quorum_lost(generation, left, first, step)

    def _quorum_lost(
        self, generation: Generation, left: Sequence[int], losses: Sequence[Loss], step: int
    ) -> QuorumLost:
        last = [loss for loss in losses if not loss.finished][-1]
        finished = sum(loss.finished for loss in losses)
        if len(left) + finished < self.needed:
            what = (
                f"{last}. Ranks {[*left]} are left, fewer than the {self.needed} {MAKE_A_STEP}: "
                "start again from a checkpoint, with more backups or fewer ranks"
            )
        else:
            what = (
                f"{last}. Ranks {[*left]} are left, fewer than half of {[*generation.ranks]}: "
                "start again from a checkpoint"
            )
        return QuorumLost(what, Place(self.rank, last.rank, step))

    def has_lost_neighbor(self, generation: Generation) -> bool:
        """Return True if the next member does not live; each rank probes one, so that all are
        probed.
        """
        departed, _ = self.absent(
            generation, {*generation.ranks} - {self.next_member(generation.ranks)}
        )
        return bool(departed)

    def ranks_in_collective(self, generation: Generation) -> Mapping[int, Arrival]:
        """Return the members that have come to the next collective,
        and wait there for this rank.
        """
        return self.arrivals(arrival_key(generation, self.collective + 1))

    def ranks_alive(self, *, in_training: bool = False) -> Sequence[int]:
        """Return the other members that have not departed, and live; `in_training` those that wait
        in no collective.
        """
        generation = self.latest().generation
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

    def join_as_replacement(self, fetch_state: Callable[[], bool]) -> None:
        """Become a member in place of a dead or evicted rank, between two collectives; for a new
        process.

        `fetch_state` copies the state of a member and returns True if that member was in a step:
        then it has made all collectives of earlier steps. Raises `UsageError` if the rank's process
        lives or no other member is left, `DeadlineExceeded` if the others do not come out of a
        collective.
        """
        if self.rank in self.latest().generation.members and self.processes.answers(self.rank):
            raise UsageError(
                f"a process of rank {self.rank} is a member and answers: another can take its place"
                " once it has ended or was evicted; if nobody meant that, two processes were"
                " started with one rank's variables"
            )
        self.processes.replace(is_new=self.rank not in self._founders)
        limit = Deadline(self.timeout_s())
        while not self._is_admitted(fetch_state, limit):
            if limit.left_s <= 0:
                what = (
                    "the other ranks are in a collective, or did not answer, for"
                    f" {self.timeout_s():g} s"
                )
                raise DeadlineExceeded(what, Place(self.rank))
            Event().wait(POLL_MOST_S)
        self._start()

    def _is_admitted(self, fetch_state: Callable[[], bool], limit: Deadline) -> bool:
        self.processes.require_latest()
        head = self.latest()
        self.generation = head.generation  # liveness checks of sources need the processes of now
        if not self.absent(head.generation, [self.rank])[1]:
            raise UsageError(
                f"this process takes the place of rank {self.rank}, but all others have finished or"
                " are gone"
            )
        if head.phase != OPEN or not fetch_state():
            return False
        self.generation, *place = self.latest()
        if place != [head.collective, head.phase]:  # the state lacks a collective
            return False
        self.collective = head.collective
        line = json.dumps([self.rank, self.processes.incarnation, head.collective]) + "\n"
        self.store.append(joining_key(self.generation), line)
        self.call_members(self.generation)
        for pause_s in self.pauses(limit):
            after = self.latest().generation
            if after.number > self.generation.number or limit.left_s <= 0:
                break
            Event().wait(pause_s)
        return after.members.get(self.rank) == self.processes.incarnation

    def _joining(self, head: Head) -> dict[int, int]:
        """Return the processes that take the places of lost ranks now, by rank: with the latest
        collective in them.
        """
        lines = (
            self._lines(joining_key(head.generation), int, int, int)
            if self.admits and head.phase == OPEN
            else []
        )
        found = {
            rank: process for rank, process, collective in lines if collective == head.collective
        }
        gone = self.processes.gone(found)
        return {rank: process for rank, process in found.items() if rank not in gone}

    def depart(self, why: str, *, finished: bool = False) -> None:
        """Tell the others not to wait for this rank any more; from any thread, and safe to call
        twice.
        """
        if self.has_begun and not self._closed.is_set():
            self._closed.set()
            with suppress(RuntimeError, TransportError):  # the store is gone, and so are they
                line = json.dumps([self.rank, self.processes.incarnation, why, finished]) + "\n"
                call_store(lambda: self.store.connection.append(DEPARTED, line), rank=self.rank)  # type: ignore[attr-defined]  # torch's stub is behind

    def close(self) -> None:
        """End the watcher, and count as gone; call it after `depart`, twice if you like.

        The store still answers.
        """
        self._closed.set()
        if self._watcher is not None and self._watcher is not threading.current_thread():
            # A thread inside the store's C++ code would abort the process while the interpreter
            # ends.
            with suppress(RuntimeError, TransportError):
                own = wake_key(self.rank, self._watched)
                call_store(lambda: self.store.connection.set(own, "0"), rank=self.rank)
            self._watcher.join(ANSWER_S)
            self._watcher = None
        self.processes.close()

    def arrivals(self, key: str) -> dict[int, Arrival]:
        """Return the ranks that have come, in that order, from the lines under `key`: each rank's
        latest.
        """
        return {
            rank: Arrival(*fields)
            for rank, *fields in self._lines(key, int, int, str, list, int | None)
        }

    def _lines(self, key: str, *kinds: Any) -> list[list[Any]]:
        """Return the fields of the lines under `key`: each is a JSON list of these kinds."""
        text = self.store.read(key)
        return parse(
            key, text, lambda text: [typed(json.loads(line), *kinds) for line in text.splitlines()]
        )

    def arrive(
        self,
        key: str,
        step: int,
        what: str = "",
        unreached: Sequence[int] = (),
        made: int | None = None,
    ) -> None:
        """Add this rank to those that have come, under `key`; see `Arrival`."""
        self.store.append(
            key, json.dumps([self.rank, *Arrival(step, what, [*unreached], made)]) + "\n"
        )

    def pauses(self, limit: Deadline, most_s: float = POLL_CROWD_S) -> Iterator[float]:
        """Yield the seconds to wait between two reads of the store, at most `most_s`."""
        place = (
            1 + self.generation.ranks.index(self.rank)
            if self.rank in self.generation.members
            else 1
        )
        pause_s = POLL_S
        most_s = min(POLL_MOST_S * place, most_s, limit.poll_s)
        while True:
            yield pause_s
            pause_s = min(2 * pause_s, most_s)

    def call_members(self, generation: Generation) -> None:
        """Let all members of `generation` form the next one, or learn that it exists; each one's
        watcher wakes up.
        """
        keys = [wake_key(rank, generation.number + 1) for rank in generation.ranks]
        self.store.multi_set(keys, ["1"] * len(keys))
