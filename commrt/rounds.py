# SPDX-License-Identifier: Apache-2.0
"""Carries messages of gossip: to the partner of a step and from another, on the world's lane."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from time import perf_counter
from typing import Generic, TypeVar

import torch
from torch import Tensor

from commrt.algorithms.gossip import Gossip
from commrt.answer import Answer
from commrt.bundles import Message
from commrt.errors import DisagreementError, TransportError
from commrt.executor import bind
from commrt.handover import Pending
from commrt.kernels.layout import STAMP_NUMEL
from commrt.mixing import promise
from commrt.program import Program, program
from commrt.proof import prove
from commrt.recording import within_range
from commrt.report import Span
from commrt.schedule import Schedule
from commrt.stamp import complaint
from commrt.survival import LOST
from commrt.transport.protocol import Exchange, Group, Moment, Parcel
from commrt.world import World

__all__ = ["Rounds"]

T = TypeVar("T")

KEPT = 64
"""Programs and exchanges that are kept, of the steps and partners used last."""


class Rounds:
    """Everything here runs on the lane, in order of submission.

    Where a rank is lost, this one keeps what it has until the next period begins. Those who are left then connect anew.
    """

    def __init__(self, world: World, algorithm: Gossip) -> None:
        self.world, self._wanted = world, algorithm
        self.members = tuple(world.members)
        """Who takes part."""
        self.algorithm = algorithm.among(len(self.members)) if world.lost else algorithm
        self._program = lru_cache(KEPT)(self._proven_program)
        self._bound = lru_cache(KEPT)(self._bind)

    def schedule(self, step: int) -> Schedule:
        """The exchange of `step`, proven."""
        schedule = self.algorithm.schedule(step, len(self.members))
        prove(schedule, promise(self.algorithm, schedule))
        return schedule

    def submit(self, message: Message, bundle: int, step: int) -> Answer[Span]:
        """Exchange `message`."""
        return self.world.lane.submit(lambda: self._carry(message, bundle, step))

    def submit_broadcast(self, flat: Tensor, step: int) -> Pending[Span]:
        """Overwrite `flat` with the first member's."""
        return self.submit_task(lambda: self._broadcast(flat, step))

    def submit_task(self, task: Callable[[], T]) -> Pending[T]:
        """Run `task`; if that loses a rank, ``result()`` raises it, and the lane goes on."""
        return _Spared(self.world.lane.submit(lambda: self._spared(task)))

    def _spared(self, task: Callable[[], T]) -> T | TransportError:
        try:
            value = task()
            self.world.transport.wait()
        except LOST as failure:
            self.world.survival.let_go(failure)
            return failure
        return value

    def together(self, work: Callable[[], T], step: int) -> T:
        """What `work`, a collective after `step` steps, gives; done again by all who are left if a rank is lost."""
        if not self.world.survival.is_possible:
            return work()
        while True:
            self.world.lane.submit(lambda: self._settle(step)).result()
            failure: TransportError | None = None
            try:
                value = work()
            except LOST as error:
                failure = error
            if self.world.survival.all_came_through(failure):
                return value  # all have one, or the vote would say so

    def part(self, failure: TransportError, step: int) -> None:
        """Find out who is left after `failure`, without waiting for the next period."""

        def come_together() -> None:
            self.world.survival.let_go(failure)
            self._reform(step)
            self.world.survival.reach(step)

        self.world.lane.submit(come_together).result()

    def all_have(self, mark: str, step: int) -> bool:
        """True if all members came with the same `mark`; on the lane."""
        try:
            self.world.require_same_now(mark, self.members, step)
        except DisagreementError:
            return False
        return True

    def _settle(self, step: int) -> None:
        """Do not wait for the next period; all who are left come to the same call, whatever their steps."""
        if self.world.survival.is_broken:
            self._reform(step)
        self.world.survival.apart_until = 0

    def release(self) -> None:
        """Let go of all memory once nothing is in flight."""
        self._bound.cache_clear()
        self._program.cache_clear()

    def _carry(self, message: Message, bundle: int, step: int) -> Span:
        begin_s = perf_counter()
        nbytes_sent = 0
        with within_range(self.world.recorder, "bundle", number=bundle, step=step, algorithm="gossip"):
            if bundle == 0 and self.world.survival.is_apart:
                self._come_back(step)
            if not self.world.survival.is_apart:
                nbytes_sent = self._exchange(message, bundle, step)
        return Span(bundle, begin_s, perf_counter(), nbytes_sent)

    def _come_back(self, step: int) -> None:
        if self.world.survival.is_broken and step % self.algorithm.period(len(self.members)) == 0:
            self._reform(step)
        self.world.survival.reach(step)

    def _reform(self, step: int) -> None:
        self.world.survival.reform(step)
        self.members = tuple(self.world.members)
        self.algorithm = self._wanted.among(len(self.members))
        self.release()

    def _exchange(self, message: Message, bundle: int, step: int) -> int:
        """Bytes sent."""
        mine = self._program(self.algorithm.schedule(step, len(self.members)))
        if not mine.hops:
            return 0
        run, nbytes_sent, share = self._bound(mine, message)
        try:
            run(Moment(step, bundle))
            self.world.transport.wait()  # a GPU would mix what never came
        except LOST as failure:
            self.world.survival.let_go(failure)
            return 0
        _require_same_claim(message, bundle)
        message.share, message.heard = share, tuple(leg.peer for hop in mine.hops for leg in hop.recvs)
        return nbytes_sent

    def _proven_program(self, schedule: Schedule) -> Program:
        prove(schedule, promise(self.algorithm, schedule))
        return program(schedule.over(self.members, world=self.world.size), self.world.rank)

    def _bind(self, mine: Program, message: Message) -> tuple[Exchange, int, float]:
        """What runs the exchange, the bytes that it sends, and the share with which what it brings counts."""
        return self._in_rows(mine, message) if self.algorithm.within > 1 else self._with_partner(mine, message)

    def _with_partner(self, mine: Program, message: Message) -> tuple[Exchange, int, float]:
        """What arrives is kept apart: mixed on the wire, it would be rounded to the wire."""
        (hop,) = mine.hops
        sends = [Parcel(leg.peer, message.sent) for leg in hop.sends]
        recvs = [Parcel(leg.peer, message.received) for leg in hop.recvs]
        exchange = self.world.transport.bind(Group(sends, recvs))
        return exchange, len(sends) * message.sent.nbytes, hop.recvs[0].weight

    def _in_rows(self, mine: Program, message: Message) -> tuple[Exchange, int, float]:
        """What is received is what the row and its partner make of what was sent."""
        bound = bind(mine, message.received, self.world.transport, None, self.world.lane.streams)

        def run(moment: Moment) -> None:
            torch.mul(message.sent, 1 / self.algorithm.within, out=message.received)
            bound.run(moment, self.world.recorder)

        return run, bound.nbytes_sent, 1.0

    def _broadcast(self, flat: Tensor, step: int) -> Span:
        begin_s = perf_counter()
        nbytes_sent = self.world.broadcast_now(flat, self.members, Moment(step, "state"))
        return Span("state", begin_s, perf_counter(), nbytes_sent)


class _Spared(Generic[T]):
    """An answer that may be the loss of a rank."""

    def __init__(self, answer: Answer[T | TransportError]) -> None:
        self._answer = answer

    def result(self) -> T:
        """See `Pending`."""
        value = self._answer.result()
        if isinstance(value, TransportError):
            raise value
        return value


def _require_same_claim(message: Message, bundle: int) -> None:
    """Raise `DisagreementError` if the partner is elsewhere."""
    ours, theirs = message.sent[:STAMP_NUMEL], message.received[:STAMP_NUMEL]
    if not torch.equal(ours != 0, theirs != 0):
        raise DisagreementError(f"bundle {bundle} met another one of a partner: {complaint(ours + theirs)}")
