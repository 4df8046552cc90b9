# SPDX-License-Identifier: Apache-2.0
"""Carries buckets: pack, run the schedule, unpack, in order, on the world's lane."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from commrt.algorithms import halving_doubling
from commrt.buckets import Bucket
from commrt.collective import all_reduce
from commrt.executor import BoundProgram, bind, scratch_numel
from commrt.program import program
from commrt.proof import Proof, prove
from commrt.schedule import Algorithm, Schedule
from commrt.transport.protocol import Moment
from commrt.world import World

__all__ = ["Engine", "Span"]


@dataclass(frozen=True, slots=True)
class Span:
    """What the lane did for one bucket, in seconds of ``time.perf_counter``."""

    bucket: int | str
    begin_s: float
    end_s: float
    nbytes_sent: int


class Engine:
    """Averages buckets over the members of a step; everything here runs on the lane, in order of submission.

    Programs are kept per schedule *object* and members: an algorithm that returns the same object for the
    same answer is bound once.
    """

    def __init__(self, world: World, algorithm: Algorithm, buckets: Sequence[Bucket]) -> None:
        self.world = world
        self.algorithm = algorithm
        self.buckets = buckets
        self.members = tuple(range(world.size))
        """Who takes part in the step; changes only by a roll call."""
        self._proofs: dict[Schedule, Proof] = {}
        self._programs: dict[tuple[Schedule, tuple[int, ...]], list[BoundProgram]] = {}
        self._roll = torch.zeros(world.size)

    def schedule(self, step: int) -> Schedule:
        """What training step `step` runs when everybody takes part; proven."""
        return self._proven(self.algorithm.schedule(step, self.world.size))

    def submit(self, bucket: Bucket, step: int) -> Future[Span]:
        """Average `bucket` over the members; its gradients must not change until the future is done."""
        return self.world.lane.submit(lambda: self._carry(bucket, step))

    def submit_broadcast(self, flat: Tensor, step: int) -> Future[Span]:
        """Overwrite `flat` with the first member's."""
        return self.world.lane.submit(lambda: self._broadcast(flat, step))

    def submit_roll_call(self, present: bool, step: int) -> Future[None]:
        """Ask all ranks who still has data; the answer is `members` from here on (empty if nobody)."""
        return self.world.lane.submit(lambda: self._call_roll(present, step))

    def _carry(self, bucket: Bucket, step: int) -> Span:
        begin_s = perf_counter()
        if len(self.members) == 1:
            return Span(bucket.index, begin_s, begin_s, 0)
        bucket.pack(1 / len(self.members))
        bound = self._bound(step)[bucket.index]
        bound.run(Moment(step, bucket.index))
        bucket.unpack()
        return Span(bucket.index, begin_s, perf_counter(), bound.nbytes_sent)

    def _bound(self, step: int) -> list[BoundProgram]:
        schedule = self.algorithm.schedule(step, len(self.members))
        key = schedule, self.members
        if key not in self._programs:
            self._programs[key] = self._bind(schedule)
        return self._programs[key]

    def _proven(self, schedule: Schedule) -> Schedule:
        if schedule not in self._proofs:
            self._proofs[schedule] = prove(schedule, all_reduce(schedule.ranks, schedule.chunks))
        return schedule

    def _bind(self, schedule: Schedule) -> list[BoundProgram]:
        """Bind the schedule to every bucket; scratch is shared, since buckets travel one at a time."""
        mine = program(self._proven(schedule).over(self.members, world=self.world.size), self.world.rank)
        scratch: dict[torch.dtype, Tensor] = {}
        for bucket in self.buckets:
            need = scratch_numel(mine, bucket.wire.numel())
            if bucket.wire.dtype not in scratch or scratch[bucket.wire.dtype].numel() < need:
                scratch[bucket.wire.dtype] = self.world.transport.allocate(need, bucket.wire.dtype, bucket.wire.device)
        return [bind(mine, b.wire, self.world.transport, scratch[b.wire.dtype]) for b in self.buckets]

    def _broadcast(self, flat: Tensor, step: int) -> Span:
        begin_s = perf_counter()
        nbytes_sent = self.world.broadcast_now(flat, self.members, Moment(step, "state"))
        return Span("state", begin_s, perf_counter(), nbytes_sent)

    def _call_roll(self, present: bool, step: int) -> None:
        self._roll.zero_()
        self._roll[self.world.rank] = float(present)
        schedule = halving_doubling.all_reduce(self.world.size)
        self.world.run_now(schedule, self._roll, Moment(step, "roll call"))
        self.members = tuple(self._roll.nonzero().flatten().tolist())
