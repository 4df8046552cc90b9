# SPDX-License-Identifier: Apache-2.0
"""The exchange of weights by gossip: one message to a partner for each bucket and step.

The thread that trains sends a bucket, and notes in it and in its message that it is in flight. The
communication thread proves, binds and runs; it also follows the membership when ranks are lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from time import perf_counter
from typing import NamedTuple, cast

import numpy as np
import torch

from commrt.algorithms.gossip import Gossip
from commrt.buckets.header import Header, explain_mismatch
from commrt.buckets.riders import NOTHING_LEAVES, Riders
from commrt.buckets.span import Span
from commrt.errors import DisagreementError
from commrt.gossip.stop import NO_STOP, Stop
from commrt.gossip.weight_bucket import Message, Received, WeightBucket
from commrt.kernels.layout import HEADER_NUMEL
from commrt.program import Program, permuted_program
from commrt.proof.replay import prove
from commrt.proof.spec import promise
from commrt.runtime.executor import Scratch, bind
from commrt.runtime.generation import Generation
from commrt.runtime.membership import LOST
from commrt.runtime.reading import bind_reading, bind_receiving
from commrt.runtime.world import World
from commrt.schedule import IntArray, Schedule
from commrt.threads.recording import NOTHING, Fact, within_range
from commrt.transport.protocol import P2PGroup, P2PMessage, Tag, Window

PROVEN_KEPT = 64
"""Schedules that count as proven."""


class BoundExchange(NamedTuple):
    """How this rank's part in a schedule exchanges one message."""

    run: Callable[[Tag], object]
    nbytes_sent: int = 0
    share: float = 0.0
    """The weight of what is received; 0 if nothing is."""
    sources: Sequence[int] = ()
    """The ranks from which it comes."""


def _nothing(_: Tag) -> None:
    pass


NOTHING_DONE = BoundExchange(_nothing)


@dataclass(frozen=True, slots=True)
class _Group:
    """Who gossips in a generation, and by which schedules."""

    generation: int
    ranks: IntArray
    algorithm: Gossip


