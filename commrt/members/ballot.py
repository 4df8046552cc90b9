# SPDX-License-Identifier: Apache-2.0
"""Carries out what `commrt.members.quorum` says on the store, and looks after those it waits for.

What waits for the store has a thread and a connection of its own, which may wait long: its questions are never taken
back, since whoever stops waiting settles what is waited for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue
from time import monotonic
from typing import Any, NamedTuple, TypeVar

from torch.distributed import DistNetworkError, Store

from commrt.errors import DeadlineExceeded, PeerLost, Place, QuorumLost
from commrt.members.quorum import (
    FAILED,
    FLOOR,
    VOID,
    Again,
    Append,
    Deliberation,
    Outcome,
    Read,
    Reduce,
    Settle,
    Survey,
    Wish,
    announced,
    checked,
    first,
    key,
)
from commrt.store.asking import ANSWER_S, HOLDER, another_connection, ask, forget, settle
from commrt.store.hearsay import GARBLED, not_understood, understood
from commrt.store.presence import TRAINING, Doing, Presence
from commrt.threads.answer import Answer
from commrt.threads.patience import Patience

__all__ = ["Ballot", "Terms"]

LOOK_S, LOOK_MOST_S = 0.1, 1.0
"""Between two looks at those who are waited for, first and at most."""
BACK_S, PARTS = 1.0, 4
"""How long nobody wonders where the others are, who may come back to training from a call in which they met; and never
longer than a part of the deadline, for which they wait for this rank in one to which it has not come."""
LONG = timedelta(days=7)
KEPT = 64
"""Steps of which the store knows everything; a rank that is farther behind was late."""
TIDIED = 16
"""Steps that are forgotten together."""

T = TypeVar("T")
Move = Reduce | Again
"""What the lane does."""


class Terms(NamedTuple):
    """What does not change from step to step."""

    rank: int
    ranks: int
    needed: int
    timeout_s: Callable[[], float]
    require_open: Callable[[], None]
    """Called now and then; raises if this rank has given up."""
    is_called: Callable[[], bool]
    """True if the others connect anew, and wait for this rank."""
    gone: Callable[[Collection[int]], Collection[int]]
    """Those of some ranks whose process does not live, nor another in its place."""
    disconnected: Callable[[Collection[int]], Collection[int]]
    """Those of some members whose process does not live."""


class Ballot:
    """Of one model's steps, on a shelf of the store."""

    def __init__(self, store: Store, terms: Terms, presence: Presence) -> None:
        self._store, self._terms, self._presence = store, terms, presence
        self._clerk = _Clerk(store, f"commrt-rank{terms.rank}-quorum")
        self._attempts: dict[int, int] = {}  # of latest steps, how many there were
        self.is_over = False
        """In the step that is held it was found that too few train."""
        self._was_over = False  # in the one before
        self._silent: Collection[int] = ()  # since too few train: they say that they do
        self._asked_s, self._asking = -1.0, Patience(0.0)  # with the clerk's latest question
        self._asked(lambda: store.compare_set(FLOOR, "", "0"))

    def hold(self, deliberation: Deliberation, generation: int, move: Callable[[Move], Any]) -> Outcome:
        """How `deliberation`, which begins in `generation`, ends; `move` does what is not for the store. On the lane.

        Raises `QuorumLost` if too few ranks are left, `DeadlineExceeded` if too few come, and what `move` raises.
        """
        self._was_over, self.is_over = self.is_over, False
        self._silent = self._silent if self._was_over else ()
        wish = self._awaited(self._clerk.resume(deliberation, None), generation)
        while not isinstance(wish, Outcome):
            answer = move(wish)
            if isinstance(wish, Again):
                generation = answer
            wish = self._awaited(self._clerk.resume(deliberation, answer), generation)
        return wish

    def _awaited(self, answer: Answer[Move | Outcome], generation: int) -> Move | Outcome:
        patience = Patience(self._terms.timeout_s())
        for pause_s in _pauses(LOOK_S / 20 if self._was_over else LOOK_S, min(LOOK_MOST_S, patience.most_s)):
            with suppress(TimeoutError):
                answer.error(pause_s)
            if answer.given:
                break
            self._look(patience.waited_s, generation)
        try:
            return answer.result()
        except DistNetworkError as error:
            what = f"the connection to the store broke: {HOLDER} ended; look at its output"
            raise PeerLost(what, Place(rank=self._terms.rank, peer=0)) from error

    def _look(self, waited_s: float, generation: int) -> None:
        read = self._clerk.waits_for
        try:
            self._terms.require_open()
            if read is not None and read.members:
                self._look_after(read, waited_s)
            elif read is not None:
                self._look_for_more(read, waited_s, generation)
            elif self._is_unanswered():
                limit_s = self._terms.timeout_s() + ANSWER_S
                what = f"the store gave no answer within {limit_s:g} s: {HOLDER} is stopped or cannot be reached"
                raise DeadlineExceeded(what, Place(rank=self._terms.rank, peer=0))  # noqa: TRY301  # as the others
        except BaseException:
            if read is not None:  # or the clerk would wait for ever
                with suppress(Exception):
                    self._settle(read, FAILED if read.members else VOID)
            raise

    def _is_unanswered(self) -> bool:
        """True if the store owes an answer for too long."""
        if self._asked_s != self._clerk.asked_s:
            self._asked_s, self._asking = self._clerk.asked_s, Patience(self._terms.timeout_s() + ANSWER_S)
        return self._asking.left_s <= 0

    def _look_after(self, read: Read, waited_s: float) -> None:
        """The members of a reduction: each the next one, so that all are looked after and nobody is asked by all."""
        following = next((rank for rank in read.members if rank > self._terms.rank), read.members[0])
        # Who is called breaks all connections.
        is_lost = self._terms.is_called() or bool(self._terms.disconnected([following]))
        if is_lost or waited_s > self._terms.timeout_s():
            self._settle(read, FAILED)

    def _look_for_more(self, read: Read, waited_s: float, generation: int) -> None:
        """Those who have not announced."""
        written = key(read.step, read.attempt, "announced")
        said = self._asked(lambda: self._store.get(written))
        words = understood(written, said, lambda each: checked(announced(each.decode(), generation)))
        if len(words) >= self._terms.needed:  # the last of them died before it could say so
            self._settle(read, first(words, self._terms.needed))
        elif self._terms.is_called():
            self._settle(read, VOID)
        elif self._was_over or waited_s > min(BACK_S, self._terms.timeout_s() / PARTS):
            self._count_on({word.rank for word in words}, read, waited_s)

    def _count_on(self, here: Collection[int], read: Read, waited_s: float) -> None:
        doing = self._presence.of([rank for rank in range(self._terms.ranks) if rank not in here])
        gone = [rank for rank, what in doing.items() if what is None]
        training = [rank for rank, what in doing.items() if what in TRAINING and rank not in self._silent]
        self._require_enough(gone, read.step)
        if Doing.GATHERS in doing.values() and waited_s > self._terms.timeout_s() / 2:  # those who do wait for this one
            self._silent, training = [*self._silent, *training], []
        if len(here) + len(training) < self._terms.needed:
            self.is_over = True
            self._settle(read, VOID)
        elif waited_s > self._terms.timeout_s():
            what = (
                f"ranks {training} announced no gradient within {self._terms.timeout_s():g} s, and without them there "
                f"are fewer than {self._terms.needed}: they are stopped, or do something else; look at their output"
            )
            raise DeadlineExceeded(what, Place(self._terms.rank, training[0], read.step))

    def _require_enough(self, gone: Collection[int], step: int) -> None:
        left, needed = self._terms.ranks - len(gone), self._terms.needed
        if left < needed:
            what = (
                f"ranks {sorted(gone)} are gone, and the {left} that are left are fewer than the {needed} whose "
                "gradients make a step: start again from a checkpoint, with more backups or fewer ranks"
            )
            raise QuorumLost(what, Place(self._terms.rank, min(gone), step))

    def tidy(self, step: int, attempts: int, *, is_first: bool) -> None:
        """Forget what nobody needs any more, without waiting; by all members of `step`, whose first tells the store."""
        self._attempts[step] = attempts
        if step % TIDIED == 0 and step >= KEPT:
            floor = step - KEPT
            old = range(max(floor - TIDIED, 0), floor)
            words = [(each, attempt) for each in old for attempt in range(self._attempts.get(each, 1))]
            self._attempts = {known: count for known, count in self._attempts.items() if known >= floor}
            if is_first:
                self._clerk.do(lambda store: _forget(store, floor, words))

    def _settle(self, read: Read, value: str) -> None:
        self._asked(lambda: settle(self._store, read.key, value))

    def _asked(self, question: Callable[[], T]) -> T:
        return ask(question, self._terms.timeout_s() + ANSWER_S, self._terms.rank)

    def close(self) -> None:
        """No more steps."""
        self._clerk.close()


