# SPDX-License-Identifier: Apache-2.0
"""Run the quorum protocol (`commrt.backup_workers.quorum`) on the store, and probe the ranks that a step waits for.

A thread with its own connection executes the operations that wait for the store. Nothing cancels them: a rank that
stops waiting writes the key for which it waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

from torch.distributed import DistNetworkError, Store

from commrt.backup_workers.quorum import (
    FAILED,
    NO_MEMBERS,
    OLDEST_STEP,
    Append,
    NextAttempt,
    Operation,
    QuorumStep,
    ReadNow,
    Reduce,
    SetOnce,
    StepOutcome,
    WaitFor,
    choose_members,
    parse_announcements,
    quorum_key,
)
from commrt.elastic.store_membership import StoreMembership
from commrt.errors import DeadlineExceeded, PeerLost, Place
from commrt.store.client import (
    MALFORMED,
    STORE_ANSWER_S,
    STORE_HOLDER,
    call_store,
    clone_connection,
    delete_once,
    malformed,
    parse,
    set_once,
)
from commrt.threads.deadline import Deadline
from commrt.threads.future import Future

__all__ = ["QuorumVote", "VoteSettings"]

PROBE_S, PROBE_MOST_S = 0.1, 1.0
"""Between two probes of the ranks that a step waits for: first, and at most."""
STORE_WAIT = timedelta(days=7)
KEPT_STEPS = 64
"""The store keeps the keys of so many steps; a rank that is farther behind was late."""
DELETED_STEPS = 16
"""Steps whose keys are deleted together."""

T = TypeVar("T")
RankOperation = Reduce | NextAttempt
"""Operations that the communication thread executes."""


class VoteSettings(NamedTuple):
    """What stays the same from step to step."""

    rank: int
    needed: int
    timeout_s: Callable[[], float]
    require_open: Callable[[], None]
    """Called regularly; raises if this rank has given up."""
    is_called: Callable[[], bool]
    """Returns True if the others form a new generation, and wait for this rank."""
    membership: StoreMembership


class QuorumVote:
    """Votes on the steps of one model; `store` is a prefix of their own."""

    def __init__(self, store: Store, settings: VoteSettings) -> None:
        self._store, self._settings = store, settings
        self._store_thread = _StoreThread(store, f"commrt-rank{settings.rank}-quorum")
        self._attempts: dict[int, int] = {}  # of latest steps, how many there were
        self.is_over = False
        """True if too few ranks train for the latest step."""
        self._was_over = False  # in the step before
        self._operation, self._asking = -1, Deadline(0.0)  # of the store thread's latest operation
        self._asked(lambda: store.compare_set(OLDEST_STEP, "", "0"))

    def run(self, quorum_step: QuorumStep, generation: int, execute: Callable[[RankOperation], Any]) -> StepOutcome:
        """Run `quorum_step` from `generation` on, and return its outcome. On the communication thread.

        `execute` runs the operations that are not for the store. Raises `QuorumLost` if too few ranks are left,
        `DeadlineExceeded` if too few announce, and what `execute` raises.
        """
        self._was_over, self.is_over = self.is_over, False
        operation = self._await(self._store_thread.resume(quorum_step, None), generation)
        while not isinstance(operation, StepOutcome):
            answer = execute(operation)
            if isinstance(operation, NextAttempt):
                generation = answer
            operation = self._await(self._store_thread.resume(quorum_step, answer), generation)
        return operation

    def _await(self, answer: Future[RankOperation | StepOutcome], generation: int) -> RankOperation | StepOutcome:
        deadline = Deadline(self._settings.timeout_s())
        for pause_s in _pauses(PROBE_S / 20 if self._was_over else PROBE_S, min(PROBE_MOST_S, deadline.poll_s)):
            with suppress(TimeoutError):
                answer.exception(pause_s)
            if answer.done():
                break
            self._check(deadline.waited_s, generation)
        try:
            return answer.result()
        except DistNetworkError as error:
            what = f"the connection to the store broke: {STORE_HOLDER} ended; look at its output"
            raise PeerLost(what, Place(rank=self._settings.rank, peer=0)) from error

    def _check(self, waited_s: float, generation: int) -> None:
        read = self._store_thread.waits_for
        try:
            self._settings.require_open()
            if read is not None and read.members:
                self._check_members(read, waited_s)
            elif read is not None:
                self._check_announcements(read, waited_s, generation)
            elif self._is_unanswered():
                limit_s = self._settings.timeout_s() + STORE_ANSWER_S
                what = f"the store gave no answer within {limit_s:g} s: {STORE_HOLDER} is stopped or cannot be reached"
                raise DeadlineExceeded(what, Place(rank=self._settings.rank, peer=0))  # noqa: TRY301  # as the others
        except BaseException:
            if read is not None:  # or the store thread would wait for ever
                with suppress(Exception):
                    self._write(read, FAILED if read.members else NO_MEMBERS)
            raise

    def _is_unanswered(self) -> bool:
        """Return True if the store has not answered within its time."""
        if self._operation != self._store_thread.operations:
            self._operation = self._store_thread.operations
            self._asking = Deadline(self._settings.timeout_s() + STORE_ANSWER_S)
        return self._asking.left_s <= 0

    def _check_members(self, read: WaitFor, waited_s: float) -> None:
        """Probe the next member of the reduction: each member probes one, so that all are probed."""
        membership = self._settings.membership
        following = membership.next_member(read.members)
        is_evicted = following not in membership.generation.members
        is_lost = is_evicted or self._settings.is_called() or membership.is_gone(following)
        if is_lost or waited_s > self._settings.timeout_s():
            self._write(read, FAILED)

    def _check_announcements(self, read: WaitFor, waited_s: float, generation: int) -> None:
        """Check whether enough ranks have announced, or still can."""
        written = quorum_key(read.step, read.attempt, "announced")
        data = self._asked(lambda: self._store.get(written))
        words = parse(written, data, lambda each: parse_announcements(each.decode(), generation))
        if len(words) >= self._settings.needed:  # the last of them died before it could say so
            self._write(read, choose_members(words, self._settings.needed))
        elif self._settings.is_called():
            self._write(read, NO_MEMBERS)
        else:
            self._end_if_too_few({word.rank for word in words}, read, waited_s)

    def _end_if_too_few(self, here: Collection[int], read: WaitFor, waited_s: float) -> None:
        """End the attempt if too few ranks train because the others wait in a collective, or have finished.

        Ranks in a collective wait for this one no longer than the timeout. So while there are any, this step ends after
        half of the timeout, and the steps after it end at once if they find too few gradients.
        """
        membership = self._settings.membership
        waiting = membership.ranks_in_collective(membership.generation)
        absent = membership.absent(membership.generation, {*here, *waiting})
        departed = [loss._replace(step=read.step) for loss in absent.departed]
        membership.require_enough(membership.generation, read.step, departed)
        is_late = bool(waiting) and (self._was_over or waited_s > self._settings.timeout_s() / 2)
        if len(here) + len(absent.silent) < self._settings.needed or is_late:
            self.is_over = True
            self._write(read, NO_MEMBERS)
        elif waited_s > self._settings.timeout_s():
            membership.current()  # as below
            silent = list(absent.silent)
            what = (
                f"ranks {silent} announced no gradient within {self._settings.timeout_s():g} s, and without them there "
                f"are fewer than {self._settings.needed}: they are stopped, or do something else; look at their output"
            )
            raise DeadlineExceeded(what, Place(self._settings.rank, silent[0], read.step))

    def delete_old_steps(self, step: int, attempts: int, *, is_first: bool) -> None:
        """Delete the keys of old steps, without waiting; all members of `step` call it, and the first one deletes."""
        self._attempts[step] = attempts
        if step % DELETED_STEPS == 0 and step >= KEPT_STEPS:
            oldest = step - KEPT_STEPS
            old = range(max(oldest - DELETED_STEPS, 0), oldest)
            words = [(each, attempt) for each in old for attempt in range(self._attempts.get(each, 1))]
            self._attempts = {known: count for known, count in self._attempts.items() if known >= oldest}
            if is_first:
                self._store_thread.do(lambda store: _delete_steps(store, oldest, words))

    def _write(self, read: WaitFor, value: str) -> None:
        self._asked(lambda: set_once(self._store, read.key, value))

    def _asked(self, question: Callable[[], T]) -> T:
        return call_store(question, self._settings.timeout_s() + STORE_ANSWER_S, self._settings.rank)

    def close(self) -> None:
        """Release the store thread; there are no more steps."""
        self._store_thread.close()


def _pauses(pause_s: float, most_s: float) -> Iterator[float]:
    while True:
        yield min(pause_s, most_s)
        pause_s = min(1.5 * pause_s, most_s)


def _delete_steps(store: Store, oldest: int, words: Collection[tuple[int, int]]) -> None:
    store.set(OLDEST_STEP, str(oldest))
    for step, attempt in words:
        store.delete_key(quorum_key(step, attempt, "announced"))
        for what in ("members", "outcome"):
            delete_once(store, quorum_key(step, attempt, what))


class _StoreThread:
    """A thread that executes operations on the store, on a connection of its own."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = clone_connection(store)
        if self._store is not store:
            self._store.set_timeout(STORE_WAIT)
        self.operations = 0
        """How many operations have begun."""
        self.waits_for: WaitFor | None = None
        """The operation whose key is not written yet."""
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def resume(self, quorum_step: QuorumStep, answer: object) -> Future[RankOperation | StepOutcome]:
        """Run `quorum_step` up to the next operation for the communication thread; return a future of it."""
        end: Future[RankOperation | StepOutcome] = Future()
        self._tasks.put(lambda: self._advance(quorum_step, answer, end))
        return end

    def do(self, task: Callable[[Store], None]) -> None:
        """Run `task`, for whose end nobody waits."""
        self._tasks.put(lambda: task(self._store))

    def close(self) -> None:
        """Run what was submitted, then end the thread."""
        self._tasks.put(None)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            with suppress(RuntimeError):  # the store is gone: the thread that waits for an answer sees it
                task()

    def _advance(self, quorum_step: QuorumStep, answer: object, end: Future[RankOperation | StepOutcome]) -> None:
        try:
            end.set_result(self._next_rank_operation(quorum_step, answer))
        except BaseException as error:
            end.set_exception(error)

    def _next_rank_operation(self, quorum_step: QuorumStep, answer: object) -> RankOperation | StepOutcome:
        try:
            while True:
                operation = self._next_operation(quorum_step, answer)
                if isinstance(operation, Reduce | NextAttempt):
                    return operation
                answer = self._answer(operation)
        except StopIteration as end:
            outcome: StepOutcome = end.value
            return outcome

    @staticmethod
    def _next_operation(quorum_step: QuorumStep, answer: object) -> Operation:
        try:
            return quorum_step.send(answer)
        except MALFORMED as error:
            raise malformed("an announcement", str(answer)) from error

    def _answer(self, operation: Append | SetOnce | ReadNow | WaitFor) -> object:
        store = self._store
        self.operations += 1
        match operation:
            case Append():
                return store.append(operation.key, operation.word)  # type: ignore[attr-defined]  # torch's stub is behind
            case SetOnce():
                return set_once(store, operation.key, operation.value)
            case ReadNow():
                return [data.decode(errors="replace") for data in store.multi_get(list(operation.keys))]
            case WaitFor():
                return self._read(operation)

    def _read(self, read: WaitFor) -> str:
        self.waits_for = read
        try:
            while True:
                try:
                    return self._store.get(read.key).decode(errors="replace")
                except DistNetworkError:
                    raise
                except RuntimeError:  # a store that others share may have a limit of its own
                    continue
        finally:
            self.waits_for = None
