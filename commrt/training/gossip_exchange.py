# SPDX-License-Identifier: Apache-2.0
"""Exchange the buckets of a gossip step with the partners of that step; answer partners after the data has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from threading import Event
from time import monotonic, perf_counter

import torch
from torch.distributed import Store

from commrt.algorithms.gossip import Gossip
from commrt.buckets.engine import Span
from commrt.buckets.layout import explain_mismatch
from commrt.buckets.weight_bucket import Message
from commrt.errors import DeadlineExceeded, DisagreementError, PeerLost, Place
from commrt.kernels.layout import HEADER_NUMEL
from commrt.membership.store_client import STORE_ANSWER_S, call_store, parse, require
from commrt.program import Program, member_program
from commrt.proof.replay import prove
from commrt.proof.spec import gossip_mean
from commrt.runtime.elastic import LOST
from commrt.runtime.executor import bind
from commrt.runtime.recording import within_range
from commrt.runtime.world import World
from commrt.schedule import Schedule
from commrt.threads.future import Future
from commrt.training.broadcast_state import WorldBroadcaster
from commrt.transport.protocol import Exchange, P2PGroup, P2PMessage, Tag

__all__ = ["GossipExchange", "Progress"]

KEPT = 64
"""How many programs and bound exchanges are kept, of those used last."""


class GossipExchange(WorldBroadcaster):
    """Exchange buckets with partners, in the order of submission.

    When a rank is lost, the others form a new generation. It starts at the latest step of all its members. A member
    that has not reached that step trains alone until then.
    """

    def __init__(self, world: World, algorithm: Gossip) -> None:
        super().__init__(world)
        self._attached = algorithm
        self._generation = world.elastic.generation.number
        self._program = lru_cache(KEPT)(self._proven_program)
        self._bound = lru_cache(KEPT)(self._bind)

    @property
    def algorithm(self) -> Gossip:
        """The algorithm for the ranks that are left."""
        return self._attached.among(len(self.world.members)) if self.world.lost else self._attached

    def schedule(self, step: int) -> Schedule:
        """Return the schedule of `step`, proven."""
        schedule = self.algorithm.schedule(step, len(self.members))
        prove(schedule, gossip_mean(self.algorithm, schedule))
        return schedule

    def submit(self, message: Message, bucket: int, step: int) -> Future[Span]:
        """Exchange `message`, the content of `bucket`, with the partners of `step`. On the training thread."""
        if bucket == 0:  # from here on a generation that starts at `step` is too early for this rank
            self.world.elastic.submitted_steps = step + 1
        return self.world.comm_thread.submit(lambda: self._carry(message, bucket, step))

    def release(self) -> None:
        """Free all memory; call it when no exchange is in flight."""
        self._bound.cache_clear()
        self._program.cache_clear()

    def _carry(self, message: Message, bucket: int, step: int) -> Span:
        elastic = self.world.elastic
        begin_s, nbytes_sent = perf_counter(), 0
        with within_range(self.world.recorder, "bucket", number=bucket, step=step, algorithm="gossip"):
            if bucket == 0:
                elastic.next_step = step + 1
            if elastic.takes_part(step):
                nbytes_sent = self._exchange(message, bucket, step)
        return Span(bucket, begin_s, perf_counter(), nbytes_sent)

    def _exchange(self, message: Message, bucket: int, step: int) -> int:
        """Return how many bytes this rank sent; `message.share` stays 0 where a partner was lost."""
        elastic = self.world.elastic
        if self._generation != elastic.generation.number:
            self._generation = elastic.generation.number
            self.release()  # it was bound to connections of another generation
        program = self._program(self.algorithm.schedule(step, len(self.members)))
        if not program.hops:
            return 0
        try:
            run, nbytes_sent, share = self._bound(program, message)
            run(Tag(step, bucket))
            self.world.transport.wait()  # before a GPU mixes what may never have come
        except LOST as failure:
            elastic.recover(failure)
            return 0
        elastic.progress()
        _require_same_header(message, bucket)
        message.share, message.heard = share, tuple(leg.peer for hop in program.hops for leg in hop.recvs)
        return nbytes_sent

    def _proven_program(self, schedule: Schedule) -> Program:
        prove(schedule, gossip_mean(self.algorithm, schedule))
        return member_program(schedule, self.members, self.world.rank, self.world.size)

    def _bind(self, program: Program, message: Message) -> tuple[Exchange, int, float]:
        """Return the exchange, the bytes that it sends, and the weight of what it receives."""
        transport, within = self.world.transport, self.algorithm.within
        if within == 1:  # received apart, as mixing on the wire would round to the wire's dtype
            (hop,) = program.hops
            sends = [P2PMessage(leg.peer, message.sent) for leg in hop.sends]
            recvs = [P2PMessage(leg.peer, message.received) for leg in hop.recvs]
            nbytes_sent = len(sends) * message.sent.nbytes
            return transport.bind(P2PGroup(sends, recvs)), nbytes_sent, hop.recvs[0].weight
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


LOOK_S = 0.005
"""Between two reads of the store."""
RUNNING = "running"


class Progress:
    """Steps of all `members`, each of which trains until its data ends. Collective; needs a store prefix of its own."""

    def __init__(
        self,
        store: Store,
        rank: int,
        members: Callable[[], Sequence[int]],
        timeout_s: float,
        are_gone: Callable[[list[int]], bool],
    ) -> None:
        self._store, self._rank, self._members, self._timeout_s = store, rank, members, timeout_s
        self._are_gone = are_gone
        self._set("ended", RUNNING)

    def begin(self, steps: int) -> None:
        """Record that this rank has begun `steps` steps; costs one store operation."""
        self._set("begun", str(steps))

    def outlast(self, steps: int) -> Iterator[int]:
        """Record that this rank has ended after `steps` steps, then yield each further step as another rank begins it.

        Returns when all have ended and no rank has done more. Raises `DeadlineExceeded` with the ranks that began no
        step within the timeout, `PeerLost` if one is gone.
        """
        self._set("ended", str(steps))
        heard_s, before = monotonic(), {0: ""}
        while True:
            ends, begun = self._all("ended"), self._all("begun")
            running = [rank for rank, end in ends.items() if end == RUNNING]
            done = [int(end) for end in ends.values() if end != RUNNING]
            if max([*done, *(int(begun[rank]) for rank in running if rank in begun)]) > steps:
                yield steps
                steps += 1
            elif not running:
                return
            if begun != before:
                heard_s, before = monotonic(), begun
            self._wait(running, heard_s)

    def last(self) -> int:
        """Return the lowest rank of those that did most steps; call it once all have ended."""
        ends = {rank: int(end) for rank, end in self._all("ended").items()}
        return max(ends, key=lambda rank: (ends[rank], -rank))

    def _wait(self, running: list[int], heard_s: float) -> None:
        if running and self._are_gone(running):
            raise PeerLost("a rank that had not ended is gone: look at its output", Place(self._rank))
        if monotonic() - heard_s > self._timeout_s:
            what = (
                f"ranks {running} began no step within {self._timeout_s:g} s, and have not ended: look at their output"
            )
            raise DeadlineExceeded(what, Place(self._rank, next(iter(running), None)))
        Event().wait(LOOK_S)

    def _set(self, what: str, value: str) -> None:
        call_store(lambda: self._store.set(f"{what}/{self._rank}", value), self._timeout_s + STORE_ANSWER_S, self._rank)

    def _all(self, what: str) -> dict[int, str]:
        keys = {rank: f"{what}/{rank}" for rank in self._members()}
        limit_s = self._timeout_s + STORE_ANSWER_S
        said = call_store(lambda: {rank: self._store.get(key) for rank, key in keys.items()}, limit_s, self._rank)
        return {rank: parse(keys[rank], word, _word) for rank, word in said.items()}


def _word(said: bytes) -> str:
    word = said.decode()
    require(word == RUNNING or int(word) >= 0)
    return word