def _pauses(pause_s: float, most_s: float) -> Iterator[float]:
    while True:
        yield min(pause_s, most_s)
        pause_s = min(1.5 * pause_s, most_s)


def _forget(store: Store, floor: int, words: Collection[tuple[int, int]]) -> None:
    store.set(FLOOR, str(floor))
    for step, attempt in words:
        store.delete_key(key(step, attempt, "announced"))
        for what in ("members", "outcome"):
            forget(store, key(step, attempt, what))


class _Clerk:
    """A thread that asks the store, on a connection of its own."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = another_connection(store)
        if self._store is not store:
            self._store.set_timeout(LONG)
        self.asked_s = monotonic()
        """When it asked last."""
        self.waits_for: Read | None = None
        """The question that nobody can answer yet."""
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def resume(self, deliberation: Deliberation, answer: object) -> Answer[Move | Outcome]:
        """Go on with `deliberation` up to where the lane is needed."""
        end: Answer[Move | Outcome] = Answer()
        self._tasks.put(lambda: self._go_on(deliberation, answer, end))
        return end

    def do(self, task: Callable[[Store], None]) -> None:
        """Something that nobody waits for."""
        self._tasks.put(lambda: task(self._store))

    def close(self) -> None:
        """Finish, and end."""
        self._tasks.put(None)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            with suppress(RuntimeError):  # the store is gone: who needs an answer will learn it
                task()

    def _go_on(self, deliberation: Deliberation, answer: object, end: Answer[Move | Outcome]) -> None:
        try:
            end.give(self._next_move(deliberation, answer))
        except BaseException as error:
            end.fail(error)

    def _next_move(self, deliberation: Deliberation, answer: object) -> Move | Outcome:
        try:
            while True:
                wish = self._next_wish(deliberation, answer)
                if isinstance(wish, Reduce | Again):
                    return wish
                answer = self._answer(wish)
        except StopIteration as end:
            outcome: Outcome = end.value
            return outcome

    @staticmethod
    def _next_wish(deliberation: Deliberation, answer: object) -> Wish:
        try:
            return deliberation.send(answer)
        except GARBLED as error:
            raise not_understood("an announcement", str(answer)) from error

    def _answer(self, wish: Append | Settle | Survey | Read) -> object:
        store, self.asked_s = self._store, monotonic()
        match wish:
            case Append():
                return store.append(wish.key, wish.word)  # type: ignore[attr-defined]  # torch's stub is behind
            case Settle():
                return settle(store, wish.key, wish.value)
            case Survey():
                return [said.decode(errors="replace") for said in store.multi_get(list(wish.keys))]
            case Read():
                return self._read(wish)

    def _read(self, read: Read) -> str:
        self.waits_for = read
        try:
            while True:
                try:
                    return self._store.get(read.key).decode(errors="replace")
                except DistNetworkError:
                    raise
                except RuntimeError:  # a store that is not ours alone has a limit of its own
                    continue
        finally:
            self.waits_for = None
