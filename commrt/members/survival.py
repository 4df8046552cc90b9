# SPDX-License-Identifier: Apache-2.0
"""How a world goes on without a rank: all break their connections, and those who are left connect anew.

NCCL can end a transfer only by ending all, and who waits for the lost rank is waited for by others. So the loss passes
from rank to rank, as broken connections, until all know of it and come together (`commrt.members.membership`).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from math import inf
from threading import Event
from typing import TypeVar
from weakref import WeakSet

from torch.distributed import PrefixStore, Store

from commrt.errors import (
    DeadlineExceeded,
    DisagreementError,
    LeftBehind,
    PeerLost,
    Place,
    TransportClosed,
    TransportError,
)
from commrt.members.attendance import Need
from commrt.members.calls import Calls
from commrt.members.membership import Membership
from commrt.members.reconnecting import ConnectGpu, Means, reconnect
from commrt.members.tries import Tries
from commrt.members.vote import Votes
from commrt.threads.answer import Failed, Pending, Spared
from commrt.threads.lane import Lane
from commrt.transport.media import Media

__all__ = ["LOST", "Survival"]

T = TypeVar("T")

LOST = (PeerLost, DeadlineExceeded)
"""What may mean that a rank is gone; all else is an error of this one, or of the program."""


class Survival:
    """Of one world; on its lane, except where it says otherwise."""

    def __init__(
        self, store: Store, transport: Media, lane: Lane, means: Means | None, connect_gpu: ConnectGpu
    ) -> None:
        self.towards = None if means is None else means.towards
        """Whence the others see this rank, where that is known."""
        self.membership = Membership(
            store, transport.rank, transport.members, self.towards, lambda: transport.timeout_s
        )
        self._dependants: WeakSet[object] = WeakSet()
        self._is_on = False
        self._need: Need | None = None
        self._called = 0  # the latest generation to which others called this rank
        self.is_outside = False
        """The others have connected anew without this rank, which is alive: `rejoin`."""
        self.generation = 0
        """Through whose connections this rank exchanges."""
        self.apart_until: float = 0
        """The step from which this rank exchanges with the others again; infinite until they have connected."""
        self.room = 0
        """Grows when memory that was sent from must be left alone: a broken peer may still read it."""
        self._transport, self._lane = transport, lane
        self._means, self._connect_gpu = means, connect_gpu
        self.step = 0
        """The step that training here comes to next."""
        shelf = PrefixStore("calls", store)
        self.calls = Calls(shelf, transport.rank, lambda: transport.timeout_s, self._are_gathered)
        self._votes = Votes(store, transport.rank, lambda: transport.timeout_s, self.membership.are_gone)
        self._begun: int | None = None  # in which generation what all do together now was begun

    @property
    def has_need(self) -> bool:
        """True if what is attached has ranks do different numbers of steps, so that nothing else can be beside it."""
        return self._need is not None

    @property
    def is_possible(self) -> bool:
        """True if a lost rank does not end this world; the same on all ranks."""
        return self._is_on

    def others(self) -> int:
        """Dependants that are there already, without those that were dropped."""
        for pause_s in (0.0, 0.01, 0.1):
            if self._dependants:
                Event().wait(pause_s)  # while another thread collects, this one would not
                gc.collect()  # a model and its hooks are a cycle
        return len(self._dependants)

    def begin(self, dependant: object, *, alone: bool, need: Need | None = None) -> None:
        """From now on, `dependant` goes on without a lost rank: it calls `let_go`, and `reform` when that suits it.

        Not if it is not `alone`, on all ranks: nobody could say when all come together. Where all there is to `need` is
        so many ranks, those who come go on without who is silent, and that one can `rejoin`. Collective.
        """
        if self._is_on:
            self.membership.leave("another model gossips now")
        self._dependants.add(dependant)
        self._is_on = alone and self._means is not None
        self._need = need
        if self._is_on:
            self.membership.enter(need)

    def end(self, dependant: object) -> None:
        """It does not any more, and the others need not wait for this rank."""
        if self._is_on and dependant in self._dependants:
            self.leave("it detached its model", in_order=True)
            self._is_on, self._need = False, None
        self._dependants.discard(dependant)

    @property
    def is_apart(self) -> bool:
        """True from `let_go` until this rank exchanges with the others again."""
        return self.apart_until > 0

    @property
    def is_broken(self) -> bool:
        """True from `let_go` to `reform`."""
        return self.apart_until == inf

    def let_go(self, failure: TransportError) -> None:
        """Break all connections because of `failure`, until `reform`; raises it if this world ends with a lost rank.

        The others notice it when they next wait for this rank, and do the same.
        """
        if not self.is_possible:
            raise failure
        if not self.is_broken:
            self.membership.miss(failure)
            self._break()

    def _break(self) -> None:
        self._transport.abort()
        self.apart_until = inf
        self.room += 1

    def submit(self, task: Callable[[], T]) -> Pending[T]:
        """Run `task` on the lane; where it loses a rank, ``result()`` raises that, and the lane goes on."""
        return Spared(self._lane.submit(lambda: self._spared(task)))

    def _spared(self, task: Callable[[], T]) -> T | Failed:
        if self._begun is not None and (self._begun != self.membership.generation or self.is_outside):
            return Failed(PeerLost("the others connected anew before this was begun", Place(self._transport.rank)))
        try:
            value = task()
            if self._is_on:
                self._transport.wait()
        except LOST as failure:
            self.let_go(failure)
            return Failed(failure)
        return value

    def together(self, work: Callable[[], T]) -> T:
        """What `work`, a collective, gives; done again by all who are left if a rank is lost. Not on the lane."""
        if not self._is_on:
            return work()
        tries = Tries(have_backups=self._need is not None)
        self.calls.enter()
        while True:
            self._require_next()  # before the others connect with this rank and wait for it, and after
            begun = self._lane.submit(self._settle).result()
            self._require_next()
            self._begun = begun[0]  # before `work` looks who the members are
            failure: TransportError | None = None
            try:
                value = work()
            except LOST as error:
                failure = error
            finally:
                self._begun = None
            if self._all_came_through(failure, *begun):
                if self._need is not None:
                    self.calls.complete()
                return value  # all have one, or the vote would say so
            if tries.are_in_vain(failure or self._of_another(), begun[1]) and failure is not None:
                self._give_up()
                raise failure

    def _of_another(self) -> PeerLost:
        return PeerLost("another rank lost one in what all did together", Place(self._transport.rank))

    def _give_up(self) -> None:
        """Leave to the others, who may hear each other, what is in vain here."""
        self._require_next()  # they may have done it while this process was stopped
        if self._need is not None:
            self.calls.give_up()
            with suppress(TransportError):
                self.submit(lambda: self._stand_aside("it gave up what all do together")).result()

    @contextmanager
    def coming(self, what: str, *, counts: bool) -> Iterator[None]:
        """See `Calls.coming`; who comes too late keeps nobody waiting. Not on the lane."""
        with self._aside_if_behind(), self._apart_if_odd(), self.calls.coming(what, counts=counts):
            yield

    def _require_next(self) -> None:
        if self._need is not None:
            with self._aside_if_behind():
                self.calls.require_next()

    @contextmanager
    def _aside_if_behind(self) -> Iterator[None]:
        try:
            yield
        except LeftBehind:
            with suppress(TransportError):  # the store's, which ends what comes next
                self.submit(self._leave_them_alone).result()
            raise

    @contextmanager
    def _apart_if_odd(self) -> Iterator[None]:
        """What comes next here must not meet what the others are in."""
        try:
            yield
        except DisagreementError as refusal:
            if self.is_possible:
                failure = PeerLost(str(refusal), Place(self._transport.rank))
                with suppress(TransportError):
                    self.submit(lambda: self.let_go(failure)).result()
            raise

    def _leave_them_alone(self) -> None:
        """Who are amid a call that this rank has missed: they would wait for it in the rest."""
        if self._is_amid_another_call():
            self._stand_aside("it came to what all do together when a part of that was over")

    def _stand_aside(self, why: str) -> None:
        """Be no member any more, until it comes back."""
        if not self.is_outside:
            self.membership.stand_aside(why)
            self._break()
            self.is_outside = True

    def _settle(self) -> tuple[int, Sequence[int]]:
        """Do not wait for the next period; all who are left come to the same call, whatever their steps.

        Gives the generation, and its members: others may call this rank to the next one at once.
        """
        if self._need is not None:
            self.be_in(0)
        elif self.is_broken:
            self.reform(self.step)
        self.apart_until = 0
        return self.membership.generation, self.membership.members

    def part(self, failure: TransportError) -> None:
        """Find out who is left after `failure`, without waiting for the next period. Not on the lane."""

        def come_together() -> None:
            self.let_go(failure)
            self.reform(self.step)
            self.reach(self.step)

        self._lane.submit(come_together).result()

    def reform(self, step: int) -> None:
        """Connect anew with those who are left, before `step`; collective, waits for all whom nobody misses.

        Raises `LeftBehind` if they did not wait for this rank.
        """
        if not self.is_broken:
            self._transport.abort()  # or who waits for this rank would not come
        begin, tries = inf, Tries(have_backups=self._need is not None)
        while begin == inf:
            lost, members = self.membership.lost, self.membership.members
            begin = self._assembled(step)
            self.membership.tell_since(lost, members)
            self.membership.require_enough(step)
            try:
                self._connect()
            except TransportError as failure:  # one was lost on the way, or stopped
                if isinstance(failure, TransportClosed) or tries.are_in_vain(failure, self.membership.members):
                    raise
                self.membership.miss(failure)
                begin = inf
        self.apart_until, self.is_outside = begin, False
        self.generation = self.membership.generation
        self.room += 1

    def _assembled(self, step: int) -> int:
        try:
            return self.membership.assemble(step, self._transport.timeout_s, self.require_open)
        except LeftBehind:
            self.is_outside = True
            raise

    def rejoin(self, step: int) -> None:
        """Be one of those who exchange again, who connect anew for it; between steps of this rank."""
        while self.is_outside:
            if self._is_called_back():
                self.calls.overtake()
            with suppress(LeftBehind):  # they were connecting just then
                self.reform(step)
        self.apart_until = 0

    def call(self, generation: int) -> None:
        """Others connect anew, and wait for this rank; from any thread. Raises `TransportClosed`."""
        self._called = max(self._called, generation)
        self._lane.submit(self._come)

    @property
    def is_called(self) -> bool:
        """True if others wait for this rank to connect anew."""
        return self._called > self.membership.generation and not self.is_outside

    def _is_called_back(self) -> bool:
        """True if the others, who connect anew, are too few without this rank, which is outside."""
        self.membership.follow()
        return self._called > self.membership.generation

    def _come(self) -> None:
        if self.is_outside and self._is_called_back():
            self.rejoin(self.step)
        elif self.is_called:
            with suppress(LeftBehind):
                self.reform(self.step)
            self.apart_until = 0

    def note(self, generation: int) -> None:
        """Others are in `generation`; on the lane."""
        self.is_outside = self.is_outside or self.membership.generation < generation

    def be_in(self, generation: int) -> int:
        """Connect anew until this rank's generation is at least that one; in which it is then. On the lane."""
        while self.membership.generation < generation or self.is_broken or self.is_called or self.is_outside:
            with suppress(LeftBehind):
                self._rejoin_between_calls() if self.is_outside else self.reform(self.step)
            self.apart_until = 0
        return self.membership.generation

    def _rejoin_between_calls(self) -> None:
        """Whom others wait for in the rest of a call of all, whose beginning it missed, takes it from them."""
        self.calls.outlast(lambda: self._is_amid_another_call() and not self._is_called_back(), self.require_open)
        self.rejoin(self.step)

    def _is_amid_another_call(self) -> bool:
        return self.calls.is_missing_one and self._are_gathered()

    def _are_gathered(self) -> bool:
        return self._need is not None and self._need.are_gathered()

    def reach(self, step: int) -> None:
        """This rank is at `step`."""
        if step >= self.apart_until:
            self.apart_until = 0

    def _connect(self) -> None:
        members, generation = self.membership.members, self.membership.generation

        def is_over() -> bool:  # those who connect have gone on to another, or one of them is gone
            return self._called > generation or self.membership.are_gone(members)

        if (means := self._means) is not None and len(members) > 1:
            reconnect(self._transport, means.connect, self._connect_gpu, generation, members, is_over)
        self.require_open()

    def require_open(self) -> None:
        """Who gave this world up meanwhile ended what was there then."""
        if self._lane.failure is not None:
            self._transport.abort()
            raise TransportClosed("the world was given up", Place(self._transport.rank)) from self._lane.failure

    def _all_came_through(self, failure: TransportError | None, generation: int, members: Sequence[int]) -> bool:
        """Has nobody seen a `failure` in what all did together? The same answer everywhere.

        Asked of the `generation` in which it ran, and its `members`: since then others may have called this rank to the
        next one, where they do it again.
        """
        is_whole = self._votes.outcome(failure is None, generation, members, self.calls.mark)
        if not is_whole:
            loss = failure or self._of_another()
            self._lane.submit(lambda: self._let_go_of(generation, loss)).result()
        return is_whole

    def _let_go_of(self, generation: int, loss: TransportError) -> None:
        """Unless the others have called this rank to a later one."""
        if self.membership.generation == generation:
            self.let_go(loss)

    def leave(self, why: str, *, in_order: bool = False) -> None:
        """The others need not wait for this rank; from any thread, and safe to call twice."""
        self.membership.leave(why, in_order=in_order)

    def close(self) -> None:
        """After `leave`: hold the store no more."""
        self._means = None
        self._votes.close()
        self.calls.close()
        self.membership.close()
