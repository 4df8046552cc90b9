# SPDX-License-Identifier: Apache-2.0
"""The vote on a step: the first N announced gradients count, as all ranks read on the store.

`decide` is the protocol, one rank's part of a step. Training runs it on the communication thread,
with a `QuorumVote`, which asks the store; ``tests/test_quorum.py`` runs it in every order of
events, with a death at every instant. What is reduced, and how, is the caller's.

Chen, Pan, Monga, Bengio, Jozefowicz, "Revisiting Distributed Synchronous SGD", 2016, section 3.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from operator import attrgetter, methodcaller
from typing import NamedTuple, TypeVar

from torch.distributed import DistNetworkError, Store

from commrt.elastic.elastic_membership import CALL_LOOK_S, ElasticMembership
from commrt.errors import DeadlineExceeded, PeerLost, Place
from commrt.store.client import (
    ANSWER_S,
    STORE_HOLDER,
    TimedStore,
    call_store,
    clone_connection,
    no_answer,
    start_request,
)
from commrt.store.parsing import malformed
from commrt.threads.deadline import Deadline, Timeouts
from commrt.threads.future import Future

DONE = "done"
FAILED = "failed"
"""How an attempt ended."""
NO_MEMBERS = "void"
"""In place of members: no gradient counts in this attempt."""
OLDEST_STEP = "floor"
"""The key of the oldest step whose keys the store still has."""
PROBE_S = 0.1
PROBE_MOST_S = 1.0
"""Between two probes of the ranks that a step waits for: first, and at most."""
ANNOUNCEMENT = re.compile(
    r"(\d{1,9})@(\d{1,18})@(\d{0,18})@(\d{1,12}\.\d{1,16})@(\d{1,12}\.\d{1,16})", re.ASCII
)
STORE_WAIT = timedelta(days=7)
KEPT_STEPS = 64
"""The store keeps the keys of so many steps; a rank that is farther behind was late."""
DELETED_STEPS = 16
"""Steps whose keys are deleted together."""

RANK = attrgetter("rank")
DECODED = methodcaller("decode", errors="replace")
T = TypeVar("T")
Reduce = Callable[[int, int, tuple[int, ...]], bool]


class Announcement(NamedTuple):
    """One word of the list of ready gradients."""

    rank: int
    generation: int
    """In which the rank can reduce."""
    samples: int | None = None
    """How many samples the gradient was made of; None if its rank cannot say."""
    ready_s: float = 0.0
    """When it was ready, in seconds of `time.time`."""
    late_s: float = 0.0
    """How late its rank was in the steps before, in which its gradients did not count."""

    def __str__(self) -> str:
        rank, generation, samples, ready_s, late_s = self
        return f"{rank}@{generation}@{'' if samples is None else samples}@{ready_s}@{late_s}"


def parse_announcements(text: str, generation: int | None = None) -> list[Announcement]:
    """Return the announcements of `generation`, or all that are in `text`, in the order in which
    they were made.

    Raises `DisagreementError` if it is anything else.

    >>> text = "3@0@@0.0@0.0 1@1@8@0.5@0.0 0@0@@0.0@0.0 "
    >>> [word.rank for word in parse_announcements(text, generation=0)]
    [3, 0]
    """
    found: list[Announcement] = []
    for word in text.split():
        if (parts := ANNOUNCEMENT.fullmatch(word)) is None:
            raise malformed("announcements", text)
        rank, number, samples, ready_s, late_s = parts.groups()
        if generation in (None, int(number)):
            known = int(samples) if samples else None
            found.append(Announcement(int(rank), int(number), known, float(ready_s), float(late_s)))
    return found


def choose_members(words: Sequence[Announcement], needed: int) -> str:
    """Return the members as text: the first `needed` announcements, by rank.

    >>> choose_members(parse_announcements("3@0@@0.0@0.0 0@0@8@0.0@0.0 2@0@@0.0@0.0"), needed=2)
    '0@0@8@0.0@0.0 3@0@@0.0@0.0'
    """
    return " ".join(map(str, sorted(words[:needed], key=RANK)))


def quorum_key(step: int, attempt: int, what: str) -> str:
    """Return the key of `what` of one attempt."""
    return f"{step}.{attempt}/{what}"


class StepOutcome(NamedTuple):
    """How a step ended; equal on all ranks except `counts`."""

    attempt: int
    members: tuple[int, ...] = ()
    """The ranks whose gradients were applied; empty if the store has deleted that, or none were."""
    counts: bool = False
    """True if this rank was a member, and has the sum."""
    announcements: tuple[Announcement, ...] = ()
    """Those of the members."""
    is_over: bool = True
    """False if the step must still be done."""


def decide(ask: QuorumVote, mine: Announcement, step: int, attempt: int = 0) -> StepOutcome:
    """Announce this rank's gradient in `step`, and return the outcome once enough gradients are
    applied.

    One attempt: announce; the first announcements are the members; they reduce; the step is done
    when all have the sum. An attempt that loses a member fails for all: the survivors announce
    again, with the gradients still in memory. A rank that is not a member waits for the end,
    because its gradient may count if the attempt fails. Only ranks of one generation can reduce
    together; a rank that has missed one is late. Costs four store operations.
    """
    while True:
        oldest, text = ask.announce(quorum_key(step, attempt, "announced"), f"{mine} ")
        if not oldest.isdecimal():
            raise malformed(OLDEST_STEP, oldest)
        if step < int(oldest):
            return StepOutcome(attempt)
        order = parse_announcements(text, mine.generation)
        key = quorum_key(step, attempt, "members")
        if len(order) >= ask.needed:
            text = ask.set_once(key, choose_members(order, ask.needed))
        else:
            text = ask.wait_for(key, step, attempt)
        chosen = parse_announcements("" if text == NO_MEMBERS else text)
        members = tuple(map(RANK, chosen))
        key = quorum_key(step, attempt, "outcome")
        # the dead process of this rank may have been a member: all of `mine` is compared
        counts = mine in chosen
        is_summed = counts and ask.reduce(step, attempt, members)
        if counts and (mine.rank == members[0] or not is_summed):
            text = ask.set_once(key, DONE if is_summed else FAILED)
        elif chosen:
            text = ask.wait_for(key, step, attempt, members)
        if not text:  # the store has deleted the step
            return StepOutcome(attempt)
        if text == DONE:
            return StepOutcome(attempt, members, counts, tuple(chosen))
        attempt += 1
        generation = ask.next_attempt(chosen[0].generation + 1 if chosen else mine.generation)
        if generation is None:
            return StepOutcome(attempt, is_over=False)
        mine = mine._replace(generation=generation)


class QuorumVote:
    """Votes on the steps of one model. Made on the training thread, and used on the communication
    thread.

    Requests to the store run on other threads and a connection of their own, so that the
    communication thread can probe ranks while it waits. Nothing cancels a request: a rank that
    stops waiting for a key writes it. It moves the `elastic` membership to the next generation
    where an attempt has failed, and writes nothing else of this process.

    `store` is a prefix of their own. ``reduce(step, attempt, members)`` sums the gradients of
    `members`, including this rank's, without using the sum, and returns True on success; on the
    first member, if all members have it.
    """

    def __init__(self, store: Store, elastic: ElasticMembership, reduce: Reduce) -> None:
        self._elastic = elastic
        self.reduce = reduce
        self._member = elastic.member
        self._store = TimedStore(store, self._member.rank, self._member.timeout_s)
        # too few ranks train for the latest step that was run, and for the one before
        self._are_too_few = self._were_too_few = False
        # so many have left that a step needs fewer gradients in the next generation
        self._must_reform = False
        # for requests that may wait long
        self._connection = clone_connection(store, self._member.timeout_s())
        if self._connection is not store:
            self._connection.set_timeout(STORE_WAIT)
        self._store.compare_set(OLDEST_STEP, "", "0")

    @property
    def needed(self) -> int:
        """How many gradients make a step in the generation of this rank."""
        return self._member.needed_in(self._member.generation)

    def run(self, mine: Announcement, step: int, attempt: int = 0) -> StepOutcome:
        """Return the outcome of `decide`.

        Raises `QuorumLost` if too few ranks are left, `DeadlineExceeded` if too few announce or the
        store does not answer, and what `reduce` raises.
        """
        self._were_too_few = self._are_too_few
        self._are_too_few = False
        return decide(self, mine, step, attempt)

    def next_attempt(self, generation: int) -> int | None:
        """Move to `generation` or a later one; return its number, or None if another attempt makes
        no sense.
        """
        least = generation + 1 if self._must_reform else generation
        number = self._elastic.ensure_generation(least).number
        self._must_reform = False
        return None if self._are_too_few else number

    def announce(self, key: str, word: str) -> Sequence[str]:
        """Append `word` to the text under `key`; return the oldest step, and the text as it is then
        or later.
        """

        def request() -> Sequence[str]:
            self._connection.append(key, word)  # type: ignore[attr-defined]  # torch's stub is behind
            return [*map(DECODED, self._connection.multi_get([OLDEST_STEP, key]))]

        return self._answer(request, self._require_answer)

    def set_once(self, key: str, value: str) -> str:
        """Write `value` under `key` unless something is there, and return what stands there."""
        return self._answer(
            partial(set_and_wake, self._connection, key, value), self._require_answer
        )

    def wait_for(self, key: str, step: int, attempt: int, members: tuple[int, ...] = ()) -> str:
        """Wait until `key` is written, by one of `members` if there are any, and return its text.

        Probes those that should write it, and writes it if they will not: FAILED if a member is
        gone, NO_MEMBERS if too few ranks are left to announce, nothing if the others have deleted
        the step. Raises what `run` does.
        """
        waiting = partial(self._settle_announcements, key, step, attempt)
        check = partial(self._fail_if_lost, key, step, members) if members else waiting
        try:
            return self._answer(partial(_get, self._connection, key), check)
        except BaseException:  # or the store's thread would wait for ever
            with suppress(Exception):
                call_store(
                    partial(
                        set_and_wake, self._store.connection, key, FAILED if members else NO_MEMBERS
                    )
                )
            raise

    def _answer(self, request: Callable[[], T], check: Callable[[float], None]) -> T:
        """Return the answer to `request`; calls `check` with the seconds waited, now and then and
        at a step's limit.
        """
        answer = start_request(request)
        deadline = None
        pause_s = PROBE_S / 20 if self._were_too_few else PROBE_S
        due_s = max(pause_s - CALL_LOOK_S, 0.0)
        while True:
            try:
                return answer.result(min(pause_s, CALL_LOOK_S))
            except DistNetworkError as error:
                what = (
                    f"the connection to the store broke: {STORE_HOLDER} ended; look at its output"
                )
                raise PeerLost(what, Place(rank=self._member.rank, peer=0)) from error
            except TimeoutError:
                deadline = deadline or Deadline(self._member.timeout_s())
                self._elastic.require_open()
                if (waited_s := deadline.waited_s) >= due_s or self._elastic.is_called:
                    check(waited_s)
                    pause_s = min(1.5 * pause_s, PROBE_MOST_S, deadline.poll_s)
                    step_s = Timeouts.of(self._member.timeout_s()).step_s
                    due_s = (
                        waited_s + pause_s
                        if waited_s > step_s
                        else min(waited_s + pause_s, step_s + CALL_LOOK_S)
                    )

    def _require_answer(self, waited_s: float) -> None:
        limit_s = self._member.timeout_s() + ANSWER_S
        if waited_s > limit_s:
            raise no_answer(limit_s, self._member.rank)

    def _end_if_deleted(self, key: str, step: int) -> bool:
        """Write that nothing is to come, if the others are so far ahead that `step` is gone; return
        True if so.
        """
        if step >= int(self._store.get(OLDEST_STEP)):
            return False
        set_and_wake(self._store, key, "")
        return True

    def _fail_if_lost(self, key: str, step: int, members: tuple[int, ...], waited_s: float) -> None:
        """Write that the attempt has failed, if the next of `members` is gone, or the timeout is
        over: each member probes one, so that all are probed.
        """
        if self._end_if_deleted(key, step):
            return
        member = self._member
        is_lost = self._elastic.is_called or member.gone([member.next_member(members)])
        if is_lost or waited_s > member.timeout_s():
            set_and_wake(self._store, key, FAILED)

    def _settle_announcements(self, key: str, step: int, attempt: int, waited_s: float) -> None:
        """Write the members, if enough ranks have announced, or that there are none, if too few
        still can.
        """
        if self._end_if_deleted(key, step):
            return
        text = self._store.get(quorum_key(step, attempt, "announced"))
        number = self._member.generation.number
        words = parse_announcements(text.decode(errors="replace"), number)
        if len(words) >= self.needed:  # the last of them died before it could say so
            set_and_wake(self._store, key, choose_members(words, self.needed))
        elif self._elastic.is_called:
            set_and_wake(self._store, key, NO_MEMBERS)
        else:
            self._end_if_too_few({word.rank for word in words}, key, step, waited_s)

    def _end_if_too_few(self, here: Collection[int], key: str, step: int, waited_s: float) -> None:
        """End the attempt if too few ranks train because the others wait in a collective, or have
        finished.

        While there are ranks in a collective, which wait for this one, this step ends at its own
        limit (`Timeouts`), and the steps after it end at once if they find too few gradients.
        """
        member = self._member
        limits = Timeouts.of(self._member.timeout_s())
        came = member.ranks_in_collective(member.generation)
        # one that waits may have died there
        departed, living = member.absent(member.generation, here)
        missing = [rank for rank in living if rank not in came]
        waiting = [rank for rank in living if rank in came]
        member.require_enough(
            member.generation, step, [loss._replace(step=step) for loss in departed]
        )
        is_late = bool(waiting) and (self._were_too_few or waited_s > limits.step_s)
        present = len(here) + len(missing)
        needed = self.needed
        if present < needed or is_late:
            after = member.generation.successor(departed, step, silent=member.generation.silent)
            self._must_reform = member.needed_in(after) <= present < needed
            self._are_too_few = not self._must_reform
            set_and_wake(self._store, key, NO_MEMBERS)
        elif waited_s > limits.collective_s:
            member.current()  # raises Evicted if the others went on without this rank
            what = (
                f"ranks {missing} announced no gradient within {limits.collective_s:g} s, and"
                f" without them there are fewer than {self.needed}: they are stopped, or do"
                " something else; look at their output"
            )
            raise DeadlineExceeded(what, Place(member.rank, peer=missing[0], step=step))

    def delete_old_steps(self, step: int) -> Future[None] | None:
        """Begin to delete keys of old steps, now and then; the first member of each `step` calls
        it.
        """
        if step % DELETED_STEPS or step < KEPT_STEPS:
            return None
        return start_request(partial(_delete_steps, self._connection, step - KEPT_STEPS))


def _get(store: Store, key: str) -> str:
    """Return what stands under `key` once it is written."""
    while True:
        try:
            return store.get(key).decode(errors="replace")
        except DistNetworkError:
            raise
        except RuntimeError:  # a store that others share may have a limit of its own
            continue


def _delete_steps(store: Store, oldest: int) -> None:
    store.set(OLDEST_STEP, str(oldest))
    for step in range(max(oldest - DELETED_STEPS, 0), oldest):
        attempt = 0
        # `FileStore.delete_key` is always True
        while store.check([key := quorum_key(step, attempt, "announced")]):
            store.delete_key(key)
            store.delete_key(quorum_key(step, attempt, "members"))
            store.delete_key(quorum_key(step, attempt, "outcome"))
            attempt += 1


def set_and_wake(store: Store | TimedStore, key: str, value: str) -> str:
    """Write `value` under `key` unless something is there, wake those who wait for it, and return
    what stands there.

    A store need not wake them after a compare-and-set, but after a set. If a process dies between
    the two, the next that sets the same key wakes them.
    """
    stands: str = store.compare_set(key, "", value).decode(errors="replace")
    store.set(key, stands)
    return stands