class GossipExchange:
    """Exchange buckets with partners, in the order of submission.

    Ranks change places after each period, so most schedules are others with ranks renamed: these
    are proven when the members become known, and a step only gives each rank another's part.

    When a rank is lost, the others form a new generation. It starts at the latest step of all its
    members. A member that has not reached that step trains alone until then.

    From `share` to `release` the communication thread alone changes the fields: the group of the
    generation, and all that is bound for it. The thread that trains reads the group in
    `steps_to_all`. Written here of others: a message's `step`, `answer`, `received` and what rides
    with it, `WeightBucket.in_flight` and `sent`, and of the membership its `failures` and, by its
    methods, which steps were submitted and have begun.
    """

    def __init__(self, world: World, algorithm: Gossip, number: int) -> None:
        self._world = world
        self._attached = algorithm
        self._number = number
        self._prove = lru_cache(PROVEN_KEPT)(self._prove_anew)
        # of `sent` and `received` of each message, where peers of the generation can read them
        self._windows: dict[Message, Sequence[Window]] = {}
        self._scratch = Scratch()
        self._program_at = lru_cache(1)(self._find_program)  # each bucket of a step asks
        self._adopt(world.membership.generation)

    def schedule(self, step: int) -> Schedule:
        """Return the schedule of `step` among the members."""
        return self._group.algorithm.schedule(step, len(self._group.ranks))

    def _adopt(self, generation: Generation) -> None:
        """Prove the exchanges of a period among the members of `generation`, which runs now."""
        self.release()  # it was bound to connections of another generation
        ranks = len(generation.ranks)
        algorithm = self._attached.among(ranks) if ranks != self._world.founders else self._attached
        self._group = _Group(generation.number, np.array(generation.ranks), algorithm)
        for step in range(algorithm.period(ranks)):
            self._prove(_unrenamed(self.schedule(step))[0])

    def _prove_anew(self, schedule: Schedule) -> None:
        prove(schedule, promise(self._group.algorithm, schedule))

    def share(self, buckets: Sequence[WeightBucket]) -> None:
        """Let partners of this host read the messages of `buckets`, where they can; collective.

        After a rank was lost the others allocate anew, and GPUs go on through NCCL.
        """
        if self._world.size == 1:
            return
        messages = [message for bucket in buckets for message in bucket.messages()]
        buffers = [buffer for message in messages for buffer in (message.sent, message.received)]
        windows = self._world.comm_thread.submit(
            lambda: self._world.transport.share(buffers)
        ).result()
        for number, message in enumerate(messages):
            self._windows[message] = windows[2 * number : 2 * number + 2]

    def steps_to_all(self) -> int:
        """Return after how many steps all ranks know what one passes on.

        In a whole period each rank that knows it tells all its partners. However the ranks are
        permuted, so many periods as a period has rounds reach everybody. What came is passed on in
        the next step but one, or later. Ranks may come to all places meanwhile, which costs some a
        mix: so twice as many steps where there are more.
        """
        places = self._world.size
        founders = self._world.founders
        group = self._group
        staleness = group.algorithm.staleness
        if places > founders:
            rounds = self._attached.among(places).period(places)
            return 2 * rounds * (rounds + 3 + staleness) + 1
        rounds = group.algorithm.period(len(group.ranks))
        return rounds * (rounds + 3 + staleness) + 1

    def send(self, bucket: WeightBucket, step: int, stop: Stop) -> None:
        """Exchange `bucket` as it is now with the partners of `step`, and pass on `stop`.

        On the training thread.
        """
        membership = self._world.membership
        if bucket.index == 0:
            membership.submit_step(step)
        number = self._number
        header = Header(
            late=0, model=number, optimizer_steps=0, step=step, bucket=bucket.index, settings=0
        )
        message = bucket.pack(header)
        message.step = step
        if message.said is not None and (stop != NO_STOP or message.said.is_loaded):
            message.said.load(NOTHING_LEAVES if stop == NO_STOP else stop.leaving())
        comm_thread = self._world.comm_thread
        listener = comm_thread.listener
        facts: dict[str, Fact] = {"number": bucket.index, "step": step}
        with NOTHING if listener is None else within_range(listener, "submit", **facts):
            message.answer = comm_thread.submit(partial(self._carry, message, bucket.index, step))
        bucket.in_flight.append(message)
        bucket.sent += 1

    def release(self) -> None:
        """Free all memory; call it when no exchange is in flight."""
        self._prove.cache_clear()
        self._program_at.cache_clear()
        self._windows = {}
        self._scratch = Scratch()

    def _carry(self, message: Message, bucket: int, step: int) -> Received:
        """Exchange `message` on the communication thread, unless this rank trains alone."""
        begin_s = perf_counter()
        membership = self._world.membership
        done = NOTHING_DONE
        listener = self._world.comm_thread.listener
        facts: dict[str, Fact] = {"number": bucket, "step": step, "algorithm": "gossip"}
        with NOTHING if listener is None else within_range(listener, "bucket", **facts):
            if bucket == 0:
                membership.start_no_earlier(step + 1)
            if (generation := membership.generation).start <= step:
                if generation.number != self._group.generation:
                    self._adopt(generation)
                try:
                    done = self._exchange(message, Tag(step, bucket))
                except LOST as failure:
                    membership.recover(failure)
        return Received(
            Span(bucket, begin_s, perf_counter(), done.nbytes_sent), done.share, done.sources
        )

    def _exchange(self, message: Message, tag: Tag) -> BoundExchange:
        """Exchange `message`, and check what came; return the exchange."""
        program = self._program_at(tag.step)
        if not program.hops:
            return NOTHING_DONE
        # anew in each step, as ranks change places
        exchange = self._bind(program, message)
        if message.said is not None:
            if message.digests is not None:
                message.said.add_digest(message.digests[0])
            if message.said.is_loaded or message.said.digest is not None:
                message.said.write()
        exchange.run(tag)
        if message.received.is_cuda:
            self._world.transport.wait()  # before it mixes what may never have come
        self._world.membership.failures = 0
        ours = message.sent[:HEADER_NUMEL]
        theirs = message.received[:HEADER_NUMEL]
        if not torch.equal(ours != 0, theirs != 0):
            why = explain_mismatch(ours + theirs)
            raise DisagreementError(
                f"gossip: bucket {tag.bucket} does not match what the partner sent: {why}"
            )
        if message.digests is not None:
            said = cast("Riders", message.heard).read()["digest"][0]
            if int(said) != message.digests[1].now():
                peer = exchange.sources[0]
                raise DisagreementError(
                    f"watch: in step {tag.step} other weights came from rank {peer} than it"
                    " sent: bits were flipped on the way; look at the network between these ranks,"
                    " and start again from a checkpoint"
                )
        return exchange

    def _find_program(self, step: int) -> Program:
        """Return this rank's part in `step`, the same for all buckets."""
        proven, order = _unrenamed(self.schedule(step))
        self._prove(proven)
        ranks = self._group.ranks[order]
        return permuted_program(proven, ranks, self._world.rank, self._world.size)

    def _bind(self, program: Program, message: Message) -> BoundExchange:
        transport = self._world.transport
        within = self._group.algorithm.within
        windows = self._windows[message] if message in self._windows else ()  # noqa: SIM401  # a call less
        sources = [leg.peer for hop in program.hops for leg in hop.recvs]
        if within == 1:  # received apart, as mixing on the wire would round to the wire's dtype
            (hop,) = program.hops
            sends = [P2PMessage(leg.peer, message.sent) for leg in hop.sends]
            recvs = [P2PMessage(leg.peer, message.received) for leg in hop.recvs]
            nbytes_sent = len(sends) * message.sent.nbytes
            group = P2PGroup(sends, recvs)
            exchange = (
                bind_receiving(group, windows[0], transport) if windows else transport.bind(group)
            )
            return BoundExchange(exchange, nbytes_sent, hop.recvs[0].weight, sources)
        if windows:
            bound = bind_reading(
                program, message.received, windows[1], transport, scratch=self._scratch
            )
        else:
            bound = bind(
                program, message.received, transport, self._scratch, self._world.comm_thread.streams
            )

        def run(tag: Tag) -> None:
            torch.mul(message.sent, 1 / within, out=message.received)
            bound.run(tag, self._world.comm_thread.listener)

        return BoundExchange(run, bound.nbytes_sent, 1.0, sources)


def _unrenamed(schedule: Schedule) -> tuple[Schedule, IntArray]:
    """Return what `schedule` renames the ranks of, or itself, and the order of ranks there."""
    return schedule.renames or (schedule, np.arange(schedule.ranks))
