# SPDX-License-Identifier: Apache-2.0
"""Run the quorum protocol (`commrt.membership.quorum`) on the store, and look after the ranks that a step waits for.

A thread with its own connection does what waits for the store. Its questions are never taken back: a rank that stops
waiting settles what it waits for.
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
from commrt.membership.generations import Loss
from commrt.membership.membership import Membership
from commrt.membership.quorum import (
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
from commrt.membership.store_client import (
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
from commrt.threads.answer import Answer
from commrt.threads.patience import Patience

__all__ = ["QuorumVote", "VoteSettings"]

LOOK_S, LOOK_MOST_S = 0.1, 1.0
"""Between two looks at the ranks that a step waits for, first and at most."""
LONG = timedelta(days=7)
KEPT = 64
"""Steps of which the store knows everything; a rank that is farther behind was late."""
TIDIED = 16
"""Steps that are forgotten together."""

T = TypeVar("T")
Move = Reduce | Again
"""What the lane does."""


class VoteSettings(NamedTuple):
    """What does not change from step to step."""

    rank: int
    ranks: int
    needed: int
    timeout_s: Callable[[], float]
    require_open: Callable[[], None]
    """Called now and then; raises if this rank has given up."""
    is_called: Callable[[], bool]
    """True if the others form a new generation, and wait for this rank."""
    membership: Membership


class QuorumVote:
    """The steps of one model, on a store of their own."""

    def __init__(self, store: Store, settings: VoteSettings) -> None:
        self._store, self._settings = store, settings
        self._clerk = _Clerk(store, f"commrt-rank{settings.rank}-quorum")
        self._attempts: dict[int, int] = {}  # of latest steps, how many there were
        self.is_over = False
        """Too few ranks train for the step that is held."""
        self._was_over = False  # for the one before
        self._asked_s, self._asking = -1.0, Patience(0.0)  # with the clerk's latest question
        self._asked(lambda: store.compare_set(FLOOR, "", "0"))

    def hold(self, deliberation: Deliberation, generation: int, move: Callable[[Move], Any]) -> Outcome:
        """How `deliberation`, which begins in `generation`, ends; `move` does what is not for the store. On the lane.

        Raises `QuorumLost` if too few ranks are left, `DeadlineExceeded` if too few come, and what `move` raises.
        """
        self._was_over, self.is_over = self.is_over, False
        wish = self._awaited(self._clerk.resume(deliberation, None), generation)
        while not isinstance(wish, Outcome):
            answer = move(wish)
            if isinstance(wish, Again):
                generation = answer
            wish = self._awaited(self._clerk.resume(deliberation, answer), generation)
        return wish

    def _awaited(self, answer: Answer[Move | Outcome], generation: int) -> Move | Outcome:
        patience = Patience(self._settings.timeout_s())
        for pause_s in _pauses(LOOK_S / 20 if self._was_over else LOOK_S, min(LOOK_MOST_S, patience.most_s)):
            with suppress(TimeoutError):
                answer.error(pause_s)
            if answer.given:
                break
            self._look(patience.waited_s, generation)
        try:
            return answer.result()
        except DistNetworkError as error:
            what = f"the connection to the store broke: {STORE_HOLDER} ended; look at its output"
            raise PeerLost(what, Place(rank=self._settings.rank, peer=0)) from error

    def _look(self, waited_s: float, generation: int) -> None:
        read = self._clerk.waits_for
        try:
            self._settings.require_open()
            if read is not None and read.members:
                self._look_after(read, waited_s)
            elif read is not None:
                self._look_for_more(read, waited_s, generation)
            elif self._is_unanswered():
                limit_s = self._settings.timeout_s() + STORE_ANSWER_S
                what = f"the store gave no answer within {limit_s:g} s: {STORE_HOLDER} is stopped or cannot be reached"
                raise DeadlineExceeded(what, Place(rank=self._settings.rank, peer=0))  # noqa: TRY301  # as the others
        except BaseException:
            if read is not None:  # or the clerk would wait for ever
                with suppress(Exception):
                    self._settle(read, FAILED if read.members else VOID)
            raise

    def _is_unanswered(self) -> bool:
        """True if the store owes an answer for too long."""
        if self._asked_s != self._clerk.asked_s:
            self._asked_s, self._asking = self._clerk.asked_s, Patience(self._settings.timeout_s() + STORE_ANSWER_S)
        return self._asking.left_s <= 0

    def _look_after(self, read: Read, waited_s: float) -> None:
        """The members of a reduction: each looks after the next, so that all are looked after and nobody by all."""
        following = self._settings.membership.next_member(read.members)
        is_lost = self._settings.is_called() or self._is_gone(following)
        if is_lost or waited_s > self._settings.timeout_s():
            self._settle(read, FAILED)

    def _is_gone(self, rank: int) -> bool:
        members = self._settings.membership.generation.members
        return rank not in members or self._settings.membership.processes.is_gone(rank, members[rank])

    def _look_for_more(self, read: Read, waited_s: float, generation: int) -> None:
        """Ranks that have not announced a gradient."""
        written = key(read.step, read.attempt, "announced")
        said = self._asked(lambda: self._store.get(written))
        words = parse(written, said, lambda each: checked(announced(each.decode(), generation)))
        if len(words) >= self._settings.needed:  # the last of them died before it could say so
            self._settle(read, first(words, self._settings.needed))
        elif self._settings.is_called():
            self._settle(read, VOID)
        else:
            self._count_on({word.rank for word in words}, read, waited_s)

    def _count_on(self, here: Collection[int], read: Read, waited_s: float) -> None:
        """End the attempt if too few ranks train: the others wait in a collective, or have finished.

        Ranks in a collective wait for this one no longer than the timeout. So while there are any, a step that waits
        for more than half of that is over too, and so are the steps after it that find too few gradients at once.
        """
        membership = self._settings.membership
        waiting = membership.waiting(membership.generation)
        absent = membership.absent(membership.generation, {*here, *waiting})
        self._require_enough(read.step, [loss for loss in absent.departed if not loss.finished])
        is_late = bool(waiting) and (self._was_over or waited_s > self._settings.timeout_s() / 2)
        if len(here) + len(absent.silent) < self._settings.needed or is_late:
            self.is_over = True
            self._settle(read, VOID)
        elif waited_s > self._settings.timeout_s():
            silent = list(absent.silent)
            what = (
                f"ranks {silent} announced no gradient within {self._settings.timeout_s():g} s, and without them there "
                f"are fewer than {self._settings.needed}: they are stopped, or do something else; look at their output"
            )
            raise DeadlineExceeded(what, Place(self._settings.rank, silent[0], read.step))

    def _require_enough(self, step: int, lost: Collection[Loss]) -> None:
        before = [loss for loss in self._settings.membership.generation.lost if not loss.finished]
        ranks = sorted(loss.rank for loss in (*before, *lost))
        left, needed = self._settings.ranks - len(ranks), self._settings.needed
        if left < needed:
            what = (
                f"ranks {ranks} are lost, and the {left} that are left are fewer than the {needed} whose "
                "gradients make a step: start again from a checkpoint, with more backups or fewer ranks"
            )
            raise QuorumLost(what, Place(self._settings.rank, ranks[0], step))

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
        self._asked(lambda: set_once(self._store, read.key, value))

    def _asked(self, question: Callable[[], T]) -> T:
        return call_store(question, self._settings.timeout_s() + STORE_ANSWER_S, self._settings.rank)

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
            delete_once(store, key(step, attempt, what))


class _Clerk:
    """A thread that asks the store, on a connection of its own."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = clone_connection(store)
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
        except MALFORMED as error:
            raise malformed("an announcement", str(answer)) from error

    def _answer(self, wish: Append | Settle | Survey | Read) -> object:
        store, self.asked_s = self._store, monotonic()
        match wish:
            case Append():
                return store.append(wish.key, wish.word)  # type: ignore[attr-defined]  # torch's stub is behind
            case Settle():
                return set_once(store, wish.key, wish.value)
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
