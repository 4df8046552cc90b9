# SPDX-License-Identifier: Apache-2.0
"""Exchange the buckets of a gossip step with the partners of that step; answer partners after the data has ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from time import perf_counter

import numpy as np
import torch

from commrt.algorithms.gossip import Gossip
from commrt.buckets.engine import Span
from commrt.buckets.layout import Header, explain_mismatch
from commrt.buckets.weight_bucket import Message, Received, WeightBucket
from commrt.elastic.elastic_membership import make_elastic
from commrt.elastic.generations import Generation
from commrt.errors import DisagreementError, UsageError
from commrt.kernels.layout import HEADER_NUMEL
from commrt.program import Program, permuted_program
from commrt.proof.replay import prove
from commrt.proof.spec import promise
from commrt.runtime.executor import bind
from commrt.runtime.membership import LOST
from commrt.runtime.reading import bind_reading, bind_receiving
from commrt.runtime.recording import within_range
from commrt.runtime.world import World
from commrt.schedule import Schedule
from commrt.transport.protocol import Exchange, P2PGroup, P2PMessage, Tag

__all__ = ["GossipExchange"]

KEPT = 64
"""Programs that are kept with their bound exchanges, of those used last."""
STEPS_KEPT = 2
"""Steps of which the program is known: all buckets of a step have the same one."""

Bound = tuple[Exchange, int, float]
"""An exchange, the bytes that it sends, and the weight of what it receives."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """What this rank exchanges in a step."""

    program: Program
    sources: tuple[int, ...]
    """The ranks that it receives from."""
    bound: dict[Message, Bound] = field(default_factory=dict)


class GossipExchange:
    """Exchange buckets with partners, in the order of submission.

    The exchanges of a period are proven when the ranks become known, and a step only gives each rank another's part.

    When a rank is lost, the others form a new generation. It starts at the latest step of all its members. A member
    that has not reached that step trains alone until then.
    """

    def __init__(self, world: World, algorithm: Gossip, number: int) -> None:
        self.world, self._attached, self._number = world, algorithm, number
        self.staleness = algorithm.staleness
        self.membership = make_elastic(world)
        """That of the world; it goes on without lost ranks."""
        self._generation = self._shared = -1
        self._plan = lru_cache(KEPT)(self._plan_of)
        self._plan_at = lru_cache(STEPS_KEPT)(self._plan_of_step)

    def prove(self) -> Schedule:
        """Prove the exchanges of a period, of which all later ones are permutations; return the first.

        Raises `UsageError` for an algorithm whose `schedule` says otherwise than what runs.
        """
        self._adopt(self.membership.generation)
        algorithm, ranks = self._algorithm, len(self.members)
        first = algorithm.schedule(0, ranks)
        prove(first, promise(algorithm, first))
        for step in range(len(self._rounds) + 1):  # the last one is of another permutation
            renamed = self._rounds[step % len(self._rounds)].over(algorithm.order(step, ranks))
            if renamed.digest() != algorithm.schedule(step, ranks).digest():
                raise UsageError(
                    f"{algorithm}: schedule({step}, {ranks}) is another than rounds() and order() make: override all"
                )
        return first

    def _adopt(self, generation: Generation) -> None:
        """Exchange among the members of `generation` from now on."""
        self.release()  # it was bound to connections of another generation
        self._generation, self.members = generation.number, generation.ranks
        self._ranks, ranks = np.array(self.members), len(self.members)
        self._algorithm = self._attached.among(ranks) if generation.lost else self._attached
        self._rounds = self._algorithm.rounds(ranks)
        for schedule in self._rounds:
            prove(schedule, promise(self._algorithm, schedule))

    def share(self, buckets: Sequence[WeightBucket]) -> None:
        """Let partners of this host read the messages of `buckets`, where they can; collective.

        After a rank was lost the others allocate anew, and GPUs go on through NCCL.
        """
        self._shared = self._generation
        messages = [message for bucket in buckets for message in bucket.free]
        buffers = [buffer for message in messages for buffer in (message.sent, message.received)]
        windows = self.world.comm_thread.submit(lambda: self.world.transport.share(buffers)).result()
        for number, message in enumerate(messages):
            message.windows = windows[2 * number : 2 * number + 2]

    def send(self, bucket: WeightBucket, step: int) -> None:
        """Exchange `bucket` as it is now with the partners of `step`. On the training thread."""
        if bucket.index == 0:  # from here on a generation that starts at `step` is too early for this rank
            self.membership.submitted_steps = step + 1
        header = Header(0, self._number, 0, step, bucket.index, 0)
        message = bucket.packed(header, self.membership.memory_epoch, self.world.transport.allocate)
        with within_range(self.world.recorder, "submit", number=bucket.index, step=step):
            bucket.sent(self.world.comm_thread.submit(lambda: self._carry(message, bucket.index, step)))

    def release(self) -> None:
        """Free all memory; call it when no exchange is in flight."""
        self._plan.cache_clear()
        self._plan_at.cache_clear()

    def _carry(self, message: Message, bucket: int, step: int) -> Received:
        begin_s, membership, sources = perf_counter(), self.membership, tuple[int, ...]()
        nbytes_sent, share = 0, 0.0
        with within_range(self.world.recorder, "bucket", number=bucket, step=step, algorithm="gossip"):
            if bucket == 0:
                membership.next_step = step + 1
            if (generation := membership.generation).start <= step:
                if generation.number != self._generation:
                    self._adopt(generation)
                plan = self._plan_at(step)
                try:
                    nbytes_sent, share = self._exchange(plan, message, bucket, step)
                    sources = plan.sources
                except LOST as failure:
                    membership.recover(failure)
        return Received(Span(bucket, begin_s, perf_counter(), nbytes_sent), share, sources)

    def _exchange(self, plan: _Plan, message: Message, bucket: int, step: int) -> tuple[int, float]:
        """Return how many bytes this rank sent, and the weight of what it received."""
        if not plan.program.hops:
            return 0, 0.0
        if (bound := plan.bound.get(message)) is None:
            bound = plan.bound[message] = self._bind(plan.program, message)
        run, nbytes_sent, share = bound
        run(Tag(step, bucket))
        if message.received.is_cuda:
            self.world.transport.wait()  # before it mixes what may never have come
        self.membership.progress()
        _require_same_header(message, bucket)
        return nbytes_sent, share

    def _plan_of_step(self, step: int) -> _Plan:
        order = self._algorithm.order(step, len(self.members))
        return self._plan(self._rounds[step % len(self._rounds)], order.tobytes())

    def _plan_of(self, schedule: Schedule, order: bytes) -> _Plan:
        members = self._ranks[np.frombuffer(order, np.int64)]
        program = permuted_program(schedule, members, self.world.rank, self.world.size)
        return _Plan(program, tuple(each.peer for hop in program.hops for each in hop.recvs))

    def _bind(self, program: Program, message: Message) -> Bound:
        transport, within = self.world.transport, self._algorithm.within
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
