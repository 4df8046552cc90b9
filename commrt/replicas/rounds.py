# SPDX-License-Identifier: Apache-2.0
"""Carries messages of gossip: to the partner of a step and from another, on the world's lane."""

from __future__ import annotations

from functools import lru_cache
from time import perf_counter

import torch
from torch import Tensor

from commrt.algorithms.gossip import Gossip
from commrt.errors import DisagreementError
from commrt.kernels.layout import STAMP_NUMEL
from commrt.program import Program, among
from commrt.proving.mixing import promise
from commrt.proving.proof import prove
from commrt.recording import within_range
from commrt.replicas.bundles import Message
from commrt.replicas.report import Span
from commrt.runtime.elastic import LOST
from commrt.runtime.executor import bind
from commrt.runtime.world import World
from commrt.schedule import Schedule
from commrt.threads.answer import Answer, Pending
from commrt.transport.protocol import Exchange, Group, Moment, Parcel
from commrt.wire.stamp import complaint

__all__ = ["Rounds"]

KEPT = 64
"""Programs and exchanges that are kept, of the steps and partners used last."""


class Rounds:
    """Everything here runs on the lane, in order of submission.

    When a rank is lost, all members form a new generation. A rank that is behind trains alone until that one starts.
    """

    def __init__(self, world: World, algorithm: Gossip) -> None:
        self.world, self._wanted = world, algorithm
        self.first: int | None = None
        """Who broadcasts, if that is not the first of those who take part."""
        self._generation = world.elastic.generation.number
        self._program = lru_cache(KEPT)(self._proven_program)
        self._bound = lru_cache(KEPT)(self._bind)

    @property
    def members(self) -> tuple[int, ...]:
        """Who takes part."""
        members = tuple(self.world.members)
        if self.first is None:
            return members
        return (self.first, *(rank for rank in members if rank != self.first))

    @property
    def algorithm(self) -> Gossip:
        """What those who take part run."""
        return self._wanted.among(len(self.world.members)) if self.world.lost else self._wanted

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
        return self.world.elastic.submit(lambda: self._broadcast(flat, step))

    def release(self) -> None:
        """Let go of all memory once nothing is in flight."""
        self._bound.cache_clear()
        self._program.cache_clear()

    def _carry(self, message: Message, bundle: int, step: int) -> Span:
        begin_s = perf_counter()
        nbytes_sent = 0
        with within_range(self.world.recorder, "bundle", number=bundle, step=step, algorithm="gossip"):
            if bundle == 0:
                self.world.elastic.next_step = step + 1
            if self.world.elastic.takes_part(step):
                nbytes_sent = self._exchange(message, bundle, step)
        return Span(bundle, begin_s, perf_counter(), nbytes_sent)

    def _exchange(self, message: Message, bundle: int, step: int) -> int:
        """Bytes sent."""
        if self._generation != (generation := self.world.elastic.generation.number):
            self._generation = generation
            self.release()  # it was bound to other connections
        mine = self._program(self.algorithm.schedule(step, len(self.members)))
        if not mine.hops:
            return 0
        try:
            run, nbytes_sent, share = self._bound(mine, message)
            run(Moment(step, bundle))
            self.world.transport.wait()  # a GPU would mix what never came
        except LOST as failure:
            self.world.elastic.recover(failure)
            return 0
        self.world.elastic.progress()
        _require_same_claim(message, bundle)
        message.share, message.heard = share, tuple(leg.peer for hop in mine.hops for leg in hop.recvs)
        return nbytes_sent

    def _proven_program(self, schedule: Schedule) -> Program:
        prove(schedule, promise(self.algorithm, schedule))
        return among(schedule, self.members, self.world.rank, self.world.size)

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


def _require_same_claim(message: Message, bundle: int) -> None:
    """Raise `DisagreementError` if the partner is elsewhere."""
    ours, theirs = message.sent[:STAMP_NUMEL], message.received[:STAMP_NUMEL]
    if not torch.equal(ours != 0, theirs != 0):
        raise DisagreementError(f"bundle {bundle} met another one of a partner: {complaint(ours + theirs)}")
