# SPDX-License-Identifier: Apache-2.0
"""Exchange the buckets of a gossip step with the partners of that step; answer partners after the data has ended."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from time import perf_counter

import numpy as np
import torch

from commrt.algorithms.gossip import Gossip
from commrt.buckets.engine import Span
from commrt.buckets.layout import explain_mismatch
from commrt.buckets.weight_bucket import Message, WeightBucket
from commrt.elastic.elastic_membership import make_elastic
from commrt.errors import DisagreementError, UsageError
from commrt.kernels.layout import HEADER_NUMEL
from commrt.program import Program, member_program
from commrt.proof.replay import prove
from commrt.proof.spec import promise
from commrt.runtime.executor import bind
from commrt.runtime.membership import LOST
from commrt.runtime.reading import bind_reading, bind_receiving
from commrt.runtime.recording import within_range
from commrt.runtime.world import World
from commrt.schedule import Schedule
from commrt.threads.future import Future
from commrt.training.broadcast_state import WorldBroadcaster
from commrt.transport.protocol import Exchange, P2PGroup, P2PMessage, Tag

__all__ = ["GossipExchange"]

KEPT = 64
"""Proofs and bound exchanges that are kept, of those used last."""
STEPS_KEPT = 2
"""Steps whose programs are kept: all buckets have the same one."""


class GossipExchange(WorldBroadcaster):
    """Exchange buckets with partners, in the order of submission.

    When a rank is lost, the others form a new generation. It starts at the latest step of all its members. A member
    that has not reached that step trains alone until then.
    """

    def __init__(self, world: World, algorithm: Gossip) -> None:
        super().__init__(world)
        self._attached = algorithm
        self.membership = make_elastic(world)
        """That of the world; it goes on without lost ranks."""
        self._generation = self._shared = self.membership.number
        self._ranks = np.array(self.members)
        self._proven = lru_cache(KEPT)(self._prove)
        self._program = lru_cache(STEPS_KEPT)(self._program_of)
        self._bound = lru_cache(KEPT)(self._bind)

    @property
    def algorithm(self) -> Gossip:
        """The algorithm for the ranks that are left."""
        return self._attached.among(len(self.world.members)) if self.world.lost else self._attached

    def prove_all(self) -> Schedule:
        """Prove the exchanges of a period, of which all later ones are permutations; return the first.

        Raises `UsageError` for an algorithm whose `schedule` says otherwise than its `round`, which is what runs.
        """
        algorithm, ranks = self.algorithm, len(self.members)
        self._prove(algorithm.schedule(0, ranks))
        for step in range(algorithm.period(ranks) + 1):  # the last one is of another permutation
            schedule, order = algorithm.round(step, ranks)
            self._proven(schedule)
            if schedule.over(order).digest() != algorithm.schedule(step, ranks).digest():
                raise UsageError(f"{algorithm}: schedule({step}, {ranks}) is another than round() makes: override both")
        return algorithm.schedule(0, ranks)

    def share(self, buckets: Sequence[WeightBucket]) -> None:
        """Let partners of this host read the messages of `buckets`, where they can; collective.

        After a rank was lost the others allocate anew, and GPUs go on through NCCL.
        """
        self._shared = self._generation
        messages = [message for bucket in buckets for message in bucket.messages()]
        buffers = [buffer for message in messages for buffer in (message.sent, message.received)]
        windows = self.world.comm_thread.submit(lambda: self.world.transport.share(buffers)).result()
        for number, message in enumerate(messages):
            message.windows = windows[2 * number : 2 * number + 2]

    def submit(self, message: Message, bucket: int, step: int) -> Future[Span]:
        """Exchange `message`, the content of `bucket`, with the partners of `step`. On the training thread."""
        if bucket == 0:  # from here on a generation that starts at `step` is too early for this rank
            self.membership.submitted_steps = step + 1
        with within_range(self.world.recorder, "submit", number=bucket, step=step):
            return self.world.comm_thread.submit(lambda: self._carry(message, bucket, step))

    def release(self) -> None:
        """Free all memory; call it when no exchange is in flight."""
        self._bound.cache_clear()
        self._program.cache_clear()

    def _carry(self, message: Message, bucket: int, step: int) -> Span:
        membership = self.membership
        begin_s, nbytes_sent = perf_counter(), 0
        with within_range(self.world.recorder, "bucket", number=bucket, step=step, algorithm="gossip"):
            if bucket == 0:
                membership.next_step = step + 1
            if membership.takes_part(step):
                nbytes_sent = self._exchange(message, bucket, step)
        return Span(bucket, begin_s, perf_counter(), nbytes_sent)

    def _exchange(self, message: Message, bucket: int, step: int) -> int:
        """Return how many bytes this rank sent; `message.share` stays 0 where a partner was lost."""
        membership = self.membership
        if self._generation != membership.number:
            self._generation, self._ranks = membership.number, np.array(self.members)
            self.release()  # it was bound to connections of another generation
        program = self._program(step)
        if not program.hops:
            return 0
        try:
            run, nbytes_sent, share = self._bound(program, message)
            run(Tag(step, bucket))
            self.world.transport.wait()  # before a GPU mixes what may never have come
        except LOST as failure:
            membership.recover(failure)
            return 0
        membership.progress()
        _require_same_header(message, bucket)
        message.share, message.received_from = share, tuple(leg.peer for hop in program.hops for leg in hop.recvs)
        return nbytes_sent

    def _program_of(self, step: int) -> Program:
        schedule, order = self.algorithm.round(step, len(self.members))
        self._proven(schedule)
        return member_program(schedule, self._ranks[order].tolist(), self.world.rank, self.world.size)

    def _prove(self, schedule: Schedule) -> None:
        prove(schedule, promise(self.algorithm, schedule))

    def _bind(self, program: Program, message: Message) -> tuple[Exchange, int, float]:
        """Return the exchange, the bytes that it sends, and the weight of what it receives."""
        transport, within = self.world.transport, self.algorithm.within
        windows = message.windows if self._generation == self._shared else ()
        if within == 1:  # received apart, as mixing on the wire would round to the wire's dtype
            (hop,) = program.hops
            sends = [P2PMessage(leg.peer, message.sent) for leg in hop.sends]
            recvs = [P2PMessage(leg.peer, message.received) for leg in hop.recvs]
            nbytes_sent = len(sends) * message.sent.nbytes
            group = P2PGroup(sends, recvs)
            exchange = bind_receiving(group, windows[0], transport) if windows else transport.bind(group)
            return exchange, nbytes_sent, hop.recvs[0].weight
        if windows:
            bound = bind_reading(program, message.received, windows[1], transport)
        else:
            bound = bind(program, message.received, transport, None, self.world.comm_thread.streams)

        def run(tag: Tag) -> None:
            torch.mul(message.sent, 1 / within, out=message.received)
            bound.run(tag, self.world.recorder)

        return run, bound.nbytes_sent, 1.0


def _require_same_header(message: Message, bucket: int) -> None:
    """Raise `DisagreementError` if the partner sent another bucket, step or model."""
    ours, theirs = message.sent[:HEADER_NUMEL], message.received[:HEADER_NUMEL]
    if not torch.equal(ours != 0, theirs != 0):
        raise DisagreementError(
            f"gossip: bucket {bucket} does not match what the partner sent: {explain_mismatch(ours + theirs)}"
        )
